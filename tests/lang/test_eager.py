"""The eager reference against Python itself, and what torch's own semantics ask of it."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.ir import Expr
from attngen.lang.variant import Scalar, Tensor
from tests.lang import randoms
from tests.sampling import few, sampled

NAN, INF = math.nan, math.inf


class Elements:
    """A tensor that Python can index with a tuple; out of extent is an error, never a wrap."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        assert all(0 <= i < n for i, n in zip(index, self.values.shape, strict=True))
        return self.values[index].item()


def python_names(seed: int) -> dict[str, Any]:
    tensors = randoms.tensors(seed)
    names: dict[str, Any] = {name: Elements(value) for name, value in tensors.items()}
    names |= {"offset": tensors["offset"].item(), "bias": tensors["bias"].item()}
    names |= {s.name: s.const for s in randoms.SCALARS if s.const is not None}
    names |= {
        "clamp": lambda x, low, high: min(max(x, low), high),
        "f": lambda x, y: x - y if x > y else y - x,
    }
    return {**names, **randoms.scalars(seed)}


@sampled(always=15, seed=range(40), kind=["mask", "int"])
def test_integers_and_conditions_are_those_of_python(seed: int, kind: str) -> None:
    generator = randoms.Generator(seed, floats=False)
    text = generator.boolean(3) if kind == "mask" else f"({generator.integer(3)}) % 1000003 == 17"
    expr = randoms.declare(text, "mask").mask
    env = {**randoms.indices(), **randoms.scalars(seed)}
    shape = (randoms.BATCH, randoms.HEADS, randoms.SEQLEN_Q, randoms.SEQLEN_K)
    values = torch.broadcast_to(evaluate(expr, env, randoms.tensors(seed)), shape)
    code = compile(text, "expression", "eval")
    names = python_names(seed)
    for b, h, q, kv in [
        (0, 0, 0, 0),
        (1, 3, 12, 28),
        (0, 2, 5, 21),
        (1, 1, 9, 0),
        (0, 3, 0, 28),
        (1, 0, 12, 13),
    ]:
        point = {"b": b, "h": h, "hk": h // 2, "q": q, "kv": kv}
        point |= {"q_pos": q + randoms.SEQLEN_K - randoms.SEQLEN_Q}
        point |= {"gap": point["q_pos"] - kv, "q_global": b * randoms.SEQLEN_Q + q}
        point |= {"kv_global": b * randoms.SEQLEN_K + kv, "seqlen_q": randoms.SEQLEN_Q}
        point |= {"seqlen_k": randoms.SEQLEN_K, "heads": randoms.HEADS}
        assert bool(values[b, h, q, kv]) == bool(eval(code, {"__builtins__": __builtins__}, {**names, **point})), text


def score(text: str) -> Expr:
    scalars = [Scalar("x", "fp32"), Scalar("y", "fp32"), Scalar("n", "int32", min=1), Scalar("c", "bool")]
    tensors = [Tensor("t", "fp32", ("n",)), Tensor("i", "int32", ("n",)), Tensor("p", "bool", ("n",))]
    expr = compile_variant("v", None, text, scalars, tensors).score
    assert expr is not None
    return expr


def at(text: str, x: float = 0.0, y: float = 0.0, **env: Any) -> float:
    return evaluate(score(text), {"x": x, "y": y, **env}, float_dtype=torch.float64).item()


@few(
    ("text", "expected"),
    [
        ("floor(x)", -2.0), ("ceil(x)", -1.0), ("exp(x)", math.exp(-1.5)), ("exp2(x)", 2**-1.5),
        ("log(-x)", math.log(1.5)), ("log2(-x)", math.log2(1.5)), ("tanh(x)", math.tanh(-1.5)),
        ("sigmoid(x)", 1 / (1 + math.exp(1.5))), ("silu(x)", -1.5 / (1 + math.exp(1.5))),
        ("sqrt(-x)", math.sqrt(1.5)), ("rsqrt(-x)", 1 / math.sqrt(1.5)), ("sin(x)", math.sin(-1.5)),
        ("cos(x)", math.cos(-1.5)), ("tan(x)", math.tan(-1.5)), ("abs(x)", 1.5), ("x ** 3", -3.375),
        ("abs(x) ** -0.5", None), ("abs(y + x) ** 0.5", math.sqrt(1.5)), ("x / 4", -0.375), ("2 * x", -3.0),
        ("-x", 1.5), ("clamp(x, -1, 1)", -1.0), ("min(x, 2, -7)", -7.0), ("max(x, 2)", 2.0),
        ("x if x > 0 else 7", 7.0), ("-7 // 2", -4.0), ("-7 % 4", 1.0), ("7 % -4", -1.0), ("-5 >> 1", -3.0),
        ("1 << 5", 32.0), ("~5", -6.0), ("6 ^ 3", 5.0), ("6 & 3", 2.0), ("6 | 3", 7.0), ("x > -2", None),
        ("round(x)", -2.0), ("round(x + 1)", 0.0), ("trunc(x)", -1.0), ("sign(x)", -1.0), ("sign(y)", 0.0),
        ("int(x)", -1.0), ("int(-x * 3)", 4.0), ("int(1e10 * x)", -(2.0**31)), ("int(-1e10 * x)", 2.0**31 - 1),
        ("int(inf - inf + x)", 0.0), ("int(-inf)", -(2.0**31)), ("isnan(x) + isnan(inf - inf + y)", 1.0),
        ("erf(x)", math.erf(-1.5)), ("atan(x)", math.atan(-1.5)), ("atan2(x, -2)", math.atan2(-1.5, -2)),
        ("atan2(0.0 * x, x)", -math.pi), ("expm1(x)", math.expm1(-1.5)), ("log1p(-x)", math.log1p(1.5)),
        ("x ** (y + 2)", 2.25), ("2 ** x", 2**-1.5), ("x ** y", 1.0), ("y ** x", INF), ("1 / abs(y)", INF),
        ("float(x > -2)", 1.0), ("int(x > -2) + int(x < -2)", 1.0), ("inf", INF), ("-inf", -INF),
    ], always=range(0, 999, 2))  # fmt: skip
def test_operators(text: str, expected: float | None) -> None:
    if expected is None:
        return
    assert at(text, -1.5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["min", "max"])
def test_nan_passes_min_and_max(name: str) -> None:
    assert math.isnan(at(f"{name}(x, y)", NAN, 1.0))
    assert math.isnan(at(f"{name}(x, y)", 1.0, NAN))
    assert math.isnan(at("clamp(x, -1, 1)", NAN))


@pytest.mark.parametrize(("op", "expected"), [("<", 0), ("<=", 0), (">", 0), (">=", 0), ("==", 0), ("!=", 1)])
def test_nan_in_comparisons(op: str, expected: int) -> None:
    assert at(f"float(x {op} y)", NAN, 1.0) == expected


def test_float_dtype() -> None:
    assert evaluate(score("x / 3"), {"x": 1.0}).dtype is torch.float32
    assert evaluate(score("x / 3"), {"x": 1.0}, float_dtype=torch.float64).item() == 1 / 3
    half = torch.tensor(1.0, dtype=torch.float16)
    assert evaluate(score("x / 3"), {"x": half}).dtype is torch.float32


def test_a_condition_alone_and_a_bool_tensor() -> None:
    variant = compile_variant("v", "p[kv]", tensors=[Tensor("p", "bool", ("seqlen_k",))])
    pad = torch.tensor([True, False])
    assert evaluate(variant.mask, {"kv": torch.arange(2)}, {"p": pad}).tolist() == [True, False]


# --- loads ------------------------------------------------------------------------------------------------


def load(text: str, index: list[int], **env: Any) -> list[float]:
    tensors = {"t": torch.tensor([1.0, 2.0, 3.0]), "i": torch.tensor([0, 2, 5])}
    return evaluate(score(text), {"kv": torch.tensor(index), **env}, tensors).tolist()


@pytest.mark.parametrize(("index", "bad"), [([0, 3], 3), ([-1, 1], -1)])
def test_out_of_extent_raises_and_names_the_tensor(index: list[int], bad: int) -> None:
    with pytest.raises(IndexError, match=f"tensor 't': index {bad} is out of range for axis 0 with extent 3"):
        load("t[kv]", index)


@pytest.mark.parametrize(
    "text",
    [
        "t[kv] if 0 <= kv and kv < 3 else 0.0",
        "t[kv] if kv >= 0 and kv < 3 else 0.0",
        "(t[kv] if kv < 3 else 0.0) if not kv < 0 else 0.0",
        "0.0 if kv < 0 or kv >= 3 else t[kv]",
        "1.0 * (2.0 if 0 <= kv and kv < 3 and t[kv] > 1.5 else 0.0) + (1.0 if kv == 0 else 0.0)",
        "1.0 * (0.0 if kv < 0 or kv > 2 or t[kv] < 1.5 else 2.0) + (1.0 if kv == 0 else 0.0)",
    ],
)
def test_conditions_guard_loads(text: str) -> None:
    loaded = load(text, [-1, 0, 1, 3])
    assert loaded[0] == loaded[3] == 0.0
    assert loaded[1] == 1.0
    assert loaded[2] == 2.0


def test_an_index_that_is_itself_guarded() -> None:
    assert load("t[i[kv]] if kv < 2 else -1.0", [0, 1, 2]) == [1.0, 3.0, -1.0]
    with pytest.raises(IndexError, match="tensor 't': index 5"):
        load("t[i[kv]]", [0, 1, 2])


def test_the_mask_guards_the_score() -> None:
    variant = compile_variant("v", "kv <= q", "s + t[q - kv]", tensors=[Tensor("t", "fp32", (3,))])
    assert variant.score is not None
    env = {"q": torch.arange(3)[:, None], "kv": torch.arange(3)[None, :], "s": torch.zeros(3, 3)}
    tensors = {"t": torch.tensor([1.0, 2.0, 3.0])}
    visible = evaluate(variant.mask, env, tensors)
    scores = evaluate(variant.score, env, tensors, guard=visible)
    assert scores[visible].tolist() == [1.0, 2.0, 1.0, 3.0, 2.0, 1.0]
    with pytest.raises(IndexError):
        evaluate(variant.score, env, tensors)


def test_an_empty_tensor_and_an_empty_grid() -> None:
    empty = {"t": torch.zeros(0), "i": torch.zeros(0, dtype=torch.int32)}
    assert evaluate(score("t[kv] if kv < 0 else 4.0"), {"kv": torch.arange(2)}, empty).tolist() == [4.0, 4.0]
    assert evaluate(score("t[kv]"), {"kv": torch.arange(0)}, empty).numel() == 0


def test_any_rank() -> None:
    tensors = [Tensor("deep", "int32", (2, 3, 4)), Tensor("one", "int64", range=(0, 1000))]
    expr = compile_variant("v", None, "deep[h, b, kv] + one", tensors=tensors).score
    assert expr is not None
    values = {"deep": torch.arange(24).view(2, 3, 4), "one": torch.tensor(100)}
    assert evaluate(expr, {"h": 1, "b": 2, "kv": torch.arange(4)}, values).tolist() == [120, 121, 122, 123]


# --- gradients --------------------------------------------------------------------------------------------


def gradient(text: str, values: list[float], **env: Any) -> list[float]:
    variant = compile_variant("v", None, text, [Scalar("y", "fp32")])
    assert variant.score is not None
    s = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    evaluate(variant.score, {"s": s, **env}, float_dtype=torch.float64).sum().backward()
    assert s.grad is not None
    return s.grad.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "sqrt(s) if s > 0 else 3.0",
        "3.0 if s <= 0 else log(s)",
        "(rsqrt(s) if s > 0 else 0.0) + (0.0 if s <= 0 else sqrt(s))",
        "(sqrt(s) * log(s)) if s > 0 else -inf",
        "sqrt(s) * 0.0 if s > 0 and s < 9 else 0.0",
    ],
)
def test_no_gradient_passes_a_branch_that_is_not_taken(text: str) -> None:
    gradients = gradient(text, [0.0, -1.0, 2.0])
    assert gradients[:2] == [0.0, 0.0]
    assert math.isfinite(gradients[2])


