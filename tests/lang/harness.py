"""Runs emitted expressions outside any attention kernel: in Triton's interpreter, and as host C++."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attngen.dtypes import DTYPES
from attngen.lang.emit import Binding, EmittedMany, TensorBinding, emit_many
from attngen.lang.ir import Expr, Type
from attngen.lang.languages import Target
from attngen.lang.ranges import declared_ranges
from attngen.lang.statements import lines
from tests import forked
from tests.lang import randoms
from tests.lang.randoms import BATCH, HEADS, SEQLEN_K, SEQLEN_Q

ROOT = Path(__file__).parents[2]
RANGES = declared_ranges(randoms.SCALARS, randoms.TENSORS)
_ROW, _COLUMN = frozenset({"q"}), frozenset({"kv"})
_ARGUMENTS = [s for s in randoms.SCALARS if s.const is None]
_EXTENTS = {"b": "batch", "h": "heads", "n": "5"}

_TRITON_HEAD = """
import sys
import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
"""

_TRITON_KERNEL = """
@triton.jit
def {name}({arguments}):
    head = tl.program_id(0) * {step}
    b = head // heads
    h = head % heads
    hk = h // 2
    q_index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kv_index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    where = (head * seqlen_q + q_index[:, None]) * seqlen_k + kv_index[None, :]
    inside = (q_index[:, None] < seqlen_q) & (kv_index[None, :] < seqlen_k)
    s = tl.load(s_ptr + where, mask=inside, other=0)
{lines}
    tl.store(out_ptr + where, tl.zeros([BLOCK, BLOCK], tl.{zero}) + {result}, mask=inside)
"""


def _texts(extent: int | str) -> str:
    return _EXTENTS.get(extent, extent) if isinstance(extent, str) else str(extent)


def tensor_bindings() -> dict[str, TensorBinding]:
    """Bind each declared tensor to a pointer with run-time strides."""
    return {
        t.name: TensorBinding(
            f"{t.name}_ptr",
            tuple(f"stride_{t.name}_{axis}" for axis in range(len(t.shape))),
            tuple(_texts(extent) for extent in t.shape),
            t.dtype,
            t.shape,
        )
        for t in randoms.TENSORS
    }


def triton_bindings() -> dict[str, Binding]:
    """Bind the names of expressions as a kernel with a tile of queries and keys would."""
    scalar = {name: Binding(name) for name in (*randoms.indices(), *(s.name for s in _ARGUMENTS))}
    return {
        **scalar,
        "q": Binding("{q_index}[:, None]", _ROW),
        "kv": Binding("{kv_index}[None, :]", _COLUMN),
        "q_pos": Binding("({q_index} + ({seqlen_k} - {seqlen_q}))[:, None]", _ROW),
        "q_global": Binding("({b} * {seqlen_q} + {q_index})[:, None]", _ROW),
        "kv_global": Binding("({b} * {seqlen_k} + {kv_index})[None, :]", _COLUMN),
        "s": Binding("s", _ROW | _COLUMN),
    }


def triton_arguments() -> list[str]:
    """Return the arguments of a generated test kernel, in order."""
    strides = [stride for t in tensor_bindings().values() for stride in t.strides]
    pointers = [t.pointer for t in tensor_bindings().values()]
    lengths = ["seqlen_q", "seqlen_k", "total_q", "total_k", "heads", "kv_heads", "batch"]
    return ["out_ptr", "s_ptr", *pointers, *strides, *(s.name for s in _ARGUMENTS), *lengths]


def triton_kernel(name: str, exprs: Sequence[Expr], emitted: EmittedMany, *, step: int = 1) -> str:
    """Return a kernel that stores the sum of the results, zero counted for those that are conditions, of every
    ``step``-th head.
    """
    results = [
        f"tl.where({text}, 1, 0)" if expr.type is Type.BOOL else f"({text})"
        for expr, text in zip(exprs, emitted.results, strict=True)
    ]
    return _TRITON_KERNEL.format(
        name=name,
        step=step,
        arguments=", ".join(triton_arguments()),
        lines="\n".join(f"    {line}" for line in lines((*emitted.hoisted, *emitted.body))),
        zero="float32" if any(e.type is Type.FLOAT for e in exprs) else "int64",
        result=" + ".join(results),
    )


def triton_module(kernels: str) -> str:
    """Return the text of a module of test kernels."""
    return _TRITON_HEAD + kernels


def triton_signature() -> dict[str, str]:
    """Return the Triton type of each argument of a test kernel that stores floats."""
    kinds = {s.name: {"int32": "i32", "int64": "i64", "fp32": "fp32", "bool": "i1"}[s.dtype] for s in _ARGUMENTS}
    kinds |= {t.name + "_ptr": "*" + DTYPES[t.dtype].triton for t in randoms.TENSORS}
    kinds |= {"out_ptr": "*fp32", "s_ptr": "*fp32"}
    return {n: kinds.get(n, "i64" if n.startswith("stride_") else "i32") for n in triton_arguments()}


_TRITON_MAIN = """
if __name__ == "__main__":
    data = torch.load(sys.argv[1])
    for name, (grid, arguments, like) in data.items():
        out = torch.zeros_like(like)
        globals()[name][grid](out, *arguments)
        data[name] = out
    torch.save(data, sys.argv[1])
