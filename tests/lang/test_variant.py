"""A variant as a value: JSON and pickle both ways, what it knows of itself."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import yaml

from attngen.errors import SpecError
from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.ir import Const, Type
from attngen.lang.variant import Monotone, Scalar, Tensor, Variant
from attngen.schema.writing import declaration, spec_text
from tests.lang import randoms
from tests.sampling import few

PACKED = compile_variant(
    "packed",
    "gap >= 0 and doc[b, q_pos] == doc[b, kv] and near(kv)",
    "s + slope[h] * gap - floor_",
    [
        Scalar("window", "int32", min=1, max="seqlen_k", default=7),
        Scalar("cut", "int64", const=2**40),
        Scalar("floor_", "fp32", min=-math.inf, max=3.5, grad=True),
        Scalar("limit_", "fp32", const=-math.inf),
    ],
    [
        Tensor("doc", "int32", ("b", "seqlen_k"), Monotone(1), (0, "seqlen_k")),
        Tensor("slope", "fp16", ("h",), grad=True),
    ],
    {"gap": "q_pos - kv", "near(x)": "x < window or x * 1.0 < limit_", "unused": "q * 7"},
)


def test_json_both_ways() -> None:
    data = json.loads(json.dumps(PACKED.to_dict(), allow_nan=False))
    assert restore_variant(data) == PACKED


def test_pickle_both_ways() -> None:
    assert PACKED.ranges["window"] == (1, 2**30 - 1)  # cached on the instance
    again = pickle.loads(pickle.dumps(PACKED))
    assert again == PACKED
    assert hash(again) == hash(PACKED)


@few("seed", range(25), always=range(0, 999, 3))
def test_random_variants_survive_json(seed: int) -> None:
    generator = randoms.Generator(seed)
    mask = generator.boolean(3)
    score = randoms.Generator(seed, logit=True).floating(3)
    variant = compile_variant("random", mask, score, randoms.SCALARS, randoms.TENSORS, randoms.LET)
    assert restore_variant(json.loads(json.dumps(variant.to_dict()))) == variant


def test_an_inlined_text_may_be_longer_than_a_user_may_write() -> None:
    let = {"a": " + ".join(["q_pos % 7"] * 40), "f(x)": "x * a + a"}
    variant = compile_variant("v", "f(f(kv % 3) % 9) > 0", let=let)
    assert len(variant.to_dict()["mask"]) > 1000
    assert restore_variant(variant.to_dict()) == variant


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_the_sign_of_a_constant_zero_survives(value: float) -> None:
    variant = signed(value)
    text = json.dumps(variant.to_dict(), allow_nan=False)
    assert restore_variant(json.loads(text)) == variant
    assert f"atan2({value}, -1.0)" in text
    fields = yaml.safe_load(spec_text({"signed": declaration(variant)}, []))["variants"]["signed"]
    assert math.copysign(1.0, fields["scalars"]["zero"]["const"]) == math.copysign(1.0, value)
    assert fields["score"] == variant.to_dict()["score"]


def test_zeros_of_both_signs_make_two_variants() -> None:
    """Seen: two variants whose constants are 0.0 and -0.0 were one, so that one's kernels served the other."""
    plus, minus = signed(0.0), signed(-0.0)
    assert plus.definition != minus.definition
    assert plus != minus
    assert len({plus, minus, signed(0.0)}) == 2
    for field in ("const", "default", "min"):
        a, b = (Scalar("x", "fp32", **{field: value}) for value in (0.0, -0.0))
        assert a != b
        assert hash(a) == hash(Scalar("x", "fp32", **{field: 0}))
        assert a == Scalar("x", "fp32", **{field: 0})


def signed(value: float) -> Variant:
    return compile_variant("signed", None, "s + atan2(zero, -1.0) * kv", [Scalar("zero", "fp32", const=value)])


def test_literals_are_known_by_their_sign_and_nan_is_one() -> None:
    zeros, nan = [Const(value, Type.FLOAT) for value in (0.0, -0.0, 0)], Const(math.nan, Type.FLOAT)
    assert zeros[0] == zeros[2] != zeros[1]
    assert hash(zeros[0]) == hash(zeros[2])
    assert nan == Const(float("nan"), Type.FLOAT)
    assert hash(nan) == hash(Const(float("nan"), Type.FLOAT))
    assert len({*zeros, nan, Const(-math.nan, Type.FLOAT), Const(0, Type.INT)}) == 4
    assert pickle.loads(pickle.dumps(zeros[1])) == zeros[1]


def test_a_damaged_manifest_is_refused() -> None:
    with pytest.raises(SpecError):
        restore_variant({**PACKED.to_dict(), "mask": "__import__('os')"})


def test_properties_of_a_variant() -> None:
    assert [scalar.name for scalar in PACKED.arguments] == ["window", "floor_"]
    assert set(PACKED.labels.values()) == {"gap"}
    assert PACKED.uses() == (
        frozenset({"q_pos", "kv", "b", "h", "window", "s", "floor_"}),
        frozenset({"doc", "slope"}),
    )
    assert PACKED.uses(PACKED.score)[1] == {"slope"}
    assert PACKED.masked
    assert not compile_variant("full", True).masked
    assert PACKED.tensor("slope").type is Type.FLOAT
    assert PACKED.scalar("cut").const == 2**40
    with pytest.raises(KeyError):
        PACKED.tensor("nope")


def test_the_users_own_text_is_kept() -> None:
    assert PACKED.mask_text == "gap >= 0 and doc[b, q_pos] == doc[b, kv] and near(kv)"
    assert compile_variant("full").mask_text is None
    assert compile_variant("full").mask == Const(True, Type.BOOL)