def test_nothing_stays_alive_after_a_gradient() -> None:
    """Seen: what keeps gradients out of branches held all values of a score; no collector sees hooks of autograd."""
    gc.freeze()  # a collection would look at all that lives for longer
    variant = compile_variant("v", None, "sqrt(s) if s > 0 else 3.0")
    assert variant.score is not None
    s = torch.tensor([4.0, -1.0], requires_grad=True)
    scaled = 2 * s
    held = weakref.ref(scaled)
    evaluate(variant.score, {"s": scaled}).sum().backward()
    del scaled
    gc.collect()
    assert held() is None


def test_a_masked_position_has_no_gradient() -> None:
    s = torch.tensor([0.0, 4.0], requires_grad=True)
    expr = compile_variant("v", None, "sqrt(s)").score
    assert expr is not None
    evaluate(expr, {"s": s}, guard=torch.tensor([False, True])).sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [0.0, 0.25]


def test_gradients_at_kinks_are_those_of_torch() -> None:
    assert gradient("clamp(s, -1, 1)", [-2.0, -1.0, 0.0, 1.0, 2.0]) == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert gradient("max(s, 0.0)", [-1.0, 0.0, 1.0]) == [0.0, 0.5, 1.0]
    assert gradient("abs(s)", [-1.0, 0.0, 1.0]) == [-1.0, 0.0, 1.0]
    assert gradient("floor(s)", [0.5]) == [0.0]


def test_scalars_and_tensors_have_gradients() -> None:
    variant = compile_variant(
        "v", None, "s * y + t[kv] * t[kv]", [Scalar("y", "fp32")], [Tensor("t", "bf16", ("seqlen_k",))]
    )
    assert variant.score is not None
    y = torch.tensor(2.0, requires_grad=True)
    t = torch.tensor([1.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    s = torch.tensor([5.0, 7.0])
    evaluate(variant.score, {"s": s, "y": y, "kv": torch.arange(2)}, {"t": t}).sum().backward()
    assert y.grad is not None
    assert t.grad is not None
    assert (y.grad.item(), t.grad.tolist()) == (12.0, [2.0, 6.0])
