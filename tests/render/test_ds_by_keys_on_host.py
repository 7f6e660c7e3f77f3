"""Sums of a tile of dS with keys by rows, as the backward by mma.sync has it, on the CPU: lanes are fibers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.host_compiler import COMPILER, HOST, compile_host
from tests.render.headers import headers
from tests.render.test_tensor_adder_on_host import bits_of, header_on_host
from tests.sampling import few


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("keys", "queries", "warps", "dtype"),
    [(128, 64, 8, "bf16"), (128, 32, 8, "fp16"), (128, 128, 8, "bf16"), (64, 64, 4, "fp16")],
    often=(0, 3),
)
def test_sums_are_those_of_all_pairs(keys: int, queries: int, warps: int, dtype: str, tmp_path: Path) -> None:
    random = Random(f"{keys} {queries} {warps}")
    tile = [[random.randint(-8, 8) / 8 for _ in range(queries)] for _ in range(keys)]
    text = headers()
    (swizzled,) = re.findall(r"template <int kBoxBytes>\n.*?\n}\n", text["copy.cuh"], flags=re.DOTALL)
    own = re.sub(r"#(pragma|include).*", "", text["ds_by_keys.cuh"])
    bits = ", ".join(str(bits_of(x, dtype)) for row in tile for x in row)
    row_bytes = min(2 * queries, 128)
    given = f"""using Element = {dtype};
constexpr int kKeys = {keys}, kQueries = {queries}, kBytes = {row_bytes}, kWarps = {warps};
static const uint16_t pairs[] = {{{bits}}};
"""
    for name, content in (
        ("tensor_gradient", header_on_host()), ("swizzled", swizzled), ("ds_by_keys", own), ("given", given)
    ):  # fmt: skip
        (tmp_path / f"{name}.inc").write_text(content)
    compile_host(HOST / "ds_by_keys.cpp", tmp_path / "program", tmp_path)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (whole,), diagonals, rows, copied, *blocks = ([float(x) for x in line.split()] for line in done.stdout.splitlines())
    assert whole == sum(map(sum, tile))
    wanted = [0.0] * (keys + queries - 1)
    for key, row in enumerate(tile):
        for query, x in enumerate(row):
            wanted[query - key + keys - 1] += x
    assert diagonals == wanted
    assert rows == [sum(row[query] for row in tile) for query in range(queries)]
    assert copied == [tile[key][query] for query in range(queries) for key in range(keys)]
    for sums, (keys_of_block, queries_of_block) in zip(blocks, ((8, 8), (16, queries), (keys, 16)), strict=True):
        wanted = [
            sum(x for row in tile[key : key + keys_of_block] for x in row[query : query + queries_of_block])
            for key in range(0, keys, keys_of_block)
            for query in range(0, queries, queries_of_block)
        ]
        assert sums == [*wanted, *[0.0] * (len(sums) - len(wanted))]
