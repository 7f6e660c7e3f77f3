"""Dropout in rendered kernels: they drop exactly what the reference drops, whatever their tiles are."""

from __future__ import annotations

import pytest

from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward_spec
from tests.interpreter.test_numerics import spec
from tests.sampling import few

VARIANTS = {
    "causal": 'mask: "q_pos >= kv"\n    dropout: true\n',
    "classified": 'mask: "q_pos >= kv and (q_pos - kv) % 3 == 0"\n    dropout: true\n',
    "gathered": (
        'mask: "allowed[b, q, kv]"\n'
        "    dropout: true\n"
        "    tensors: {allowed: {dtype: bool, shape: [b, seqlen_q, seqlen_k]}}\n"
    ),
    "with all else": (
        'mask: "0 <= q_pos - kv and q_pos - kv < window"\n'
        '    score: "s + slope[h] * (kv - q_pos)"\n'
        '    sink: "sinks[h]"\n'
        "    dropout: true\n"
        "    scalars: {window: {type: int32, min: 1}}\n"
        "    tensors:\n"
        "      slope: {dtype: float32, shape: [h], grad: true}\n"
        "      sinks: {dtype: float32, shape: [h], grad: true}\n"
    ),
}


@few(
    ("name", "layout", "tile"),
    [
        ("causal", "dense", "{m: 16, n: 16}"),
        ("classified", "varlen", "{m: 32, n: 32}"),
        ("with all else", "dense", "{m: 32, n: 64}"),
        ("with all else", "varlen", "{m: 16, n: 32}"),
    ],
)
def test_forward(interpreter: Interpreter, name: str, layout: str, tile: str) -> None:
    text = spec("odd", declared=f"variants:\n  odd:\n    {VARIANTS[name]}", layout=layout, tile=tile)
    assert interpreter.call("problems", text, 31) == ()


@pytest.mark.exhaustive
@few(
    ("name", "layout", "dtype", "tile"),
    [
        ("classified", "dense", "fp16", "{m: 16, n: 32}"),
        ("gathered", "dense", "fp16", "{m: 32, n: 64}"),
        ("with all else", "dense", "fp16", "{m: 16, n: 32}"),
        ("with all else", "varlen", "fp32", "{m: 32, n: 16}"),
    ],
)
def test_backward(interpreter: Interpreter, name: str, layout: str, dtype: str, tile: str) -> None:
    """Both kernels of the backward have tiles of their own."""
    declared = f"variants:\n  odd:\n    {VARIANTS[name]}"
    text = backward_spec("odd", declared=declared, layout=layout, dtype=dtype, tile=tile)
    assert interpreter.call("gradient_problems", text.replace("dq: {tile: {m: 16", "dq: {tile: {m: 64"), 32) == ()
