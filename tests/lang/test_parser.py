"""Text to IR: what is accepted, and that everything else is one SpecError with a caret."""

from __future__ import annotations

import pytest

from attngen.errors import Location, SpecError
from attngen.lang.check import compile_variant
from attngen.lang.ir import INDEX_NAMES, Const, Expr, Load, Op, Type, Var
from attngen.lang.variant import Scalar, Tensor

WINDOW = Scalar("window", "int32", min=1)
DOC = Tensor("doc", "int32", ("b", "seqlen_k"))
BIAS = Tensor("bias", "fp32")
INT, BOOL = Type.INT, Type.BOOL
Q, KV, Q_POS = Var("q", INT), Var("kv", INT), Var("q_pos", INT)


def mask(text: str | bool, **options: object) -> Expr:
    return compile_variant("v", text, None, [WINDOW], [DOC, BIAS], **options).mask  # type: ignore[arg-type]


def score(text: str, **options: object) -> Expr | None:
    return compile_variant("v", None, text, [WINDOW], [DOC, BIAS], **options).score  # type: ignore[arg-type]


def refusal(text: str, field: str = "mask", **options: object) -> str:
    """Return the message of the SpecError; check that its caret lines up with the text above it."""
    place = {field: Location("specs/a.yaml", 14)}
    with pytest.raises(SpecError) as caught:
        compile_variant("v", **{field: text}, scalars=[WINDOW], tensors=[DOC, BIAS], locate=place, **options)  # type: ignore[arg-type]
    error = caught.value
    first, shown, caret = str(error).rsplit("\n", 2)
    assert first.startswith("specs/a.yaml:14: ")
    assert error.location == Location("specs/a.yaml", 14)
    assert shown.startswith("    ")
    assert set(caret.strip()) == {"^"}
    assert len(caret) <= max(len(shown), 5)
    return str(error)


def marked(message: str) -> str:
    """Return the part of the text that the caret marks."""
    shown, caret = message.rsplit("\n", 2)[1:]
    return shown[caret.index("^") : len(caret)]


def test_causal() -> None:
    assert mask("q_pos >= kv") == Op("ge", (Q_POS, KV), BOOL)


def test_absent_and_true_show_everything() -> None:
    for text in (True, "True", None):
        assert mask(text) == Const(True, BOOL)  # type: ignore[arg-type]
    assert mask(False) == Const(False, BOOL)
    assert score("s") is None


def test_chained_comparison_is_a_conjunction_of_pairs() -> None:
    assert mask("0 <= q_pos - kv < window") == mask("0 <= q_pos - kv and q_pos - kv < window")


def test_and_or_nest_to_the_left() -> None:
    a, b, c = (Op("eq", (Q, Const(i, INT)), BOOL) for i in range(3))
    assert mask("q == 0 and q == 1 and q == 2") == Op("and", (Op("and", (a, b), BOOL), c), BOOL)
    assert mask("q == 0 or (q == 1 or q == 2)") == Op("or", (a, Op("or", (b, c), BOOL)), BOOL)


def test_bit_operators_on_conditions_are_logical() -> None:
    assert mask("(q > 1) & (kv > 1)") == mask("q > 1 and kv > 1")
    assert mask("(q > 1) | (kv > 1)") == mask("q > 1 or kv > 1")
    assert mask("~(q > 1)") == mask("not q > 1")
    assert mask("(q > 1) ^ (kv > 1)") == Op("xor", (mask("q > 1"), mask("kv > 1")), BOOL)


def test_negative_literals_are_literals() -> None:
    assert mask("q > -1") == Op("gt", (Q, Const(-1, INT)), BOOL)
    assert mask("q > -(1)") == mask("q > -1")


def test_min_max_take_many_arguments_and_clamp_is_both() -> None:
    assert mask("min(q, kv, 3) > 0") == mask("min(min(q, kv), 3) > 0")
    assert mask("clamp(q, 1, window) > 0") == mask("min(max(q, 1), window) > 0")


def test_lines_of_a_block_count_as_one() -> None:
    assert mask("  q > 1\n  and kv > 1\n") == mask("q > 1 and kv > 1")


