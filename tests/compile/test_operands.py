"""Kernels of one-byte operands, compiled: what matrices take of shared memory, and K of their products."""

from __future__ import annotations

import re

import pytest

from attngen.compile.cuda import compile_text
from attngen.compile.inspect import count_instructions
from attngen.dtypes import ATTENTION_DTYPES, dtype
from attngen.render import render
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.sampling import few


@pytest.mark.exhaustive
@few(
    ("head_dim", "tile"),
    [(64, "{m: 192, n: 128}"), (128, "{m: 128, n: 128}"), (256, "{m: 128, n: 64}")],
    always=(1,),
    often=(1,),
)
def test_a_kernel_of_one_byte_operands_compiles_as_planned(head_dim: int, tile: str) -> None:
    """The kernel's own assertions hold, and it has half the products of a kernel of two bytes."""
    fields = {"backend": "cuda", "head_dim": head_dim, "tile": tile}
    two, one = planned(**fields), planned(**fields, dtype="fp8_e4m3")
    source = render(one)
    assert "using Element = e4m3;" in source.text
    assert "using OutElement = bf16;" in source.text
    cubin, _ = compile_text(one.name, source.text, source.headers, "sm90a")
    products = one.launch("forward").products
    assert count_instructions(cubin, "QGMMA") == count_instructions(cubin, "[HQ]GMMA") == products
    assert 2 * products == two.launch("forward").products


@pytest.mark.parametrize("name", [name for name in ATTENTION_DTYPES if dtype(name).mma])
def test_products_of_the_header_are_those_of_the_table(name: str) -> None:
    row = dtype(name)
    wgmma, types = headers()["wgmma.cuh"], headers()["types.cuh"]
    if row.bytes == 1:
        assert re.search(rf'DEFINE_PRODUCT_OF_BYTES\({row.cuda}, {row.cuda}, "{row.mma}.{row.mma}", N,', wgmma)
        assert f"enum : int {{ kK = {row.mma_k} }};" in wgmma
        assert re.search(rf"struct {row.cuda} {{\n  unsigned char bits;", types)
    else:
        assert re.search(rf'DEFINE_PRODUCT\({row.cuda}, "{row.mma}", {row.mma_k}, N,', wgmma)
        assert re.search(rf"struct {row.cuda} {{\n  uint{8 * row.bytes}_t bits;", types)
