"""A forward of operands that attngen does not have: a row of the table, and what a header adds for it, make a kernel.

Its results mean nothing, since V of one byte would have to lie with keys by columns; its loops, copies and memory do.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.compile.cuda import compile_text
from attngen.compile.inspect import count_instructions
from attngen.dtypes import ATTENTION_DTYPES, dtype
from attngen.render import Source, render
from attngen.render.source import headers
from tests.plan.one_byte import E4M3, use_one_byte
from tests.plan.specs import planned

#: Beside types.cuh, wgmma.cuh and softmax.cuh.
_TYPE = "struct e4m3 { unsigned char bits; };\n"
_PRODUCT = """
template <>
struct Product<e4m3, 128> {
  static constexpr int kK = 32;
  template <int kTransposeB, int kTransposeA = 0>
  static __device__ __forceinline__ void ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" D8 "}, %64, %65, p, 1, 1;}"
                 : OUT8(d) : "l"(a), "l"(b), "r"(accumulate));
  }
  template <int kTransposeB>
  static __device__ __forceinline__ void rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
                 " {" D8 "}, {%64, %65, %66, %67}, %68, p, 1, 1;}"
                 : OUT8(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
};
"""
_SOFTMAX = """
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], float scale, const float (&reference)[2], uint32_t (&p)[kCount / 4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = exp2_approx(fmaf(s[i + j], scale, -reference[row_of(i + j)]));
      sum[row_of(i + j)] += x[j];
    }
    asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;"
        " mov.b32 %0, {l, h};}" : "=r"(p[i / 4]) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  }
}
"""


def with_e4m3(source: Source) -> Source:
    """Return a source whose headers know the dtype."""
    added = {"types.cuh": _TYPE, "wgmma.cuh": _PRODUCT, "softmax.cuh": _SOFTMAX}
    return replace(source, headers={name: text + added.get(name, "") for name, text in source.headers.items()})


@pytest.mark.parametrize("warps", ["{consumer: 2}", "{producer: 0}"], ids=["roles", "unified"])
def test_a_kernel_of_one_byte_operands_compiles_as_planned(warps: str) -> None:
    """Its own assertions hold: what matrices take of shared memory, and K of its products."""
    fields = {"backend": "cuda", "head_dim": 128, "warps": warps, "tile": "{m: 128, n: 128}"}
    two = planned(**fields)
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        one = planned(**fields)
        source = with_e4m3(render(one))
    assert "using Element = e4m3;" in source.text
    assert "using OutElement = bf16;" in source.text
    cubin, _ = compile_text(one.name, source.text, source.headers, "sm90a")
    products = one.launch("forward").products
    assert count_instructions(cubin, "QGMMA") == count_instructions(cubin, "[HQ]GMMA") == products
    assert 2 * products == two.launch("forward").products


@pytest.mark.parametrize("name", [name for name in ATTENTION_DTYPES if dtype(name).mma])
def test_products_of_the_header_are_those_of_the_table(name: str) -> None:
    row = dtype(name)
    assert re.search(rf'DEFINE_PRODUCT\({row.cuda}, "{row.mma}", {row.mma_k}, N,', headers()["wgmma.cuh"])
    assert re.search(rf"struct {row.cuda} {{\n  uint{8 * row.bytes}_t bits;", headers()["types.cuh"])
    assert E4M3.mma_k == 2 * row.mma_k
