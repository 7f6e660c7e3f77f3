"""Sources of variants: order of the search, ambiguity, broken kernels, specs that changed."""

from __future__ import annotations

import json
import re
import warnings
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError, LoadError, NoKernelError
from attngen.formats import MANIFEST_FORMAT, VERSION
from attngen.lang.variant import Scalar
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.registry import discovery
from attngen.runtime.registry import lookup as registry_module
from attngen.runtime.registry.lookup import (
    BrokenKernelWarning,
    Package,
    SpecChangedWarning,
    package_of_kernels,
    registry,
)
from tests.runtime.support import FakeDriver, kernel, manifest_of, variant, window_variant, write_build, write_kernel


def package(name: str, *variants: Any) -> Package:
    return package_of_kernels([kernel(v, package=name) for v in variants], "memory")


def install(monkeypatch: pytest.MonkeyPatch, *points: Any) -> None:
    points_of = {discovery.ENTRY_POINTS: list(points)}
    monkeypatch.setattr(discovery, "metadata", SimpleNamespace(entry_points=lambda group: points_of.get(group, [])))


def point(name: str, target: Any) -> Any:
    return SimpleNamespace(name=name, load=lambda: target)


def test_loaded_before_installed_before_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_build("own", variant())
    assert registry.find("causal").package == "own"
    write_kernel(tmp_path / "wheel" / "kernels" / "k0", manifest_of(variant(), package="shipped"))
    install(monkeypatch, point("shipped", tmp_path / "wheel"))
    registry.refresh()
    assert registry.find("causal").package == "shipped"
    write_kernel(tmp_path / "given" / "k0", manifest_of(variant(), package="given"))
    assert attngen.load(tmp_path / "given").variants == ("causal",)
    assert registry.find("causal").package == "given"
    assert registry.find("own/causal").package == "own"
    assert registry.find("causal", "shipped").package == "shipped"
    assert [(rank, p.name) for rank, p in registry.packages()] == [
        ("loaded", "given"), ("installed", "shipped"), ("built", "own"),
    ]  # fmt: skip


def test_two_definitions_of_one_rank_make_a_name_ambiguous() -> None:
    write_build("one", variant())
    write_build("two", variant(mask="q_pos > kv"), window_variant())
    write_build("zero", variant())
    with pytest.raises(CallError) as caught:
        registry.find("causal")
    assert str(caught.value) == (
        "variant 'causal' is ambiguous: 2 built packages define it differently; say 'one/causal', 'two/causal', "
        "'zero/causal'\n  mask:\n    one: q_pos >= kv\n    two: q_pos > kv"
    )
    assert registry.find("one/causal").package == "one"
    assert registry.find("window").package == "two"
    with pytest.raises(CallError, match="names package 'one', but package='two' was passed"):
        registry.find("one/causal", "two")


@pytest.mark.parametrize(
    ("fields", "field", "one", "two"),
    [
        ({"score": "s * 2.0"}, "score", "s", "s * 2.0"),
        ({"sink": "1.0"}, "sink", "none", "1.0"),
        ({"dropout": True}, "dropout", "false", "true"),
        ({"scalars": [Scalar("width", "int32", min=1)]}, "scalars.width", "nothing", "int32, min 1"),
        ({"tensors": [Declared("doc", "int32", ("b",), range=(0, 9))]}, "tensors.doc", "nothing",
         "int32 [b], range 0 .. 9"),
    ],
)  # fmt: skip
def test_an_ambiguous_name_shows_each_field_that_differs(fields: Any, field: str, one: str, two: str) -> None:
    registry.add(package("one", variant()))
    registry.add(package("two", variant(**fields)))
    with pytest.raises(CallError) as caught:
        registry.find("causal")
    assert f"\n  {field}:\n    one: {one}\n    two: {two}" in str(caught.value)


def test_one_definition_is_one_variant_with_the_kernels_of_all_packages(tmp_path: Path) -> None:
    """Spelling, names of ``let`` and rank make no difference; a lower rank's other definition is shadowed."""
    spelled = variant(mask="(q_pos)  >= here", let={"here": "kv"})
    assert spelled != variant()
    assert spelled.definition == variant().definition
    write_build("own", spelled)
    write_build("other", variant(mask="q_pos > kv"))
    write_kernel(tmp_path / "k0", manifest_of(variant(), package="given", dtype="fp16"))
    attngen.load(tmp_path / "k0")
    write_kernel(tmp_path / "k1", manifest_of(variant(), package="more", head_dim=128))
    attngen.load(tmp_path / "k1")
    entry = registry.find("causal")
    assert entry.package == "given"
    assert [kernel.package for kernel in entry.kernels] == ["given", "more", "own"]
    assert [kernel.package for kernel in registry.find("more/causal").kernels] == ["more"]
    assert [kernel.package for kernel in registry.find("causal", "own").kernels] == ["own"]


