"""Expansion: each list makes kernels, doubles follow their rule, places and hashes say what they should."""

from __future__ import annotations

import json
import textwrap

import pytest

from attngen.errors import SpecError
from attngen.schema import expand, load_spec, load_spec_text, spec_hash
from attngen.schema.expand import MAX_KERNELS, repeats
from attngen.schema.kernel_spec import KernelSpec, Roles
from attngen.schema.models import KernelModel


def kernels(entry: str, head: str = "arch: sm90a") -> tuple[KernelSpec, ...]:
    return expand(load_spec_text(f"schema: 1\n{head}\nkernels:\n  - {entry}\n"))


def test_defaults():
    (kernel,) = kernels("{variant: causal, head_dim: 64}")
    assert kernel == KernelSpec("spec", kernel.variant, "sm90a", 64, 64, "bf16")
    assert kernel.variant.name == "causal"
    assert kernel.spec_file == "spec.yaml"
    assert hash(kernel) == hash(kernels("{variant: causal, head_dim: 64}")[0])


#: A value of each field of an entry.
SAID = {
    "variant": "full", "head_dim": "128", "arch": "sm80", "dtype": "fp16", "kv_dtype": "fp8_e4m3", "out_dtype": "fp16",
    "v": "key", "layout": "varlen", "descale": "64", "passes": "backward", "backend": "triton", "tile": "{m: 64}",
    "pipeline": "{stages: 3}", "warps": "4", "loads": "pointer", "tile_map": "never", "alignment": "16",
    "fast_math": "false", "softmax": "lazy", "softmax_scale": "0.5", "backward": "{dkdv: {stages: 2}}",
    "deterministic": "true", "persistent": "true", "order": "natural", "epilogue": "direct", "transposed_v": "true",
    "max_logits": "true", "pack_gqa": "true", "split_kv": "true", "allow": "[spill]",
}  # fmt: skip

#: What some of them need beside them.
BESIDE = {"backward": {"passes": "[forward, backward]"}, "v": {"head_dim": "{qk: 576, v: 512}"}}


@pytest.mark.parametrize("field", KernelModel.model_fields)
def test_each_field_of_an_entry_decides_about_its_kernels(field: str) -> None:
    """One that nothing reads fails here, as does one that the table lacks."""
    asked = {"variant": "causal", "head_dim": "64", **BESIDE.get(field, {})}
    given, without = (
        kernels(f"{{{', '.join(f'{name}: {value}' for name, value in entry.items())}}}")
        for entry in (asked | {field: SAID[field]}, asked)
    )
    assert given != without


def test_lists_expand_in_order():
    expanded = kernels(
        "{variant: [full, causal], head_dim: [64, {qk: 192, v: 128}], dtype: [bf16, fp16], layout: [dense, varlen]}"
    )
    assert len(expanded) == 16
    assert [k.variant.name for k in expanded] == ["full"] * 8 + ["causal"] * 8
    assert [(k.dtype, k.head_dim_qk, k.head_dim_v, k.layout) for k in expanded[:4]] == [
        ("bf16", 64, 64, "dense"), ("bf16", 64, 64, "varlen"),
        ("bf16", 192, 128, "dense"), ("bf16", 192, 128, "varlen"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "name", "values"),
    [
        ("arch: [sm80, sm90a]", "arch", ["sm80", "sm90a"]),
        ("passes: [forward, backward]", "direction", ["forward", "backward"]),
        ("backend: [triton, cuda]", "backend", ["triton", "cuda"]),
        ("tile: [{m: 64}, {m: 128, n: 64}]", "tile_m", [64, 128]),
        ("pipeline: {stages: [2, 3]}", "stages", [2, 3]),
        ("warps: [4, 8]", "num_warps", [4, 8]),
        ("loads: [pointer, descriptor]", "loads", ["pointer", "descriptor"]),
        ("tile_map: [auto, never, always]", "tile_map", ["auto", "never", "always"]),
        ("alignment: [element, 16]", "alignment", [2, 16]),
        ("fast_math: [true, false]", "fast_math", [True, False]),
        ("softmax: [exact_max, lazy]", "softmax", ["exact_max", "lazy"]),
        ("deterministic: [true, false]", "deterministic", [True, False]),
        ("persistent: [true, false]", "persistent", [True, False]),
        ("order: [longest_first, natural]", "order", ["longest_first", "natural"]),
        ("epilogue: [staged, direct]", "epilogue", ["staged", "direct"]),
        ("layout: [varlen, paged]", "layout", ["varlen", "paged"]),
        ("dtype: [float32, fp8]", "dtype", ["fp32", "fp8_e4m3"]),
    ],
)
def test_each_field_expands(field, name, values):
    assert [getattr(k, name) for k in kernels(f"{{variant: causal, head_dim: 64, {field}}}")] == values


