"""A call as the caller wrote it: one frozen value that goes from the public function to the launch.

Nothing in it is checked; ``binding`` makes a ``Call`` of it. Every call makes one, so it is a tuple: a frozen dataclass
takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from attngen.lang.variant import Variant

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: ``return_lse`` of what keeps the log-sum-exp for a backward, or returns both whatever the caller asks for: of weights
#: that have none it takes any tensor of its shape.
KEPT = "kept"

#: ``return_lse`` of a call that wants the largest logits beside the log-sum-exp, as the variant's kernels give them.
MAX_LOGITS = "max_logits"

#: Those of a call whose variant takes none.
NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


class Given(NamedTuple):
    """A call before any check. A field that its form does not have, or that the caller left out, is None; types are
    those of a call that is right.

    The order counts: first the tensors of the call itself (``TENSORS``), which stand in the same places in a list of
    addresses; then the variant's own; then what holds no tensor (``settings_of``), at whose end stands what a prepared
    call depends on (``keyed_of``).
    """

    q: Tensor
    k: Tensor  # of a paged call the pages of keys, and those of values
    v: Tensor
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    seqused_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    out: Tensor | None = None  # where the output goes
    arguments: Mapping[str, object] = NO_ARGUMENTS  # the variant's own scalars and tensors
    tile_map: object = None  # a ``TileMap``
    variant: str | Variant = "full"
    softmax_scale: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool | str = False  # or KEPT, MAX_LOGITS
    deterministic: bool = False
    form: str = "dense"  # dense | varlen | paged
    layout: str = "bshd"  # bshd | bhsd, varlen, or of a paged call NHD | HND
    backend: str | None = None
    package: str | None = None
    num_splits: int | None = None
    split_size: int | None = None
    out_dtype: torch.dtype | None = None  # of the output, where q is quantized
    sm_margin: int = 0  # multiprocessors that a split-KV launch leaves to another launch
    #: Queries of the sequences that a paged call attends for, at least and at most, if they are not 0.
    least_queries: int = 0
    most_queries: int = 0


_PLACES = {name: place for place, name in enumerate(Given._fields)}

#: The tensors of a call itself, by name, and how many of them a call of each form may have: the first ones.
TENSORS: tuple[str, ...] = Given._fields[: _PLACES["arguments"]]
_COUNTS = {"dense": _PLACES["seqused_k"] + 1, "varlen": _PLACES["cu_seqlens_k"] + 1, "paged": len(TENSORS)}

#: By the form of a call: the places of those beside q, k and v, with the output's, and a function that returns those
#: that are read.
PLACES = {form: tuple(sorted({*range(3, count), _PLACES["out"]})) for form, count in _COUNTS.items()}
OTHERS: dict[str, Callable[[Given], tuple[Tensor | None, ...]]] = {
    form: itemgetter(slice(3, count)) for form, count in _COUNTS.items()
}

#: Return the tensors of a call itself.
tensors_of: Callable[[Given], tuple[Tensor | None, ...]] = itemgetter(slice(len(TENSORS)))
#: Return what of a call holds no tensor, and what of that a prepared call depends on whatever it computes.
settings_of: Callable[[Given], tuple[object, ...]] = itemgetter(slice(_PLACES["variant"], None))
keyed_of: Callable[[Given], tuple[object, ...]] = itemgetter(slice(_PLACES["max_seqlen_q"], None))

#: The settings of a call that all calls of its kind have in common: all fields without a tensor, lengths aside.
kind_settings_of: Callable[[Given], tuple[object, ...]] = itemgetter(slice(_PLACES["return_lse"], None))

#: Makes a call of its fields in their order.
_make: Callable[[type[Given], tuple[object, ...]], Given] = tuple.__new__


def maker(names: str, **constants: str) -> Callable[..., Given]:
    """A function that makes a call of fields, in the order of ``names``. Others are ``constants``, or have their
    defaults. It takes as long as a tuple, ``Given`` with names several times as long."""
    defaults = dict.fromkeys(Given._fields, "None")
    defaults |= {name: repr(value) for name, value in (Given._field_defaults | constants).items()}
    return _function(names, defaults | {"arguments": "NO_ARGUMENTS"}, "")


def changer(names: str) -> Callable[..., Given]:
    """A function that makes a call of another one and of other values of fields, in the order of ``names``."""
    return _function(names, {name: f"given[{place}]" for name, place in _PLACES.items()}, "given")


def _function(names: str, others: Mapping[str, str], first: str) -> Callable[..., Given]:
    """Written out, so that nothing is looked up by its name when it is called."""
    given = names.split()
    unknown = set(given) - set(Given._fields)
    assert not unknown, unknown
    fields = ", ".join(name if name in given else others[name] for name in Given._fields)
    text = f"lambda {', '.join([first] * bool(first) + given)}: _make(Given, ({fields}))"
    function: Callable[..., Given] = eval(compile(text, __file__, "eval"), globals())
    return function


def of_parts(tensors: Sequence[Tensor | None], arguments: Mapping[str, object], settings: Sequence[object]) -> Given:
    """The call of which these are ``tensors_of``, ``arguments`` and ``settings_of``, without a tile map."""
    return _make(Given, (*tensors, arguments, None, *settings))
