"""A call's arguments, checked and named: shapes that agree, declared scalars and tensors, extents.

Everything here looks at shapes, strides, dtypes and devices only. What the tensors hold is not read, since that
would wait for the GPU; ``debug`` reads it.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from attngen.dtypes import ATTENTION_DTYPES as KERNEL_DTYPES
from attngen.dtypes import CACHE_DTYPES, OUT_DTYPES, QUANTIZED_DTYPES
from attngen.dtypes import dtype as dtype_row
from attngen.errors import CallError, suggest
from attngen.lang.dropout import RNG_STATE
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.ranges import DTYPE_RANGES
from attngen.lang.variant import Bound, Scalar, Variant
from attngen.lang.variant import Tensor as DeclaredTensor

#: torch dtype of q, k and v → name in manifests. fp64 has no kernel: only the reference takes it.
ATTENTION_DTYPES: dict[torch.dtype, str] = {
    **{getattr(torch, dtype_row(name).torch): name for name in KERNEL_DTYPES},
    torch.float64: "fp64",
}

#: The same the other way round.
TORCH_DTYPES: dict[str, torch.dtype] = {name: found for found, name in ATTENTION_DTYPES.items()}


def mixes(q: torch.dtype, kv: torch.dtype) -> bool:
    """Whether k and v of a dtype may stand beside q of another one: other 8 bits, or a cache of them, which products
    convert."""
    name, of_q = ATTENTION_DTYPES.get(kv), ATTENTION_DTYPES.get(q)
    beside = QUANTIZED_DTYPES if of_q in QUANTIZED_DTYPES else CACHE_DTYPES
    return q != kv and name in beside and of_q is not None


def out_dtype_of(dtype: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of the output of a call whose q has ``dtype``: the same, or, of a quantized one, what is asked
    for or else what goes with it."""
    name = ATTENTION_DTYPES.get(dtype)
    return asked or TORCH_DTYPES[QUANTIZED_DTYPES[name]] if name in QUANTIZED_DTYPES else dtype


def check_out_dtype(q: torch.dtype, asked: Any) -> torch.dtype | None:
    """Return the dtype of the output that a call asks for. Raises CallError for one that it cannot have."""
    allowed = [TORCH_DTYPES[name] for name in OUT_DTYPES] if ATTENTION_DTYPES.get(q) in QUANTIZED_DTYPES else [q]
    if asked is None or asked in allowed:
        return None if asked is None else allowed[allowed.index(asked)]
    raise CallError(f"out_dtype must be {' or '.join(map(str, allowed))} with q of {q}, got {asked!r}")


LAYOUTS = ("bshd", "bhsd")
#: Orders of the axes of a cache: (pages, page_size, kv_heads, head_dim) or (pages, kv_heads, page_size, head_dim).
PAGE_LAYOUTS = ("NHD", "HND")
DIRECTIONS = ("forward", "backward")

#: Keywords of the call itself, offered when an unknown keyword is near one of them.
CALL_KEYWORDS = (
    "variant", "softmax_scale", "seqused_k", "return_lse", "layout", "backend", "package", "tile_map", "deterministic",
)  # fmt: skip

#: Keywords of SDPA and flash-attn, and of the dense call in a packed one, and what to write instead.
_ELSEWHERE = {
    "attn_mask": "a mask of bools goes to variant='allowed'",
    "causal": "say variant='causal'",
    "is_causal": "say variant='causal', or 'causal_top_left' to align at the first key",
    "enable_gqa": "leave it out: k and v may have fewer heads",
    "layout": "packed tensors have one: total x heads x head_dim",
    "scale": "did you mean 'softmax_scale'?",
    "window_size": "say variant='sliding_window'",
}

#: Largest finite float32.
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

Number = bool | int | float


