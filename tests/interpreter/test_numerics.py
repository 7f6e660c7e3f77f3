"""Rendered kernels in Triton's interpreter against the float64 reference: every preset, head dim, tile and iteration.

Each kernel runs on ragged lengths, GQA, more queries than keys, an empty sequence, seqused_k, decoding, and the
least and greatest declared values, with NaN after every sequence and in the results (``attngen.inspect.cases``).
"""

from __future__ import annotations

import keyword

import pytest

from attngen.errors import SpecError
from attngen.schema import preset_names
from tests.interpreter.process import Interpreter
from tests.sampling import sampled

pytestmark = pytest.mark.long

#: Every second case of a kernel, from the first or the second one.
THIRDS = (0, 1, 2)
LAYOUTS, LOADS = ("dense", "varlen"), ("descriptor", "pointer")
#: One for each kind of KV iteration that a map may take the place of.
DRIVEN = ("full", "prefix_lm", "packed_documents", "dilated", "allowed")


def spec(variant: str = "causal", *, more: str = "", declared: str = "", **fields: object) -> str:
    """Return the text of a spec with one kernel; small tiles keep the interpreter quick."""
    given = {"head_dim": 16, "dtype": "fp16", "tile": "{m: 16, n: 16}", "fast_math": "false", **fields}
    given["backend"] = "triton"
    lines = "".join(f"    {name}: {value}\n" for name, value in given.items())
    return f"{declared}kernels:\n  - variant: {variant}\n{lines}{more}"


@sampled(always=3, name=preset_names(), layout=LAYOUTS, third=THIRDS)
def test_every_preset(interpreter: Interpreter, name: str, layout: str, third: int) -> None:
    assert interpreter.call("problems", spec(name, layout=layout), 11, third) == ()


HEAD_DIMS = ["48", "96", "112", "{qk: 192, v: 128}", "{qk: 32, v: 80}", "256"]
#: Odd multiples of 8, whose last columns are padding in every block of them.
ODD_HEAD_DIMS = ["8", "24", "40", "72", "104", "136", "{qk: 40, v: 24}", "{qk: 8, v: 72}"]


@sampled(always=1, head_dim=[*HEAD_DIMS, *ODD_HEAD_DIMS], loads=LOADS, third=THIRDS)
def test_head_dims(interpreter: Interpreter, head_dim: str, loads: str, third: int) -> None:
    text = spec(head_dim=head_dim, loads=loads)
    assert interpreter.call("problems", text, 12, third) == ()


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
    assert interpreter.call("problems", spec(variant, head_dim=48, **fields), 13) == ()


@pytest.mark.exhaustive
@sampled(always=1, head_dim=ODD_HEAD_DIMS, loads=LOADS)
def test_odd_head_dims_in_float32(interpreter: Interpreter, head_dim: str, loads: str) -> None:
    text = spec(head_dim=head_dim, loads=loads, dtype="fp32", layout="varlen")
    assert interpreter.call("problems", text, 19) == ()


@pytest.mark.exhaustive
@sampled(
    always=1,
    variant=["sliding_window", "sink_window", "neighbourhood_2d"],
    tile=["{m: 16, n: 64}", "{m: 64, n: 16}", "{m: 32, n: 128}"],
)
def test_tiles(interpreter: Interpreter, variant: str, tile: str) -> None:
    assert interpreter.call("problems", spec(variant, tile=tile), 14) == ()


@pytest.mark.exhaustive
@sampled(always=1, variant=DRIVEN, tile_map=["always", "never"], layout=LAYOUTS)
def test_iterations(interpreter: Interpreter, variant: str, tile_map: str, layout: str) -> None:
    assert interpreter.call("problems", spec(variant, tile_map=tile_map, layout=layout), 15) == ()


