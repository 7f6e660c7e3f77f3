"""Loading: what a spec says comes out, and each mistake is told with its place and what is allowed."""

from __future__ import annotations

import os
import textwrap
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

import attngen
from attngen.errors import SpecError
from attngen.lang.ir import Const
from attngen.lang.variant import Variant, VariantText
from attngen.schema import load_spec, load_spec_text, loading
from attngen.schema.models import VariantModel

HEAD = "schema: 1\narch: [sm90a]\n"
IN_VARIANT = HEAD + "variants:\n  a:\n    "
IN_KERNELS = HEAD + "kernels:\n  - "


def load(text: str):
    return load_spec_text(textwrap.dedent(text))


def refuse(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(text)
    return str(caught.value)


def test_design_example():
    spec = load(
        """\
        schema: 1
        package: attngen_hopper
        arch: [sm90a]

        variants:
          sliding_window:
            mask: "0 <= q_pos - kv and q_pos - kv < window"
            scalars: {window: {type: int32, min: 1}}
          alibi:
            mask: "q_pos >= kv"
            score: "s + slope[h] * (kv - q_pos)"
            tensors: {slope: {dtype: float32, shape: [h]}}
          packed_documents:
            mask: "q_pos >= kv and doc[b, q_pos] == doc[b, kv]"
            tensors: {doc: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1, order: nondecreasing}}}

        kernels:
          - variant: [causal, sliding_window, alibi]
            head_dim: [64, 128, {qk: 192, v: 128}]
            dtype: [bf16, fp16]
            layout: [dense, varlen]
            passes: [forward, backward]
            backend: cuda
            tile: {m: 128, n: 128}
            pipeline: {stages: 2}
            warps: {producer: 1, consumer: 2, schedule: pingpong, overlap: true,
                    registers: {producer: 24, consumer: 240}}
            fast_math: true
            allow: []
        """
    )
    assert spec.package == "attngen_hopper"
    assert list(spec.variants) == ["sliding_window", "alibi", "packed_documents"]
    window = spec.variants["sliding_window"].variant
    assert window.scalars[0].name == "window"
    assert window.scalars[0].dtype == "int32"
    assert window.scalars[0].min == 1
    assert spec.variants["alibi"].variant.tensors[0].dtype == "fp32"
    doc = spec.variants["packed_documents"].variant.tensors[0]
    assert doc.shape == ("b", "seqlen_k")
    assert doc.monotone is not None
    assert doc.monotone.axis == 1


def test_constant_scalars():
    spec = load(
        """\
        schema: 1
        variants:
          a:
            mask: "kv < near + far"
            scalars:
              near: {type: int32, const: 3}
              far: {type: int32, const: true, default: 4}
        """
    )
    near, far = spec.variants["a"].variant.scalars
    assert (near.const, far.const) == (3, 4)


def test_let_and_numbers_as_expressions():
    spec = load(
        """\
        schema: 1
        variants:
          a:
            let: {"f(x)": "x * 2", far: "f(kv)", half: 0.5}
            mask: "far < q"
            score: "s * half"
          b: {mask: true, score: 0}
        """
    )
    assert spec.variants["a"].variant.masked
    assert isinstance(spec.variants["b"].variant.score, Const)


def test_package_comes_from_the_file_name(tmp_path):
    path = tmp_path / "My-masks.yaml"
    path.write_text(HEAD)
    assert load_spec(path).package == "my_masks"
    path = tmp_path / "2d.yaml"
    path.write_text(HEAD)
    with pytest.raises(SpecError, match="package: missing, and the file's name gives none"):
        load_spec(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kernels: []", ":1: schema: missing; write 'schema: 1'"),
        ("schema: 2", ":1: schema: found 2; allowed: 1; it was written for a newer attngen"),
        ("schema: 0", ":1: schema: found 0; allowed: 1"),
        ("schema: '1'", ":1: schema: found '1'; allowed: 1"),
        ("schema: true", ":1: schema: found true; allowed: 1"),
        ("- schema: 1", ":1: found a list; a spec is a mapping"),
        ("just text", "found 'just text'; a spec is a mapping"),
        (HEAD + "kernel: []", ":3: kernel: unknown field; did you mean 'kernels'?; allowed: schema, package"),
        (HEAD + "kernels: {}", ":3: kernels: found a mapping; allowed: a list"),
        (HEAD + "variants: []", ":3: variants: found a list; allowed: a mapping"),
        (HEAD + "package: MyKernels", ":3: package: found 'MyKernels'; did you mean 'mykernels'?; allowed: at most 48"),
        (HEAD + "package: class", ":3: package: found 'class'; allowed: no Python keyword"),
        (IN_VARIANT + "maks: 'q >= kv'", ":5: variants.a.maks: unknown field; did you mean 'mask'?"),
        (IN_VARIANT + "mask: [1]", ":5: variants.a.mask: found a list; allowed: an expression, true"),
        (IN_VARIANT + "mask: 'q >= seqlen_kk'", ":5: mask: unknown name 'seqlen_kk'; did you mean"),
        (IN_VARIANT + "mask: 'kv < w'\n    scalars: {w: {min: 1}}", ":6: variants.a.scalars.w.type: missing"),
        (IN_VARIANT + "scalars: {w: {type: int33}}", "did you mean 'int32'?; allowed: int32, int64, fp32"),
        (IN_VARIANT + "scalars: {w: {type: int32, min: true}}", "w.min: found true; allowed: a number, or"),
        (IN_VARIANT + "scalars: {w: {type: int32, min: 5, max: 4}}", "exceeds max 4"),
        (IN_VARIANT + "scalars: {w: {type: int32, default: 0.5}}", ":5: scalars.w.default: must be an int"),
        (IN_VARIANT + "scalars: {w: {type: int32, const: true}}", "'const: true' fixes the value"),
        (IN_VARIANT + "tensors: {t: {dtype: int32, shape: [heads]}}", "found 'heads'; did you mean 'h'?"),
        (IN_VARIANT + "tensors: {t: {dtype: int32, shape: [0]}}", ":5: variants.a.tensors.t.shape[0]: found 0"),
        (IN_VARIANT + "tensors: {t: {dtype: int32, shape: h}}", "t.shape: found 'h'; allowed: a list"),
        (IN_VARIANT + "tensors: {t: {dtype: int32, shape: [h], monotone: {axis: 1}}}", "monotone.axis"),
        (IN_VARIANT + "tensors: {t: {dtype: int32, shape: [h], monotone: {axis: 0, order: up}}}",
         "order: found 'up'; allowed: nondecreasing"),
        (IN_KERNELS + "head_dim: 64", ":4: kernels[0].variant: missing"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, dtype: [bf16, fp61]}",
         ":4: kernels[0].dtype[1]: found 'fp61'; did you mean 'fp16'?; allowed: bf16, fp16, fp32"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, dtype: fp61}", "kernels[0].dtype: found 'fp61'"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, dtype: []}", "kernels[0].dtype: found an empty list"),
        (IN_KERNELS + "{variant: causal, head_dim: wide}", "found 'wide'; allowed: an integer or a mapping"),
        (IN_KERNELS + "{variant: causal, head_dim: {qk: 64}}", "kernels[0].head_dim.v: missing"),
        (IN_KERNELS + "{variant: causal, head_dim: 0}", "head_dim.qk: found 0; allowed: at least 1"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, tile: {m: '64'}}", "tile.m: found '64'; allowed: an integer"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, fast_math: yes}", "found 'yes'; allowed: true or false"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, alignment: 3}", "allowed: element, 2, 4, 8, 16"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, allow: [spil]}", "did you mean 'spill'?"),
        (IN_KERNELS + "{variant: causal, head_dim: 64, warps: {count: 4, producer: 1}}", "'count' is for a kernel"),
        ("schema: 1\narch: [sm90]", ":2: arch[0]: found 'sm90'; did you mean 'sm90a'?; allowed: sm80, sm86"),
    ],
)  # fmt: skip
def test_mistakes_are_told(text, says):
    assert says in refuse(text)


