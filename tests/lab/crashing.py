"""Trials that crash, by the name of the kernel: what ``verify`` runs in its workers, in tests of these."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import CaseResult, Trial
from attngen.store import worker

_broken = False


def try_one(folder: str, device: Any, seed: int, last: bool) -> Trial:
    """Abort for one variant, break this process for another, and say of others which process they ran in."""
    global _broken
    name = Path(folder).name
    if _broken:
        raise RuntimeError("CUDA error: what another kernel did")
    if "sliding_window" in name:
        print("CUDA error: misaligned address", file=sys.stderr, flush=True)
        os.abort()
    if "allowed" in name:
        _broken = True
        worker.retire()
        return Trial((CaseResult("ragged", seed, error="RuntimeError: CUDA error: launch failure", broken=True),))
    return Trial((CaseResult(f"process {os.getpid()}", seed, Deviation(0, 1, 0, 1, 0, 1, 1, 1, 0)),))