def test_a_call_takes_the_best_kernel_of_all_packages(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(variant(), package="first")], "memory"))
    registry.add(package_of_kernels([kernel(variant(), package="second", backend="cuda")], "memory"))
    q, k, v = (torch.randn(1, 8, 2, 64).bfloat16() for _ in range(3))
    explanation = attngen.explain(q, k, v, variant="causal")
    assert explanation.kernel is not None
    assert explanation.kernel.package == "second"
    wanted = attngen.attention(q, k, v, variant="causal", backend="reference")
    torch.testing.assert_close(attngen.attention(q, k, v, variant="causal"), wanted)


@pytest.mark.exhaustive
def test_a_compiled_program_takes_the_kernels_of_all_packages_too(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(variant(), package="first", head_dim=64)], "memory"))
    registry.add(package_of_kernels([kernel(variant(), package="second", head_dim=128)], "memory"))

    @torch.compile(backend="eager", fullgraph=True)
    def traced(q: torch.Tensor) -> Any:
        return attngen.attention(q, q, q, variant="causal")

    for head_dim in (64, 128):
        q = torch.randn(1, 8, 2, head_dim).bfloat16()
        torch.testing.assert_close(traced(q), attngen.attention(q, q, q, variant="causal", backend="reference"))


def test_a_misspelt_name_is_not_proposed_for_a_spec() -> None:
    with pytest.raises(NoKernelError, match="did you mean 'causal'") as raised:
        registry.find("casual")
    assert str(raised.value).count("casual") == 1
    assert "    - variant: causal\n" in str(raised.value)
    with pytest.raises(NoKernelError) as raised:
        registry.find("mine")
    assert "  variants:\n    mine: {mask: ...}  # what it computes; it is no preset\n" in str(raised.value)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        NoKernelError,
        match="(?s)no kernel of variant 'mine' is built\n  built: nothing\n  known without a build.*- variant: mine",
    ):
        registry.find("mine")
    registry.add(package("mine", variant(), window_variant()))
    with pytest.raises(
        NoKernelError, match="'windw' is built; did you mean 'window'\\?\n  built: mine/causal, mine/window"
    ):
        registry.find("windw")
    with pytest.raises(
        NoKernelError, match="'causal' is built in package 'mien': there is no such package; did you mean 'mine'"
    ):
        registry.find("mien/causal")
    with pytest.raises(NoKernelError, match="'windw' is built in package 'mine'; did you mean 'window'"):
        registry.find("windw", "mine")


def test_a_preset_gives_way_to_a_package_that_defines_its_name() -> None:
    assert registry.find("causal").kernels == ()
    write_build("own", variant(mask="q_pos > kv"))
    registry.refresh()
    assert registry.find("causal").variant == variant(mask="q_pos > kv")
    assert registry.find("attngen/full").variant.name == "full"


def test_load_takes_folders_and_indexes(tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "k", manifest_of(variant()))
    for path in (folder, tmp_path):
        assert attngen.load(path).name == "mine"
    store = write_build("own", window_variant())
    assert attngen.load(store.root / "builds" / "own.json").variants == ("window",)
    assert registry.find("window").kernels[0].variant == window_variant()


def test_a_folder_may_be_named_relative_to_where_the_process_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_kernel(tmp_path / "k", manifest_of(variant()))
    monkeypatch.chdir(tmp_path)
    loaded = attngen.load("k")
    monkeypatch.chdir("/")
    assert loaded.kernels("causal")[0]._image_bytes


def test_an_answer_that_another_thread_overtakes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.add(package("mine", variant()))
    search = registry._search

    def overtaken(name: str, wanted: str | None) -> Any:
        answer = search(name, wanted)
        registry.add(package("mine", variant(mask="q_pos > kv")))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_search", overtaken)
        registry.find("causal")
    assert registry.find("causal").variant == variant(mask="q_pos > kv")


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    # since Python 3.14 a path whose name is too long does not exist
    with pytest.raises(LoadError, match="cannot be read: File name too long|does not exist"):
        attngen.load("x" * 300)
    with pytest.raises(LoadError, match="~nobody-at-all/kernels: Could not determine home directory"):
        attngen.load("~nobody-at-all/kernels")
    with pytest.raises(LoadError, match="does not exist"):
        attngen.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match="holds no kernel"):
        attngen.load(tmp_path / "empty")
    write_kernel(tmp_path / "mixed" / "a", manifest_of(variant(), package="a"))
    write_kernel(tmp_path / "mixed" / "b", manifest_of(variant(), package="b"))
    with pytest.raises(LoadError, match=r"several packages \(a, b\); load them one by one"):
        attngen.load(tmp_path / "mixed")
    write_kernel(tmp_path / "old", {**manifest_of(variant()), "format": 99})
    with pytest.raises(LoadError, match="manifest format 99, but this version of attngen reads format 3"):
        attngen.load(tmp_path / "old")
    lacking = manifest_of(variant())
    del lacking["tile_m"]
    write_kernel(tmp_path / "lacking", lacking)
    with pytest.raises(LoadError, match="the manifest lacks 'tile_m'"):
        attngen.load(tmp_path / "lacking")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manifest.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read"):
        attngen.load(tmp_path / "odd")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(LoadError, match="is not the index of a build"):
        attngen.load(tmp_path / "x.json")


