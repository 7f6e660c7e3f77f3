"""Variants made in Python: the same language, checks and carets as in a spec, and names wherever names go."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import attngen
from attngen.errors import CallError, LoadError, SpecError
from attngen.inspect.picture import Picture
from attngen.lang.check import compile_variant, restore_variant
from attngen.plan.planner import plan
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text, preset, preset_names
from attngen.schema.presets import declared_preset
from tests.runtime.support import FakeDriver, kernel
from tests.sampling import few

WINDOW: dict[str, Any] = {"window": {"dtype": "int32", "shape": ["h"], "range": {"min": 1, "max": 65536}}}


def windows() -> Any:
    return attngen.variant("0 <= q_pos - kv and q_pos - kv < window[h]", tensors=WINDOW, name="my_mask")


#: Wrong fields, each of which a spec refuses as well.
WRONG: list[dict[str, Any]] = [
    {"mask": "q_pos >= windw", "tensors": WINDOW},
    {"mask": "q_pos >= kv", "tensors": {"w": {"dtype": "int3", "shape": ["h"]}}},
    {"mask": "q_pos >= kv", "tensors": {"w": {"dtype": "int32", "shape": "h!"}}},
    {"mask": "q_pos >= kv", "tensors": {"w": {"dtype": "int32", "shape": [0]}}},
    {"mask": "q_pos >= kv", "tensors": [1]},
    {"mask": "q_pos >= kv", "tensors": {"kv": {"dtype": "int32", "shape": []}}},
    {"mask": "q_pos >= kv", "scalars": {"w": {"typ": "int32"}}},
    {"mask": "q_pos >= kv", "scalars": {"w": {"type": "int32", "min": None}}},
    {"mask": "q_pos >= kv", "scalars": {"w": {"type": "int32", "min": 4, "max": 3}}},
    {"mask": "q_pos >= kv", "let": {"s": "1"}},
    {"mask": "q_pos >= kv", "let": {"f(x": "1"}},
    {"mask": "q_pos // seqlen_k >= kv // (q - q)"},
    {"mask": "kv"},
    {"mask": 3},
    {"mask": "s > 0"},
    {"score": "s +"},
    {"score": True},
    {"sink": "q * 1.0"},
    {"dropout": "yes"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_errors_have_the_words_of_those_of_a_spec(fields: dict[str, Any]) -> None:
    """A spec's error names file, line and the path to the variant; Python's names the argument."""
    import yaml

    with pytest.raises(SpecError) as caught:
        attngen.variant(**fields)
    error = caught.value
    text = yaml.safe_dump({"schema": 1, "variants": {"custom": fields}}, sort_keys=False)
    with pytest.raises(SpecError) as caught:
        load_spec_text(text)
    wanted = re.sub(r"spec\.yaml:\d+: ", "", str(caught.value)).replace("variants.custom.", "")
    assert sorted(wanted.splitlines()) == sorted(str(error).splitlines())
    assert error.location is None
    assert error.to_dict()["file"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": "q_pos >= kv\x00"}, "mask: character U+0000"),
        ({"let": {"a\u202e": "1"}}, "let: character U+202E"),
        ({"score": float("nan")}, "score: found nan; a number must be finite"),
        ({"scalars": {"w": {"type": "int32", "const": 2**70}}}, "scalars.w.const: found 1180591620717411303424; an"),
        ({"scalars": {1: {}}}, "scalars: found 1; a field's name must be text"),
        ({"name": "Mine"}, "name: found 'Mine'; did you mean 'mine'?; allowed"),
        ({"name": "a__b"}, "name: found 'a__b'"),
        ({"tensors": {"w": {"dtype": "int32", "shape": [torch.zeros(1)]}}}, "tensors.w.shape"),
        ({"mask": np.ones((2, 2), dtype=bool)}, "mask: found"),
        ({"dropout": np.ones(2)}, "dropout: found"),
        ({"mask": max}, "mask: found a function; allowed: an expression, as text"),
        ({"score": max}, "score: found a function; allowed: an expression, as text"),
    ],
)
def test_fields_that_no_file_could_hold_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        attngen.variant(**fields)


@few("name", preset_names(), always=range(0, 999, 3))
def test_a_variant_computes_the_same_as_its_fields_in_a_spec(name: str) -> None:
    """The variant's own YAML says the same again."""
    fields = declared_preset(name).model.model_dump(exclude_unset=True, exclude={"description"})
    made = attngen.variant(name=name, **fields)
    assert made.value == preset(name)
    (again,) = load_spec_text(made.to_yaml(), "again.yaml").variants.values()
    assert again.variant == preset(name)