def test_every_mistake_of_a_file_is_told():
    message = refuse(IN_KERNELS + "{variant: causal, head_dm: 64}\n  - {variant: 3, head_dim: 64, dtype: fp8_}\n")
    lines = message.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["spec.yaml:4", "spec.yaml:5", "spec.yaml:5"]
    assert "head_dm: unknown field; did you mean 'head_dim'?" in lines[0]  # and not that it is missing as well


def test_a_file_that_is_not_there_has_a_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/my_mask.yaml").touch()
    for asked in ("specs/my_maks.yaml", "my_mask.yaml"):
        with pytest.raises(SpecError, match=f"there is no file '{asked}'; did you mean 'specs/my_mask.yaml'?"):
            load_spec(asked)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(SpecError, match="there is no file"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="is a folder; name a YAML file in it"):
        load_spec(tmp_path)
    with pytest.raises(SpecError):
        load_spec("bad\0name.yaml")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * 10_000_000)
    with pytest.raises(SpecError, match=r"larger than 1,000,000 bytes"):
        load_spec(big)


# Includes


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(textwrap.dedent(text))


def test_include_brings_variants_only(tmp_path):
    (tmp_path / "masks").mkdir()
    write(
        tmp_path / "masks",
        mine="schema: 1\narch: sm80\nvariants: {a: {mask: 'q >= kv'}}\nkernels: [{variant: a, head_dim: 64}]\n",
    )
    write(tmp_path, top="schema: 1\ninclude: masks/mine.yaml\n")
    spec = load_spec(tmp_path / "top.yaml")
    assert list(spec.variants) == ["a"]
    assert spec.model.kernels == ()
    assert [source.name for source in spec.sources] == ["top.yaml", "mine.yaml"]


