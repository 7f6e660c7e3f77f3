"""The kernel that quantizes: whether it takes a call, its arguments, and its launches.

What a call with some shapes, strides, dtypes and devices needs is prepared once, as for attention: later ones fill in
addresses and launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.errors import LoadError
from attngen.formats import QUANTIZE, QUANTIZE_VARIANT
from attngen.runtime.arguments import ATTENTION_DTYPES
from attngen.runtime.driver import Driver, Frame, Launch
from attngen.runtime.module import Kernel
from attngen.runtime.quantize_arguments import Quantize, Sizes, in_rows, random_signs, transform_size
from attngen.runtime.registry import registry
from attngen.runtime.select import against_device
from attngen.runtime.splits import reciprocal

#: The tensors of a call, in the order in which their addresses are given.
TENSORS = (
    "q", "k", "v", "q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "counters", "signs", "rotary_cos",
    "rotary_sin", "rotary_offsets",
)  # fmt: skip

#: How kernels name the dtypes of cosines and sines, and what a scale is of.
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSOR, _HEAD, _BLOCK, _TOKEN = range(4)

_MAX_HEAD_DIM = 256

#: Numbers of 16 bits in 16 bytes.
_VECTOR = CHUNK_BYTES // 2

#: Four lanes share a row. A thread has so many slots of 16 bytes, of one row or several.
_LANES, _SLOT_BITS = 4, 3

#: Threads of a block whose rows no scale fixes, and of all blocks that a multiprocessor runs at once: each thread has
#: 128 registers.
_THREADS, _RESIDENT = 128, 512

#: Bytes of rows that are read for their maxima and stay in L2, with as many that follow, until they are rounded.
_GROUP_BYTES = 12 * 2**20

#: Tasks of neighbouring heads that a block does one after the other where rows are rotated, to read their angles once.
_RUN = 4

_MOST = 2**31 - 1

_WRITERS = {"i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


class PreparedQuantize:
    """A kernel with the numbers of one kind of call. Calling it enqueues its launch on the current stream.

    ``counters``: how many 32-bit words it needs in memory that was cleared.
    """

    __slots__ = ("_device", "_driver", "_free", "_function", "_offsets", "_places", "_template", "counters", "label")

    def __init__(
        self, kernel: Kernel, numbers: Mapping[tuple[str, Any], float], blocks: int, threads: int, counters: int,
        driver: Driver, device: int,
    ) -> None:  # fmt: skip
        """``numbers``: sizes by (name, None), strides by (tensor, axis). Raises LoadError if no cubin loads."""
        entry = kernel.main.entry
        self.counters, self.label = counters, kernel.full_name
        self._driver, self._device = driver, device
        self._offsets = entry.layout.offsets
        #: Index of each address in a frame, in the order of TENSORS.
        self._places = [0] * len(TENSORS)
        packed = Frame(entry.layout.size)
        for parameter in entry.layout.parameters:
            if parameter.kind == "pointer":
                if parameter.of not in TENSORS:
                    raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                self._places[TENSORS.index(parameter.of)] = parameter.offset // 8
                continue
            key = (parameter.of or "", parameter.axis if parameter.kind == "stride" else None)
            if key not in numbers or parameter.type not in _WRITERS:
                raise LoadError(f"parameter '{parameter.name}': a call that quantizes has no such number")
            writer, size = _WRITERS[parameter.type]
            getattr(packed, writer)[parameter.offset // size] = numbers[key]
        self._template = bytes(packed.bytes)
        function, blocks, most, shared, pdl = entry.launch_on(driver, device, blocks)
        self._function = (function, blocks, threads, shared // most * threads, pdl)
        #: Blocks of parameters that no launch is using. Threads take and return one atomically.
        self._free: list[tuple[Frame, list[Launch]]] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Enqueue the launch; ``addresses`` in the order of TENSORS, 0 for what is not given."""
        try:
            frame, launches = self._free.pop()
        except IndexError:
            frame = Frame(len(self._template))
            frame.bytes[: len(self._template)] = self._template
            launches = [(*self._function, frame.pointers(self._offsets))]
        words = frame.words
        for place, address in zip(self._places, addresses, strict=True):
            words[place] = address
        self._driver.launch(launches, self._device)
        self._free.append((frame, launches))