"""


def run_triton(
    exprs: Sequence[Expr], folder: Path, *, fast_math: bool = False, steps: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Evaluate each expression in Triton's interpreter, in a process of its own; expression i has data of seed i.

    ``steps``: of the heads of all sequences that each expression is evaluated for; the others are 0.
    """
    steps = steps or [1] * len(exprs)
    names = triton_bindings()
    text = _TRITON_HEAD
    jobs = {}
    for i, expr in enumerate(exprs):
        emitted = emit_many([expr], Target.TRITON, names, tensor_bindings(), ranges=RANGES, fast_math=fast_math)
        text += triton_kernel(f"kernel_{i}", [expr], emitted, step=steps[i])
        dtype = torch.float32 if expr.type is Type.FLOAT else torch.int64
        like = torch.zeros(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, dtype=dtype)
        grid = (-(-BATCH * HEADS // steps[i]), -(-SEQLEN_Q // 16), -(-SEQLEN_K // 16))
        jobs[f"kernel_{i}"] = (grid, _values(i), like)
    (folder / "kernels.py").write_text(text + _TRITON_MAIN)
    torch.save(jobs, folder / "data.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, folder / "kernels.py", folder / "data.pt"]
    done = forked.preload().run(command, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:] + "\n" + text[:4000]
    results = torch.load(folder / "data.pt")
    return [results[f"kernel_{i}"] for i in range(len(exprs))]


def _values(seed: int) -> list[Any]:
    """Return the values of ``triton_arguments`` after the output."""
    tensors = randoms.tensors(seed)
    strides = [stride for t in randoms.TENSORS for stride in tensors[t.name].stride()]
    numbers = randoms.scalars(seed)
    given = randoms.indices()
    lengths = [given[n] for n in ("seqlen_q", "seqlen_k", "total_q", "total_k", "heads", "kv_heads")]
    stored = [tensors[t.name].to(torch.int8) if t.dtype == "bool" else tensors[t.name] for t in randoms.TENSORS]
    scalars = [numbers[s.name] for s in _ARGUMENTS]
    return [randoms.logits(seed), *stored, *strides, *scalars, *lengths, BATCH]


# --- host C++ ---------------------------------------------------------------------------------------------

_SHIM = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#define __device__
#define __forceinline__ inline
#define __int_as_float(bits) std::numeric_limits<float>::infinity()
using std::min; using std::max; using std::abs;
struct fp16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
static inline int __float2int_rz(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16; float y; memcpy(&y, &bits, 4); return y;
}
static inline float to_float(fp16 x) {
  const int exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  const float value = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return x.bits >> 15 ? -value : value;
}
#include "expression.cuh"
"""

_CXX_FUNCTION = """
extern "C" void function_{i}({kind}* out, const float* logits, void** data, const long long* strides,
                             const long long* ints, const float* floats) {{
{unpack}
  const float* logit = logits;
  for (int b = 0; b < batch; ++b) for (int h = 0; h < heads; ++h) {{
    const int hk = h / (heads / kv_heads);
    for (int q = 0; q < seqlen_q; ++q) for (int kv = 0; kv < seqlen_k; ++kv) {{
      const int q_pos = q + seqlen_k - seqlen_q, q_global = b * seqlen_q + q, kv_global = b * seqlen_k + kv;
      const float s = *logit++;
      (void)hk, (void)q_pos, (void)q_global, (void)kv_global, (void)s;
{lines}
      *out++ = {result};
    }}
  }}
}}
"""


def compiler() -> str | None:
    """Return the host C++ compiler, if there is one."""
    return shutil.which("g++")


def _unpack() -> str:
    """Return C++ lines that give the arguments the names of the bindings."""
    lines, stride = [], 0
    for i, t in enumerate(randoms.TENSORS):
        kind = DTYPES[t.dtype].cuda
        lines.append(f"const auto* {t.name}_ptr = static_cast<const {kind}*>(data[{i}]); (void){t.name}_ptr;")
        for axis in range(len(t.shape)):
            name = f"stride_{t.name}_{axis}"
            lines.append(f"const long long {name} = strides[{stride}]; (void){name};")
            stride += 1
    place = {"int": 0, "float": 0}
    kinds = {"int32": "int", "int64": "long long", "bool": "bool", "fp32": "float"}
    numbers = [(s.name, kinds[s.dtype]) for s in _ARGUMENTS]
    lengths = ("seqlen_q", "seqlen_k", "total_q", "total_k", "heads", "kv_heads", "batch")
    for name, kind in [*numbers, *((name, "int") for name in lengths)]:
        group = "float" if kind == "float" else "int"
        lines.append(f"const {kind} {name} = static_cast<{kind}>({group}s[{place[group]}]); (void){name};")
        place[group] += 1
    return "\n".join(f"  {line}" for line in lines)


def run_cxx(exprs: Sequence[Expr], folder: Path) -> list[torch.Tensor]:
    """Evaluate each expression with its CUDA text compiled as host C++; expression i has data of seed i."""
    names = {name: Binding(name) for name in (*randoms.indices(), *(s.name for s in _ARGUMENTS))}
    names["s"] = Binding("s", _ROW | _COLUMN)
    text = _SHIM
    for i, expr in enumerate(exprs):
        emitted = emit_many([expr], Target.CUDA, names, tensor_bindings(), ranges=RANGES)
        text += _CXX_FUNCTION.format(
            i=i,
            kind="float" if expr.type is Type.FLOAT else "long long",
            unpack=_unpack(),
            lines="\n".join(f"      {line}" for line in lines((*emitted.hoisted, *emitted.body))),
            result=emitted.results[0],
        )
    source, library = folder / "functions.cpp", folder / "functions.so"
    source.write_text(text)
    command = [compiler(), "-std=c++17", "-O0", "-Wall", "-Wno-parentheses", "-Werror", "-shared", "-fPIC"]
    flags = ["-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-function"]
    flags += ["-Wno-tautological-compare", f"-I{ROOT / 'templates/cuda/include'}"]
    done = subprocess.run([*map(str, command), *flags, str(source), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    loaded = ctypes.CDLL(str(library))
    return [_call(getattr(loaded, f"function_{i}"), i, expr) for i, expr in enumerate(exprs)]


def _call(function: Any, seed: int, expr: Expr) -> torch.Tensor:
    dtype = torch.float32 if expr.type is Type.FLOAT else torch.int64
    out = torch.zeros(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, dtype=dtype)
    logits, tensors, numbers = randoms.logits(seed), randoms.tensors(seed), randoms.scalars(seed)
    given = randoms.indices()
    strides = [stride for t in randoms.TENSORS for stride in tensors[t.name].stride()]
    ints = [int(numbers[s.name]) for s in _ARGUMENTS if s.dtype != "fp32"]
    ints += [given[n] for n in ("seqlen_q", "seqlen_k", "total_q", "total_k", "heads", "kv_heads")] + [BATCH]
    floats = [float(numbers[s.name]) for s in _ARGUMENTS if s.dtype == "fp32"]
    function(
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(logits.data_ptr()),
        (ctypes.c_void_p * len(tensors))(*(tensors[t.name].data_ptr() for t in randoms.TENSORS)),
        (ctypes.c_longlong * len(strides))(*strides),
        (ctypes.c_longlong * len(ints))(*ints),
        (ctypes.c_float * len(floats))(*floats),
    )
    return out
