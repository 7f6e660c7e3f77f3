"""Rendered masks of partial tiles as host C++: what loaders and consumers compute, against Python's own integers.

Divisors of all sizes, queries before the first key, and ragged ends; the value of each pair comes from lanes, rows and
elements as a kernel has them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.lang.divisors import division
from attngen.lang.statements import Code, Statement
from attngen.plan.model import Plan
from attngen.render.cuda_gradients import probabilities, query_word
from attngen.render.cuda_math import Steps, logits
from attngen.render.cuda_tiles import tiles, word
from attngen.render.expressions import QUERIES
from attngen.render.key_values import with_key_values
from tests.plan.specs import planned
from tests.sampling import few, sampled

HEADERS = Path(__file__).parents[2] / "templates/cuda/include"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_LARGEST = 2**31 - 1
#: Masks over sizes that the call gives, some of them with a largest value.
MASKS = {
    "chunks": "q_pos >= kv and q_pos // n == kv // n",
    "dilated": "q >= kv and q - kv < 20 and (q - kv) % n == 0",
    "blocks": "kv // n <= q // n",
    "frames": "q // n >= kv // n and q // n - kv // n < w",
    "strided": "q >= kv and (q - kv < n or (q - kv) % n == 0)",
    "axial": "q // n == kv // n or q % n == kv % n",
    "checkerboard": "(q // n + kv // n) % 2 == 0",
    "near": "max(abs(q // n - kv // n), abs(q % n - kv % n)) <= w",
    "volume": "max(abs(q // (n * m) - kv // (n * m)), abs(q // n % m - kv // n % m)) <= w and abs(q % n - kv % n) <= w",
    "diffusion": "(kv // n < q // n if kv < w else q // n == kv // n) if q >= w else (q // n == kv // n and kv < w)",
    "negative": "(kv - q_pos) // n >= -w and (kv - q_pos - 5) % n != 1",
    "remainder": "(q_pos - kv) % n < w",
    "sums": "(q_pos + kv) % n == 0 or kv % m < w",
    "constants": "abs(q_pos % 7 - kv % 7) <= 2 and (q_pos - kv) % 3 != 1",
}

_SHIM = """
#include <algorithm>
#include <cstdint>
#define __device__
#define __forceinline__ inline
using std::min; using std::max; using std::abs;
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static const float kMasked = -1.0f;
#include "division.cuh"
template <typename Int> static inline Int floor_div(Int a, Int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
template <typename Int> static inline Int floor_mod(Int a, Int b) { return a - floor_div(a, b) * b; }
extern "C" void visible(int seqlen_q, int seqlen_k, const int* scalars, const int* by, unsigned char* out) {
  const auto store = [&](int q, int kv, float x) {
    if (q < seqlen_q && kv < seqlen_k) out[q * seqlen_k + kv] = x == 0.0f;
  };
"""

#: Tiles that a box sees: the ends of ranges, or a word of the tiles for each of which a lane votes.
_TILES = """
  const auto __ballot_sync = [](unsigned, bool seen) {{ return seen ? 1u : 0u; }};
  const int kv_tiles = (seqlen_k + kBlockN - 1) / kBlockN, q_tiles = (seqlen_q + kBlockM - 1) / kBlockM;
  const int whole_tiles = seqlen_{axis} / {along};
  for (int box = 0; box < {boxes}; ++box) {{
    {corners}
    {spans}
    for (int tile = 0; tile < {tiles}; ++tile) {{
      bool is_seen = {visible}, is_full = {full};
      {votes}
      out[2 * (box * {tiles} + tile)] = is_seen;
      out[2 * (box * {tiles} + tile) + 1] = is_full;
    }}
  }}
}}
"""
_VOTES = """
      if (is_seen) {
        const int word = tile / 32, lane = tile % 32;
        WORD
        is_seen = visible_word, is_full = visible_word && !partial_word;
      }
