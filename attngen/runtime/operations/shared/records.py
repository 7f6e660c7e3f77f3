"""Arguments of helper calls: each helper declares them once, in a record.

The fields of a record are the arguments of its operator, in order; ``Annotated`` also has the type of each in the
schema language of ``torch.library``. Types are those of a call that is right; nothing is checked yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Annotated, NamedTuple, get_args, get_type_hints

from torch import Tensor

TensorArgument = Annotated[Tensor, "Tensor"]
OptionalTensor = Annotated[Tensor | None, "Tensor?"]
Flag = Annotated[bool, "bool"]
Text = Annotated[str, "str"]
Integer = Annotated[int, "int"]
#: An integer that may be the symbol of an extent in a compiled program.
Size = Annotated[int, "SymInt"]


class Fields:
    """The arguments of a record: ``tensors`` in the order of their addresses, those of them that are ``written``, and
    ``settings``, all others."""

    def __init__(self, record: type[NamedTuple]) -> None:
        hints = get_type_hints(record, include_extras=True)
        self._kinds: dict[str, str] = {name: get_args(hints[name])[1] for name in record._fields}
        self._defaults: dict[str, object] = record._field_defaults
        self.tensors = tuple(name for name, kind in self._kinds.items() if kind.startswith("Tensor"))
        self.written = tuple(name for name, kind in self._kinds.items() if "!" in kind)
        self.settings = tuple(name for name in self._kinds if name not in self.tensors)
        self.tensors_of: Callable[..., tuple[Tensor | None, ...]] = _getter(self.tensors)
        self.settings_of: Callable[..., tuple[object, ...]] = _getter(self.settings)

    def schema(self, results: str) -> str:
        """The schema of the helper's operator."""
        parameters = (
            f"{kind} {name}" + (f"={self._defaults[name]}" if name in self._defaults else "")
            for name, kind in self._kinds.items()
        )
        return f"({', '.join(parameters)}) -> {results}"


def _getter(names: tuple[str, ...]) -> Callable[[NamedTuple], tuple[Tensor | None, ...]]:
    """Function that gets fields of a record as a tuple."""
    if len(names) == 1:
        one = attrgetter(*names)
        return lambda record: (one(record),)
    return attrgetter(*names)


def addresses_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """Addresses as a launch takes them: 0 for a tensor that is not given."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
