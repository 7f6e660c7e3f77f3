"""The header of dropout in CUDA, compiled for the host: what its lanes drop is what the reference drops."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.resources import root
from attngen.runtime.arguments.dropout import kept, rate_of
from tests.sampling import few

HEADER = root() / "templates" / "cuda" / "include" / "dropout.cuh"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

START = """
#include <cstdint>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::uint32_t;
using std::uint64_t;

// Lanes run one after the other, twice: what each gives to others is known when they run again.
int thread = 0, sent = 0;
bool again = false;
uint32_t given[256][4];
uint32_t __shfl_xor_sync(uint32_t, uint32_t own, int distance) {
  const int number = sent++;
  given[thread][number] = again ? given[thread][number] : own;
  return given[thread ^ distance][number];
}
#include "dropout.h"
"""

#: A tile of 64 queries from 128 on, and 48 keys from 144 on, of head 5, as the lanes of a warpgroup hold it.
BY_QUERIES = """
int main() {
  for (int thread = 0; thread < 128; ++thread) {
    const int warp = thread / 32, lane = thread % 32;
    uint32_t p[12];
    for (uint32_t& pair : p) pair = 0x3f803f80u;
    drop_pairs(p, 0x9234567890abcdefull, 3 * 12 + lane % 4, 128 / 2 + 8 * warp + lane / 4, 5u, 77u, 20000u);
    for (int i = 0; i < 24; ++i) {
      const int q = 16 * warp + lane / 4 + 8 * (i / 2 % 2), kv = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      std::printf("%d %d %d\\n", q, kv, (p[i / 2] >> 16 * (i % 2) & 0xffffu) != 0);
    }
  }
}
"""


#: The third tile of 112 queries, and 128 keys from 256 on, of head 5, as the lanes of two warpgroups hold that by keys.
BY_KEYS = """
int main() {
  for (int pass = 0; pass < 2; ++pass) {
    again = pass == 1;
    for (thread = 0; thread < 256; ++thread) {
      const int warpgroup = thread / 128, warp = thread / 32, lane = thread % 32;
      uint32_t kept[2];
      sent = 0;
      keep_pairs<112>(kept, 0x9234567890abcdefull, (256 + 64 * warpgroup) / 4 + 4 * (warp % 4) + lane / 8,
                      2 * (112 / 2) + 2 * (lane % 4), lane / 4 % 2 == 1, 5u, 77u, 20000u);
      for (int element = 0; again && element < 56; ++element) {
        const int q = 8 * (element / 4) + 2 * (lane % 4) + element % 2;
        const int kv = 64 * warpgroup + 16 * (warp % 4) + lane / 4 + 8 * (element / 2 % 2);
        std::printf("%d %d %d\\n", q, kv, is_kept(kept, element));
      }
    }
  }
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@few(
    ("program", "queries", "keys"),
    [(BY_QUERIES, slice(128, 192), slice(144, 192)), (BY_KEYS, slice(224, 336), slice(256, 384))],
    ids=["by queries", "by keys"],
    always=range(0, 999, 2),
)
def test_lanes_drop_what_the_reference_drops(program: str, queries: slice, keys: slice, tmp_path: Path) -> None:
    text = HEADER.read_text().replace('#include "types.cuh"', "").replace("#pragma once", "")
    (tmp_path / "dropout.h").write_text(text)
    (tmp_path / "main.cpp").write_text(START + program)
    subprocess.run([str(COMPILER), "-w", "-o", tmp_path / "main", tmp_path / "main.cpp"], check=True)
    lines = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    kept_by_lanes = torch.zeros(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.bool)
    for q, kv, stays in (map(int, line.split()) for line in lines):
        kept_by_lanes[q, kv] = bool(stays)
    state = torch.tensor([0x9234567890ABCDEF - 2**64, 77])
    call: Any = SimpleNamespace(
        variant=attngen.variant(dropout=True).value, heads=6, scalars={"dropout_p": 20000 / 65536},
        tensors={"rng_state": state},
    )  # fmt: skip
    assert rate_of(call)[0] == 20000
    assert len(lines) == kept_by_lanes.numel()
    assert torch.equal(kept_by_lanes, kept(call, 0, queries, keys.stop)[5][:, keys])
