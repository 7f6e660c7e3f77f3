"""Generated text: how it reads, and that Triton and C++ compute what the eager reference computes."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.emit import Binding, Emitted, TensorBinding, emit_many
from attngen.lang.emit import emit as emit_values
from attngen.lang.folding import fold_logit
from attngen.lang.ir import OPERATORS, Const, Expr, Load, Op, Search, Type, Var, rewrite, walk
from attngen.lang.languages import Target
from attngen.lang.literals import fold_literals
from attngen.lang.printing import canonical
from attngen.lang.ranges import declared_ranges
from attngen.lang.statements import Code, declared, lines, reads
from attngen.lang.usage import decides
from attngen.lang.variant import Scalar, Tensor, Variant
from tests.lang import harness, randoms
from tests.sampling import few, seeds

ROW, COLUMN = frozenset({"q"}), frozenset({"kv"})
NAMES = {
    **{name: Binding(name) for name in ("b", "h", "hk", "seqlen_q", "seqlen_k", "window", "dilation", "step")},
    "q": Binding("{q_index}[:, None]", ROW),
    "q_pos": Binding("{q_position}[:, None]", ROW),
    "kv": Binding("{kv_index}[None, :]", COLUMN),
    "s": Binding("s", ROW | COLUMN),
}
SCALARS = [
    Scalar("window", "int32", min=1),
    Scalar("dilation", "int32", min=1),
    Scalar("step", "int32", max=-1),
]
TENSORS = [
    Tensor("doc", "int32", ("b", "seqlen_k")),
    Tensor("slope", "bf16", ("h",)),
    Tensor("table", "fp32", (1024,)),
    Tensor("pad", "bool", ("b", "seqlen_k")),
    Tensor("cu", "int64", ("n",)),
    Tensor("bias", "fp16"),
]
BOUND = {
    t.name: TensorBinding(
        f"{t.name}_ptr",
        tuple(f"stride_{t.name}_{axis}" for axis in range(len(t.shape))),
        tuple(f"{t.name}_extent" if e == "n" else str(e) for e in t.shape),
        t.dtype,
        t.shape,
    )
    for t in TENSORS
}
RANGES = declared_ranges(SCALARS, TENSORS)


def variant(mask: str | None = None, score: str | None = None, let: dict[str, str] | None = None) -> Variant:
    return compile_variant("v", mask, score, SCALARS, TENSORS, let)


@dataclass(frozen=True)
class Text:
    """Emitted code, as text."""

    hoisted: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    axes: frozenset[str]


def emit(*args: Any, **options: Any) -> Text:
    code = emit_values(*args, **options)
    return Text(lines(code.hoisted), lines(code.body), code.result.text, code.axes)


def text(expr: Expr, target: Target = Target.TRITON, **options: Any) -> Text:
    return emit(expr, target, NAMES, BOUND, ranges=RANGES, **options)


def mask(source: str, target: Target = Target.TRITON, **options: Any) -> Text:
    return text(variant(source).mask, target, **options)


def score(source: str, target: Target = Target.TRITON, **options: Any) -> Text:
    expr = variant(None, source).score
    assert expr is not None
    return text(expr, target, **options)


# --- how it reads -----------------------------------------------------------------------------------------


def test_a_mask_is_one_expression() -> None:
    code = mask("q_pos >= kv")
    assert code == Text((), (), "q_position[:, None] >= kv_index[None, :]", ROW | COLUMN)


def test_an_expression_used_twice_is_computed_once() -> None:
    code = mask("0 <= q_pos - kv < window")
    assert code.body == ("q_pos_minus_kv = q_position[:, None] - kv_index[None, :]",)
    assert code.result == "(0 <= q_pos_minus_kv) & (q_pos_minus_kv < window)"


def test_names_of_let_values_are_used() -> None:
    v = variant("0 <= gap < window", None, {"gap": "q_pos - kv"})
    code = text(v.mask, labels=v.labels, prefix="mask_")
    assert code.body == ("gap = q_position[:, None] - kv_index[None, :]",)
    code = text(v.mask, prefix="mask_")
    assert code.body == ("mask_q_pos_minus_kv = q_position[:, None] - kv_index[None, :]",)


def test_expressions_that_do_not_vary_along_the_keys_are_hoisted() -> None:
    code = mask("kv // 64 == q_pos // 64 and kv < q_pos * 2 + 1")
    assert code.hoisted == (
        "q_pos_div_64 = q_position[:, None] >> 6",
        "q_pos_times_2_plus_1 = q_position[:, None] * 2 + 1",
    )
    assert code.body == ()


def test_loads_are_hoisted_predicated_and_share_a_base() -> None:
    code = mask("q_pos >= kv and doc[b, q_pos] == doc[b, kv]")
    assert code.hoisted == (
        "doc_b = doc_ptr + b.to(tl.int64) * stride_doc_0",
        "doc_q_pos = tl.load(",
        "    doc_b + q_position[:, None].to(tl.int64) * stride_doc_1,",
        "    mask=(q_position[:, None] >= 0) & (q_position[:, None] < seqlen_k),",
        "    other=0,",
        ")",
    )
    assert code.body == (
        "doc_kv = tl.load(",
        "    doc_b + kv_index[None, :].to(tl.int64) * stride_doc_1,",
        "    mask=kv_index[None, :] < seqlen_k,",
        "    other=0,",
        ")",
    )
    assert code.result == "(q_position[:, None] >= kv_index[None, :]) & (doc_q_pos == doc_kv)"


def test_alibi() -> None:
    code = score("s + slope[h] * (kv - q_pos)")
    assert code.hoisted == ("slope_h = tl.load(slope_ptr + h.to(tl.int64) * stride_slope_0).to(tl.float32)",)
    assert code.result == "s + slope_h * (kv_index[None, :] - q_position[:, None]).to(tl.float32)"


def test_a_proven_index_needs_no_predicate() -> None:
    code = score("s + table[clamp(q_pos - kv + 512, 0, 1023)]")
    assert "mask=" not in "".join(code.body)
    assert "mask=" in "".join(score("s + table[q_pos - kv + 512]").body)


def test_a_name_that_stays_below_an_extent_needs_no_test_of_it() -> None:
    names = {
        **NAMES,
        "kv": Binding("{kv_index}[None, :]", COLUMN, below=frozenset({"seqlen_k"})),
        "q_pos": Binding("{q_position}[:, None]", ROW, below=frozenset({"seqlen_k"})),
    }
    code = emit(variant("doc[b, q_pos] == doc[b, kv]").mask, Target.TRITON, names, BOUND, ranges=RANGES)
    assert "mask=" not in "".join(code.body)
    assert "    mask=q_position[:, None] >= 0," in code.hoisted


def test_an_index_that_is_tested_is_named() -> None:
    code = score("s + table[q_pos - kv + 512]")
    assert code.body[0] == "q_pos_minus_kv_plus_512 = q_position[:, None] - kv_index[None, :] + 512"
    assert "    mask=(q_pos_minus_kv_plus_512 >= 0) & (q_pos_minus_kv_plus_512 < 1024)," in code.body


def test_conditions_guard_loads_that_vary_as_much() -> None:
    code = mask("kv < window and doc[b, kv] == 1")
    assert "    mask=kv_lt_window & (kv_index[None, :] < seqlen_k)," in code.body
    code = mask("kv <= q_pos and doc[b, kv] == 1")  # would make a row of loads a tile of loads
    assert "    mask=kv_index[None, :] < seqlen_k," in code.body
    code = mask("(kv < window or doc[b, kv] == 1) and doc[b, kv] != 2")  # wanted outside the condition, too
    assert "    mask=kv_index[None, :] < seqlen_k," in code.body
    code = mask("window > 3 and doc[b, kv] == 1")
    assert "    mask=True & window_gt_3 & (kv_index[None, :] < seqlen_k)," in code.body


def test_a_bool_tensor_and_a_scalar_tensor() -> None:
    assert mask("pad[b, kv]").body[-1] == ") != 0"
    assert score("s + bias").hoisted == ("bias_value = tl.load(bias_ptr).to(tl.float32)",)
    assert "int64" in "".join(mask("cu[b] < kv + 7").hoisted)


def test_scalars_only() -> None:
    names = {name: Binding(name) for name in ("q_lo", "q_hi", "window", "seqlen_k", "b")}
    low = Op(
        "max",
        (Op("sub", (Var("q_lo", Type.INT), Var("window", Type.INT)), Type.INT), Const(0, Type.INT)),
        Type.INT,
    )
    code = emit(low, Target.TRITON, names)
    assert code == Text((), (), "tl.maximum(q_lo - window, 0)", frozenset())
    search = Search(
        "doc",
        1,
        (Var("b", Type.INT), Const(0, Type.INT)),
        Var("q_lo", Type.INT),
        True,
        Var("seqlen_k", Type.INT),
    )
    code = emit(Op("min", (search, low), Type.INT), Target.TRITON, names, BOUND)
    assert code.hoisted == (
        "doc_after = first_at_least(doc_ptr + b.to(tl.int64) * stride_doc_0, stride_doc_1, seqlen_k, q_lo, True)",
    )
    assert code.body == ()


def test_names_stay_clear_of_the_template() -> None:
    code = mask("0 <= q_pos - kv < window", taken=["q_pos_minus_kv"])
    assert code.body[0].startswith("q_pos_minus_kv_2 = ")
    code = emit(
        variant("0 <= q_pos - kv < window").mask,
        Target.TRITON,
        {**NAMES, "window": Binding("q_pos_minus_kv")},
    )
    assert code.body[0].startswith("q_pos_minus_kv_2 = ")


def test_several_expressions_share() -> None:
    v = variant("q_pos - kv < window", "s - (q_pos - kv)")
    assert v.score is not None
    code = emit_many([v.mask, v.score], Target.TRITON, NAMES, ranges=RANGES)
    assert lines(code.body) == ("q_pos_minus_kv = q_position[:, None] - kv_index[None, :]",)
    assert [each.text for each in code.results] == ["q_pos_minus_kv < window", "s - q_pos_minus_kv.to(tl.float32)"]


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("kv // dilation", "kv_index[None, :] // dilation"),
        ("kv % dilation", "kv_index[None, :] % dilation"),
        ("(kv - q_pos) // 8", "kv_index[None, :] - q_position[:, None] >> 3"),
        ("(kv - q_pos) % 8", "kv_index[None, :] - q_position[:, None] & 7"),
    ],
)
def test_plain_division_where_it_is_right(source: str, plain: str) -> None:
    assert mask(f"{source} == 0").result == f"{plain} == 0"


def test_floor_division_of_what_may_be_negative() -> None:
    code = mask("(kv - q_pos) % dilation == 0")
    assert code.body[1] == "remainder = kv_minus_q_pos % dilation"
    assert code.result == "tl.where(remainder < 0, remainder + dilation, remainder) == 0"
    code = mask("kv % step == 0")
    assert "((remainder < 0) != (step < 0))" in code.result


@pytest.mark.exhaustive
def test_tanh_is_good_to_float32_also_near_0(tmp_path: Path) -> None:
    """A cap is much larger than most logits: what is lost of a small angle is lost of the logit."""
    scales = (1e-4, 0.02, 0.2, 1.0, 4.0)
    exprs = [score_of(f"tanh(s * {scale})") for scale in scales]
    computed = harness.run_triton([expr.args[1] for expr in exprs if isinstance(expr, Op)], tmp_path)
    for seed, (scale, one) in enumerate(zip(scales, computed, strict=True)):
        angle = randoms.logits(seed) * torch.tensor(scale, dtype=torch.float32)
        wanted = torch.tanh(angle.double())
        assert float(((one - wanted) / wanted).abs().max()) < 6 * 2.0**-24


def test_int64_where_int32_may_overflow() -> None:
    assert "q_position[:, None].to(tl.int64) - step" in "".join(mask("kv > q_pos - step - 1").hoisted)


def test_fast_math() -> None:
    assert "tanh.approx.f32" in score("20 * tanh(s / 20)", fast_math=True).result
    exact = score("20 * tanh(s / 20)")
    assert exact.body == ("angle = tl.div_rn(s, 20.0)", "square = angle * angle")
    assert exact.result.endswith(", 1.0 - tl.div_rn(2.0, tl.exp2(2.8853900817779268 * angle) + 1.0))")
    assert "tanh_approx(" in score("20 * tanh(s / 20)", Target.CUDA, fast_math=True).result


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("s if s / 3 >= 1.0 else 0.0", "tl.where(tl.div_rn(s, 3.0) >= 1.0, s, 0.0)"),
        ("floor(s / 3)", "tl.floor(tl.div_rn(s, 3.0))"),
        ("ceil(s * 2 ** -1)", "tl.ceil(s * 0.5)"),
        ("floor((abs(s) + 1) ** -1)", "tl.floor(tl.div_rn(1.0, element_value))"),
        ("floor(sqrt(abs(s)))", "tl.floor(tl.sqrt_rn(tl.abs(s)))"),
        ("floor(abs(s) ** 0.5)", "tl.floor(tl.sqrt_rn(abs_s))"),
        ("s / 3 + floor(s)", "s / 3.0 + tl.floor(s)"),
        ("s / 3 if s > 0 else 0.0", "tl.where(s > 0.0, s / 3.0, 0.0)"),
        ("max(s / 3, 0.0)", "tl.maximum(s / 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL)"),
    ],
)
def test_quotients_and_roots_are_exact_where_they_decide(source: str, wanted: str) -> None:
    assert score(source, fast_math=True).result == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("s / 3", f"s * {1 / 3!r}f"),
        ("s / (1.0 + abs(s))", "divide_approx(s, 1.0f + fabsf(s))"),
        ("sqrt(abs(s))", "sqrt_approx(fabsf(s))"),
        ("(abs(s) + 1) ** -1", "divide_approx(1.0f, "),
        ("floor(s / 3)", "floorf(s / 3.0f)"),
        ("s if s / 3 >= 1.0 else 0.0", "s / 3.0f >= 1.0f"),
        ("floor(log(abs(s) + 1) / 3)", "floorf(__fmul_rn(__logf("),  # rounds what is an approximation already
    ],
)
def test_quotients_of_pairs_are_approximated_where_they_do_not_decide(source: str, wanted: str) -> None:
    emitted = score(source, Target.CUDA, fast_math=True)
    assert wanted in "\n".join([*emitted.body, emitted.result])
    assert "approx" not in score(source, Target.CUDA, fast_math=False).result


@seeds(40, always=8)
def test_nothing_that_decides_divides_inexactly(seed: int) -> None:
    expr = randoms.expression(seed, kind="float", depth=4, logit=True)
    deciding = [part for part in walk(expr) if decides(part)]
    for part in deciding:  # alone, so that nothing else makes it exact
        emitted = emit_many(
            [part], Target.TRITON, harness.triton_bindings(), harness.tensor_bindings(), ranges=harness.RANGES,
            fast_math=True,
        )  # fmt: skip
        text = "\n".join([*lines((*emitted.hoisted, *emitted.body)), emitted.results[0].text])
        assert not any(isinstance(node, ast.Div) for node in ast.walk(ast.parse(text))), canonical(part)
        assert "tl.sqrt(" not in text


def test_powers() -> None:
    assert score("s ** 2").result == "s * s"
    assert score("s ** 5").body == ("square = s * s", "square_2 = square * square")
    assert score("s ** 5").result == "s * square_2"
    assert score("(abs(s) + 1) ** -1").result.startswith("tl.div_rn(1.0, ")
    assert score("(abs(s) + 1) ** -1", fast_math=True).result.startswith("1.0 / ")
    assert score("abs(s) ** 0.5").result.startswith("tl.sqrt_rn(")
    assert score("abs(s) ** 0.5", fast_math=True).result.startswith("tl.sqrt(")
    assert "tl.exp2(1.5 * tl.log2(" in score("abs(s) ** 1.5").result


def test_powers_whose_exponent_varies() -> None:
    positive, any_sign = "(abs(s) + 1) ** (0.1 * kv)", "s ** (kv - 3)"
    assert score(positive, Target.CUDA, fast_math=True).result.startswith("exp2_fast(")
    assert score(positive, Target.CUDA).result.startswith("powf(")
    assert "powf(" not in score(any_sign, Target.CUDA, fast_math=True).result  # its branches would serialize products
    assert "nan" not in score(positive).result
    assert '(s < 0.0) & (tl.floor(kv_minus_3_float) != kv_minus_3_float), float("nan"), ' in score(any_sign).result
    assert score("s ** (1 / 2)").result == "tl.sqrt_rn(s)"


def test_floats_become_integers() -> None:
    """In one instruction where the float is known to be a number that int32 holds; saturated elsewhere."""
    logarithm = "tl.log(kv_index[None, :].to(tl.float32) + 1.0)"
    assert score("int(log(kv + 1.0))").result == f"{logarithm}.to(tl.int32).to(tl.float32)"
    saturated = "tl.where(s < 2147483648.0, tl.maximum(s, -2147483648.0).to(tl.int32), tl.where(s == s, 2147483647, 0))"
    assert score("int(s)").result == f"{saturated}.to(tl.float32)"
    assert score("int(s)", Target.CUDA).result == "float(__float2int_rz(s))"


def test_an_index_that_was_a_float_is_proven() -> None:
    """NaN becomes 0, so that it is within the bounds as well."""
    assert "mask=" not in "".join(score("s + table[int(clamp(s, 0.0, 1000.0))]").body)
    assert "mask=" in "".join(score("s + table[int(clamp(s, 1.0, 1024.0))]").body)


def test_cuda_declares_types() -> None:
    code = mask("0 <= q_pos - kv < window and pad[b, kv]", Target.CUDA)
    assert "const int q_pos_minus_kv = " in "\n".join(code.body)
    assert "const bool pad_kv = " in "\n".join(code.body)
    assert "const float slope_h = to_float(slope_ptr[" in score("s + slope[h]", Target.CUDA).hoisted[0]
    assert "const float bias_value = to_float(*bias_ptr);" in score("s + bias", Target.CUDA).hoisted


def test_several_computed_indices_are_multiplied_as_unsigned_from_a_base_in_registers() -> None:
    grid = Tensor("grid", "fp32", ("h", 32, 64))
    own = compile_variant("v", None, "s + grid[h, clamp(q_pos - kv, 0, 31), kv % 64]", [], [grid])
    bound = {"grid": TensorBinding("grid_ptr", ("stride_0", "stride_1", "1"), ("h", "32", "64"), "fp32", grid.shape)}
    assert own.score is not None
    code = emit(own.score, Target.CUDA, NAMES, bound, ranges=declared_ranges([], [grid]))
    base = 'const auto* grid_h = grid_ptr + static_cast<long long>(h) * stride_0; asm("" : "+l"(grid_h));'
    assert base in code.hoisted
    (load,) = (line for line in code.body if "grid_h[" in line)
    assert "* stride_1 + static_cast<unsigned>(" in load
    assert "long long" not in load
    code = emit(own.score, Target.TRITON, NAMES, bound, ranges=declared_ranges([], [grid]))
    assert ".to(tl.int64) * stride_1" in "".join(code.body)


def test_bounds_beyond_a_type_prove_nothing_of_an_index() -> None:
    """Seen: in lanes that overhang ``id`` reads 0, the product wraps around, and the index was taken for at most 50."""
    tensors = [Tensor("id", "int32", ("seqlen_k",), range=(2 * 10**9, 2 * 10**9 + 5)), Tensor("entry", "fp32", (64,))]
    own = compile_variant("v", None, "s + entry[(id[kv] - 2000000000) * 10]", [], tensors)
    bound = {
        "id": TensorBinding("id_ptr", ("1",), ("seqlen_k",), "int32", ("seqlen_k",)),
        "entry": TensorBinding("entry_ptr", ("1",), ("64",), "fp32", (64,)),
    }
    assert own.score is not None
    code = emit(own.score, Target.CUDA, NAMES, bound, ranges=declared_ranges([], tensors))
    (load,) = (line for line in code.body if "entry_ptr[" in line)
    assert ">= 0 &&" in load
    assert "< 64" in load


def test_a_name_without_a_binding() -> None:
    with pytest.raises(KeyError):
        emit(Var("nope", Type.INT), Target.TRITON, NAMES)
    with pytest.raises(KeyError):
        emit(Load("nope", (), Type.INT), Target.TRITON, NAMES)


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("op", list(OPERATORS))
def test_every_operator_has_a_form(op: str, target: Target) -> None:
    types = {
        **dict.fromkeys(("and", "or", "xor", "not", "to_int"), Type.BOOL), "to_float": Type.INT,
        **dict.fromkeys(("floordiv", "mod", "bitand", "bitor", "bitxor", "invert", "lshift", "rshift"), Type.INT),
    }  # fmt: skip
    kind = types.get(op, Type.FLOAT)
    args: tuple[Expr, ...] = tuple(Var(name, kind) for name in ("x", "y", "z")[: OPERATORS[op].arity[0]])
    if op == "select":
        args = (Var("c", Type.BOOL), *args[1:])
    if op == "pow":
        args = (args[0], Const(2.5, Type.FLOAT))
    node = Op(op, args, OPERATORS[op].result or kind)
    code = emit(node, target, {name: Binding(name) for name in "xyzc"})
    assert code.result
    if target is Target.TRITON:
        ast.parse("\n".join([*code.hoisted, *code.body, code.result]))


# --- what it reads ----------------------------------------------------------------------------------------

_NAME = re.compile(r"(?<![\w.\"$])[A-Za-z_]\w*")


def named(text: str, names: Collection[str]) -> set[str]:
    """Names that occur in a text, as whole words."""
    return set(_NAME.findall(text)) & set(names)


@pytest.mark.parametrize("target", list(Target))
@seeds(60, always=6)
def test_statements_know_what_they_read_and_declare(seed: int, target: Target) -> None:
    """Statements report the names of their text, for every operator, load and temporary."""
    kind = ("mask", "int", "float")[seed % 3]
    expr = randoms.expression(seed, kind=kind, depth=4, logit=kind == "float")
    bound, tensors = harness.triton_bindings(), harness.tensor_bindings()
    code: Emitted = emit_values(expr, target, bound, tensors, ranges=harness.RANGES)
    known = {*reads(binding.value for binding in bound.values()), *declared([*code.hoisted, *code.body])}
    for tensor in tensors.values():
        known |= {tensor.pointer, *tensor.strides, *tensor.extents}
    for each in (*code.hoisted, *code.body, code.result):
        own = set() if isinstance(each, Code) else set(each.names)
        assert named(each.text, known) - own == each.reads & known, each
        assert own <= named(each.text, known)


@pytest.mark.exhaustive
def test_emitted_statements_are_in_order() -> None:
    """A statement declares one name, and reads what stands before it."""
    for seed in range(60):
        expr = randoms.expression(seed, kind="float", depth=4, logit=True)
        bound, tensors = harness.triton_bindings(), harness.tensor_bindings()
        code: Emitted = emit_values(expr, Target.TRITON, bound, tensors, ranges=harness.RANGES)
        later = declared([*code.hoisted, *code.body])
        assert len(set(later)) == len(later)
        for each in (*code.hoisted, *code.body):
            assert not each.reads & set(later)
            later.remove(each.names[0])
        assert not later


# --- what it computes -------------------------------------------------------------------------------------


def check(exprs: list[Expr], results: list[torch.Tensor], steps: Sequence[int] | None = None) -> None:
    """Compare with the eager reference; where float32 and float64 already differ, there is nothing to compare.

    ``steps``: of the heads of all sequences that were computed of each expression.
    """
    for seed, (expr, whole, step) in enumerate(zip(exprs, results, steps or [1] * len(exprs), strict=True)):
        env = {**randoms.indices(), **randoms.scalars(seed), "s": randoms.logits(seed)}
        tensors = randoms.tensors(seed)
        computed = whole.flatten(0, 1)[::step]
        wanted = torch.broadcast_to(evaluate(expr, env, tensors), whole.shape).flatten(0, 1)[::step]
        if expr.type is Type.FLOAT:
            exact = torch.broadcast_to(evaluate(expr, env, tensors, torch.float64), whole.shape).flatten(0, 1)[::step]
            stable = torch.isclose(wanted.double(), exact, rtol=1e-3, atol=1e-3, equal_nan=True)
            close = torch.isclose(computed, wanted, rtol=2e-3, atol=2e-3, equal_nan=True)
            assert bool((close | ~stable).all()), canonical(expr)
        else:
            assert torch.equal(computed, wanted.to(torch.int64)), canonical(expr)


def expressions(start: int, count: int) -> list[Expr]:
    kinds = ["mask", "int", "float"]
    return [
        randoms.expression(start + i, kind=kinds[i % 3], depth=3, logit=kinds[i % 3] == "float") for i in range(count)
    ]


def special() -> list[Expr]:
    """NaN, infinities and the ends of every function, which random expressions seldom meet."""
    s, kv = "(s * (inf - inf) if kv < 3 else s)", "(inf if kv == 4 else -inf if kv == 5 else s)"
    texts = [
        f"min({s}, 0.5)", f"max(0.5, {s})", f"clamp({s}, -1, 1)", f"float({s} < 0.5)", f"float({s} != {s})",
        f"float(not {s} >= 0.5)", f"float({s} == 0.5)", f"tanh({kv})", f"exp(min({kv}, 9))", f"sigmoid({kv})",
        f"exp2(-abs({kv}))", f"int({s}) + int({kv})", f"int(1e10 * {kv}) / 3", f"int(clamp({kv}, 0, 7)) * 1.5",
        f"round({s}) + trunc({s})", f"round({kv}) - trunc({kv})", "round(trunc(2 * s) + 0.5) + round(s * 1e7)",
        f"sign({s}) + sign({kv}) + sign(kv - q)", f"erf({kv}) + float(isnan({s}))", f"erf({s})",
        f"expm1({kv})", "expm1(s * 1e-4) * 1e4", f"log1p(max({kv}, -1))", "log1p(s * 1e-4) * 1e4", f"log1p({s})",
        f"atan({kv}) + atan({s})", f"atan2({kv}, s)", f"atan2(s, {kv})",
        "atan2(s if kv > 9 else 0.0, s if q > 9 else 0.0)", "atan2(0.0 * s, s) + atan2(s, -0.0 * abs(s))",
        f"abs({kv}) ** (s * 0.5)", f"{s} ** 1.5", f"{kv} ** trunc(s)", "s ** (kv - 12)", f"s ** {s}", "s ** s",
        "(0.0 * s) ** (kv - 5)", "gain ** gain", "(abs(s) + 0.5) ** s", "sqrt(cap) ** gain + atan2(gain, cap)",
        "int(gain * 3) + round(gain * 3) + trunc(gain) + int(gain) + expm1(gain) + log1p(cap) + erf(cap)",
        f"max({kv}, -1)", f"log(max({kv}, 0.0))", "1e-40 * s * 1e38", "(s if kv < 8 else -inf) * 1.5",
        "float(flag) + float(flag and kv < window) + float(not flag or pad[b, kv])",
        "float(gain > 0 and kv < 9) + float(not (gain > 0 or kv < 9)) + float((gain > 0) == (kv < 9))",
        "(wide[h, kv] if gain > 0 and flag else 2.0) + (wide[h, kv + 1] if kv + 1 < seqlen_k and h > 1 else 3.0)",
        "float(kv * 2147483647 > 5) + float(shift + 1 > shift) + float(abs(shift) >= 0) + float(-shift < 0)",
        "(s - 0.5) ** 7 + 2 ** 3 + floor(-0.5) + log2(8) + (tanh(1) if True else s)",
        "float(-kv // 3) + float(-kv % 3) + float(-kv // -4) + float(kv % -4)",
        "float((kv - 9) // 4) + float((kv - 9) % 4) + float((kv - 9) // window) + float((kv - 9) % window)",
        # of base and exponent, one is a value of a head, which is a scalar of a tile
        "clamp(half[h], 0.25, 3.0) ** clamp(s, -3, 3)",
        "clamp(s, -3, 3) ** round(clamp(half[h], 0, 3)) + clamp(half[h], -3.0, 3.0) ** round(clamp(s, 0, 3))",
    ]  # fmt: skip
    return [declared_score(text) for text in texts]


def zeros(*, of_scalars: bool = True) -> list[Expr]:
    """Values of which the sign of a zero decides: an angle of ±pi, an infinity of either sign."""
    z = "(0.0 * s)"
    values = [
        z, f"-{z}", f"(0 - {z})", f"({z} + 0.0)", f"(0.0 + {z})", f"({z} - 0.0)", f"({z} + -0.0)", f"({z} - -0.0)",
        f"{z} * 1", f"-0.0 * {z}", f"-(-{z})", "(-0.0 if kv < 9 else 0.0)", "-0.0", "0.0", f"(kv - 5) * {z}",
        "(0.0 * -1.0 if s > 0 else 0.0)", f"({z} if q > 5 else -{z})", "-float(kv - 5)", f"abs({z})",
        f"{z} ** 3", f"{z} ** 2", *(("(-gain * 0.0)", "-(gain - gain)") if of_scalars else ()),
        *(f"{name}({z})" for name in (
            "floor", "ceil", "trunc", "round", "expm1", "log1p", "erf", "tanh", "silu", "sqrt", "sin", "tan", "atan",
        )),
        "round(clamp(s, -0.4, 0.4))", "ceil(clamp(s, -0.4, 0.4))", "trunc(clamp(s, -0.4, 0.4))",
    ]  # fmt: skip
    texts = [f"atan2({value}, -1.0)" for value in values]
    texts += ["atan2(0.0, s) - atan2(-0.0, s)", f"1.0 / {z}", f"1.0 / ({z} + 0.0)", f"rsqrt({z})", f"{z} ** (kv - 12)"]
    return [declared_score(text) for text in texts]


def declared_score(text: str) -> Expr:
    expr = randoms.declare(text, "float").score
    assert expr is not None
    return expr


@pytest.mark.exhaustive
@few("every", [6, 1])
def test_triton_agrees_with_eager(tmp_path: Path, every: int) -> None:
    # scalars are Python's numbers in the interpreter, and releases before 3.9 make 0.0 of Python's -0.0
    release = tuple(map(int, metadata.version("triton").split(".")[:2]))
    fresh, chosen = expressions(0, 8)[::every], (special() + zeros(of_scalars=release >= (3, 9)))[::every]
    # two heads, of two sequences, of expressions whose values differ little from head to head
    exprs, steps = fresh + chosen, [1] * len(fresh) + [5] * len(chosen)
    check(exprs, harness.run_triton(exprs, tmp_path, steps=steps), steps)


@pytest.mark.skipif(harness.compiler() is None, reason="no g++ on this machine")
def test_cuda_text_agrees_with_eager(tmp_path: Path) -> None:
    exprs = expressions(1000, 60) + special() + zeros()
    check(exprs, harness.run_cxx(exprs, tmp_path))


@pytest.mark.exhaustive
def test_triton_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is lenient; the compiler types every operator."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    exprs = [e for e in expressions(3000, 12) if e.type is Type.FLOAT] + special() + zeros()
    emitted = emit_many(
        exprs,
        Target.TRITON,
        harness.triton_bindings(),
        harness.tensor_bindings(),
        ranges=harness.RANGES,
        fast_math=True,
    )
    path = tmp_path / "compiled.py"
    path.write_text(harness.triton_module(harness.triton_kernel("kernel", exprs, emitted)))
    spec = importlib.util.spec_from_file_location("compiled", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ASTSource(module.kernel, harness.triton_signature(), constexprs={})
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "tanh.approx.f32" in built.asm["ptx"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("exp(100.0)", math.inf), ("exp(1000.0)", math.inf), ("3e38 * 3", math.inf), ("-3e38 * 3", -math.inf),
        ("1e-46", 0.0), ("1e-30 * 1e-30", 0.0), ("1e-30 * 1e-30 * 1e38", 0.0), ("exp(100.0) * 1e-30", math.inf),
        ("1e-40", torch.tensor(1e-40).item()), ("0.1", 0.1), ("int(-2.9)", -2.0), ("int(1e30)", 2.0**31 - 1),
        ("round(2.5) * trunc(-2.5)", -4.0), ("erf(0.5)", math.erf(0.5)), ("expm1(1000.0)", math.inf),
        ("log1p(1)", math.log(2)),
        ("atan2(1, -1)", math.atan2(1, -1)), ("2.0 ** (0.5 * 3)", 2.0**1.5), ("sign(-3) * isnan(0.0)", 0.0),
    ],
)  # fmt: skip
def test_literals_are_those_of_float32(source: str, value: float) -> None:
    folded = rewrite(score_of(source), fold_literals)
    assert folded == Op("add", (Var("s", Type.FLOAT), Const(value, Type.FLOAT)), Type.FLOAT)
    with torch.no_grad():
        assert evaluate(score_of(source), {"s": 0.0}).item() == pytest.approx(value)


def score_of(source: str) -> Expr:
    expr = variant(None, f"s + {source}").score
    assert expr is not None
    return expr


def test_products_of_literals_that_float32_does_not_hold_stay_apart() -> None:
    folded = fold_logit(score_of("s * 1e30 * 1e30"), RANGES, fast_math=True)
    assert not any(isinstance(n, Const) and abs(n.value) > 1e31 for n in walk(folded.value))


@pytest.mark.exhaustive
def test_an_integer_beyond_int32_stands_beside_any(tmp_path: Path) -> None:
    texts = ("s + (5000000000 if kv > q else kv)", "s + min(kv, 5000000000)", "s + max(kv - 5000000000, q) % 7")
    exprs = [variant(None, source).score for source in texts]
    computed = harness.run_triton([e for e in exprs if e is not None], tmp_path)
    for expr, one in zip(exprs, computed, strict=True):
        assert expr is not None
        seed = exprs.index(expr)
        wanted = evaluate(expr, {**randoms.indices(), "s": randoms.logits(seed)})
        torch.testing.assert_close(one, wanted.broadcast_to(one.shape))


def test_infinity_is_written_in_both_languages() -> None:
    infinite = Const(-math.inf, Type.FLOAT)
    assert emit(infinite, Target.TRITON, {}).result == 'float("-inf")'
    assert emit(infinite, Target.CUDA, {}).result == "-kInfinity"
    assert emit(Const(-(2**31), Type.INT), Target.CUDA, {}).result == "(-2147483647 - 1)"
