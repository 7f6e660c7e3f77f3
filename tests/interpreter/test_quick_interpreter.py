"""The interpreter computes the same bits as without ``attngen.lab.verify.quick_interpreter``."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.inspect.cases import Case
from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward
from tests.interpreter.test_numerics import spec

CASE = Case("small", (9, 9), (21, 21), heads=2)


@pytest.mark.exhaustive
def test_nothing_else_is_computed(interpreter: Interpreter) -> None:
    calls = [
        ("outputs_with", spec("packed_documents"), CASE, [], {}),
        ("gradients_with", backward("softcap"), CASE, [], {}),
    ]
    plain = Interpreter()
    try:
        for call in calls:
            for actual, wanted in zip(interpreter.call(*call), plain.call("unquickened", *call), strict=True):
                np.testing.assert_array_equal(actual, wanted)
    finally:
        plain.close()