def prepare(call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """Return what launches a call that was checked, or the reason why no kernel takes it."""
    kernel = _kernel_for(call.q.dtype, call.q.device.index or 0, driver)
    return kernel if isinstance(kernel, str) else prepare_on(kernel, call, sizes, driver)


def prepare_on(kernel: Kernel, call: Quantize, sizes: Sizes, driver: Driver) -> PreparedQuantize | str:
    """As ``prepare``, on one kernel of the call's dtype and device."""
    reason = _against_rows(call) or _against_tables(call)
    if reason is not None:
        return reason
    of_qk, of_v = _granularities(call)
    widths = {"q": sizes.head_dim_qk, "k": sizes.head_dim_qk, "v": sizes.head_dim_v}
    threads, rows = _THREADS, {of: _THREADS // 32 * _rows_of_warp(width) for of, width in widths.items()}
    if of_qk == _BLOCK:
        rows = dict.fromkeys("qkv", call.granularity)
        threads = 32 * max(-(-call.granularity // _rows_of_warp(width)) for width in widths.values())
    if threads > kernel.main.entry.threads:
        return f"blocks of {call.granularity} tokens take {threads} threads; a kernel has {kernel.main.entry.threads}"
    ratio = sizes.heads // sizes.kv_heads
    parts = {
        of: _part(
            rows[of], seqlen=sizes.seqlen_q if of == "q" else sizes.seqlen_k, batch=sizes.batch,
            kv_heads=sizes.kv_heads, ratio=ratio if of == "q" else 1, width=widths[of],
            granularity=of_v if of == "v" else of_qk,
        )
        for of in "qkv"
    }  # fmt: skip
    run = _RUN if call.rotary_cos is not None else 1
    resident = driver.multiprocessors(call.q.device.index or 0) * max(_RESIDENT // threads, 1)
    tasks = sum(part.tasks for part in parts.values())
    if tasks + 3 * run * resident > _MOST or max(sizes.seqlen_q, sizes.seqlen_k) + max(rows.values()) > _MOST:
        return "more rows than 32 bits count"
    takes = of_v in (_TENSOR, _HEAD)
    groups = 1 if of_v == _TENSOR else sizes.batch * sizes.kv_heads
    divisors = {"heads_ratio": ratio}
    for of, part in parts.items():
        divisors |= {f"section_{of}": part.section, f"tiles_{of}": part.tiles, f"sections_{of}": part.sections,
                     f"group_{of}": part.group}  # fmt: skip
    found = {
        **_sizes(call, sizes), **_rotation(call, _slot_bits(sizes.head_dim_qk)), **_transform(call, sizes.head_dim_qk),
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "takes": int(takes), "run": run, "groups": groups,
        **{f"units_{of}": part.units for of, part in parts.items()},
        **{f"tasks_{of}": part.tasks for of, part in parts.items()},
        **{f"{name}_{suffix}": value for suffix, of, granularity in (("qk", "q", of_qk), ("v", "v", of_v))
           for name, value in (("rows", rows[of]), ("vectors", widths[of] // _VECTOR), ("scales", granularity),
                               ("slot_bits", _slot_bits(widths[of])))},
        **divisors, **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    numbers: dict[tuple[str, Any], float] = {
        **_strides(call),
        **{(name, None): value for name, value in found.items()},
    }
    blocks = min(-(-tasks // run), resident)
    counters = 1 + 6 * groups if takes else 0
    return PreparedQuantize(kernel, numbers, blocks, threads, counters, driver, call.q.device.index or 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """How q, k or v is cut: into tiles of each head, ``sections`` of ``section`` neighbouring heads, and
    groups of units (a tile of one head each) whose maxima are found before any of them is rounded."""

    tiles: int
    section: int
    sections: int
    group: int
    units: int
    tasks: int


def _part(
    rows: int, *, seqlen: int, batch: int, kv_heads: int, ratio: int, width: int, granularity: int
) -> _Part:  # fmt: skip
    tiles = -(-seqlen // rows)
    units = batch * kv_heads * ratio * tiles
    if granularity != _HEAD:
        twice = granularity == _TENSOR
        return _Part(tiles, kv_heads * ratio, 1, units, units, units * (1 + twice))
    of_head = ratio * seqlen * width * 2
    together = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and (n == 1 or n * of_head <= _GROUP_BYTES))
    section = together * ratio
    entries = max(_GROUP_BYTES // (together * of_head), 1)  # sections of a group
    group = min(entries * section * tiles, units)
    return _Part(tiles, section, kv_heads // together, group, units, 2 * units)


def _slot_bits(head_dim: int) -> int:
    """Return the power of two of the slots of a thread that are of one row."""
    return (-(-head_dim // (_LANES * _VECTOR)) - 1).bit_length()


def _rows_of_warp(head_dim: int) -> int:
    return 32 // _LANES << _SLOT_BITS - _slot_bits(head_dim)


def _transform(call: Quantize, head_dim: int) -> dict[str, int]:
    """Return how a transform is shared by lanes and slots, and whether products do it: of numbers of 16 bits, in whole
    rows of four lanes."""
    bits = (transform_size(head_dim) // _VECTOR).bit_length() - 1
    lane_bits = min(bits, _LANES.bit_length() - 1)
    products = call.hadamard and call.rotary_cos is None and head_dim % (_LANES * _VECTOR) == 0
    return {
        "transform_lane_bits": lane_bits,
        "transform_slot_bits": bits - lane_bits,
        "by_products": int(products),
    }


def _granularities(call: Quantize) -> tuple[int, int]:
    """Return what a scale of q and k is of, and what one of v."""
    if call.granularity == "token":
        return _TOKEN, _HEAD
    of_all = {"tensor": _TENSOR, "head": _HEAD}.get(call.granularity, _BLOCK)
    return of_all, of_all


def _kernel_for(dtype: torch.dtype, device: int, driver: Driver) -> Kernel | str:
    """Return the first kernel that quantizes a dtype on a device, or why there is none."""
    reason = f"no package that is found has a kernel that quantizes {str(dtype).removeprefix('torch.')}"
    for _, package in registry.packages():
        for kernel in package.kernels(QUANTIZE_VARIANT):
            if kernel.direction == QUANTIZE and kernel.dtype == ATTENTION_DTYPES.get(dtype):
                against = against_device(kernel, device, driver)
                if against is None:
                    return kernel
                reason = f"{kernel.full_name}: {against}"
    return reason


def _against_rows(call: Quantize) -> str | None:
    """Return why rows cannot be read 16 bytes at a time, or None."""
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        size = tensor.element_size()
        if not tensor.numel():
            return f"{name} has no row"
        if tensor.shape[-1] * size % CHUNK_BYTES:
            return f"rows of {name} are no multiple of {CHUNK_BYTES} B"
        if tensor.shape[-1] > _MAX_HEAD_DIM:
            return f"{name} has head_dim {tensor.shape[-1]}; a kernel takes at most {_MAX_HEAD_DIM}"
        if tensor.stride(-1) != 1:
            return f"{name}'s last dimension is not contiguous"
        strides = (step for extent, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if extent > 1)
        if tensor.data_ptr() % CHUNK_BYTES or any(step * size % CHUNK_BYTES for step in strides):
            return f"{name}'s rows do not all begin at multiples of {CHUNK_BYTES} B"
    return None


def _against_tables(call: Quantize) -> str | None:
    """Return why tables cannot be read as they lie, or None."""
    cos, sin = call.rotary_cos, call.rotary_sin
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is not None and table.shape[1] > 1 and table.stride(1) != 1:
            return f"rows of {name} are not contiguous"
    if cos is not None and cos.dtype != sin.dtype:
        return "rotary_cos and rotary_sin have different dtypes"
    return None


def _strides(call: Quantize) -> dict[tuple[str, Any], int]:
    """Return strides in elements by tensor and axis; 0 for what a call does not have."""
    found: dict[tuple[str, Any], int] = {}
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        result = torch.empty(tensor.shape, device="meta")
        for of, one in ((name, tensor), (f"{name}_out", result)):
            steps = in_rows(one, call.layout).stride()
            found |= {(of, axis): step for axis, step in zip(("b", "s", "h"), steps, strict=False)}
    for name in ("rotary_cos", "rotary_sin"):
        table = getattr(call, name)
        found[name, "s"] = 0 if table is None else table.stride(0)
    return found


def _sizes(call: Quantize, sizes: Sizes) -> dict[str, float]:
    """Return the other arguments of a launch, by name, but for those that differ between launches."""
    bits = random_signs(call.seed, sizes.head_dim_qk) if call.hadamard and call.signs is None else 0
    return {
        "batch": sizes.batch,
        "seqlen_q": sizes.seqlen_q,
        "seqlen_k": sizes.seqlen_k,
        "hadamard": int(call.hadamard),
        "e5m2_out": int(call.dtype == torch.float8_e5m2),
        "norm": float(transform_size(sizes.head_dim_qk)) ** -0.5,
        **{f"sign_bits_{word}": _signed(bits >> 64 * word & (1 << 64) - 1) for word in range(4)},
    }


def _rotation(call: Quantize, slot_bits: int) -> dict[str, int]:
    """Return what tells how rows of q and k are rotated. ``rotary_step``: a number's partner is in the same vector (0),
    in the slot of its thread whose number differs in that bit (1, 2, 4), or somewhere else (-1)."""
    cos = call.rotary_cos
    if cos is None:
        names = ("positions", "rotary_half", "rotary_form", "interleaved", "whole_vectors")
        return dict.fromkeys(names, 0) | {"rotary_step": -1}
    half, step = cos.shape[1], -1
    if _in_whole_vectors(call, together=4):
        if call.rotary_interleaved:
            step = 0
        else:
            bits = range(slot_bits)
            step = next((1 << bit for bit in bits if half == _LANES * _VECTOR << bit), -1)
    return {
        "positions": cos.shape[0],
        "rotary_half": half,
        "rotary_form": _FORMS[cos.dtype],
        "rotary_step": step,
        "interleaved": int(call.rotary_interleaved),
        "whole_vectors": int(_in_whole_vectors(call, together=2)),
    }


def _signed(word: int) -> int:
    """Return 64 bits as a signed number."""
    return word - (word >> 63 << 64)


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
