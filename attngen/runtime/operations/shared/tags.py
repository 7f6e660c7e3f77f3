"""Tags of all operators."""

from __future__ import annotations

import torch

#: Strides reach the operator as the program made them: kernels take any, and selection depends on them.
TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides" if hasattr(torch.Tag, "needs_exact_strides") else "")
    if name
)
