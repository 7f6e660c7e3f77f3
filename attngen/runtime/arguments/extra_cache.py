"""The second cache of a call whose lists name keys of two: checks of its bytes, and its rows as numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES, LATENT_ROWS, QUANTIZED_DTYPES
from attngen.errors import CallError
from attngen.lang.listed import EXTRA_K, LISTS
from attngen.runtime.arguments.checked import TORCH_DTYPES, Call
from attngen.runtime.arguments.latent_rows import check_latent_rows, unpacked


def has_extra_cache(call: Call) -> bool:
    """Whether the call's variant takes a second cache."""
    return call.variant.keys is not None and LISTS[call.variant.keys].extra


def check_extra_cache(call: Call) -> None:
    """Check that the rows of the second cache have the form of those of k, and that loads of 16 bytes can read them.

    Raises CallError.
    """
    cache, name = call.tensors[EXTRA_K.name], call.kv_dtype
    if not (call.seqlen_k and call.total_k):
        raise CallError(f"k has no row: pass the cache that has rows as k, not as {EXTRA_K.name}")
    if name in QUANTIZED_DTYPES:
        raise CallError(f"{EXTRA_K.name}: k in {name} has scales beside it, and takes no second cache")
    row = LATENT_ROWS.get(name)
    wanted = row.bytes if row else call.head_dim_qk * TORCH_DTYPES[name].itemsize
    if cache.shape[-1] != wanted:
        raise CallError(f"{EXTRA_K.name} must have {wanted} bytes a row, as k has, got {tuple(cache.shape)}")
    if row:
        check_latent_rows(name, cache, cache.shape[2])
    rows_follow = row is not None and row.scales_after_rows  # in a page, whatever the stride of rows is
    steps = (cache.stride(axis) for axis in range(3) if cache.shape[axis] > 1 and not (rows_follow and axis == 1))
    if any(step % CHUNK_BYTES for step in steps) or cache.stride(-1) != 1:
        raise CallError(
            f"{EXTRA_K.name} must have contiguous rows at multiples of {CHUNK_BYTES} bytes, got strides "
            f"{cache.stride()}"
        )


def extra_rows(call: Call) -> Tensor:
    """Rows of the second cache as numbers: (slots, kv_heads, head_dim)."""
    cache = call.tensors[EXTRA_K.name]
    if call.kv_dtype in LATENT_ROWS:
        return unpacked(call.kv_dtype, cache).flatten(0, 1)
    return cache.view(TORCH_DTYPES[call.kv_dtype]).flatten(0, 1)


def extra_slots(call: Call) -> int:
    """Number of rows of the second cache."""
    pages, size = call.tensors[EXTRA_K.name].shape[:2]
    return pages * size


def with_extra_rows(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence (keys, kv_heads, head_dim), and after them those of the second cache."""
    rows = extra_rows(call)
    return torch.cat((k, rows)), torch.cat((v, rows[..., : call.head_dim_v]))
