"""Fuzzing: whatever a file holds, loading it ends in kernels or in one SpecError."""

from __future__ import annotations

import random
import re
import string

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attngen import resources
from attngen.errors import SpecError
from attngen.plan.planner import plan
from attngen.schema import expand, load_spec_text, spec_hash
from attngen.schema.lint import lint

RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

WORDS = "causal full a b window t mask q_pos>=kv kv bf16 fp16 int32 float32 sm90a dense varlen 64 seqlen_k element auto"
NAMES = (
    "schema package arch include variants kernels mask score scalars tensors let type dtype shape min max const "
    "default grad monotone axis order range head_dim qk v variant layout passes backend tile m n pipeline stages warps "
    "producer consumer registers loads tile_map alignment fast_math softmax allow a b window"
)
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12),
    st.sampled_from(WORDS.split()),
)  # fmt: skip
FIELDS = st.one_of(st.sampled_from(NAMES.split()), st.text(max_size=6))
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(FIELDS, inner, max_size=5)),
    max_leaves=25,
)

EXPRESSIONS = st.one_of(
    st.sampled_from(["q_pos >= kv", "kv < w", "t[b, kv] == t[b, q]", "s * 2", "w // 0", "t[", "f(x)", "().__class__"]),
    st.text(alphabet="qkvsbhwt_pos[]()+-*/%<>=!&|^~ ,.0123456789'\"\\{}and or not if else", max_size=40),
    st.text(max_size=20),
)
SCALARS = st.fixed_dictionaries(
    {"type": st.sampled_from(["int32", "int64", "float32", "bool", "x"])},
    optional={
        key: st.one_of(st.integers(-(2**40), 2**40), st.booleans(), st.floats(), st.just("seqlen_k"))
        for key in ("min", "max", "const", "default")
    },
)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["int32", "float32", "bool", "bf16", "int64"]),
        "shape": st.lists(
            st.one_of(st.integers(-1, 2**33), st.sampled_from(["b", "h", "seqlen_k", "n", "w"])), max_size=4
        ),
    },
    optional={
        "monotone": st.fixed_dictionaries({"axis": st.integers(-1, 4)}),
        "range": ANYTHING,
        "grad": st.booleans(),
    },
)
GOOD = st.fixed_dictionaries(
    {
        "mask": st.sampled_from(
            ["q_pos >= kv", "kv < x", "t[b, kv] >= u[b]", "abs(q - kv) % (abs(x) + 1) == 0", "y < x"]
        ),
        "score": st.sampled_from(["s", "s * x", "tanh(s) + t[b, kv]", "s - abs(q_pos - kv) * 2 ** -h", "f(s)"]),
        "scalars": st.just({"x": {"type": "int32", "min": -4}}),
        "tensors": st.just(
            {
                "t": {"dtype": "int32", "shape": ["b", "seqlen_k"], "monotone": {"axis": 1}},
                "u": {"dtype": "int64", "shape": ["b"]},
            }
        ),
        "let": st.just({"y": "q // 2 + kv", "f(z)": "z * z - 1"}),
    }
)
WILD = st.fixed_dictionaries(
    {},
    optional={
        "mask": st.one_of(EXPRESSIONS, st.booleans()),
        "score": EXPRESSIONS,
        "scalars": st.dictionaries(st.sampled_from(["w", "x", "kv"]), SCALARS, max_size=2),
        "tensors": st.dictionaries(st.sampled_from(["t", "u"]), TENSORS, max_size=2),
        "let": st.dictionaries(st.sampled_from(["y", "f(x)", "g(x, y)", "f(", "s"]), EXPRESSIONS, max_size=2),
    },
)
PLAUSIBLE = {
    "head_dim": [64, 128, [80, 256], {"qk": 192, "v": 128}, 72, {"qk": 40, "v": 8}, 65, 512],
    "dtype": ["bf16", ["fp16", "fp32"], "fp8"],
    "layout": ["dense", "varlen", ["dense", "varlen"], "paged", ["dense", "paged"]],
    "split_kv": [True, False],
    "tile": [{"m": 64}, {"n": 32}, {"m": 128, "n": 256}, {"m": 48}],
    "pipeline": [{"stages": 1}, {"stages": [2, 16]}],
    "warps": [4, [1, 8], 3, {"producer": 1}],
    "alignment": ["element", 16, 8],
    "passes": ["forward", ["forward", "backward"]],
    "arch": ["sm80", "sm120a", ["sm86", "sm100a"]],
    "loads": ["pointer", "descriptor"],
    "tile_map": ["auto", "never", "always"],
    "fast_math": [True, False, [True, False]],
    "softmax": ["exact_max", "lazy"],
    "softmax_scale": [0.5, 1, -1],
    "deterministic": [True],
    "persistent": [True, False],
    "order": ["longest_first", "natural"],
    "epilogue": ["staged", "direct"],
    "allow": [[], ["spill"]],
}


