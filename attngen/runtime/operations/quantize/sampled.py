"""Quantizing with scales of heads from a sample of their rows, keys less their mean: what ``quantize="fp8"`` calls.

Three launches of a kernel of tiles, of which the last one does nothing as long as no number exceeds the largest one of
8 bits. Where no such kernel takes a call, the mean of the keys is an operation of torch, and scales are exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.dtypes import V_GROUP
from attngen.operations import QUANTIZE as DIRECTION
from attngen.operations import QUANTIZE_VARIANT
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize.arguments import Quantize, QuantizeSizes, check, in_rows
from attngen.runtime.operations.quantize.path import QUANTIZE
from attngen.runtime.operations.quantize.sizes import TENSORS
from attngen.runtime.operations.quantize.tiles import of_sample, pays
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands
from attngen.runtime.operations.shared.path import Helper, first_that_takes, kernels_of
from attngen.runtime.operations.shared.records import Fields, Flag, TensorArgument, Text

_EIGHT = torch.float8_e4m3fn

#: Keys from which a mean is taken in torch, at least
#: (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
SAMPLE = 1024

#: The names of the launches' tensors, in the order of their addresses.
_TENSORS = (*TENSORS, "k_mean_out", "k_shift")

#: Bytes to which the transformed means are aligned.
_ALIGNMENT = 16


class Sampled(NamedTuple):
    """A call: q, k and v in 16 bits, whether keys are taken relative to a mean, and whether a kernel may write v in
    groups of keys."""

    q: TensorArgument
    k: TensorArgument
    v: TensorArgument
    layout: Text
    centered: Flag
    grouped: Flag = False

    def exact(self, k_mean: Tensor | None) -> Quantize:
        """The same with scales from the largest magnitudes."""
        return Quantize(
            self.q, self.k, self.v, "head", True, None, 0, self.layout, None, None, False, None, _EIGHT, k_mean
        )


class SampledHelper(Helper[Sampled, QuantizeSizes, tuple[Tensor | None, ...]]):
    """Quantizing by a sample; a call gives q, k and v in 8 bits, their scales, and the mean of the keys
    (batch, kv_heads, head_dim) or None. v in groups of keys is (batch, kv_heads, groups, head_dim, 32), 0 where there
    is no key."""

    name = "quantize"
    fields = Fields(Sampled)

    def check(self, call: Sampled) -> QuantizeSizes:
        return check(call.exact(None))

    def check_contents(self, call: Sampled, sizes: QuantizeSizes) -> None:
        return None

    def in_torch(self, call: Sampled, sizes: QuantizeSizes) -> tuple[Tensor | None, ...]:
        mean = mean_of_keys(call.k, call.layout) if call.centered and sizes.seqlen_k else None
        return *QUANTIZE.run(call.exact(mean)), mean

    def prepare(self, call: Sampled, sizes: QuantizeSizes, driver: Driver) -> PreparedSampled | str:
        exact = call.exact(None)
        v_groups = -(-sizes.seqlen_k // V_GROUP) if call.grouped else 0

        def prepared(kernel: Kernel) -> PreparedSampled | str | None:
            if kernel.loads != "descriptor" or not pays(kernel, exact, sizes, driver):
                return None
            launches = of_sample(kernel, exact, sizes, driver, v_groups)
            if isinstance(launches, str):
                return launches
            operands, grids, words = launches
            operands = replace(operands, tensors=_TENSORS)
            device = call.q.device.index or 0
            return PreparedSampled(kernel, operands, grids, words, driver, device, sizes, v_groups=v_groups)

        kernels = kernels_of(DIRECTION, QUANTIZE_VARIANT, call.q.dtype)
        return first_that_takes(
            kernels, call.q.device.index or 0, driver, prepared, "no kernel of tiles takes the call"
        )


class PreparedSampled(HelperLaunches):
    """The launches of one kind of call."""

    __slots__ = ("_mean", "_of_v", "_scales", "_words")

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, grids: list[Grid], words: int, driver: Driver, device: int,
        sizes: QuantizeSizes, *, v_groups: int,
    ) -> None:  # fmt: skip
        """``words``: those that the first launch clears. Raises LoadError if a cubin does not load."""
        super().__init__(kernel, operands, grids, driver, device)
        self._words = -(-4 * words // _ALIGNMENT) * _ALIGNMENT // 4
        self._mean = sizes.batch, sizes.kv_heads, sizes.head_dim_qk
        self._scales = sizes.batch, sizes.kv_heads
        self._of_v = (*self._scales, v_groups, sizes.head_dim_v, V_GROUP) if v_groups else ()

    def run(self, call: Sampled, addresses: list[int]) -> tuple[Tensor | None, ...]:
        """Quantize, and return q, k and v in 8 bits, their scales, and the mean of the keys."""
        q, k, v, _, centered, _ = call
        device, (batch, kv_heads, head_dim) = q.device, self._mean
        values = [
            torch.empty(shape, dtype=_EIGHT, device=device) for shape in (q.shape, k.shape, self._of_v or v.shape)
        ]
        scales = [torch.empty(self._scales, dtype=torch.float32, device=device) for _ in "qkv"]
        mean = torch.empty(self._mean, dtype=k.dtype, device=device) if centered else None
        count = self._words + batch * kv_heads * head_dim
        workspace = torch.empty(count, dtype=torch.int32, device=device)
        work = workspace.data_ptr()
        of_mean, shift = (mean.data_ptr(), work + 4 * self._words) if mean is not None else (0, 0)
        own = {
            **dict(zip("qkv", addresses, strict=True)), "k_mean": of_mean, "k_mean_out": of_mean, "k_shift": shift,
            "maxima": work, "redo": work,
        }  # fmt: skip
        outputs = (*values, *scales)
        names = ("q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale")
        own |= {name: tensor.data_ptr() for name, tensor in zip(names, outputs, strict=True)}
        self([own.get(name, 0) for name in _TENSORS])
        return (*outputs, mean)


def mean_of_keys(k: Tensor, layout: str) -> Tensor:
    """The mean of the keys of each batch entry and head, (batch, kv_heads, head_dim): of many keys, of some spread
    evenly."""
    rows = in_rows(k, layout)
    return rows[:, :: max(rows.shape[1] // SAMPLE, 1)].mean(dim=1)


SAMPLED = SampledHelper()
