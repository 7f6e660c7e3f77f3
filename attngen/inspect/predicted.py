"""Predicted time of a call of usual sizes on a planned forward kernel, from the constants of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attngen.parts.floors import MULTIPROCESSORS
from attngen.plan.model import Plan
from attngen.plan.times import is_measured

#: Sequences, query heads and KV heads of the call.
BATCH, HEADS, KV_HEADS = 1, 16, 4


def predicted(
    plan: Plan, seqlen: int, scalars: Mapping[str, bool | int | float] = MappingProxyType({})
) -> float | None:
    """Return the microseconds of a call of as many queries as keys, with these scalars; None where the plan does not
    tell. Needs torch."""
    if not plan.times:
        return None
    import torch

    from attngen.runtime.arguments.checked import Call, View
    from attngen.runtime.arguments.scalars import ScalarRule
    from attngen.runtime.geometry.prediction import Card, predict
    from attngen.runtime.kernels.module import Kernel

    nothing = View((), (), ())
    call = Call(
        plan.variant, "dense", "bshd", plan.dtype_name, torch.device("meta"), HEADS, KV_HEADS, plan.head_dim_qk,
        plan.head_dim_v, nothing, nothing, nothing, batch=BATCH, seqlen_q=seqlen, seqlen_k=seqlen,
        total_q=BATCH * seqlen, total_k=BATCH * seqlen,
        rules=tuple(
            ScalarRule(scalar.name, scalar.dtype, value, value, None, value)
            for scalar in plan.variant.arguments if (value := scalars.get(scalar.name)) is not None
        ),
    )  # fmt: skip
    kernel = Kernel({**plan.to_dict(), "resources": {"shared_memory": plan.structure.shared_bytes}}, bytes)
    prediction = predict(kernel, call, Card(MULTIPROCESSORS.value))
    return None if prediction is None else prediction.microseconds


def times_text(plan: Plan) -> str:
    """The constants that predictions are made from, in words."""
    launch, tile, step = plan.times
    columns = max(block.width for block in (*plan.columns_qk, *plan.columns_v))
    own = is_measured(plan.structure.consumers, plan.tile_n, columns, plan.operands.q.bytes)
    origin = "as measured" if own else "scaled from the nearest tile that was measured"
    return f"{step / 1e3:.2f} µs a step, {tile / 1e3:.2f} a work tile, {launch / 1e3:.2f} a launch, {origin}"