def mostly(name: str) -> st.SearchStrategy[object]:
    """A plausible value of a field, seldom anything at all."""
    return st.one_of(*[st.sampled_from(PLAUSIBLE[name])] * 19, ANYTHING)


VARIANTS = st.one_of(GOOD, GOOD, WILD)
KERNELS = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(["a", "b", "causal", "allowed", ["a", "alibi"], ["packed_documents", "chunked"]]),
        "head_dim": mostly("head_dim"),
    },
    optional={name: mostly(name) for name in PLAUSIBLE if name != "head_dim"},
)
SPECS = st.fixed_dictionaries(
    {"schema": st.just(1), "arch": st.just("sm90a")},
    optional={
        "variants": st.dictionaries(st.sampled_from(["a", "b", "causal"]), VARIANTS, max_size=2),
        "kernels": st.lists(KERNELS, min_size=1, max_size=2),
        "package": st.sampled_from(["fuzz", "fuzz", "Fuzz", "../x"]),
    },
)


#: Words that no message may hold: they tell of the program, not of the file.
RAW = re.compile(
    r"\bNone\b|NoneType|pydantic|Traceback|\w+_type\b|input_value|https?:|[Ii]nput should"
    r"|(String|Value|List) (should|error)|validation error|\b1 (errors|elements|kernels|characters|files)\b"
)


def survive(text: str) -> bool:
    """Load, expand, lint, hash and plan; whether that worked. Any exception but a SpecError is a failure."""
    try:
        spec = load_spec_text(text, "fuzz.yaml")
        kernels = expand(spec)
        lint(spec, kernels)
        spec_hash(spec)
        for kernel in kernels[:8]:
            kernel.to_dict()
            plan(kernel)
    except SpecError as error:
        message = str(error)
    else:
        return True
    message.encode()
    raw = RAW.search(message)
    assert raw is None or raw[0] in text, message
    return False


@settings(RELAXED, max_examples=8)
@given(ANYTHING)
def test_any_yaml_is_a_spec_or_a_clear_error(value):
    survive(yaml.safe_dump(value, allow_unicode=True))


@settings(RELAXED, max_examples=8)
@given(SPECS)
def test_almost_valid_specs_are_specs_or_clear_errors(value):
    survive(yaml.safe_dump(value, allow_unicode=True, sort_keys=False))


@settings(RELAXED, max_examples=40)
@given(st.text(max_size=300))
def test_any_text_is_a_spec_or_a_clear_error(text):
    survive(text)


@pytest.mark.exhaustive
@pytest.mark.long
@settings(RELAXED, max_examples=10_000)
@given(SPECS)
def test_ten_thousand_almost_specs(value):
    survive(yaml.safe_dump(value, allow_unicode=True, sort_keys=False))


def test_damaged_specs():
    """Specs that ship, with a few characters changed, moved or lost."""
    texts = [path.read_text() for path in sorted(resources.specs_dir().rglob("*.yaml")) if path.stem != "hopper_all"]
    chance = random.Random(0)
    survived = 0
    for _ in range(30):
        text = chance.choice(texts)
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(text))
            end = min(len(text), start + chance.choice([0, 1, 1, 2, 20]))
            insert = "".join(chance.choices(string.printable + "\0é\u202e", k=chance.choice([0, 1, 1, 3])))
            text = text[:start] + insert + text[end:]
        survived += survive(text)
    assert survived > 1  # comments and texts may change without harm
