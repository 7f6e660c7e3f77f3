"""The numbers of split-KV launches, and the counters that their blocks share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from attngen.manifest import WorkLimits
from attngen.records import written
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.device import counters
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.sizes import Geometry
from attngen.runtime.geometry.splits import Capacity, split_sizes
from tests.plan.specs import planned
from tests.runtime.support import FakeDriver, kernel_of, manifest_of, variant
from tests.sampling import few


@dataclass(frozen=True)
class Launch:
    tile_m: int = 16
    tile_n: int = 16
    row_warps: int = 4
    cluster: int = 8
    row_blocks: int = 1
    merges: bool = False
    limits: WorkLimits = field(default_factory=lambda: WorkLimits(least_tiles=8))


def call(batch: int = 2, rows: int = 1, keys: int = 1000, heads: int = 8, kv_heads: int = 2, **fields: int) -> Call:
    shapes = ((batch, rows, heads, 8), (batch, keys, kv_heads, 8), (batch, keys, kv_heads, 8))
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    bound = bind(
        variant(), q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd", arguments={}
    )
    return replace(bound, **fields)


@pytest.mark.parametrize(
    ("rows", "group", "row_warps"),
    [(1, 1, 1), (1, 16, 1), (1, 17, 2), (4, 8, 2), (3, 16, 4), (64, 1, 4), (5, 16, 4), (64, 128, 4), (0, 4, 1)],
)
def test_warps_of_rows(rows: int, group: int, row_warps: int) -> None:
    """As many as there are blocks of 16 rows, a power of two, up to half of a block's warps."""
    sizes = split_sizes(Launch(), call(rows=rows, heads=2 * group), Capacity(132, 15))
    assert (sizes["row_warps"], 1 << sizes["row_bits"]) == (row_warps, row_warps)


@few("clusters", [0, 1, 14, 16])
@pytest.mark.parametrize("keys", [0, 1, 1000, 100_000])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_blocks_run_at_once_and_clusters_are_whole(batch: int, keys: int, clusters: int) -> None:
    sizes = split_sizes(Launch(), call(batch, keys=keys), Capacity(132, clusters))
    assert sizes["split_cluster"] in (1, 8)
    assert sizes["split_blocks"] % sizes["split_cluster"] == 0
    assert 1 <= sizes["split_blocks"] <= (132 if sizes["split_cluster"] == 1 else 8 * clusters)
    assert sizes["split_tiles"] == 0
    assert (sizes["split_slots"], sizes["split_counters"]) == (2 * sizes["split_blocks"], sizes["split_blocks"])


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "kv_heads", "cluster", "blocks"),
    [
        (1, 100, 8, 1, 8, 8), (1, 300, 32, 8, 8, 64), (1, 1_000_000, 32, 8, 8, 120),
        (1, 8192, 32, 4, 8, 120), (1, 8200, 32, 4, 1, 132),  # half of the card is enough for short work alone
        (2, 1000, 32, 8, 1, 126), (64, 16, 32, 8, 1, 132), (64, 4096, 64, 64, 1, 132),  # more units than clusters
    ],
)  # fmt: skip
def test_little_work_takes_clusters_and_much_takes_all_blocks(
    batch: int, keys: int, heads: int, kv_heads: int, cluster: int, blocks: int
) -> None:
    sizes = split_sizes(Launch(), call(batch, keys=keys, heads=heads, kv_heads=kv_heads), Capacity(132, 15))
    assert (sizes["split_cluster"], sizes["split_blocks"]) == (cluster, blocks)


@pytest.mark.parametrize(
    ("asked", "tiles", "most"),
    [
        ({"split_size": 64}, 4, 16), ({"split_size": 1}, 1, 63), ({"split_size": 10_000}, 625, 1),
        ({"num_splits": 1}, 63, 1), ({"num_splits": 4}, 16, 4), ({"num_splits": 500}, 1, 63),
    ],
)  # fmt: skip
def test_asked_splits_have_a_place_and_a_counter_each(asked: dict[str, int], tiles: int, most: int) -> None:
    """A place for each split of the rows of each KV head, however the blocks share them."""
    sizes = split_sizes(Launch(), call(3, rows=40, heads=8, kv_heads=2, **asked), Capacity(132, 15))
    units = 3 * 2 * (5 if "split_size" in asked else 3)  # of 32 or 64 of the 160 rows each
    assert (sizes["split_tiles"], sizes["max_splits"]) == (tiles, most)
    assert (sizes["split_slots"], sizes["split_counters"]) == (units * most, units)


