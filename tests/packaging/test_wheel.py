"""A wheel's files are complete and always the same, and nothing half-made is left."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import tarfile
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from attngen.build.kernel_filter import KernelFilter
from attngen.errors import PackageError, SpecError
from attngen.formats import VERSION
from attngen.packaging.project import Choices, project_files
from attngen.packaging.sizes import WheelSizes, sizes_of
from attngen.packaging.vendor import runtime_files
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, preset_names
from attngen.schema.tuned import identity, tuned_text
from tests.packaging.support import INCLUDED, OTHER, ROOT, SPEC, make, write_spec
from tests.sampling import few
from tests.store import fakes

#: A kernel of each compiler, and a backward whose kernels have a cubin each, compiled for real.
REAL = """
schema: 1
package: attngen_real
include: masks/own.yaml
kernels:
  - {variant: own, head_dim: 32, arch: sm80, backend: triton, passes: [forward, backward]}
  - {variant: causal, head_dim: 64, arch: sm90a, backend: cuda}
"""


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_holds_the_runtime_the_kernels_and_their_sources(wheel: Path) -> None:
    files = contents(wheel)
    index = json.loads(files["attngen_small/package.json"])
    assert (index["package"], index["attngen"], index["spec"]) == ("attngen_small", VERSION, "small.yaml")
    assert (index["arches"], index["min_driver"]) == (["sm90a", "sm80"], 13000)
    assert index["drivers"] == {"sm90a": 13000, "sm80": 13000}
    assert [row["variant"] for row in index["kernels"]] == ["full", "sliding_window", "allowed"] + ["causal"] * 4 + [
        "own"
    ]
    for row in index["kernels"]:
        folder = f"attngen_small/kernels/{row['name']}"
        manifest = json.loads(files[f"{folder}/manifest.json"])
        assert {name: manifest[name] for name in row if name != "variant"} == {
            name: value for name, value in row.items() if name != "variant"
        }
        assert hashlib.sha256(files[f"{folder}/kernel.cubin"]).hexdigest() == manifest["sha256"]
        assert f"def {row['name']}(" in files[f"{folder}/source.py"].decode()
        assert b"by `attngen build small.yaml`" in files[f"{folder}/source.py"]
        assert "compile_seconds" not in manifest["resources"]
        assert manifest["toolchain"] == {"triton": "3.0"}  # not the hash of what is installed here
    assert files["attngen_small/spec/small.yaml"].decode() == SPEC
    assert files["attngen_small/spec/masks/own.yaml"].decode() == INCLUDED
    for name, data in runtime_files().items():
        assert files[f"attngen_small/_runtime/{name}"] == data
    assert files["attngen_small/py.typed"] == b""
    notice = files["attngen_small/NOTICE.txt"].decode()
    assert "the licence of attngen applies" in notice
    assert b"Apache License" in files["attngen_small/_runtime/LICENSE"]
    assert "Triton 3.0 (triton)" in notice


def test_metadata_of_a_wheel(wheel: Path) -> None:
    assert wheel.name == f"attngen_small-{VERSION}-py3-none-manylinux_2_17_aarch64.manylinux_2_17_x86_64.whl"
    files = contents(wheel)
    info = f"attngen_small-{VERSION}.dist-info"
    metadata = Parser().parsestr(files[f"{info}/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("attngen-small", VERSION, ">=3.10")
    assert metadata.get_all("Requires-Dist") is None  # torch is the caller's own
    assert "| `own` | `step`, `loud` |" in metadata.get_payload()
    assert "\nNVIDIA driver: CUDA 13.0 (r580) or later for sm80, sm90a.\n" in metadata.get_payload()
    tags = Parser().parsestr(files[f"{info}/WHEEL"].decode())
    assert tags["Root-Is-Purelib"] == "false"
    assert tags.get_all("Tag") == ["py3-none-manylinux_2_17_aarch64", "py3-none-manylinux_2_17_x86_64"]
    assert files[f"{info}/entry_points.txt"].decode() == "[attngen.kernels]\nattngen_small = attngen_small\n"
    rows = list(csv.reader(io.StringIO(files[f"{info}/RECORD"].decode())))
    assert sorted(row[0] for row in rows) == sorted(files)
    for name, digest, size in rows:
        if digest:
            wanted = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={wanted}", len(files[name]))


@pytest.mark.exhaustive
def test_shipped_specs_have_the_authors_and_urls_of_attngen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publisher(spec: Path, text: str) -> str:
        monkeypatch.setattr("importlib.metadata.metadata", lambda name: Parser().parsestr(text))
        project = project_files(load_spec(spec), Choices(), generator=False)["pyproject.toml"].decode()
        return project.rpartition('core-metadata-version = "2.4"\n')[2]

    shipped, own = specs_dir() / "ladder.yaml", write_spec(tmp_path)
    names = "Author: A, B\nAuthor-email: Who <who@attngen.example>\nProject-URL: Source, https://attngen.example/s\n\n"
    assert publisher(shipped, names).splitlines() == [
        "", "[[project.authors]]", '"name" = "A, B"',
        "", "[[project.authors]]", '"name" = "Who"', '"email" = "who@attngen.example"',
        "", "[project.urls]", '"Source" = "https://attngen.example/s"',
    ]  # fmt: skip
    assert publisher(own, names) == publisher(shipped, "Name: attngen\n\n") == ""


@pytest.mark.exhaustive
def test_the_same_spec_gives_the_same_bytes_wherever_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real compilers, two folders, two caches, other times and permissions."""
    made = []
    for name in ("one", "another/place"):
        monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / name / "cache"))
        spec = write_spec(tmp_path / name, REAL, "real.yaml")
        os.utime(spec, (1_000_000_000, 1_000_000_000 + len(made)))
        spec.chmod(0o600 if made else 0o644)
        made.append(make(spec, tmp_path / name / "dist", "wheel", "sdist"))
    for first, second in zip(made[0].files, made[1].files, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()
    files = contents(made[0].files[0])
    for name, data in files.items():
        assert str(tmp_path).encode() not in data, name
        assert os.fsencode(Path.home()) not in data, name
    assert "attngen_real/include/wgmma.cuh" in files
    cubins = [data for name, data in files.items() if name.endswith("kernel.cubin")]
    assert [data[:4] for data in cubins] == [b"\x7fELF"] * 3
    assert launches_of(files, "attngen_real") == {"forward", "preprocess", "dkdv", "dq"}


def launches_of(files: dict[str, bytes], module: str) -> set[str]:
    """Return the names of all launches; each must have the cubin that its row of the manifest is of."""
    names = set()
    for name, data in files.items():
        if name.startswith(f"{module}/kernels/") and name.endswith("/manifest.json"):
            folder = name.removesuffix("manifest.json")
            cubins = {
                hashlib.sha256(files[f]).hexdigest() for f in files if f.startswith(folder) and f.endswith(".cubin")
            }
            for row in json.loads(data)["launches"]:
                assert row["sha256"] in cubins, f"{folder} lacks the cubin of {row['name']}"
                names.add(row["name"])
    return names


@pytest.mark.usefixtures("fake_compiler")
def test_arch_version_platform_and_licence(tmp_path: Path) -> None:
    (tmp_path / "LIC").write_text("All rights reserved.\n")
    made = make(
        write_spec(tmp_path), tmp_path / "dist",
        version="2.0.0rc1", only=KernelFilter(arch=("sm80",)), platforms=("linux_x86_64",), licence=tmp_path / "LIC",
    )  # fmt: skip
    assert made.files[0].name == "attngen_small-2.0.0rc1-py3-none-linux_x86_64.whl"
    files = contents(made.files[0])
    assert json.loads(files["attngen_small/package.json"])["arches"] == ["sm80"]
    assert files["attngen_small-2.0.0rc1.dist-info/licenses/LICENSE"] == b"All rights reserved.\n"
    assert b'__version__ = "2.0.0rc1"' in files["attngen_small/__init__.py"]
    with pytest.raises(SpecError, match="lists no kernels for 'sm120a'"):
        make(write_spec(tmp_path), tmp_path / "dist", only=KernelFilter(arch=("sm120a",)))
    with pytest.raises(PackageError, match="version 'new' is not one that pip understands"):
        make(write_spec(tmp_path), tmp_path / "dist", version="new")
    with pytest.raises(PackageError, match="cannot be read: No such file"):
        make(write_spec(tmp_path), tmp_path / "dist", licence=tmp_path / "nowhere")


def test_bytes_of_a_wheel_by_kernel(wheel: Path) -> None:
    sizes = sizes_of(wheel)
    assert sizes.total == wheel.stat().st_size
    assert {(s.variant, s.head_dim, s.arch, s.kernels) for s in sizes.shares} == {
        ("full", "64", "sm90a", 1), ("sliding_window", "64", "sm90a", 1), ("allowed", "64", "sm90a", 1),
        ("causal", "64", "sm90a", 2), ("causal", "64", "sm80", 2), ("own", "64/32", "sm90a", 1),
    }  # fmt: skip
    assert [s.wheel_bytes for s in sizes.shares] == sorted((s.wheel_bytes for s in sizes.shares), reverse=True)
    files = contents(wheel)
    cubins = sum(len(data) for name, data in files.items() if name.endswith(".cubin"))
    assert sum(s.cubin_bytes for s in sizes.shares) == cubins
    assert 0 < sizes.rest < sizes.total


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_a_wheel_that_is_too_large_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    from attngen.packaging.make import package

    spec, out = write_spec(tmp_path), tmp_path / "dist"
    old = make(spec, out).files[0]
    content = old.read_bytes()
    with pytest.raises(PackageError, match=r"would take [\d,]+ B, more than the 1,000 B") as caught:
        package(spec, out, max_size=1000)
    assert "causal, head_dim 64, sm90a: 2 kernels" in str(caught.value)
    assert "choose with --arch, --dtype and --head-dim" in str(caught.value)
    assert (os.listdir(out), old.read_bytes()) == ([old.name], content)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_an_earlier_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, out = write_spec(tmp_path), tmp_path / "dist"
    old = make(spec, out, "wheel", "sdist").files
    before = {path: path.read_bytes() for path in old}
    spec.write_text(SPEC + "  - {variant: causal, head_dim: 128}\n")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ZipFile, "writestr", fail)
        with pytest.raises(PackageError, match="wheel: cannot write to .*: the disk is full; free some space"):
            make(spec, out, "sdist", "wheel")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    with old[0].open("rb") as reader:
        make(spec, out)
        assert reader.read() == before[old[0]]  # who reads the old one keeps it
    assert old[0].read_bytes() != before[old[0]]
    assert sorted(os.listdir(out)) == sorted(path.name for path in old)