def test_loads() -> None:
    assert mask("doc[b, kv] == 1") == Op("eq", (Load("doc", (Var("b", INT), KV), INT), Const(1, INT)), BOOL)
    assert mask("doc[b, doc[b, kv]] == 1").args[0].indices[1] == Load("doc", (Var("b", INT), KV), INT)  # type: ignore[union-attr]
    assert score("s + bias") == Op("add", (Var("s", Type.FLOAT), Load("bias", (), Type.FLOAT)), Type.FLOAT)


def test_every_name_of_the_language() -> None:
    assert mask(" + ".join(INDEX_NAMES) + " > 0").type is BOOL


def test_constant_scalars_stand_inlined() -> None:
    scalars = [Scalar("n", "int32", const=4), Scalar("x", "fp32", const=2), Scalar("on", "bool", const=True)]
    variant = compile_variant("v", "q < n and on", "s * x", scalars)
    assert variant.mask == Op("and", (Op("lt", (Q, Const(4, INT)), BOOL), Const(True, BOOL)), BOOL)
    assert variant.score == Op("mul", (Var("s", Type.FLOAT), Const(2.0, Type.FLOAT)), Type.FLOAT)


def test_let_values_and_functions_are_inlined() -> None:
    let = {
        "gap": "q_pos - kv",
        "near": "gap < window",
        "far(x)": "x >= window",
        "either(x, y)": "far(x) or y < 3",
    }
    assert mask("0 <= gap and near", let=let) == mask("0 <= q_pos - kv and q_pos - kv < window")
    assert mask("either(gap, kv)", let=let) == mask("q_pos - kv >= window or kv < 3")
    assert score("half(s + 1.0)", let={"half(x)": "x * 0.5"}) == score("(s + 1.0) * 0.5")


def test_let_functions_are_typed_at_each_call() -> None:
    let = {"twice(x)": "x + x"}
    assert mask("twice(q) > 1", let=let) == mask("q + q > 1")
    assert score("twice(s)", let=let) == score("s + s")


def test_let_sees_only_earlier_entries() -> None:
    assert "unknown name 'later'" in refusal("later > 1 and first > 1", let={"first": "q", "second": "kv"})
    with pytest.raises(SpecError, match=r"let\.first: unknown name 'second'"):
        mask("first > 1", let={"first": "second", "second": "kv"})
    with pytest.raises(SpecError, match="unknown function 'f'"):
        mask("f(q) > 1", let={"f(x)": "f(x) + 1"})


