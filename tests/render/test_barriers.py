"""Barriers of the kernels as they are rendered: no access to shared memory races with another, nor do blocks in global
memory, no wait misses its phase or lasts forever, and results are right; without one of the operations that keep it so,
a kernel fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from attngen.runtime.geometry import sizes
from attngen.runtime.operations.index_scores import arguments as index_scores
from tests.plan.specs import planned
from tests.render.checked_barriers import COMPILER, BarrierError, Library, Mutant, RefusedError, compiled, device
from tests.runtime.host_kernels import SPEC_OF_BLOCK_SCORES, prepared_for_indices
from tests.runtime.support import variant as variant_of
from tests.sampling import few

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BACKWARD = {"passes": "backward", "backward": "{backend: cuda}"}
LATENT = {"v": "key", "head_dim": "{qk: 576, v: 512}"}
BLOCKS = {
    "declared": "variants:\n"
    "  blocks: {mask: 'sel[h, q // 64, kv // 64]', tensors: {sel: {dtype: bool, shape: [h, rows, columns]}}}\n",
    "backend": "cuda", "warps": "{consumer: 2, schedule: cooperative}",
}  # fmt: skip
#: Blocks that heads see: of the second, one consumer of each pair sees few, those that are loaded last or first; of the
#: last two, one sees nothing or a single block, which the other sees, too, or not.
SEEN = torch.rand(6, 5, 15, generator=torch.Generator().manual_seed(1)) < 0.5
SEEN[1, ::2] = True
SEEN[1, 1, 3:], SEEN[1, 3, :-3], SEEN[0, 4] = False, False, False
SEEN[4], SEEN[5, :2], SEEN[5, 2:4] = (
    torch.arange(5)[:, None] % 2 == 0,
    torch.arange(15) == 8,
    torch.arange(2)[:, None] > 0,
)
SEEN[5, 2, 3] = True
#: Blocks of two heads that share keys: runs that one consumer alone sees, longer than there are stages, and a tile of
#: keys that nothing sees.
SEEN_BY_KEYS = torch.rand(2, 15, 6, generator=torch.Generator().manual_seed(3)) < 0.5
SEEN_BY_KEYS[0, :10, :2], SEEN_BY_KEYS[1, :, 4:] = torch.tensor([False, True]), torch.tensor([True, False])
SEEN_BY_KEYS[0, 0, :2], SEEN_BY_KEYS[:, :, 2:4] = True, False
OF_BLOCKS = {"wait_products<0>(); (removed*": "where O is written, when no product is under way"}
LISTED = {"declared": "variants:\n  listed: {keys: counted_index}\n", "layout": "dense", **LATENT}
LISTED_BLOCKS = {"declared": "variants:\n  listed: {keys: counted_blocks_of_8}\n", "layout": "paged", "head_dim": 128}


def masked(mask: str) -> dict[str, str]:
    """The fields of a row whose variant is ``masked``."""
    return {"declared": f'variants:\n  masked: {{mask: "{mask}"}}\n'}


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
    without which a kernel may do, and why. ``blocks`` that a device runs at once, where a kernel asks. ``orders``: of
    the turns of warps; all but the first choose slow blocks, and how many begin at once."""

    name: str
    fields: Mapping[str, Any]
    sizes: tuple[Size, ...]
    variant: str = "causal"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    races: tuple[str, ...] = ()
    spared: Mapping[str, str] = field(default_factory=dict)
    blocks: int = 1
    orders: int = 1
    often: bool = False  # in every run

    def plan(self) -> Plan:
        return planned(self.variant, **self.fields)


