"""The kernel that quantizes: whether it takes a call, its arguments, and its launches.

What a call with some shapes, strides, dtypes and devices needs is prepared once, as for attention: later ones fill in
addresses and launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.errors import LoadError
from attngen.formats import QUANTIZE, QUANTIZE_VARIANT
from attngen.runtime.checked import ATTENTION_DTYPES
from attngen.runtime.driver import Driver, Frame, Launch
from attngen.runtime.module import Kernel
from attngen.runtime.quantize_arguments import Quantize, Sizes, in_rows, random_signs, transform_size
from attngen.runtime.registry import registry
from attngen.runtime.select import against_device
from attngen.runtime.splits import reciprocal

#: The tensors of a call, in the order in which their addresses are given.
TENSORS = (
    "q", "k", "v", "q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "maxima", "signs", "rotary_cos",
    "rotary_sin", "rotary_offsets",
)  # fmt: skip

#: How kernels name the dtypes of cosines and sines, and what a scale is of.
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSOR, _HEAD, _BLOCK, _TOKEN = range(4)

_MAX_HEAD_DIM = 256

#: Numbers that a thread holds: of one row, or a half of each of two rows.
_NUMBERS_OF_THREAD = 64

#: Threads of a block whose rows no scale fixes, and of all blocks that a multiprocessor runs at once: each thread has
#: 128 registers.
_THREADS, _RESIDENT = 128, 512

#: Numbers of 16 bits in 16 bytes.
_VECTOR = CHUNK_BYTES // 2

_MOST = 2**31 - 1

_WRITERS = {"i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


@dataclass(frozen=True, slots=True)
class _Phase:
    """A launch: its blocks, and what it is given that another one of the call is not."""

    blocks: int
    numbers: Mapping[str, int]


class PreparedQuantize:
    """A kernel with the numbers of one kind of call. Calling it enqueues its launches on the current stream.

    ``maxima``: how many maxima the first launch leaves to the second, in memory that was cleared; 0 for one launch.
    """

    __slots__ = ("_device", "_driver", "_free", "_functions", "_offsets", "_places", "_templates", "label", "maxima")

    def __init__(
        self, kernel: Kernel, numbers: Mapping[tuple[str, Any], float], phases: Sequence[_Phase], threads: int,
        maxima: int, driver: Driver, device: int,
    ) -> None:  # fmt: skip
        """``numbers``: sizes by (name, None), strides by (tensor, axis). Raises LoadError if no cubin loads."""
        entry = kernel.main.entry
        self.maxima, self.label = maxima, kernel.full_name
        self._driver, self._device = driver, device
        self._offsets = entry.layout.offsets
        #: Index of each address in a frame, in the order of TENSORS.
        self._places = [0] * len(TENSORS)
        self._templates, self._functions = [], []
        for phase in phases:
            packed = Frame(entry.layout.size)
            known: dict[tuple[str, Any], float] = {**numbers}
            known |= {(name, None): value for name, value in phase.numbers.items()}
            for parameter in entry.layout.parameters:
                if parameter.kind == "pointer":
                    if parameter.of not in TENSORS:
                        raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                    self._places[TENSORS.index(parameter.of)] = parameter.offset // 8
                    continue
                key = (parameter.of or "", parameter.axis if parameter.kind == "stride" else None)
                if key not in known or parameter.type not in _WRITERS:
                    raise LoadError(f"parameter '{parameter.name}': a call that quantizes has no such number")
                writer, size = _WRITERS[parameter.type]
                getattr(packed, writer)[parameter.offset // size] = known[key]
            self._templates.append(bytes(packed.bytes))
            function, blocks, _, shared, pdl = entry.launch_on(driver, device, phase.blocks)
            self._functions.append((function, blocks, threads, shared, pdl))
        #: Blocks of parameters that no launch is using. Threads take and return one atomically.
        self._free: list[tuple[list[Frame], list[Launch]]] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Enqueue the launches; ``addresses`` in the order of TENSORS, 0 for what is not given."""
        try:
            frames, launches = self._free.pop()
        except IndexError:
            frames, launches = [], []
            for template, function in zip(self._templates, self._functions, strict=True):
                frame = Frame(len(template))
                frame.bytes[: len(template)] = template
                frames.append(frame)
                launches.append((*function, frame.pointers(self._offsets)))
        for frame in frames:
            words = frame.words
            for place, address in zip(self._places, addresses, strict=True):
                words[place] = address
        self._driver.launch(launches, self._device)
        self._free.append((frames, launches))


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
    shares = _share(sizes.head_dim_qk), _share(sizes.head_dim_v)
    threads, rows = _THREADS, [share.rows * (_THREADS // share.lanes) for share in shares]
    if of_qk == _BLOCK:
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
    if sum(units) > _MOST or max(sizes.seqlen_q, sizes.seqlen_k) + max(rows) > _MOST:
        return "more rows than 32 bits count"
    resident = driver.multiprocessors(call.q.device.index or 0) * max(_RESIDENT // threads, 1)
    phase = partial(_phase, resident=resident)
    phases = [phase(units, rounds=1)]
    maxima = 0
    if of_v in (_TENSOR, _HEAD):  # of q and k as well, but for scales of tokens
        maxima = 3 * (1 if of_v == _TENSOR else sizes.batch * sizes.kv_heads)
        phases.insert(0, phase((0, 0, units[2]) if of_qk == _TOKEN else units, rounds=0))
    divisors = {
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "group": sizes.heads // sizes.kv_heads, "tiles_q": tiles[0],
        "tiles_k": tiles[1], "tiles_v": tiles[2], "lanes_qk": shares[0].lanes, "lanes_v": shares[1].lanes,
    }  # fmt: skip
    found = {
        **_sizes(call, sizes), **_rotation(call, shares[0]), "scales_qk": of_qk, "scales_v": of_v, **divisors,
        **{f"{name}_{of}": value for of, share, count in zip(("qk", "v"), shares, rows, strict=True)
           for name, value in (("rows", count), ("far_row", count // 2 if share.rows > 1 else 0),
                               ("vectors", share.vectors), ("lane_bits", share.lane_bits))},
        "slot_bits": shares[0].slot_bits,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    numbers: dict[tuple[str, Any], float] = {
        **_strides(call),
        **{(name, None): value for name, value in found.items()},
    }
    return PreparedQuantize(kernel, numbers, phases, threads, maxima, driver, call.q.device.index or 0)


def _phase(units: tuple[int, int, int], *, rounds: int, resident: int) -> _Phase:
    """Return a launch of as many blocks as run at once."""
    numbers = {"units": sum(units), "units_q": units[0], "units_k": units[1], "rounds": rounds}
    return _Phase(min(sum(units), resident), numbers)


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
            return f"rows of {name} are not a multiple of {CHUNK_BYTES} B"
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
