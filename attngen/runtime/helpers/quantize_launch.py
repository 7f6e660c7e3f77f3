"""Launches of kernels that quantize, and what their calls have in common.

What a call with some shapes, strides, dtypes and devices needs is prepared once, as for attention: later ones fill in
addresses and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import LoadError
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.helpers.quantize_arguments import Quantize, Sizes, in_rows, random_signs, transform_size
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_BYTES, Parameter

#: The tensors of a launch, in the order in which their addresses are given.
LAUNCHED = (
    "q", "k", "v", "q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "maxima", "signs", "rotary_cos",
    "rotary_sin", "rotary_offsets",
)  # fmt: skip

#: How kernels name the dtypes of cosines and sines, and what a scale is of.
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TENSOR, HEAD, BLOCK, TOKEN = range(4)

_WRITERS = {"i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


@dataclass(frozen=True, slots=True)
class Phase:
    """A launch: which of the kernel's, its blocks and their threads, and what it is given that another one of the call
    is not."""

    entry: Entry
    blocks: int
    threads: int
    numbers: Mapping[str, float]


class PreparedQuantize:
    """A kernel with the numbers of one kind of call. Calling it enqueues its launches on the current stream.

    ``maxima``: how many maxima blocks leave to each other or to a later launch, in memory that was cleared; 0 for none.
    """

    __slots__ = ("_device", "_driver", "_free", "_launches", "label", "maxima")

    def __init__(
        self, kernel: Kernel, numbers: Mapping[tuple[str, Any], float], phases: Sequence[Phase], maxima: int,
        driver: Driver, device: int, maps: Mapping[str, Callable[[Parameter], TensorMap]] | None = None,
    ) -> None:  # fmt: skip
        """``numbers``: sizes by (name, None), strides by (tensor, axis). ``maps`` makes what describes a tensor to the
        copy engine. Raises LoadError if no cubin loads."""
        self.maxima, self.label = maxima, kernel.full_name
        self._driver, self._device = driver, device
        self._launches = [_Launch(phase, numbers, driver, device, maps or {}) for phase in phases]
        #: Blocks of parameters that no launch is using. Threads take and return one atomically.
        self._free: list[tuple[list[Frame], list[Launch]]] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Enqueue the launches; ``addresses`` in the order of LAUNCHED, 0 for what is not given."""
        try:
            frames, launches = self._free.pop()
        except IndexError:
            frames = [one.frame() for one in self._launches]
            launches = [
                (*one.function, frame.pointers(one.offsets)) for one, frame in zip(self._launches, frames, strict=True)
            ]
        for one, frame in zip(self._launches, frames, strict=True):
            one.fill(frame, addresses)
        self._driver.launch(launches, self._device)
        self._free.append((frames, launches))


class _Launch:
    """One launch of a call: its function, and how its parameters are filled in."""

    __slots__ = ("_maps", "_places", "_template", "function", "offsets")

    def __init__(
        self, phase: Phase, numbers: Mapping[tuple[str, Any], float], driver: Driver, device: int,
        described: Mapping[str, Callable[[Parameter], TensorMap]],
    ) -> None:  # fmt: skip
        layout = phase.entry.layout
        self.offsets = layout.offsets
        #: Where each address stands in a frame, as a tensor's place in LAUNCHED and an index of 8 bytes; and each
        #: descriptor, in bytes.
        self._places = [
            (LAUNCHED.index(parameter.of), parameter.offset // 8)
            for parameter in layout.parameters
            if parameter.kind == "pointer" and parameter.of in LAUNCHED
        ]
        self._maps = [
            (LAUNCHED.index(parameter.of), parameter.offset, described[parameter.of](parameter))
            for parameter in layout.parameters
            if parameter.kind == "descriptor" and parameter.of is not None and parameter.of in described
        ]
        packed = Frame(layout.size)
        known: dict[tuple[str, Any], float] = {**numbers}
        known |= {(name, None): value for name, value in phase.numbers.items()}
        for parameter in layout.parameters:
            if parameter.kind == "pointer":
                if parameter.of not in LAUNCHED:
                    raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                continue
            if parameter.kind == "descriptor" and parameter.of in described:
                continue
            key = (parameter.of or "", parameter.axis if parameter.kind == "stride" else None)
            if key not in known or parameter.type not in _WRITERS:
                raise LoadError(f"parameter '{parameter.name}': a call that quantizes has no such number")
            writer, size = _WRITERS[parameter.type]
            getattr(packed, writer)[parameter.offset // size] = known[key]
        self._template = bytes(packed.bytes)
        function, blocks, _, shared, how = phase.entry.launch_on(driver, device, phase.blocks)
        self.function = function, blocks, phase.threads, shared, how

    def frame(self) -> Frame:
        """Return a block of parameters without addresses."""
        frame = Frame(len(self._template))
        frame.bytes[: len(self._template)] = self._template
        return frame

    def fill(self, frame: Frame, addresses: Sequence[int]) -> None:
        """Write the addresses of a call."""
        words = frame.words
        for tensor, place in self._places:
            words[place] = addresses[tensor]
        for tensor, offset, tensor_map in self._maps:
            frame.bytes[offset : offset + DESCRIPTOR_BYTES] = tensor_map.at(addresses[tensor])


def granularities(call: Quantize) -> tuple[int, int]:
    """Return what a scale of q and k is of, and what one of v."""
    if call.granularity == "token":
        return TOKEN, HEAD
    of_all = {"tensor": TENSOR, "head": HEAD}.get(call.granularity, BLOCK)
    return of_all, of_all


def against_tables(call: Quantize) -> str | None:
    """Return why tables cannot be read as they lie, or None."""
    cos, sin = call.rotary_cos, call.rotary_sin
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table is not None and table.shape[1] > 1 and table.stride(1) != 1:
            return f"rows of {name} are not contiguous"
    if cos is not None and cos.dtype != sin.dtype:
        return "rotary_cos and rotary_sin have different dtypes"
    return None


def strides(call: Quantize) -> dict[tuple[str, Any], int]:
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


def numbers_of(call: Quantize, sizes: Sizes) -> dict[str, float]:
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


def _signed(word: int) -> int:
    """Return 64 bits as a signed number."""
    return word - (word >> 63 << 64)
