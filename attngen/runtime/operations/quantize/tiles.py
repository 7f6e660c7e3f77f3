"""The kernels that quantize tiles of one head dim: which of them take a call, their arguments, and their launches.

Tiles are of 64 tokens of a head, or of two neighbouring heads. Where rows are rotated, all heads of the tokens that
share a scale, or a part of these heads, form a band, which one block works on. Other scales of heads, also those of V
beside scales of tokens, are found and used in one launch: tiles that share a scale form a set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.manifest import Argument
from attngen.runtime.device import tensormap
from attngen.runtime.device.interface import Driver
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize.arguments import Quantize, QuantizeSizes, in_rows
from attngen.runtime.operations.quantize.sizes import (
    BLOCK,
    HEAD,
    TENSORS,
    TOKEN,
    PreparedQuantize,
    granularities,
    sizes_of,
    strides,
)
from attngen.runtime.operations.shared.launches import Grid, LaunchOperands
from attngen.runtime.operations.shared.operands import MOST, ROTARY_FORMS, against_rotary

#: Threads of a group, which has a tile, and numbers of its rows, of one head or of two. Not measured.
_GROUP, _COLUMNS = 128, 128

#: With fewer tiles for each group, a call is left to the general kernel, which begins and ends sooner: by launch
#: (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
LEAST_TURNS = {"quantize": 2, "kept": 1, "rotated": 2}

#: Cost of the angles of a band, in turns of a group
#: (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
TURNS_OF_ANGLES = 0.25

#: Rows of a KV head from which its scales are taken, at most
#: (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
SAMPLES = 256

_TOO_MANY = "more rows than 32 bits count"

#: The most tiles of a set of several heads, as a part of those that are worked on at a time. Longer sets leave less
#: time between a maximum and the tiles that need it. Not measured.
SET_OF_TURN = 0.5


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of a call: by the index of Q and of K and V, tiles that lie side by side and tiles of a sequence."""

    kernel: Kernel
    sizes: QuantizeSizes
    multiprocessors: int

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.kernel.main.entry.threads // _GROUP

    @property
    def heads(self) -> int:
        """Heads of a tile."""
        return _COLUMNS // self.kernel.head_dim_qk

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of the same tokens, in Q, and in K or V."""
        return -(-self.sizes.heads // self.heads), -(-self.sizes.kv_heads // self.heads)

    def down(self, tokens: int) -> tuple[int, int]:
        """Runs of so many tokens in a sequence of Q, and of K or V."""
        return -(-self.sizes.seqlen_q // tokens), -(-self.sizes.seqlen_k // tokens)

    def grid(self, name: str, units: Sequence[int], numbers: Mapping[str, float], divisors: Mapping[str, int]) -> Grid:
        """A launch that works on so many tiles of Q, K and V."""
        total = sum(units)
        counts = {"units": total, "units_q": units[0], "units_k": units[1]}
        reciprocals = {f"{one}_reciprocal": reciprocal(value) for one, value in divisors.items()}
        sizes = {**numbers, **counts, **divisors, **reciprocals}
        return Grid(self.kernel.launch(name).entry, self.blocks(total), self.groups * _GROUP, sizes)

    def blocks(self, units: int) -> int:
        """Blocks for so many tiles."""
        return min(self.multiprocessors, -(-units // self.groups))


def prepare_on(kernel: Kernel, call: Quantize, sizes: QuantizeSizes, driver: Driver) -> PreparedQuantize | str:
    """Launches of a checked call on one kernel of its dtype and device, or the reason against it."""
    reason = _against(kernel, call, sizes)
    if reason is not None:
        return reason
    device = call.q.device.index or 0
    tiles = _Tiles(kernel, sizes, driver.multiprocessors(device))
    if _too_many(tiles):
        return _TOO_MANY
    maxima = 0
    if call.rotary_cos is None:
        if granularities(call)[0] == BLOCK:
            grids = [_of_blocks(tiles, call)]
        else:
            grid, maxima = _of_heads(tiles, granularities(call)[0], begin=0, v_groups=0)
            grids = [grid]
    else:
        if any(n * _sharers(kernel, call) % tiles.groups for n in tiles.across):
            shares = [n * _sharers(kernel, call) for n in tiles.across]
            return f"{tiles.groups} groups of warps do not share bands of {shares[0]} and {shares[1]} tiles"
        grids = _rotated(tiles, call)
        if granularities(call)[0] != BLOCK:
            begin = 2 * sizes.batch * sizes.kv_heads if granularities(call)[0] == HEAD else 0
            grid, maxima = _of_heads(tiles, None, begin=begin, v_groups=0)
            grids.append(grid)
    operands = _operands(kernel, call, sizes, driver)
    return PreparedQuantize(kernel, operands, grids, driver, device, sizes, maxima)


def of_sample(
    kernel: Kernel, call: Quantize, sizes: QuantizeSizes, driver: Driver, v_groups: int
) -> tuple[LaunchOperands, list[Grid], int] | str:  # fmt: skip
    """Operands and launches of a call that takes scales of heads from a sample, and the words that the first one
    clears; or the reason against it. The last launch does all again if the sample was of too small numbers. V is
    written in ``v_groups`` of keys for each head; 0: in rows."""
    reason = _against(kernel, call, sizes)
    if reason is not None:
        return reason
    device = call.q.device.index or 0
    tiles = _Tiles(kernel, sizes, driver.multiprocessors(device))
    if _too_many(tiles):
        return _TOO_MANY
    group, down = sizes.heads // sizes.kv_heads, tiles.down(kernel.main.tile_m)
    again, words = _of_heads(tiles, HEAD, begin=1, v_groups=v_groups)
    of_kv = sizes.batch * sizes.kv_heads
    samples = [min(length, max(SAMPLES // rows, 1)) for length, rows in ((sizes.seqlen_q, group), (sizes.seqlen_k, 1))]
    numbers = {
        "units": of_kv, "words": words, "samples_q": samples[0], "samples_k": samples[1],
        "step_q": sizes.seqlen_q // samples[0], "step_k": sizes.seqlen_k // samples[1],
        "group": group, "group_reciprocal": reciprocal(group), "kv_heads_reciprocal": reciprocal(sizes.kv_heads),
    }  # fmt: skip
    units = [sizes.batch * n * length for n, length in zip(tiles.across, down, strict=True)]
    divisors = {
        "heads_q": tiles.across[0], "heads_k": tiles.across[1], "tiles_q": down[0], "tiles_k": down[1], "group": group,
    }  # fmt: skip
    grids = [
        Grid(kernel.launch("sample").entry, 3 * of_kv, tiles.groups * _GROUP, numbers),
        tiles.grid("sampled", (units[0], units[1], units[1]), {"v_groups": v_groups}, divisors),
        again,
    ]
    return _operands(kernel, call, sizes, driver), grids, words


def _operands(kernel: Kernel, call: Quantize, sizes: QuantizeSizes, driver: Driver) -> LaunchOperands:
    """Operands that the launches of a call have in common."""
    numbers = {**sizes_of(call, sizes), "heads": sizes.heads, "kv_heads": sizes.kv_heads}
    device = call.q.device.index or 0
    maps = {
        name: _TensorMaps(driver, device, kernel.dtype, in_rows(getattr(call, name), call.layout)) for name in "qkv"
    }
    return LaunchOperands(TENSORS, numbers, strides(call), maps)


def _too_many(tiles: _Tiles) -> bool:
    """Whether a call has more rows than 32 bits count."""
    sizes, rows = tiles.sizes, tiles.kernel.main.tile_m
    most = sizes.batch * max(sizes.heads, 2 * tiles.heads * sizes.kv_heads) * max(tiles.down(rows))
    return 4 * most > MOST or max(sizes.seqlen_q, sizes.seqlen_k) + _GROUP > MOST


def pays(kernel: Kernel, call: Quantize, sizes: QuantizeSizes, driver: Driver) -> bool:
    """Whether a call is long enough for the kernel."""
    tokens = sizes.batch * (sizes.heads * sizes.seqlen_q + 2 * sizes.kv_heads * sizes.seqlen_k)
    tiles = tokens * kernel.head_dim_qk // (_COLUMNS * kernel.main.tile_m)
    groups = kernel.main.entry.threads // _GROUP * driver.multiprocessors(call.q.device.index or 0)
    launch = "rotated" if call.rotary_cos is not None else "quantize" if isinstance(call.granularity, int) else "kept"
    return tiles >= LEAST_TURNS[launch] * groups


def _sharers(kernel: Kernel, call: Quantize) -> int:
    """Tiles that share the scale of a block."""
    return call.granularity // kernel.main.tile_m if isinstance(call.granularity, int) else 1


def _of_blocks(tiles: _Tiles, call: Quantize) -> Grid:
    """The launch for scales of blocks."""
    assert isinstance(call.granularity, int)
    down, sharers = tiles.down(call.granularity), _sharers(tiles.kernel, call)
    units = [tiles.sizes.batch * n * length * sharers for n, length in zip(tiles.across, down, strict=True)]
    divisors = {"heads_q": tiles.across[0], "heads_k": tiles.across[1], "tiles_q": down[0], "tiles_k": down[1]}
    return tiles.grid("quantize", (units[0], units[1], units[1]), {"sharers": sharers}, divisors)


def _of_heads(tiles: _Tiles, granularity: int | None, *, begin: int, v_groups: int) -> tuple[Grid, int]:
    """The launch for scales of heads, of those of tokens, or of V alone (None), and its maxima, with those
    ``begin`` that another launch has."""
    sizes, down = tiles.sizes, tiles.down(tiles.kernel.main.tile_m)
    across, lengths = (tiles.across[0], *[tiles.across[1]] * 2), (down[0], *[down[1]] * 2)
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads
    group = sizes.heads // sizes.kv_heads
    least = [group if tiles.heads == 1 else group // 2 if group % 2 == 0 else group, 1, 1]  # tiles that share scales
    waits = [granularity == HEAD, granularity == HEAD, True]  # whether scales are of heads
    works = [granularity is not None, granularity is not None, True]
    all_tiles = [sizes.batch * n * length * used for n, length, used in zip(across, lengths, works, strict=True)]
    at_once = tiles.blocks(sum(all_tiles)) * tiles.groups
    pairs = [
        _side_by_side(n, one, int(SET_OF_TURN * at_once) // length) if of_heads else n
        for n, one, length, of_heads in zip(across, least, lengths, waits, strict=True)
    ]
    sets = [-(-n // pair) for n, pair in zip(across, pairs, strict=True)]
    tiles_of_set = [pair * length for pair, length in zip(pairs, lengths, strict=True)]
    units = [sizes.batch * n * m * used for n, m, used in zip(sets, tiles_of_set, works, strict=True)]
    words = [sizes.batch * n * length * of_heads for n, length, of_heads in zip(heads, lengths, waits, strict=True)]
    longest = max(n for n, of_heads in zip(tiles_of_set, waits, strict=True) if of_heads)
    numbers = {
        "lag": max(-(-(longest - 1) // at_once), 1),
        "units_of_tokens": units[0] + units[1] if granularity == TOKEN else 0,
        "words_q": begin, "words_k": begin + words[0], "words_v": begin + words[0] + words[1],
        "tiles_q": down[0], "tiles_k": down[1], "v_groups": v_groups,
    }  # fmt: skip
    divisors = {"group": group, "group_kv": 1} | {
        f"{name}_{of}": value
        for name, values in (("set", tiles_of_set), ("sets", sets), ("pairs", pairs))
        for of, value in zip("qkv", values, strict=True)
    }
    return tiles.grid("kept", units, numbers, divisors), begin + sum(words)


def _side_by_side(across: int, least: int, most: int) -> int:
    """Tiles of the same tokens in a set: a multiple of ``least``, which share scales, and at most
    ``most`` unless that is less. Memory is read in longer pieces if there are more."""
    parts = -(-across // least)
    return least * max(n for n in range(1, parts + 1) if parts % n == 0 and (n == 1 or n * least <= most))


def _rotated(tiles: _Tiles, call: Quantize) -> list[Grid]:
    """The launches that rotate: two for scales of heads. V of blocks comes with Q and K."""
    sizes, sharers, granularity = tiles.sizes, _sharers(tiles.kernel, call), granularities(call)[0]
    down = tiles.down(tiles.kernel.main.tile_m * sharers)
    of_v = granularity == BLOCK
    rows = [sizes.batch * length for length in down]
    every = [n * sharers // tiles.groups for n in tiles.across]
    turns = _turns_of_bands(every, (rows[0], (1 + of_v) * rows[1]), tiles.multiprocessors)
    parts = [whole // part for whole, part in zip(every, turns, strict=True)]
    bands = [n * part for n, part in zip(rows, parts, strict=True)]
    units = [n * length * sharers for n, length in zip(tiles.across, rows, strict=True)]
    numbers = {
        **_rotation(call), "sharers": sharers, "scales": granularity, "bands_q": bands[0], "bands_k": bands[1],
        "bands": bands[0] + (1 + of_v) * bands[1], "parts_q": parts[0], "parts_k": parts[1],
    }  # fmt: skip
    divisors = {
        "heads_q": tiles.across[0], "heads_k": tiles.across[1], "tiles_q": down[0], "tiles_k": down[1],
        "turns_q": turns[0], "turns_k": turns[1], "group": sizes.heads // sizes.kv_heads,
    }  # fmt: skip
    return [
        tiles.grid("rotated", (*units, units[1] * of_v), {**numbers, "rounds": rounds}, divisors)
        for rounds in ((0, 1) if granularity == HEAD else (1,))
    ]


def _turns_of_bands(every: Sequence[int], rows: Sequence[int], blocks: int) -> list[int]:
    """The turns of a band of Q and of K and V: of all heads, or of a part of them where blocks are even then.
    A band costs ``TURNS_OF_ANGLES`` beside its turns."""
    best: tuple[float, list[int]] | None = None
    for most in range(max(every), 0, -1):
        turns = [max(n for n in range(1, min(whole, most) + 1) if whole % n == 0) for whole in every]
        bands = sum(n * whole // part for n, whole, part in zip(rows, every, turns, strict=True))
        cost = -(-bands // blocks) * (max(turns) + TURNS_OF_ANGLES)
        if best is None or cost < best[0]:
            best = cost, turns
    assert best is not None
    return best[1]


class _TensorMaps:
    """Makes the TMA descriptor of a tensor, with the box and swizzle of a kernel's parameter."""

    def __init__(self, driver: Driver, device: int, dtype: str, tensor: Tensor) -> None:
        self._of = driver, device, dtype, tuple(tensor.shape), tensor.stride()

    def __call__(self, parameter: Argument) -> TensorMap:
        return TensorMap(*self._of, parameter.box, parameter.swizzle)


