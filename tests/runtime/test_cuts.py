"""The last tiles of keys of a backward are cut where blocks end unevenly, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import replace
from heapq import heapreplace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.lab.bench.memory import workspace_bound
from attngen.plan import plan
from attngen.plan.model import Plan
from attngen.render import render
from attngen.runtime.arguments.checked import Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.cuts import (
    MOST_PARTS,
    NONE,
    Cut,
    best_cut,
    best_cut_of_each,
    best_first_cut,
    best_query_cut,
    long_rows_cut,
)
from attngen.runtime.geometry.sizes import Geometry, geometries, workspace_sizes
from attngen.runtime.geometry.sizes import cut_of as call_cut
from attngen.runtime.geometry.splits import Capacity
from attngen.runtime.kernels.module import Kernel
from attngen.schema import expand, load_spec_text
from tests.runtime.support import FakeDriver, kernel_of

BLOCKS = 132
_RESOURCES = {"registers": 0, "spills": 0, "shared_memory": 1024, "cubin_bytes": 0, "compile_seconds": 0.0}


def planned(variant: str = "causal", head_dim: int = 128, **fields: str) -> Plan:
    more = "".join(f", {name}: {value}" for name, value in fields.items())
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n  - {{variant: {variant}, passes: backward, "
        f"head_dim: {head_dim}, backward: {{backend: cuda}}{more}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    return plan(spec)


def kernel(variant: str = "causal", head_dim: int = 128, **fields: str) -> Kernel:
    return kernel_of({**planned(variant, head_dim, **fields).to_dict(), "resources": _RESOURCES})


def geometry(of: Kernel, *shape: int, lengths: list[int] | None = None, **arguments: object) -> Geometry:
    """Return the numbers of the launch of all products: of ``batch``, length, heads and KV heads, or of ``lengths``."""
    batch, seqlen, heads, kv_heads = shape
    sizes: list[tuple[int, ...]] = [(batch, seqlen, heads), *[(batch, seqlen, kv_heads)] * 2]
    packing = None
    if lengths is not None:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        packing = Packing(starts, starts, max(lengths), max(lengths))
        sizes = [(sum(lengths), *size[2:]) for size in sizes]
    q, k, v = (torch.empty(*size, of.head_dim_qk, dtype=torch.bfloat16) for size in sizes)
    call = bind(
        of.variant, q, k, v, packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd",
        arguments=arguments,
    )  # fmt: skip
    return geometries(of, call, {}, capacity=Capacity(BLOCKS))[-1]


def cut_of(*given: Any, **more: Any) -> Cut:
    sizes = geometry(*given, **more).sizes
    assert sizes["cut_parts"] == sizes["cut_tiles"] * sizes["parts"]
    return Cut(sizes["cut_tiles"], sizes["parts"])


def ends(steps: list[int], cut: Cut, blocks: int = BLOCKS, more: float = 2.6) -> float:
    """Time at which the last block is done, as if parts cost nothing more than tiles."""
    times = [(step / cut.parts) for i, step in enumerate(steps) for _ in range(cut.parts)
             if i >= len(steps) - cut.tiles]  # fmt: skip
    free = [0.0] * blocks
    for time in [*map(float, steps[: len(steps) - cut.tiles]), *times]:
        heapreplace(free, free[0] + time + more)
    return max(free)


def test_few_tiles_are_all_cut() -> None:
    """64 tiles on 132 multiprocessors."""
    cut = cut_of(kernel(), 1, 1024, 32, 8)
    assert cut.tiles == 64
    assert cut.parts >= 2
    assert cut_of(kernel("full"), 1, 1024, 32, 8).tiles == 64


def test_the_last_round_is_cut_and_not_those_before() -> None:
    steps = [64] * (5 * BLOCKS + 40)
    cut = best_cut(tuple(steps), 4, 1, 1, BLOCKS)
    assert 0 < cut.tiles <= BLOCKS + 40
    assert ends([4 * step for step in steps], cut) < 0.95 * ends([4 * step for step in steps], NONE)


@pytest.mark.parametrize(
    ("steps", "units"),
    [
        ([64], BLOCKS),  # one full round
        ([64], 7 * BLOCKS),
        ([1], 40),  # parts would take longer than tiles
        (list(range(64, 0, -1)), 30 * BLOCKS),  # many rounds
        ([], 4),
        ([5], 0),
        ([0, 0], 8),  # nothing is seen
    ],
)
def test_tiles_that_end_evenly_or_soon_are_left_whole(steps: list[int], units: int) -> None:
    assert best_cut(tuple(steps), 1, units, max(units, 1), BLOCKS) == NONE


def test_a_cut_is_bounded() -> None:
    """Parts take memory."""
    for units in (1, 3, 40, 66, 67, 131, 133, 200, 300, 700):
        for count in (1, 2, 5):
            for heads_in_l2 in (1, units):
                cut = best_cut(tuple(60 * i for i in range(count, 0, -1)), 8, units, heads_in_l2, BLOCKS)
                assert cut == NONE or (2 <= cut.parts <= 8 and 0 < cut.tiles <= count * units)
                assert cut.tiles * cut.parts <= 4 * BLOCKS


def test_one_block_has_nobody_to_share_with() -> None:
    """The number of blocks that run at once is 1 where no device is asked."""
    assert best_cut((64, 32), 4, 2, 2, 1) == NONE


def test_steps_follow_from_the_mask() -> None:
    """A window sees as many queries of each tile of keys, and a causal mask fewer of later ones."""
    assert cut_of(kernel("sliding_window"), 1, 16384, 32, 8, window=1024) != NONE
    assert cut_of(kernel(), 1, 4096, 32, 8) != NONE
    assert cut_of(kernel("full"), 1, 4096, 33, 33) == NONE  # 8 rounds
    # documents may be short: fewer steps are expected of the same tiles
    document = torch.zeros(1, 1024).int()
    few, many = (cut_of(kernel(name), 1, 1024, 32, 8, **own) for name, own in
                 (("packed_documents", {"doc": document}), ("causal", {})))  # fmt: skip
    assert few.parts < many.parts


def test_packed_sequences_are_cut_where_they_are_alike() -> None:
    packed = kernel(layout="varlen")
    assert cut_of(packed, 1, 0, 32, 8, lengths=[4096]) == cut_of(kernel(), 1, 4096, 32, 8) != NONE
    assert cut_of(packed, 3, 0, 32, 8, lengths=[1024, 1000, 1023]) != NONE
    assert cut_of(packed, 3, 0, 32, 8, lengths=[1024, 10, 1]) == NONE


@pytest.mark.parametrize(
    "fields",
    [
        {"deterministic": "true"},
        {"head_dim": 256},
        {"variant": "softcap", "layout": "varlen"},  # registers
        {"variant": "sliding_window", "head_dim": 72},
    ],
)
def test_neither_a_fixed_order_nor_clusters_nor_crowded_loaders_are_cut(fields: dict[str, Any]) -> None:
    cut = kernel(**fields)
    assert not any(launch.cuts for launch in cut.launches)
    assert "partials" not in [one.name for one in cut.workspaces]
    lengths = [1024] if cut.layout == "varlen" else None
    scalars: dict[str, dict[str, object]] = {"sliding_window": {"window": 100}, "softcap": {"cap": 20.0}}
    own = scalars.get(cut.variant.name, {})
    assert geometry(cut, 1, 1024, 32, 8, lengths=lengths, **own).sizes["cut_tiles"] == 0


def test_each_part_has_a_block_memory_and_a_counter() -> None:
    of = kernel()
    grid = geometry(of, 1, 1024, 32, 8)
    tiles, parts = grid.sizes["cut_tiles"], grid.sizes["parts"]
    assert (grid.tiles, grid.blocks(FakeDriver(), 0)) == (64 + tiles * (parts - 1), BLOCKS)
    sizes = workspace_sizes(of, [grid] * len(of.launches))
    assert sizes["partials"] == tiles * parts * 128 * (128 + 128)
    units, states = 8, 32 * 16
    assert sizes["dq_state"] == -(-(units + 1 + 2 * tiles + states) // 4) * 4


@pytest.mark.parametrize("seqlen", [1, 128, 129, 1024])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 8, 8), (9, 2, 1), (1, 32, 8)])
def test_the_bound_of_memory_holds(seqlen: int, batch: int, heads: int, kv_heads: int) -> None:
    """The bound holds also where each tile of keys has as many parts and counters as it may."""
    of, sizes = kernel(), {"batch": batch, "heads": heads, "kv_heads": kv_heads}
    grid = geometry(of, batch, seqlen, heads, kv_heads)
    for parts in (grid.sizes["parts"], MOST_PARTS):
        tiles = -(-seqlen // 128) * batch * kv_heads
        grid.sizes |= {"cut_tiles": tiles, "cut_parts": tiles * parts}
        held = 4 * sum(workspace_sizes(of, [grid] * len(of.launches)).values())
        assert held <= workspace_bound(planned(), seqlen_q=seqlen, seqlen_k=seqlen, **sizes)


def test_first_tiles_that_all_queries_see_are_cut() -> None:
    """One tile of 128 steps and 63 of 12 for each of 8 heads: 0.2 of the steps, which end last."""
    cut = best_first_cut((128, *[12] * 63), 1, 8, 2, BLOCKS)
    assert cut.tiles == 8
    assert cut.parts >= 2
    assert best_first_cut((12,) * 640, 1, 8, 8, BLOCKS) == NONE
    assert best_first_cut((128, 12), 1, 4, 2, 1) == NONE
    assert best_first_cut((), 1, 4, 2, BLOCKS) == best_first_cut((5,), 1, 0, 1, BLOCKS) == NONE


def test_first_query_tiles_that_see_all_keys_are_cut() -> None:
    """One tile of 64 steps and 63 of 6 for each of 8 heads: a whole tile of 64 would end last."""
    cut = best_query_cut((64, *[6] * 63), 8, 8, BLOCKS, 2.64)
    assert cut.tiles >= 8
    assert cut.parts >= 2
    assert best_query_cut((6,) * 640, 8, 8, BLOCKS, 2.64) == NONE
    assert best_query_cut((), 8, 8, BLOCKS, 2.64) == NONE


def planned_forward(mask: str, more: str = "", entry: str = "") -> Plan:
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nvariants:\n  own: {{mask: '{mask}'{more}}}\nkernels:\n"
        f"  - {{variant: own, head_dim: 128, backend: cuda{entry}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    return plan(spec)


def forward(mask: str, more: str = "", entry: str = "") -> Kernel:
    return kernel_of({**planned_forward(mask, more, entry).to_dict(), "resources": _RESOURCES})


def test_masks_decide_which_query_tiles_are_cut() -> None:
    first = "abs(q - kv) <= 256 or kv < 128 or q < 128"
    assert not forward("q_pos >= kv").main.cuts
    assert not forward("q_pos >= kv and (q_pos - kv < 256 or kv < 4)").main.cuts
    assert not forward(first, ", sink: 'own[h]', tensors: {own: {dtype: float32, shape: [h]}}").main.cuts
    assert not forward(first, entry=", layout: varlen").main.cuts
    own = forward(first)
    assert own.main.cuts
    sizes = geometry(own, 1, 8192, 8, 8)
    assert sizes.sizes["cut_rows"] >= 1
    assert sizes.sizes["cut_tiles"] == 8 * sizes.sizes["cut_rows"]
    assert sizes.tiles == 8 * 64 + sizes.sizes["cut_tiles"] * (sizes.sizes["parts"] - 1)
    assert sizes.sizes["split_counters"] == 2 * sizes.sizes["cut_tiles"]  # one for the rows of each consumer
    assert workspace_sizes(own, [sizes]) == {"partials": sizes.sizes["cut_parts"] * 128 * (128 + 8)}
    short = geometry(own, 64, 512, 8, 8)
    assert (short.cut, short.sizes["split_counters"], workspace_sizes(own, [short])) == (NONE, 0, {"partials": 0})
    listed = ", tensors: {seen: {dtype: bool, shape: [seqlen_q, seqlen_k]}}"
    assert not forward("seen[q, kv]", listed).main.cuts
    mapped = forward("seen[q, kv] or q < 128", listed)
    assert mapped.main.cuts
    seen = torch.empty(8192, 8192, dtype=torch.bool)
    assert geometry(mapped, 1, 8192, 8, 8, seen=seen).sizes["cut_rows"] == 8


def full_in_8_bits(head_dim: int = 128, entry: str = "") -> Kernel:
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n"
        f"  - {{variant: full, head_dim: {head_dim}, dtype: fp8_e4m3{entry}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    return kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES})


def test_tiles_in_8_bits_that_are_alike_are_cut_where_they_end_unevenly() -> None:
    """16 heads of 43 tiles are 5.2 waves of 132 blocks: whole tiles would take 6."""
    kernel = full_in_8_bits()
    assert geometry(kernel, 1, 8192, 16, 16).cut == Cut(32, 4)
    assert geometry(kernel, 1, 16384, 16, 16).cut != NONE  # 10.4 waves
    assert geometry(kernel, 1, 32768, 16, 16).cut == NONE  # 20.7
    assert geometry(kernel, 1, 8192, 8, 8).cut == NONE  # 2.6
    assert full_in_8_bits(64).main.cuts
    assert not full_in_8_bits(256).main.cuts
    assert not full_in_8_bits(128, ", layout: varlen").main.cuts
    assert not full_in_8_bits(128, ", descale: 64").main.cuts


def test_every_kv_tile_belongs_to_a_part_of_its_query_tile() -> None:
    """The scheduler's own lines, run as Python."""
    text = render(planned_forward("abs(q - kv) <= 256 or kv < 128 or q < 128")).text
    lines = {
        name: re.findall(rf"{re.escape(name)} = (.+);", text)[-1]
        for name in ("work.parts", "work.tiles", "work.behind")
    }
    quotient, remainder = re.findall(r"const int quotient = (.+), remainder = (.+);", text)[0]
    for every in range(12):
        for parts in range(1, 9):
            work = SimpleNamespace(every=every)
            names: dict[str, Any] = {"work": work, "parts": parts, "min": min, "max": max}
            work.parts = eval(lines["work.parts"], names)
            names |= {name: eval(line.replace("/", "//"), names) for name, line in
                      (("quotient", quotient), ("remainder", remainder))}  # fmt: skip
            visited = []
            for part in range(work.parts):
                names["part"] = part
                work.tiles = eval(lines["work.tiles"], names)
                work.behind = eval(lines["work.behind"], names)
                visited += range(work.behind + work.tiles, work.behind, -1)
                assert work.tiles > 0 or every == 0
            assert visited == list(range(every, 0, -1))


