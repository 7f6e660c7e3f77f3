"""Tiles of keys that end with what a work tile sees: the scheduler's own lines, on the host, against the mask.

Every visible key is in a visible tile, every full tile holds only keys that every row sees, and the tiles of all rows
end less than kEndAlign keys after the last key.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from attngen.families.hopper_forward.structure import HopperForward
from attngen.families.hopper_forward.tiles import END_ALIGNMENT
from attngen.families.hopper_forward.view import cuda_view
from attngen.plan.model import Plan
from tests.host_compiler import COMPILER, compile_host
from tests.plan.specs import planned
from tests.sampling import few

#: Names in the lines beside the corners: numbers of a call, and results of shuffles and searches.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <algorithm>
using std::min, std::max;
constexpr int kBlockM = {tile_m}, kBlockN = {tile_n}, kConsumers = {consumers}, kEndAlign = {end_alignment};
static int of_all;
struct Spans {{ int visible_lo, visible_hi, full_lo, full_hi, offset; }};
static Spans spans(int part, int q_tile, int group_bits, int seqlen_q, int seqlen_k, int u_window) {{
  const auto __shfl_sync = [&](unsigned, int value, int) {{ return part == kConsumers ? of_all = value : of_all; }};
  const int q_start = q_tile * kBlockM + (part < kConsumers ? 64 * part : 0) >> group_bits;
  const int q_hi = min(q_start + ((part < kConsumers ? 64 : kBlockM) >> group_bits), seqlen_q) - 1;
  {lines}
  return {{{values}}};
}}
int main(int count, char** given) {{
  for (int i = 1; i + 4 < count; i += 5) {{
    const int group_bits = atoi(given[i]), q = atoi(given[i + 1]), k = atoi(given[i + 2]), window = atoi(given[i + 3]);
    const int q_tile = atoi(given[i + 4]);
    for (int part = kConsumers; part >= 0; --part) {{
      const Spans s = spans(part, q_tile, group_bits, q, k, window);
      printf("%d %d %d %d %d\\n", s.visible_lo, s.visible_hi, s.full_lo, s.full_hi, s.offset);
    }}
  }}
}}
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("dtype", "tile"),
    [("bf16", "{m: 192, n: 64}"), ("bf16", "{m: 128, n: 96}"), ("fp8_e4m3", "{m: 192, n: 96}")],
    always=(2,),
)
def test_tiles_that_end_with_what_is_seen_hold_all_of_it(dtype: str, tile: str, tmp_path: Path) -> None:
    plan = planned("sliding_window", backend="cuda", dtype=dtype, head_dim=128, pack_gqa="true", tile=tile)
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.end_aligned
    view = cuda_view(plan, "")
    (tmp_path / "spans.cpp").write_text(
        PROGRAM.format(
            tile_m=plan.tile_m,
            tile_n=plan.tile_n,
            consumers=plan.structure.consumers,
            end_alignment=END_ALIGNMENT,
            lines="\n  ".join(map(str, view.span_lines)),
            values=", ".join([*map(str, view.span_values), "offset"]),
        )
    )
    program = tmp_path / "spans"
    compile_host(tmp_path / "spans.cpp", program, tmp_path)
    chance, cases = random.Random(1), []
    for _ in range(60):
        bits, seqlen_q = chance.randint(0, 3), chance.randint(1, 700)
        tiles = -(-seqlen_q // (plan.tile_m >> bits))
        seqlen_k = max(chance.randint(1, 900), chance.randint(0, 1) * seqlen_q)
        cases.append((bits, seqlen_q, seqlen_k, chance.choice([1, 40, 64, 200, 511]), chance.randrange(tiles)))
    words = [str(number) for case in cases for number in case]
    printed = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout.split("\n")
    ranges = [tuple(map(int, line.split())) for line in printed if line]
    each = plan.structure.consumers + 1
    shifted = [_check(plan, case, ranges[i * each : (i + 1) * each]) for i, case in enumerate(cases)]
    assert sum(shifted) > 15


def _check(plan: Plan, case: tuple[int, ...], ranges: list[tuple[int, ...]]) -> bool:
    bits, seqlen_q, seqlen_k, window, q_tile = case
    rows, keys, consumers = plan.tile_m >> bits, plan.tile_n, plan.structure.consumers
    seen: set[int] = set()
    for part, (lo, hi, full_lo, full_hi, offset) in zip(range(consumers, -1, -1), ranges, strict=True):
        assert offset % END_ALIGNMENT == 0
        assert 0 <= offset < keys
        assert lo >= 0
        count, first = (rows, rows * q_tile) if part == consumers else (64 >> bits, rows * q_tile + (64 >> bits) * part)
        queries = range(first, min(first + count, seqlen_q))
        sees = [{kv for kv in range(seqlen_k) if 0 <= q + seqlen_k - seqlen_q - kv < window} for q in queries]
        if not queries:
            continue  # the scheduler drops the spans of rows that do not exist
        visible = set().union(*sees)
        seen = seen or visible
        assert visible <= set(range(lo * keys + offset, hi * keys + offset)), case
        for tile in range(max(full_lo, lo), min(full_hi, hi)):
            of_tile = set(range(tile * keys + offset, (tile + 1) * keys + offset))
            assert all(of_tile <= one for one in sees), case
        if part == consumers and offset and visible:
            assert 0 <= hi * keys + offset - 1 - max(visible) < END_ALIGNMENT, case
    return bool(ranges[0][-1])


@pytest.mark.parametrize(
    ("variant", "fields", "expected"),
    [
        ("sliding_window", {"pack_gqa": "true", "tile": "{m: 192, n: 64}"}, True),
        ("packed_documents", {"pack_gqa": "true"}, True),
        ("packed_documents", {}, False),
        ("causal", {"pack_gqa": "true"}, False),
        ("sink_window", {"pack_gqa": "true"}, False),
        ("sliding_window", {"pack_gqa": "true", "layout": "varlen"}, False),
        ("sliding_window", {"pack_gqa": "true", "layout": "paged"}, False),
        ("sliding_window", {"pack_gqa": "true", "dtype": "fp8_e4m3"}, True),
        ("sliding_window", {"dtype": "fp8_e4m3"}, False),
    ],
)
def test_kernels_with_tiles_that_end_with_what_is_seen(variant: str, fields: dict[str, str], expected: bool) -> None:
    plan = planned(variant, backend="cuda", head_dim=128, **fields)
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.end_aligned is expected


@pytest.mark.parametrize(
    ("variant", "tile", "skips"),
    [
        ("sliding_window", "{m: 192, n: 96}", True),
        ("sliding_window", "{m: 192, n: 64}", False),
        ("packed_documents", "{m: 192, n: 96}", False),
    ],
)
def test_in_8_bits_consumers_skip_wide_tiles_of_windows(variant: str, tile: str, skips: bool) -> None:
    plan = planned(variant, backend="cuda", head_dim=64, dtype="fp8_e4m3", pack_gqa="true", tile=tile)
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.end_aligned
    assert plan.structure.skips is skips
    assert plan.structure.recompute_below
    apart = planned(variant, backend="cuda", head_dim=64, dtype="fp8_e4m3", tile=tile)
    assert isinstance(apart.structure, HopperForward)
    assert not apart.structure.recompute_below
