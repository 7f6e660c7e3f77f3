"""A call once checked, as kernels see it: its dtypes, and shapes, strides and lengths that agree."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from attngen.dtypes import ATTENTION_DTYPES as KERNEL_DTYPES
from attngen.dtypes import CACHE_DTYPES, OUT_DTYPES, QUANTIZED_DTYPES
from attngen.dtypes import dtype as dtype_row
from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.arrays import refuse_beside
from attngen.runtime.arguments.scalars import Number, ScalarRule

#: torch dtype of q, k and v → name in manifests. fp64 has no kernel: only the reference takes it.
ATTENTION_DTYPES: dict[torch.dtype, str] = {
    **{getattr(torch, dtype_row(name).torch): name for name in KERNEL_DTYPES},
    torch.float64: "fp64",
}

#: The same the other way round.
TORCH_DTYPES: dict[str, torch.dtype] = {name: torch_dtype for torch_dtype, name in ATTENTION_DTYPES.items()}

#: That of caches whose rows hold latents in 8 bits, their scales and rotary columns (``latent_rows``).
LATENT_DTYPE = torch.uint8

LAYOUTS = ("bshd", "bhsd")
#: Orders of the axes of a cache: (pages, page_size, kv_heads, head_dim) or (pages, kv_heads, page_size, head_dim).
PAGE_LAYOUTS = ("NHD", "HND")
DIRECTIONS = ("forward", "backward")

#: Results of a call of attention: the output, with its log-sum-exp if the call asks for it.
Results: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: Parts of two launches that run side by side on one stream: the second one does not wait for the first, and ends after
#: it.
LEADS, FOLLOWS = 1, 2


def mixes(q: torch.dtype, kv: torch.dtype) -> bool:
    """Whether k and v of a dtype may stand beside q of another one: other 8 bits, or a cache of them, which kernels
    convert."""
    name, of_q = ATTENTION_DTYPES.get(kv), ATTENTION_DTYPES.get(q)
    if kv == LATENT_DTYPE:
        return of_q is not None and of_q not in QUANTIZED_DTYPES
    beside = QUANTIZED_DTYPES if of_q in QUANTIZED_DTYPES else CACHE_DTYPES
    return q != kv and name in beside and of_q is not None


def out_dtype_of(dtype: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of the output of a call whose q has ``dtype``: the same, or, of a quantized one, what is asked
    for or else what goes with it."""
    name = ATTENTION_DTYPES.get(dtype)
    return asked or TORCH_DTYPES[QUANTIZED_DTYPES[name]] if name in QUANTIZED_DTYPES else dtype


def lse_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp of a call whose q has ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_out_dtype(q: torch.dtype, asked: object) -> torch.dtype | None:
    """Return the dtype of the output that a call asks for. Raises CallError for one that it cannot have."""
    allowed = [TORCH_DTYPES[name] for name in OUT_DTYPES] if ATTENTION_DTYPES.get(q) in QUANTIZED_DTYPES else [q]
    if asked is None or asked in allowed:
        return None if asked is None else allowed[allowed.index(asked)]
    raise CallError(f"out_dtype must be {' or '.join(map(str, allowed))} with q of {q}, got {asked!r}")


class View(NamedTuple):
    """Shape and strides (elements) of a tensor by axis: ``b s h d``, ``s h d`` of packed rows, ``page s h d`` of a
    cache, ``b h g d k`` of v in groups of keys."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def in_groups(self) -> bool:
        """Whether keys come in groups, each with a row of keys for every column."""
        return "g" in self.axes

    def stride(self, axis: str) -> int:
        """Stride along a named axis; 0 for ``b`` in a varlen call."""
        return self.strides[self.axes.index(axis)] if axis in self.axes else 0

    @property
    def keys_side_by_side(self) -> bool:
        """Whether rows, not columns, are adjacent in memory, as in a transposed tensor."""
        return self.shape[-1] > 1 and self.strides[-1] != 1 and self.stride("s") == 1


@dataclass(frozen=True, slots=True)
class Packing:
    """The packing of a varlen call's sequences, as the caller passed it."""

    cu_seqlens_q: object
    cu_seqlens_k: object
    max_seqlen_q: object
    max_seqlen_k: object