def test_split_kv_adds_a_forward_to_each():
    expanded = kernels("{variant: causal, head_dim: 64, layout: [dense, paged], split_kv: true}")
    assert [(k.layout, k.split_kv) for k in expanded] == [
        ("dense", False), ("dense", True), ("paged", False), ("paged", True),
    ]  # fmt: skip
    assert not any(k.split_kv for k in kernels("{variant: causal, head_dim: 64}"))


def test_a_split_kv_forward_has_no_choices_of_the_ordinary_one():
    given = (
        "tile: [{m: 64, n: 64}, {m: 128}], pipeline: {stages: [2, 3]}, warps: [4, 8], persistent: [true, false], "
        "order: natural, epilogue: direct, pack_gqa: [true, false]"
    )
    (split,) = (k for k in kernels(f"{{variant: causal, head_dim: 64, split_kv: true, {given}}}") if k.split_kv)
    (alone,) = (k for k in kernels("{variant: causal, head_dim: 64, split_kv: true}") if k.split_kv)
    assert split == alone
    both = kernels("{variant: causal, head_dim: 64, split_kv: true, backend: [triton, cuda], fast_math: false}")
    assert [(k.backend, k.fast_math) for k in both if k.split_kv] == [("triton", False), ("cuda", False)]


def test_blocks_that_share_the_keys_of_a_tile_are_a_forward_more():
    given = "tile: {m: 128, n: 64}, warps: {consumer: 2}, pack_gqa: true"
    expanded = kernels(f"{{variant: causal, head_dim: 64, split_kv: tiles, persistent: [true, false], {given}}}")
    assert [(k.split_tiles, k.split_kv, k.persistent, k.tile_n, k.pack_gqa) for k in expanded] == [
        (False, False, True, 64, True), (True, False, None, 64, True), (False, False, False, 64, True),
    ]  # fmt: skip
    both = kernels("{variant: causal, head_dim: 64, split_kv: [true, tiles]}")
    assert [(k.split_kv, k.split_tiles) for k in both] == [(False, False), (True, False), (False, True)]
    assert expanded[1].locate("split_tiles").line == expanded[1].locate("split_kv").line
    with pytest.raises(SpecError, match=r"split_kv: found 'rows'; allowed: true, false, tiles"):
        kernels("{variant: causal, head_dim: 64, split_kv: rows}")


def test_split_kv_is_the_forwards():
    expanded = kernels("{variant: causal, head_dim: 64, split_kv: true, passes: [forward, backward]}")
    assert [(k.direction, k.split_kv) for k in expanded] == [("forward", False), ("forward", True), ("backward", False)]
    with pytest.raises(SpecError, match=r"kernels\[0\].split_kv: is for the forward"):
        kernels("{variant: causal, head_dim: 64, split_kv: true, passes: backward}")