def test_the_yaml_of_a_variant_is_a_spec() -> None:
    text = windows().to_yaml(package="mine", arch=["sm90a"], head_dim=[64, 128], dtype="bf16", passes=["forward"])
    spec = load_spec_text(text)
    assert spec.package == "mine"
    assert [(k.variant, k.head_dim_qk) for k in expand(spec)] == [(windows().value, 64), (windows().value, 128)]
    with pytest.raises(SpecError, match="head_dim.*found 'wide'"):
        windows().to_yaml(arch="sm90a", head_dim="wide")
    with pytest.raises(SpecError, match="unknown field; did you mean 'head_dim'"):
        windows().to_yaml(arch="sm90a", head_dims=64)


def test_changes_of_its_arguments_do_not_change_a_variant() -> None:
    fields = {"window": dict(WINDOW["window"])}
    made = attngen.variant("kv < window[h]", tensors=fields)
    text = made.to_yaml()
    fields["window"]["dtype"] = "int64"
    assert made.to_yaml() == text


def test_a_variant_goes_wherever_a_name_goes(gpu: FakeDriver) -> None:
    made, q = windows(), torch.randn(1, 8, 2, 64).bfloat16()
    own = {"window": torch.tensor([3, 8], dtype=torch.int32)}
    wanted = attngen.attention(q, q, q, variant=made, backend="reference", **own)
    registry.add(package_of_kernels([kernel(made.value, package="mine")], "memory"))
    torch.testing.assert_close(attngen.attention(q, q, q, variant=made, **own), wanted)
    assert attngen.explain(q, q, q, variant=made, **own).runs == "kernel"
    assert attngen.explain(q, q, q, variant=made, package="mine", **own).runs == "kernel"
    assert attngen.explain(q, q, q, variant=made, package="others", **own).runs == "no kernel"
    assert not attngen.tile_map(q, q, variant=made, **own).words
    starts = torch.tensor([0, 8], dtype=torch.int32)
    packed = attngen.attention_varlen(
        q[0], q[0], q[0], starts, starts, 8, 8, variant=made, backend="reference", **own
    )  # fmt: skip
    torch.testing.assert_close(packed[None], wanted)
    table, used = torch.tensor([[0]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    paged = attngen.attention_paged(q, q, q, table, used, variant=made, backend="reference", **own)
    torch.testing.assert_close(paged, wanted)
    traced = torch.compile(lambda q: attngen.attention(q, q, q, variant=made, **own), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(q), wanted)
    assert len(gpu.launches) == 2  # of the call, and of the compiled one


@pytest.mark.parametrize(
    "mask",
    ["True and q >= kv", "kv >= 0 and q >= kv", "q - kv == ((q - kv) // 4 if 4 > 0 else -1)", "min(q // 4, 7) < 9"],
)
def test_kernels_of_what_ranges_decide_serve_it(mask: str, gpu: FakeDriver) -> None:
    """A plan leaves out what is always true, and the kernel's manifest has what is left."""
    made = attngen.variant(mask, name="decided")
    spec = load_spec_text(made.to_yaml(arch=["sm90a"], head_dim=64, backend="triton"))
    (planned,) = [plan(one) for one in expand(spec)]
    restored = restore_variant(json.loads(json.dumps(planned.variant.to_dict())))
    assert restored.definition == made.value.definition


def test_kernels_of_another_definition_do_not_serve_it(gpu: FakeDriver) -> None:
    made, q = attngen.variant("q_pos >= kv", name="causal"), torch.randn(1, 8, 2, 64).bfloat16()
    registry.add(package_of_kernels([kernel(compile_variant("causal", "q_pos > kv"), package="mine")], "memory"))
    assert attngen.explain(q, q, q, variant=made).runs == "no kernel"
    registry.add(package_of_kernels([kernel(compile_variant("causal", "q_pos >= kv"), package="ours")], "memory"))
    assert attngen.explain(q, q, q, variant=made).kernel.package == "ours"  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_two_of_one_name_do_not_mix_in_compiled_programs() -> None:
    q, results = torch.randn(1, 8, 2, 16), []
    for mask in ("q_pos >= kv", "q_pos > kv"):
        made = attngen.variant(mask)
        traced = torch.compile(lambda q, made=made: attngen.attention(q, q, q, variant=made), backend="eager")
        results.append(traced(q))
        assert torch.equal(results[-1], attngen.attention(q, q, q, variant=made))
    assert not torch.equal(*results)


def test_the_name_of_a_variant_is_the_same_in_every_process() -> None:
    code = (
        "import attngen\nmade = attngen.variant('q_pos >= back', name='mine', let={'back': 'kv + 1'})\nprint(str(made))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    same = attngen.variant("q_pos >= kv + 1", name="mine")  # texts and let names are no part of the definition
    assert done.stdout.strip() == str(same)
    assert str(attngen.variant("q_pos >= kv + 2", name="mine")) != str(same)
    assert pickle.loads(pickle.dumps(same)).value == same.value
    assert eval(repr(same), {"attngen": attngen}) == same


# --- What is seen -------------------------------------------------------------------------------------------


def test_the_mask_is_what_the_reference_sees() -> None:
    own = {"window": torch.tensor([2, 9], dtype=torch.int32)}
    mask = windows().mask((3, 2, 5, 12), **own)
    q, kv = torch.arange(5)[:, None] + 7, torch.arange(12)[None]
    wanted = torch.stack([(q - kv >= 0) & (q - kv < width) for width in (2, 9)])
    assert torch.equal(mask, wanted.expand(3, 2, 5, 12))
    grouped = attngen.variant("hk == 1").mask((1, 4, 1, 1), kv_heads=2)
    assert grouped.flatten().tolist() == [False, False, True, True]
    assert attngen.variant().mask(4).all()
    assert windows().mask((1, 1, 0, 0), window=own["window"][:1]).shape == (1, 1, 0, 0)
    documents = attngen.variant(
        "doc[b, q] == doc[b, kv]", "s * slope[h]", sink="rest[h]", dropout=True,
        tensors={
            "doc": {"dtype": "int32", "shape": ["b", "seqlen_k"]}, "slope": {"dtype": "fp32", "shape": ["h"]},
            "rest": {"dtype": "fp32", "shape": ["h"]},
        },
    )  # fmt: skip
    doc = torch.tensor([[0, 0, 1], [0, 1, 1]], dtype=torch.int32)
    seen = documents.mask((2, 1, 3, 3), doc=doc)  # what only scores and sinks read is not asked for
    assert torch.equal(seen[:, 0], doc[:, :, None] == doc[:, None, :])


def test_only_tensors_of_the_mask_are_asked_for_whatever_bounds_they_have() -> None:
    """Seen: a range up to seqlen_k asked for all tensors with that extent, and explanations named these as missing."""
    forgetting = attngen.variant(
        "q_pos >= kv and kv < n[b]", "s + total[b, h, kv] * rows[total_rows]", name="forgetting",
        scalars={"total_rows": {"type": "int32", "min": 0, "max": "total_k"}},
        tensors={
            "total": {"dtype": "fp32", "shape": ["b", "h", "seqlen_k"]},
            "rows": {"dtype": "fp32", "shape": ["total_k"]},
            "n": {"dtype": "int32", "shape": ["b"], "range": {"min": 0, "max": "seqlen_k"}},
        },
    )  # fmt: skip
    n = torch.tensor([5, 3], dtype=torch.int32)
    seen = forgetting.mask((2, 4, 16, 16), n=n)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    assert torch.equal(seen, (causal & (torch.arange(16) < n[:, None, None]))[:, None].expand(2, 4, 16, 16))
    assert forgetting.plot((2, 4, 16, 16), n=n)
    told = forgetting.explain((2, 4, 16, 16), n=n)
    assert told.missing == ()
    assert told.counted is not None
    assert told.counted.visible == int(seen.sum())
    assert str(forgetting.explain((2, 4, 16, 16))).endswith("depends on what was not given: n")
    bounded = attngen.variant(
        "kv < n[b]", "s + more[b, extra]", name="bounded", scalars={"extra": {"type": "int32", "min": 0}},
        tensors={
            "n": {"dtype": "int32", "shape": ["b"], "range": {"min": 0, "max": "width"}},
            "more": {"dtype": "fp32", "shape": ["b", "width"]},
        },
    )  # fmt: skip
    assert bounded.explain((2, 1, 4, 4), n=n).missing == ("more",)  # which alone says how large width is


def test_a_mask_of_wrong_values_or_sizes_is_refused() -> None:
    own = {"window": torch.tensor([3], dtype=torch.int32)}
    for sizes in ("8", -1, (1, 2, 3), 2.0, True, (8, None)):
        with pytest.raises(CallError, match="sizes must be a number of queries and keys"):
            windows().mask(sizes, **own)
    for heads in (0, -1, 1.5, True):
        with pytest.raises(CallError, match="kv_heads must be a number of heads, at least 1, got"):
            windows().explain(8, kv_heads=heads, **own)
    with pytest.raises(CallError, match="missing 'window'"):
        windows().mask(8)
    with pytest.raises(CallError, match="unknown argument 'windw'; did you mean 'window'"):
        windows().mask(8, windw=own["window"])
    with pytest.raises(CallError, match=r"tensor 'window' holds 0 at \[0\], outside its declared range 1 .. 65536"):
        windows().mask(8, window=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(CallError, match="h must be 0 to 0, got 1"):
        windows().plot(8, h=1, **own)


def test_explanations_have_bands_and_count_only_what_was_given() -> None:
    told = str(windows().explain())
    assert "some query sees  q_pos_lo - window[h] + 1 <= kv < q_pos_hi + 1" in told
    assert told.endswith("how many that are depends on what was not given: sizes, window")
    assert windows().explain(256).counted is None
    assert windows().explain(256).missing == ("window",)
    of_window = windows().explain((1, 2, 256, 256), window=torch.tensor([1, 256], dtype=torch.int32)).counted
    assert of_window is not None
    assert of_window.visible == 256 + 256 * 257 // 2
    assert (of_window.full, of_window.partial, of_window.empty) == (1, 4, 3)
    bounded = attngen.variant("kv < limit", scalars={"limit": {"type": "int32", "default": 3}})
    counted = bounded.explain(8).counted
    assert counted is not None
    assert counted.visible == 24
    assert "tiles are classified one by one" in str(attngen.variant("(q + kv) % 7 == 0").explain())


HALF = "h < heads // 2 or q_pos - kv < 2"


def test_a_mask_that_differs_by_head_needs_their_number() -> None:
    half = attngen.variant(HALF, name="half")
    with pytest.raises(CallError, match=r"depends on the number of heads; pass sizes as \(batch, heads, queries, keys"):
        half.mask(8)
    assert "depends on what was not given: the number of heads" in str(half.explain(8))
    near = torch.arange(8)[:, None] - torch.arange(8) < 2
    mask = half.mask((1, 4, 8, 8))
    assert torch.equal(mask[0, :2], torch.ones(2, 8, 8, dtype=torch.bool))
    assert torch.equal(mask[0, 2:], near.expand(2, 8, 8))

    def visible(**place: int) -> int:
        counted = half.explain((1, 4, 8, 8), **place).counted
        assert counted is not None
        return counted.visible

    assert (visible(), visible(h=0), visible(h=3)) == (2 * 64 + 2 * int(near.sum()), 64, int(near.sum()))
    assert "sequence 0, head 3, 8 queries" in str(half.explain((1, 4, 8, 8), h=3))
    with pytest.raises(CallError, match="h must be 0 to 3, got 4"):
        half.explain((1, 4, 8, 8), h=4)


def test_the_heads_of_a_tensor_are_taken() -> None:
    window = torch.tensor([2, 4], dtype=torch.int32)
    assert windows().mask(8, window=window).shape == (1, 2, 8, 8)
    two = str(windows().plot(8, window=window)).splitlines()
    assert two[0].startswith("my_mask (sequence 0, all 2 heads): ")
    assert two[2:6] == ["█·······", "██······", "▒██·····", "▒▒██····"]
    one = str(windows().plot(8, h=1, window=window)).splitlines()
    assert one[0].startswith("my_mask (sequence 0, head 1): ")
    assert one[2:6] == ["█·······", "██······", "███·····", "████····"]


def test_sizes_may_be_named_and_unknown_arguments_are_refused() -> None:
    causal = attngen.variant("q_pos >= kv", name="causal")
    assert torch.equal(causal.mask(sizes=8), causal.mask(8))
    assert causal.explain(sizes=8).counted == causal.explain(8).counted
    assert str(causal.plot(sizes=8)) == str(causal.plot(8))
    own = attngen.variant("kv < sizes", scalars={"sizes": {"type": "int32"}})
    assert int(own.mask(8, sizes=3).sum()) == 24
    for call in (causal.mask, causal.explain, causal.plot):
        with pytest.raises(CallError, match="unknown argument 'foo'; it takes no arguments of its own"):
            call(8, foo=1)
        with pytest.raises(CallError, match="unknown argument 'heads'; sizes say it"):
            call(8, heads=4)
    with pytest.raises(CallError, match="unknown argument 'windw'; did you mean 'window'"):
        windows().explain(windw=3)  # also where nothing is counted
    with pytest.raises(CallError, match="sizes must be a number of queries and keys"):
        causal.mask()


def test_probable_mistakes_are_warnings() -> None:
    with pytest.warns(UserWarning, match=r"variant 'odd': mask: '&' binds tighter than '>='[^^]*\n +\^{15}$") as caught:
        attngen.variant("q_pos >= kv & q_pos - kv < 5", name="odd")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="the extent 'seq_k' is new.*did you mean 'seqlen_k'"):
        attngen.variant("t[kv] > 0", tensors={"t": {"dtype": "int32", "shape": ["seq_k"]}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(windows()))


def test_the_picture_of_a_variant_is_text() -> None:
    assert str(attngen.variant("q_pos >= kv", name="causal").plot(3)).splitlines() == [
        "causal: 3 queries down, 3 keys across", "█ all seen  ▒ some  · none", "█··", "██·", "███",
    ]  # fmt: skip
    large = str(attngen.variant("q_pos >= kv").plot(640)).splitlines()
    assert large[0].endswith("a character is 20 x 10")
    assert len(large) == 2 + 32
    assert large[2] == "▒▒" + "·" * 62
    assert large[3] == "██▒▒" + "·" * 60
    assert str(attngen.variant().plot(0)).count("\n") == 1


def test_an_svg_has_a_square_for_each_tile() -> None:
    text = attngen.variant("q_pos >= kv", name="steps").plot((64, 32)).svg()
    assert "<title>steps: 64 queries down, 32 keys across; a square is 2 x 2;" in text
    some, every = text.splitlines()[3:5]
    assert (some.count("M"), every.count("M")) == (16, 15)  # the last query sees all keys: the upper half is empty
    assert attngen.variant().plot(0).svg().count("<path") == 1


def test_an_image_needs_matplotlib_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    picture = attngen.variant("q_pos >= kv").plot(4)
    assert isinstance(picture, Picture)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(LoadError, match="needs matplotlib, which is not installed"):
            picture.save(tmp_path / "mask.png")
        assert picture._repr_png_() is None
    picture.save(tmp_path / "mask.svg")  # which needs none
    assert (tmp_path / "mask.svg").read_text() == picture.svg()
    pytest.importorskip("matplotlib")
    picture.save(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes() == picture._repr_png_()
