"""Decode over a cache that is spread over ranks: each has some keys of every sequence, and all have the queries.

A rank attends to its own keys; outputs and log-sum-exps of all ranks travel in one collective, and each rank merges
them. A sink counts once: only the first rank of the group has it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.parallel import local as names
from attngen.parallel.agreement import agree
from attngen.parallel.called import called
from attngen.parallel.exchange import gather, on_wire
from attngen.parallel.groups import group_of
from attngen.parallel.local import Local, local_variant, own_values
from attngen.parallel.values import Cutter, passed, refuse_unknown
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.operations.attention.entry import attention
from attngen.runtime.operations.merge.call import merge
from attngen.runtime.registry.binding import find

#: Features of variants that ranks compute.
SERVES = ("mask", "score", "sink")

_agreed: set[Any] = set()


@torch.no_grad()
def decode(
    q: Tensor, k: Tensor, v: Tensor, *, position: int, begin: int, group: Any = None, variant: str | Variant = "causal",
    softmax_scale: float | None = None, return_lse: bool = False, backend: str | None = None,
    package: str | None = None, **values: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the same queries on all ranks to the keys of all of them, without gradients.

    q is (batch, seqlen_q, heads, head_dim), the same on each rank, and its first query has the ``position`` in its
    sequence. k and v, (batch, keys, kv_heads, head_dim), are the keys of this rank from position ``begin`` on, any
    number of them, also none. What the mask and score read are keywords: tensors by key or query hold all positions up
    to the last query. ``group`` is a mesh of one axis, a process group or None for all ranks, which make the call
    together; the first call of each kind compares them. Raises CallError.
    """
    group, ranks, rank = group_of(group)
    stated = find(variant, package).variant
    problem = _problem(q, k, v, position, begin, stated, values)
    kind = (stated.name, q.shape, k.shape[2:] if isinstance(k, Tensor) else None, str(q.dtype), tuple(sorted(values)))
    if ranks > 1 and ((id(group), kind) not in _agreed or debugging.active()):
        agree(group, ("", repr((*kind, position))), problem)
        _agreed.add((id(group), kind))
    elif problem is not None:
        raise CallError(problem)
    own, source = _source(stated, rank == 0)
    total = position + q.shape[1]
    here = {
        names.ROW_BEGIN: position, names.KEY_BEGIN: begin, names.TOKENS: total, names.TOTAL: total * q.shape[0]
    }  # fmt: skip
    rows, keys = (torch.arange(a, b, device="cpu") for a, b in ((position, total), (begin, begin + k.shape[1])))
    cutter = Cutter(total, rows, keys, _not_spread, _not_spread)
    arguments = {
        **values, **own_values(stated, here),
        **cutter.values({name: cut for name, cut in own.cuts.items() if cut.of in values}, values, stated.name),
    }  # fmt: skip
    wanted = set(passed(own.variant))
    result: Any = attention(
        q, k, v, variant=source, softmax_scale=softmax_scale, return_lse=True, backend=backend,
        **{name: value for name, value in arguments.items() if name in wanted},
    )  # fmt: skip
    out, lse = result
    if ranks > 1:
        sums = torch.float64 if out.dtype == torch.float64 else torch.float32
        mine = torch.cat([out.to(sums), lse.to(sums).transpose(1, 2)[..., None]], dim=3)
        every = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
        wire = on_wire(group)
        gather(wire(every), wire(mine), group=group)
        parts = every.unflatten(0, (ranks, -1))
        whole, lse = merge(parts[..., :-1], parts[..., -1].transpose(2, 3))
        out = whole.to(out.dtype)
    return (out, lse) if return_lse else out


@lru_cache(maxsize=256)
def _source(stated: Variant, first: bool) -> tuple[Local, Any]:
    """The variant that a rank calls, and its value for calls; only the first one has the sink."""
    variant = stated if first or stated.sink is None else replace(stated, sink=None, sink_text=None)
    if variant is not stated:
        read = variant.uses()[1]
        variant = replace(variant, tensors=tuple(tensor for tensor in variant.tensors if tensor.name in read))
    own = local_variant(variant, "run", "run")
    return own, called(own.variant)


def _problem(q: Any, k: Any, v: Any, position: Any, begin: Any, stated: Variant, values: dict[str, Any]) -> str | None:
    """The first problem of a call on this rank, or None."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            return f"{name} must be a tensor (batch, rows, heads, head_dim)"
    for name, number in (("position", position), ("begin", begin)):
        if type(number) is not int or number < 0:
            return f"{name} must be a number of 0 or more, got {number!r}"
    if begin + k.shape[1] > position + q.shape[1]:
        return f"keys end at {begin + k.shape[1]}, after the last query, which is at {position + q.shape[1] - 1}"
    try:
        stated.require(SERVES, "decode, which merges the results of ranks by their log-sum-exp,")
        refuse_unknown({stated.name: stated}, values)
    except CallError as error:
        return str(error)
    missing = [name for name in passed(stated) if name not in values]
    missing = [name for name in missing if name not in {s.name for s in stated.arguments if s.default is not None}]
    return f"{stated.name} takes {', '.join(missing)}, which the call did not get" if missing else None


def _not_spread(tensor: Tensor, axis: int) -> Tensor:
    raise CallError(
        f"a tensor of shape {tuple(tensor.shape)} has some tokens along axis {axis}; decode takes those of all "
        "positions up to the last query"
    )
