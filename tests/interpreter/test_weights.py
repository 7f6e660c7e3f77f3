"""Triton kernels whose weights are sigmoids, forward and backward, in the interpreter against float64."""

from __future__ import annotations

from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward
from tests.interpreter.test_numerics import spec as forward
from tests.sampling import few

DECLARED = """
variants:
  plain: {weights: sigmoid}
  biased: {mask: "q_pos >= kv", score: "s - log(seqlen_k)", weights: sigmoid}
  learned:
    mask: "q_pos >= kv and (q_pos - kv) % 3 == 0"
    score: "s + bias[h]"
    tensors: {bias: {dtype: float32, shape: [h], grad: true}}
    weights: sigmoid
"""


@few(("variant", "layout"), [("plain", "dense"), ("biased", "varlen"), ("learned", "dense")], always=(2,))
def test_sigmoids(interpreter: Interpreter, variant: str, layout: str) -> None:
    given = {"declared": DECLARED.lstrip(), "layout": layout}
    assert interpreter.call("problems", forward(variant, **given), 31, 0) == ()
    assert interpreter.call("gradient_problems", backward(variant, **given), 32, 0) == ()
