"""The header of dropout in CUDA, compiled for the host: what its lanes drop is what the reference drops."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.resources import root
from attngen.runtime.dropout import kept, rate_of

HEADER = root() / "templates" / "cuda" / "include" / "dropout.cuh"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

#: A tile of 64 queries from 128 on, and 48 keys from 144 on, of head 5, as the lanes of a warpgroup hold it.
PROGRAM = """
#include <cstdint>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::uint32_t;
using std::uint64_t;
#include "dropout.h"

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


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_lanes_drop_what_the_reference_drops(tmp_path: Path) -> None:
    text = HEADER.read_text().replace('#include "types.cuh"', "").replace("#pragma once", "")
    (tmp_path / "dropout.h").write_text(text)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    subprocess.run([str(COMPILER), "-w", "-o", tmp_path / "main", tmp_path / "main.cpp"], check=True)
    lines = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    found = torch.zeros(64, 48, dtype=torch.bool)
    for q, kv, stays in (map(int, line.split()) for line in lines):
        found[q, kv] = bool(stays)
    state = torch.tensor([0x9234567890ABCDEF - 2**64, 77])
    call: Any = SimpleNamespace(heads=6, scalars={"dropout_p": 20000 / 65536}, tensors={"rng_state": state})
    assert rate_of(call)[0] == 20000
    assert len(lines) == found.numel()
    assert torch.equal(found, kept(call, 0, slice(128, 192), 192)[5][:, 144:])
