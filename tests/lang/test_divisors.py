"""Divisors that scalars decide: which ones kernels multiply for, and what comes out, beside Python's own division."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from attngen.lang.check import compile_variant
from attngen.lang.declared import Scalar
from attngen.lang.divisors import division, divisors, prepared, reciprocal
from attngen.lang.facts import Facts
from attngen.lang.ir import Expr, Op, Var, rewrite
from attngen.lang.printing import canonical
from attngen.lang.variant import Variant
from tests.host_compiler import HOST

HEADERS = Path(__file__).parents[2] / "templates/cuda/include"
LARGEST = 2**31 - 1
DIVISORS = (1, 2, 3, 5, 7, 64, 641, 6700417, 65535, 65536, 2**30 - 1, 2**30, 2**30 + 1, LARGEST - 1, LARGEST)

_PROGRAM = """
#include <cstdint>
#define __device__
#define __forceinline__ inline
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
#include "division.cuh"
RECIPROCAL
extern "C" int reciprocal_of(int divisor) { return reciprocal(divisor); }
extern "C" void divide(const int* n, int count, const int* by, int* out) {
  Divisor divisor;
  divisor.value = by[0], divisor.multiplier = by[1], divisor.shift = by[2];
  if (Divisor(by[0], by[1]).shift != by[2]) __builtin_trap();
  for (int i = 0; i < count; ++i) {
    out[4 * i] = n[i] < 0 ? 0 : n[i] / divisor;
    out[4 * i + 1] = n[i] < 0 ? 0 : n[i] % divisor;
    out[4 * i + 2] = floor_div(n[i], divisor);
    out[4 * i + 3] = floor_mod(n[i], divisor);
  }
}
"""


def made(mask: str, *, score: str | None = None, **scalars: tuple[int | None, int | None] | str) -> Variant:
    """Return a variant whose scalars have the ranges given."""
    declared = [
        Scalar(name, "int64", min=1) if isinstance(span, str) else Scalar(name, "int32", min=span[0], max=span[1])
        for name, span in scalars.items()
    ]
    return compile_variant("own", mask, score, declared, ())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_multiplications_are_exact(tmp_path: Path) -> None:
    """All signs and extremes: the header as host C++ against Python's floor division and remainder. Reciprocals that
    other tests pass to kernels on the host are those that the host passes."""
    (tmp_path / "types.cuh").write_text("#pragma once\n#include <cstdint>\n")
    for name in ("divisor.cuh", "division.cuh"):
        shutil.copy(HEADERS / name, tmp_path)
    (stand_in,) = re.findall(
        r"^inline int reciprocal\(.*?^}", (HOST / "threads.h").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "program.cpp").write_text(_PROGRAM.replace("RECIPROCAL", stand_in))
    library = tmp_path / "program.so"
    options = ["-std=c++17", "-O1", "-fwrapv", "-shared", "-fPIC", f"-I{tmp_path}"]
    subprocess.run(["g++", *options, tmp_path / "program.cpp", "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    divide = loaded.divide
    r = random.Random(0)
    for by in (*DIVISORS, *(r.randint(1, LARGEST) for _ in range(200)), *(r.randint(1, 5000) for _ in range(200))):
        near = [sign * (by * r.randint(0, LARGEST // by) + step) for step in (-1, 0, 1) for sign in (-1, 1)]
        numbers = [-(2**31), -LARGEST, -by, 1 - by, -1, 0, 1, by - 1, by, LARGEST - 1, LARGEST, *near]
        numbers += [r.randint(-(2**31), LARGEST) for _ in range(100)]
        numbers = [n for n in numbers if -(2**31) <= n <= LARGEST]
        given, out = np.array(numbers, np.int32), np.zeros(4 * len(numbers), np.int32)
        held = np.array(division(by), np.int64).astype(np.int32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (given, held, out)]
        divide(pointers[0], len(numbers), *pointers[1:])
        assert loaded.reciprocal_of(by) == reciprocal(by), by
        for n, (quotient, remainder, floor, mod) in zip(numbers, out.reshape(-1, 4).tolist(), strict=True):
            assert (floor, mod) == (n // by, n % by), (n, by)
            assert n < 0 or (quotient, remainder) == (n // by, n % by), (n, by)


@pytest.mark.parametrize(
    ("mask", "scalars", "names"),
    [
        ("q // n == kv // n", {"n": (1, None)}, ["n"]),
        ("q // n == kv % (n * m)", {"n": (1, None), "m": (1, 9)}, ["n", "n * m"]),
        ("q // max(n, 1) == kv // 2", {"n": (None, None)}, ["max(n, 1)"]),
        ("q // n == kv", {"n": (None, -1)}, []),  # negative
        ("q // seqlen_k == kv // (seqlen_k + n)", {"n": (1, 5)}, []),  # lengths differ between sequences
        ("q // 3 == kv % 64", {}, []),
        ("q // n == kv", {"n": "int64"}, ["n"]),
        ("q // (n // m + 1) == kv // m", {"n": (1, 99), "m": (1, 9)}, ["n // m + 1", "m"]),
    ],
)
def test_divisors_that_are_prepared(mask: str, scalars: dict[str, tuple[int, int]], names: list[str]) -> None:
    assert sorted(each.text for each in divisors(made(mask, **scalars))) == sorted(names)


def test_values_come_from_the_scalars_of_a_call() -> None:
    chosen = made("q // (n * m) == kv // (n // m + 1) + kv % max(n - 8, 1)", n=(1, None), m=(1, None))
    values = {each.text: each.value({"n": 2**20, "m": 2**19}) for each in divisors(chosen)}
    assert values == {"n * m": LARGEST, "n // m + 1": 3, "m": 2**19, "max(n - 8, 1)": 2**20 - 8}
    assert {each.text: each.value({"n": 7, "m": 3}) for each in divisors(chosen)}["n * m"] == 21


def symbols(expr: Expr) -> set[str]:
    """Return the divisors of an expression that are symbols."""
    names: set[str] = set()
    rewrite(expr, lambda node: names.add(node.name) if isinstance(node, Var) and node.name.startswith(".by") else None)
    return names


@pytest.mark.parametrize(
    ("mask", "scalars", "count"),
    [
        ("q // (n * m) == kv // (n * m)", {"n": (1, None), "m": (1, None)}, 1),
        ("(kv - q_pos) // n == 0", {"n": (1, None)}, 1),
        ("(kv - q_pos) % (n * m) == 0", {"n": (1, None), "m": (1, None)}, 0),  # the remainder may be an int64
        ("(kv - q_pos) % (n * m) == 0", {"n": (1, 9), "m": (1, 9)}, 1),
        ("(kv + far) // n == q", {"n": (1, None), "far": (None, None)}, 0),  # the dividend is an int64
        ("(kv + far) // n == q", {"n": (1, None), "far": (0, 2**29)}, 1),
    ],
)
def test_dividends_of_32_bits_take_symbols(mask: str, scalars: dict[str, tuple[int, int]], count: int) -> None:
    chosen = made(mask, **scalars)
    rewritten = prepared(chosen.mask, chosen, Facts.of(chosen))
    assert len(symbols(rewritten)) == count
    if count:
        assert not any(isinstance(n, Op) and n.wide for n in [rewritten])
        back = {each.symbol: each.expr for each in divisors(chosen)}
        plain = rewrite(rewritten, lambda node: back.get(node))
        assert canonical(plain) == canonical(chosen.mask)


def test_divisors_of_scores_are_prepared() -> None:
    assert [each.text for each in divisors(made("q >= kv", score="s + float(h // n)", n=(1, 8)))] == ["n"]
    assert divisors(made("q >= kv and n > 3", n=(1, 8))) == ()
