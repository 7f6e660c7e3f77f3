"""Rendered forward-mode derivatives in Triton's interpreter, against the tangents of the float64 reference.

Cases and poison are those of the forward. Each kernel runs twice a case: with tangents of q, k and v, and of q alone.
"""

from __future__ import annotations

import pytest

from attngen.schema import preset_names
from tests.interpreter.process import Interpreter
from tests.interpreter.test_numerics import DRIVEN, LAYOUTS, LOADS, MASKS, ODD_HEAD_DIMS, SCORES, THIRDS
from tests.sampling import sampled

pytestmark = pytest.mark.long

SMALL = (16, 16)


def spec(variant: str = "causal", *, declared: str = "", **fields: object) -> str:
    """Return the text of a spec with one kernel."""
    given = {"head_dim": 16, "dtype": "fp16", "fast_math": "false", "passes": "jvp", **fields}
    lines = "".join(f"    {name}: {value}\n" for name, value in given.items())
    return f"{declared}kernels:\n  - variant: {variant}\n{lines}"


@sampled(always=1, name=preset_names(), layout=LAYOUTS, third=THIRDS)
def test_every_preset(interpreter: Interpreter, name: str, layout: str, third: int) -> None:
    assert interpreter.call("tangent_problems", spec(name, layout=layout), SMALL, 41, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, head_dim=["48", "{qk: 192, v: 128}", "{qk: 32, v: 80}", *ODD_HEAD_DIMS], loads=LOADS, third=THIRDS)
def test_head_dims(interpreter: Interpreter, head_dim: str, loads: str, third: int) -> None:
    assert interpreter.call("tangent_problems", spec(head_dim=head_dim, loads=loads), SMALL, 42, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, variant=["full", "alibi"], loads=LOADS, arch=["sm90a", "sm120a"], fast_math=["true", "false"])
def test_float32(interpreter: Interpreter, variant: str, loads: str, arch: str, fast_math: str) -> None:
    fields = {"dtype": "fp32", "loads": loads, "arch": arch, "fast_math": fast_math}
    assert interpreter.call("tangent_problems", spec(variant, head_dim=48, **fields), SMALL, 43) == ()


@pytest.mark.exhaustive
@sampled(always=1, variant=["sliding_window", "sink_window"], tile=[(16, 64), (64, 16), (32, 32)])
def test_tiles(interpreter: Interpreter, variant: str, tile: tuple[int, int]) -> None:
    assert interpreter.call("tangent_problems", spec(variant), tile, 44) == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["causal", "allowed"])
def test_tiles_of_the_plan(interpreter: Interpreter, variant: str) -> None:
    """Those of the launch for a tangent of q alone are smaller, unless the mask needs a map."""
    text = spec(variant, head_dim=128, arch="sm90a")
    assert interpreter.call("tangent_problems", text, None, 48, 0) == ()


@pytest.mark.exhaustive
@sampled(always=1, variant=DRIVEN, tile_map=["always", "never"], layout=LAYOUTS)
def test_iterations(interpreter: Interpreter, variant: str, tile_map: str, layout: str) -> None:
    text = spec(variant, tile_map=tile_map, layout=layout)
    assert interpreter.call("tangent_problems", text, SMALL, 45) == ()


@pytest.mark.exhaustive
@sampled(always=1, mask=MASKS, layout=LAYOUTS, third=THIRDS)
def test_masks_of_all_kinds(interpreter: Interpreter, mask: str, layout: str, third: int) -> None:
    declared = f'variants:\n  odd: {{mask: "{mask}"}}\n'
    text = spec("odd", declared=declared, layout=layout)
    assert interpreter.call("tangent_problems", text, SMALL, 46, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, fields=SCORES, third=THIRDS)
def test_scores_of_all_kinds(interpreter: Interpreter, fields: str, third: int) -> None:
    text = spec("odd", declared=f"variants:\n  odd:\n    {fields}")
    assert interpreter.call("tangent_problems", text, SMALL, 47, third) == ()
