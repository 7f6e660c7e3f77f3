"""The path of calls that quantize."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.device.interface import Driver
from attngen.runtime.operations.quantize import in_torch as quantize_torch
from attngen.runtime.operations.quantize.arguments import FIELDS, Quantize, QuantizeSizes, check
from attngen.runtime.operations.quantize.kernel import prepare
from attngen.runtime.operations.quantize.sizes import PreparedQuantize
from attngen.runtime.operations.shared.path import Helper


class QuantizeHelper(Helper[Quantize, QuantizeSizes, tuple[Tensor, ...]]):
    """Quantizing; a call gives q, k and v in 8 bits, and their scales."""

    name = "quantize"
    fields = FIELDS

    def check(self, call: Quantize) -> QuantizeSizes:
        return check(call)

    def check_contents(self, call: Quantize, sizes: QuantizeSizes) -> None:
        quantize_torch.check_contents(call, sizes)

    def in_torch(self, call: Quantize, sizes: QuantizeSizes) -> tuple[Tensor, ...]:
        return quantize_torch.quantize(call, sizes)

    def prepare(self, call: Quantize, sizes: QuantizeSizes, driver: Driver) -> PreparedQuantize | str:
        return prepare(call, sizes, driver)


QUANTIZE = QuantizeHelper()
