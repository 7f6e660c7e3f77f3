"""Prepared calls that quantize, and sizes and strides that all of their kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize.arguments import (
    FIELDS,
    Quantize,
    QuantizeSizes,
    in_rows,
    random_signs,
    transform_size,
)
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands
from attngen.runtime.operations.shared.operands import rotary_strides

#: Tensors that a call makes, whose addresses follow those of its arguments.
#: ``redo``: whether the launch has anything to do; 0 where it always has.
OUTPUTS = ("q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "maxima", "redo")

#: The names of a launch's tensors, in the order of their addresses.
TENSORS = (*FIELDS.tensors, *OUTPUTS)

_SIGNS = FIELDS.tensors.index("signs")

#: The numbers that kernels have for what a scale is of.
TENSOR, HEAD, BLOCK, TOKEN = range(4)


class PreparedQuantize(HelperLaunches):
    """The launches of one kind of call that quantizes.

    ``maxima``: how many maxima blocks leave to each other or to a later launch, in memory that was cleared; 0 for none.
    """

    __slots__ = ("_scales", "maxima")

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, grids: Sequence[Grid], driver: Driver, device: int,
        sizes: QuantizeSizes, maxima: int,
    ) -> None:  # fmt: skip
        """Raises LoadError if a cubin does not load."""
        super().__init__(kernel, operands, grids, driver, device)
        self.maxima, self._scales = maxima, tuple(sizes.scales[name] for name in "qkv")

    def run(self, call: Quantize, addresses: list[int]) -> tuple[Tensor, ...]:
        """Quantize, and return q, k and v in 8 bits and their scales."""
        device = call.q.device
        values = [torch.empty(x.shape, dtype=call.dtype, device=device) for x in (call.q, call.k, call.v)]
        scales = [torch.empty(shape, dtype=torch.float32, device=device) for shape in self._scales]
        outputs = *values, *scales
        addresses += [tensor.data_ptr() for tensor in outputs]
        if self.maxima:
            maxima = torch.zeros(self.maxima, dtype=torch.int32, device=device)
            addresses += maxima.data_ptr(), 0
        else:
            addresses += 0, 0
        if call.signs is not None:
            signs = call.signs.to(torch.float32).contiguous()
            addresses[_SIGNS] = signs.data_ptr()
        self(addresses)
        return outputs


def granularities(call: Quantize) -> tuple[int, int]:
    """Granularity of the scales of q and k, and of v."""
    if call.granularity == "token":
        return TOKEN, HEAD
    of_all = {"tensor": TENSOR, "head": HEAD}.get(str(call.granularity), BLOCK)
    return of_all, of_all


def strides(call: Quantize) -> dict[tuple[str, str | int | None], int]:
    """Strides in elements by tensor and axis; 0 for tensors that a call does not have."""
    steps_of = rotary_strides(call.rotary_cos, call.rotary_sin)
    for name in "qkv":
        tensor: Tensor = getattr(call, name)
        result = torch.empty(tensor.shape, device="meta", dtype=torch.float32)
        for of, one in ((name, tensor), (f"{name}_out", result)):
            steps = in_rows(one, call.layout).stride()
            steps_of |= {(of, axis): step for axis, step in zip(("b", "s", "h"), steps, strict=False)}
    return steps_of


def sizes_of(call: Quantize, sizes: QuantizeSizes) -> dict[str, float]:
    """The other arguments of all launches of a call, by name."""
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
    """64 bits as a signed number."""
    return word - (word >> 63 << 64)
