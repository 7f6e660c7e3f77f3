"""Operands of products whose lanes hold more than there is: as Triton 3.6 wrote them, and as this Triton does."""

from __future__ import annotations

import pytest

from attngen.build.pipeline import prepare
from attngen.compile import layouts
from attngen.compile.layouts import repeated_operands
from attngen.compile.triton import compile_triton
from attngen.schema import load_spec_text

_DOT = (
    "%1 = tt.dot %2, %3, %4, inputPrecision = tf32 : tensor<32x{k}xf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, "
    "kWidth = {width}}}>> * tensor<{k}x256xf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {width}}}>> "
    "-> tensor<32x256xf32, #mma>"
)

SPEC = """
schema: 1
package: layouts
arch: sm80
kernels:
  - {variant: allowed, head_dim: 64, dtype: fp16, passes: backward, backward: {dkdv: {tile: {m: 16, n: 32}}}}
"""


@pytest.mark.parametrize(
    ("k", "width", "wrong"), [(16, 2, False), (16, 4, False), (16, 8, True), (32, 8, False), (32, 16, True)]
)
def test_lanes_hold_no_more_than_there_is(k: int, width: int, wrong: bool) -> None:
    problems = repeated_operands(_DOT.format(k=k, width=width))
    assert len(problems) == (2 if wrong else 0)
    assert all(f"depth of {k}" in line for line in problems)


@pytest.mark.exhaustive
def test_operands_of_a_compiled_kernel_are_seen() -> None:
    (kernel,) = prepare(load_spec_text(SPEC, "test.yaml"))
    ttgir = compile_triton(kernel.plan, kernel.source).texts["ttgir"]
    assert repeated_operands(ttgir) == []
    depths = {match["columns"] for match in layouts._OPERAND.finditer(ttgir) if match["place"] == "0"}
    assert {"16", "64"} <= depths  # dS and P of 16 queries, Q and dO of 64 columns
