"""Kernels that quantize, compared with plain torch: the same scales and 8 bits, as far as rounding lets them.

Matrix products add up in another order, by which a scale may differ in its last bits, and a number that is almost
halfway between two of 8 bits may become the other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attngen.errors import LoadError
from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import Trial, try_cases
from attngen.runtime.arguments.checked import LAYOUTS, TORCH_DTYPES
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize import in_torch as quantize_torch
from attngen.runtime.operations.quantize.arguments import FIELDS, GRANULARITIES, LARGEST, Quantize, check
from attngen.runtime.operations.quantize.kernel import prepare_on
from attngen.runtime.operations.quantize.sizes import PreparedQuantize
from attngen.runtime.operations.shared.records import addresses_of

_POSITIONS = 4096

#: Query heads and KV heads; more where rows are rotated, since kernels of tiles share angles among them.
_HEADS, _ROTATED_HEADS = (6, 2), (16, 8)

#: Allowed distances from torch's numbers, relative to these: neighbours in 8 bits, and scales in float32. Subnormal
#: neighbours are at most twice as large.
_STEPS = (1.0, 1e-6)

#: The part of the numbers that may be neighbours.
_TURNED = 1e-4


@dataclass(frozen=True, slots=True)
class _QuantizeCase:
    """A kind of call. ``share`` is the part of each row that is rotated; ``strange``: some numbers are not finite."""

    granularity: str | int
    layout: str
    hadamard: bool
    share: float
    interleaved: bool
    dtype: torch.dtype
    strange: bool
    lengths: tuple[int, int]

    @property
    def name(self) -> str:
        words = [f"a scale for each {self.granularity}" if isinstance(self.granularity, str) else
                 f"blocks of {self.granularity}", self.layout]  # fmt: skip
        words += (["transformed"] if self.hadamard else []) + ([f"rotated {self.share:g}"] if self.share else [])
        words += (["interleaved"] if self.interleaved else []) + (["not finite"] if self.strange else [])
        return " ".join([*words, str(self.dtype).removeprefix("torch.")])


def _cases(kernel: Kernel, *, small: bool) -> Iterator[_QuantizeCase]:
    """Yield the calls that a kernel takes. Tiles have no scales of tensors, those with scales of blocks are
    transformed, and only whole rows are rotated."""
    lengths = (70, 33) if small else (1000, 777)
    rotations = ((0.0, False), (1.0, False), (1.0, True), (0.25, False), (0.3, True))
    tiles = kernel.loads == "descriptor"
    for granularity, layout, hadamard in product(GRANULARITIES, LAYOUTS, (True, False)):
        if tiles and (granularity == "tensor" or (isinstance(granularity, int) and not hadamard)):
            continue
        for dtype in LARGEST:
            yield _QuantizeCase(granularity, layout, hadamard, 0.0, False, dtype, dtype == torch.float8_e4m3fn, lengths)
    for share, interleaved in rotations:
        if tiles and (share != 1.0 or interleaved):
            continue
        for granularity in (128, 64, "token", "head") if tiles else (128,):
            yield _QuantizeCase(granularity, "bshd", True, share, interleaved, torch.float8_e4m3fn, False, lengths)


def try_quantize(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on calls of all kinds; ``small``: with few tokens each."""
    deviation = partial(_deviation, kernel, device=torch.device(device))
    return try_cases([(case.name, partial(deviation, case)) for case in _cases(kernel, small=small)], seed)


def _deviation(kernel: Kernel, case: _QuantizeCase, device: torch.device, seed: int) -> Deviation:
    call = _call(kernel, case, device, seed)
    sizes = check(call)
    prepared = prepare_on(kernel, call, sizes, drivers.current())
    if not isinstance(prepared, PreparedQuantize):
        raise LoadError(f"it does not take the call: {prepared}")
    results = prepared.run(call, addresses_of(FIELDS.tensors_of(call)))
    plain = quantize_torch.quantize(call, sizes)
    wrong, errors, elements = [], [0.0], 0
    for name, actual, expected in zip(
        ("q", "k", "v", "q_descale", "k_descale", "v_descale"), results, plain, strict=True
    ):
        elements += actual.numel()
        actual, expected = actual.float(), expected.float()
        both = ~(actual.isnan() & expected.isnan())
        errors.append(float((actual - expected)[both].abs().max()) if bool(both.any()) else 0.0)
        actual, expected = actual[both], expected[both]
        apart = (actual - expected).abs() > _STEPS[name.endswith("descale")] * torch.maximum(
            actual.abs(), expected.abs()
        )
        others = int((actual != expected).sum())
        if bool(apart.any()) or (name in "qkv" and others > max(_TURNED * actual.numel(), 1)):
            wrong.append(f"{name} has other numbers than plain torch's")
    largest = math.inf if any(map(math.isnan, errors)) else max(errors)
    allowed = 0.0 if wrong or largest == math.inf else largest  # what there is has been looked at
    return Deviation(largest, allowed, 0.0, 0.0, 0.0, 0.0, 0.0, elements, 0, tuple(wrong))


def _call(kernel: Kernel, case: _QuantizeCase, device: torch.device, seed: int) -> Quantize:
    """Return random tokens, some of them large."""
    generator = torch.Generator().manual_seed(seed)

    def real(seqlen: int, heads: int, width: int) -> Tensor:
        shape = (2, seqlen, heads, width) if case.layout == "bshd" else (2, heads, seqlen, width)
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        outliers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        x += 10 * outliers * (torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < 0.001)
        if case.strange:
            x.view(-1)[:: 1009 * width] = torch.inf
            x.view(-1)[5 :: 1013 * width] = torch.nan
        return x.to(TORCH_DTYPES[kernel.dtype]).to(device)

    heads, kv_heads = _ROTATED_HEADS if case.share else _HEADS
    (seqlen_q, seqlen_k), (width, width_v) = case.lengths, (kernel.head_dim_qk, kernel.head_dim_v)
    cos = sin = offsets = None
    if case.share:
        half = max(int(case.share * width) // 2, 1)
        angles = torch.randn(_POSITIONS, half, generator=generator, dtype=torch.float32, device="cpu").to(device)
        cos, sin = angles.cos(), angles.sin()
        offsets = torch.tensor([0, 2000], dtype=torch.int32, device=device)
    return Quantize(
        real(seqlen_q, heads, width), real(seqlen_k, kv_heads, width), real(seqlen_k, kv_heads, width_v),
        case.granularity, case.hadamard, None, seed, case.layout, cos, sin, case.interleaved, offsets, case.dtype,
    )  # fmt: skip
