"""Kernels that merge two results, compared with plain torch in float64; what parts hold that saw no key is NaN."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.errors import LoadError
from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import Trial, try_cases
from attngen.runtime.arguments.checked import LAYOUTS, TORCH_DTYPES
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.merge.arguments import FIELDS, Merge, check
from attngen.runtime.operations.merge.in_torch import merge
from attngen.runtime.operations.merge.kernel import prepare_on
from attngen.runtime.operations.shared.records import addresses_of

#: Batch and heads of a call.
_BATCH, _HEADS = 3, 5

#: How rows lie: as calls have them, with another order of axes, one result for all sequences, or packed.
_FORMS = ("contiguous", "strided", "shared", "packed")

#: The most by which float32 may be off: shares, as parts of them, and log-sum-exps, of which none here reaches 16.
_SHARE_ERROR, _LSE_ERROR = 2.0**-20, 2.0**-20


def try_merge(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on rows of many widths; ``small``: with few rows."""
    run = partial(_deviation, kernel, torch.device(device))
    chunk = CHUNK_BYTES // TORCH_DTYPES[kernel.dtype].itemsize
    widths = (chunk, 5 * chunk, 128) if small else (chunk, 5 * chunk, 64, 128, 192, 512)
    cases = [
        (f"{form} {layout}, rows of {width}", partial(run, form, layout, width, 7 if small else 300))
        for form, layout, width in product(_FORMS, LAYOUTS, widths)
    ]
    return try_cases(cases, seed)


def _deviation(
    kernel: Kernel, device: torch.device, form: str, layout: str, width: int, seqlen: int, seed: int
) -> Deviation:
    parts = [tensor.to(device) for tensor in _parts(kernel, form, layout, width, seqlen, seed)]
    call = Merge(parts[0], parts[1], parts[2], parts[3], layout)
    sizes = check(call)
    prepared = prepare_on(kernel, call, sizes, drivers.current())
    if isinstance(prepared, str):
        raise LoadError(prepared)
    out = torch.full(sizes.out, math.nan, dtype=call.out_0.dtype, device=device)
    lse = torch.full(sizes.lse, math.nan, dtype=torch.float32, device=device)
    prepared(addresses_of((*FIELDS.tensors_of(call), out, lse)))
    outs, lses = (call.out_0.double(), call.out_1.double()), (call.lse_0.double(), call.lse_1.double())
    wanted, wanted_lse = merge(outs, lses, layout)
    magnitudes, _ = merge([one.abs() for one in outs], lses, layout)
    rounding = torch.finfo(out.dtype).eps / 2 * (wanted.abs() + torch.finfo(out.dtype).tiny)
    allowed, error = rounding + _SHARE_ERROR * magnitudes, (out.double() - wanted).abs()
    beyond = int((~(error <= allowed)).sum())
    wrong = (f"{beyond} of {error.numel()} numbers are beyond their rounding",) if beyond else ()
    nothing = (wanted_lse == -math.inf) & (lse == -math.inf)
    lse_error = (lse.double() - wanted_lse).masked_fill(nothing, 0.0).abs().max()
    return Deviation(
        float(error.max()), float(allowed.max()), float(lse_error), _LSE_ERROR, 0.0, 0.0, 0.0, error.numel(),
        int(nothing.sum()), wrong,
    )  # fmt: skip


def _parts(kernel: Kernel, form: str, layout: str, width: int, seqlen: int, seed: int) -> list[Tensor]:
    """Outputs and log-sum-exps of two results. Both, or one of them, saw no key in every fourth row."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    outs, lses = [], []
    for part in range(2):
        batch = 1 if form == "shared" and part == 0 else _BATCH
        lse = 3 * draw(batch, _HEADS, seqlen)
        lse[torch.rand(lse.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.25] = -math.inf
        rows = lse if layout == "bhsd" and form != "packed" else lse.transpose(1, 2)
        out = draw(*rows.shape, width).masked_fill((rows == -math.inf)[..., None], math.nan)
        if form == "strided":
            out, lse = out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), lse.mT.contiguous().mT
        if form == "packed":
            out, lse = out[0], lse[0]
        outs.append(out.to(TORCH_DTYPES[kernel.dtype]))
        lses.append(lse)
    return outs + lses
