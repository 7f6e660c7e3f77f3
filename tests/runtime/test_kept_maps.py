"""Tile maps that plain calls keep: visible pairs from the second use on, and a new map after a write that torch counts.

A classifier of the test's own stands for the generated kernel: the content of a tile is a number, 0 for an empty tile,
1 for a full one, and anything else for visible pairs, which tiles with the same number share.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Scalar, Variant
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.given import Given
from attngen.runtime.launch import map_cache, tile_map
from attngen.runtime.launch.map_cache import kept_maps, same_words
from attngen.runtime.launch.tile_map import MapMaker
from tests.map_oracle import check_order
from tests.runtime.support import variant

ROWS, TILES, WORDS, TILE_WORDS = 4, 40, 2, 8
MAP_WORDS, SLOTS = 2 * WORDS * ROWS, 32 * WORDS * ROWS
SEEN = variant(
    "seen", "seen[q, kv] > least", tensors=[Declared("seen", "int32", ("rows", "tiles"))],
    scalars=[Scalar("least", "int32")],
)  # fmt: skip

DIAGONAL = variant("diagonal", "(q - kv) % 7 <= least", scalars=[Scalar("least", "int32")])


class Shape:
    slots, map_words, tile_words, words, tiles = SLOTS, MAP_WORDS, TILE_WORDS, WORDS, ROWS * TILES
    order, row_words = 0, MAP_WORDS
    keeps_pairs = True

    @staticmethod
    def tensor_shape() -> tuple[int]:
        return (MAP_WORDS + SLOTS,)


def memory(address: int, kind: Any, count: int) -> Any:
    return (kind * count).from_address(address)


class Launches:
    """The launches of a call that reads one tile map, with the classifier of this test."""

    names = ("q", "seen", "tile_map:forward", "tile_hashes:forward", "tile_list:forward")
    first_map = 2

    def __init__(self) -> None:
        self.maps = {"forward": Shape}
        self.calls: list[str] = []
        self.content: torch.Tensor = torch.zeros(0)

    def stream(self) -> int:
        return 7

    def classify(self, owner: str, addresses: Sequence[int], scale: float, scalars: Sequence[int]) -> None:
        content = (self.content * (self.content > scalars[0])).tolist()
        map_at, hashes_at, list_at = addresses[self.first_map :]
        if list_at:
            self.calls.append("bits")
            count = memory(list_at, ctypes.c_int32, 1)[0]
            tiles = memory(list_at, ctypes.c_int32, 1 + count)[1:]
            bits = memory(map_at + 4 * (MAP_WORDS + SLOTS), ctypes.c_int32, count * TILE_WORDS)
            for slot, tile in enumerate(tiles):
                row, column = divmod(tile, 32 * WORDS)
                for word in range(TILE_WORDS):
                    bits[slot * TILE_WORDS + word] = content[row][column]
            return
        self.calls.append("hash" if hashes_at else "classify")
        words = memory(map_at, ctypes.c_uint32, MAP_WORDS)
        slots = memory(map_at + 4 * MAP_WORDS, ctypes.c_int32, SLOTS)
        if not hashes_at:
            for i in range(MAP_WORDS):
                words[i] = 0
            for i in range(SLOTS):
                slots[i] = -1
        for row in range(ROWS):
            for column in range(TILES):
                kind, place = content[row][column], row * 2 * WORDS + column // 32
                if hashes_at and words[place + WORDS] >> column % 32 & 1:
                    hashes = memory(hashes_at, ctypes.c_int64, SLOTS)
                    hashes[row * 32 * WORDS + column] = (kind * 0x9E3779B97F4A7C15 + 1) % 2**63 - 2**62
                elif not hashes_at and kind:
                    words[place + (kind > 1) * WORDS] |= 1 << column % 32


def partial_pairs(words: torch.Tensor) -> dict[tuple[int, int], int]:
    """Number of pairs of each partial tile of the map, or -1 where it has none."""
    pairs = {}
    for row in range(ROWS):
        for column in range(TILES):
            if int(words[row * 2 * WORDS + WORDS + column // 32]) >> column % 32 & 1:
                slot = int(words[MAP_WORDS + row * 32 * WORDS + column])
                bits = words[MAP_WORDS + SLOTS + slot * TILE_WORDS :][:TILE_WORDS]
                assert slot < 0 or len(set(bits.tolist())) == 1
                pairs[row, column] = int(bits[0]) if slot >= 0 else -1
    return pairs


def expected(content: torch.Tensor) -> dict[tuple[int, int], int]:
    return {
        (row, column): kind for row, line in enumerate(content.tolist()) for column, kind in enumerate(line) if kind > 1
    }


class Calls:
    """A prepared call, and the maps that its launches get."""

    def __init__(self, variant: Variant = SEEN) -> None:
        self.launches = Launches()
        sizes = {"batch": 1, "heads": 1, "seqlen_q": 128 * ROWS, "seqlen_k": 128 * TILES}
        call = SimpleNamespace(variant=variant, rules=(SimpleNamespace(name="least", dtype="fp32"),), **sizes)
        self.call, self.kernel = call, SimpleNamespace(full_name="tests/seen")
        self.maker = MapMaker(self.launches, self.kernel, call, torch.device("cpu"))  # type: ignore[arg-type]

    def __call__(self, seen: torch.Tensor, least: float = 0, form: str = "dense") -> torch.Tensor:
        self.launches.content = seen.reshape(ROWS, TILES)
        given = Given(seen, seen, seen, arguments={"seen": seen, "least": least}, form=form)
        (words,) = self.maker.append(given, [0, 0], 1.0, (least,))
        return words


@pytest.fixture
def calls() -> Iterator[Calls]:
    map_cache.KEPT.clear()
    yield Calls()
    map_cache.KEPT.clear()


def content(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 6, (ROWS, TILES), generator=generator, dtype=torch.int32)


def test_pairs_come_with_the_second_use(calls: Calls) -> None:
    seen = content(1)
    assert set(partial_pairs(calls(seen)).values()) == {-1}
    assert calls.launches.calls == ["classify"]
    words = calls(seen)
    assert partial_pairs(words) == expected(seen)
    assert len(words) == MAP_WORDS + SLOTS + 4 * TILE_WORDS  # tiles of one kind share their pairs
    assert calls(seen) is words
    assert calls.launches.calls == ["classify", "hash", "bits"]


def test_a_write_makes_a_new_map(calls: Calls) -> None:
    seen = content(2)
    for _ in range(2):
        calls(seen)
    seen[1, 3:30] = 5
    assert set(partial_pairs(calls(seen)).values()) == {-1}
    assert partial_pairs(calls(seen)) == expected(seen)
    seen.T[7].zero_()  # through a view
    assert set(partial_pairs(calls(seen))) == set(expected(seen))


def test_a_write_that_torch_does_not_count_is_found_under_debug(calls: Calls) -> None:
    seen = content(14)
    for _ in range(2):
        calls(seen)
    seen.data[2, :20] = 5
    assert partial_pairs(calls(seen)) != expected(seen)
    with attngen.debug(), pytest.raises(CallError, match="written without torch counting it"):
        calls(seen)


def test_maps_of_pages_are_not_kept(calls: Calls) -> None:
    seen = content(15)
    for _ in range(2):
        assert set(partial_pairs(calls(seen, form="paged")).values()) == {-1}
    assert not kept_maps()


def test_views_of_one_tensor_are_one(calls: Calls) -> None:
    both = torch.stack([content(3), content(4)])
    calls(both[0])
    assert partial_pairs(calls(both[0])) == expected(both[0])  # another object, the same memory
    assert set(partial_pairs(calls(both[1]))) == set(expected(both[1]))  # the same base, other memory
    both[0, 0] = 4
    assert partial_pairs(calls(both[0])).keys() == expected(both[0]).keys()


def test_equal_tensors_and_other_scalars_are_others(calls: Calls) -> None:
    seen = content(5)
    assert calls(seen) is not calls(seen.clone())
    words = calls(seen, least=2)
    assert set(partial_pairs(words)) == {place for place, kind in expected(seen).items() if kind > 2}
    assert partial_pairs(calls(seen)) == expected(seen)


def test_scalars_of_zero_with_different_signs_are_others(calls: Calls) -> None:
    """A mask may read the sign, as atan2(least, -1.0) > 0 does."""
    seen = content(5)
    plus, minus = calls(seen, least=0.0), calls(seen, least=-0.0)
    assert plus is not minus
    assert len(kept_maps()) == 2
    calls(seen, least=0.0)
    assert calls.launches.calls == ["classify", "classify", "hash", "bits"]


def test_nothing_is_kept_of_tensors_that_died_or_count_no_writes(calls: Calls) -> None:
    gc.freeze()  # a collection would look at all that lives for longer
    seen = content(6)
    calls(seen)
    assert len(kept_maps()) == 1
    del seen
    calls.launches.content = torch.zeros(0)
    gc.collect()
    assert not kept_maps()
    with torch.inference_mode():
        seen = content(7)
        calls(seen)
        assert set(partial_pairs(calls(seen)).values()) == {-1}
    assert not kept_maps()


def test_a_map_without_partial_tiles_gets_none(calls: Calls) -> None:
    seen = content(8).clamp(max=1)
    calls(seen)
    assert len(calls(seen)) == MAP_WORDS + SLOTS
    calls(seen)
    assert calls.launches.calls == ["classify", "hash"]


def test_pairs_beyond_the_limit_are_left_out(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_map, "MAX_BITS", 4 * 3 * TILE_WORDS)
    seen = content(9)
    for _ in range(3):
        words = calls(seen)
    assert set(partial_pairs(words).values()) == {-1}


def test_the_oldest_maps_are_dropped(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_cache, "_KEPT_MAPS", 2)
    tensors = [content(10 + n) for n in range(3)]
    for seen in (*tensors[:2], tensors[0], tensors[2]):
        calls(seen)
    assert len(kept_maps()) == 2
    before = list(calls.launches.calls)
    calls(tensors[0])
    assert calls.launches.calls == before


def test_the_state_and_origin_of_a_kept_map(calls: Calls) -> None:
    seen = content(14)
    given = Given(seen, seen, seen, arguments={"seen": seen, "least": 1})
    calls.call.scalars = {"least": 1}

    def known() -> map_cache.KeptMap | None:
        return tile_map.kept_map(calls.kernel, calls.call, given)  # type: ignore[arg-type]

    assert tile_map.where_from(calls.call, given, "forward") == "a tile map that the first call makes"  # type: ignore[arg-type]
    for changes, direction, wanted in (
        ({"form": "paged"}, "forward", "a tile map that each call makes"),
        ({"tile_map": tile_map.TileMap(None)}, "forward", "the caller's tile map"),
        ({"tile_map": tile_map.TileMap(None)}, "backward", "a tile map that the first call makes"),
    ):
        other = given._replace(**changes)
        assert tile_map.where_from(calls.call, other, direction) == wanted  # type: ignore[arg-type]
    calls(seen, least=2)
    assert known() is None  # that of another scalar
    for has_bits in (False, True):
        calls(seen, least=1)
        partial = int((seen > 1).sum())
        assert known() == map_cache.KeptMap(ROWS * TILES, 0, partial, has_bits, 0.0)
    visits = f"visits {partial} of {ROWS * TILES} tiles, {partial} of them partial, their pairs as bits"
    assert str(known()) == f"{visits}; by a tile map, made in 0.00 ms, kept"
    seen[0, 0] = 5
    assert known() is None


def test_a_map_made_on_demand_has_pairs_at_once(calls: Calls) -> None:
    seen = content(13)
    calls.launches.content = seen
    words = calls.maker.made([0, 0], 1.0, (0,))
    assert partial_pairs(words) == expected(seen)
    assert not kept_maps()


def test_a_map_of_positions_serves_all_streams_and_captures(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    stream = [7]
    of_positions = Calls(DIAGONAL)
    monkeypatch.setattr(of_positions.launches, "stream", lambda: stream[0])
    seen = content(16)
    assert set(partial_pairs(of_positions(seen)).values()) == {-1}
    words = of_positions(seen)
    assert partial_pairs(words) == expected(seen)
    stream[0] = 8
    assert of_positions(seen) is words
    capturing[0] = True
    assert of_positions(seen) is words
    monkeypatch.setattr(map_cache, "_KEPT_MAPS", 0)
    capturing[0] = False
    for least in range(1, 4):
        of_positions(seen, least=least)
    assert of_positions(seen) is words  # a graph reads it
    assert len(kept_maps()) == 2


def test_a_map_that_streams_share_outlives_what_they_enqueued(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    monkeypatch.setattr(map_cache, "hold_for_current_stream", held.append)
    stream = [7]
    of_positions = Calls(DIAGONAL)
    monkeypatch.setattr(of_positions.launches, "stream", lambda: stream[0])
    seen = content(19)
    words = [of_positions(seen) for _ in range(3)][-1]
    assert not held  # torch knows of the stream that made it
    for stream[0] in (8, 9, 8):
        assert of_positions(seen) is words
    assert list(map(id, held)) == [id(words)] * 2


def test_warm_up_runs_of_a_graph_keep_no_map(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map's memory comes from the graph's pool, where nothing may outlive the program."""
    stream = SimpleNamespace(cuda_stream=7)
    trees = SimpleNamespace(get_manager=lambda _, create_if_none_exists: SimpleNamespace(stream=stream))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)  # type: ignore[arg-type]
    device = torch.device("cuda", 0)
    assert map_cache.in_graph_pool(device, 7)
    assert not map_cache.in_graph_pool(device, 8)
    monkeypatch.setattr(tile_map, "in_graph_pool", lambda *_: True)
    seen = content(20)
    assert calls(seen) is not calls(seen)
    assert calls.launches.calls == ["classify", "classify"]
    assert not kept_maps()


