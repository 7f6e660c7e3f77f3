"""Values of bounds of tiles, in torch: bounds may hold searches, which no mask and no score has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from attngen.lang.eager import evaluate
from attngen.lang.ir import Expr, Search, Var, rewrite


def evaluate_bound(expr: Expr, names: Mapping[str, Any], tensors: Mapping[str, Any]) -> Tensor:
    """The values of an expression for the tiles whose corners are among the ``names``."""
    known = dict(names)
    numbers = count()

    def place_of(node: Expr) -> Expr | None:
        """The name of a search's value."""
        if not isinstance(node, Search):
            return None
        name = f"search_{next(numbers)}"
        known[name] = _search(node, known, tensors)
        return Var(name, node.type)

    # bottom up: searches inside searches come first
    return evaluate(rewrite(expr, place_of), known, tensors, checked=False)


def _search(node: Search, names: Mapping[str, Any], tensors: Mapping[str, Any]) -> Tensor:
    length = int(evaluate(node.length, names, tensors))
    value = evaluate(node.value, names, tensors, checked=False)
    tensor = tensors[node.tensor]
    if 0 in tensor.shape:
        return torch.zeros_like(value)
    indices = [evaluate(i, names, tensors, checked=False) for i in node.indices]
    # one value for all tiles: indices of other axes never vary over a box
    where: list[Any] = [
        slice(max(length, 0)) if axis == node.axis else int(i.reshape(-1)[0].clamp(0, n - 1))
        for axis, (i, n) in enumerate(zip(indices, tensor.shape, strict=True))
    ]
    row = tensor[tuple(where)]
    if row.dtype != torch.int32:
        return torch.searchsorted(row.contiguous().to(torch.int64), value.contiguous(), right=node.strict)
    # A table may be long: the values are converted, not the table.
    limits = torch.iinfo(torch.int32)
    place = torch.searchsorted(row.contiguous(), value.clamp(limits.min, limits.max).to(torch.int32).contiguous(),
                               right=node.strict)  # fmt: skip
    return place.masked_fill(value > limits.max, len(row)).masked_fill(value < limits.min, 0)
