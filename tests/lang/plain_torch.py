"""Expressions in torch's own functions, differentiated by autograd: NaN where 0 meets an infinite derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.lang.derivative import as_clamp
from attngen.lang.eager import _Evaluation, _Guards
from attngen.lang.ir import Expr, Op, Type


class _Plain(_Evaluation):
    def _compute(self, node: Expr, guards: _Guards) -> torch.Tensor:
        clamp = as_clamp(node)
        if clamp is not None and isinstance(node, Op) and node.type is Type.FLOAT:
            return torch.clamp(*torch.broadcast_tensors(*(self.value(part, guards) for part in clamp)))
        return super()._compute(node, guards)


def plain(
    expr: Expr, env: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None,
    float_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Return the value of an expression, broadcast over the values of ``env``."""
    return _Plain(env, tensors or {}, float_dtype, None, checked=True).value(expr, ())