def test_a_broken_package_does_not_disable_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_kernel(tmp_path / "k0", manifest_of(variant(), package="good"))
    install(monkeypatch, point("bad", tmp_path / "nowhere"), point("good", lambda: tmp_path))
    with pytest.warns(BrokenKernelWarning, match="installed package 'bad'"):
        assert registry.find("causal").package == "good"


def test_a_broken_kernel_is_passed_over() -> None:
    store = write_build("own", variant(), variant())
    first = json.loads((store.root / "builds" / "own.json").read_text())["kernels"][0]["key"]
    (store.path(first) / "manifest.json").write_text("{")
    with pytest.warns(BrokenKernelWarning, match="package 'own': .*manifest.json is damaged"):
        assert len(registry.find("causal").kernels) == 1


@pytest.mark.parametrize("rank", ["loaded", "installed", "built"])
@pytest.mark.parametrize("name", ["causal", "own/causal"])
def test_a_package_whose_kernels_are_all_broken_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, name: str
) -> None:
    """It is not "no kernel of variant 'causal' is built; did you mean 'causal'?"; the cache is named where it is it."""
    if rank == "built":
        write_build("own", variant())
        (manifest,) = (tmp_path / "cache").glob("kernels/*/manifest.json")
        remedy, other = "'attngen cache verify'.*'attngen build'", "reinstall"
    else:
        folder = tmp_path / "wheel"
        manifest = write_kernel(folder / "kernels" / "k0", manifest_of(variant(), package="own")) / "manifest.json"
        rows = [{"name": "k0", "variant": "causal"}]
        index = {
            "format": 1,
            "manifest": MANIFEST_FORMAT,
            "schema": 1,
            "attngen": VERSION,
            "package": "own",
            "kernels": rows,
        }
        (folder / "package.json").write_text(json.dumps(index))
        if rank == "installed":
            install(monkeypatch, point("own", folder))
            remedy, other = "reinstall it", "cache"
        else:
            attngen.load(folder)
            remedy, other = "put its folder in place again", "cache"
    manifest.write_text("{")
    with pytest.warns(BrokenKernelWarning), pytest.raises(NoKernelError) as caught:
        registry.find(name)
    message = str(caught.value).replace(str(tmp_path), "")
    assert re.search(f"variant 'causal' are damaged, missing.*\n  {rank} package 'own' .*{remedy}", message)
    assert other not in message
    assert "did you mean" not in message


def test_a_damaged_variant_is_a_load_error(tmp_path: Path) -> None:
    manifest = manifest_of(variant())
    manifest["variant"]["mask"] = "q_pos >= nonsense"
    package_ = attngen.load(write_kernel(tmp_path / "k", manifest))
    with pytest.raises(LoadError, match="the manifest's variant cannot be read"):
        _ = package_.kernels("causal")[0].variant


def test_a_changed_spec_warns_once(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("schema: 1\n")
    write_build("own", variant(), window_variant(), inputs={str(spec): sha256(spec.read_bytes()).hexdigest()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.find("causal")
    registry.clear()
    spec.write_text("schema: 1\n# edited\n")
    with pytest.warns(SpecChangedWarning, match="spec.yaml has changed since package 'own' was built"):
        registry.find("causal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.find("window")
    registry.clear()
    spec.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.find("causal")


def test_generations_tell_that_answers_may_have_changed() -> None:
    before = registry.generation
    registry.add(package("mine", variant()))
    assert registry.generation > before
    assert registry_module.RANKS == ("loaded", "installed", "built")


def test_a_call_on_the_cpu_needs_the_manifest_only() -> None:
    store = write_build("own", window_variant())
    for cubin in store.root.glob("kernels/*/kernel.cubin"):
        cubin.unlink()
    q = torch.randn(1, 5, 2, 16)
    ours = attngen.attention(q, q, q, variant="window", window=2)
    assert torch.equal(ours, attngen.attention(q, q, q, variant=window_variant(), window=2))
