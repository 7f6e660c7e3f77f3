"""Facts about its variant that a trace of a quantizing call needs, as a constant of the program."""

from __future__ import annotations

import torch

from attngen.lang.shifts import shifts_with_logits
from attngen.lang.variant import Variant
from attngen.runtime.registry.binding import find


@torch.compiler.assume_constant_result
def may_shift(variant: str | Variant, package: str | None) -> bool:
    """``shifts_with_logits`` of a call's variant."""
    return shifts_with_logits(find(variant, package).variant)
