"""The kernel that quantizes: whether it takes a call, its arguments, and its launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.operations import QUANTIZE, QUANTIZE_VARIANT
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.operations.quantize import tiles as quantize_tiles
from attngen.runtime.operations.quantize.arguments import Quantize, QuantizeSizes, transform_size
from attngen.runtime.operations.quantize.sizes import (
    BLOCK,
    HEAD,
    TENSOR,
    TENSORS,
    TOKEN,
    PreparedQuantize,
    granularities,
    sizes_of,
    strides,
)
from attngen.runtime.operations.shared.launches import Grid, LaunchOperands
from attngen.runtime.operations.shared.operands import (
    MOST,
    against_rotary,
    against_rows,
    in_whole_vectors,
    rotary_sizes,
)
from attngen.runtime.operations.shared.path import first_that_takes, kernels_of

_MAX_HEAD_DIM = 256

#: Numbers that a thread holds: of one row, or a half of each of two rows. Not measured: half of its registers.
_NUMBERS_OF_THREAD = 64

#: Threads of a block whose rows no scale fixes, and of all blocks that a multiprocessor runs at once: each thread has
#: 128 registers. Not measured.
_THREADS, _RESIDENT = 128, 512

#: Numbers of 16 bits in 16 bytes.
_VECTOR = CHUNK_BYTES // 2


def prepare(call: Quantize, sizes: QuantizeSizes, driver: Driver) -> PreparedQuantize | str:
    """Launches of a checked call on the first kernel that takes it, those of one head dim before those of any; or the
    reason why none does."""

    def prepared(kernel: Kernel) -> PreparedQuantize | str | None:
        if kernel.loads == "descriptor" and not quantize_tiles.pays(kernel, call, sizes, driver):
            return None
        return prepare_on(kernel, call, sizes, driver)

    kernels = kernels_of(QUANTIZE, QUANTIZE_VARIANT, call.q.dtype)
    dims = sizes.head_dim_qk, sizes.head_dim_v
    own = [one for one in kernels if one.loads == "descriptor" and (one.head_dim_qk, one.head_dim_v) == dims]
    missing = f"no package that is found has a kernel that quantizes {str(call.q.dtype).removeprefix('torch.')}"
    general = [one for one in kernels if one.loads != "descriptor"]
    return first_that_takes([*own, *general], call.q.device.index or 0, driver, prepared, missing)


def prepare_on(kernel: Kernel, call: Quantize, sizes: QuantizeSizes, driver: Driver) -> PreparedQuantize | str:
    """Launches of a checked call on one kernel of its dtype and device, or the reason against it."""
    if kernel.loads == "descriptor":
        return quantize_tiles.prepare_on(kernel, call, sizes, driver)
    if call.k_mean is not None and call.rotary_cos is not None:
        return "keys less their mean are not rotated"
    reason = _against_rows(call) or against_rotary(call.rotary_cos, call.rotary_sin)
    if reason is not None:
        return reason
    of_qk, of_v = granularities(call)
    shares = _share(sizes.head_dim_qk), _share(sizes.head_dim_v)
    threads, rows = _THREADS, [share.rows * (_THREADS // share.lanes) for share in shares]
    if of_qk == BLOCK:
        assert isinstance(call.granularity, int)
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
    if sum(units) + resident > MOST or max(sizes.seqlen_q, sizes.seqlen_k) + max(rows) > MOST:
        return "more rows than 32 bits count"
    grid = partial(_grid, kernel.main.entry, threads=threads, resident=resident)
    grids = [grid(units, rounds=1)]
    maxima = 0
    if of_v in (TENSOR, HEAD):  # of q and k as well, but for scales of tokens
        maxima = 3 * (1 if of_v == TENSOR else sizes.batch * sizes.kv_heads)
        grids.insert(0, grid((0, 0, units[2]) if of_qk == TOKEN else units, rounds=0))
    divisors = {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "group": sizes.heads // sizes.kv_heads, "tiles_q": tiles[0],
        "tiles_k": tiles[1], "tiles_v": tiles[2], "lanes_qk": shares[0].lanes, "lanes_v": shares[1].lanes,
    }  # fmt: skip
    numbers = {
        **sizes_of(call, sizes), **_rotation(call, shares[0]), "scales_qk": of_qk, "scales_v": of_v, **divisors,
        **{f"{name}_{of}": value for of, share, count in zip(("qk", "v"), shares, rows, strict=True)
           for name, value in (("rows", count), ("far_row", count // 2 if share.rows > 1 else 0),
                               ("vectors", share.vectors), ("lane_bits", share.lane_bits))},
        "slot_bits": shares[0].slot_bits,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    operands = LaunchOperands(TENSORS, numbers, strides(call))
    return PreparedQuantize(kernel, operands, grids, driver, call.q.device.index or 0, sizes, maxima)


def _grid(entry: Entry, units: tuple[int, int, int], *, rounds: int, threads: int, resident: int) -> Grid:
    """A launch of as many blocks as run at once."""
    numbers = {"units": sum(units), "units_q": units[0], "units_k": units[1], "rounds": rounds}
    return Grid(entry, min(sum(units), resident), threads, numbers)


@dataclass(frozen=True, slots=True)
class _Share:
    """Distribution of rows over threads: so many lanes a row, each with vectors of one row or of two; so many bits
    count the lanes of a transform, and the vectors of one that a thread has."""

    rows: int
    lanes: int
    vectors: int
    lane_bits: int
    slot_bits: int


def _share(head_dim: int) -> _Share:
    """The share of rows: threads with 64 numbers of one, or, where that leaves threads without work or rows
    with one or two threads, with 32 numbers of each of two. Four threads of a row transform it by products."""
    rows = 1 if head_dim % _NUMBERS_OF_THREAD == 0 and head_dim > 2 * _NUMBERS_OF_THREAD else 2
    numbers = _NUMBERS_OF_THREAD // rows
    in_thread = (numbers // _VECTOR).bit_length() - 1
    bits = (transform_size(head_dim) // _VECTOR).bit_length() - 1
    return _Share(rows, -(-head_dim // numbers), head_dim // _VECTOR, max(bits - in_thread, 0), min(bits, in_thread))


def _against_rows(call: Quantize) -> str | None:
    """The reason why rows cannot be read 16 bytes at a time, or None."""
    rows: dict[str, Tensor] = {name: getattr(call, name) for name in "qkv"}
    for name, tensor in rows.items():
        if not tensor.numel():
            return f"{name} has no row"
        if tensor.shape[-1] > _MAX_HEAD_DIM:
            return f"{name} has head_dim {tensor.shape[-1]}; a kernel takes at most {_MAX_HEAD_DIM}"
    return against_rows(rows, call.q.element_size())


def _rotation(call: Quantize, share: _Share) -> dict[str, int]:
    """Sizes of a rotation of q and k. ``rotary_step``: a number's partner is in the same vector (0), in the slot of its
    thread whose number differs in that bit (2, 4), or somewhere else (-1)."""
    cos, sin, interleaved = call.rotary_cos, call.rotary_sin, call.rotary_interleaved
    rotation = rotary_sizes(cos, interleaved)
    if cos is None:
        return {**rotation, "whole_vectors": 0, "rotary_step": -1}
    step = -1
    if in_whole_vectors(cos, sin, interleaved, _VECTOR, together=4):
        slot = 1 << share.slot_bits - 1 if share.slot_bits > 1 else 0  # of a transform's second half
        if interleaved:
            step = 0
        elif slot and cos.shape[1] == _VECTOR * slot << share.lane_bits:
            step = slot
    whole = in_whole_vectors(cos, sin, interleaved, _VECTOR, together=2)
    return {**rotation, "whole_vectors": int(whole), "rotary_step": step}
