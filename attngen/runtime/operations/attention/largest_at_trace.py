"""The variant of a traced call that wants the largest logits: a constant of the trace."""

from __future__ import annotations

import torch

from attngen.runtime.registry import max_logits

with_max_logits = torch.compiler.assume_constant_result(max_logits.with_max_logits)
