"""Hostile names: whatever could leave its folder, its string or its comment is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from attngen.errors import SpecError
from attngen.schema import load_spec, load_spec_text, names
from tests.sampling import few, sampled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOSTILE = [
    "../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "C:x", "con.", "x\0y", "x\x00", "a\nb", "a\r\nb", "a\n",
    "a'b", 'a"b', "a`b", '"""', "'''", "*/", "/*", "//", "{{", "{{ x }}", "${x}", "<%", "%>", "#%", "//%",
    "a;b", "a b", " a", "a ", "", "a-b", "a.b", "a:b", "a,b", "a[0]", "a()", "x = 1", "1a", "_a", "a__b", "__import__",
    "\u0430", "c\u0430usal", "\uff41", "a\u0301", "\u00aa", "a\u200b", "\u202ea", "\ud800", "x" * 65, "x" * 100_000,
    "class", "lambda", "import", "None", "True",
]  # fmt: skip


def quoted(name: str) -> str:
    return json.dumps(name)


@sampled(
    name={str(place): name for place, name in enumerate(HOSTILE)},
    template=[
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
    ["q", "kv", "s", "h", "seqlen_k", "variant", "backend", "softmax_scale", "max", "tanh", "inf", "return", "int",
     "class"],
)  # fmt: skip
@pytest.mark.parametrize(
    "section", ["scalars: {{ {}: {{type: int32}} }}", "tensors: {{ {}: {{dtype: int32, shape: [h]}} }}"]
)
def test_reserved_names(section, name):
    with pytest.raises(SpecError, match="reserved"):
        load_spec_text(f"schema: 1\nvariants: {{a: {{mask: true, {section.format(name)} }} }}")


@few(
    "name",
    ["template", "register", "default", "tl", "triton", "acc", "kStages", "first", "BLOCK_N", "qk"],
    always=range(0, 999, 3),
)
@pytest.mark.parametrize(
    "section", ["scalars: {{ {}: {{type: int32}} }}", "tensors: {{ {}: {{dtype: int32, shape: [h]}} }}"]
)
def test_names_of_kernels_are_free(section, name):
    """Names of a user have a namespace of their own in kernels."""
    load_spec_text(f"schema: 1\nvariants: {{a: {{mask: true, {section.format(name)} }} }}")


REQUIRED = {
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "nvidia-cuda-nvrtc-cu12": "nvidia",
    "nvidia-cuda-nvcc-cu12": "nvidia",
    "pre-commit": "pre_commit",
    "pytest-xdist": "xdist",
    "pytest-cov": "pytest_cov",
    "PyYAML": "yaml",
}


def required_modules() -> set[str]:
    """Return the modules of all that attngen's own pyproject.toml asks for, extras included, but for the site's."""
    tables = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = [texts for extra, texts in tables["optional-dependencies"].items() if extra != "docs"]
    texts = [*tables["dependencies"], *(text for extra in extras for text in extra)]
    return {REQUIRED.get(name, name) for name in (re.split(r"[\[<>=]", text)[0] for text in texts)}


@few(
    "name",
    sorted({"click", "test", "torch", "json", "attngen", "cuda", "this", "antigravity", "concurrent"}
           | required_modules()), always=range(0, 999, 3))  # fmt: skip
def test_a_package_hides_no_module_that_others_import(name, tmp_path):
    """A name that a file gives its package is checked as well."""
    advice = f"'{name}' is a module that programs import, .* such as 'attngen_{name}'"
    with pytest.raises(SpecError, match=f":2: package: {advice}"):
        load_spec_text(f"schema: 1\npackage: {name}\narch: sm90a\n")
    (tmp_path / f"{name}.yaml").write_text("schema: 1\narch: sm90a\n")
    with pytest.raises(SpecError, match=advice):
        load_spec(tmp_path / f"{name}.yaml")
    assert load_spec_text(f"schema: 1\npackage: attngen_{name}\narch: sm90a\n").package == f"attngen_{name}"


def test_every_module_of_python_is_taken_and_no_variant_minds():
    assert sys.stdlib_module_names <= names.TAKEN
    assert names.check_variant_name("select") == "select"
    for name in sys.stdlib_module_names:
        with pytest.raises(ValueError):
            names.check_package_name(name)


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
