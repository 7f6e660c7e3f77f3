"""Index scores: arguments, their checks, and the scores in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.eager import evaluate
from attngen.lang.ir import names
from attngen.lang.variant import Variant
from attngen.operations import BLOCK_SCORES, INDEX_SCORES
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import Call, refuse_unreadable
from attngen.runtime.arguments.paging import Paging, as_rows, bind_paged
from attngen.runtime.arguments.shapes import bind, check_rank, check_written
from attngen.runtime.operations.shared.records import Fields, OptionalTensor, TensorArgument
from attngen.runtime.reference.eager import (
    CHUNK_ELEMENTS,
    CHUNK_ELEMENTS_ELSEWHERE,
    OneSequence,
    lengths,
    names_of,
    one_sequence,
)
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import Resolved

#: Features of variants that index scores have.
SERVES = ("mask",)

#: Names that a mask may not read: all heads share the scores, and there is no softmax.
_WITHOUT_MEANING = ("h", "hk", "kv_heads", "softmax_scale")


class IndexScores(NamedTuple):
    """A call as its caller made it: see ``index_scores``, and with ``block`` see ``block_scores``, which has no weights
    and no scales. ``arguments`` are the variant's own, by name."""

    q: TensorArgument
    k: TensorArgument
    weights: OptionalTensor
    k_scale: OptionalTensor
    seqused_k: OptionalTensor
    cu_seqlens_q: OptionalTensor
    page_table: OptionalTensor
    out: Annotated[Tensor | None, "Tensor(a!)?"]
    max_seqlen_q: Annotated[int | None, "SymInt?"]
    variant: Annotated[str | Variant, "str"]
    package: Annotated[str | None, "str"]
    arguments: Annotated[tuple[tuple[str, object], ...], "str"]
    block: Annotated[int | None, "int?"] = None

    @property
    def does(self) -> str:
        """Name of the call."""
        return INDEX_SCORES if self.block is None else BLOCK_SCORES


class _FieldsOfVariant(Fields):
    """Arguments of a call, followed by its variant's."""

    def __init__(self) -> None:
        super().__init__(IndexScores)
        own = attrgetter(*self.tensors)

        def tensors_of(call: IndexScores) -> tuple[Tensor | None, ...]:
            if not call.arguments:
                return own(call)
            return (*own(call), *(value for _, value in call.arguments if isinstance(value, Tensor)))

        def settings_of(call: IndexScores) -> tuple[object, ...]:
            others = (part for name, value in call.arguments for part in (name, _setting(value)))
            return (call.max_seqlen_q, call.variant, call.package, call.block, *others)

        self.tensors_of, self.settings_of = tensors_of, settings_of


def _setting(value: object) -> object:
    return None if isinstance(value, Tensor) else value


FIELDS = _FieldsOfVariant()


@dataclass(frozen=True, slots=True)
class Bound:
    """A checked call, bound to its variant and kernels: an attention call whose values are its keys."""

    call: Call
    resolved: Resolved


