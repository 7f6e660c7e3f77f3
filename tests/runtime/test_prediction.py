"""Predicted times: work tiles, handed out one by one, beside the same by hand."""

from __future__ import annotations

from heapq import heapreplace
from typing import Any

import pytest
import torch

from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.paging import Paging, bind_paged
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry import prediction
from attngen.runtime.geometry.prediction import Card, predict
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.order import preferred
from tests.runtime.support import kernel_of, manifest_of, variant, window_variant
from tests.sampling import few

BLOCKS, TIMES = 13, (1000.0, 300.0, 100.0)
SEEN_BY_CAUSAL = [[None, ["add", "q_pos_hi", 1]]]


def made(tile_m: int, tile_n: int, of: Variant | None = None, **fields: Any) -> Kernel:
    """Return a kernel as CUDA builds write it."""
    return kernel_of({**manifest_of(of or variant(), tiles=(tile_m, tile_n)), "times": TIMES, **fields})


def call_of(batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, of: Variant | None = None) -> Call:
    q = torch.empty(batch, seqlen_q, heads, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(batch, seqlen_k, kv_heads, 64, device="meta", dtype=torch.bfloat16)
    scalars = {"window": 77} if of is not None and of.scalars[0].const is None else {}
    return bind(
        of or variant(), q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=scalars,
    )  # fmt: skip


def by_hand(kernel: Kernel, call: Call, causal: bool) -> float:
    """Hand out work tiles one by one, those of the last queries first."""
    launch, tile, step = TIMES
    group = call.heads // call.kv_heads if kernel.pack_gqa else 1
    rows, units = call.seqlen_q * group, call.batch * call.heads // group
    until = [0.0] * BLOCKS
    for first in reversed(range(0, rows, kernel.tile_m)):
        last = min((first + kernel.tile_m - 1) // group, call.seqlen_q - 1)
        keys = min(max(last + call.seqlen_k - call.seqlen_q + 1, 0), call.seqlen_k) if causal else call.seqlen_k
        for _ in range(units):
            heapreplace(until, until[0] + tile + step * -(-keys // kernel.tile_n))
    return launch + max(until)


@few("causal", [False, True], always=range(0, 999, 3))
@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 64, 64, 4, 4), (1, 350, 350, 8, 4), (2, 150, 1000, 4, 1), (3, 100, 90, 2, 2), (1, 7, 900, 16, 4),
     (1, 300, 50, 8, 8), (13, 128, 128, 1, 1)],
)  # fmt: skip
def test_tiles_are_handed_out_one_by_one(sizes: tuple[int, ...], pack_gqa: bool, causal: bool) -> None:
    kernel = made(64, 32, pack_gqa=pack_gqa, visible=SEEN_BY_CAUSAL if causal else [])
    call = call_of(*sizes)
    predicted = predict(kernel, call, Card(BLOCKS))
    assert predicted is not None
    assert predicted.nanoseconds == pytest.approx(by_hand(kernel, call, causal))
    assert predicted.microseconds == predicted.nanoseconds / 1e3


@pytest.mark.parametrize("sizes", [(1, 4096, 4096, 3, 1), (2, 2000, 5000, 4, 4), (16, 1024, 1024, 16, 16)])
def test_many_tiles_are_looked_at_in_groups(sizes: tuple[int, ...]) -> None:
    kernel, call = made(64, 32, visible=SEEN_BY_CAUSAL), call_of(*sizes)
    predicted = predict(kernel, call, Card(BLOCKS))
    assert predicted is not None
    assert predicted.tiles == -(-sizes[1] // 64) * sizes[0] * sizes[3] > prediction._LOOKED_AT
    assert predicted.nanoseconds == pytest.approx(by_hand(kernel, call, causal=True), rel=0.04)


def test_scalars_of_the_call_do_not_change_the_prediction() -> None:
    """The bounds of a window are not known from shapes, unless the variant fixes it: it is taken to be of a quarter."""
    visible = [[["add", ["sub", "q_pos_lo", "window"], 1], ["add", "q_pos_hi", 1]]]
    times = []
    for scalar in ({}, {"default": 200}, {"const": 200}, {"default": 4000}, {"default": 2048 // 4}):
        own = window_variant(**scalar)
        call = call_of(1, 2048, 2048, 1, 1, own)
        prediction = predict(made(64, 32, own, visible=visible), call, Card(BLOCKS))
        assert prediction is not None
        times.append(prediction.nanoseconds)
    causal = predict(made(64, 32, visible=SEEN_BY_CAUSAL), call_of(1, 2048, 2048, 1, 1), Card(BLOCKS))
    assert causal is not None
    assert times[3] == causal.nanoseconds > times[0] == times[4] > times[1] == times[2]


def test_packed_sequences_are_taken_to_be_equally_long() -> None:
    lengths = torch.tensor([0, 100, 700, 800], dtype=torch.int32)
    q = torch.empty(800, 2, 64, dtype=torch.bfloat16)
    call = bind(
        variant(), q, q, q, Packing(lengths, lengths, 600, 600), softmax_scale=None, seqused_k=None,
        return_lse=False, layout="bshd", arguments={},
    )  # fmt: skip
    packed = predict(made(64, 32, layout="varlen"), call, Card(BLOCKS))
    alike = predict(made(64, 32), call_of(3, 267, 267, 2, 2), Card(BLOCKS))
    assert packed == alike


def test_a_plan_without_times_tells_nothing() -> None:
    assert predict(made(64, 32, times=[]), call_of(1, 64, 64, 2, 2), Card(BLOCKS)) is None


@pytest.mark.parametrize("timed", [True, False])
def test_a_kernel_that_was_measured_on_this_card_is_taken_there(timed: bool) -> None:
    """On another card the plan's own choice is; kernels without times are told apart by the card's name alone."""
    row = {"file": "a.yaml", "gpu": "this card", "times": [1000.0, 300.0, 150.0] if timed else []}
    own = made(64, 32, times=TIMES if timed else [])
    tuned = made(64, 64, times=[1000.0, 300.0, 210.0] if timed else [], tuned=[row])
    call = call_of(1, 4096, 4096, 4, 4)
    for order in ([own, tuned], [tuned, own]):
        assert preferred(order, call, Card(BLOCKS, "this card"))[0] is tuned
        assert preferred(order, call, Card(BLOCKS, "that card"))[0] is own


def shared(most: int = 8, **fields: Any) -> Kernel:
    """Return a kernel of which up to ``most`` blocks share the keys of a tile."""
    manifest = {**manifest_of(variant(), tiles=(64, 32)), "times": TIMES, **fields}
    manifest["launches"][-1] |= {"grid": "key_shares", "cluster": most}
    return kernel_of(manifest)


@pytest.mark.parametrize(
    ("tiles", "keys", "wanted"),
    [
        (8, 3200, 8),  # 100 steps, of which each block takes 13
        (30, 3200, 4),  # one wave of four blocks each; more would be two waves
        (32, 3200, 3),  # of four, 30 run at once
        (132, 3200, 1),
        (40, 32, 1),  # a single step
        (8, 96, 3),  # more blocks than steps would save nothing
    ],
)
def test_as_many_blocks_share_keys_as_take_the_least_time(tiles: int, keys: int, wanted: int) -> None:
    call = call_of(1, 64, keys, tiles, tiles)
    predicted = predict(shared(), call, Card(132))
    assert predicted is not None
    assert predicted.shares == wanted
    launch, tile, step = TIMES
    assert predicted.nanoseconds == launch + tile + step * -(-keys // 32 // wanted)
    assert ("blocks share" in str(predicted)) == (wanted > 1)


def test_clusters_that_the_driver_knows_decide() -> None:
    """With fewer clusters of four at once than tiles, three blocks are better than a second wave."""
    call, card = call_of(1, 64, 3200, 4, 4), Card(16)
    at_once = {1: 16, 2: 8, 3: 4, 4: 3}
    assert prediction.shares(shared(4), call, card, lambda size: at_once[size]) == 3
    assert prediction.shares(shared(4), call, card, lambda size: 16 // size) == 4
    assert prediction.shares(shared(4, times=[]), call, card, lambda size: 16 // size) == 1
    alone = call_of(1, 64, 3200, 1, 1)  # a single tile
    assert prediction.shares(shared(4), alone, card, lambda size: size == 2) == 2
    assert prediction.shares(shared(4), alone, card, lambda size: 0) == 1


@pytest.mark.parametrize(("longest", "wanted"), [(64, 8), (63, 2)])
def test_one_of_several_sequences_may_have_all_queries(longest: int, wanted: int) -> None:
    """As one of several prefixes that a batch shares, over pages: then keys are shared among blocks as if it had."""
    q, pages = torch.empty(64, 8, 64, dtype=torch.bfloat16), torch.empty(200, 16, 8, 64, dtype=torch.bfloat16)
    table, used = torch.zeros(8, 200, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    call = bind_paged(
        variant(), q, pages, pages, Paging(table, torch.zeros(9, dtype=torch.int32), longest), softmax_scale=None,
        seqused_k=used, return_lse=False, arguments={},
    )  # fmt: skip
    predicted = predict(shared(layout="paged"), call, Card(132))
    assert predicted is not None
    assert predicted.shares == wanted


def test_the_kernel_that_shares_keys_is_preferred_only_where_it_is_faster() -> None:
    manifest = manifest_of(variant(), backend="cuda", tiles=(64, 32), persistent=True)
    ordinary = kernel_of({**manifest, "times": TIMES})
    merges = shared(backend="cuda", times=[1000.0, 600.0, 100.0])
    for tiles, keys, best in ((8, 3200, merges), (132, 3200, ordinary), (8, 64, ordinary)):
        call = call_of(1, 64, keys, tiles, tiles)
        assert preferred([ordinary, merges], call, Card(132))[0] is best
        assert preferred([merges, ordinary], call, Card(132))[0] is best


def test_few_blocks_are_enough_where_memory_binds() -> None:
    """Keys and values of 16 heads are 13.1 MB; with 0.8 of 2,000 bytes in a nanosecond they take 8.2 microseconds."""
    call = call_of(1, 64, 3200, 16, 16)
    predicted = {bandwidth: predict(shared(), call, Card(132, "", bandwidth)) for bandwidth in (1e6, 2000.0, 1000.0)}
    assert [one and one.shares for one in predicted.values()] == [6, 2, 1]
    memory = predicted[2000.0]
    assert memory is not None
    assert memory.nanoseconds == pytest.approx(TIMES[0] + TIMES[1] + 16 * 3200 * 2 * 64 * 2 / 1600)