@pytest.mark.usefixtures("fake_compiler")
def test_kernels_that_cannot_be_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = write_spec(tmp_path, "schema: 1\npackage: nothing\n", "nothing.yaml")
    with pytest.raises(SpecError, match="nothing.yaml: kernels: no kernels"):
        make(empty, tmp_path / "dist")
    for name in ("json", "attngen", "torch"):
        clash = write_spec(tmp_path, SPEC.replace("attngen_small", name), "clash.yaml")
        with pytest.raises(SpecError, match=f"clash.yaml:3: package: '{name}' is a module that programs import"):
            make(clash, tmp_path / "dist")
    with monkeypatch.context() as patch:
        patch.setenv("HATCH_BUILD_NO_HOOKS", "1")
        with pytest.raises(PackageError, match="ran without its hooks"):
            make(write_spec(tmp_path), tmp_path / "dist")
    (tmp_path / "file").touch()
    with pytest.raises(PackageError, match="cannot write to"):
        make(write_spec(tmp_path), tmp_path / "file")
    assert not list((tmp_path / "dist").iterdir())


def test_a_kernel_that_does_not_compile_fails_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    fakes.compile_by(monkeypatch)
    spec = write_spec(tmp_path, SPEC.replace("own, head", "reject, head").replace("own.yaml", "reject.yaml"))
    (tmp_path / "masks/reject.yaml").write_text(INCLUDED.replace("own", "reject"))
    with pytest.raises(PackageError, match="1 of 8 kernels do not compile:\n.*rejected"):
        make(spec, tmp_path / "dist")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_a_source_distribution_holds_the_project_and_the_generator(tmp_path: Path) -> None:
    made = make(write_spec(tmp_path), tmp_path / "dist", "sdist")
    assert [path.name for path in made.files] == [f"attngen_small-{VERSION}.tar.gz"]
    assert made.sizes is None
    with tarfile.open(made.files[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        project = archive.extractfile(f"attngen_small-{VERSION}/pyproject.toml")
        assert project is not None
        text = project.read().decode()
    own = {name for name in names if not name.startswith("_attngen/")}
    assert own == {"pyproject.toml", "README.md", "PKG-INFO", "small.yaml", "masks/own.yaml"}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "attngen").rglob("*.py")} == {
        name.removeprefix("_attngen/") for name in names if re.fullmatch(r"_attngen/attngen/.*\.py", name)
    }
    assert {f"_attngen/specs/presets/{name}.yaml" for name in preset_names()} <= names
    assert "_attngen/LICENSE" in names
    required = re.findall(r'"([^"]+)"', re.search(r"^requires = .*", text, re.MULTILINE)[0])
    distributions = {re.split("[<>=!~]", text)[0] for text in required}
    assert {"hatchling", "jinja2", "pydantic", "pyyaml", "triton", "click", "platformdirs"} <= distributions
    assert not [name for name in distributions if "attngen" in name]
    assert not {"pytest", "matplotlib", "torch"} & distributions


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_a_name_that_ends_in_an_underscore_has_a_distribution(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, SPEC.replace("attngen_small", "small_"))
    (wheel,) = make(spec, tmp_path / "dist").files
    assert wheel.name.startswith(f"small-{VERSION}-")
    assert "small_/__init__.py" in contents(wheel)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_a_link_to_a_shipped_spec_is_packaged_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").symlink_to(ROOT / "specs/ladder.yaml")
    wheel, sdist = make(tmp_path / "mine.yaml", tmp_path / "dist", "wheel", "sdist").files
    assert "attngen_ladder/spec/mine.yaml" in contents(wheel)
    with tarfile.open(sdist) as archive:
        assert f"attngen_ladder-{VERSION}/specs/mine.yaml" in archive.getnames()
        project = archive.extractfile(f"attngen_ladder-{VERSION}/pyproject.toml")
        assert project is not None
        assert b'specs = ["specs/mine.yaml"]' in project.read()