MASKS = {
    "nothing": "kv < 0",
    "a diagonal": "q == kv",
    "not causal": "not q >= kv",
    "two bands": "abs(q - kv) > 7 and abs(q - kv) < 30",
    "three": "kv < 3 or kv >= seqlen_k - 2 or q == kv or abs(q - kv) == 20",
    "bits": "(q ^ kv) & 3 != 1",
    "a grid": "q % 5 == kv % 5 or kv // 9 == q // 9",
    "far": "q_pos - kv > 20 and h == 1",
    "by head": "kv < 10 * h + 5 if hk == 0 else q >= kv",
    "lengths": "2 * kv < seqlen_k + b and q < seqlen_q - 1",
    "xor": "(q > 20) ^ (kv > 20)",
    "globals": "(q_global + kv_global) % 3 != 0",
    "negative": "-kv >= -q_pos - 3",
}


@sampled(always=1, mask=MASKS, layout=LAYOUTS, third=THIRDS)
def test_masks_of_all_kinds(interpreter: Interpreter, mask: str, layout: str, third: int) -> None:
    declared = f'variants:\n  odd: {{mask: "{mask}"}}\n'
    assert interpreter.call("problems", spec("odd", declared=declared, layout=layout), 16, third) == ()


#: Monotone tensors along an extent that no scalar declares: it is that of the tensor at the call.
NAMED_EXTENTS = {
    "one axis": 'mask: "doc[q] == doc[kv]", tensors: {doc: {dtype: int32, shape: [n], monotone: {axis: 0}}}',
    "the second": (
        'mask: "q >= kv and doc[hk, q] == doc[hk, kv]", '
        "tensors: {doc: {dtype: int64, shape: [hk, n], monotone: {axis: 1}}, "
        "other: {dtype: int32, shape: [n], range: {min: 0}}}"
    ),
}


@pytest.mark.exhaustive
@sampled(always=1, variant=NAMED_EXTENTS, layout=LAYOUTS)
def test_an_extent_that_nobody_declares(interpreter: Interpreter, variant: str, layout: str) -> None:
    declared = f"variants:\n  odd: {{{variant}}}\n"
    assert interpreter.call("problems", spec("odd", declared=declared, layout=layout), 18) == ()


#: Scalars of the call in float32, which the interpreter keeps as Python's floats, where they decide.
SCALAR_CONDITIONS = {
    "an integer": "s * int(x >= 1.5)",
    "not": "s if not x >= 1.5 else -s",
    "a float": "s + float(x >= y / 3)",
    "equal": "s if (x >= 1.5) == (y < 2 * x) else 0.5 * s",
    "exclusive": "s if (x > y) ^ (kv > 3) else 0.5 * s",
    "in int64": "s + (5000000000 if x > y else kv) / 5000000000",
    "beyond int32": "s + min(kv + 5000000000, 5000000007) % 7",
}


@pytest.mark.exhaustive
@sampled(always=1, score=SCALAR_CONDITIONS)
def test_conditions_of_scalars(interpreter: Interpreter, score: str) -> None:
    scalars = "{x: {type: float32, min: 0, max: 3}, y: {type: float32, min: 0, max: 3}}"
    declared = f'variants:\n  odd: {{score: "{score}", scalars: {scalars}}}\n'
    assert interpreter.call("problems", spec("odd", declared=declared), 19) == ()


@pytest.mark.exhaustive
def test_a_bound_may_be_the_largest_integer(interpreter: Interpreter) -> None:
    """Rounding it up to a tile must not wrap around, which would make every tile a full one."""
    declared = 'variants:\n  odd: {mask: "kv < 5 or kv >= window", scalars: {window: {type: int32, min: 1}}}\n'
    text = spec("odd", declared=declared)
    assert interpreter.call("problems", text, 16) == ()
    backward = text.replace("tile: {m: 16, n: 16}", "passes: backward").replace(
        "    backend: triton\n", "    backward: {backend: triton}\n"
    )
    assert interpreter.call("gradient_problems", backward, 16) == ()


