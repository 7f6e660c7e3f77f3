"""Types, ranges, int64 and the checks of declarations."""

from __future__ import annotations

import math

import pytest

from attngen.errors import Location, SpecError
from attngen.lang.check import compile_variant
from attngen.lang.ir import Const, Expr, Op, Type, Var, walk
from attngen.lang.variant import Monotone, Scalar, Tensor
from tests.sampling import few

SCALARS = [
    Scalar("window", "int32", min=1, max="seqlen_k"),
    Scalar("step", "int32"),
    Scalar("big", "int64"),
    Scalar("cap", "fp32", min=0.5),
    Scalar("gain", "fp32"),
    Scalar("flag", "bool"),
]
TENSORS = [
    Tensor("doc", "int32", ("b", "seqlen_k"), range=(0, "seqlen_k")),
    Tensor("ids", "int64", ("b", "seqlen_q")),
    Tensor("far", "int64", ("b", "seqlen_q"), range=(0, 2**40)),
    Tensor("slope", "bf16", ("h",)),
    Tensor("pad", "bool", ("b", "seqlen_k")),
]


def mask(text: str) -> Expr:
    return compile_variant("v", text, None, SCALARS, TENSORS).mask


def score(text: str) -> Expr:
    expr = compile_variant("v", None, text, SCALARS, TENSORS).score
    assert expr is not None
    return expr


def wide(text: str) -> bool:
    return any(isinstance(node, Op) and node.wide for node in walk(mask(text)))


def test_integers_beside_floats_are_converted() -> None:
    s, q = Var("s", Type.FLOAT), Var("q", Type.INT)
    assert score("s + q") == Op("add", (s, Op("to_float", (q,), Type.FLOAT)), Type.FLOAT)
    assert score("s + 2") == Op("add", (s, Const(2.0, Type.FLOAT)), Type.FLOAT)
    assert score("tanh(q)").args[0] == Op("to_float", (q,), Type.FLOAT)  # type: ignore[union-attr]
    assert score("q") == Op("to_float", (q,), Type.FLOAT)
    assert score("q / 2").type is Type.FLOAT


def test_conditions_count_as_zero_and_one() -> None:
    flag = Var("flag", Type.BOOL)
    assert score("s + flag").args[1] == Op("to_float", (Op("to_int", (flag,), Type.INT),), Type.FLOAT)  # type: ignore[union-attr]
    assert mask("flag + flag == 2").args[0].type is Type.INT  # type: ignore[union-attr]
    assert mask("flag == pad[b, kv]").args == (flag, mask("pad[b, kv]"))  # type: ignore[union-attr]
    assert mask("flag < pad[b, kv]").args[0].type is Type.INT  # type: ignore[union-attr]