@pytest.mark.parametrize("date", ["", "today", "-1", "1e9", str(2**32)])
def test_a_date_that_no_archive_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, date: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
    with pytest.raises(PackageError, match="SOURCE_DATE_EPOCH is .*; allowed: seconds since 1970"):
        make(write_spec(tmp_path), tmp_path / "dist")


@pytest.mark.exhaustive
@few("target", ["wheel", "sdist"])
def test_measured_choices_go_into_a_package(tmp_path: Path, fake_compiler: None, target: str) -> None:
    spec = write_spec(tmp_path, OTHER, "other.yaml")
    (kernel,) = expand(load_spec(spec))
    row = {"kernel": "causal", "of": identity(kernel), "speedup": 1.1, "tile": {"m": 128, "n": 32}}
    tuned = tmp_path / "card.yaml"
    tuned.write_text(tuned_text("NVIDIA H200", {}, [row]))
    (made,) = make(spec, tmp_path / "dist", target, tuned=(tuned,)).files
    if target == "sdist":
        with tarfile.open(made) as archive:
            assert any(name.endswith("/tuned/card.yaml") for name in archive.getnames())
        return
    files = contents(made)
    (row,) = json.loads(files["attngen_other/package.json"])["kernels"]
    manifest = json.loads(files[f"attngen_other/kernels/{row['name']}/manifest.json"])
    assert (manifest["tile_m"], manifest["tile_n"]) == (128, 32)
    assert manifest["tuned"] == [{"file": "tuned/card.yaml", "gpu": "NVIDIA H200", "times": []}]


def test_a_wheel_may_be_as_large_as_allowed() -> None:
    sizes = WheelSizes(1000, ())
    sizes.require(1000, "a wheel")
    with pytest.raises(PackageError, match="a wheel would take"):
        sizes.require(999, "a wheel")
