"""Context parallelism: calls of several processes compute what one process does; plans are balanced and sound."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.eager import evaluate
from attngen.parallel import Cost, Links, making, simulate
from attngen.parallel.one_row import as_one_row, documents
from attngen.parallel.overlap import local_tiles
from attngen.resources import root
from tests import forked
from tests.parallel.cases import HEADS, KV_HEADS, Case, cases
from tests.sampling import few

SEQLEN, TILE = 200, 16


def processes(world: int, part: str, folder: Path) -> None:
    """Run the checks of a part in ``world`` processes."""
    program = (
        "import torch._dynamo, torch.multiprocessing\nfrom tests.parallel import ranks\n"
        f"arguments = ({world}, {str(folder / 'meeting')!r}, {part!r})\n"
        f"torch.multiprocessing.start_processes(ranks.run, arguments, nprocs={world}, start_method='fork')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = forked.preload().run([sys.executable, "-c", program], env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr


@few(("world", "part"), [(2, "few"), (2, "some"), (4, "some")], often=(0, 1))
def test_processes_compute_as_one(world: int, part: str, tmp_path: Path) -> None:
    processes(world, part, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_compute_as_one_by_all_methods(world: int, tmp_path: Path) -> None:
    processes(world, "exhaustive", tmp_path)


def plan_of(case: Case, ranks: int, **options: Any) -> Any:
    return attngen.parallel.plan(
        case.variant, SEQLEN, ranks, tile=TILE, cu_seqlens=case.cu_seqlens(SEQLEN), cost=Cost(HEADS, KV_HEADS),
        **{**case.fixed(SEQLEN), **options},
    )  # fmt: skip


@few("case", list(cases()), ids=lambda case: case.name, always=range(0, 999, 2))
def test_every_visible_pair_is_visited(case: Case) -> None:
    """And each rank gets the keys of the tiles that its rows visit."""
    plan = plan_of(case, 3, method="exchange")
    layer = plan.layers[0]
    visited = np.zeros((-(-SEQLEN // TILE),) * 2, dtype=bool)
    for row, lo, hi in zip(layer.visits.row, layer.visits.lo, layer.visits.hi, strict=True):
        visited[row, lo:hi] = True
    place = torch.arange(SEQLEN)
    batch = 1 if case.documents else 2
    names = {
        "q": place[:, None], "q_pos": place[:, None], "kv": place[None, :], "seqlen_q": SEQLEN, "seqlen_k": SEQLEN,
        "total_q": batch * SEQLEN, "total_k": batch * SEQLEN, "heads": HEADS, "kv_heads": KV_HEADS,
    }  # fmt: skip
    offsets = case.cu_seqlens(SEQLEN)
    variant = layer.stated if offsets is None else as_one_row(layer.stated)
    values = {**layer.values, **({} if offsets is None else documents(offsets))}
    names |= {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    seen = np.zeros_like(visited)
    for b in range(batch):
        for h in range(HEADS):
            start = {"q_global": place[:, None] + b * SEQLEN, "kv_global": place[None, :] + b * SEQLEN}
            mask = evaluate(variant.mask, {**names, **start, "b": b, "h": h, "hk": h // 2}, tensors)
            padded = torch.nn.functional.pad(mask.broadcast_to((SEQLEN, SEQLEN)), (0, -SEQLEN % TILE) * 2)
            seen |= padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1).numpy()
    assert not (seen & ~visited).any()
    if case.name in ("causal", "window", "documents", "document_starts", "prefix_lm", "varlen_causal", "chunked"):
        assert (visited == seen).all()  # exact, where bands are
    for rank in range(3):
        assert (layer.sent.tiles[rank] == visited[plan.sharding.owner == rank].any(axis=0)).all()


@few("ranks", [1, 2, 3, 4, 8], always=range(0, 999, 3))
@pytest.mark.parametrize("seqlen", [1, 40, 512, 513, 4096])
def test_each_token_lies_on_one_rank(ranks: int, seqlen: int) -> None:
    for chunks in (None, 1, 2, 5):
        plan = attngen.parallel.plan("causal", seqlen, ranks, chunks=chunks)
        rows = torch.cat([plan.rows(rank) for rank in range(ranks)])
        assert torch.equal(rows.sort().values, torch.arange(seqlen))
        counts = [plan.tokens(rank) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 2 * plan.tile  # one tile more, and the last one ragged
        if seqlen % (ranks * 16) == 0:
            assert len(set(counts)) == 1
        x = torch.randn(2, seqlen, 3)
        assert torch.equal(plan.shard(x, rank=ranks - 1), x[:, plan.rows(ranks - 1)])


def test_positions_count_within_documents() -> None:
    plan = attngen.parallel.plan("causal", 256, 2, cu_seqlens=[0, 100, 100, 256])
    whole = torch.cat([torch.arange(100), torch.arange(156)])
    for rank in range(2):
        assert torch.equal(plan.positions(rank), whole[plan.rows(rank)])


def test_causal_is_balanced_and_a_window_sends_little() -> None:
    causal = attngen.parallel.plan("causal", 65536, 4).explain().variants[0]
    assert causal.balance == 1.0
    window = attngen.parallel.plan("sliding_window", 131072, 4, window=4096).explain().variants[0]
    assert window.method == "exchange"
    assert window.balance < 1.02
    assert window.received == window.least
    assert sum(window.received) <= 0.1 * 3 * 131072  # of what gathering sends
    for variant, values in (("causal", {}), ("prefix_lm", {"prefix": torch.tensor([9000], dtype=torch.int32)})):
        shares = attngen.parallel.plan(variant, 65536, 4, **values).explain().variants[0]
        assert sum(shares.received) <= 1.15 * sum(shares.least)


def test_keys_of_many_heads_travel_in_more_groups() -> None:
    """Attention of four heads hides the keys of the others under GQA, and too few of 28 without it."""
    groups = [
        attngen.parallel.plan("causal", 65536, 4, cost=Cost(32, kv_heads)).layers[0].forward_groups
        for kv_heads in (8, 32)
    ]
    assert groups == [2, 3]


def test_first_rows_of_a_window_are_shared_out_where_that_is_worth_a_run() -> None:
    plan = attngen.parallel.plan("sliding_window", 65536, 2, window=4096)
    (shares,) = plan.explain().variants
    assert shares.balance < 1.005  # one run for each rank: 1.032
    assert shares.received == shares.least == (4096, 1280)
    assert plan.tokens(0) == plan.tokens(1)
    (shares,) = attngen.parallel.plan("sliding_window", 65536, 4, window=4096).explain().variants
    assert shares.received == (0, 4096, 4096, 4096)


def test_documents_are_packed_whole_but_for_few() -> None:
    lengths = [13918, 2222, 337, 5262, 1007, 736, 4461, 6891, 1452, 1991, 1641, 3576, 1265, 8960, 1021, 10796]
    offsets = [0, *np.cumsum(lengths).tolist()]
    packed = attngen.parallel.plan("causal", 65536, 4, cu_seqlens=offsets)
    (shares,) = packed.explain().variants
    (in_chunks,) = attngen.parallel.plan("causal", 65536, 4, cu_seqlens=offsets, chunks=5).explain().variants
    assert {packed.tokens(rank) for rank in range(4)} == {16384}
    assert shares.balance < 1.02
    assert sum(shares.received) < 0.6 * sum(in_chunks.received)
    assert packed.layers[0].overlap == "rows"
    waiting = ~local_tiles(packed.layers[0].visits, packed.sharding.owner)
    assert waiting.mean() < 0.4  # the tiles of documents that are cut
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)[None]
    assert attngen.parallel.plan("packed_documents", 65536, 4, doc=ids).explain().variants[0].balance < 1.02


@pytest.mark.parametrize(("seqlen", "ranks", "first"), [(65536, 8, 40000), (131072, 32, 100000)])
def test_long_documents_are_not_packed_where_another_way_is_faster(seqlen: int, ranks: int, first: int) -> None:
    """Packed into so many ranks, two long documents are uneven, which equal chunks are not."""
    plan = attngen.parallel.plan("causal", seqlen, ranks, cu_seqlens=[0, first, seqlen])
    assert plan.sharding.begins is None
    assert plan.explain().variants[0].balance < 1.08


def test_each_document_has_tiles_of_its_own() -> None:
    """All ranks have as many rows, and tiles visit all keys that their rows see, wherever documents are cut."""
    random, packed = np.random.default_rng(3), 0
    values = {"window": 40}
    for number in range(40):
        seqlen, ranks = int(random.integers(400, 2000)), int(random.integers(2, 6))
        offsets = sorted({0, seqlen, *random.integers(1, seqlen, 5).tolist()})
        variant = ("causal", "full", "sliding_window")[number % 3]
        plan = attngen.parallel.plan(
            variant,
            seqlen,
            ranks,
            tile=16,
            cu_seqlens=offsets,
            cost=Cost(tflops=1e-3, gigabytes=1e6),
            **(values if variant == "sliding_window" else {}),
        )
        sharding, visits = plan.sharding, plan.layers[0].visits
        if sharding.begins is None:  # equal runs may be better
            continue
        packed += 1
        assert sharding.counts.max() - sharding.counts.min() <= 1
        assert 0 < sharding.sizes.min() <= sharding.sizes.max() <= 16
        assert np.isin(offsets[:-1], sharding.begins).all()
        document = np.searchsorted(offsets, sharding.begins, side="right") - 1
        begin, end = np.asarray(offsets)[document], np.asarray(offsets)[document + 1]
        seen = {
            "causal": begin, "full": begin, "sliding_window": np.maximum(sharding.begins - values["window"] + 1, begin)
        }[variant]  # fmt: skip
        last = end if variant == "full" else sharding.bounds[1:]
        assert (sharding.bounds[visits.first] <= seen).all()
        assert (sharding.bounds[visits.last] >= last).all()
        rows = torch.cat([plan.rows(rank) for rank in range(ranks)])
        assert torch.equal(rows.sort().values, torch.arange(seqlen))
    assert packed > 20


def test_several_variants_are_balanced_together() -> None:
    shares = attngen.parallel.plan({"causal": 1, "sliding_window": 5}, 65536, 4, window=1024).explain().variants
    assert [share.balance < 1.05 for share in shares] == [True, True]


def test_plans_are_kept_until_a_tensor_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    doc = torch.zeros(1, 512, dtype=torch.int32)
    first = attngen.parallel.plan("packed_documents", 512, 2, doc=doc)
    assert attngen.parallel.plan("packed_documents", 512, 2, doc=doc) is first
    doc[:, 256:] = 1
    second = attngen.parallel.plan("packed_documents", 512, 2, doc=doc)
    assert second is not first
    assert second.digest != first.digest
    making._plans.clear()
    assert attngen.parallel.plan("packed_documents", 512, 2, doc=doc).digest == second.digest


def test_the_explanation_names_work_and_bytes() -> None:
    plan = attngen.parallel.plan("causal", 4096, 2, method="gather")
    text = str(plan.explain())
    assert text.startswith("4096 tokens on 2 ranks: 2048 each, in 2 chunks of tiles of 128; predicted ")
    assert "causal: gather; tiles 264 at most, 264.0 in the mean (1.000 x); sends 16.0 MiB of K and V" in text
    assert plan.explain().to_dict()["balance"] == {"causal": 1.0}


def test_ranks_that_exchange_heads_have_equal_work() -> None:
    plan = attngen.parallel.plan("causal", 4096, 4, method="heads")
    (shares,) = plan.explain().variants
    assert shares.balance == 1.0
    assert shares.received == (1024 * 3 // 4 * 40 // 8,) * 4  # of 32 heads and 8 KV heads, and back
    assert plan.called() == "causal"


def test_kernels_of_one_gpu_serve_relative_variants() -> None:
    """Those that read positions as distances, or not at all: ranks call them over segments."""
    for name, values in (("causal", {}), ("sliding_window", {"window": 64}), ("alibi", {}), ("full", {})):
        assert attngen.parallel.plan(name, 4096, 2, **values).called() == name
    for mask in ("kv <= q + seqlen_k - seqlen_q", "kv + seqlen_q <= seqlen_k + q", "kv <= q"):
        mine = attngen.variant(mask, name="mine")
        assert (attngen.parallel.plan(mine, 4096, 2).called() == mine) == ("seqlen" in mask)
    packed = attngen.parallel.plan("causal", 4096, 2, cu_seqlens=[0, 1000, 4096], chunks=4)
    assert packed.called() == "causal"
    runs = int((np.diff(packed.sharding.owner) != 0).sum()) + 1
    segments = [len(packed._segments(packed.layers[0], rank)) for rank in range(2)]
    assert sum(segments) == runs + 1  # one run is in two documents


def test_many_ranks_are_simulated() -> None:
    cost = Cost(64, 8)
    window = {method: simulate("sliding_window", 32, method=method, cost=cost, window=4096)
              for method in ("exchange", "gather")}  # fmt: skip
    assert window["exchange"].bound == "kernels"
    assert window["gather"].bound == "links"  # all keys come over the ports of the hosts
    assert window["exchange"].forward > 5 * window["gather"].forward
    slow = simulate("causal", 64, cost=cost, links=Links(between=5.0))
    assert slow.bound == "links"
    assert slow.backward < simulate("causal", 64, cost=cost).backward
    assert "64 ranks of 8192 tokens: " in str(slow)
    with pytest.raises(CallError, match="64 heads and 8 KV heads are not multiples of the number of ranks, 32"):
        simulate("causal", 32, method="heads", cost=cost)
    with pytest.raises(CallError, match="method must be one of exchange, gather, heads, got 'ring'"):
        simulate("causal", 8, method="ring")


def test_plans_of_other_variants_have_the_same_tokens() -> None:
    plan = attngen.parallel.plan("causal", 4096, 2)
    window = plan.also("sliding_window", window=64)
    assert window is plan.also("sliding_window", window=64)
    assert torch.equal(window.rows(1), plan.rows(1))
    assert window.called() == "sliding_window"
    with pytest.raises(CallError, match="a plan needs what the mask reads, and did not get window"):
        plan.also("sliding_window")


def test_local_variants_are_written_as_specs() -> None:
    made = attngen.parallel.plan("causal_top_left", 4096, 2).called()
    text = made.to_yaml(arch="sm90a", head_dim=128, dtype="bf16")
    assert "(q + row_begin if q < row_split else q + row_begin_2) >= kv" in text
    assert "row_position[q] >= kv" in attngen.parallel.plan("causal_top_left", 4096, 2, chunks=4).called().to_yaml()
    window = attngen.parallel.plan("sink_window", 4096, 2, chunks=1, window=64, sinks=2).called()
    assert "q + row_begin" in window.to_yaml()
    packed = attngen.parallel.plan("causal_top_left", 4096, 2, cu_seqlens=[0, 1000, 4096], chunks=4).called()
    assert "row_position[q] >= kv" in packed.to_yaml()
    assert "document_end" not in packed.to_yaml()  # no query sees a key after itself
    assert attngen.parallel.plan("causal", 4096, 1).called() == "causal"


@pytest.mark.parametrize(
    ("arguments", "values", "message"),
    [
        (("causal", 0, 2), {}, "seqlen must be a positive integer, got 0"),
        (("causal", 512, 0), {}, "a plan needs at least 1 rank, got 0"),
        (("causal", 512, None), {}, "torch.distributed is not initialized"),
        (("causal", 512, 2), {"method": "exchnge"}, "got 'exchnge'; did you mean 'exchange'"),
        (("causal", 512, 2), {"tile": -1}, "tile must be a positive integer, got -1"),
        (("causal", 512, 2), {"windw": 3}, "causal: unknown argument 'windw'; takes no arguments of its own"),
        (("sliding_window", 512, 2), {}, "a plan needs what the mask reads, and did not get window"),
        (("sliding_window", 512, 2), {"window": 0}, "window"),
        (("packed_documents", 512, 2), {"doc": torch.zeros(1, 12, dtype=torch.int32)}, "doc"),
        (("packed_documents", 512, 2), {"doc": torch.arange(512, 0, -1, dtype=torch.int32)[None]}, "nondecreasing"),
        (("causal", 512, 2), {"cu_seqlens": [0, 100]}, "end with seqlen, which is 512; got 0 to 100"),
        (("causal", 512, 2), {"cu_seqlens": [0, 300, 200, 512]}, "a decrease after place 1"),
        ((["causal", "causal"], 512, 2), {}, "a plan names each variant once"),
        (({"causal": 0}, 512, 2), {}, "variant 'causal' must have a positive number of layers, got 0"),
    ],
)
def test_wrong_plans_are_refused(arguments: tuple[Any, ...], values: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message.replace("(", r"\(")):
        attngen.parallel.plan(*arguments, **values)


def test_what_a_plan_without_a_group_cannot_do() -> None:
    plan = attngen.parallel.plan("causal", 512, 2)
    with pytest.raises(CallError, match="this plan has no group; allowed: rank=0 to 1"):
        plan.tokens()
    with pytest.raises(CallError, match="rank must be 0 to 1, got 2"):
        plan.tokens(2)
    with pytest.raises(CallError, match="cannot exchange anything"):
        plan.attention(*[torch.zeros(1, 256, 1, 8)] * 3)
    dropped = attngen.variant("q >= kv", dropout=True)
    for says, given in (
        ("method heads", {"method": "heads"}), ("cu_seqlens", {"cu_seqlens": [0, 5, 512]}), ("tile 64", {"tile": 64}),
    ):  # fmt: skip
        with pytest.raises(CallError, match=f"has dropout, which cannot be combined with {says}"):
            attngen.parallel.plan(dropped, 512, 2, **given)
    with pytest.raises(CallError, match="method heads: by_number reads the number of a head"):
        attngen.parallel.plan(attngen.variant("q >= kv + h", name="by_number"), 512, 2, method="heads")
    with pytest.raises(CallError, match=r"Cost: tflops must be a positive number, got 0"):
        Cost(tflops=0)


_ENDS = """
import pathlib, sys
import torch
import torch.distributed as dist
import attngen
import attngen.errors
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
plan = attngen.parallel.plan("causal", 128)
plan.attention(*(torch.randn(1, 128, 1, 16),) * 3)
dist.destroy_process_group()
print([path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()])
try:
    plan.group
except attngen.errors.CallError as error:
    print(error)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}2", rank=0, world_size=1)
print(attngen.parallel.plan("causal", 128) is plan)
dist.destroy_process_group()
"""


def test_a_group_ends_where_it_is_destroyed_although_plans_are_kept(tmp_path: Path) -> None:
    """A thread of gloo that still runs while the interpreter ends may abort the process."""
    command = [sys.executable, "-c", _ENDS, str(tmp_path / "meeting")]
    done = forked.preload().run(command, env={**os.environ, "PYTHONPATH": str(root())}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    destroyed = "the process group of this plan was destroyed; allowed: a plan for another one"
    assert done.stdout.splitlines() == ["[]", destroyed, "False"]