SCORES = {
    "everything": (
        'mask: "kv <= q_pos or loud"\n'
        '    score: "g(s) + gain * bias[b, h] + table[clamp(q - kv, 0, reach - 1)] / (1 + far)"\n'
        '    let: {g(x): "x * sigmoid(x)"}\n'
        "    scalars: {loud: {type: bool}, gain: {type: float32}, far: {type: int64, min: 0, max: 4294967296},"
        " reach: {type: int32, min: 1}}\n"
        "    tensors: {bias: {dtype: fp16, shape: [b, h]}, table: {dtype: bf16, shape: [reach]}}\n"
    ),
    "constant": 'score: "s * 2 + c * c"\n    scalars: {c: {type: float32, const: 0.5}}\n',
    "hidden by data": 'score: "s if keep[kv] != 0 else -inf"\n    tensors: {keep: {dtype: int8, shape: [seqlen_k]}}\n',
    "hidden by a sum": ('score: "s + (0.0 if (q + kv) % 4 != 1 else -inf)"\n    mask: "q_pos >= kv"\n'),
    "guarded": (
        'mask: "q_pos >= 0 and part[b, q_pos] >= part[b, kv]"\n    score: "s - weight"\n'
        "    tensors: {part: {dtype: uint8, shape: [b, seqlen_k]}, weight: {dtype: float32, shape: []}}\n"
    ),
    "a page table": (
        'mask: "kind[page[b, kv // 8]] != 0"\n'
        "    tensors: {kind: {dtype: int16, shape: [kinds]},"
        " page: {dtype: int64, shape: [b, pages], range: {min: 0, max: 9}}}\n"
    ),
    "functions": 'score: "max(s, 0.1 * s) + log2(1 + exp(-abs(s))) + tanh(s) * cos(s) + sqrt(abs(s)) ** 3"\n',
    "silu of a bias": 'score: "s + silu(bias[hk]) * min(q, kv)"\n    tensors: {bias: {dtype: float32, shape: [hk]}}\n',
    "a root of what is not chosen": 'score: "s + sqrt(s * s + 1.0 if kv % 2 == 0 else 0.0)"\n',
    "a root of what is flat": 'score: "s + sqrt(max(s, 0.5) - 0.5) * min(max(s, 0.0), 0.0)"\n',
    "no softmax input": 'score: "1.0 * (q - kv)"\n',
}


@pytest.mark.exhaustive
@sampled(always=1, fields=SCORES, layout=LAYOUTS, third=THIRDS)
def test_scores_of_all_kinds(interpreter: Interpreter, fields: str, layout: str, third: int) -> None:
    declared = f"variants:\n  odd:\n    {fields}"
    assert interpreter.call("problems", spec("odd", declared=declared, layout=layout), 17, third) == ()


#: Names that the templates use for their own values, and one that Python keeps for itself.
COLLISIONS = (
    "tile", "acc", "p", "row_max", "words", "block", "q_index", "full_lo", "visible_until_0", "x", "i", "visible",
    "logit", "lambda", "heads_in_l2", "rows", "kv_index", "BLOCK_M", "stored", "dead", "q_tile", "lane", "unit", "s_1",
)  # fmt: skip


@pytest.mark.exhaustive
def test_names_of_the_user_cannot_collide(interpreter: Interpreter) -> None:
    names = [name for name in COLLISIONS if not keyword.iskeyword(name)]
    for scalar, tensor in (names, names[::-1]), (names[::-1], names):  # each is a scalar once, and a tensor
        half = len(names) // 2
        scalars, tensors = scalar[:half], tensor[: len(names) - half]
        tests = [f"q_pos - kv < {n}" for n in scalars] + [f"{n}[kv] >= 0" for n in tensors]
        declared = (
            f'variants:\n  odd:\n    mask: "{" and ".join(tests)}"\n'
            f"    scalars: {{{', '.join(f'{n}: {{type: int32, min: 5}}' for n in scalars)}}}\n"
            f"    tensors: {{{', '.join(f'{n}: {{dtype: int32, shape: [seqlen_k]}}' for n in tensors)}}}\n"
        )
        assert interpreter.call("problems", spec("odd", declared=declared), 18) == ()


def test_a_keyword_is_no_name(interpreter: Interpreter) -> None:
    declared = 'variants:\n  odd:\n    mask: "kv < lambda"\n    scalars: {lambda: {type: int32}}\n'
    with pytest.raises(SpecError):
        interpreter.call("problems", spec("odd", declared=declared), 18)
