"""The kernel that quantizes tiles of one head dim: whether it takes a call, its arguments, and its launch.

Tiles are of 64 tokens of a head, or of two neighbouring heads. Where rows are rotated, all heads of the tokens that
share a scale form a band, which one block works on.
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
    Phase,
    PreparedQuantize,
    against_tables,
    granularities,
    numbers_of,
    strides,
)
from attngen.runtime.splits import reciprocal
from attngen.runtime.tensormap import TensorMap

#: Threads of a group, which has a tile, and numbers of its rows, of one head or of two.
_GROUP, _COLUMNS = 128, 128

#: With fewer tiles for each group, a call is left to the general kernel, which begins and ends sooner.
LEAST_TURNS = 16

_MOST = 2**31 - 1


def prepare_on(kernel: Kernel, call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """Return what launches a call that was checked, or the reason why the kernel does not take it."""
    reason = _against(kernel, call, sizes)
    if reason is not None:
        return reason
    device = call.q.device.index or 0
    groups, rows = kernel.main.entry.threads // _GROUP, kernel.main.tile_m
    sharers = call.granularity // rows
    across = [-(-heads // (_COLUMNS // kernel.head_dim_qk)) for heads in (sizes.heads, sizes.kv_heads)]
    down = [-(-seqlen // call.granularity) for seqlen in (sizes.seqlen_q, sizes.seqlen_k)]
    units = [sizes.batch * n * tiles * sharers for n, tiles in zip(across, down, strict=True)]
    total = units[0] + 2 * units[1]
    blocks = min(driver.multiprocessors(device), -(-total // groups))
    if total + blocks * groups > _MOST or max(sizes.seqlen_q, sizes.seqlen_k) + call.granularity > _MOST:
        return "more rows than 32 bits count"
    divisors = {"heads_q": across[0], "heads_k": across[1], "tiles_q": down[0], "tiles_k": down[1]}
    if call.rotary_cos is not None:
        turns = [n * sharers // groups for n in across]
        if any(n * sharers % groups for n in across):
            return (
                f"{groups} groups of warps do not share bands of {across[0] * sharers} and {across[1] * sharers} tiles"
            )
        divisors |= {"turns_q": turns[0], "turns_k": turns[1]}
    found = {
        **numbers_of(call, sizes), **_rotation(call), "turns_q": 1, "turns_k": 1, **divisors,
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "units": total, "units_q": units[0], "units_k": units[1],
        "bands_q": sizes.batch * down[0], "bands_k": sizes.batch * down[1], "sharers": sharers,
    }  # fmt: skip
    found |= {f"{name}_reciprocal": reciprocal(int(found[name])) for name in (*divisors, "turns_q", "turns_k")}
    numbers: dict[tuple[str, Any], float] = {
        **strides(call),
        **{(name, None): value for name, value in found.items()},
    }
    maps = {
        name: _TensorMaps(driver, device, kernel.dtype, in_rows(getattr(call, name), call.layout)) for name in "qkv"
    }
    return PreparedQuantize(kernel, numbers, [Phase(blocks, {})], groups * _GROUP, 0, driver, device, maps)


def pays(kernel: Kernel, call: Quantize, sizes: Sizes, driver: Driver) -> bool:
    """Whether a call is long enough for the kernel."""
    tokens = sizes.batch * (sizes.heads * sizes.seqlen_q + 2 * sizes.kv_heads * sizes.seqlen_k)
    tiles = tokens * kernel.head_dim_qk // (_COLUMNS * kernel.main.tile_m)
    groups = kernel.main.entry.threads // _GROUP * driver.multiprocessors(call.q.device.index or 0)
    return tiles >= LEAST_TURNS * groups


def rotates(kernel: Kernel) -> bool:
    """Whether the kernel rotates rows, too."""
    return any(parameter.of == "rotary_cos" for parameter in kernel.main.entry.layout.parameters)


class _TensorMaps:
    """Makes the TMA descriptor of a tensor, with the box and swizzle of a kernel's parameter."""

    def __init__(self, driver: Driver, device: int, dtype: str, tensor: Tensor) -> None:
        self._of = driver, device, dtype, tuple(tensor.shape), tensor.stride()

    def __call__(self, parameter: Parameter) -> TensorMap:
        return TensorMap(*self._of, parameter.box, parameter.swizzle)


def _against(kernel: Kernel, call: Quantize, sizes: Sizes) -> str | None:
    """Return why the kernel does not take a call, or None."""
    if (sizes.head_dim_qk, sizes.head_dim_v) != (kernel.head_dim_qk, kernel.head_dim_v):
        return f"head_dim {sizes.head_dim_qk} and {sizes.head_dim_v}; the kernel has {kernel.head_dim_qk}"
    if granularities(call) != (BLOCK, BLOCK):
        return f"a scale for each {call.granularity}; the kernel takes scales of blocks"
    if not call.hadamard and call.rotary_cos is None:
        return "neither transform nor rotation, without which the general kernel is as fast"
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
    """Return why the kernel does not rotate these rows, or None: it takes whole rows, and tables in pieces of 16 B."""
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None:
        return None
    if not rotates(kernel):
        return f"the kernel does not rotate rows of {kernel.head_dim_qk}"
    if call.rotary_interleaved or 2 * cos.shape[1] != kernel.head_dim_qk:
        return "only whole rows are rotated (rotary_dim = head_dim), and only with halves as partners"
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