#: Operations without which kernels may do, and why.
SPARED = {
    "pingpong_wait(); (moved*": "consumers take turns to be fast, and a turn hands over no memory",
    "named_sync(Named::kPingpong, 0, * (removed*": "the last one takes the turn that is left over when a block ends",
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
#: Two consumers share steps, of which there are as many stages as of P.
OF_PAIRS = {
    "p_ring.acquire(); (removed*": "a step comes when the one before the last is given back, after its P",
    "wait_products<1>(); (removed*": "nothing comes to a stage that the other consumer gives back later",
}
#: After its last step a warpgroup multiplies whatever is there, and uses nothing of it.
LAST_PRODUCTS = (
    "race at q of block *: warp [4-7] of block * writes what products of warpgroup 0 of block * reads",
    "race at dout of block *: warp [0-3] of block * writes what products of warpgroup 1 of block * reads",
)
#: The same, where blocks begin in any order.
LATE_PRODUCTS = (
    *LAST_PRODUCTS,
    "race at q of block *: products of warpgroup 0 of block * reads what warp [4-7] of block * writes",
    "race at dout of block *: products of warpgroup 1 of block * reads what warp [0-3] of block * writes",
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
#: A window, and keys that all see: tiles of keys in between begin later, and end earlier, than the first one.
SINKS = "q_pos >= kv and (kv < 100 or q_pos - kv < 100)"
#: Of four tiles of keys nothing sees the first one. The second one goes from the last queries to the first ones with a
#: leap, while the third one, which begins later and ends earlier, and the last one, which begins between, wait for it.
APART = (
    "kv >= 128 and kv < 256 and (q >= 448 or q < 320) or kv >= 256 and kv < 384 and q >= 128 and q < 384 or "
    "kv >= 384 and q < 448"
)
#: Of turns in a sum.
OF_TURNS = dict.fromkeys(
    (
        "store_release(counter, passed); (removed*",
        "store_release(counter, turn); (removed*",
        "store_relaxed(counter, kNoneBefore*",
    ),
    "others wait longer, until this block has ended",
)
#: It is not known why these are not missed in calls of a row.
UNNOTICED = "not explained"
OF_LATENT = dict.fromkeys(
    (
        "finish_other(tiles - 1); (removed*", "named_sync(Named::kZeroed, half, 128); (removed*",
        "share(*; (removed*",
    ),
    UNNOTICED,
)  # fmt: skip
OF_LISTED = OF_LATENT | dict.fromkeys(
    (
        "named_sync(Named::kMultiplied, half, 128); (removed*", "wait_products<1>(); (removed*",
        "finish_other(step + 1); (removed*", "QRing(0, items_taken++ & 1, here).wait(); (removed*",
    ),
    UNNOTICED,
)  # fmt: skip
OF_ORDER = dict.fromkeys(
    (
        "store_release(counter_at(counter), sum.turn); (removed*",
        "store_relaxed(counter_at(unit * kv_tiles + kv_tile), kNoneBefore*",
    ),
    "others wait longer, until a later turn has passed",
) | {"work_ring.acquire(); (removed*": "blocks of this call take no more tiles of keys than there are stages"}
OF_CUTS = {
    "work_ring.acquire(); (removed*": "blocks of these calls take no more tiles and parts than there are stages",
    "add_release(done(unit), done_parts); (removed*": "for those without a step, of which these calls have none",
}
#: A copy of the whole description of work reads what the other consumer notes there, and uses nothing of it.
WHOLE_WORK = (
    "race at work of block *: warp [0-7] of block * writes what warp [0-7] of block * reads",
    "race at work of block *: warp [0-7] of block * reads what warp [0-7] of block * writes",
)
#: Warps with other rows of the same keys clear the same values after the last key.
ZEROS = tuple(
    f"race at kv of block *: warp [0-7] of block * {one} what warp [0-7] of block * {other}"
    for one, other in (("writes", "writes"), ("writes", "reads"), ("reads", "writes"))
)
#: One block runs at a time in these calls.
ALONE = dict.fromkeys(
    (
        "add_release(done(unit), done_parts); (removed*", "await_turn(*; (removed*",
        "store_release(counter, *; (removed*", "store_relaxed(counter*; (removed*",
    ),
    "tells other blocks what is done",
)  # fmt: skip
SHORT, LONG = Size(1, 1, 8), Size(300, 300, 4)
#: Batch entries that share biases in threes and twos, so that one of each is alone; they have few keys, or none.
ENTRIES = {
    "rows": 3, "bias": torch.randn(2, 2, 130, 152, generator=torch.Generator().manual_seed(1)),
    "real": torch.rand(5, 150, generator=torch.Generator().manual_seed(2)) < 0.7,
    "seqused_k": torch.tensor([150, 40, 0, 60, 33], dtype=torch.int32),
}  # fmt: skip
ROWS = (
    Row("forward", {"backend": "cuda"}, (SHORT, LONG), spared=LAST_TURN),
    Row("forward-128", {"backend": "cuda", "head_dim": 128}, (SHORT, LONG), spared=LAST_TURN),
    Row("forward-256", {"backend": "cuda", "head_dim": 256}, (SHORT, LONG), spared=LAST_TURN),
    Row("forward-skips", {"backend": "cuda", "head_dim": 96}, (SHORT, LONG), spared=LAST_TURN | OF_SKIPS),
    Row("forward-split", {"backend": "cuda", "split_kv": "tiles"}, (Size(100, 300, 2),), spared=LAST_TURN),
    Row(
        "forward-entries", {"backend": "cuda"}, (Size(130, 150, 2, 2, 5),), variant="triangle", arguments=ENTRIES,
        spared=LAST_TURN, orders=2,
    ),
    Row("forward-paged", {"backend": "cuda", "layout": "paged", "head_dim": 128}, (SHORT, LONG), spared=LAST_TURN),
    Row(
        "blocks", {**BLOCKS, "head_dim": 128}, (Size(300, 900, 6), Size(1, 1, 6)), variant="blocks",
        arguments={"sel": SEEN}, spared=OF_BLOCKS, orders=3,
    ),
    Row(
        "blocks-alone", {**BLOCKS, "tile": "{n: 64}", "pipeline": "{stages: 3}"}, (Size(300, 900, 6),),
        variant="blocks", arguments={"sel": SEEN}, spared=OF_BLOCKS, orders=3,
    ),
    Row("backward", {**BACKWARD}, (Size(300, 300), Size(70, 70, 2, 2, 3)), spared=OF_GROUP | OF_Q | ALONE),
    Row(
        "backward-128",
        {**BACKWARD, "head_dim": 128},
        (Size(300, 300), Size(70, 70, 2, 2, 3)),
        spared=OF_GROUP | ALONE,
    ),
    Row(
        "backward-blocks", {**BACKWARD, "declared": BLOCKS["declared"], "head_dim": 128}, (Size(900, 380),),
        variant="blocks", arguments={"sel": SEEN_BY_KEYS}, spared=OF_GROUP | OF_Q | ALONE, orders=2,
    ),
    Row(
        "backward-blocks-by-rows", {**BACKWARD, "declared": BLOCKS["declared"].replace("q // 64", "q // 128")},
        (Size(600, 380),), variant="blocks", arguments={"sel": SEEN_BY_KEYS}, spared=OF_GROUP | OF_Q | ALONE,
    ),
    Row(
        "backward-blocks-192", {**BACKWARD, "declared": BLOCKS["declared"], "head_dim": "{qk: 192, v: 128}"},
        (Size(900, 380),), variant="blocks", arguments={"sel": SEEN_BY_KEYS}, spared=OF_GROUP | OF_Q, orders=2,
    ),
    Row(
        "backward-blocks-256", {**BACKWARD, "declared": BLOCKS["declared"], "head_dim": 256}, (Size(900, 380),),
        variant="blocks", arguments={"sel": SEEN_BY_KEYS}, spared=OF_GROUP | OF_PAIRS, orders=2,
    ),
    Row("backward-ordered", {**BACKWARD, "head_dim": 128, "deterministic": "true"}, (Size(300, 300),)),
    Row(
        "cluster", {**BACKWARD, "head_dim": 256},
        (Size(200, 128), Size(130, 33, 1)), races=LAST_PRODUCTS, spared=OF_CLUSTER,
    ),
    Row(
        "cluster-ordered", {**BACKWARD, "head_dim": 192, "deterministic": "true"}, (Size(200, 128),),
        races=LAST_PRODUCTS, spared=OF_CLUSTER | ALONE,
    ),
    Row("cluster-halves", {**BACKWARD, "head_dim": 512}, (Size(200, 128),), races=LAST_PRODUCTS, spared=OF_CLUSTER),
    # Blocks that wait for each other.
    Row("first", {**BACKWARD}, (Size(200, 300),), spared=OF_GROUP | OF_Q, blocks=3, orders=3),
    Row(  # the last keys are seen by no query
        "first-unseen", {**BACKWARD}, (Size(200, 700),), variant="causal_top_left", spared=OF_GROUP | OF_Q, blocks=3,
        orders=3,
    ),
    Row(
        "order", {**BACKWARD, "head_dim": 128, "deterministic": "true", **masked(APART)}, (Size(500, 512, 1),),
        variant="masked", spared=OF_ORDER, blocks=4, orders=4,
    ),
    Row(
        "order-sinks", {**BACKWARD, "head_dim": 128, "deterministic": "true", **masked(SINKS)}, (Size(500, 600, 1),),
        variant="masked", blocks=5, orders=6,
    ),
    Row(
        "order-window", {**BACKWARD, "head_dim": 128, "deterministic": "true"}, (Size(130, 500),),
        variant="sliding_window", arguments={"window": 150}, blocks=3, orders=4,
    ),
    Row(
        "cluster-order", {**BACKWARD, "head_dim": 192, "deterministic": "true"}, (Size(200, 300, 1),), variant="full",
        races=LATE_PRODUCTS, spared=OF_CLUSTER, blocks=3, orders=3,
    ),
    Row(
        "cut", {**BACKWARD}, (Size(500, 100), Size(500, 400, 1)), variant="full", races=WHOLE_WORK,
        spared=OF_GROUP | OF_Q | OF_CUTS, blocks=3, orders=3,
    ),
    Row("parts", {"backend": "cuda", "split_kv": "tiles"}, (Size(300, 600, 2),), spared=LAST_TURN, blocks=3, orders=3),
    Row(
        "cut-rows", {"backend": "cuda", "head_dim": 128, **masked("kv <= q and (q - kv < 32 or kv < 32) or q < 32")},
        (Size(490, 490, 1),), variant="masked", blocks=5, orders=2,
    ),
    Row("mma", {"arch": "sm80", "backend": "cuda"}, (Size(70, 300, 2),), often=True),
    Row("mma-128", {"arch": "sm80", "backend": "cuda", "head_dim": 128}, (Size(70, 300, 2),)),
    Row("mma-pairs", {"arch": "sm80", "backend": "cuda", "head_dim": 256}, (Size(70, 300, 2),)),
    Row("mma-backward", {"arch": "sm80", **BACKWARD}, (Size(300, 300),), orders=2),
    Row(
        "mma-backward-128", {"arch": "sm80", **BACKWARD, "head_dim": 128}, (Size(200, 300),), orders=2,
    ),
    Row(
        "mma-backward-ordered", {"arch": "sm80", **BACKWARD, "deterministic": "true"}, (Size(300, 200, 1),),
        variant="full", spared=OF_TURNS, blocks=3, orders=2,
    ),
    Row(
        "decode", {"backend": "cuda", "split_kv": "true", "layout": "paged", "head_dim": 128}, (Size(1, 3000, 4, 1),),
    ),
    Row(
        "decode-slices",
        {"backend": "cuda", "split_kv": "true", "layout": "paged", "kv_dtype": "fp8_e4m3", "head_dim": 512},
        (Size(1, 1100, 4, 1), Size(5, 200, 8)), races=ZEROS, orders=2,
    ),
    Row(
        "decode-rows",
        {"backend": "cuda", "split_kv": "true", "layout": "paged", "kv_dtype": "fp8_e4m3", "descale": "token"},
        (Size(1, 6000, 4, 1), Size(5, 200, 8)), races=ZEROS, orders=2,
    ),
    Row("wide", {"backend": "cuda", "head_dim": 320}, (Size(100, 200, 2),), blocks=4, orders=2),
    Row(
        "latent-few", {"backend": "cuda", "layout": "paged", **LATENT}, (Size(1, 300, 8),), blocks=2,
    ),
    Row(
        "latent", {"backend": "cuda", "layout": "paged", **LATENT},
        (Size(1, 700, 40), Size(1, 700, 8), Size(1, 500, 40, 1, 2)), spared=OF_LATENT, blocks=3, orders=3,
    ),
    Row(
        "latent-listed", {"backend": "cuda", **LISTED}, (Size(3, 150, 40), Size(3, 150, 8)), variant="listed",
        spared=OF_LISTED, blocks=4, orders=2,
    ),
    Row("listed-blocks", {"backend": "cuda", **LISTED_BLOCKS}, (Size(3, 50, 8, 2),), variant="listed", blocks=2),
    Row("latent-backward", {**BACKWARD, **LATENT}, (Size(3, 100, 16),)),
)  # fmt: skip
#: Rows like one that CI tries, but for a head dim, an order or a mask: in long runs alone.
SELDOM = {
    "forward-128", "forward-256", "forward-paged", "blocks-alone", "backward-128", "backward-blocks-by-rows",
    "backward-blocks-192", "cluster-ordered", "cluster-order", "first-unseen", "order", "order-sinks", "cut",
    "mma-128", "mma-backward-128", "mma-backward-ordered", "latent", "latent-listed", "cluster-halves", "mma-pairs",
}  # fmt: skip
#: Rows of which each change is tried. `first` is the kernel of `first-unseen`; `order-sinks` and `order-window` are
#: like `order`; of the others it is not known why some changes go unnoticed.
EXPLAINED = tuple(
    row
    for row in ROWS
    if row.name
    not in (
        "forward-split", "backward-ordered", "cluster-halves", "first", "order-window", "order-sinks",
        "cluster-order", "cut-rows", "parts", "wide", "latent-few", "latent-backward", "blocks-alone",
        "backward-blocks", "backward-blocks-by-rows", "backward-blocks-192", "listed-blocks",
    )
)  # fmt: skip


@cache
def library(row: Row) -> Library:
    return compiled(row.plan(), harmless=row.races)


def call(plan: Plan, name: str, size: Size, arguments: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Results of a kernel, each with that of plain torch."""
    torch.manual_seed(0)
    variant: Any = plan.variant if name == "masked" else name
    dtype, of_keys = (getattr(torch, plan.operands.of(name).torch) for name in "qk")
    qk, columns = plan.head_dim_qk, plan.head_dim_v
    q = torch.randn(size.batch, size.rows, size.heads, qk).to(dtype)
    if plan.layout == "paged":
        pages = -(-size.keys // 64)
        k = torch.randn(size.batch * pages, 64, size.kv_heads, qk).to(of_keys)
        v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(of_keys)
        table = torch.arange(size.batch * pages, dtype=torch.int32).view(size.batch, pages)
        lengths = torch.full((size.batch,), size.keys, dtype=torch.int32)
        tensors: tuple[Tensor, ...] = (q, k, v, table, lengths)
        attend = attngen.attention_paged
    else:
        k = torch.randn(size.batch, size.keys, size.kv_heads, qk).to(of_keys)
        v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(of_keys)
        tensors, attend = (q, k, v), attngen.attention  # type: ignore[assignment]
    if plan.direction == "forward":
        given: dict[str, Any] = {"variant": variant, **arguments}
        if plan.descaled:
            shape = k.shape[:3] if plan.token_scales else ()
            given |= {"k_descale": torch.rand(shape) + 0.5, "v_descale": torch.rand(shape) + 0.5}
        if plan.variant.keys is not None:
            given = {
                "variant": variant_of(name, None, keys=plan.variant.keys),
                "indices": torch.randint(-1, size.keys, (size.batch, size.rows, 2 * size.keys), dtype=torch.int32),
                "topk_length": torch.randint(0, 2 * size.keys, (size.batch, size.rows), dtype=torch.int32),
            }
        return [(attend(*tensors, **given), attend(*tensors, backend="reference", **given))]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, lse = attend(*tensors, variant=variant, backend="reference", return_lse=True, **arguments)
    dout = torch.randn(out.shape).to(dtype)
    wanted = torch.autograd.grad(out, leaves, dout)
    if plan.v_of_key:
        dq, dk, dv = wanted
        wanted = dq, dk + torch.nn.functional.pad(dv, (0, qk - columns))
    plain = Given(*(tensor.detach() for tensor in tensors), variant=variant, arguments=dict(arguments))
    *actual, _ = training.differentiate(plain, out.detach(), lse.detach(), dout, None, ())
    return list(zip(actual[: len(wanted)], wanted, strict=True))


def check(row: Row, tried: tuple[Mutant, ...] = ()) -> dict[Mutant, str]:
    """Run the calls of a row; return the faults of changes."""
    return run(library(row), row, tried)


def run(kernel: Library, row: Row, tried: tuple[Mutant, ...] = ()) -> dict[Mutant, str]:
    faults: dict[Mutant, str] = {}
    for size in row.sizes:
        first: list[Tensor] = []
        for order in range(row.orders):
            left = [mutant for mutant in tried if not faults.get(mutant)]
            with device(kernel, left, row.blocks, order) as driver:
                results = call(driver.plan, row.variant, size, row.arguments)
            for actual, wanted in results:
                torch.testing.assert_close(actual.float(), wanted.float(), atol=0.03, rtol=0.03)
            if driver.plan.direction == "backward":  # dQ is added up in any order, unless in a fixed one
                alike = results if getattr(driver.plan.structure, "ordered", False) else results[1:]
                first = first or [actual for actual, _ in alike]
                assert all(torch.equal(actual, one) for (actual, _), one in zip(alike, first, strict=True))
            faults |= driver.faults
    return faults


@pytest.mark.exhaustive
@few(
    "row",
    ROWS,
    always=[number for number, row in enumerate(ROWS) if row.often],
    often=[number for number, row in enumerate(ROWS) if row.name not in SELDOM],
    ids=lambda row: row.name,
)
def test_a_kernel_is_right_and_has_no_race(row: Row) -> None:
    """And a fortieth of the changes is noticed."""
    every = library(row).mutants if row in EXPLAINED else []
    step = 40
    tried = tuple(one for one in every[::step] if not is_spared(row, one))
    missed = [str(mutant) for mutant, said in check(row, tried).items() if not said]
    assert not missed


@pytest.mark.exhaustive
@few(
    "options",
    [
        "overlap: gradients, tile: {m: 64}",
        "overlap: gradients, tile: {m: 128}, packed: false, rows_ahead: 4",
        "overlap: nothing, packed: false",
        "packed: false, rows_ahead: 4, stages: 3",
        "tile: {m: 64}, q_stages: 4",
    ],
    always=1,
    often=(2, 4),
)
def test_a_backward_of_other_choices_is_right_and_has_no_race(options: str) -> None:
    """Choices that specs name, and a search tries."""
    chosen = {"passes": "backward", "backward": f"{{backend: cuda, dkdv: {{{options}}}}}"}
    check(Row(options, chosen, (Size(200, 300),)))


def is_spared(row: Row, mutant: Mutant) -> bool:
    return any(fnmatchcase(str(mutant), pattern.replace("[", "[[]")) for pattern in (*SPARED, *row.spared))


@few("row", EXPLAINED, always=0, often=(), ids=lambda row: row.name)
def test_every_change_is_noticed(row: Row) -> None:
    tried = tuple(mutant for mutant in library(row).mutants if not is_spared(row, mutant))
    missed = [str(mutant) for mutant, said in check(row, tried).items() if not said]
    assert not missed


#: Other changes of sources that have to be noticed: a row, what is changed, and what stands there instead.
CHANGES = {
    "the first alone stores": (
        "first",
        'asm volatile(\n      "atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(now) : "l"(state), '
        '"n"(kUntouched), "n"(kTaken) : "memory");',
        "now = load_acquire(state), load_acquire(state); if (now == kUntouched) store_relaxed(state, kTaken);",
    ),
    "others wait for it": ("first", "while (now != kStored) now = load_acquire(state);", ""),
    "a tile that is passed over leaves the one before it to be asked": (
        "order-sinks", "at -= lanes_before(asked);", "if (!(asked & 1)) break; at -= lanes_before(asked);",
    ),
    "it is passed over for this turn alone": ("order", "lanes_before(left);", "lanes_before(asked);"),
    "what is known from before it is not kept": (
        "order", "if (at == earlier.count) earlier.passed = counter;", "earlier.passed = counter;",
    ),
    "the last step says that later turns need not wait": (
        "order", "sum.unit >= 0 ? kAllPassed : sum.turn + 1", "sum.turn + 1",
    ),
    "the first tile of a block is taken, too": (
        "order", "int index = take_in_order(tile_counter, tiles_of_all, lane);",
        "int index = blockIdx.x; if (lane == 0) atomicAdd(tile_counter, 1);",
    ),
    "to count a part and to learn how many were counted is one operation": (
        "cut",
        'asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(times) '
        ': "memory");',
        "before = load_acquire(counter); for (int i = 0; i < 99; ++i) load_acquire(counter); "
        "store_release(counter, before + times);",
    ),
    "a whole tile counts as parts": ("cut", "part < 0 ? parts : 1;", "1;"),
    "counters are 0 again": ("latent", "counter[0] = counter[1] = 0;", ";"),
    "the last one does the rest": ("latent", "last && left >= kGaveUp", "false"),
    "a worker has two slots": (
        "latent-few", "return 2 * (first_worker + number) + (number == 0);",
        "return 8 * (first_worker + number) + (number == 0);",
    ),
    "a stage goes back before a wait for one behind hidden steps": (
        "backward-blocks", "release(used);\n          find_step();", "find_step();\n          release(used);",
    ),
    "an arrival stands behind its products": (
        "mma", "wait_copies<kStages - 2>();\n    __syncthreads();", "__syncthreads();\n    wait_copies<kStages - 2>();",
    ),
}  # fmt: skip
#: Rows of which CI tries the first change; the others are ``long``.
OFTEN = ("order-sinks", "backward-blocks", "mma")


@few(
    "rule",
    CHANGES,
    always=0,
    often=[[row for row, *_ in CHANGES.values()].index(name) for name in OFTEN],
)
def test_a_source_that_breaks_a_rule_is_noticed(rule: str) -> None:
    name, own, instead = CHANGES[rule]
    (row,) = (row for row in ROWS if row.name == name)
    changed = 0

    def change(text: str) -> str:
        nonlocal changed
        changed += text.count(own)
        return text.replace(own, instead)

    kernel = compiled(row.plan(), change, row.races)
    assert changed
    child = os.fork()  # a broken source may read beyond its tensors
    if child == 0:
        torch.set_num_threads(1)
        said = 2
        try:
            run(kernel, row)
            said = 0
        except (BarrierError, AssertionError):
            said = 1
        finally:
            os._exit(said)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", ["split_slots", "split_counters"])
def test_a_host_that_gives_too_little_memory_is_noticed(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in ROWS if row.name == "latent-few")
    numbers = sizes.split_sizes

    def fewer(*given: Any) -> dict[str, int]:
        own = numbers(*given)
        return own | {number: own[number] // 2}

    monkeypatch.setattr(sizes, "split_sizes", fewer)
    with pytest.raises(BarrierError, match="memory beyond a result or a workspace"):
        run(library(row), row)


@few("operation", ['asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(0));', "k_ring.release_all();"])
def test_an_operation_that_is_not_known_is_refused_with_its_line(operation: str) -> None:
    plan = ROWS[0].plan()

    def change(text: str) -> str:
        return text.replace("if (leader) k_ring.release();", f"if (leader) {operation}")

    assert "if (leader) k_ring.release();" in render(plan).text
    line = change(render(plan).text).split(operation)[0].count("\n") + 1
    with pytest.raises(RefusedError, match=rf"kernel\.inc:{line}:"):
        compiled(plan, change)


@few(("heads", "layout"), [(32, "dense"), (64, "paged"), (64, "dense")], always=0, often=(0, 1))
def test_scores_for_an_index_are_right_and_every_change_is_noticed(
    heads: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scores, "check_contents", lambda call, more: None)
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, heads, 64).bfloat16(), torch.randn(1, 600, 64).bfloat16()
    weights, scale = torch.randn(1, 3, heads), torch.rand(1, 600) + 0.5
    given: dict[str, Any] = {"q": q, "k": k, "weights": weights, "k_scale": scale}
    if layout == "paged":  # the three queries are those of two sequences, and one between them has none
        given = {"q": q[0], "k": k.view(15, 40, 64), "weights": weights[0], "k_scale": scale.view(15, 40)}
        given |= {"cu_seqlens_q": torch.tensor([0, 1, 1, 3], dtype=torch.int32), "max_seqlen_q": 2}
        given |= {"seqused_k": torch.tensor([560, 3, 597], dtype=torch.int32)}
        given |= {"page_table": torch.stack([torch.randperm(15) for _ in range(3)]).int()}
    plans = (one.plan for one in prepared_for_indices() if one.plan.head_dim_qk == 64)
    every_change_is_noticed(next(one for one in plans if one.layout == layout), lambda: attngen.index_scores(**given))


@pytest.mark.exhaustive
@few(("heads", "layout"), [(4, "paged"), (2, "dense"), (8, "paged")], always=0, often=(0,))
def test_scores_of_blocks_are_right_and_every_change_is_noticed(
    heads: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scores, "check_contents", lambda call, more: None)
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, heads, 64).bfloat16(), torch.randn(1, 1200, 64).bfloat16()
    given: dict[str, Any] = {"q": q, "k": k}
    if layout == "paged":
        given = {"q": q[0], "k": k.view(30, 40, 64), "cu_seqlens_q": torch.tensor([0, 1, 1, 3], dtype=torch.int32)}
        given |= {"max_seqlen_q": 2, "seqused_k": torch.tensor([1160, 3, 1197], dtype=torch.int32)}
        given |= {"page_table": torch.stack([torch.randperm(30) for _ in range(3)]).int()}
    plans = (one.plan for one in prepared_for_indices(SPEC_OF_BLOCK_SCORES) if one.plan.direction == "block_scores")
    plan = next(one for one in plans if one.layout == layout and one.head_dim_qk == 64)
    every_change_is_noticed(plan, lambda: attngen.block_scores(**given, block=128))


def every_change_is_noticed(plan: Plan, score: Callable[[], Tensor]) -> None:
    """Check the scores of a kernel, and that a fault is found in each of its mutants."""
    kernel = compiled(plan)
    wanted, tried = score(), kernel.mutants
    for order in range(2):
        with device(kernel, tried, blocks=1, order=order) as driver:
            actual = score()
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-2)
        assert driver.faults
        tried = [mutant for mutant, said in driver.faults.items() if not said]
        if not tried:
            break
    assert not tried