def test_a_capture_before_the_second_use_makes_its_map(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    of_positions = Calls(DIAGONAL)
    seen = content(17)
    first = of_positions(seen)
    capturing[0] = True
    assert of_positions(seen) is not first
    assert of_positions.launches.calls == ["classify", "classify"]


@pytest.mark.parametrize("read", [SEEN, DIAGONAL])
def test_the_last_map_is_taken_while_nothing_changes(
    calls: Calls, read: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen, looked = Calls(read), content(19), []
    words = [own(seen) for _ in range(3)][-1]
    for name in ("get", "lasting"):
        monkeypatch.setattr(map_cache.KEPT, name, partial(_counted, looked, getattr(map_cache.KEPT, name)))
    assert own(seen) is words
    assert not looked
    assert own(seen, least=1) is not words
    assert looked
    own(seen)
    looked.clear()
    seen += 1
    assert (own(seen) is words) == (read is DIAGONAL)
    assert bool(looked) == (read is SEEN)
    map_cache.KEPT.clear()
    assert own(seen) is not words


def _counted(looked: list[str], own: Any, *given: Any) -> Any:
    looked.append("looked")
    return own(*given)


@pytest.mark.parametrize("read", [SEEN, DIAGONAL])
def test_a_map_of_a_single_row_waits_for_nothing(calls: Calls, read: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "keeps_pairs", False)
    of_one = Calls(read)
    seen = content(18)
    words = of_one(seen)
    assert of_one(seen) is words
    assert of_one.launches.calls == ["classify"]
    assert set(partial_pairs(words).values()) == {-1}


def test_long_rows_are_the_first_of_each_batch_entry() -> None:
    shape = SimpleNamespace(
        by_keys=True, batch=2, heads=2, rows=6, words=1, row_words=48, map_words=61, heads_of_block=0.0, cut_rows=2,
        work=2000, few=False,
    )  # fmt: skip
    tiles = torch.tensor([[1, 2, 1, 20, 1, 30], [-1, 5, 5, 5, 5, 5]])  # 32 bits of -1
    full = torch.where(tiles < 0, -1, (1 << tiles.clamp(min=0)) - 1).int()
    words = torch.stack((full, torch.zeros_like(full)), -1)[:, None].expand(2, 2, 6, 2).flatten()
    order = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
    assert order.dtype == torch.int32
    assert order.tolist() == [5, 3, 0, 1, 2, 4, 0, 1, 2, 3, 4, 5, 2]
    check_order(order, torch.where(tiles < 0, 32, tiles))
    for heads_of_block, count in ((0.2, 2), (0.3, 0)):  # half of those below
        shape.heads_of_block = heads_of_block
        other = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
        assert other.tolist() == [*order.tolist()[:-1], count]
    shape.heads_of_block, shape.cut_rows = 0.2, 1  # the second row, which would stay whole, is nearly as long
    assert tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)[-1] == 0  # type: ignore[arg-type]
    shape.by_keys, shape.heads_of_block = False, 0.0
    order = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
    assert order.tolist() == [5, 3, 4, 2, 1, 0, 0, 5, 4, 3, 2, 1, 2]
    check_order(order, torch.where(tiles < 0, 32, tiles), by_keys=False)
    for heads_of_block, count in (
        (0.4, 2),
        (0.6, 0),
    ):  # the longest of 34.6 steps, 70.6 and 72.6 steps in all on average
        shape.heads_of_block = heads_of_block
        other = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
        assert other.tolist() == [*order.tolist()[:-1], count]
    shape.work = 24  # so few that all go by length
    order = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
    assert order.tolist() == [5, 3, 1, 4, 2, 0, 0, 5, 4, 3, 2, 1, 0]
    shape.few, shape.heads_of_block = True, 0.0  # and so few that all are cut
    other = tile_map._long_rows_first(torch.cat((words, words.new_zeros(13))), shape)  # type: ignore[arg-type]
    assert other.tolist() == [*order.tolist()[:-1], 6]


@pytest.mark.parametrize(
    ("long", "rest", "heads_of_block", "count"),
    [
        (1, 2, 0.09, 1),  # 42.6 steps, where 29.9 stand for each block
        (1, 2, 0.11, 0),  # of a long row for ten blocks
        (3, 2, 0.09, 0),  # of three for ten
        (1, 31, 0.02, 0),  # as long as others
    ],
)
def test_few_long_rows_of_keys_are_cut_if_they_outlast_the_others_by_less(
    long: int, rest: int, heads_of_block: float, count: int
) -> None:
    tiles = torch.tensor([40] * long + [rest] * (64 - long))
    shape = SimpleNamespace(
        by_keys=True, batch=1, heads=1, rows=64, words=2, row_words=256, map_words=321, work=2000, cut_rows=8,
        heads_of_block=heads_of_block, few=False,
    )  # fmt: skip
    words = torch.zeros(64, 4, dtype=torch.int64)
    words[:, 0], words[:, 1] = (1 << tiles.clamp(max=31)) - 1, (1 << (tiles - 31).clamp(min=0)) - 1
    order = tile_map._long_rows_first(torch.cat((words.flatten().int(), torch.zeros(65).int())), shape)  # type: ignore[arg-type]
    assert int(order[-1]) == count


def test_slots_of_the_order_are_not_compared() -> None:
    shape: Any = SimpleNamespace(slots=16 * 5, map_words=5, row_words=4)
    words = torch.arange(5 + 16 * 5 + 8)

    def changed(place: int) -> torch.Tensor:
        other = words.clone()
        other[place] = -2
        return other

    assert same_words(words, changed(5 + 16 * 4), shape)
    assert same_words(words, changed(5 + 16 * 5 - 1), shape)
    for place in (4, 5 + 16 * 4 - 1, 5 + 16 * 5):
        assert not same_words(words, changed(place), shape)


def test_maps_may_be_dropped_while_others_are_counted() -> None:
    """The garbage collector frees a tensor, and so drops its map, at any time."""
    kept = map_cache._KeptMaps()

    class Freeing:
        words = None

        @property
        def captured(self) -> bool:
            kept._entries.pop("freed", None)
            return False

    kept._entries.update({"first": Freeing(), "freed": Freeing(), "last": Freeing()})  # type: ignore[dict-item]
    kept._shrink()
    assert list(kept._entries) == ["first", "last"]
