"""Signatures of the operators of ``torch.library``: their parameters, in order, and the call that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attngen.dtypes import DESCALES, SCALAR_TYPES
from attngen.lang.variant import Variant
from attngen.runtime.arguments.given import KEPT, NO_ARGUMENTS, Given, maker
from attngen.runtime.launch.tile_map import TileMap

if TYPE_CHECKING:
    from attngen.runtime.arguments.scalars import Number

#: Parameters of operators of each form before the variant's own arguments, and after them, in torch's schema language.
LEADING = {
    "dense": ("Tensor q", "Tensor k", "Tensor v"),
    "varlen": (
        "Tensor q", "Tensor k", "Tensor v", "Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "SymInt max_seqlen_q",
        "SymInt max_seqlen_k",
    ),
    "paged": (
        "Tensor q", "Tensor k_pages", "Tensor v_pages", "Tensor page_table", "Tensor seqused_k",
        "Tensor? cu_seqlens_q", "SymInt? max_seqlen_q",
    ),
}  # fmt: skip
_DESCALES = tuple(f"Tensor? {name}=None" for name in DESCALES)
_TRAILING = (
    "float? softmax_scale", "Tensor? seqused_k", "Tensor? tile_map", "str layout", "str? backend",
    "bool deterministic=False", *_DESCALES, "ScalarType? out_dtype=None",
)  # fmt: skip
TRAILING = {
    "dense": _TRAILING,
    "varlen": _TRAILING,
    "paged": (
        "float? softmax_scale",
        "str page_layout",
        "SymInt? num_splits",
        "SymInt? split_size",
        "str? backend",
        *_DESCALES,
    ),
}

#: Parameters that a call has under another name.
_FIELDS = {"k_pages": "k", "v_pages": "v", "page_layout": "layout"}


def _fields(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the field of a call that each parameter gives."""
    names = (part.split()[1].partition("=")[0] for part in parts)
    return tuple(_FIELDS.get(name, name) for name in names)


_BEFORE = {form: _fields(parts) for form, parts in LEADING.items()}
_AFTER = {form: _fields(parts) for form, parts in TRAILING.items()}

#: Makes the call of a form, of these fields, its own arguments and its variant; and the defaults of the last fields.
_MAKERS = {
    form: maker(" ".join((*_BEFORE[form], *_AFTER[form], "arguments variant return_lse")), form=form)
    for form in LEADING
}
_LEFT_OUT = {form: tuple(Given._field_defaults[name] for name in after) for form, after in _AFTER.items()}


@dataclass(frozen=True, slots=True)
class Signature:
    """Variant arguments of an operator: names and defaults in order of the schema."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    defaults: tuple[Number | None, ...]  # of the scalars; None where the caller has to say
    differentiable: tuple[str, ...]  # float tensors that the spec wants a gradient of
    max_logits: bool  # the log-sum-exp has an axis more, with the largest logits

    @classmethod
    def of(cls, variant: Variant) -> Signature:
        """Return the signature of a variant's operators."""
        return cls(
            tensors=tuple(t.name for t in variant.tensors),
            scalars=tuple(s.name for s in variant.arguments),
            defaults=tuple(s.default for s in variant.arguments),
            differentiable=tuple(t.name for t in variant.tensors if t.grad),
            max_logits=variant.max_logits,
        )

    def given(self, variant: str, form: str, arguments: Sequence[object]) -> Given:
        """Return the call that the arguments of an operator make; torch leaves out those that have their default."""
        names = (*self.tensors, *self.scalars)
        start = first_own(form)
        end = start + len(names)
        own = dict(zip(names, arguments[start:end], strict=True)) if names else NO_ARGUMENTS
        after = (*arguments[end:], *_LEFT_OUT[form][len(arguments) - end :])
        given = _MAKERS[form](*arguments[:start], *after, own, variant, KEPT)
        words: Any = given.tile_map
        return given if words is None else given._replace(tile_map=TileMap.of_words(words))


def first_own(form: str) -> int:
    """Return the place of the first of the variant's own arguments."""
    return len(LEADING[form])


def arguments_of(given: Given, own: Sequence[object]) -> list[object]:
    """Return the arguments of the operator of a call; ``own`` are the variant's. May be traced."""
    before = [getattr(given, field) for field in _BEFORE[given.form]]
    after = [getattr(given, field) for field in _AFTER[given.form]]
    return [*before, *own, *(one.words if isinstance(one, TileMap) else one for one in after)]


def parameters_of(variant: Variant, form: str) -> str:
    """Return the parameters of a variant's operators in torch's schema language, without parentheses."""
    own = [f"Tensor {t.name}" for t in variant.tensors]
    own += [f"{SCALAR_TYPES[s.dtype].torch_schema} {s.name}" for s in variant.arguments]
    return ", ".join([*LEADING[form], *own, *TRAILING[form]])