@pytest.mark.parametrize("layout", ["paged", "[dense, paged]"])
@pytest.mark.parametrize("passes", ["backward", "[forward, backward]"])
def test_pages_have_forwards_alone(layout, passes):
    with pytest.raises(SpecError, match=r"spec.yaml:4: kernels\[0\].passes: 'layout: paged' has no backward"):
        kernels(f"{{variant: causal, head_dim: 64, layout: {layout}, passes: {passes}}}")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("head_dim: 64, layout: paged", "'layout: paged' has no jvp; allowed: forward"),
        ("head_dim: {qk: 576, v: 512}, v: key", "'v: key' has no jvp; allowed: forward, backward"),
        ("head_dim: 64, tile: {m: 64, n: 64}", "tile: is for the forward.*; leave it out: the plan of jvp has its own"),
        ("head_dim: 64, backward: {backend: triton}", "'passes' has no backward; allowed: passes: .forward, backward"),
    ],
)
def test_what_forward_mode_derivatives_refuse(fields, told):
    with pytest.raises(SpecError, match=told):
        kernels(f"{{variant: causal, passes: jvp, {fields}}}")


def test_roles():
    (kernel,) = kernels("{variant: full, head_dim: 64, warps: {producer: 1, consumer: 2, registers: {consumer: 240}}}")
    assert kernel.roles == Roles(producer=1, consumer=2, consumer_registers=240)
    assert kernel.num_warps is None


def test_a_kernel_overrides_its_variant():
    text = """\
    schema: 1
    arch: sm90a
    variants: {a: {mask: true, softmax: lazy, softmax_scale: 0.5}}
    kernels:
      - {variant: a, head_dim: 64}
      - {variant: a, head_dim: 64, softmax: exact_max, softmax_scale: 1}
    """
    first, second = expand(load_spec_text(textwrap.dedent(text)))
    assert (first.softmax, first.softmax_scale) == ("lazy", 0.5)
    assert (second.softmax, second.softmax_scale) == ("exact_max", 1)
    assert first.locate("softmax").line == 3
    assert second.locate("softmax").line == 6


def test_own_variant_comes_before_the_preset():
    head = "arch: sm90a\nvariants: {causal: {mask: 'q > kv'}}"
    (kernel,) = kernels("{variant: causal, head_dim: 64}", head)
    assert kernel.variant.mask_text == "q > kv"


def test_places():
    text = """\
    schema: 1
    arch: [sm80, sm90a]
    kernels:
      - variant: [full,
                  causal]
        head_dim: 64
        dtype:
          - bf16
          - fp16
        tile: {m: 64}
    """
    kernel = expand(load_spec_text(textwrap.dedent(text)))[-1]
    lines = {"variant": 5, "arch": 2, "head_dim_qk": 6, "dtype": 9, "tile_n": 10, "tile.m": 10, "stages": 4, "loads": 4}
    assert {name: kernel.locate(name).line for name in lines} == lines
    assert kernel.locate("nonsense").line == 4


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            "{variant: causl, head_dim: 64}",
            ":4: variant: unknown variant 'causl'; did you mean 'causal'?; declared here: none",
        ),
        ("{variant: causal, head_dim: [64, 64]}", "kernels[0].head_dim: 64 is given twice"),
        ("{variant: causal, head_dim: [64, {qk: 64, v: 64}]}", "64 is given twice"),
        ("{variant: [causal, full, causal], head_dim: 64}", "'causal' is given twice"),
        ("{variant: causal, head_dim: 64, dtype: [fp16, float16]}", "'fp16' is given twice"),
        ("{variant: causal, head_dim: 64, tile: [{m: 64}, {m: 64}]}", "a mapping is given twice"),
    ],
)
def test_refuses(entry, says):
    with pytest.raises(SpecError) as caught:
        kernels(entry)
    assert says in str(caught.value)


def test_arch_must_be_named_somewhere():
    with pytest.raises(SpecError, match=r":4: kernels\[0\].arch: missing; name it here or for the whole spec"):
        kernels("{variant: causal, head_dim: 64}", head="package: a")


def test_a_kernel_asked_for_twice_is_built_once():
    text = """\
    schema: 1
    arch: sm90a
    kernels:
      - {variant: [full, causal], head_dim: 64}
      - {variant: causal, head_dim: [64, 128]}
    """
    spec = load_spec_text(textwrap.dedent(text))
    assert [(k.variant.name, k.head_dim_qk) for k in expand(spec)] == [("full", 64), ("causal", 64), ("causal", 128)]
    ((again, first),) = repeats(spec)
    assert (again.location.line, first.location.line) == (5, 4)
    assert expand(spec)[1].location.line == 4


