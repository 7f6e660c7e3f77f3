"""Sums of diagonals among the lanes of a warp, and their additions to entries that diagonals share, on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.host_compiler import COMPILER, HOST, compile_host
from tests.render.test_tensor_adder_on_host import header_on_host

#: Steps of one sequence: distances between their first query and key, some several times one after the other.
FIRSTS = [-700, -700, -640, 0, -16, 16, -8, 100, 164, 300, 640, 640, 704, 5, 700]
BEFORE = 1000

#: Entries of a diagonal, of at most 40: as an expression in C++ and in Python.
ENTRIES: dict[str, tuple[str, Callable[[int], int]]] = {
    "clamped": ("std::min(std::max(apart + 20, 0), 39)", lambda apart: min(max(apart + 20, 0), 39)),
    "there_and_back": ("std::min(std::abs(apart) / 3, 39)", lambda apart: min(abs(apart) // 3, 39)),
    "outside": ("apart < -100 || apart > 50 ? -1 : 7", lambda apart: -1 if apart < -100 or apart > 50 else 7),
}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("queries", "form"), [(64, "clamped"), (64, "there_and_back"), (128, "outside")])
def test_sums_are_those_of_all_pairs(queries: int, form: str, tmp_path: Path) -> None:
    random = Random(f"{queries} {form}")
    text, entry_of = ENTRIES[form]
    tiles = [[[random.randint(-8, 8) / 8 for _ in range(16)] for _ in range(queries)] for _ in FIRSTS]
    terms = ", ".join(str(x) for tile in tiles for row in tile for x in row)
    (tmp_path / "tensor_gradient.inc").write_text(header_on_host())
    (tmp_path / "given.inc").write_text(
        f"""#include <algorithm>
#include <cstdlib>
constexpr int kQueries = {queries}, kSteps = {len(FIRSTS)}, kBefore = {BEFORE}, kDiagonals = 2 * kBefore, kEntries = 40;
static const int firsts[] = {{{", ".join(map(str, FIRSTS))}}};
static const float terms[] = {{{terms}}};
static int entry_of(int apart) {{ return {text}; }}
"""
    )
    compile_host(HOST / "warp_diagonals.cpp", tmp_path / "program", tmp_path)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    own, shared = [0.0] * (2 * BEFORE), [0.0] * 40
    for first, tile in zip(FIRSTS, tiles, strict=True):
        for query, row in enumerate(tile):
            for key, x in enumerate(row):
                own[first + query - key + BEFORE] += x
                if (entry := entry_of(first + query - key)) >= 0:
                    shared[entry] += x
    assert [[float(x) for x in line.split()] for line in done.stdout.splitlines()] == [own, shared]
