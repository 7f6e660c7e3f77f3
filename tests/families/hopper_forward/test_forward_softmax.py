"""Hopper forward kernels that keep no running max, or do without tanh or a subtraction for each logit."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward.kinds import KINDS, SOFTMAXES, SoftmaxKind, kind_of_plan
from attngen.families.hopper_forward.structure import HopperForward
from attngen.lang.folding import KEY, ONE, fold_logit, split_keys, subtract
from attngen.lang.ir import Const, Op, Type, names, own
from attngen.render import render
from attngen.resources import templates_dir
from attngen.schema.models import Softmax
from tests.plan.specs import kernel_spec, planned
from tests.sampling import few

TEMPLATES = templates_dir() / "cuda/hopper_forward"
MACROS = {"constants", "declare", "offset", "first", "step", "normalize"}
MACROS_OF_LSE = {"lse", "state", "merge"}


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


@few(
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
    always=range(0, 999, 3),
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


def test_a_kind_is_a_template_and_a_row() -> None:
    files = {path.name.partition(".")[0] for path in (TEMPLATES / "softmax").glob("[a-z]*.j2")}
    assert files == {kind.file for kind in KINDS}
    assert len({(kind.softmax, kind.form, dtype) for kind in KINDS for dtype in kind.dtypes}) == sum(
        len(kind.dtypes) for kind in KINDS
    )
    assert set(SOFTMAXES) == set(get_args(Softmax)[1].allowed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.file)
def test_the_template_of_a_kind_has_its_macros(kind: SoftmaxKind) -> None:
    text = (TEMPLATES / f"softmax/{kind.file}.cu.j2").read_text()
    taken = ", ".join(re.findall(r"^<% set ([\w, ]+) =", text, re.MULTILINE)).split(", ")
    assert {*re.findall(r"<% macro (\w+)\(", text), *taken} >= MACROS | (MACROS_OF_LSE if kind.has_lse else set())


@pytest.mark.parametrize(
    ("fields", "form"),
    [({}, "tracked"), ({"softmax": "exact_max"}, ""), ({"split_kv": "tiles"}, ""), ({"variant": "softcap"}, "tracked")],
    ids=str,
)
def test_kinds_that_find_the_largest_logit_of_all_keys(fields: dict[str, str], form: str) -> None:
    """A form that saves instructions is given up for it."""
    plan = planned(backend="cuda", max_logits="true", **fields)
    kind = kind_of_plan(plan)
    assert (kind.softmax, kind.form) == ("first_max" if form else "exact_max", form)
    text = (TEMPLATES / f"softmax/{kind.file}.cu.j2").read_text()
    assert {"max_logit", "settle", "settled"} <= {*re.findall(r"\w+", text)}
    assert [argument.of for argument in plan.arguments].count("lse_rows") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"softmax": "lazy"}, r"softmax: 'lazy' does not find the largest logit of all keys, .* first_max, exact_max"),
        ({"softmax": "first_max", "split_kv": "tiles"}, r"softmax: 'first_max' does not find .*; allowed: exact_max"),
        (
            {"softmax": "lazy", "arch": "sm80"},
            r"softmax: 'lazy' keeps no largest logit of all keys; allowed: exact_max",
        ),
        ({"dtype": "fp8"}, r"max_logits: kernels of fp8_e4m3 keep no largest logits; leave it out"),
        ({"split_kv": "true", "kv_dtype": "fp8"}, r"max_logits: kernels of fp8_e4m3 keep no largest logits"),
    ],
    ids=str,
)
def test_kernels_that_do_not_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(backend="cuda", max_logits="true", **fields)


def test_nothing_else_reads_what_a_kind_declares() -> None:
    others = [path for path in TEMPLATES.rglob("*.j2") if path.parent.name != "softmax"]
    assert len(others) > 40
    assert [path.name for path in others if re.search(r"row_max|row_sum", path.read_text())] == []


SIGMOID = "variants:\n  own: {mask: q_pos >= kv, score: 's - log(seqlen_k)', weights: sigmoid}\n"


def test_sigmoids_keep_no_row_max_and_write_no_log_sum_exp() -> None:
    plan = planned("own", backend="cuda", declared=SIGMOID)
    assert plan.softmax == "sigmoid"
    assert {argument.of for argument in plan.arguments}.isdisjoint({"lse"})
    text = render(plan).text
    assert text.count("take_sigmoid<Element>(s, 1.0f, p)") == 2
    assert not re.search(r"\blse|_lse|row_max|row_sum|exponentiate", text)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"backend": "cuda", "softmax": "lazy"}, "softmax: 'weights: sigmoid' keeps no row max; leave it out"),
        ({"backend": "triton", "softmax": "exact_max"}, "softmax: 'weights: sigmoid' keeps no row max; leave it out"),
        ({"backend": "cuda", "split_kv": "tiles"}, "split_kv: 'weights: sigmoid' has no log-sum-exp by which blocks"),
        ({"backend": "cuda", "dtype": "fp8_e4m3"}, "variant.weights: hopper_fp8 does not serve it; found sigmoid"),
        ({"backend": "cuda", "passes": "backward"}, "variant.weights: hopper_backward does not serve it"),
        ({"backend": "cuda", "arch": "sm80"}, "variant.weights: mma_forward does not serve it; found sigmoid"),
        ({"backend": "cuda", "split_kv": "true"}, "variant.weights: hopper_decode does not serve it; found sigmoid"),
        ({"backend": "cuda", "head_dim": 512}, "variant.weights: hopper_wide does not serve it; found sigmoid"),
    ],
)
def test_what_has_no_sigmoids_says_so(fields: dict[str, object], reason: str) -> None:
    if "passes" in fields:
        fields = {"passes": "backward", "backward": "{backend: cuda}"}
    with pytest.raises(PlanError, match=re.escape(reason)):
        planned("own", declared=SIGMOID, **fields)