"""

_FORWARD = """
  for (int start = 0; start < seqlen_k; start += kBlockN) {{
    {struct}
    for (int key = 0; key < kBlockN; ++key) {{
      const int kv = start + key;
      {values}
    }}
    for (int lane = 0; lane < 4; ++lane) for (int q_first = 0; q_first < seqlen_q; ++q_first) {{
      const int kv_first = start + 2 * lane;
      {of_key}
      {tile}
      for (int i = 0; i < kBlockN / 4; ++i) {{
        {key}
        for (int row = 0; row < 2; ++row) {{
          float x = 0.0f;
          {row}
          {element}
          store(q_first + 8 * row, kv_first + 8 * (i / 2) + i % 2, x);
        }}
      }}
    }}
  }}
}}
"""

_BACKWARD = """
  for (int start = 0; start < seqlen_q; start += kBlockM) {{
    {struct}
    for (int row = 0; row < kBlockM; ++row) {{
      const int q_row = min(start + row, seqlen_q - 1);
      {values}
    }}
    for (int lane = 0; lane < 4; ++lane) for (int kv_first = 0; kv_first < seqlen_k; ++kv_first) {{
      const int q_first = start + 2 * lane;
      {of_key}
      {tile}
      for (int i = 0; i < kBlockM / 8; ++i) for (int j = 0; j < 2; ++j) {{
        {key}
        for (int row = 0; row < 2; ++row) {{
          float x = 0.0f;
          {row}
          {element}
          store(q_first + 8 * i + j, kv_first + 8 * row, x);
        }}
      }}
    }}
  }}
}}
"""


def plan_of(name: str, passes: str, head_dim: int) -> Plan:
    """Return the plan of a mask in a kernel that evaluates it."""
    mask = MASKS[name]
    bounded = ", ".join(
        f"{size}: {{type: int32, min: 1{'' if name in ('chunks', 'blocks', 'dilated') else ', max: 65536'}}}"
        for size in "nmw"
        if re.search(rf"\b{size}\b", mask)
    )
    variants = f"variants:\n  own: {{mask: '{mask}', scalars: {{{bounded}}}}}\n"
    backend = {"backward": "{backend: cuda}"} if passes == "backward" else {"backend": "cuda"}
    return planned(
        "own", declared=variants, dtype="bf16", tile_map="never", passes=passes, head_dim=head_dim, **backend
    )


def text(statements: Sequence[Statement]) -> str:
    """Return the text of statements."""
    return "\n".join(str(each) for each in statements)


def program(plan: Plan) -> str:
    """Return the mask of a plan as a function of host C++."""
    steps: Steps
    fields: Sequence[tuple[str, str]] = ()
    if plan.direction == "forward":
        code = logits(plan)
        steps, _, loaded = with_key_values(plan, code)
        before, lines, form = code.work, (), _FORWARD
        if loaded is not None:
            fields, lines = loaded.fields, (*loaded.work, *loaded.lines)
        size, index, taken = "kBlockN", "key", "const auto of_key = [&](int key) { return values[2 * lane + key]; };"
    else:
        bias = probabilities(plan)
        steps, before, form = bias.partial, bias.block, _BACKWARD
        if bias.query_values is not None:
            fields, lines = bias.query_values.fields, bias.query_values.lines
        else:
            lines = ()
        size, index, taken = "kBlockM", "row", "const auto of_query = [&](int row) { return values[2 * lane + row]; };"
    kept = [each for each in before if "scale" not in "".join(each.names)]
    members = " ".join(f"{kind} {name};" for kind, name in fields)
    body = form.format(
        struct=f"struct Values {{ {members} }} values[{size} + 8];" if fields else "",
        values=f"{text(lines)}\nvalues[{index}] = {{{', '.join(name for _, name in fields)}}};" if fields else "",
        of_key=taken if fields else "",
        tile=text(steps.tile), key=text(steps.key), row=text(steps.row), element=text(steps.element),
    )  # fmt: skip
    return "\n".join((_SHIM, *declared(plan), text(kept), body))


def tiles_program(plan: Plan) -> str:
    """Host C++ of the function that tells which tiles a box of a plan sees."""
    forward = plan.direction == "forward"
    view = tiles(plan) if forward else tiles(plan, QUERIES)
    votes = ""
    if plan.iteration != "ranges":
        votes = _VOTES.replace("WORD", text(word(plan).lines if forward else query_word(plan)))
    either = " || ".join(f"tile >= {lo} && tile < {hi}" for lo, hi in named(view.visible, view.values))
    all_of = " || ".join(f"tile >= {lo} && tile < {hi}" for lo, hi in named(view.full, view.values))
    corners = (
        "const int q_start = box * kBlockM, q_hi = min(q_start + kBlockM, seqlen_q) - 1;"
        if forward
        else "const int kv_start = box * kBlockN;"
    )
    body = _TILES.format(
        axis="k" if forward else "q", along="kBlockN" if forward else "kBlockM", corners=corners,
        boxes="q_tiles" if forward else "kv_tiles", tiles="kv_tiles" if forward else "q_tiles",
        spans=text(view.lines), visible=either, full=all_of or "false", votes=votes,
    )  # fmt: skip
    return "\n".join((_SHIM, *declared(plan), body))


def named(ranges: Sequence[tuple[str, str]], values: Mapping[str, Code]) -> list[tuple[str, str]]:
    """Return the ends of ranges as a kernel calls them."""
    return [(values[lo].text, values[hi].text) for lo, hi in ranges]


def declared(plan: Plan) -> list[str]:
    """Return the lines that declare tiles, scalars and divisors."""
    lines = [f"const int kBlockM = {plan.tile_m}, kBlockN = {plan.tile_n};"]
    lines += [f"const int u_{scalar.name} = scalars[{place}];" for place, scalar in enumerate(plan.variant.arguments)]
    for place, each in enumerate(plan.divisors):
        name, parts = f"by_u_{each.name}", ("value", "multiplier", "shift")
        held = ", ".join(f"{name}.{part} = by[{3 * place + n}]" for n, part in enumerate(parts))
        lines.append(f"Divisor {name}; {held};")
    return lines


def sizes(name: str) -> list[dict[str, int]]:
    """Return scalars of some calls: the first one divides."""
    large = [_LARGEST] if name in ("chunks", "blocks", "dilated") else [65536]
    small = [{"n": n, "m": m, "w": w} for n, m, w in product([1, 2, 3, 7, 64, *large], [5], [1, 3])]
    return [*small, {"n": 641, "m": 1, "w": 17}, {"n": 5, "m": 65536, "w": 2}]


def truth(mask: str, scalars: dict[str, int], queries: int, keys: int) -> np.ndarray:
    """Return the mask by Python itself."""
    names = {"abs": abs, "max": max, "min": min, **scalars}
    code = compile(mask, "mask", "eval")
    rows = [
        [bool(eval(code, names, {"q": q, "kv": kv, "q_pos": q + keys - queries})) for kv in range(keys)]
        for q in range(queries)
    ]
    return np.array(rows)


def compiled(source: str, folder: Path) -> Callable[..., None]:
    """Return the function of a program."""
    (folder / "types.cuh").write_text("#pragma once\n#include <cstdint>\n")
    for header in ("divisor.cuh", "division.cuh"):
        shutil.copy(HEADERS / header, folder)
    (folder / "mask.cpp").write_text(source)
    library = folder / "mask.so"
    options = ["-std=c++17", "-O1", "-fwrapv", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run(["g++", *options, folder / "mask.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library)).visible  # type: ignore[no-any-return]


def call(
    function: Callable[..., None], plan: Plan, scalars: dict[str, int], lengths: tuple[int, int], out: Any
) -> None:
    """Call a function with what a launch passes."""
    given = np.array([scalars[each.name] for each in plan.variant.arguments] or [0], np.int32)
    held = [word for each in plan.divisors for word in division(each.value(scalars))]
    by = np.array(held or [0], np.int64).astype(np.int32)
    function(*lengths, *(ctypes.c_void_p(array.ctypes.data) for array in (given, by, out)))


@sampled(every=2, always=1, name=list(MASKS), passes=["forward", "backward"])
def test_the_mask_of_a_kernel_is_that_of_its_variant(name: str, passes: str, tmp_path: Path) -> None:
    plan = plan_of(name, passes, 64)
    assert plan.backend == "cuda"
    visible = compiled(program(plan), tmp_path)
    for scalars in sizes(name):
        for queries, keys in ((37, 61), (70, 33)):
            out = np.full((queries, keys), 9, np.uint8)
            call(visible, plan, scalars, (queries, keys), out)
            np.testing.assert_array_equal(out, truth(MASKS[name], scalars, queries, keys), str(scalars))


#: First those whose ranges are found in ways of their own.
TILES = (
    "volume",
    "negative",
    "chunks",
    "diffusion",
    *sorted(MASKS.keys() - {"volume", "negative", "chunks", "diffusion"}),
)


@few(("name", "passes"), product(TILES, ("forward", "backward")), always=0, often=range(0, 99, 5))
def test_the_tiles_that_a_kernel_visits_hold_what_is_seen(name: str, passes: str, tmp_path: Path) -> None:
    """No other tile shows a pair, and one without the mask shows all."""
    plan = plan_of(name, passes, 128)
    visited = compiled(tiles_program(plan), tmp_path)
    seen_at_all = 0
    for scalars in sizes(name)[::3]:
        for queries, keys in ((300, 421), (517, 130)):
            shape = [-(-queries // plan.tile_m), -(-keys // plan.tile_n)]
            out = np.full((*(shape if passes == "forward" else shape[::-1]), 2), 9, np.uint8)
            call(visited, plan, scalars, (queries, keys), out)
            told = out if passes == "forward" else out.swapaxes(0, 1)
            mask = truth(MASKS[name], scalars, queries, keys)
            for q, kv in product(*map(range, shape)):
                box = mask[q * plan.tile_m : (q + 1) * plan.tile_m, kv * plan.tile_n : (kv + 1) * plan.tile_n]
                assert told[q, kv, 0] or not box.any(), (scalars, queries, keys, q, kv)
                assert not told[q, kv, 1] or box.all(), (scalars, queries, keys, q, kv)
                seen_at_all += int(told[q, kv, 0])
    assert seen_at_all
