"""The calls that programs make: each becomes one value, which runs now, or is an operator of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments import arrays, torch_state
from attngen.runtime.arguments.given import Given, maker
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.paging import FEW_ROWS
from attngen.runtime.arguments.torch_state import is_traced, watching
from attngen.runtime.operations.attention import later
from attngen.runtime.operations.attention.dispatch import run, run_plain

if TYPE_CHECKING:
    from attngen.runtime.arguments.checked import Results
    from attngen.runtime.launch.prepared import Repeats
    from attngen.runtime.launch.tile_map import TileMap

#: Looked up once: every call asks. Whether autocast is on is asked for any device.
_any_autocast = torch._C._is_any_autocast_enabled

#: A dense call of its fields, in this order.
dense = maker(
    "q k v q_descale k_descale v_descale seqused_k arguments tile_map variant softmax_scale return_lse deterministic "
    "layout backend package out_dtype",
    form="dense",
)
_varlen = maker(
    "q k v q_descale k_descale v_descale seqused_k cu_seqlens_q cu_seqlens_k arguments tile_map variant softmax_scale "
    "max_seqlen_q max_seqlen_k return_lse deterministic backend package out_dtype",
    form="varlen", layout="varlen",
)  # fmt: skip
_paged = maker(
    "q k v q_descale k_descale v_descale seqused_k cu_seqlens_q page_table out arguments variant softmax_scale "
    "max_seqlen_q return_lse layout backend package num_splits split_size",
    form="paged",
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant = "full",
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    package: str | None = None,
    tile_map: TileMap | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: str | None = None,
    **arguments: object,
) -> Tensor | tuple[Tensor, ...]:
    """Attention: softmax(score(softmax_scale · q kᵀ) where the mask allows) · v.

    Tensors on the CPU, and ``backend='reference'``, run the eager reference. On a GPU the call enqueues work on the
    current stream and does not wait. Under ``torch.autocast``, float32 tensors are converted to its dtype first.

    Arrays of CuPy, JAX, numpy and other libraries with ``__dlpack__`` are taken without a copy in place of all tensors,
    and arrays are returned; those of CuPy are used on its current stream. There is no gradient.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim of v).
        variant: Name of a variant, ``package/variant`` if the short name is ambiguous, or a result of
            ``attngen.variant``.
        softmax_scale: Factor of q kᵀ; 1/√head_dim by default.
        seqused_k: (batch,) int32, the number of keys of each sequence that count.
        return_lse: Also return the log-sum-exp.
        return_max_logits: Also return the largest logit of each query head, after scale, score and mask, without a
            gradient. Kernels of entries with ``max_logits: true`` give it.
        layout: ``'bshd'`` as above, or ``'bhsd'`` for (batch, heads, seqlen, head_dim).
        backend: ``'cuda'`` or ``'triton'`` for kernels of that kind only, or ``'reference'``.
        package: Look for kernels in this package only.
        tile_map: Result of ``attngen.tile_map`` for the same arguments; without it, a kernel that needs one computes
            it.
        deterministic: Gradients have the same bits on every run, as under ``torch.use_deterministic_algorithms``. The
            output has them in any case.
        q_descale: Scale of an 8-bit q (float8_e4m3fn or float8_e5m2), positive float32: an element's value is the
            element times its scale. Shape (); (batch, kv_heads), shared by the query heads of a KV head; (batch,
            heads, blocks), one for each block of 64 or 128 tokens; or (batch, heads, seqlen_q), one for each query.
        k_descale: The same of k, with kv_heads in place of heads; () or (batch, kv_heads) if q has 16 bits, as beside
            a cache. k and v have one dtype.
        v_descale: The same of v, whose keys may be contiguous instead of its columns. ``attngen.quantize`` makes such
            tensors and scales.
        out_dtype: torch.float16 for 8-bit q, whose output is bfloat16 otherwise.
        quantize: ``'fp8'`` converts bfloat16 or float16 q, k and v to float8_e4m3fn on the way, for an 8-bit kernel
            without a backward: keys relative to their mean where the variant allows it, q and k after the Hadamard
            transform, with a scale for each KV head.
        **arguments: Scalars and tensors of the variant. A variant with dropout takes ``dropout_p`` in [0, 1), and
            optionally ``rng_state``, seed and offset as an int64 tensor (2,) on q's device; by default they come from
            torch's generator of the device.

    Returns:
        The output (batch, seqlen_q, heads, head_dim of v), and with ``return_lse`` the natural log-sum-exp, float32
        (batch, heads, seqlen_q). A query that sees no key gives 0, and a log-sum-exp of −inf or of its sink. With
        ``return_max_logits`` the largest logits come last, float32 (heads,), over all queries of the batch: −inf for a
        head that sees no key.

    Raises:
        CallError: Arguments are wrong or contradict each other.
        NoKernelError: No kernel takes the call; the message lists every candidate and the reason against it.
    """
    if _any_autocast():
        q, k, v = as_autocast(q, k, v)
    if quantize is not None:
        if return_max_logits:
            raise CallError("quantize goes with kernels in 8 bits, which give no largest logits; leave out one")
        return later.quantized.attend(
            attention, quantize, q, k, v, variant=variant, softmax_scale=softmax_scale, seqused_k=seqused_k,
            return_lse=return_lse, layout=layout, backend=backend, package=package, tile_map=tile_map,
            deterministic=deterministic, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            out_dtype=out_dtype, **arguments,
        )  # fmt: skip
    given = dense(
        q, k, v, q_descale, k_descale, v_descale, seqused_k, arguments, tile_map, variant, softmax_scale, return_lse,
        deterministic, layout, backend, package, out_dtype,
    )  # fmt: skip
    if return_max_logits:
        return later.largest.attend(run_or_trace, given)
    return run_plain(given) if may_repeat(q) else _by_state(given)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    variant: str | Variant = "full",
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
    package: str | None = None,
    tile_map: TileMap | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **arguments: object,
) -> Tensor | tuple[Tensor, ...]:
    """As ``attention``, for sequences packed one after the other.

    Values of the offsets are checked on the CPU and under ``attngen.debug()`` only, since reading them would wait for
    the GPU. Rows after the last sequence are unspecified.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: (total_k, kv_heads, head_dim of v).
        cu_seqlens_q: (batch + 1,) int32, never decreasing from 0: queries of sequence i are rows cu_seqlens_q[i] to
            cu_seqlens_q[i + 1].
        cu_seqlens_k: The same of keys.
        max_seqlen_q: At least the largest number of queries of a sequence.
        max_seqlen_k: At least the largest number of keys of a sequence.
        variant: This and all other arguments are those of ``attention``.

    Returns:
        The output (total_q, heads, head_dim of v), and with ``return_lse`` the log-sum-exp (heads, total_q); with
        ``return_max_logits`` also (heads,), the largest logits, to which rows after the last sequence add nothing.
    """
    if _any_autocast():
        q, k, v = as_autocast(q, k, v)
    given = _varlen(
        q, k, v, q_descale, k_descale, v_descale, seqused_k, cu_seqlens_q, cu_seqlens_k, arguments, tile_map, variant,
        softmax_scale, max_seqlen_q, max_seqlen_k, return_lse, deterministic, backend, package, out_dtype,
    )  # fmt: skip
    if return_max_logits:
        return later.largest.attend(run_or_trace, given)
    return run_plain(given) if may_repeat(q) else _by_state(given)


def _by_state(given: Given) -> Results:
    """Run a call that may not run as an earlier one did: it is made an operator, its tensors are arrays, or ``run``
    looks closer."""
    if arrays.is_array(given.q):
        return arrays.serve_given(_run_tensors, given)
    traced = is_traced(given.q)
    if not traced and not watching():  # such as a nested tensor, which is refused
        return run(given)
    from attngen.runtime.operations.attention import operators  # what it imports of torch brings a compiler

    if not traced:
        return operators.watched(given)
    if not torch.compiler.is_compiling() and given.q.device.type == "meta":
        _check_on_meta(given)
    return operators.call(given)


def _run_tensors(given: Given) -> Results:
    """Run a call whose tensors stand for arrays."""
    return later.mixed.attend_ragged(run_plain, given) if may_repeat(given.q) else _by_state(given)


def _check_on_meta(given: Given) -> None:
    """Raise CallError unless k and v are on the meta device, too, and nothing is differentiated by torch.func."""
    for name, tensor in (("k", given.k), ("v", given.v)):
        if not isinstance(tensor, Tensor):
            raise CallError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if any(map(torch._C._functorch.is_gradtrackingtensor, (given.q, given.k, given.v))):
        raise CallError("derivatives of torch.func need tensors with data, and q is on meta; torch.func.vmap does not")
    for name, tensor in (("k", given.k), ("v", given.v)):
        if tensor.device.type != "meta":
            raise CallError(f"q is on meta, but {name} is on {tensor.device}; all tensors must be on one device")


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype of ``torch.autocast`` for their devices, as for torch's functions of lower precision."""
    return tuple(_autocast(t) if isinstance(t, Tensor) and t.dtype is torch.float32 else t for t in tensors)


