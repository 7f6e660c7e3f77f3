"""The kernel that quantizes: whether it takes a call, its arguments, and its launches.

What a call with some shapes, strides, dtypes and devices needs is prepared once, as for attention: later ones fill in
addresses and launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.formats import QUANTIZE, QUANTIZE_VARIANT
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.device.driver import Driver
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.helpers import quantize_tiles
from attngen.runtime.helpers.quantize_arguments import Quantize, Sizes, transform_size
from attngen.runtime.helpers.quantize_launch import (
    BLOCK,
    FORMS,
    HEAD,
    TENSOR,
    TOKEN,
    Phase,
    PreparedQuantize,
    against_tables,
    granularities,
    numbers_of,
    strides,
)
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.select import against_device

_MAX_HEAD_DIM = 256

#: Numbers that a thread holds: of one row, or a half of each of two rows.
_NUMBERS_OF_THREAD = 64

#: Threads of a block whose rows no scale fixes, and of all blocks that a multiprocessor runs at once: each thread has
#: 128 registers.
_THREADS, _RESIDENT = 128, 512

#: Numbers of 16 bits in 16 bytes.
_VECTOR = CHUNK_BYTES // 2

_MOST = 2**31 - 1


def prepare(call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """Return what launches a call that was checked, or the reason why no kernel takes it: the first kernel that does,
    those of one head dim before those of any."""
    reason = f"no package that is found has a kernel that quantizes {str(call.q.dtype).removeprefix('torch.')}"
    for kernel in _kernels_for(call.q.dtype, sizes):
        against = against_device(kernel, call.q.device.index or 0, driver)
        if against is not None:
            reason = f"{kernel.full_name}: {against}"
            continue
        if kernel.loads == "descriptor" and not quantize_tiles.pays(kernel, call, sizes, driver):
            continue
        prepared = prepare_on(kernel, call, sizes, driver)
        if not isinstance(prepared, str):
            return prepared
        reason = prepared
    return reason


def prepare_on(kernel: Kernel, call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """As ``prepare``, on one kernel of the call's dtype and device."""
    if kernel.loads == "descriptor":
        return quantize_tiles.prepare_on(kernel, call, sizes, driver)
    reason = _against_rows(call) or against_tables(call)
    if reason is not None:
        return reason
    of_qk, of_v = granularities(call)
    shares = _share(sizes.head_dim_qk), _share(sizes.head_dim_v)
    threads, rows = _THREADS, [share.rows * (_THREADS // share.lanes) for share in shares]
    if of_qk == BLOCK:
        rows = [call.granularity] * 2
        threads = -(-max(call.granularity // share.rows * share.lanes for share in shares) // 32) * 32
    if threads > kernel.main.entry.threads:
        return f"blocks of {call.granularity} tokens take {threads} threads; a kernel has {kernel.main.entry.threads}"
    tiles = (-(-sizes.seqlen_q // rows[0]), -(-sizes.seqlen_k // rows[0]), -(-sizes.seqlen_k // rows[1]))
    units = (
        sizes.batch * sizes.heads * tiles[0],
        sizes.batch * sizes.kv_heads * tiles[1],
        sizes.batch * sizes.kv_heads * tiles[2],
    )
    resident = driver.multiprocessors(call.q.device.index or 0) * max(_RESIDENT // threads, 1)
    # Blocks count one round of units beyond the last one.
    if sum(units) + resident > _MOST or max(sizes.seqlen_q, sizes.seqlen_k) + max(rows) > _MOST:
        return "more rows than 32 bits count"
    phase = partial(_phase, kernel.main.entry, threads=threads, resident=resident)
    phases = [phase(units, rounds=1)]
    maxima = 0
    if of_v in (TENSOR, HEAD):  # of q and k as well, but for scales of tokens
        maxima = 3 * (1 if of_v == TENSOR else sizes.batch * sizes.kv_heads)
        phases.insert(0, phase((0, 0, units[2]) if of_qk == TOKEN else units, rounds=0))
    divisors = {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "group": sizes.heads // sizes.kv_heads, "tiles_q": tiles[0],
        "tiles_k": tiles[1], "tiles_v": tiles[2], "lanes_qk": shares[0].lanes, "lanes_v": shares[1].lanes,
    }  # fmt: skip
    found = {
        **numbers_of(call, sizes), **_rotation(call, shares[0]), "scales_qk": of_qk, "scales_v": of_v, **divisors,
        **{f"{name}_{of}": value for of, share, count in zip(("qk", "v"), shares, rows, strict=True)
           for name, value in (("rows", count), ("far_row", count // 2 if share.rows > 1 else 0),
                               ("vectors", share.vectors), ("lane_bits", share.lane_bits))},
        "slot_bits": shares[0].slot_bits,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    numbers: dict[tuple[str, Any], float] = {
        **strides(call),
        **{(name, None): value for name, value in found.items()},
    }
    return PreparedQuantize(kernel, numbers, phases, maxima, driver, call.q.device.index or 0)


def _phase(entry: Entry, units: tuple[int, int, int], *, rounds: int, threads: int, resident: int) -> Phase:
    """Return a launch of as many blocks as run at once."""
    numbers = {"units": sum(units), "units_q": units[0], "units_k": units[1], "rounds": rounds}
    return Phase(entry, min(sum(units), resident), threads, numbers)


@dataclass(frozen=True, slots=True)
class _Share:
    """How threads share rows: so many lanes a row, each with vectors of one row or of two; so many bits count the
    lanes of a transform, and the vectors of one that a thread has."""

    rows: int
    lanes: int
    vectors: int
    lane_bits: int
    slot_bits: int


def _share(head_dim: int) -> _Share:
    """Return how rows are shared: by threads with 64 numbers of one, or, where that leaves threads without work or rows
    with one or two threads, with 32 numbers of each of two. Four threads of a row transform it by products."""
    rows = 1 if head_dim % _NUMBERS_OF_THREAD == 0 and head_dim > 2 * _NUMBERS_OF_THREAD else 2
    numbers = _NUMBERS_OF_THREAD // rows
    in_thread = (numbers // _VECTOR).bit_length() - 1
    bits = (transform_size(head_dim) // _VECTOR).bit_length() - 1
    return _Share(rows, -(-head_dim // numbers), head_dim // _VECTOR, max(bits - in_thread, 0), min(bits, in_thread))


def _kernels_for(dtype: torch.dtype, sizes: Sizes) -> list[Kernel]:
    """Return the kernels that quantize rows of a dtype and of some head dims, in the order in which they are asked."""
    found = [
        kernel
        for _, package in registry.packages()
        for kernel in package.kernels(QUANTIZE_VARIANT)
        if kernel.direction == QUANTIZE and kernel.dtype == ATTENTION_DTYPES.get(dtype)
    ]
    dims = sizes.head_dim_qk, sizes.head_dim_v
    own = [one for one in found if one.loads == "descriptor" and (one.head_dim_qk, one.head_dim_v) == dims]
    return own + [one for one in found if one.loads != "descriptor"]


def _against_rows(call: Quantize) -> str | None:
    """Return why rows cannot be read 16 bytes at a time, or None."""
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        size = tensor.element_size()
        if not tensor.numel():
            return f"{name} has no row"
        if tensor.shape[-1] * size % CHUNK_BYTES:
            return f"rows of {name} are not a multiple of {CHUNK_BYTES} B"
        if tensor.shape[-1] > _MAX_HEAD_DIM:
            return f"{name} has head_dim {tensor.shape[-1]}; a kernel takes at most {_MAX_HEAD_DIM}"
        if tensor.stride(-1) != 1:
            return f"{name}'s last dimension is not contiguous"
        strides = (step for extent, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if extent > 1)
        if tensor.data_ptr() % CHUNK_BYTES or any(step * size % CHUNK_BYTES for step in strides):
            return f"{name}'s rows do not all begin at multiples of {CHUNK_BYTES} B"
    return None


def _rotation(call: Quantize, share: _Share) -> dict[str, int]:
    """Return what tells how rows of q and k are rotated. ``rotary_step``: a number's partner is in the same vector (0),
    in the slot of its thread whose number differs in that bit (2, 4), or somewhere else (-1)."""
    cos = call.rotary_cos
    if cos is None:
        names = ("positions", "rotary_half", "rotary_form", "interleaved", "whole_vectors")
        return dict.fromkeys(names, 0) | {"rotary_step": -1}
    half, step = cos.shape[1], -1
    if _in_whole_vectors(call, together=4):
        slot = 1 << share.slot_bits - 1 if share.slot_bits > 1 else 0  # of a transform's second half
        if call.rotary_interleaved:
            step = 0
        elif slot and half == _VECTOR * slot << share.lane_bits:
            step = slot
    return {
        "positions": cos.shape[0],
        "rotary_half": half,
        "rotary_form": FORMS[cos.dtype],
        "rotary_step": step,
        "interleaved": int(call.rotary_interleaved),
        "whole_vectors": int(_in_whole_vectors(call, together=2)),
    }


def _in_whole_vectors(call: Quantize, *, together: int) -> bool:
    """Whether 16 bytes of a row are rotated all or not at all, by angles of which so many can be read together."""
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos.shape[1] % (_VECTOR // 2 if call.rotary_interleaved else _VECTOR):
        return False
    size = together * cos.element_size()
    return not any(
        table.data_ptr() % size or (table.shape[0] > 1 and table.stride(0) * table.element_size() % size)
        for table in (cos, sin)
    )
