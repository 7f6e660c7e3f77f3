"""The arguments of a call that appends to caches, and their checks. What tensors hold is not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from attngen.dtypes import BESIDE_LATENT_ROWS, LATENT_ROWS
from attngen.errors import CallError, suggest
from attngen.runtime.arguments.checked import (
    LATENT_DTYPE,
    PAGE_LAYOUTS,
    TORCH_DTYPES,
    mixes,
    refuse_unreadable,
)
from attngen.runtime.arguments.latent_rows import check_latent_rows, latent_name
from attngen.runtime.arguments.shapes import check_rank, check_written, index_vector
from attngen.runtime.arguments.torch_state import is_traced
from attngen.runtime.operations.shared.operands import check_rotary
from attngen.runtime.operations.shared.records import Fields, Flag, OptionalTensor, TensorArgument, Text

#: Dtypes of cosines and sines.
_ROTARY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Append(NamedTuple):
    """A call as its caller made it: see ``append_kv``. Letters name the tensors that it writes."""

    k: TensorArgument
    v: TensorArgument
    k_cache: Annotated[Tensor, "Tensor(a!)"]
    v_cache: Annotated[Tensor, "Tensor(b!)"]
    cache_seqlens: OptionalTensor
    page_table: OptionalTensor
    slots: OptionalTensor
    batch_index: OptionalTensor
    cu_seqlens: OptionalTensor
    page_layout: Text
    q: OptionalTensor
    q_out: Annotated[Tensor | None, "Tensor(c!)?"]
    rotary_cos: OptionalTensor
    rotary_sin: OptionalTensor
    rotary_interleaved: Flag
    rotary_offsets: OptionalTensor
    k_descale: OptionalTensor = None
    v_descale: OptionalTensor = None

    @property
    def packed(self) -> bool:
        """Whether tensors of tokens have no axis of sequences: ``cu_seqlens`` says where each begins, or there is one,
        whose tokens all have slots."""
        if self.cu_seqlens is not None:
            return True
        return self.slots is not None and isinstance(self.k, Tensor) and self.k.dim() == 3


FIELDS = Fields(Append)

#: The scales of a cache in 8 bits.
DESCALES = ("k_descale", "v_descale")


@dataclass(frozen=True, slots=True)
class AppendSizes:
    """New tokens and their sequences; pages of the cache, or sequences of a dense one, and rows of each. ``of_pages``:
    the scales of a cache in 8 bits are of its pages; ``of_rows``: of their rows, and the call writes them."""

    tokens: int
    batch: int
    entries: int
    rows: int
    of_pages: bool = False
    of_rows: bool = False


def check(call: Append) -> AppendSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    k, v, q, table, slots = call.k, call.v, call.q, call.page_table, call.slots
    if call.page_layout not in PAGE_LAYOUTS:
        raise CallError(
            f"page_layout must be one of {', '.join(PAGE_LAYOUTS)}, got {call.page_layout!r}"
            f"{suggest(str(call.page_layout), PAGE_LAYOUTS)}"
        )
    refuse_unreadable({name: getattr(call, name) for name in FIELDS.tensors})
    packed = call.packed
    form = "total_new x heads x head_dim with cu_seqlens" if packed else "batch x seqlen_new x heads x head_dim"
    rank = 3 if packed else 4
    for name, tensor in (("k", k), ("v", v), *((("q", q),) if q is not None else ())):
        check_rank(name, tensor, rank, form)
        if tensor.shape[:-2] != k.shape[:-2]:
            raise CallError(
                f"k has shape {tuple(k.shape)}, but {name} has {tuple(tensor.shape)}; both must hold the same tokens"
            )
    if v.shape[-2] != k.shape[-2]:
        raise CallError(f"k has {k.shape[-2]} heads, but v has {v.shape[-2]}")
    entries, rows = _check_caches(k, v, call.k_cache, call.v_cache, call.page_layout)
    if table is not None and slots is not None:
        raise CallError("page_table and slots both say where tokens go; pass only one of them")
    if call.batch_index is not None and (table is not None or slots is not None):
        raise CallError("batch_index is for a dense cache; leave it out, or page_table and slots")
    batch = 1 if packed else k.shape[0]
    if call.cu_seqlens is not None:
        batch = index_vector("cu_seqlens", call.cu_seqlens, k.device).shape[0] - 1
    if batch < 0:
        raise CallError("cu_seqlens must have shape (batch + 1,), got (0,)")
    _check_vectors(
        batch, k.device, cache_seqlens=call.cache_seqlens, batch_index=call.batch_index,
        rotary_offsets=call.rotary_offsets,
    )  # fmt: skip
    if table is not None:
        _check_index("page_table", table, k.device, (torch.int32,), 2)
        if table.shape[0] != batch:
            raise CallError(f"page_table has {table.shape[0]} rows, but there are {batch} sequences")
    if slots is not None:
        _check_index("slots", slots, k.device, (torch.int32, torch.int64), rank - 2)
        if slots.shape != k.shape[:-2]:
            raise CallError(f"slots must have shape {tuple(k.shape[:-2])}, got {tuple(slots.shape)}")
    elif call.cache_seqlens is None:
        raise CallError("cache_seqlens is needed: the keys that each sequence had before, (batch,) int32")
    check_rotary(call.rotary_cos, call.rotary_sin, call.rotary_interleaved, k.device, k.shape[-1], _ROTARY_DTYPES)
    _check_queries(call)
    if call.rotary_cos is not None and call.cache_seqlens is None and call.rotary_offsets is None:
        raise CallError("a rotation needs positions: give cache_seqlens or rotary_offsets")
    tokens = k.shape[:-2].numel() if batch else 0
    of_rows = _check_scales_of_rows(call)
    of_pages = not of_rows and _check_scales(call, batch, entries)
    return AppendSizes(tokens, batch, entries, rows, of_pages, of_rows)


def refuse_gradients(call: Append) -> None:
    """Raise CallError if something of a call is to be differentiated."""
    if torch.is_grad_enabled():
        for tensor in (call.k, call.v, call.q):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise CallError("append_kv is not differentiable; call it under torch.no_grad()")


def scales_of(call: Append, sizes: AppendSizes) -> dict[str, Tensor]:
    """Scales of a checked call by name, views of (batch, kv_heads), (pages, kv_heads) or (pages, kv_heads, rows); none
    of a cache that is not quantized."""
    shape = (sizes.entries if sizes.of_pages else sizes.batch, call.k.shape[-2])
    given = {name: getattr(call, name) for name in DESCALES}
    if sizes.of_rows:
        return {name: scale.transpose(1, 2) if call.page_layout == "NHD" else scale for name, scale in given.items()}
    return {
        name: (scale[..., 0] if scale.dim() == 3 else scale).expand(shape)
        for name, scale in given.items() if scale is not None
    }  # fmt: skip


def _check_scales_of_rows(call: Append) -> bool:
    """Whether scales are of the rows of pages, which the call writes. Raises CallError if only one of them is."""
    scales = [getattr(call, name) for name in DESCALES]
    shape = tuple(call.k_cache.shape[:-1])
    in_pages = call.page_table is not None or call.slots is not None
    if not in_pages or not any(isinstance(scale, Tensor) and tuple(scale.shape) == shape for scale in scales):
        return False
    if call.k_cache.dtype in (call.k.dtype, LATENT_DTYPE) or shape[1 if call.page_layout == "NHD" else 2] == 1:
        return False  # which have no scales; and pages of one row, whose scales are those of pages
    for name, scale in zip(DESCALES, scales, strict=True):
        if not isinstance(scale, Tensor) or (scale.dtype, scale.device, tuple(scale.shape)) != (
            torch.float32, call.k.device, shape
        ):  # fmt: skip
            raise CallError(
                f"{name} must be float32 of shape {shape} on {call.k.device}, as the other one, which has a scale for "
                "each row of a page"
            )
        check_written(name, scale)
    return True


def _check_scales(call: Append, batch: int, entries: int) -> bool:
    """Check the scales of a cache in 8 bits; True if they are of pages. Raises CallError, too, for scales of another
    cache."""
    given = {name: getattr(call, name) for name in DESCALES}
    if call.k_cache.dtype in (call.k.dtype, LATENT_DTYPE):
        for name, scale in given.items():
            if scale is not None:
                raise CallError(f"{name} is for a cache in 8 bits, but {name[0]}_cache has {call.k_cache.dtype}")
        return False
    heads, pages = ((count, call.k.shape[-2]) for count in (batch, entries))
    in_pages = call.page_table is not None or call.slots is not None
    shapes = f"() or (batch, kv_heads) = {heads}" + (f" or (pages, kv_heads) = {pages}" if in_pages else "")
    for name, scale in given.items():
        if scale is None:
            raise CallError(f"{name} is missing: a cache in 8 bits needs a scale, float32 of shape {shapes}")
        if not isinstance(scale, Tensor):
            raise CallError(f"{name} must be a torch.Tensor, got {type(scale).__name__}")
        if scale.device != call.k.device:
            raise CallError(f"{name} is on {scale.device}, but k is on {call.k.device}")
    of_pages = in_pages and any(
        tuple(scale.shape) == (*pages, 1) or tuple(scale.shape) == pages != heads for scale in given.values()
    )
    for name, scale in given.items():
        allowed = ((), (1,), *((pages, (*pages, 1)) if of_pages else (heads,)))
        if scale.dtype != torch.float32 or tuple(scale.shape) not in allowed:
            both = ", and both of pages where one is" if in_pages else ""
            raise CallError(
                f"{name} must be float32 of shape {shapes}{both}, got {scale.dtype} of shape {tuple(scale.shape)}"
            )
    return of_pages


def _check_caches(k: Tensor, v: Tensor, k_cache: Any, v_cache: Any, page_layout: str) -> tuple[int, int]:
    """Check the caches; pages or entries of each, and rows of a page."""
    middle = "rows x kv_heads" if page_layout == "NHD" else "kv_heads x rows"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, cache, 4, f"pages x {middle} x head_dim")
    latent = latent_name(k_cache)
    if latent is not None:
        _check_latent_rows(latent, k, v, k_cache, v_cache, page_layout)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (
            cache.dtype != new.dtype
            and mixes(new.dtype, cache.dtype)
            and (cache.device, new.dtype) == (k.device, k.dtype)
        ):
            if k_cache.dtype != v_cache.dtype:
                raise CallError(f"k_cache has {k_cache.dtype}, but v_cache has {v_cache.dtype}")
        elif (cache.dtype, cache.device) != (new.dtype, k.device):
            where = "" if new.device == k.device else f"; k is on {k.device}"
            raise CallError(
                f"{name} has {new.dtype} on {new.device}, but {name}_cache has {cache.dtype} on {cache.device}{where}"
            )
        check_written(f"{name}_cache", cache)
        heads = cache.shape[2 if page_layout == "NHD" else 1]
        if latent is None and (heads, cache.shape[-1]) != tuple(new.shape[-2:]):
            raise CallError(
                f"{name} has {new.shape[-2]} heads of {new.shape[-1]} numbers, but {name}_cache has {heads} of "
                f"{cache.shape[-1]}"
            )
    rows = 1 if page_layout == "NHD" else 2
    of_k, of_v = ((cache.shape[0], cache.shape[rows]) for cache in (k_cache, v_cache))
    if of_k != of_v:
        raise CallError(f"k_cache has {of_k[0]} pages of {of_k[1]} rows, but v_cache has {of_v[0]} of {of_v[1]}")
    return of_k


def _check_latent_rows(name: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_layout: str) -> None:
    """Check new latents and rotary columns, and the cache of rows of both."""
    row = LATENT_ROWS[name]
    if (k_cache.shape, k_cache.stride()) != (v_cache.shape, v_cache.stride()) or (
        not is_traced(k_cache) and k_cache.data_ptr() != v_cache.data_ptr()
    ):
        raise CallError(f"a cache of {row.bytes} bytes a token is one tensor: pass it as k_cache and as v_cache")
    if k.dtype != TORCH_DTYPES[BESIDE_LATENT_ROWS]:
        raise CallError(
            f"k has {k.dtype}; a cache of {row.bytes} bytes a token takes {TORCH_DTYPES[BESIDE_LATENT_ROWS]}"
        )
    if (k.shape[-1], v.shape[-1]) != (row.rotary, row.latents):
        raise CallError(
            f"a cache of {row.bytes} bytes a token takes rotary columns as k and latents as v, of head_dim "
            f"{row.rotary} and {row.latents}, got {k.shape[-1]} and {v.shape[-1]}"
        )
    order = (0, 1, 2, 3) if page_layout == "NHD" else (0, 2, 1, 3)
    cache = k_cache.permute(order)
    check_latent_rows(name, cache, cache.shape[2])
    if cache.shape[2] != k.shape[-2]:
        raise CallError(f"k has {k.shape[-2]} heads, but k_cache has {cache.shape[2]}")


def _check_vectors(batch: int, device: torch.device, **vectors: Any) -> None:
    for name, vector in vectors.items():
        if vector is not None and index_vector(name, vector, device).shape[0] != batch:
            raise CallError(f"{name} must have shape ({batch},), got {tuple(vector.shape)}")


def _check_index(name: str, value: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], rank: int) -> None:
    if not isinstance(value, Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes or value.dim() != rank:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CallError(
            f"{name} must be {kinds} with {rank} dimension{'s' * (rank > 1)}, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    if value.device != device:
        raise CallError(f"{name} is on {value.device}, but k is on {device}")


def _check_queries(call: Append) -> None:
    """Raise CallError unless queries are given for a rotation, and fit the keys."""
    k, q, q_out = call.k, call.q, call.q_out
    if q_out is not None and q is None:
        raise CallError("q_out is for the rotated queries; pass q, too")
    if q is None:
        return
    if call.rotary_cos is None:
        raise CallError("q is for rotation; pass rotary_cos and rotary_sin, or leave q out")
    if q.shape[-1] != k.shape[-1] or q.dtype != k.dtype or q.device != k.device:
        raise CallError(
            f"k has head_dim {k.shape[-1]}, {k.dtype}, {k.device}, but q has {q.shape[-1]}, {q.dtype}, {q.device}"
        )
    if q_out is not None and (
        not isinstance(q_out, Tensor) or (q_out.shape, q_out.dtype, q_out.device) != (q.shape, q.dtype, q.device)
    ):
        given = f"{q_out.dtype} of shape {tuple(q_out.shape)}" if isinstance(q_out, Tensor) else type(q_out).__name__
        raise CallError(f"q_out must be a {q.dtype} tensor of shape {tuple(q.shape)} on {q.device}, got {given}")