def _autocast(tensor: Tensor) -> Tensor:
    device = "cuda" if torch_state.on_gpu(tensor) else tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_decodes: int | None = None,
    variant: str | Variant = "causal",
    softmax_scale: float | None = None,
    page_layout: str = "NHD",
    num_splits: int | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
    package: str | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **arguments: object,
) -> Tensor | tuple[Tensor, ...]:
    """As ``attention``, for keys and values in the pages of a cache. There is no backward.

    Key j of sequence b is row j % page_size of page page_table[b, j // page_size]. Page numbers, lengths and offsets
    are checked on the CPU and under ``attngen.debug()`` only, since reading them would wait for the GPU.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with ``cu_seqlens_q``.
        k_pages: (pages, page_size, kv_heads, head_dim). With q in bfloat16 or float16 it may be float8_e4m3fn.
        v_pages: The same with the head_dim of v.
        page_table: (batch, max_pages) int32. Entries beyond a sequence's length are not read.
        seqused_k: (batch,) int32, the number of keys of each sequence, including those of its queries: ``q_pos`` puts
            the last query at the last key. Rows of a page beyond it may hold anything.
        cu_seqlens_q: (batch + 1,) int32, where packed queries of each sequence begin.
        max_seqlen_q: At least the largest number of packed queries of a sequence.
        num_decodes: The first ``num_decodes`` sequences, or the last ``-num_decodes``, have at most one query each.
            Such a batch runs as two launches side by side, each on the kernel that suits it; results do not change.
        variant: As for ``attention``, with its scalars and tensors in ``arguments``.
        softmax_scale: Factor of q kᵀ; 1/√head_dim by default.
        page_layout: ``'NHD'`` as above, or ``'HND'`` for (pages, kv_heads, page_size, head_dim).
        num_splits: Number of blocks that share the keys of a sequence; by default the call chooses.
        split_size: Number of keys of each of these blocks. The bits of a row then depend only on its own sequence.
        out: Tensor for the output.
        return_lse: Also return the log-sum-exp.
        return_max_logits: As for ``attention``.
        backend: As for ``attention``.
        package: As for ``attention``.
        q_descale: Scale of a float8_e4m3fn q, () or (batch, kv_heads); the output is bfloat16.
        k_descale: Scales of a float8_e4m3fn cache, positive float32: (), (batch, kv_heads), (pages, kv_heads) for a
            scale of each page, or for one of each row the shape of the pages without head_dim, with any strides.
        v_descale: The same of v; none where v is the first columns of k, which has its scales.
        **arguments: Scalars and tensors of the variant.

    Returns:
        The output, of q's shape with the head_dim of v, and with ``return_lse`` the log-sum-exp, float32: (heads,
        total_q) with ``cu_seqlens_q``, else (batch, heads, seqlen_q). With ``return_max_logits`` also (heads,).

    Raises:
        CallError: As ``attention``; also if a kernel would run and a gradient is needed. The reference is
            differentiable.
        NoKernelError: As ``attention``.
    """
    given = _paged(
        q, k_pages, v_pages, q_descale, k_descale, v_descale, seqused_k, cu_seqlens_q, page_table, out, arguments,
        variant, softmax_scale, max_seqlen_q, return_lse, page_layout, backend, package, num_splits, split_size,
    )  # fmt: skip
    if return_max_logits:
        if num_decodes is not None:
            raise CallError("num_decodes makes two launches, which give no largest logits; leave out one")
        return later.largest.attend(run_or_trace, given)
    if num_decodes is not None:
        return later.mixed.attend(run_or_trace, num_decodes, given, whole=True)
    if not may_repeat(q):
        return _by_state(given)
    if max_seqlen_q is None or cu_seqlens_q is None or (type(max_seqlen_q) is int and max_seqlen_q <= FEW_ROWS):
        return run_plain(given)
    return later.mixed.attend_ragged(run_plain, given)


def run_or_trace(given: Given, repeats: Repeats | None = None) -> Results:
    """Run a call now, which adds to ``repeats`` what repeats it; or make it an operator of a trace."""
    return run_plain(given, repeats) if may_repeat(given.q) else _by_state(given)


def define_operators(*variants: str) -> tuple[str, ...]:
    """Define the operators of ``torch.library`` of these variants, or of all, and return their qualified names.

    A traced call defines its own operators, and so does ``torch.ops`` when one is named. Raises NoKernelError for a
    variant that is not built.
    """
    from attngen.runtime.operations.attention import operators

    return operators.define(variants)
