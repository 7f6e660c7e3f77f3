"""The polynomial that takes the place of tanh in soft-capped kernels, on the host: its errors, and where it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.host_compiler import COMPILER, compile_host
from tests.render.headers import headers
from tests.render.test_decode_on_host import on_host

#: For each cap, scale of the products, product and row_max: whether the polynomial holds, P, and the sum of two.
PROGRAM = """
#include "soft_cap.cuh"
static float last;
struct Noted { uint16_t bits; };
template <>
inline uint32_t pack<Noted>(float low, float) { last = low; return 0; }
int main(int count, char** given) {
  for (int i = 1; i + 3 < count; i += 4) {
    const float cap = atof(given[i]), scale = atof(given[i + 1]);
    const float x = atof(given[i + 2]), row_max = atof(given[i + 3]);
    const SoftCap soft_cap(scale / cap, cap * kLog2e);
    const float s[2] = {x, x}, row_maxima[2] = {row_max, row_max};
    uint32_t p[1];
    float sum[2] = {};
    const bool holds = exponentiate_capped<Noted>(s, soft_cap, row_maxima, p, sum);
    std::printf("%d %.9g %.9g\\n", holds, last, sum[0]);
  }
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_the_soft_cap_is_as_good_as_tanh_where_it_holds_and_says_where_not(tmp_path: Path) -> None:
    for name in ("soft_cap.cuh", "softmax.cuh"):
        (tmp_path / name).write_text(on_host(name, headers()[name]))
    (tmp_path / "soft_cap.cpp").write_text(PROGRAM)
    program = tmp_path / "soft_cap"
    compile_host(tmp_path / "soft_cap.cpp", program, tmp_path)
    cases = [
        (cap, scale, float(argument) * cap / scale, row_max)
        for cap in (0.5, 30.0, 50.0, 1e4)
        for scale in (0.0884, 1.0)
        for argument in (*np.linspace(-0.75, 0.75, 41), 0.7501, -0.7501, 3.0, -20.0, float("nan"), float("inf"))
        for row_max in (0.0, 3.5)
    ]
    words = [f"{number!r}" for case in cases for number in case]
    lines = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout.split("\n")
    assert len(lines) == len(cases) + 1
    for (cap, scale, x, row_max), line in zip(cases, lines, strict=False):
        holds, p, total = line.split()
        argument = x * scale / cap
        if abs(abs(argument) - 0.75) > 1e-6:
            assert int(holds) == (abs(argument) < 0.75), (cap, x)
        if not int(holds) or cap > 100:  # 2^14000 is no number
            continue
        exact = cap * np.tanh(argument) * np.log2(np.e) - row_max
        assert abs(np.log2(float(p)) - exact) <= 2.0**-12 * abs(exact + row_max) + 1e-5, (cap, x)
        assert float(total) == pytest.approx(2 * float(p))