def _against(kernel: Kernel, call: Quantize, sizes: QuantizeSizes) -> str | None:
    """The reason why the kernel does not take a call, or None."""
    if (sizes.head_dim_qk, sizes.head_dim_v) != (kernel.head_dim_qk, kernel.head_dim_v):
        return f"head_dim {sizes.head_dim_qk} and {sizes.head_dim_v}; the kernel has {kernel.head_dim_qk}"
    if call.granularity == "tensor":
        return "a scale for each tensor; the kernel takes scales of blocks, heads and tokens"
    if call.k_mean is not None and (call.granularity != "head" or call.rotary_cos is not None):
        return "keys less their mean; the kernel takes them with scales of heads, not rotated"
    if isinstance(call.granularity, int) and not call.hadamard and call.rotary_cos is None:
        return "blocks with neither transform nor rotation, for which the general kernel is as fast"
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        if not tensor.numel():
            return f"{name} has no row"
        if tensor.data_ptr() % tensormap.ADDRESS_ALIGNMENT:
            return f"{name} does not begin at a multiple of {tensormap.ADDRESS_ALIGNMENT} B"
        reason = tensormap.reason_against(name, tensor.shape, tensor.stride(), tensor.element_size())
        if reason is not None:
            return reason
    return against_rotary(call.rotary_cos, call.rotary_sin) or _against_rotation(call, kernel.head_dim_qk)


def _against_rotation(call: Quantize, head_dim: int) -> str | None:
    """The reason why the kernel does not rotate these rows, or None. It takes whole rows, and tables 16 B at a time."""
    if call.rotary_cos is None:
        return None
    cos: Tensor = call.rotary_cos
    sin: Tensor = call.rotary_sin
    if call.rotary_interleaved or 2 * cos.shape[1] != head_dim:
        return "only whole rows are rotated (rotary_dim = head_dim), and only with halves as partners"
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        apart = table.stride(0) * table.element_size() if table.shape[0] > 1 else 0
        if table.data_ptr() % CHUNK_BYTES or apart % CHUNK_BYTES:
            return f"rows of {name} do not all begin at multiples of {CHUNK_BYTES} B"
    return None


def _rotation(call: Quantize) -> dict[str, int]:
    """Sizes of a rotation of q and k."""
    cos: Tensor = call.rotary_cos
    sin: Tensor = call.rotary_sin
    size = cos.element_size()
    return {
        "positions": cos.shape[0],
        "rotary_form": ROTARY_FORMS[cos.dtype],
        "angle_bytes": cos.shape[1] * size,
        "cos_row_bytes": cos.stride(0) * size,
        "sin_row_bytes": sin.stride(0) * size,
    }
