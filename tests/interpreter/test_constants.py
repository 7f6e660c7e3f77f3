"""Masks and scores that are the same everywhere: no key seen, every key, every logit -inf, every logit alike."""

from __future__ import annotations

import pytest

from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward
from tests.interpreter.test_numerics import spec as forward
from tests.sampling import few

VARIANTS = {
    "nothing, with a score": 'mask: false\n    score: "s * 2"\n',
    "nothing, by ranges": 'mask: "kv < first"\n    scalars: {first: {type: int32, max: 0}}\n',
    "hidden by the score": 'mask: "q_pos >= kv"\n    score: "-inf"\n',
    "nothing, but of a tensor": (
        'score: "-inf if kv >= 0 else s + bias[h]"\n    tensors: {bias: {dtype: float32, shape: [h], grad: true}}\n'
    ),
    "everything, by ranges": 'mask: "kv >= 0"\n',
    "one logit": 'mask: "q_pos >= kv"\n    score: "1.5"\n',
}


@pytest.mark.exhaustive
@few("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_constant_masks_and_scores_are_right(interpreter: Interpreter, fields: str) -> None:
    declared = f"variants:\n  odd:\n    {fields}"
    assert interpreter.call("problems", forward("odd", declared=declared), 19) == ()
    assert interpreter.call("gradient_problems", backward("odd", declared=declared, layout="varlen"), 19) == ()