@pytest.mark.parametrize(("group", "row_warps"), [(1, 2), (4, 2), (16, 2), (33, 4), (64, 4), (128, 4)])
def test_a_split_size_fixes_the_warps_that_share_keys(group: int, row_warps: int) -> None:
    """They decide in which order a row's sums are added, so that they must be the same in each batch."""
    for rows in (1, 2, 7, 300):
        sizes = split_sizes(Launch(), call(rows=rows, heads=2 * group, split_size=256), Capacity(132, 15))
        assert (sizes["row_warps"], sizes["split_cluster"]) == (row_warps, 1)
        assert sizes["row_units"] == -(-rows * group // (16 * row_warps))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept = counters._SPLITS.copy(), counters._SPARE.copy()
    counters._SPLITS.clear()
    counters._SPARE.clear()
    with drivers.use(driver := FakeDriver()):
        yield driver
    counters._SPLITS.clear()
    counters._SPARE.clear()
    counters._SPLITS.update(kept[0])
    counters._SPARE.update(kept[1])


def test_launches_of_a_stream_share_counters(memory: FakeDriver) -> None:
    first = counters.of_splits(100, 5, 0)
    assert counters.of_splits(128, 5, 0) == first
    assert counters.of_splits(100, 6, 0) != first != counters.of_splits(100, 5, 1)
    larger = counters.of_splits(1_000_000, 5, 0)
    assert larger != first
    assert counters.of_splits(100, 5, 0) == larger
    assert max(len(block) for _, block in memory.cleared) == 4_000_000


def test_launches_in_graphs_have_counters_of_their_own(memory: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assigned: list[tuple[int, int]] = [
        (counters.of_splits(count, 5, 0), count) for count in (100, 128, 9000, 9000, 50_000, 7)
    ]
    for i, (address, count) in enumerate(assigned):
        for other, others in assigned[:i]:
            assert address + 4 * count <= other or other + 4 * others <= address
    spans: list[tuple[int, int]] = []
    for _, block in memory.cleared:
        start = ctypes.addressof(block)
        spans.append((start, start + len(block)))
    for address, count in assigned:
        assert any(start <= address and address + 4 * count <= end for start, end in spans)


def test_a_packed_group_of_any_size_is_taken(memory: FakeDriver) -> None:
    from attngen.runtime.registry.select import _against_group

    manifest = {**manifest_of(variant(), package="split"), "pack_gqa": True}
    given = call(heads=6, kv_heads=2)
    assert _against_group(kernel_of({**manifest, "split_kv": True}), given) is None
    assert "which 3 heads do not fill" in str(_against_group(kernel_of(manifest), given))


def test_the_runtime_counts_by_the_limits_of_the_plan(memory: FakeDriver) -> None:
    """Manifests have them; without any, those of most kernels are taken."""
    structure = planned(head_dim=128, backend="cuda", split_kv="true").structure
    assert isinstance(structure, WorkLimits)
    manifest = manifest_of(variant(), package="split")
    limits = kernel_of({**manifest, "structure": written(structure)}).main.limits
    assert (limits.least_tiles, limits.cut_tiles) == (structure.least_tiles, structure.cut_tiles) == (8, 12)
    assert limits.whole_tiles == structure.whole_tiles
    lacking = kernel_of({**manifest, "structure": {}}).main.limits
    assert (lacking.least_tiles, lacking.cut_tiles, lacking.whole_tiles) == (2, 2, 64)


@pytest.mark.parametrize(("rows", "wanted"), [(64, 8), (100, 7), (64 * 200, 1)])
def test_a_cluster_for_each_tile_of_queries(memory: FakeDriver, rows: int, wanted: int) -> None:
    """Tiles of 64 queries of 2 heads: as many blocks each as the least time takes, of 15 clusters at once."""
    manifest = {**manifest_of(variant(), tiles=(64, 32)), "times": [1000.0, 100.0, 1000.0]}
    manifest["launches"][-1] |= {"grid": "key_shares", "cluster": wanted}
    made, asked = kernel_of(manifest), call(1, rows, 32 * 56, heads=2)
    capacity = capacity_for(made, asked, drivers.current, 0)
    assert capacity.shares == wanted
    geometry = Geometry(made.main, asked, capacity=capacity)
    assert geometry.cluster == wanted
    assert geometry.blocks(memory, 0) == wanted * 2 * -(-rows // 64)
    assert memory.loads, "the driver says how many clusters run at once"
    ordinary = kernel_of(manifest_of(variant(), tiles=(64, 32)))
    assert capacity_for(ordinary, asked, drivers.current, 0) == Capacity()
