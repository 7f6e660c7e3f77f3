"""Rendered backward kernels in Triton's interpreter against float64 autograd of the reference.

Cases and poison are those of the forward; the gradients of the outputs of rows that see nothing are 1e4.
"""

from __future__ import annotations

import numpy as np
import pytest

from attngen.inspect.cases import Case
from attngen.schema import preset_names
from tests.interpreter.process import Interpreter
from tests.interpreter.test_numerics import DRIVEN, LAYOUTS, LOADS, MASKS, ODD_HEAD_DIMS, SCORES, THIRDS
from tests.sampling import few, sampled

pytestmark = pytest.mark.long


def spec(variant: str = "causal", *, tile: str = "{m: 16, n: 16}", declared: str = "", **fields: object) -> str:
    """Return the text of a spec with one backward kernel."""
    given = {"head_dim": 16, "dtype": "fp16", "fast_math": "false", "passes": "backward", **fields}
    given["backward"] = f"{{backend: triton, dkdv: {{tile: {tile}}}, dq: {{tile: {tile}}}}}"
    lines = "".join(f"    {name}: {value}\n" for name, value in given.items())
    return f"{declared}kernels:\n  - variant: {variant}\n{lines}"


@sampled(
    always=1, name=preset_names(), layout=LAYOUTS[::-1], third=THIRDS
)  # each in the layout that forward kernels are not sampled in
def test_every_preset(interpreter: Interpreter, name: str, layout: str, third: int) -> None:
    assert interpreter.call("gradient_problems", spec(name, layout=layout), 21, third) == ()


@pytest.mark.exhaustive
@sampled(
    always=1, head_dim=["48", "112", "{qk: 192, v: 128}", "{qk: 32, v: 80}", *ODD_HEAD_DIMS], loads=LOADS, third=THIRDS
)
def test_head_dims(interpreter: Interpreter, head_dim: str, loads: str, third: int) -> None:
    assert interpreter.call("gradient_problems", spec(head_dim=head_dim, loads=loads), 22, third) == ()


@pytest.mark.exhaustive
@sampled(
    always=1,
    variant=["causal", "softcap", "allowed"],
    head_dim=["264", "320", "440", "512", "{qk: 512, v: 64}"],
    layout=LAYOUTS,
)
def test_head_dims_beyond_256(interpreter: Interpreter, variant: str, head_dim: str, layout: str) -> None:
    """A kernel for each gradient."""
    assert (
        interpreter.call("gradient_problems", spec(variant, arch="sm90a", head_dim=head_dim, layout=layout), 30) == ()
    )


@pytest.mark.exhaustive
@sampled(
    always=1,
    variant=["full", "alibi"],
    loads=LOADS,
    layout=LAYOUTS,
    arch=["sm90a", "sm120a"],
    fast_math=["true", "false"],
)
def test_float32(interpreter: Interpreter, variant: str, loads: str, layout: str, arch: str, fast_math: str) -> None:
    fields = {"dtype": "fp32", "loads": loads, "layout": layout, "arch": arch, "fast_math": fast_math}
    assert interpreter.call("gradient_problems", spec(variant, head_dim=48, **fields), 23) == ()


@pytest.mark.exhaustive
@sampled(always=1, head_dim=ODD_HEAD_DIMS, loads=LOADS, third=THIRDS)
def test_odd_head_dims_in_float32(interpreter: Interpreter, head_dim: str, loads: str, third: int) -> None:
    text = spec(head_dim=head_dim, loads=loads, dtype="fp32", layout="varlen")
    assert interpreter.call("gradient_problems", text, 29, third) == ()


@pytest.mark.exhaustive
@sampled(
    always=1,
    variant=["sliding_window", "sink_window", "neighbourhood_2d"],
    tile=["{m: 16, n: 64}", "{m: 64, n: 16}"],
    third=THIRDS,
)
def test_tiles(interpreter: Interpreter, variant: str, tile: str, third: int) -> None:
    assert interpreter.call("gradient_problems", spec(variant, tile=tile), 24, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, variant=DRIVEN, tile_map=["always", "never"], layout=LAYOUTS, third=THIRDS)
def test_iterations(interpreter: Interpreter, variant: str, tile_map: str, layout: str, third: int) -> None:
    assert interpreter.call("gradient_problems", spec(variant, tile_map=tile_map, layout=layout), 25, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, mask=MASKS, layout=LAYOUTS[::-1], third=THIRDS)
def test_masks_of_all_kinds(interpreter: Interpreter, mask: str, layout: str, third: int) -> None:
    declared = f'variants:\n  odd: {{mask: "{mask}"}}\n'
    assert interpreter.call("gradient_problems", spec("odd", declared=declared, layout=layout), 26, third) == ()


@pytest.mark.exhaustive
@sampled(always=1, fields=SCORES, third=THIRDS)
def test_scores_of_all_kinds(interpreter: Interpreter, fields: str, third: int) -> None:
    declared = f"variants:\n  odd:\n    {fields}"
    assert interpreter.call("gradient_problems", spec("odd", declared=declared), 27, third) == ()


LEARNED = {
    "of all axes": (
        'mask: "q_pos >= kv"\n'
        '    score: "s * gain + slope[h] * (kv - q) + table[clamp(q - kv, 0, 15)] + bias[b, kv] + rows[q] ** 2"\n'
        "    tensors:\n"
        "      gain: {dtype: float32, shape: [], grad: true}\n"
        "      slope: {dtype: float32, shape: [h], grad: true}\n"
        "      table: {dtype: float32, shape: [16], grad: true}\n"
        "      bias: {dtype: bf16, shape: [b, seqlen_k], grad: true}\n"
        "      rows: {dtype: fp16, shape: [seqlen_q], grad: true}\n"
    ),
    "behind a condition": (
        'score: "tanh(s * heat[h]) * 3 if keep[kv] else log(abs(s))"\n'
        "    tensors:\n"
        "      heat: {dtype: float32, shape: [h], grad: true}\n"
        "      keep: {dtype: bool, shape: [seqlen_k]}\n"
    ),
}


@pytest.mark.exhaustive
@sampled(always=1, layout=LAYOUTS, fields=LEARNED, dtype=["fp16", "fp32"])
def test_gradients_of_the_variants_own_tensors(interpreter: Interpreter, fields: str, layout: str, dtype: str) -> None:
    declared = f"variants:\n  odd:\n    {fields}"
    text = spec("odd", declared=declared, layout=layout, dtype=dtype)
    assert interpreter.call("gradient_problems", text, 28) == ()


RAGGED = Case("ragged", (21, 21), (37, 37), heads=4, kv_heads=2)


@few("value", [np.nan, np.inf, 6e4])
@few(
    ("variant", "arguments", "empty"),
    [("sliding_window", {"window": 5}, (0, 16)), ("chunked", {"chunk": 48}, (0, 48))],
)
def test_tiles_that_the_mask_proves_empty_are_never_loaded(
    interpreter: Interpreter, variant: str, arguments: dict[str, int], empty: tuple[int, int], value: float
) -> None:
    """Keys that no query sees: their K and V reach no gradient, and they get none."""
    case = Case("few queries", (12,), (64,), heads=2)
    runs = [
        interpreter.call("gradients_with", spec(variant), case, [("k", *empty, x), ("v", *empty, x)], arguments)
        for x in (0.0, value)
    ]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
    for gradient in runs[1][1:]:
        assert not gradient[:, slice(*empty)].any()


@pytest.mark.exhaustive
def test_the_same_bits_on_every_run(interpreter: Interpreter) -> None:
    runs = [interpreter.call("gradients_with", spec("softcap"), RAGGED, [], {}) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
