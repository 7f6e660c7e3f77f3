"""Dropout in rendered kernels: they drop exactly what the reference drops, whatever their tiles are."""

from __future__ import annotations

import pytest

from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward_spec
from tests.interpreter.test_numerics import spec

VARIANTS = {
    "causal": 'mask: "q_pos >= kv"\n    dropout: true\n',
    "classified": 'mask: "q_pos >= kv and (q_pos - kv) % 3 == 0"\n    dropout: true\n',
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
each = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())


@each
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_forward(interpreter: Interpreter, fields: str, layout: str) -> None:
    declared = f"variants:\n  odd:\n    {fields}"
    for tile in ("{m: 16, n: 16}", "{m: 32, n: 64}"):
        assert interpreter.call("problems", spec("odd", declared=declared, layout=layout, tile=tile), 31) == ()


@each
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_backward(interpreter: Interpreter, fields: str, layout: str) -> None:
    """Its two kernels have tiles of their own."""
    declared = f"variants:\n  odd:\n    {fields}"
    for dtype, tile in (("fp16", "{m: 16, n: 32}"), ("fp32", "{m: 32, n: 16}")):
        text = backward_spec("odd", declared=declared, layout=layout, dtype=dtype, tile=tile)
        assert interpreter.call("gradient_problems", text.replace("dq: {tile: {m: 16", "dq: {tile: {m: 64"), 32) == ()