@dataclass(frozen=True, slots=True)
class View:
    """Shape and strides (elements) of a tensor by axis: ``b s h d``, ``s h d`` of packed rows, ``page s h d`` of a
    cache."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def stride(self, axis: str) -> int:
        """Stride along a named axis; 0 for ``b`` in a varlen call."""
        return self.strides[self.axes.index(axis)] if axis in self.axes else 0

    @property
    def keys_side_by_side(self) -> bool:
        """Whether neighbours in memory are rows, not columns, as of a tensor that was transposed."""
        return self.shape[-1] > 1 and self.strides[-1] != 1 and self.stride("s") == 1


@dataclass(frozen=True, slots=True)
class ScalarRule:
    """What one run-time scalar of a call may be, with all extents resolved."""

    name: str
    dtype: str
    low: float
    high: float
    default: Number | None
    const: Number | None

    def check(self, value: Any, variant: str) -> Number:
        """Return the value as a plain number of the declared type, or raise CallError."""
        if isinstance(value, torch.Tensor):
            raise CallError(
                f"{variant}: scalar '{self.name}' must be a Python number, got a tensor: reading it would wait for the "
                "GPU; pass value.item(), or declare it as a tensor of shape []"
            )
        number = _as_number(value, self.dtype)
        if number is None:
            kind = {"bool": "True or False", "fp32": "a number of the range of float32"}.get(self.dtype, "an integer")
            raise CallError(f"{variant}: scalar '{self.name}' is {self.dtype}, so it must be {kind}, got {value!r}")
        if self.const is not None and number != self.const:
            raise CallError(
                f"{variant}: scalar '{self.name}' was fixed to {self.const} when the kernels were built, got {value!r}"
            )
        if not self.low <= number <= self.high:
            raise CallError(
                f"{variant}: scalar '{self.name}' must lie within {_show(self.low)} .. {_show(self.high)}, "
                f"got {value!r}"
            )
        return number


@dataclass(frozen=True, slots=True)
class Packing:
    """How a varlen call packs its sequences, as the caller passed it."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


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
        """Return the same call without what it was called with, so that a cache keeps no memory alive."""
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
        """Shape of the log-sum-exp: (batch, heads, seqlen_q), or (heads, total_q) of packed queries."""
        if self.order == "thd":
            return (self.heads, self.total_q)
        return (self.batch, self.heads, self.seqlen_q)

    def lse_strides(self) -> tuple[int, ...]:
        """Strides of the log-sum-exp, in elements: contiguous, but (heads, total_q) in memory where rows are ragged."""
        if self.order == "thd":
            return (max(self.total_q, 1), 1)
        if self.ragged:
            return (max(self.seqlen_q, 1), max(self.total_q, 1), 1)
        return (max(self.heads * self.seqlen_q, 1), max(self.seqlen_q, 1), 1)


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


def bind(
    variant: Variant,
    q: Any,
    k: Any,
    v: Any,
    packing: Packing | None,
    *,
    layout: Any = "bshd",
    **settings: Any,
) -> Call:
    """Check a call and resolve its extents. Raises CallError.

    Dense: q (b, s, h, d), or (b, h, s, d) with layout 'bhsd'. With a ``packing``: q (total_q, h, d), k and v
    (total_k, hk, d). ``settings``: those of ``finish``.
    """
    if packing is None:
        if layout not in LAYOUTS:
            raise CallError(
                f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}{suggest(str(layout), LAYOUTS)}"
            )
        call = _bind_dense(variant, q, k, v, layout)
    else:
        call = _bind_packed(variant, q, k, v, packing)
    return finish(call, **settings)


def _bind_dense(variant: Variant, q: Any, k: Any, v: Any, order: str) -> Call:
    views = _views({"q": q, "k": k, "v": v}, order, " x ".join(order))
    (batch, seqlen_q), seqlen_k = views["q"].shape[:2], views["k"].shape[1]
    for name in ("k", "v"):
        if views[name].shape[0] != batch:
            raise CallError(f"{name} has batch {views[name].shape[0]}, but q has {batch}")
    if views["v"].shape[1] != seqlen_k:
        raise CallError(f"k has {seqlen_k} keys, but v has {views['v'].shape[1]}")
    call = common(variant, q, k, views, "dense", order)
    call.batch, call.seqlen_q, call.seqlen_k = batch, seqlen_q, seqlen_k
    call.total_q, call.total_k = batch * seqlen_q, batch * seqlen_k
    return call