def test_a_file_included_twice_is_read_once(tmp_path):
    write(
        tmp_path,
        base="schema: 1\nvariants: {a: {mask: 'q >= kv'}}\n",
        left="schema: 1\ninclude: base.yaml\n",
        right="schema: 1\ninclude: base.yaml\n",
        top="schema: 1\ninclude: [left.yaml, right.yaml]\n",
    )
    assert list(load_spec(tmp_path / "top.yaml").variants) == ["a"]


def test_two_files_may_not_declare_one_name(tmp_path):
    write(
        tmp_path,
        base="schema: 1\nvariants: {a: {mask: true}}\n",
        top="schema: 1\ninclude: base.yaml\nvariants: {a: {mask: true}}\n",
    )
    with pytest.raises(
        SpecError, match=r"top.yaml:2: include: variant 'a' of .*base.yaml:2 is already declared in .*top.yaml:3"
    ):
        load_spec(tmp_path / "top.yaml")


@pytest.mark.parametrize("files", [{"top": "top.yaml"}, {"top": "a.yaml", "a": "b.yaml", "b": "./top.yaml"}])
def test_include_circles(tmp_path, files):
    write(tmp_path, **{name: f"schema: 1\ninclude: {target}\n" for name, target in files.items()})
    with pytest.raises(SpecError, match=r"circular includes: top\.yaml -> "):
        load_spec(tmp_path / "top.yaml")


def test_include_chain_is_bounded(tmp_path):
    write(tmp_path, **{f"f{i}": f"schema: 1\ninclude: f{i + 1}.yaml\n" for i in range(40)})
    with pytest.raises(SpecError, match="includes deep"):
        load_spec(tmp_path / "f0.yaml")


@pytest.mark.parametrize(
    "target",
    ["../secret.yaml", "masks/../../secret.yaml", "/etc/passwd", "..", ".", "~/x.yaml", "C:/x.yaml",
     "..\\\\secret.yaml", "a\\0b.yaml", "a\\nb.yaml", "x" * 300, "", "link.yaml", "folder/secret.yaml", "no such.yaml", "file:///etc/passwd"],
)  # fmt: skip
def test_include_stays_in_the_folder(tmp_path, target):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.yaml").write_text("schema: 1\nvariants: {a: {mask: true}}\n")
    os.symlink(tmp_path / "secret.yaml", inner / "link.yaml")
    os.symlink(tmp_path, inner / "folder")
    (inner / "top.yaml").write_text(f'schema: 1\ninclude: "{target}"\n')
    with pytest.raises(SpecError):
        load_spec(inner / "top.yaml")


def test_mistakes_in_an_include_name_that_file(tmp_path):
    write(tmp_path, base="schema: 1\nvariants:\n  a: {mask: 'q >='}\n", top="schema: 1\ninclude: base.yaml\n")
    with pytest.raises(SpecError, match=r"base\.yaml:3: mask: "):
        load_spec(tmp_path / "top.yaml")


def test_every_field_of_a_variant_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec could say one that is not without any effect."""
    handed: set[str] = set()
    compiled = loading.compile_variant

    def noted(name: str, **given: Any) -> Variant:
        handed.update(given)
        return compiled(name, **given)

    monkeypatch.setattr(loading, "compile_variant", noted)
    load(IN_VARIANT + "mask: true")
    wanted = VariantModel.model_fields.keys() - {"description", "softmax", "softmax_scale"}  # these are of kernels
    assert wanted <= handed
    assert wanted <= signature(attngen.variant).parameters.keys()
    wanted -= {"blocks"}  # it becomes a condition of the mask, and a tensor
    assert wanted <= {field.name for field in fields(Variant)}
    assert wanted <= {field.name for field in fields(VariantText)}
