"""The JSON Schema accepts every spec that ships and marks misspelt fields."""

from __future__ import annotations

import copy

import pytest

from attngen import resources
from attngen.errors import SpecError
from attngen.schema import json_schema, load_spec_text, tree
from tests.sampling import few

jsonschema = pytest.importorskip("jsonschema")
SPECS = sorted(resources.specs_dir().rglob("*.yaml"))

EVERYTHING = """\
schema: 1
package: a
arch: [sm80, sm90a]
include: [x.yaml]
variants:
  a:
    description: text
    mask: "kv < w"
    score: 0
    let: {"f(x)": "x"}
    scalars: {w: {type: int32, min: 1, max: seqlen_k, default: 3, const: false, grad: false}}
    tensors: {t: {dtype: float32, shape: [b, 3, n], monotone: {axis: 1}, range: {min: 0, max: 1}, grad: true}}
    softmax: lazy
    softmax_scale: 1
kernels:
  - variant: a
    head_dim: {qk: 192, v: 128}
    dtype: bf16
    tile: {m: 64}
    pipeline: {stages: [2, 3]}
    warps: {producer: 1, consumer: 2, schedule: pingpong, overlap: true, registers: {producer: 24, consumer: 240}}
    alignment: element
    allow: [spill]
    fast_math: false
  - {variant: [a, causal], head_dim: [64, {qk: 64, v: 32}], warps: [4, 8], tile: [{m: 64, n: 64}], loads: pointer}
"""


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@few("path", SPECS, ids=lambda path: path.stem, always=range(0, 999, 4))
def test_accepts_what_ships(validator, path):
    assert list(validator.iter_errors(tree.parse(path.read_bytes(), path.name).plain())) == []


def test_accepts_every_field(validator):
    assert list(validator.iter_errors(tree.parse(EVERYTHING.encode(), "x").plain())) == []


def mappings(value, path=()):
    """Yield the path of each mapping whose keys are fields rather than names."""
    if isinstance(value, dict):
        if not path or path[-1] not in ("variants", "scalars", "tensors", "let"):
            yield path
        for key, item in value.items():
            yield from mappings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from mappings(item, (*path, index))


DATA = tree.parse(EVERYTHING.encode(), "x").plain()


@pytest.mark.parametrize("path", list(mappings(DATA)), ids=lambda path: ".".join(map(str, path)) or "top")
def test_rejects_a_misspelt_field(validator, path):
    broken = copy.deepcopy(DATA)
    inner = broken
    for step in path:
        inner = inner[step]
    inner["misspelt"] = 1
    assert not validator.is_valid(broken)


@pytest.mark.parametrize(
    "text",
    [
        "package: a",
        "schema: 2",
        "schema: 1\narch: sm90",
        "schema: 1\nvariants: {Causal: {mask: true}}",
        "schema: 1\nvariants: {'../x': {mask: true}}",
        "schema: 1\nvariants: {a: {scalars: {w: {type: int31}}}}",
        "schema: 1\nkernels: [{head_dim: 64}]",
        "schema: 1\nkernels: [{variant: causal, head_dim: 64, dtype: []}]",
        "schema: 1\nkernels: [{variant: causal, head_dim: '64'}]",
        "schema: 1\nkernels: [{variant: causal, head_dim: 64, alignment: 3}]",
    ],
)
def test_rejects_what_the_loader_rejects(validator, text):
    assert not validator.is_valid(tree.parse(text.encode(), "x").plain())
    with pytest.raises(SpecError):
        load_spec_text(text)