def test_arms_of_a_choice_have_one_type() -> None:
    assert score("s if flag else 0").type is Type.FLOAT
    arms = Const(1, Type.INT), Const(0, Type.INT)
    choice = Op("select", (Var("flag", Type.BOOL), *arms), Type.INT)
    assert score("1 if flag else 0") == Op("to_float", (choice,), Type.FLOAT)
    assert mask("flag if q > 1 else pad[b, kv]").type is Type.BOOL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q", "must be a condition, got an integer; write it as a comparison"),
        ("gain", "must be a condition, got a float"),
        ("q and kv", "'and' takes a condition, got an integer"),
        ("not q", "'not' takes a condition"),
        ("flag if q else flag", "'if' takes a condition, got an integer"),
        ("gain // 2 > 1", "'//' takes integers, got a float; write floor"),
        ("gain % 2 > 1", "'%' takes integers"),
        ("gain & 1 > 1", "'&' takes integers"),
        ("~gain > 1", "'~' takes integers"),
        ("1 << gain > 1", "'<<' takes integers"),
        ("float(kv) % 2 > 1", r"'%' takes integers, got a float; write int\(x\), which rounds toward zero"),
        ("1 / float(kv) > 1", "the divisor of '/' may be zero"),
        ("gain / 0.0 > 1", "the divisor of '/' may be zero"),
        ("q ** 65 > 1", "must lie within -64 .. 64"),
        ("q ** -1 > 1", "negative exponent may be zero"),
        ("q / kv > 1", "the divisor of '/' may be zero: its range is 0 .. 1073741822"),
        ("q // step > 1", "the divisor of '//' may be zero"),
        ("q % (kv - 1) > 1", "the divisor of '%' may be zero"),
        ("q % 0 == 1", "the divisor of '%' may be zero: its range is 0 .. 0"),
        ("1 / gain > 1", "the divisor of '/' may be zero: its range is -inf .. inf"),
        ("1 << step > 1", "the distance of a shift must lie within 0 .. 31"),
        ("1 >> -1 > 1", "the distance of a shift must lie within 0 .. 31"),
        ("q * q * q > 1", "beyond int64; declare narrower ranges"),
        ("q ** 3 > 1", "beyond int64"),
        ("ids[b, q] + 1 > big", "beyond int64; declare narrower ranges of 'ids'"),
        ("ids[b, q] - big > 0", "beyond int64; declare narrower ranges of 'big' and 'ids'"),
        ("abs(big) > 1", "may reach 0 .. 9223372036854775808, beyond int64"),
        ("-ids[b, q] > 1", "beyond int64"),
        ("ids[b, q] // -1 > 1", "beyond int64"),
        ("max(ids[b, q], 0) + 1 > 0", "beyond int64"),
        ("far[b, q] * 1000000000 >= 5", "may reach 0 .. 1099511627776000000000, beyond int64; declare narrower ranges"),
        ("far[b, q] ** 2 > 1", "beyond int64"),
        ("far[b, q] << 40 > 1", "beyond int64"),
        ("doc[b, (far[b, q] * far[b, q]) & 7] > 1", "beyond int64"),
        ("(0 - q) ** 63 > 1", r"may reach -2\^1889 .. 0, beyond int64"),
        ("tanh(s) > 1", "'s' is the logit"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        mask(text)
    assert "^" in str(caught.value)


def test_a_score_is_a_number() -> None:
    with pytest.raises(SpecError, match="must be a number, got a condition"):
        score("q > kv")


def test_let_with_the_logit_is_for_scores_only() -> None:
    let = {"hot": "s * 2.0"}
    assert compile_variant("v", None, "hot", let=let).score is not None
    with pytest.raises(SpecError, match="'hot' depends on the logit"):
        compile_variant("v", "hot > 1", None, let=let)
    with pytest.raises(SpecError, match=r"let\.f\(x\): 's' is the logit"):
        compile_variant("v", "f(q) > 1", None, let={"f(x)": "x + s"})


@pytest.mark.parametrize(
    "text",
    [
        "q / window > 1",
        "q // max(kv, 1) > 1",
        "q % min(step, -1) == 0",
        "gain / cap > 1",
        "gain / (abs(gain) + 1) > 1",
        "gain / (exp2(max(gain, 0.0)) + 1.0) > 1",
        "q % seqlen_k == 0",
        "q % heads == 0",
        "((q & 7) + 1) ** -1 > 0.5",
        "1 << (q & 31) > 0",
        "doc[b, kv] >> 3 == 1",
    ],
)
def test_accepted_by_ranges(text: str) -> None:
    assert mask(text).type is Type.BOOL


@few(
    ("text", "expected"),
    [
        ("q_pos - kv < window", False),
        ("q_pos - kv + 1024 < window", False),
        ("kv - q_pos > -window", False),
        ("q + kv > 1", False),
        ("q + kv + seqlen_k > 1", True),
        ("q * 2 > 1", False),
        ("q * 3 > 1", True),
        ("q * kv > 1", True),
        ("(q % 1000) * (kv % 1000) > 1", False),
        ("q_pos - step > 1", True),
        ("doc[b, kv] + kv > 1", False),
        ("big > q", True),
        ("ids[b, q] == ids[b, 0]", True),
        ("ids[b, q] % 8 == 3", True),
        ("-step > 1", True),
        ("abs(step) > 1", True),
        ("~step > 1", False),
        ("q == 3000000000", True),
        ("1 << (q & 31) > 1", True),
        ("1 << (q & 15) > 1", False),
        ("(q if flag else big) > 1", True),
    ],
    always=range(0, 999, 3),
)
def test_int64_only_where_int32_may_overflow(text: str, expected: bool) -> None:
    assert wide(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "ids[b, q] == big", "min(ids[b, q], 5) + 1 > 0 and big % 8 == 3", "clamp(ids[b, q], -9, 9) * 5 > big",
        "far[b, q] * 1000000 + q >= big", "far[b, q] - far[b, kv] > 5", "~big == ids[b, q] >> 3",
    ],
)  # fmt: skip
def test_int64_data_may_reach_its_own_bounds(text: str) -> None:
    assert wide(text)


def test_ranges_may_name_extents() -> None:
    ranges = compile_variant("v", None, None, SCALARS, TENSORS).ranges
    assert ranges["window"] == (1, 2**30 - 1)
    assert ranges["doc"] == (0, 2**30 - 1)
    assert ranges["gain"] == (-math.inf, math.inf)