@dataclass(slots=True)
class Call:
    """A call of one variant whose shapes agree. Lengths are those of the tensors, the maxima of a varlen call, or, of
    keys in pages, what a row of the page table holds.

    Kernels see the queries of a paged call as packed rows, though ``order`` says how they came: ``thd`` with
    ``cu_seqlens_q``, ``bshd`` without.
    """

    variant: Variant
    layout: str  # dense | varlen | paged
    order: str  # bshd | bhsd | thd
    dtype: str
    device: torch.device
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: View
    k: View
    v: View
    kv_dtype: str = ""  # of k and v; that of q unless they are a cache in 8 bits
    batch: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    total_q: int = 0
    total_k: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # rows and keys of each packed sequence, where the host knows them
    scale: float = 1.0
    return_lse: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_layout: str = "NHD"
    page_size: int = 0
    num_pages: int = 0
    num_splits: int = 0  # blocks that share the keys of a sequence; 0: the kernel's choice
    split_size: int = 0  # keys of each; 0: the kernel's choice
    sm_margin: int = 0  # multiprocessors that a split-KV launch leaves to another launch
    #: Queries of the sequences that a paged call attends for, at least and at most, if they are not 0.
    least_queries: int = 0
    most_queries: int = 0
    beside: int = 0  # LEADS or FOLLOWS another launch, with which it runs side by side
    blocks: int = 0  # most blocks of a launch; 0: as many as there are multiprocessors, without ``sm_margin``
    out: View | None = None  # of a result that the caller allocated
    asked_out: torch.dtype | None = None  # dtype of the output, where q is quantized and the caller names one
    #: Of quantized q, k and v: (batch, kv_heads), or (batch, heads of q, blocks) and (batch, kv_heads, blocks), or
    #: (pages, kv_heads) of k and v.
    descales: dict[str, torch.Tensor] = field(default_factory=dict)
    scale_blocks: tuple[int, ...] = (0,)  # what tokens of a block these may mean; 0: all of a head, -1: those of a page
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Number] = field(default_factory=dict)
    extents: dict[str, int] = field(default_factory=dict)
    rules: tuple[ScalarRule, ...] = ()

    def __post_init__(self) -> None:
        self.kv_dtype = self.kv_dtype or self.dtype

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no output element, or no key at all."""
        nothing_asked = not (self.batch and self.heads and self.seqlen_q and self.total_q and self.head_dim_v)
        return nothing_asked or not (self.seqlen_k and self.total_k)

    def without_tensors(self) -> Call:
        """The same call without its tensors, so that a cache keeps no memory alive."""
        return replace(
            self, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None, descales={}, tensors={},
            scalars={},
        )  # fmt: skip

    def with_tensors(
        self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Number], cu_seqlens_q: torch.Tensor | None
    ) -> Call:
        """Return a call without tensors with those of another one, which fit it."""
        return replace(self, tensors=dict(tensors), scalars=dict(scalars), cu_seqlens_q=cu_seqlens_q)

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the output: that of q, or what goes with it if q is quantized."""
        return out_dtype_of(TORCH_DTYPES[self.dtype], self.asked_out)

    @property
    def ragged(self) -> bool:
        """Whether kernels see queries, output and log-sum-exp as the rows of all sequences, one after the other."""
        return self.layout != "dense"

    def out_view(self) -> View:
        """The output as kernels see it: the caller's, or a contiguous one."""
        if self.out is not None:
            return self.out
        if self.ragged:
            return contiguous_view((self.total_q, self.heads, self.head_dim_v), "thd")
        return contiguous_view(self.out_shape(), self.order)

    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output, in the order of the call's tensors."""
        if self.order == "thd":
            return (self.total_q, self.heads, self.head_dim_v)
        if self.order == "bhsd":
            return (self.batch, self.heads, self.seqlen_q, self.head_dim_v)
        return (self.batch, self.seqlen_q, self.heads, self.head_dim_v)

    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp: (batch, heads, seqlen_q), or (heads, total_q) of packed queries. With the largest
        logits an axis of both follows."""
        both = (2,) if self.variant.max_logits else ()
        if self.order == "thd":
            return (self.heads, self.total_q, *both)
        return (self.batch, self.heads, self.seqlen_q, *both)

    def lse_strides(self) -> tuple[int, ...]:
        """Strides of the log-sum-exp, in elements: contiguous, but (heads, total_q) in memory where rows are ragged.
        Largest logits follow it in memory, so that either of both lies as the other would alone."""
        both = (max(self.heads * self.total_q, 1),) if self.variant.max_logits else ()
        if self.order == "thd":
            return (max(self.total_q, 1), 1, *both)
        if self.ragged:
            return (max(self.seqlen_q, 1), max(self.total_q, 1), 1, *both)
        return (max(self.heads * self.seqlen_q, 1), max(self.seqlen_q, 1), 1, *both)


def view(shape: Iterable[int], strides: Iterable[int], order: str) -> View:
    """Return a tensor's shape and strides in the canonical order of axes: (b,) s, h, d, or page, s, h, d."""
    shape, strides = tuple(shape), tuple(strides)
    if order in ("bhsd", "HND"):
        shape = (shape[0], shape[2], shape[1], shape[3])
        strides = (strides[0], strides[2], strides[1], strides[3])
    outer = () if order == "thd" else ("page",) if order in PAGE_LAYOUTS else ("b",)
    return View((*outer, "s", "h", "d"), shape, strides)


def contiguous_view(shape: Sequence[int], order: str) -> View:
    """Return the view of a contiguous tensor of a shape, as ``view`` does."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return view(shape, strides, order)


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor, whose module is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def refuse_unreadable(tensors: Mapping[str, object]) -> None:
    """Raise CallError for a DTensor, a sparse tensor, and one with the negative bit: kernels would read, or write,
    numbers of the other sign.

    A trace cannot tell; the operator that it calls is checked when it runs.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):  # which other checks refuse
            if tensor is not None and hasattr(tensor, "__dlpack__"):
                refuse_beside(tensors, name)
            continue
        if tensor.is_nested:
            continue
        if is_distributed(tensor):
            raise CallError(
                f"{name} is a DTensor, which attention, attention_varlen and attention_paged alone take, if q is one, "
                f"too; allowed: {name}.to_local()"
            )
        if tensor.layout != torch.strided:
            raise CallError(f"{name} has layout {tensor.layout}; allowed: a dense tensor, {name}.to_dense()")
        if tensor.is_neg():
            raise CallError(
                f"{name} has the negative bit, as the imaginary part of a conjugate has: its memory holds numbers of "
                f"the other sign; allowed: {name}.resolve_neg()"
            )
