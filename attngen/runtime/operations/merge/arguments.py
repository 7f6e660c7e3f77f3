"""Arguments of a call that merges two results by a kernel, and the checks of all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, LAYOUTS
from attngen.runtime.operations.shared.records import Fields, TensorArgument, Text


class Merge(NamedTuple):
    """Two results and how they lie: see ``merge``."""

    out_0: TensorArgument
    out_1: TensorArgument
    lse_0: TensorArgument
    lse_1: TensorArgument
    layout: Text


FIELDS = Fields(Merge)


class MergeSizes(NamedTuple):
    """Shapes of the output and of its log-sum-exp."""

    out: tuple[int, ...]
    lse: tuple[int, ...]


def check(call: Merge) -> MergeSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    return check_parts((call.out_0, call.out_1), (call.lse_0, call.lse_1), call.layout)


def check_parts(outs: Sequence[Tensor], lses: Sequence[Tensor], layout: str) -> MergeSizes:
    """Check that outputs and log-sum-exps fit each other. Raises CallError."""
    if layout not in LAYOUTS:
        raise CallError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}{suggest(str(layout), LAYOUTS)}")
    if not outs or len(outs) != len(lses):
        raise CallError(f"merge takes as many log-sum-exps as outputs, at least one, got {len(outs)} and {len(lses)}")
    first = outs[0]
    leader = next((out for out in outs if out.dim() == 4 and out.shape[0] != 1), first)
    if first.dtype not in ATTENTION_DTYPES:
        raise CallError(f"outs[0] has dtype {first.dtype}; allowed: {', '.join(map(str, ATTENTION_DTYPES))}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dim() not in (3, 4) or out.dim() != first.dim():
            raise CallError(
                f"outs[{i}] must have {'3 or 4' if i == 0 else first.dim()} dimensions, got shape {tuple(out.shape)}"
            )
        if out.dtype != first.dtype or out.device != first.device:
            raise CallError(
                f"outs[0] has {first.dtype} on {first.device}, but outs[{i}] has {out.dtype} on {out.device}"
            )
        if lse.dtype not in (torch.float32, torch.float64) or lse.device != first.device:
            raise CallError(f"lses[{i}] must be float32 on {first.device}, got {lse.dtype} on {lse.device}")
        wanted = _beside(out.shape[:-1], layout)
        if tuple(lse.shape) != wanted:
            raise CallError(f"lses[{i}] must have shape {wanted} beside outs[{i}], got {tuple(lse.shape)}")
        shared = out.dim() == 4 and out.shape[0] == 1
        if out.shape[1:] != leader.shape[1:] or not (shared or out.shape[0] == leader.shape[0]):
            raise CallError(f"one of outs has shape {tuple(leader.shape)}, but outs[{i}] has {tuple(out.shape)}")
    return MergeSizes(tuple(leader.shape), _beside(leader.shape[:-1], layout))


def _beside(rows: Sequence[int], layout: str) -> tuple[int, ...]:
    """The shape of log-sum-exps beside outputs with these ``rows``."""
    return tuple(rows) if layout == "bhsd" and len(rows) == 3 else (*rows[:-2], rows[-1], rows[-2])