def check(given: IndexScores) -> Bound:
    """Check shapes, dtypes and devices. Raises CallError, and NoKernelError for an unknown variant."""
    arguments = dict(given.arguments)
    refuse_unreadable({**{name: getattr(given, name) for name in FIELDS.tensors}, **arguments})
    resolved = find(given.variant, given.package)
    _check_variant(resolved.variant, given.does)
    block = given.block
    if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 1):
        raise CallError(f"block must be a positive integer, got {block!r}")
    paged = given.page_table is not None
    check_rank("k", given.k, 3, ("pages x page_size" if paged else "batch x seqlen_k") + " x head_dim")
    k = given.k.unsqueeze(2)
    used = given.seqused_k
    if paged:
        paging = Paging(given.page_table, given.cu_seqlens_q, given.max_seqlen_q)
        call = bind_paged(resolved.variant, as_rows(given.q), k, k, paging, seqused_k=used, arguments=arguments)
    else:
        for name in ("cu_seqlens_q", "max_seqlen_q"):
            if getattr(given, name) is not None:
                raise CallError(f"{name} goes with page_table: without, sequences have as many queries")
        check_rank("q", given.q, 4, "batch x seqlen_q x heads x head_dim")
        call = bind(resolved.variant, given.q, k, k, None, seqused_k=used, arguments=arguments)
    if call.kv_dtype != call.dtype:
        raise CallError(f"q has dtype {given.q.dtype}, but k has {given.k.dtype}")
    floats = torch.float64 if given.q.dtype == torch.float64 else torch.float32
    wanted = {
        "weights": tuple(given.q.shape[:-1]), "k_scale": tuple(given.k.shape[:2]), "out": scores_shape(call, block),
    }  # fmt: skip
    for name, shape in wanted.items():
        tensor = getattr(given, name)
        if tensor is None and (name != "weights" or block is not None):
            continue
        if not isinstance(tensor, Tensor):
            raise CallError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != floats or tuple(tensor.shape) != shape or tensor.device != call.device:
            raise CallError(
                f"{name} must be {floats} of shape {shape} on {call.device}, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if given.out is not None:
        check_written("out", given.out)
    return Bound(call, resolved)


def _check_variant(variant: Variant, does: str) -> None:
    """Raise CallError for a variant with parts that index scores would ignore."""
    variant.require(SERVES, f"{does}, which takes a mask alone,")
    if used := sorted(names(variant.mask) & set(_WITHOUT_MEANING)):
        raise CallError(f"{variant.name}: all heads share index scores, but its mask reads {used[0]}")


def check_contents(given: IndexScores, bound: Bound) -> None:
    """Check what the tensors hold. Raises CallError; waits for the GPU."""
    debugging.check_lengths(bound.call)
    debugging.check_facts(bound.call)
    if given.k_scale is not None and bound.call.page_table is None and bound.call.seqused_k is None:
        debugging.check_scale("k_scale", given.k_scale)  # others may have rows that no call has written


def scores_shape(call: Call, block: int | None = None) -> tuple[int, ...]:
    """Shape of the scores, or of those of blocks of so many keys."""
    of_queries = (call.batch, call.seqlen_q) if call.cu_seqlens_q is None else (call.total_q,)
    return (*of_queries, call.seqlen_k) if block is None else (*of_queries, call.heads, -(-call.seqlen_k // block))


def score(given: IndexScores, bound: Bound) -> Tensor:
    """The scores in torch, some queries at a time."""
    call = bound.call
    compute = torch.float64 if given.q.dtype == torch.float64 else torch.float32
    shape, block = scores_shape(call, given.block), given.block
    out = torch.full(shape, -torch.inf, dtype=compute, device=call.device)
    of_rows = out.view(-1, *shape[-1 if block is None else -2 :])
    weights = None if given.weights is None else given.weights.reshape(-1, call.heads)
    k = given.k.unsqueeze(2)
    for b, place in enumerate(lengths(call)):
        sequence = one_sequence(call, given.q, k, k, b, place)
        keys = sequence.k.shape[0]
        if not keys or not call.heads:
            continue
        scale = _scales(given, call, b, keys)
        queries, _, first, _ = place
        for rows in _row_ranges(call, queries, keys):
            visible = _visible(call, sequence, rows, compute)
            products = torch.einsum("qhd,kd->qhk", sequence.q[rows].to(compute), sequence.k[:, 0].to(compute))
            own = slice(first + rows.start, first + rows.stop)
            if block is not None:
                shown = products.masked_fill(~visible[:, None], -torch.inf)
                padded = torch.nn.functional.pad(shown, (0, -keys % block), value=-torch.inf)
                of_rows[own, :, : -(-keys // block)] = padded.unflatten(-1, (-1, block)).amax(-1)
                continue
            assert weights is not None
            scores = (products.relu() * weights[own, :, None]).sum(1)
            scores = scores if scale is None else scores * scale
            of_rows[own, :keys] = scores.where(visible, torch.full_like(scores, -torch.inf))
    return out if given.out is None else given.out.copy_(out)


def _row_ranges(call: Call, queries: int, keys: int) -> Iterator[slice]:
    most = CHUNK_ELEMENTS.get(call.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, most // (call.heads * keys))
    for first in range(0, queries, step):
        yield slice(first, min(first + step, queries))


def _visible(call: Call, sequence: OneSequence, rows: slice, compute: torch.dtype) -> Tensor:
    """Keys that some queries of a sequence see, (rows, keys)."""
    queries, keys = sequence.q.shape[0], sequence.k.shape[0]
    known = names_of(call, sequence.index, rows, queries, keys, sequence.q_offset, sequence.k_offset)
    shown = evaluate(call.variant.mask, known, call.tensors, float_dtype=compute, checked=True)
    shape = (1, rows.stop - rows.start, keys)
    return torch.as_tensor(shown, dtype=torch.bool, device=call.device).broadcast_to(shape)[0]


def _scales(given: IndexScores, call: Call, b: int, keys: int) -> Tensor | None:
    """Scales of the keys of a sequence."""
    if given.k_scale is None:
        return None
    if call.page_table is None:
        of_keys: Tensor = given.k_scale[b, :keys]
        return of_keys
    listed = call.page_table[b, : -(-keys // call.page_size)].long()
    of_pages: Tensor = given.k_scale[listed].flatten()[:keys]
    return of_pages