def _bind_packed(variant: Variant, q: Any, k: Any, v: Any, packing: Packing) -> Call:
    views = _views({"q": q, "k": k, "v": v}, "thd", "total x heads x head_dim")
    total_q, total_k = views["q"].shape[0], views["k"].shape[0]
    if views["v"].shape[0] != total_k:
        raise CallError(f"k has {total_k} keys, but v has {views['v'].shape[0]}")
    call = common(variant, q, k, views, "varlen", "thd")
    call.total_q, call.total_k = total_q, total_k
    call.cu_seqlens_q = index_vector("cu_seqlens_q", packing.cu_seqlens_q, call.device)
    call.cu_seqlens_k = index_vector("cu_seqlens_k", packing.cu_seqlens_k, call.device)
    if call.cu_seqlens_q.shape != call.cu_seqlens_k.shape or not call.cu_seqlens_q.numel():
        raise CallError(
            "cu_seqlens_q and cu_seqlens_k must both have shape (batch + 1,), got "
            f"{tuple(call.cu_seqlens_q.shape)} and {tuple(call.cu_seqlens_k.shape)}"
        )
    call.batch = call.cu_seqlens_q.shape[0] - 1
    call.seqlen_q = length_of("max_seqlen_q", packing.max_seqlen_q)
    call.seqlen_k = length_of("max_seqlen_k", packing.max_seqlen_k)
    return call


def _views(tensors: Mapping[str, Any], order: str, form: str) -> dict[str, View]:
    """Check that q, k and v are tensors of one dtype, device and rank, and return them by axis."""
    for name, tensor in tensors.items():
        check_rank(name, tensor, len(order), form)
    check_alike(tensors)
    return {name: view(tensor.shape, tensor.stride(), order) for name, tensor in tensors.items()}


