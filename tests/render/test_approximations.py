"""Functions are the hardware's approximations only in kernels of 16 bits with ``fast_math``."""

from __future__ import annotations

import pytest

from attngen.render import render
from tests.plan.specs import planned

CAPPED = "variants:\n  capped: {score: 30.0 * tanh(s / 30.0)}\n"


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fields", "approximate"),
    [({"dtype": "bf16"}, True), ({"dtype": "fp16"}, True), ({"dtype": "bf16", "fast_math": "false"}, False),
     ({"dtype": "fp32"}, False), ({"dtype": "fp32", "fast_math": "false"}, False)],
    ids=str,
)  # fmt: skip
def test_tanh(passes: str, fields: dict[str, str], approximate: bool) -> None:
    text = render(planned("capped", declared=CAPPED, passes=passes, **fields)).text
    assert ("tanh.approx" in text) == approximate
