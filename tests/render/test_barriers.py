"""Barriers of the kernels as they are rendered: no access to shared memory races with another, no wait misses its phase
or lasts forever, and results are right; without one of the operations that keep it so, a kernel fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.plan import Plan
from attngen.render import render
from attngen.runtime.arguments.given import Given
from attngen.runtime.autograd import training
from tests.plan.specs import planned
from tests.render.checked_barriers import COMPILER, Library, Mutant, RefusedError, compiled, device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BACKWARD = {"passes": "backward", "backward": "{backend: cuda}"}


@dataclass(frozen=True)
class Size:
    """A call: queries, keys, query and KV heads of a sequence, and how many sequences."""

    rows: int
    keys: int
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1


@dataclass(frozen=True, eq=False)
class Row:
    """A kernel and its calls. ``races``: patterns of those that are harmless. ``spared``: patterns of operations
    without which a kernel may do, and why."""

    name: str
    fields: Mapping[str, Any]
    sizes: tuple[Size, ...]
    variant: str = "causal"
    races: tuple[str, ...] = ()
    spared: Mapping[str, str] = field(default_factory=dict)
    often: bool = False  # in every run

    def plan(self) -> Plan:
        return planned(self.variant, **self.fields)


#: Operations without which kernels may do, and why.
SPARED = {
    "pingpong_wait(); (moved*": "consumers take turns to be fast, and a turn hands over no memory",
    "named_sync(Named::kPingpong, 0, * (removed*": "the last one takes the turn that is left over when a block ends",
    "wait_stores_written(); (removed*": "orders global memory, which is not looked at",
}
LAST_TURN = {"pingpong_wait(); (removed*": "where the last one takes the turn that is left over when a block ends"}
OF_GROUP = {
    "named_sync(Named::kGroup, *": "a turn or the next meeting keeps the warps of a consumer together",
    "named_sync(Named::kAll, *": "of a helper that consumers with turns do not call",
}
#: The loader takes stages of Q, which are given back when V, and dO of the same step, have been multiplied.
OF_Q = {
    f"{operation} (removed*": "as many stages of Q as of dO, and those are given back later"
    for operation in ("v_ring.acquire();", "dout_ring.acquire();", "wait_products<1>();")
}
#: After its last step a warpgroup multiplies whatever is there, and uses nothing of it.
LAST_PRODUCTS = (
    "race at q of block *: warp [4-7] of block * writes what products of warpgroup 0 of block * reads",
    "race at dout of block *: warp [0-3] of block * writes what products of warpgroup 1 of block * reads",
)
OF_SKIPS = dict.fromkeys(
    (
        "v_ring.wait(); (removed*", "skip_step(); (removed*", "release_k(); (removed*", "skip_v(); (removed*",
        "start(true, true); (removed*",
    ),
    "of tiles that are skipped between others, of which these calls have none",
)  # fmt: skip
OF_CLUSTER = {
    "*KRing(0, 0, here).wait(); (removed*": "for blocks without a step, or others have waited for K",
    "VRing(0, 0, here).wait(); (removed*": "for blocks without a step",
    "sync_cluster(); (removed*": "at the end: in these calls no arrival comes after a block has left",
}
SHORT, LONG = Size(1, 1, 8), Size(300, 300, 4)
ROWS = (
    Row("forward", {"backend": "cuda"}, (SHORT, LONG), spared=LAST_TURN, often=True),
    Row("forward-128", {"backend": "cuda", "head_dim": 128}, (SHORT, LONG), spared=LAST_TURN),
    Row("forward-256", {"backend": "cuda", "head_dim": 256}, (SHORT, LONG), spared=LAST_TURN),
    Row("forward-skips", {"backend": "cuda", "head_dim": 96}, (SHORT, LONG), spared=LAST_TURN | OF_SKIPS),
    Row("forward-split", {"backend": "cuda", "split_kv": "tiles"}, (Size(100, 300, 2),), spared=LAST_TURN),
    Row("forward-paged", {"backend": "cuda", "layout": "paged", "head_dim": 128}, (SHORT, LONG), spared=LAST_TURN),
    Row("backward", {**BACKWARD}, (Size(300, 300), Size(70, 70, 2, 2, 3)), spared=OF_GROUP | OF_Q, often=True),
    Row("backward-128", {**BACKWARD, "head_dim": 128}, (Size(300, 300), Size(70, 70, 2, 2, 3)), spared=OF_GROUP),
    Row("backward-ordered", {**BACKWARD, "head_dim": 128, "deterministic": "true"}, (Size(300, 300),)),
    Row(
        "cluster", {**BACKWARD, "head_dim": 256},
        (Size(200, 128), Size(130, 33, 1)), races=LAST_PRODUCTS, spared=OF_CLUSTER, often=True,
    ),
    Row(
        "cluster-ordered", {**BACKWARD, "head_dim": 192, "deterministic": "true"}, (Size(200, 128),),
        races=LAST_PRODUCTS, spared=OF_CLUSTER,
    ),
    Row("cluster-halves", {**BACKWARD, "head_dim": 512}, (Size(200, 128),), races=LAST_PRODUCTS, spared=OF_CLUSTER),
)  # fmt: skip
by_row = pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[] if row.often else [pytest.mark.exhaustive]) for row in ROWS],
)


@cache
def library(row: Row) -> Library:
    return compiled(row.plan(), harmless=row.races)


def call(plan: Plan, variant: str, size: Size) -> list[tuple[Tensor, Tensor]]:
    """Results of a kernel, each with that of plain torch."""
    torch.manual_seed(0)
    dtype = getattr(torch, plan.operands.q.torch)
    qk, columns = plan.head_dim_qk, plan.head_dim_v
    q = torch.randn(size.batch, size.rows, size.heads, qk).to(dtype)
    if plan.layout == "paged":
        pages = -(-size.keys // 64)
        k = torch.randn(size.batch * pages, 64, size.kv_heads, qk).to(dtype)
        v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(dtype)
        table = torch.arange(size.batch * pages, dtype=torch.int32).view(size.batch, pages)
        lengths = torch.full((size.batch,), size.keys, dtype=torch.int32)
        tensors: tuple[Tensor, ...] = (q, k, v, table, lengths)
        attend = attngen.attention_paged
    else:
        k = torch.randn(size.batch, size.keys, size.kv_heads, qk).to(dtype)
        v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(dtype)
        tensors, attend = (q, k, v), attngen.attention  # type: ignore[assignment]
    if plan.direction == "forward":
        given = {"variant": variant}
        return [(attend(*tensors, **given), attend(*tensors, backend="reference", **given))]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, lse = attend(*tensors, variant=variant, backend="reference", return_lse=True)
    dout = torch.randn(out.shape).to(dtype)
    wanted = torch.autograd.grad(out, leaves, dout)
    plain = Given(*(tensor.detach() for tensor in tensors), variant=variant, arguments={})
    *actual, _ = training.differentiate(plain, out.detach(), lse.detach(), dout, None, ())
    return list(zip(actual, wanted, strict=True))


def check(row: Row, tried: tuple[Mutant, ...] = ()) -> dict[Mutant, str]:
    """Run the calls of a row with one block where it can be; return the faults of changes."""
    faults: dict[Mutant, str] = {}
    for size in row.sizes:
        left = [mutant for mutant in tried if not faults.get(mutant)]
        with device(library(row), left, blocks=1) as driver:
            for actual, wanted in call(driver.plan, row.variant, size):
                torch.testing.assert_close(actual.float(), wanted.float(), atol=0.03, rtol=0.03)
        faults |= driver.faults
    return faults


@by_row
def test_a_kernel_is_right_and_has_no_race(row: Row) -> None:
    every = library(row).mutants
    tried = tuple(one for one in every[:: max(len(every) // 8, 1)] if not is_spared(row, one))
    missed = [str(mutant) for mutant, said in check(row, tried).items() if not said]
    assert not missed


def is_spared(row: Row, mutant: Mutant) -> bool:
    return any(fnmatchcase(str(mutant), pattern.replace("[", "[[]")) for pattern in (*SPARED, *row.spared))


#: Of the other rows it is not known why each change that goes unnoticed is harmless.
EXPLAINED = tuple(row for row in ROWS if row.name not in ("forward-split", "backward-ordered", "cluster-halves"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", EXPLAINED, ids=lambda row: row.name)
def test_every_change_is_noticed(row: Row) -> None:
    faults = check(row, tuple(library(row).mutants))
    missed = [str(mutant) for mutant, said in faults.items() if not said and not is_spared(row, mutant)]
    assert not missed


@pytest.mark.parametrize(
    "operation", ["k_ring.release_all();", 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(0));']
)
def test_an_operation_that_is_not_known_is_refused_with_its_line(operation: str) -> None:
    plan = ROWS[0].plan()

    def change(text: str) -> str:
        assert "if (leader) k_ring.release();" in text
        return text.replace("if (leader) k_ring.release();", f"if (leader) {operation}")

    line = change(render(plan).text).split(operation)[0].count("\n") + 1
    with pytest.raises(RefusedError, match=rf"kernel\.inc:{line}:"):
        compiled(plan, change)
