"""The calls that programs make: each becomes one value, which runs now, or is an operator of a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.given import Given, make
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.arguments.torch_state import is_compiling, is_traced, watching
from attngen.runtime.calls import mixed, quantized
from attngen.runtime.calls.dispatch import run
from attngen.runtime.launch.prepared import Repeats
from attngen.runtime.launch.tile_map import TileMap

#: Looked up once: every call asks. Whether autocast is on is asked for any device.
_any_autocast = torch._C._is_any_autocast_enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant = "full",
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
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
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(score(scale · q kᵀ) where the mask allows) · v.

    q is (batch, seqlen_q, heads, head_dim), k and v are (batch, seqlen_k, kv_heads, …), or (batch, heads, seqlen, …)
    with ``layout='bhsd'``; heads is a multiple of kv_heads. ``variant`` is the name of a variant (``package/variant``
    if the short name is ambiguous) or what ``attngen.variant`` made; its scalars and tensors are keywords.
    ``softmax_scale`` is 1/√head_dim unless given. ``seqused_k`` (batch,) int32 is how many keys of each sequence count.
    With ``return_lse`` the natural log-sum-exp (batch, heads, seqlen_q) in float32 is returned, too. A query that sees
    no key gives an output of 0, and a log-sum-exp of −inf or of its sink. ``tile_map`` is what ``attngen.tile_map``
    returned for the same arguments; without it, a kernel that needs one computes it. With ``deterministic`` its
    gradients have the same bits on every run, as under ``torch.use_deterministic_algorithms``; the output has them in
    any case.

    Quantized q, k and v (float8_e4m3fn or float8_e5m2, k and v alike) come with ``q_descale``, ``k_descale`` and
    ``v_descale``, positive float32: the value of an element is the element times its scale. Scales have shape (), or
    (batch, kv_heads), shared by the query heads of a KV head; or (batch, heads or kv_heads, blocks), one for each block
    of 64 or 128 tokens; or (batch, heads, seqlen_q) and (batch, kv_heads, seqlen_k), one for each query and each key.
    The output is bfloat16, or float16 with ``out_dtype=torch.float16``. v may have contiguous keys instead of
    contiguous columns. ``attngen.quantize`` makes such tensors and scales. If only k and v are quantized, as in a
    cache, the output has the dtype of q, and scales have shape () or (batch, kv_heads).

    With ``quantize="fp8"`` q, k and v in bfloat16 or float16 are quantized to float8_e4m3fn on the way, for a kernel of
    8 bits: keys relative to their mean where the variant allows it, rows of q and k after the Hadamard transform, with
    a scale for each KV head. There is no backward.

    A variant with dropout also takes ``dropout_p`` in [0, 1), and may take ``rng_state``, seed and offset as an int64
    tensor (2,) on q's device; left out, it is drawn from torch's generator of the device.

    Under ``torch.autocast`` float32 tensors are taken in its dtype for their device.

    Tensors on the CPU, and ``backend='reference'``, run the eager reference. On a GPU the call enqueues work on the
    current stream and does not wait. Raises CallError for arguments that are wrong or contradict each other, and
    NoKernelError, which lists every candidate and the reason against it, if no kernel takes the call.
    """
    if _any_autocast():
        q, k, v = _as_autocast(q, k, v)
    if quantize is not None:
        return quantized.attend(
            attention, quantize, q, k, v, variant=variant, softmax_scale=softmax_scale, seqused_k=seqused_k,
            return_lse=return_lse, layout=layout, backend=backend, package=package, tile_map=tile_map,
            deterministic=deterministic, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            out_dtype=out_dtype, **arguments,
        )  # fmt: skip
    given = make(Given, (
        q, k, v, q_descale, k_descale, v_descale, seqused_k, None, None, None, None, arguments, tile_map, variant,
        softmax_scale, None, None, return_lse, deterministic, "dense", layout, backend, package, None, None, out_dtype,
        0, 0, 0,
    ))  # fmt: skip
    if is_compiling() or type(q) not in PLAIN or q.is_meta or watching():
        return _by_operator(given)
    return run(given)


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
    backend: str | None = None,
    package: str | None = None,
    tile_map: TileMap | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``attention``, for sequences packed one after the other: q (total_q, heads, head_dim), k and v (total_k, …).

    Sequence i holds rows cu_seqlens[i] to cu_seqlens[i + 1]; both are int32 of shape (batch + 1,), start with 0 and
    never decrease. max_seqlen_q and max_seqlen_k are at least the longest lengths. The log-sum-exp is
    (heads, total_q). What the offsets hold is checked on the CPU and under ``attngen.debug()`` only, since reading
    it would wait for the GPU. Rows after the last sequence are unspecified.
    """
    if _any_autocast():
        q, k, v = _as_autocast(q, k, v)
    given = make(Given, (
        q, k, v, q_descale, k_descale, v_descale, seqused_k, cu_seqlens_q, cu_seqlens_k, None, None, arguments,
        tile_map, variant, softmax_scale, max_seqlen_q, max_seqlen_k, return_lse, deterministic, "varlen", "varlen",
        backend, package, None, None, out_dtype, 0, 0, 0,
    ))  # fmt: skip
    if is_compiling() or type(q) not in PLAIN or q.is_meta or watching():
        return _by_operator(given)
    return run(given)


def _by_operator(given: Given) -> Any:
    """Run a call that is traced, or that a dispatch mode has to see whole."""
    traced = is_traced(given.q)
    if not traced and not watching():  # such as a nested tensor, which is refused
        return run(given)
    from attngen.runtime.calls import operators  # what it imports of torch brings a compiler

    if not traced:
        return operators.watched(given)
    if not torch.compiler.is_compiling() and given.q.device.type == "meta":
        _check_on_meta(given)
    return operators.call(given)


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


def _as_autocast(*tensors: Any) -> tuple[Any, ...]:
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
    backend: str | None = None,
    package: str | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``attention``, for keys and values in the pages of a cache. There is no backward.

    q is (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with ``cu_seqlens_q`` (batch + 1,) int32 and
    ``max_seqlen_q``, at least the longest. k_pages and v_pages are (pages, page_size, kv_heads, head_dim), or (pages,
    kv_heads, page_size, head_dim) with ``page_layout='HND'``. Key j of sequence b is row j % page_size of page
    page_table[b, j // page_size]; page_table is (batch, max_pages) int32. seqused_k (batch,) int32 counts the keys of
    each sequence, including those of its queries: ``q_pos`` puts the last query at the last key. Entries of
    page_table beyond a length are not read, and rows of a page beyond a length do not matter, whatever they hold.

    The output is written to ``out``, if given, and returned. With ``return_lse`` the log-sum-exp is returned, too:
    float32, (heads, total_q) with ``cu_seqlens_q``, else (batch, heads, seqlen_q).

    With ``num_decodes`` the first so many sequences have at most one query each, or, if it is negative, the last so
    many, as batches of servers have them that decode beside prompts: such a batch runs as two launches, on the kernels
    that suit the two, side by side. The result is the same without.

    ``num_splits`` is how many blocks share the keys of a sequence, ``split_size`` how many keys each of them takes; by
    default the call chooses. With a ``split_size`` the bits of a row depend only on its own sequence.

    With a cache in 8 bits (float8_e4m3fn), q is bfloat16, float16 or float8_e4m3fn. The cache has ``k_descale`` and
    ``v_descale``, positive float32 of shape (), (batch, kv_heads), or (pages, kv_heads) for a scale of each page; a v
    that is the first columns of k has its scales, without a ``v_descale``. q in
    8 bits has ``q_descale``, () or (batch, kv_heads), and an output in bfloat16.

    Whether a page is one of the cache, and what lengths and offsets hold, is checked on the CPU and under
    ``attngen.debug()`` only, since reading it would wait for the GPU. Raises CallError and NoKernelError as
    ``attention`` does, and CallError if a gradient is needed and a kernel would run; the reference is differentiable.
    """
    given = make(Given, (
        q, k_pages, v_pages, q_descale, k_descale, v_descale, seqused_k, cu_seqlens_q, None, page_table, out, arguments,
        None, variant, softmax_scale, max_seqlen_q, None, return_lse, False, "paged", page_layout, backend, package,
        num_splits, split_size, None, 0, 0, 0,
    ))  # fmt: skip
    if num_decodes is not None:
        return mixed.attend(run_or_trace, num_decodes, given)
    if is_compiling() or type(q) not in PLAIN or q.is_meta or watching():
        return _by_operator(given)
    few = mixed.few_queries(given)
    return mixed.attend_by_length(run, few, given) if few else run(given)


def run_or_trace(given: Given, repeats: Repeats | None = None) -> Any:
    """Run a call now, which adds to ``repeats`` what repeats it; or make it an operator of a trace."""
    q = given.q
    if is_compiling() or type(q) not in PLAIN or q.is_meta or watching():
        return _by_operator(given)
    return run(given, repeats)


def define_operators(*variants: str) -> tuple[str, ...]:
    """Define the operators of ``torch.library`` of these variants, or of all, and return their qualified names.

    A traced call defines its own operators, and so does ``torch.ops`` when one is named. Raises NoKernelError for a
    variant that is not built.
    """
    from attngen.runtime.calls import operators

    return operators.define(variants)
