"""The scalars and tensors of a variant in a plan: checked as a call checks them, and cut to the rows of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.lang.variant import Variant
from attngen.parallel.local import LocalTensor
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.shapes import bind


def passed(variant: Variant) -> list[str]:
    """The names that calls of a variant pass, tensors first."""
    return [*(tensor.name for tensor in variant.tensors), *(scalar.name for scalar in variant.arguments)]


def read_by_mask(variant: Variant) -> tuple[str, ...]:
    """The names that a mask reads and a call passes, tensors first."""
    variables, loaded = variant.uses(variant.mask)
    tensors = [tensor for tensor in variant.tensors if tensor.name in loaded]
    extents = {extent for tensor in tensors for extent in tensor.shape}
    scalars = [s.name for s in variant.arguments if s.name in variables or s.name in extents]
    return (*(tensor.name for tensor in tensors), *scalars)


def values_of_mask(
    variant: Variant, seqlen: int, batch: int, heads: tuple[int, int], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that the mask of a dense variant reads, with defaults, tensors on the CPU; checked. Raises
    CallError."""
    read = read_by_mask(variant)
    defaults = {s.name: s.default for s in variant.arguments if s.default is not None}
    known = {name: values.get(name, defaults.get(name)) for name in read}
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise CallError(
            f"{variant.name}: a plan needs what the mask reads, and did not get {', '.join(missing)}; allowed: "
            f"{', '.join(f'{name}=…' for name in missing)} as arguments of the plan"
        )
    known = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in known.items()}
    row = torch.zeros(8, dtype=torch.float32, device="cpu")
    q, k = row.expand(batch, seqlen, heads[0], 8), row.expand(batch, seqlen, heads[1], 8)
    scalars = tuple(s for s in variant.scalars if s.name in known or s.const is not None)
    part = replace(
        variant, score=None, sink=None, scalars=tuple(replace(s, min=_own(s.min), max=_own(s.max)) for s in scalars),
        tensors=tuple(tensor for tensor in variant.tensors if tensor.name in known), let=(), dropout=False,
    )  # fmt: skip
    call = bind(part, q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
                arguments=known)  # fmt: skip
    debugging.check_facts(call)
    return {**call.scalars, **{name: tensor.cpu() for name, tensor in call.tensors.items()}}


def _own(bound: Any) -> Any:
    """A bound of a scalar, unless it names an extent of a tensor that may not be there."""
    return None if isinstance(bound, str) else bound


def refuse_unknown(variants: Mapping[str, Variant], names: Mapping[str, Any]) -> None:
    """Raise CallError for a name that no variant declares."""
    declared = [name for variant in variants.values() for name in passed(variant)]
    for name in names:
        if name not in declared:
            takes = ", ".join(dict.fromkeys(declared)) or "no arguments of its own"
            raise CallError(f"{', '.join(variants)}: unknown argument '{name}'{suggest(name, declared)}; takes {takes}")


class Cutter:
    """Cuts the tensors of a call to what a rank holds.

    ``rows`` and ``keys`` are positions in the sequence; ``keys_of`` and ``all_of`` exchange a tensor of which each rank
    has its own tokens along an axis, for that of the keys that lie here, or for all tokens.
    """

    def __init__(
        self, seqlen: int, rows: Tensor, keys: Tensor, keys_of: Callable[[Tensor, int], Tensor],
        all_of: Callable[[Tensor, int], Tensor],
    ) -> None:  # fmt: skip
        self._seqlen, self._places = seqlen, {"rows": rows, "keys": keys}
        self._exchanged = {"keys": keys_of, "all": all_of}

    def values(self, cuts: Mapping[str, LocalTensor], values: Mapping[str, Any], variant: str) -> dict[str, Tensor]:
        """The tensors that a local variant reads, from those of the variant. Raises CallError."""
        cut_tensors = {}
        for name, cut in cuts.items():
            value = values.get(cut.of)
            if not isinstance(value, Tensor):
                raise CallError(f"{variant}: tensor '{cut.of}' must be a torch.Tensor, got {type(value).__name__}")
            for axis, part in cut.axes:
                value = self._cut(cut.of, value, axis, part)
            cut_tensors[name] = value
        return cut_tensors

    def _cut(self, name: str, value: Tensor, axis: int, part: str) -> Tensor:
        length, held = value.shape[axis] if axis < value.dim() else -1, len(self._places["rows"])
        if length == self._seqlen:
            return value if part == "all" else value.index_select(axis, self._places[part].to(value.device))
        if length == held:
            return value if part == "rows" else self._exchanged[part](value, axis)
        raise CallError(
            f"'{name}' has shape {tuple(value.shape)}; allowed along axis {axis}: all {self._seqlen} tokens, or the "
            f"{held} of this rank"
        )