@pytest.mark.parametrize(
    ("text", "message", "part"),
    [
        ("windw < q", "unknown name 'windw'; did you mean 'window'?", "windw"),
        ("kv < 1 and dcc[b, kv] == 1", "unknown tensor 'dcc'; did you mean 'doc'?", "dcc"),
        ("mn(q, kv) > 1", "unknown function 'mn'; did you mean 'min'?", "mn"),
        ("q.real > 1", "attribute access is not part", "q.real"),
        ("().__class__ > 1", "attribute access is not part", "().__class__"),
        ("__import__('os').system('x')", "attribute access is not part", "__import__('os').system"),
        ("eval('1')", "unknown function 'eval'", "eval"),
        ("(lambda: 1)()", "lambda is not part", "lambda: 1"),
        ("[q for q in kv]", "a comprehension is not part", "[q for q in kv]"),
        ("{q: 1}", "a dictionary is not part", "{q: 1}"),
        ("any(q for q in kv)", "unknown function 'any'", "any"),
        ("min(q for q in kv)", "takes at least 2 arguments", "min(q for q in kv)"),
        ("min(1, (q for q in kv))", "a generator is not part", "(q for q in kv)"),
        ("'a' == 'b'", "a string is not part", "'a'"),
        ("b'a' == q", "a string is not part", "b'a'"),
        ("f'{q}' == q", "an f-string is not part", "f'{q}'"),
        ("(x := 3) > q", "':=' is not part", "x := 3"),
        ("min(*doc) > 1", "'*' unpacking is not part", "*doc"),
        ("min(q, kv, **doc) > 1", "arguments are positional", "min(q, kv, **doc)"),
        ("max(q, key=1) > 1", "arguments are positional", "max(q, key=1)"),
        ("q @ kv", "operator '@' is not part", "q @ kv"),
        ("q in kv", "operator 'in' is not part", "q in kv"),
        ("q is kv", "operator 'is' is not part", "q is kv"),
        ("(q, kv) > 1", "a tuple is not part", "(q, kv)"),
        ("await q", "await is not part", "await q"),
        ("None", "None is not part", "None"),
        ("...", "Ellipsis is not part", "..."),
        ("q > 1j", "a complex number is not part", "1j"),
        ("q > 9223372036854775808", "integer does not fit int64", "9223372036854775808"),
        ("q > " + "9" * 4000, "integer does not fit int64", None),
        ("q > 1e39", "does not fit float32", "1e39"),
        ("doc[b] == 1", "'doc' has 2 axes [b, seqlen_k], got 1 index", "doc[b]"),
        ("doc[b, 1:2] == 1", "a slice is not part", "1:2"),
        ("doc[b, 0.5] == 1", "must be an integer, got a float", "0.5"),
        ("doc[b, q > kv] == 1", "must be an integer, got a condition", "q > kv"),
        ("doc == 1", "needs an index for each axis", "doc"),
        ("bias[0] > 1", "'bias' has no axes; it is used by its bare name", "bias[0]"),
        ("window[0] == 1", "is not a tensor", "window"),
        ("doc[b, kv][0] == 1", "only declared tensors can be indexed", "doc[b, kv][0]"),
        ("min > 1", "is a function and needs arguments", "min"),
        ("s > 1", "'s' is the logit", "s"),
        # the operand at fault, not the whole operation
        ("q > 1 and kv and h", "'and' takes a condition, got an integer", "kv"),
        ("q > 1 and kv > 1 or s0", "unknown name 's0'", "s0"),
        ("not (q + 1)", "'not' takes a condition, got an integer", "q + 1"),
        ("(1 if q else 2) > 1", "'if' takes a condition, got an integer", "q"),
        ("q > 1 and 7 // (kv - q) > 1", "the divisor of '//' may be zero", "kv - q"),
        ("q % 2.0 == 1", "'%' takes integers, got a float", "2.0"),
        ("(q >> kv) > 1", "the distance of a shift must lie within 0 .. 31", "kv"),
        ("q ** 65 > 1", "the exponent of '**' must lie within -64 .. 64, got 65", "65"),
        ("rint(q) > 1", "unknown function 'rint'; write 'round'", "rint"),
        ("q % 1.5 > 1", "'%' takes integers, got a float; write int(x), which rounds toward zero", "1.5"),
        # words of other languages
        ("q_idx >= kv", "unknown name 'q_idx'; write 'q', or 'q_pos'", "q_idx"),
        ("q >= kv_idx", "unknown name 'kv_idx'; write 'kv'", "kv_idx"),
        ("batch == 1", "unknown name 'batch'; write 'b'", "batch"),
        ("head < 2", "unknown name 'head'; write 'h'", "head"),
        ("score > 1", "unknown name 'score'; a mask cannot read the logit", "score"),
        ("where(q > 1, kv, 2) > 1", "unknown function 'where'; write 'x if condition else y'", "where"),
        ("q > 1 and torch.where(q > 1, kv, 2) > 1", "'torch.where' is not part of the language; write 'x if ",
         "torch.where"),
        ("torch.abs(q - kv) < 4", "'torch.abs' is not part of the language; write 'abs'", "torch.abs"),
        ("torch.logical_and(q > 1, kv > 1)", "write 'x and y'", "torch.logical_and"),
        ("(q - kv).abs() < 4", "attribute access is not part of the language", "(q - kv).abs"),
        ("q > 1 && kv > 1", "'&&' is not part of the language; write 'and'", "&&"),
        ("q > 1 || kv > 1", "'||' is not part of the language; write 'or'", "||"),
        ("!(q > 1)", "'!' is not part of the language; write 'not'", "!"),
        ("q > 1 ? kv > 1 : kv > 2", "'?' is not part of the language; write 'x if condition else y'", "?"),
        ("q => kv", "'=>' is not part of the language; write '>='", "=>"),
        ("q > 1 AND kv > 1", "'AND' is not part of the language; write 'and'", "AND"),
        ("q = kv", "'=' is not part of the language; write '==' to compare", "="),
        ("lambda b, h, q, kv: q >= kv", "lambda is not part of the language; write its body alone", None),
        ("-math.inf < q", "attribute access is not part of the language; write inf", "math.inf"),
        ("doc[b][kv] == 1", "write all indices in one pair of brackets", "doc[b][kv]"),
        ("q >", "not an expression", None),
        ("q > 1 # a comment", "character '#' is not allowed", "#"),
        ("q > 1; kv > 1", "character ';' is not allowed", ";"),
        ("q >\\\n 1", "character '\\' is not allowed", "\\"),
        ("q > 1\x00", "is not allowed", None),
        ("\N{FULLWIDTH LATIN SMALL LETTER Q} > 1", "plain ASCII", None),
        ("kv > \N{CYRILLIC SMALL LETTER A}", "plain ASCII", None),
        ("q > \N{ARABIC-INDIC DIGIT ONE}", "plain ASCII", None),
        ("q\u202e > 1", "plain ASCII", None),
        ("", "is empty", None),
        ("   ", "is empty", None),
        ("q > 0 and " * 1000 + "q > 0", "has 10005 characters, at most 4096", None),
        ("(" * 150 + "q" + ")" * 150 + " > 1", "", None),
        ("(" * 2000 + "q" + ")" * 2000, "too many nested parentheses", None),
        ("-" * 4000 + "q", "nested", None),
        ("not " * 1000 + "True", "nested", None),
        ("q" + " + q" * 900 + " > 1", "more than 100 levels", None),
    ],
)  # fmt: skip
def test_refused(text: str, message: str, part: str | None) -> None:
    if not message:  # Python drops the parentheses; nothing is left to refuse
        assert mask(text).type is BOOL
        return
    error = refusal(text)
    assert message in error
    if part is not None:
        assert marked(error) == part


