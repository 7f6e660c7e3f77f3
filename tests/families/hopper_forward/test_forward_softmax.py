"""Hopper forward kernels that keep no running max, or do without tanh or a subtraction for each logit."""

from __future__ import annotations

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward.structure import HopperForward
from attngen.lang.folding import KEY, ONE, fold_logit, split_keys, subtract
from attngen.lang.ir import Const, Op, Type, names, own
from tests.plan.specs import kernel_spec, planned


def _declared(score: str, **scalar: float) -> str:
    scalars = (
        f", scalars: {{cap: {{type: float32, {', '.join(f'{k}: {v}' for k, v in scalar.items())}}}}}" if scalar else ""
    )
    return f"variants:\n  own: {{mask: q_pos >= kv, score: '{score}'{scalars}}}\n"


def _structure(declared: str, **fields: object) -> HopperForward:
    plan = planned("own", backend="cuda", declared=declared, **{"head_dim": 128, **fields})
    assert isinstance(plan.structure, HopperForward)
    assert plan.softmax == plan.structure.softmax
    assert ("bounded" in plan.name) == (plan.softmax == "bounded")
    return plan.structure


@pytest.mark.parametrize(
    ("score", "scalar", "dtype", "fixed_max"),
    [
        ("30 * tanh(s / 30)", {}, "bf16", "0.0f"),
        ("cap * tanh(s / cap)", {"min": 0.001, "max": 55}, "bf16", "0.0f"),
        ("cap * tanh(s / cap)", {"const": 20}, "bf16", "0.0f"),
        ("80 + 9 * tanh(s)", {}, "bf16", "49.0f"),  # log2 of the largest P is 80
        ("9 * tanh(s / 9)", {}, "fp16", "0.0f"),
        ("12 * sigmoid(s)", {}, "fp16", "4.0f"),
        ("cap * tanh(s / cap)", {"min": 0.001}, "bf16", None),
        ("cap * tanh(s / cap)", {"min": 0.001, "max": 200}, "bf16", None),
        ("30 * tanh(s / 30)", {}, "fp16", None),
        ("s", {}, "bf16", None),
    ],
)
def test_a_bounded_score_has_a_fixed_max(
    score: str, scalar: dict[str, float], dtype: str, fixed_max: str | None
) -> None:
    structure = _structure(_declared(score, **scalar), dtype=dtype)
    assert structure.softmax == ("first_max" if fixed_max is None else "bounded")
    if fixed_max is not None:
        assert structure.fixed_max == fixed_max
    kept = _structure(_declared(score, **scalar), dtype=dtype, softmax="exact_max")
    assert kept.softmax == "exact_max"


@pytest.mark.parametrize(
    ("score", "scalar", "dtype", "message"),
    [
        (
            "s",
            {},
            "bf16",
            "score that is bounded whatever q and k are, such as a soft-capped one; allowed: first",
        ),
        ("cap * tanh(s / cap)", {"min": 0.001}, "bf16", r"as it is with cap: \{max: 55\} in scalars; allowed"),
        ("30 * tanh(s / 30)", {}, "fp16", "range of 19.4 at most in fp16, and the score may be -30 to 30"),
        ("30 * tanh(s / 30)", {}, "fp8_e4m3", "'bounded' does not exist in fp8_e4m3"),
    ],
)
def test_unbounded_scores_are_refused_with_a_bounded_form(
    score: str, scalar: dict[str, float], dtype: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        _structure(_declared(score, **scalar), dtype=dtype, softmax="bounded")


@pytest.mark.parametrize(
    ("score", "fields", "expected"),
    [
        ("30 * tanh(s / 30)", {}, (True, False)),
        ("30 * tanh(s / 30)", {"head_dim": 128}, (False, False)),  # there products take as long as both functions
        ("30 * tanh(s / 30)", {"head_dim": 256, "dtype": "fp8_e4m3"}, (True, False)),
        ("30 * tanh(s / 30)", {"dtype": "fp8_e4m3", "descale": 64}, (False, False)),  # P is scaled with its values, too
        ("s + 0.5 * (kv - q_pos)", {"head_dim": 128, "dtype": "fp8_e4m3"}, (False, True)),
        ("s + 0.5 * (kv - q_pos)", {"dtype": "fp8_e4m3", "descale": 128}, (False, False)),
        ("20 * tanh(0.1 * s)", {"pack_gqa": "true"}, (True, False)),
        ("30 * tanh(s / 30)", {"softmax": "lazy"}, (False, False)),
        ("30 * tanh(s / 30)", {"fast_math": "false"}, (False, False)),
        ("30 * tanh(s / 30) - 0.5 * (kv - q_pos)", {}, (False, True)),
        ("s + 0.5 * (kv - q_pos)", {}, (False, True)),
        ("0.25 - s", {}, (False, True)),
        ("s + 0.5 * (kv - q_pos)", {"softmax": "exact_max"}, (False, False)),
        ("s + 0.5 * (kv - q_pos)", {"fast_math": "false"}, (False, False)),
        ("s + 0.25", {}, (False, True)),
        ("s - 0.5 * abs(q_pos - kv)", {}, (False, False)),
        ("s", {}, (False, False)),
    ],
)
def test_capped_and_relative_scores(score: str, fields: dict[str, object], expected: tuple[bool, bool]) -> None:
    structure = _structure(_declared(score), **{"head_dim": 64, **fields})
    assert (structure.capped, structure.relative) == expected


def test_the_row_max_is_subtracted_from_a_term_without_keys() -> None:
    spec = kernel_spec("alibi", backend="cuda")
    value = split_keys(fold_logit(spec.variant.score, spec.variant.ranges, fast_math=True).value)
    row_max = own("row_max", Type.FLOAT)
    difference = subtract(value, row_max)
    assert difference is not None
    holders = []

    def visit(node: object) -> None:
        if isinstance(node, Op):
            if row_max in node.args:
                holders.append(node)
            for argument in node.args:
                visit(argument)

    visit(difference)
    (holder,) = holders
    assert holder.op == "sub"
    assert not names(holder) & {"kv", KEY.name, ".qk"}
    assert subtract(Const(2.0, Type.FLOAT), ONE) is not None


def test_the_old_name_of_first_max_is_accepted() -> None:
    assert planned("causal", backend="cuda", softmax="fixed_reference").softmax == "first_max"