def check_rank(name: str, tensor: Any, rank: int, form: str) -> None:
    """Raise CallError unless something is a tensor of ``rank`` dimensions; ``form`` names these."""
    if not isinstance(tensor, torch.Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != rank:
        raise CallError(f"{name} must have {rank} dimensions ({form}), got shape {tuple(tensor.shape)}")


def check_alike(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CallError unless all have the dtype and the device of q, and a contiguous last dimension. k and v may be a
    cache in 8 bits beside a wider q."""
    q, k, _ = tensors.values()
    kv_dtype = k.dtype if mixes(q.dtype, k.dtype) else q.dtype
    if q.dtype not in ATTENTION_DTYPES:
        raise CallError(f"q has dtype {q.dtype}; allowed: {', '.join(map(str, ATTENTION_DTYPES))}")
    for name, tensor in tensors.items():
        if tensor is not q and tensor.dtype != kv_dtype:
            first, second, third = tensors
            beside = f"{second} has dtype {k.dtype}" if kv_dtype != q.dtype else f"q has dtype {q.dtype}"
            raise CallError(
                f"{beside}, but {name} has {tensor.dtype}; {first}, {second} and {third} must have one dtype, or "
                f"{second} and {third} one of 8 bits beside a wider q"
            )
        if tensor.device != q.device:
            raise CallError(f"q is on {q.device}, but {name} is on {tensor.device}; all tensors must be on one device")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and not _lies_by_columns(name, tensor):
            raise CallError(
                f"{name}'s last dimension must be contiguous, got strides {tensor.stride()}; {name}.contiguous() helps"
            )


def _lies_by_columns(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is v in 8 bits whose keys lie side by side, as products of 8 bits read them."""
    quantized = ATTENTION_DTYPES.get(tensor.dtype) in QUANTIZED_DTYPES
    return name == "v" and quantized and tensor.dim() == 4 and 1 in tensor.stride()[1:3]


def common(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, views: Mapping[str, View], layout: str, order: str
) -> Call:
    """Check head counts and head dims, and return the call without its lengths."""
    heads, head_dim_qk = views["q"].shape[-2:]
    kv_heads, head_dim_k = views["k"].shape[-2:]
    kv_heads_v, head_dim_v = views["v"].shape[-2:]
    if head_dim_k != head_dim_qk:
        raise CallError(f"q has head_dim {head_dim_qk}, but k has {head_dim_k}")
    if kv_heads_v != kv_heads:
        raise CallError(f"k has {kv_heads} heads, but v has {kv_heads_v}")
    if heads % kv_heads if kv_heads else heads:
        raise CallError(f"the number of query heads ({heads}) must be a multiple of that of KV heads ({kv_heads})")
    return Call(
        variant=variant, layout=layout, order=order, dtype=ATTENTION_DTYPES[q.dtype], device=q.device,
        kv_dtype=ATTENTION_DTYPES[k.dtype],
        heads=heads, kv_heads=kv_heads, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
        q=views["q"], k=views["k"], v=views["v"],
    )  # fmt: skip


def softmax_scale_of(value: Any) -> float:
    """Return a softmax_scale as a float, or raise CallError."""
    if (
        isinstance(value, bool | torch.Tensor)
        or not isinstance(value, numbers.Real)
        or not 0 < float(value) <= FLOAT32_MAX
    ):
        raise CallError(f"softmax_scale must be a positive Python number that is finite in float32, got {value!r}")
    return float(value)


def default_scale(head_dim: int) -> float:
    """Return the softmax_scale of a call that gives none."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def index_vector(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """Check a vector of lengths or offsets: int32, contiguous, on the device of q."""
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int32 or value.dim() != 1:
        raise CallError(f"{name} must be an int32 vector, got {value.dtype} of shape {tuple(value.shape)}")
    if value.device != device:
        raise CallError(f"{name} is on {value.device}, but q is on {device}")
    if value.numel() > 1 and value.stride(0) != 1:
        raise CallError(f"{name} must be contiguous, got stride {value.stride(0)}")
    return value


def length_of(name: str, value: Any) -> int:
    """Return a length as an int; CallError for what is no Python integer, or negative."""
    if isinstance(value, torch.Tensor):
        raise CallError(
            f"{name} must be a Python integer, got a tensor: reading it would wait for the GPU; pass {name}.item()"
        )
    if isinstance(value, bool):
        raise CallError(f"{name} must be a Python integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise CallError(f"{name} must be a Python integer, got {value!r}") from None
    if number < 0:
        raise CallError(f"{name} must not be negative, got {number}")
    return number


def finish(
    call: Call,
    *,
    softmax_scale: Any = None,
    seqused_k: Any = None,
    return_lse: Any = False,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Call:
    """Check what all calls take: scale, lengths, used lengths and what the variant declares; resolve every extent."""
    if not isinstance(return_lse, bool):
        raise CallError(f"return_lse must be True or False, got {return_lse!r}")
    call.scale = default_scale(call.head_dim_qk) if softmax_scale is None else softmax_scale_of(softmax_scale)
    call.return_lse = return_lse
    for name in ("seqlen_q", "seqlen_k", "total_q", "total_k"):
        if getattr(call, name) > MAX_SEQLEN:
            raise CallError(f"{name} is {getattr(call, name)}; the largest allowed is {MAX_SEQLEN}")
    if seqused_k is not None:
        call.seqused_k = index_vector("seqused_k", seqused_k, call.device)
        if call.seqused_k.shape[0] != call.batch:
            raise CallError(f"seqused_k must have shape ({call.batch},), got {tuple(call.seqused_k.shape)}")
    call.extents = {
        "b": call.batch, "h": call.heads, "hk": call.kv_heads, "heads": call.heads, "kv_heads": call.kv_heads,
        "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "total_q": call.total_q, "total_k": call.total_k,
    }  # fmt: skip
    _check_names(call.variant, arguments)
    bound_by: dict[str, str] = {}
    for declared in call.variant.tensors:
        call.tensors[declared.name] = _tensor(declared, arguments[declared.name], call, bound_by)
    call.rules = tuple(_rule(scalar, call) for scalar in call.variant.scalars)
    for rule in call.rules:
        value = arguments.get(rule.name)
        if value is None:
            value = rule.const if rule.const is not None else rule.default
        call.scalars[rule.name] = _scalar(rule, value, call)
    return call


def _scalar(rule: ScalarRule, value: Any, call: Call) -> Any:
    """Check a scalar; one with a gradient may be a 0-d tensor, which the reference differentiates."""
    if isinstance(value, torch.Tensor) and call.variant.scalar(rule.name).grad:
        if value.dim():
            raise CallError(f"{call.variant.name}: scalar '{rule.name}' must be a number or a 0-d tensor")
        return value
    return rule.check(value, call.variant.name)


def _check_names(variant: Variant, arguments: Mapping[str, Any]) -> None:
    """Refuse a keyword that is not declared, and a declared one that is missing."""
    declared = [t.name for t in variant.tensors] + [s.name for s in variant.scalars]
    for name in arguments:
        if name not in declared:
            raise CallError(
                f"{variant.name}: unknown argument '{name}'{hint_for(name, declared)}; {_declaration(variant)}"
            )
    required = [t.name for t in variant.tensors if t != RNG_STATE]
    required += [s.name for s in variant.arguments if s.default is None]
    missing = [name for name in required if arguments.get(name) is None]
    if missing:
        raise CallError(f"{variant.name}: missing {', '.join(map(repr, missing))}; {_declaration(variant)}")


def hint_for(unknown: str, declared: Sequence[str]) -> str:
    """Return what to write instead of a keyword that neither the variant nor the call has, or the empty string."""
    if unknown in _ELSEWHERE:
        return f"; {_ELSEWHERE[unknown]}"
    return suggest(unknown, (*declared, *CALL_KEYWORDS))


def _declaration(variant: Variant) -> str:
    """Say in one line what a variant takes."""
    parts = [f"{s.name}: {s.dtype}{_span(s.min, s.max)}{_otherwise(s)}" for s in variant.scalars]
    parts += [f"{t.name}: {t.dtype} [{', '.join(map(str, t.shape))}]" for t in variant.tensors]
    return f"it takes {'; '.join(parts)}" if parts else "it takes no arguments of its own"


def _span(low: Bound, high: Bound) -> str:
    if low is None and high is None:
        return ""
    return f" {'' if low is None else low} .. {'' if high is None else high}".rstrip()


def _otherwise(scalar: Scalar) -> str:
    if scalar.const is not None:
        return f" = {scalar.const} (fixed)"
    return "" if scalar.default is None else f" = {scalar.default}"


def _tensor(declared: DeclaredTensor, value: Any, call: Call, bound_by: dict[str, str]) -> torch.Tensor:
    """Check one declared tensor and bind the extents that it is the first to name."""
    label = f"{call.variant.name}: tensor '{declared.name}'"
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{label} must be a torch.Tensor, got {type(value).__name__}")
    wanted = getattr(torch, dtype_row(declared.dtype).torch)
    # Double precision is the reference's own: it serves as the oracle of a kernel in the declared dtype.
    if value.dtype != wanted and not (
        call.dtype == "fp64" and wanted.is_floating_point and value.dtype == torch.float64
    ):
        raise CallError(f"{label} must have dtype {wanted}, got {value.dtype}")
    if value.device != call.device:
        raise CallError(f"{label} is on {value.device}, but q is on {call.device}")
    if value.dim() != len(declared.shape):
        raise CallError(f"{label} must have shape [{', '.join(map(str, declared.shape))}], got {tuple(value.shape)}")
    scalars = {s.name for s in call.variant.scalars}
    for axis, (extent, found) in enumerate(zip(declared.shape, value.shape, strict=True)):
        if found > 2**31 - 1:
            raise CallError(f"{label}: extent {found} of axis {axis} does not fit int32")
        if isinstance(extent, str):
            if extent not in call.extents:
                call.extents[extent] = found
                bound_by[extent] = declared.name
            wanted_extent = call.extents[extent]
        else:
            wanted_extent = extent
        if found != wanted_extent:
            because = f", as in '{bound_by[extent]}'" if extent in bound_by and extent not in scalars else ""
            named = f"{extent} = {wanted_extent}" if isinstance(extent, str) else extent
            raise CallError(
                f"{label}: axis {axis} must be {named}{because}, got {tuple(value.shape)}"
                + (f"; {declared.name}.expand(...) repeats it without a copy" if found == 1 else "")
            )
    return value


def _rule(scalar: Scalar, call: Call) -> ScalarRule:
    """Resolve what a scalar may be; one that names an extent of a tensor must equal it."""
    low, high = DTYPE_RANGES[scalar.dtype]
    low = max(low, _bound(scalar, scalar.min, call, low))
    high = min(high, _bound(scalar, scalar.max, call, high))
    if scalar.name in call.extents:
        low = high = call.extents[scalar.name]
    return ScalarRule(scalar.name, scalar.dtype, low, high, scalar.default, scalar.const)


def _bound(scalar: Scalar, bound: Bound, call: Call, otherwise: float) -> float:
    if bound is None:
        return otherwise
    if isinstance(bound, str):
        if bound not in call.extents:
            raise CallError(f"{call.variant.name}: scalar '{scalar.name}' is bounded by '{bound}', which no tensor has")
        return call.extents[bound]
    return bound


def _as_number(value: Any, dtype: str) -> Number | None:
    """Return a value as a number of the dtype, or None if it is not one. Other integer types (NumPy's) are taken."""
    if dtype == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if dtype == "fp32":
        if not isinstance(value, numbers.Real) or math.isnan(float(value)):
            return None
        number = float(value)
        return number if math.isinf(number) or abs(number) <= FLOAT32_MAX else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _show(bound: float) -> str:
    return {math.inf: "inf", -math.inf: "-inf"}.get(bound, str(bound))
