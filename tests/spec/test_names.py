"""Hostile names: whatever could leave its folder, its string or its comment is refused."""

from __future__ import annotations

import json

import pytest

from attngen.errors import SpecError
from attngen.spec import load_spec, load_spec_text

HOSTILE = [
    "../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "C:x", "con.", "x\0y", "x\x00", "a\nb", "a\r\nb", "a\n",
    "a'b", 'a"b', "a`b", '"""', "'''", "*/", "/*", "//", "{{", "{{ x }}", "${x}", "<%", "%>", "#%", "//%",
    "a;b", "a b", " a", "a ", "", "a-b", "a.b", "a:b", "a,b", "a[0]", "a()", "x = 1", "1a", "_a", "a__b", "__import__",
    "\u0430", "c\u0430usal", "\uff41", "a\u0301", "\u00aa", "a\u200b", "\u202ea", "\ud800", "x" * 65, "x" * 100_000,
    "class", "lambda", "import", "None", "True",
]  # fmt: skip


def quoted(name: str) -> str:
    return json.dumps(name)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize(
    "template",
    [
        "package: {}",
        "variants: {{ {}: {{mask: true}} }}",
        "variants: {{a: {{mask: true, scalars: {{ {}: {{type: int32}} }} }} }}",
        "variants: {{a: {{mask: true, tensors: {{ {}: {{dtype: int32, shape: [h]}} }} }} }}",
        "variants: {{a: {{mask: true, tensors: {{t: {{dtype: int32, shape: [{}]}} }} }} }}",
        "variants: {{a: {{mask: true, scalars: {{t: {{type: int32, min: {}}} }} }} }}",
        "variants: {{a: {{mask: true, let: {{ {}: kv }} }} }}",
        "kernels: [{{variant: {}, head_dim: 64}}]",
        "include: {}",
    ],
)
def test_hostile_names(template, name):
    with pytest.raises(SpecError) as caught:
        load_spec_text("schema: 1\narch: sm90a\n" + template.format(quoted(name)))
    assert len(str(caught.value)) < 2000
    str(caught.value).encode()  # whatever it quotes can be printed


@pytest.mark.parametrize(
    "name",
    ["q", "kv", "s", "h", "seqlen_k", "variant", "backend", "softmax_scale", "max", "tanh", "inf", "tl", "return",
     "int", "template", "default", "register"],
)  # fmt: skip
@pytest.mark.parametrize(
    "section", ["scalars: {{ {}: {{type: int32}} }}", "tensors: {{ {}: {{dtype: int32, shape: [h]}} }}"]
)
def test_reserved_names(section, name):
    with pytest.raises(SpecError, match="reserved"):
        load_spec_text(f"schema: 1\nvariants: {{a: {{mask: true, {section.format(name)} }} }}")


def test_one_name_stands_for_one_thing():
    variant = "{mask: 'x < 1', scalars: {x: {type: int32}}, tensors: {x: {dtype: int32, shape: []}}}"
    with pytest.raises(SpecError, match="twice"):
        load_spec_text(f"schema: 1\nvariants: {{a: {variant}}}")


@pytest.mark.parametrize(
    "name", ["a*b.yaml", "a\nb.yaml", 'a"b.yaml', "a{{b.yaml", "c\u0430usal.yaml", "a b.yaml", "-x.yaml"]
)
def test_hostile_file_names(tmp_path, name):
    path = tmp_path / name
    path.write_text("schema: 1\npackage: a\n")
    with pytest.raises(SpecError, match="file name"):
        load_spec(path)


def test_look_alike_letters_are_named():
    with pytest.raises(SpecError, match="CYRILLIC SMALL LETTER A"):
        load_spec_text("schema: 1\nvariants: {c\u0430usal: {mask: true}}")