def test_expansion_is_bounded():
    dims = ", ".join(map(str, range(1, 257)))
    tiles = ", ".join(f"{{m: {i}}}" for i in range(1, 257))
    stages = ", ".join(map(str, range(1, 17)))
    lists = f"head_dim: [{dims}], tile: [{tiles}], pipeline: {{stages: [{stages}]}}, warps: [{stages}]"
    with pytest.raises(SpecError, match=f"33,554,432 kernels; a spec builds at most {MAX_KERNELS:,}"):
        kernels(f"{{variant: [full, causal], {lists}}}")


# Hash

SPEC = """\
schema: 1
package: a
arch: sm90a
variants:
  a:
    mask: "q_pos >= kv and kv < window"
    scalars: {window: {type: int32, min: 1}}
kernels:
  - {variant: a, head_dim: [64, 128], dtype: bf16}
"""


def digest(text: str) -> str:
    return spec_hash(load_spec_text(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("schema: 1\n", "# a comment\nschema: 1\n"),
        ("q_pos >= kv and", "q_pos>=kv   and"),
        ("head_dim: [64, 128], dtype: bf16", "dtype: [bfloat16], head_dim: [128, 64]"),
        ("schema: 1\npackage: a\n", "package: a\nschema: 1\n"),
        (
            "{variant: a, head_dim: [64, 128], dtype: bf16}",
            "{variant: a, head_dim: 64}\n  - {variant: a, head_dim: 128}",
        ),
    ],
)
def test_hash_ignores_form(old, new):
    assert old in SPEC
    assert digest(SPEC) == digest(SPEC.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("package: a", "package: b"),
        ("arch: sm90a", "arch: sm80"),
        ("kv < window", "kv <= window"),
        ("min: 1", "min: 2"),
        ("type: int32", "type: int64"),
        ("[64, 128]", "[64, 96]"),
        ("dtype: bf16", "dtype: fp16"),
        ("dtype: bf16", "dtype: bf16, layout: varlen"),
        ("dtype: bf16", "dtype: bf16, layout: paged"),
        ("dtype: bf16", "dtype: bf16, split_kv: true"),
        ("dtype: bf16", "dtype: bf16, tile: {n: 64}"),
        ("dtype: bf16", "dtype: bf16, pipeline: {stages: 2}"),
        ("dtype: bf16", "dtype: bf16, warps: 4"),
        ("dtype: bf16", "dtype: bf16, warps: {producer: 1}"),
        ("dtype: bf16", "dtype: bf16, fast_math: false"),
        ("dtype: bf16", "dtype: bf16, alignment: element"),
        ("dtype: bf16", "dtype: bf16, allow: [spill]"),
        ("dtype: bf16", "dtype: bf16, softmax_scale: 0.5"),
    ],
)
def test_hash_sees_content(old, new):
    assert old in SPEC
    assert digest(SPEC) != digest(SPEC.replace(old, new))


def test_hash_sees_includes(tmp_path):
    (tmp_path / "top.yaml").write_text(
        "schema: 1\narch: sm80\ninclude: base.yaml\nkernels: [{variant: a, head_dim: 64}]\n"
    )
    hashes = set()
    for mask in ("q >= kv", "q > kv"):
        (tmp_path / "base.yaml").write_text(f"schema: 1\nvariants: {{a: {{mask: '{mask}'}}}}\n")
        hashes.add(spec_hash(load_spec(tmp_path / "top.yaml")))
    assert len(hashes) == 2


def test_to_dict_is_json_without_places(tmp_path):
    (kernel,) = kernels("{variant: sink_window, head_dim: 64, warps: {producer: 1}}")
    text = json.dumps(kernel.to_dict())
    assert "spec.yaml" not in text
    assert json.loads(text)["variant"]["name"] == "sink_window"
