"""The kernel that quantizes tiles of one head dim: whether it takes a call, its arguments, and its launches.

Tiles are of 64 tokens of a head, or of two neighbouring heads. Some heads, side by side, form a section of all tokens
of a batch entry, whose maxima are complete at a time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.runtime import tensormap
from attngen.runtime.driver import Driver
from attngen.runtime.module import Kernel
from attngen.runtime.packing import Parameter
from attngen.runtime.quantize_arguments import Quantize, Sizes, in_rows
from attngen.runtime.quantize_launch import (
    BLOCK,
    FORMS,
    HEAD,
    Phase,
    PreparedQuantize,
    against_tables,
    granularities,
    numbers_of,
    strides,
)
from attngen.runtime.splits import reciprocal
from attngen.runtime.tensormap import TensorMap

#: Threads of a group, which has a tile.
_GROUP = 128

#: What a launch does: find maxima, round, or both, each tile twice.
_FINDS, _ROUNDS, _BOTH = range(3)

#: So many rounds of all groups after the last tile of a section has been taken, its maxima are asked for.
_ROUNDS_LATER = 1

#: Groups share the scale of this many tokens at most.
_MOST_TOKENS = 128

_MOST = 2**31 - 1


def prepare_on(kernel: Kernel, call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """Return what launches a call that was checked, or the reason why the kernel does not take it."""
    reason = _against(kernel, call, sizes)
    if reason is not None:
        return reason
    device = call.q.device.index or 0
    rows, columns = kernel.main.tile_m, 2 * 64  # of a tile
    heads_of_tile = columns // kernel.head_dim_qk
    of_qk, of_v = granularities(call)
    sharers = call.granularity // rows if of_qk == BLOCK else 1
    groups = kernel.main.entry.threads // _GROUP
    across = [-(-heads // heads_of_tile) for heads in (sizes.heads, sizes.kv_heads)]
    if call.rotary_cos is not None and min(across) * sharers < groups:
        return f"bands of {min(across) * sharers} tiles do not occupy {groups} groups of warps"
    down = [-(-seqlen // (rows * sharers)) for seqlen in (sizes.seqlen_q, sizes.seqlen_k)]
    by_sections = HEAD in (of_qk, of_v) and call.rotary_cos is None
    beside = _section_heads(sizes, heads_of_tile) if by_sections else across
    units = [sizes.batch * n * tiles * sharers for n, tiles in zip(across, down, strict=True)]
    total = units[0] + 2 * units[1]
    section = [n * tiles for n, tiles in zip(beside, down, strict=True)]
    grid = min(driver.multiprocessors(device), -(-total // groups))
    at_once = grid * groups
    lag = max(section) + _ROUNDS_LATER * at_once
    if 2 * (total + lag + at_once) > _MOST or max(sizes.seqlen_q, sizes.seqlen_k) + _MOST_TOKENS > _MOST:
        return "more rows than 32 bits count"
    sections = [-(-n // each) for n, each in zip(across, beside, strict=True)]
    heads = sizes.batch * sizes.kv_heads
    counters = 3 * heads
    tickets = counters + sizes.batch * (sections[0] + 2 * sections[1])
    maxima = 0 if of_v == BLOCK else tickets + 1 if by_sections else counters
    phases = [_BOTH] if by_sections else [_ROUNDS] if of_v == BLOCK else [_FINDS, _ROUNDS]
    bands = [sizes.batch * tiles for tiles in down]
    divisors = {
        "group": sizes.heads // sizes.kv_heads,
        **{f"{name}_{of}": value[i]
           for name, value in (("section_heads", beside), ("section", section), ("sections", sections))
           for i, of in enumerate("qk")},
    }  # fmt: skip
    found = {
        **numbers_of(call, sizes), **_rotation(call), **divisors,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "units": total, "units_q": units[0], "units_k": units[1],
        "bands_q": bands[0], "bands_k": bands[1], "sharers": sharers, "scales_qk": of_qk, "scales_v": of_v, "lag": lag,
        "counters": counters, "tickets": tickets,
    }  # fmt: skip
    numbers: dict[tuple[str, Any], float] = {
        **strides(call),
        **{(name, None): value for name, value in found.items()},
    }
    launched = [Phase(grid, {"phase": phase, "backwards": int(phases[0] == _FINDS < phase)}) for phase in phases]
    maps = {
        name: _TensorMaps(driver, device, kernel.dtype, in_rows(getattr(call, name), call.layout)) for name in "qkv"
    }
    return PreparedQuantize(kernel, numbers, launched, groups * _GROUP, maxima, driver, device, maps)


class _TensorMaps:
    """What describes a tensor to the copy engine, in the boxes of a kernel's parameter."""

    def __init__(self, driver: Driver, device: int, dtype: str, tensor: Tensor) -> None:
        self._of = driver, device, dtype, tuple(tensor.shape), tensor.stride()

    def __call__(self, parameter: Parameter) -> TensorMap:
        return TensorMap(*self._of, parameter.box, parameter.swizzle)


def _section_heads(sizes: Sizes, heads_of_tile: int) -> list[int]:
    """Return how many tiles of q, and of k and v, lie side by side in a section: as few as hold whole KV heads, so that
    a section is still in L2 when its maxima are known."""
    group = sizes.heads // sizes.kv_heads
    for together in range(1, sizes.kv_heads):
        if sizes.kv_heads % together == 0 and together % heads_of_tile == 0:
            return [together * group // heads_of_tile, together // heads_of_tile]
    return [-(-heads // heads_of_tile) for heads in (sizes.heads, sizes.kv_heads)]


def _against(kernel: Kernel, call: Quantize, sizes: Sizes) -> str | None:
    """Return why the kernel does not take a call, or None."""
    if (sizes.head_dim_qk, sizes.head_dim_v) != (kernel.head_dim_qk, kernel.head_dim_v):
        return f"head_dim {sizes.head_dim_qk} and {sizes.head_dim_v}; the kernel has {kernel.head_dim_qk}"
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        if not tensor.numel():
            return f"{name} has no row"
        if tensor.data_ptr() % tensormap.ADDRESS_ALIGNMENT:
            return f"{name} does not begin at a multiple of {tensormap.ADDRESS_ALIGNMENT} B"
        reason = tensormap.reason_against(name, tensor.shape, tensor.stride(), tensor.element_size())
        if reason is not None:
            return reason
    return against_tables(call) or _against_rotation(kernel, call)


def _against_rotation(kernel: Kernel, call: Quantize) -> str | None:
    """Return why rows are not rotated on the way, or None: whole ones are, by angles that 16 bytes of a table begin."""
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None:
        return None
    if call.rotary_interleaved or 2 * cos.shape[1] != kernel.head_dim_qk:
        return "only whole rows are rotated, whose halves are partners"
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        apart = table.stride(0) * table.element_size() if table.shape[0] > 1 else 0
        if table.data_ptr() % CHUNK_BYTES or apart % CHUNK_BYTES:
            return f"rows of {name} do not all begin at multiples of {CHUNK_BYTES} B"
    return None


def _rotation(call: Quantize) -> dict[str, int]:
    """Return what tells how rows of q and k are rotated."""
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None:
        names = ("rotates", "positions", "rotary_form", "angle_bytes", "cos_row_bytes", "sin_row_bytes")
        return dict.fromkeys(names, 0)
    size = cos.element_size()
    return {
        "rotates": 1,
        "positions": cos.shape[0],
        "rotary_form": FORMS[cos.dtype],
        "angle_bytes": cos.shape[1] * size,
        "cos_row_bytes": cos.stride(0) * size,
        "sin_row_bytes": sin.stride(0) * size,
    }
