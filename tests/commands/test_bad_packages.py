"""One bad package beside a good one: every command runs, and says which package is bad and why."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.commands import doctor
from attngen.formats import MANIFEST_FORMAT, PACKAGE_FORMAT, SCHEMA, VERSION
from attngen.runtime.registry.lookup import registry
from tests.build.test_build import SPEC
from tests.commands.test_build import attngen
from tests.runtime.support import manifest_of, variant, write_kernel
from tests.sampling import few
from tests.store import fakes

LONG = "k" * 300


def write_package(
    folder: Path, package: str, *, index: dict[str, Any] | None = None, manifest: dict[str, Any] | None = None
) -> Path:
    """Write a package of one kernel of ``causal``. ``index`` and ``manifest`` replace entries of its files."""
    kernel = manifest_of(variant(), package=package)
    row = {"name": kernel["name"], "variant": "causal"}
    write_kernel(folder / "kernels" / kernel["name"], {**kernel, **(manifest or {})})
    content = {
        "format": PACKAGE_FORMAT, "manifest": MANIFEST_FORMAT, "schema": SCHEMA, "attngen": VERSION,
        "package": package, "kernels": [row], "arches": ["sm90a"], "drivers": {"sm90a": 13000},
    }  # fmt: skip
    (folder / "package.json").write_text(json.dumps({**content, **(index or {})}))
    return folder


def install(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    points = [SimpleNamespace(name=folder.name, load=lambda folder=folder: folder) for folder in folders]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "attngen.kernels" else [])
    registry.clear()


def renamed(**entries: Any) -> dict[str, Any]:
    """The index of a package whose one row has other entries."""
    return {"kernels": [{"name": "k", "variant": "causal", **entries}]}


def launches(**entries: Any) -> dict[str, Any]:
    """The launches of a manifest, of which the first has other entries."""
    first, *others = manifest_of(variant())["launches"]
    return {"launches": [{**first, **entries}, *others]}


#: What is wrong with the bad package, and what is said of it.
BAD: list[tuple[dict[str, Any], str]] = [
    *[({"index": renamed(name=name)}, "in kernels[0].name, where a name")
      for name in (LONG, "/etc", "../../outside", "..", ".", "", "a/b", "a\0b", "a\nb", 7, None)],
    ({"index": renamed(variant="../causal")}, 'has "../causal" in kernels[0].variant, where a name'),
    ({"index": {"package": "../bad"}}, 'has "../bad" in package, where a name'),
    ({"index": {"kernels": {}}}, "has an object in kernels, where a list must stand"),
    ({"index": {"drivers": {"sm90a": 1e999}}}, "in drivers.sm90a, where a number"),
    ({"index": {"format": 99}}, "has package format 99"),
    ({"index": renamed(name="missing")}, "missing holds no manifest.json"),
    ({"manifest": {"name": LONG}}, "in name, where a name"),
    ({"manifest": {"name": "/etc/passwd"}}, 'has "/etc/passwd" in name, where a name'),
    ({"manifest": {"package": ".."}}, 'has ".." in package, where a name'),
    ({"manifest": {"variant": {**variant().to_dict(), "name": "../x"}}}, 'has "../x" in variant.name, where a name'),
    ({"manifest": launches(name="../forward")}, 'has "../forward" in launches[0].name, where a name'),
    ({"manifest": {"arch": "sm300a"}}, "built for sm300a, which attngen"),
]  # fmt: skip


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes.compile_by(monkeypatch)
    for part in ("_cuda_compiler", "_arches", "_run"):  # these take seconds
        monkeypatch.setattr(doctor, part, list)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


@few(("fault", "said"), BAD, always=(0, 9, 19))
def test_a_bad_package_is_named_and_the_others_are_listed(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], said: str
) -> None:
    bad = write_package(tmp_path / "badpack", "badpack", **fault)
    install(monkeypatch, bad, write_package(tmp_path / "good", "good"))
    for arguments in (["list"], ["list", "--json"], ["show", "good/fwd_sm90a", "--json"]):
        registry.clear()
        result = attngen(*arguments)
        assert "fwd_sm90a" in result.stdout
        assert "badpack" in result.stderr
        assert said in result.stderr
        assert len(result.stderr) < 1000
    findings = json.loads(attngen("doctor", "--json", code=1).stdout)["findings"]
    (broken,) = (f for f in findings if f["name"] == "badpack" and f["state"] == "broken")
    assert said in broken["text"]
    assert {"part": "wheels", "name": "good", "state": "ok"}.items() <= findings[-1 - _after(findings)].items()


def _after(findings: list[dict[str, str]]) -> int:
    """Number of findings after those of wheels."""
    return sum(finding["part"] in ("run", "cards", "tested") for finding in findings)


@pytest.mark.exhaustive
def test_every_other_command_runs_beside_a_bad_package(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, write_package(tmp_path / "badpack", "badpack", index=renamed(name=LONG)))
    for arguments in (
        ["build", spec], ["check", spec], ["explain", spec, "causal"], ["cache", "list"], ["cache", "verify"],
        ["build", spec, "--render-only", "--out", tmp_path / "out"], ["cache", "clear", "--yes"],
    ):  # fmt: skip
        attngen(*arguments)


def test_a_manifest_without_figures_for_people_is_listed(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = write_package(tmp_path / "bare", "bare", manifest={"resources": {}})
    install(monkeypatch, bare)
    (row,) = json.loads(attngen("list", "--json").stdout)["kernels"]
    assert (row["package"], row["registers"]) == ("bare", None)
    assert "bare: 1 kernel" in attngen("list").stdout
    said = attngen("show", row["kernel"], code=1).stderr
    assert str(bare) in said
    assert "build it again, or reinstall its package" in said


def put_entry(cache: Path, manifest: dict[str, Any], checksums: str = "") -> Path:
    """Put an entry into the cache whose checksums fit, with lines of others after them."""
    from attngen.compile.artifact import Artifact
    from attngen.store.entry import CHECKSUMS, files_of

    folder = cache / "kernels" / ("a" * 64)
    folder.mkdir(parents=True)
    for name, data in files_of(Artifact(b"cubin", manifest)).items():
        (folder / name).write_bytes(data)
    with (folder / CHECKSUMS).open("a") as file:
        file.write(checksums)
    return folder


@pytest.mark.parametrize("name", ["/etc/passwd", "../b", "", LONG])
def test_an_entry_of_the_cache_never_names_a_file_outside_of_it(cache: Path, name: str) -> None:
    outside = cache.parent / "b"
    outside.write_text("of somebody else")
    from hashlib import sha256

    line = f"{sha256(outside.read_bytes()).hexdigest()}  {name}\n"
    put_entry(cache, {"name": "k", "launches": []}, line)
    said = attngen("cache", "verify", code=1)
    assert "1 damaged" in said.stdout
    assert name == LONG or "which is not the name of a file of a kernel" in said.stderr


@pytest.mark.parametrize(
    "manifest", [{"launches": []}, {"name": "../k", "launches": []}, {"name": "k", "launches": [{"name": "../a"}]}]
)
def test_an_entry_without_a_name_is_damaged(cache: Path, manifest: dict[str, Any]) -> None:
    put_entry(cache, manifest)
    (entry,) = json.loads(attngen("cache", "list", "--json").stdout)["entries"]
    assert (entry["kernel"], entry["state"]) == (None, "damaged")


def test_a_link_into_nowhere_in_an_entry_does_not_end_the_list(cache: Path) -> None:
    (put_entry(cache, {"name": "k", "launches": []}) / "ptx").symlink_to("nowhere")
    assert "1 entry" in attngen("cache", "list").stdout