def test_a_long_text_is_shown_around_the_mistake() -> None:
    text = "q > 1 and " * 20 + "windw > 1 and " + "q > 1 and " * 20 + "kv > 1"
    message = refusal(text)
    assert marked(message) == "windw"
    assert all(len(line) < 120 for line in message.splitlines()[1:])


def test_functions_cannot_blow_up() -> None:
    doubling = {"f0(x)": "x + x"} | {f"f{i}(x)": f"f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 40)}
    with pytest.raises(SpecError, match="more than 4096 parts"):
        mask("f39(q) > 1", let=doubling)
    # Arguments that are dropped leave no nodes behind, but take time.
    dropping = {"g0(x)": "x", "first(x, y)": "x"}
    dropping |= {f"g{i}(x)": f"first(x, first(g{i - 1}(x), g{i - 1}(x)))" for i in range(1, 25)}
    with pytest.raises(SpecError, match="steps to inline"):
        mask("g24(q) > 1", let=dropping)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("q", "is reserved"),
        ("min", "is reserved"),
        ("lambda", "is reserved"),
        ("window", "is declared twice"),
        ("doc", "is declared twice"),
        ("_x", "must be at most 64 letters"),
        ("a b", "must be at most 64 letters"),
        ("\N{CYRILLIC SMALL LETTER A}", "must be at most 64 letters"),
        ("f(x", "a function is declared as"),
        ("f()", "must be at most 64 letters"),
        ("f(q)", "is reserved"),
        ("f(x, x)", "is declared twice"),
        ("f(window)", "is declared twice"),
        ("f(f)", "is declared twice"),
    ],
)
def test_let_names(key: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        mask("q > 1", let={key: "q + 1"})


def test_wrong_number_of_arguments_of_a_let_function() -> None:
    assert "'f' takes 2 arguments, got 1" in refusal("f(q) > 1", let={"f(x, y)": "x + y"})


def test_a_value_that_is_no_text() -> None:
    with pytest.raises(SpecError, match="expected an expression, got \\['q'\\]"):
        compile_variant("v", ["q"])  # type: ignore[arg-type]
