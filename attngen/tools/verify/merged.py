"""Kernels that merge results over two parts of the keys, against float64."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.errors import LoadError
from attngen.runtime.device import driver as drivers
from attngen.runtime.helpers import merge
from attngen.runtime.kernels.module import Kernel
from attngen.tools.verify.contract import Deviation
from attngen.tools.verify.trial import Trial, try_cases

_HEADS = 5

#: Largest difference from float64 of a number, beside half a unit of its last bit, and of a log-sum-exp.
_ALLOWED = 1e-5


def try_merge(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on results of many sizes; ``small``: few."""
    run = partial(_merged, kernel, torch.device(device))
    cases = [
        (f"{rows} rows, head dim {head_dim}, {'sinks' if sinks else 'no sinks'}", partial(run, rows, head_dim, sinks))
        for rows in ((1, 70) if small else (1, 70, 1000))
        for head_dim in (8, 128, 512, 520)
        for sinks in (False, True)
    ]
    return try_cases(cases, seed)


def _merged(kernel: Kernel, device: torch.device, rows: int, head_dim: int, sinks: bool, seed: int) -> Deviation:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, dtype_row(kernel.dtype).torch)
    outs, lses = [], []
    for _ in range(2):
        lse = 3 * torch.randn((1, _HEADS, rows), generator=generator)
        lse[torch.rand((1, _HEADS, rows), generator=generator) < 0.2] = -torch.inf
        out = torch.randn((1, rows, _HEADS, head_dim), generator=generator).to(dtype)
        outs.append(out.masked_fill(_beside(lse) == -torch.inf, 0.0))
        lses.append(lse)
    sink = torch.randn((_HEADS,), generator=generator) if sinks else None
    wanted_lse = torch.logaddexp(*(lse.double() for lse in lses))
    total = wanted_lse if sink is None else torch.logaddexp(wanted_lse, sink.double()[:, None])
    shares = [_beside((lse.double() - total).exp().nan_to_num(0.0)) for lse in lses]
    wanted = sum(share * out.double() for share, out in zip(shares, outs, strict=True))
    assert isinstance(wanted, Tensor)
    on_device = [tensor.to(device) for pair in zip(outs, lses, strict=True) for tensor in pair]
    given_sinks = None if sink is None else sink.to(device)
    launches = merge.prepare_on(kernel, on_device[0], on_device[1], drivers.current())
    if isinstance(launches, str):
        raise LoadError(launches)
    launches([*(tensor.data_ptr() for tensor in on_device), 0 if given_sinks is None else given_sinks.data_ptr()])
    out, lse = on_device[0].cpu().double(), on_device[1].cpu().double()
    unit = torch.finfo(dtype).eps / 2
    error = float(((out - wanted).abs() - unit * wanted.abs()).clamp(min=0.0).max())
    unseen = wanted_lse == -torch.inf
    wrong = [] if torch.equal(lse == -torch.inf, unseen) else ["other rows have no key than in float64"]
    of_lse = float((lse - wanted_lse).masked_fill(unseen, 0.0).abs().max())
    return Deviation(error, _ALLOWED, of_lse, _ALLOWED, 0.0, 0.0, 0.0, out.numel(), 0, tuple(wrong))


def _beside(rows: Tensor) -> Tensor:
    """Numbers of each row as log-sum-exps are laid out, beside the outputs."""
    return rows.transpose(1, 2)[..., None]