@pytest.mark.parametrize("window", [256, 4096, 16384])
def test_windows_beside_first_keys_are_short_in_long_sequences(window: int) -> None:
    text = (
        "schema: 1\npackage: mine\narch: [sm90a]\nvariants:\n"
        f"  own: {{mask: q_pos >= kv and (q_pos - kv < {window} or kv < 4)}}\n"
        "kernels:\n  - {variant: own, passes: backward, head_dim: 128, backward: {backend: cuda}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    assert kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES}).launches[-1].cuts_first


def test_masks_decide_which_tiles_are_cut() -> None:
    sinks = "'q_pos >= kv and (q_pos - kv < 256 or kv < 4)'"
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nvariants:\n  own: {{mask: {sinks}}}\nkernels:\n"
        "  - {variant: own, passes: backward, head_dim: 128, backward: {backend: cuda}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    own = kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES})
    assert own.launches[-1].cuts_first
    assert not kernel().launches[-1].cuts_first
    assert not kernel("sliding_window").launches[-1].cuts_first
    shape = 1, 8192, 8, 8
    sizes = geometry(own, *shape).sizes
    assert sizes["cut_rows"] == 1
    assert sizes["cut_tiles"] == 8
    assert sizes["work_items"] == 8 * (64 + sizes["parts"] - 1)


def test_a_map_says_how_many_of_its_rows_are_cut() -> None:
    """Of few units, so many that their parts keep half of the blocks busy twice."""
    assert long_rows_cut(64, 128, 8, BLOCKS) == Cut(64, 4)
    assert long_rows_cut(64, 128, 66, BLOCKS) == Cut(66, 4)
    assert long_rows_cut(64, 128, 67, BLOCKS) == NONE
    assert long_rows_cut(64, 8, 8, BLOCKS) == NONE  # short steps
    assert long_rows_cut(2, 128, 8, BLOCKS) == Cut(16, 4)  # all of few rows
    assert long_rows_cut(16, 128, 8, BLOCKS) == Cut(64, 4)
    assert long_rows_cut(0, 0, 0, BLOCKS) == NONE
    text = (
        "schema: 1\npackage: mine\narch: [sm90a]\nvariants:\n  own:\n    mask: 'seen[q, kv]'\n"
        "    tensors: {seen: {dtype: bool, shape: [seqlen_q, seqlen_k]}}\nkernels:\n"
        "  - {variant: own, passes: backward, head_dim: 128, backward: {backend: cuda}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    own = kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES})
    assert own.launches[-1].cuts_first
    assert own.launches[-1].tile_map


@pytest.mark.parametrize(
    ("rows", "parts", "units", "heads_in_l2"), [(1, 3, 8, 3), (2, 8, 4, 4), (5, 2, 6, 4), (0, 1, 5, 2)]
)
def test_every_step_of_a_tile_belongs_to_a_part(rows: int, parts: int, units: int, heads_in_l2: int) -> None:
    """The arithmetic of the loader where the first tiles are cut."""
    tiles, taken = 5, []
    cut_lines = rows * parts
    lines = tiles - rows + cut_lines
    for index in range(lines * units):
        before = index // (heads_in_l2 * lines) * heads_in_l2
        width, rest = min(heads_in_l2, units - before), index - before * lines
        unit, line = before + rest % width, rest // width
        part = unit * cut_lines + line if line < cut_lines else -1
        taken.append((unit, line // parts if line < cut_lines else line - cut_lines + rows, part))
    whole = [(unit, tile) for unit, tile, part in taken if part < 0]
    assert sorted(whole) == [(unit, tile) for unit in range(units) for tile in range(rows, tiles)]
    of_parts = sorted((part // parts, part % parts, unit, tile) for unit, tile, part in taken if part >= 0)
    assert of_parts == [
        (unit * rows + tile, part, unit, tile) for unit in range(units) for tile in range(rows) for part in range(parts)
    ]


def test_packed_sequences_of_known_lengths_are_cut() -> None:
    """The rows and keys that a rank has of a causal mask are two segments, the longer one last."""
    each = tuple(
        tuple(-(-(rows - max(key - (keys - rows), 0)) // 64) for key in range(0, keys, 128))
        for rows, keys in ((8192, 8192), (8192, 65536))
    )
    assert best_cut_of_each(each, 4, 1, 1, BLOCKS) == Cut(132, 4)
    assert best_cut_of_each(each, 4, 30, 1, BLOCKS) == NONE  # so many tiles that the last ones do not matter
    # Behind the last tile of a short sequence there are places without one, which count, too.
    assert best_cut_of_each(((9,) * 300, (9,)), 4, 1, 1, BLOCKS) == NONE
    assert best_cut_of_each(((), (512,) * 140), 1, 1, 1, BLOCKS) != NONE


def test_the_host_knows_the_lengths_of_two_sequences_or_is_told() -> None:
    packed = kernel(layout="varlen")
    assert cut_of(packed, 2, 0, 32, 8, lengths=[500, 4000]) != NONE
    assert cut_of(packed, 3, 0, 32, 8, lengths=[500, 500, 4000]) == NONE
    of = geometry(packed, 3, 0, 32, 8, lengths=[500, 500, 4000])
    call = replace(of.call, lengths=((500, 500), (500, 500), (4000, 4000)))
    assert call_cut(of.launch, call, of.sizes["heads_in_l2"], Capacity(BLOCKS)) != NONE