# --- declarations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "message"),
    [
        (Scalar("q", "int32"), "'q' is reserved"),
        (Scalar("s", "fp32"), "'s' is reserved"),
        (Scalar("k", "fp32"), "is reserved"),
        (Scalar("softmax_scale", "fp32"), "is reserved"),
        (Scalar("q_lo", "int32"), "is reserved"),
        (Scalar("tanh", "fp32"), "is reserved"),
        (Scalar("class", "fp32"), "is reserved"),
        (Scalar("a-b", "fp32"), "must be at most 64 letters"),
        (Scalar("\N{GREEK SMALL LETTER ALPHA}", "fp32"), "must be at most 64 letters"),
        (Scalar("x", "float16"), "unknown dtype 'float16'"),
        (Scalar("x", "int32", min=3, max=2), "min 3 exceeds max 2"),
        (Scalar("x", "int32", const=2**31), "does not fit int32"),
        (Scalar("x", "int32", const=1.5), "must be an integer, got 1.5"),
        (Scalar("x", "int32", const=True), "must be an integer, got True"),
        (Scalar("x", "bool", const=1), "must be true or false, got 1"),
        (Scalar("x", "bool", min=0), "a bool has no range"),
        (Scalar("x", "fp32", const=math.nan), "must be a number, got nan"),
        (Scalar("x", "fp32", const=1e39), "does not fit float32"),
        (Scalar("x", "int32", const=0, min=1), "0 is below min, which is 1"),
        (Scalar("x", "int32", default=0, min=1), "0 is below min"),
        (Scalar("x", "int32", const=1, default=1), "a constant takes no default"),
        (Scalar("x", "int32", max="seqlen k"), "name of an extent"),
        (
            Scalar("x", "int32", max="seqlen"),
            r"scalars\.x\.max: no tensor has an extent 'seqlen'; did you mean 'seqlen_",
        ),
        (Scalar("x", "int32", min="n"), r"scalars\.x\.min: no tensor has an extent 'n' \(allowed: a number, b, h"),
        (Scalar("x", "int32", grad=True), "has a gradient"),
        (Scalar("x", "fp32", const=1.0, grad=True), "has a gradient"),
    ],
)
def test_scalars(scalar: Scalar, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        compile_variant("v", scalars=[scalar])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor("kv", "int32", ("b",)), "is reserved"),
        (Tensor("x", "int4", ("b",)), "unknown dtype 'int4'; did you mean 'int64'|unknown dtype 'int4'"),
        (Tensor("x", "int32", (0,)), "extent must be an integer of 1"),
        (Tensor("x", "int32", (True,)), "extent must be an integer of 1"),
        (Tensor("x", "int32", (2**31,)), "extent must be an integer of 1"),
        (Tensor("x", "int32", ("seq len",)), "must be an integer or a name"),
        (Tensor("x", "int32", ("kv",)), "'kv' is not an extent"),
        (Tensor("x", "int32", ("b",) * 9), "has 9 axes, at most 8"),
        (Tensor("x", "int32", ("x",)), "'x' is a tensor and cannot name an extent"),
        (Tensor("x", "int32", ("b",), monotone=Monotone(1)), "must lie within 0 .. 0, got 1"),
        (Tensor("x", "int32", ("b",), monotone=Monotone(0, "up")), "must be nondecreasing"),
        (Tensor("x", "bool", ("b",), monotone=Monotone(0)), "a bool tensor cannot be monotone"),
        (Tensor("x", "int32", ("b",), range=(3, 2)), "min 3 exceeds max 2"),
        (Tensor("x", "int32", ("b",), range=(0.5, 2)), "must be an integer, got 0.5"),
        (Tensor("x", "int32", ("b",), grad=True), "a tensor of int32 has no gradient"),
        (Tensor("x", "int32", ("n",), range=(0, "m")), r"tensors\.x\.range\.max: no tensor has an extent 'm'"),
    ],
)
def test_tensors(tensor: Tensor, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        compile_variant("v", tensors=[tensor])


def test_names_are_declared_once() -> None:
    with pytest.raises(SpecError, match=r"tensors\.x: name 'x' is declared twice"):
        compile_variant("v", scalars=[Scalar("x", "int32")], tensors=[Tensor("x", "int32", ("b",))])


def test_an_extent_may_be_an_integer_scalar() -> None:
    compile_variant("v", scalars=[Scalar("n", "int32", min=1)], tensors=[Tensor("x", "int32", ("n",))])
    with pytest.raises(SpecError, match="is a scalar that is not an integer"):
        compile_variant("v", scalars=[Scalar("n", "fp32")], tensors=[Tensor("x", "int32", ("n",))])


def test_the_name_of_a_variant() -> None:
    with pytest.raises(SpecError, match="variant name 'a b'"):
        compile_variant("a b")


def test_the_nearest_enclosing_place_serves() -> None:
    places = {"scalars.x": Location("a.yaml", 3), "": Location("a.yaml", 1)}
    with pytest.raises(SpecError) as caught:
        compile_variant("v", scalars=[Scalar("x", "int32", min=3, max=2)], locate=places)
    assert caught.value.location == Location("a.yaml", 3)
    assert caught.value.field == "scalars.x.min"
    with pytest.raises(SpecError) as caught:
        compile_variant("v", "nope", locate=places)
    assert caught.value.location == Location("a.yaml", 1)


@pytest.mark.parametrize(("dtype", "least"), [("uint8", 0), ("int8", -128), ("int16", -(2**15)), ("int32", -(2**31))])
def test_the_least_value_of_a_dtype_is_a_bound(dtype: str, least: int) -> None:
    checked = compile_variant("own", "level[kv] >= 0", tensors=[Tensor("level", dtype, ("n",), range=(least, 100))])
    assert checked.tensor("level").range == (least, 100)
    with pytest.raises(SpecError, match=rf"{least - 1} does not fit {dtype}"):
        compile_variant("own", "level[kv] >= 0", tensors=[Tensor("level", dtype, ("n",), range=(least - 1, 100))])
