"""A user's project that compiles its specs while it is built, by whatever front end builds it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from attngen.formats import VERSION
from tests.packaging.support import ROOT, install, make, run
from tests.sampling import few

SPEC = """
schema: 1
package: my_masks
arch: sm80
variants:
  even: {mask: "q_pos >= kv and kv % 2 == 0"}
kernels:
  - {variant: even, head_dim: 32}
"""
PROJECT = """
[build-system]
requires = ["hatchling", "attngen[build]"]
build-backend = "hatchling.build"

[project]
name = "my-model"
version = "1.2.3"

[project.entry-points."attngen.kernels"]
my_masks = "my_masks"

[tool.attngen]
specs = ["kernels/masks.yaml"]

[tool.hatch.build.targets.wheel]
packages = ["my_model"]

[tool.hatch.build.targets.wheel.hooks.attngen]
"""
CALL = """
import torch, my_model, my_masks
q = torch.randn(1, 9, 2, 32)
out = my_model.attend(q)
print(my_masks.variants(), torch.equal(out[:, 0], q[:, 0]), my_masks.__version__)
"""


@pytest.fixture(scope="module")
def built_attngen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which this very attngen is installed, its entry points too."""
    folder = tmp_path_factory.mktemp("attngen")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    return install(folder / "site", Path(wheel))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "kernels").mkdir(parents=True)
    (folder / "my_model").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "kernels/masks.yaml").write_text(SPEC)
    (folder / "my_model/__init__.py").write_text(
        "import my_masks\n\n\ndef attend(x):\n    return my_masks.attention(x, x, x, variant='even')\n"
    )
    return folder


@pytest.fixture(scope="module")
def environment(built_attngen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "PYTHONPATH": str(built_attngen), "ATTNGEN_CACHE": str(cache), "PIP_NO_INPUT": "1"}


@pytest.mark.exhaustive
def test_attngens_own_wheel_holds_no_rendered_sources(built_attngen: Path) -> None:
    data = {path.name for path in (built_attngen / "attngen/_data").iterdir()}
    assert data == {"specs", "tuned", "templates", "tests", "LICENSE"}


@pytest.mark.exhaustive
def test_attngens_source_distribution_builds_the_wheel_of_the_checkout(built_attngen: Path, tmp_path: Path) -> None:
    """It holds all that is committed but ``generated/``; packages need nothing of hatchling's newest metadata."""
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (folder,) = tmp_path.glob("attngen-*/")
    there, here = ({path.name for path in place.iterdir()} for place in (folder, ROOT))
    assert {"attngen", "specs", "tuned", "templates", "tests", "docs", ".ci"} <= there <= here | {"PKG-INFO"}
    assert "generated" not in there
    (wheel,) = (built_attngen.parent / "dist").iterdir()
    (again,) = WheelBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    assert Path(again).read_bytes() == wheel.read_bytes()
    with ZipFile(wheel) as archive:
        assert b"Metadata-Version: 2.4\n" in archive.read(f"attngen-{VERSION}.dist-info/METADATA")


def pip_wheel(source: Path, out: Path, environment: dict[str, str], code: int = 0) -> str:
    """Build a wheel as pip does before it installs; nothing is fetched. Returns all that it prints."""
    command = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True, text=True, check=False, env=environment, cwd=out.parent,
    )  # fmt: skip
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.long  # CI runs the commands of docs/packaging.md
def test_a_project_compiles_its_specs_while_pip_builds_it(
    project: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    printed = pip_wheel(project, tmp_path / "dist", environment)
    assert "will not find" not in printed
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == "my_model-1.2.3-py3-none-manylinux_2_17_aarch64.manylinux_2_17_x86_64.whl"
    with ZipFile(wheel) as archive:
        (cubin,) = [name for name in archive.namelist() if name.endswith("kernel.cubin")]
        assert archive.read(cubin)[:4] == b"\x7fELF"
        source = archive.read(cubin.replace("kernel.cubin", "source.cu"))
        assert b"`attngen build kernels/masks.yaml`" in source
    assert run(CALL, install(tmp_path / "site", wheel)) == "('even',) True 1.2.3\n"


@pytest.mark.exhaustive
def test_a_source_distribution_compiles_where_it_is_installed(
    project: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel that pip makes of it there is, byte for byte, the one that is made here."""
    monkeypatch.setenv("ATTNGEN_CACHE", environment["ATTNGEN_CACHE"])
    made = make(project / "kernels/masks.yaml", tmp_path / "here", "wheel", "sdist")
    wheel, sdist = made.files
    pip_wheel(sdist, tmp_path / "there", environment)
    assert (tmp_path / "there" / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.mark.exhaustive
def test_a_source_distribution_needs_no_attngen_of_this_machine(project: Path, tmp_path: Path) -> None:
    """Built through its own backend, with an attngen of somebody else's in the way and this one out of reach."""
    (sdist,) = make(project / "kernels/masks.yaml", tmp_path / "here", "sdist").files
    (tmp_path / "other/attngen").mkdir(parents=True)
    (tmp_path / "other/attngen/__init__.py").write_text("raise ImportError('this is another attngen')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other"), "ATTNGEN_CACHE": str(tmp_path / "cache")}
    pip_wheel(sdist, tmp_path / "there", environment)
    (wheel,) = (tmp_path / "there").iterdir()
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (cubin,) = [name for name in names if name.endswith("kernel.cubin")]
        assert archive.read(cubin)[:4] == b"\x7fELF"
    assert {name.partition("/")[0] for name in names} == {"my_masks", f"my_masks-{VERSION}.dist-info"}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked")
    (root,) = (tmp_path / "unpacked").iterdir()
    program = "import sys; sys.path.insert(0, '_attngen'); from attngen.packaging import backend; "
    done = subprocess.run(
        [sys.executable, "-c", program + f"print(backend.build_sdist({str(tmp_path / 'again')!r}))"],
        capture_output=True, text=True, check=False, env=environment, cwd=root,
    )  # fmt: skip
    assert done.stdout.splitlines() == [sdist.name], done.stderr
    assert (tmp_path / "again" / sdist.name).read_bytes() == sdist.read_bytes()


@few(
    ("place", "old", "new", "message"),
    [
        ("pyproject.toml", 'specs = ["kernels/masks.yaml"]', 'spec = ["kernels/masks.yaml"]', "did you mean 'specs'"),
        ("pyproject.toml", "masks.yaml", "none.yaml",
         "tool.attngen. specs: found .kernels/none.yaml.; there is no such file below"),
        ("pyproject.toml", "[tool.hatch.build.targets.wheel]", 'max-size = "1 kB"\n[tool.hatch.build.targets.wheel]',
         "would take"),
        ("kernels/masks.yaml", "my_masks", "my_model", "its package would be 'my_model', which is a module of the"),
        ("kernels/masks.yaml", "kv %", "kw %", "unknown name 'kw'"),
    ],
    ids=["key", "file", "size", "name", "mask"], always=range(0, 999, 4))  # fmt: skip
def test_errors_of_a_project_are_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str],
    place: str, old: str, new: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("ATTNGEN_CACHE", environment["ATTNGEN_CACHE"])
    path = project / place
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(Exception, match=message):
        build_in_process(project, tmp_path / "dist")
    assert not list(tmp_path.glob("dist/*.whl"))


def build_in_process(project: Path, out: Path, version: str = "standard") -> Path:
    """Build a project with the hook of this attngen."""
    from hatchling.plugin.manager import PluginManager

    from attngen.packaging import hook

    plugins = PluginManager()
    plugins.manager.register(hook, name="attngen")
    (wheel,) = WheelBuilder(str(project), plugin_manager=plugins).build(directory=str(out), versions=[version])
    return Path(wheel)


@pytest.mark.exhaustive
def test_two_specs_may_not_share_a_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", environment["ATTNGEN_CACHE"])
    (project / "kernels/more.yaml").write_text(SPEC)
    path = project / "pyproject.toml"
    path.write_text(path.read_text().replace('masks.yaml"', 'masks.yaml", "kernels/more.yaml"'))
    with pytest.raises(Exception, match="its package would be 'my_masks', as that of kernels/masks.yaml"):
        build_in_process(project, tmp_path / "dist")
    (project / "kernels/more.yaml").write_text(SPEC.replace("my_masks", "more_masks"))
    with ZipFile(build_in_process(project, tmp_path / "dist")) as archive:
        modules = {name.partition("/")[0] for name in archive.namelist()}
    assert modules == {"my_masks", "more_masks", "my_model", "my_model-1.2.3.dist-info"}


@pytest.mark.usefixtures("fake_compiler")
def test_a_package_that_is_not_registered_is_said(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = project / "pyproject.toml"
    path.write_text(path.read_text().replace('my_masks = "my_masks"', ""))
    build_in_process(project, tmp_path / "dist")
    assert "attngen.attention will not find my_masks" in "".join(capfd.readouterr())


@pytest.mark.usefixtures("fake_compiler")
def test_an_editable_installation_has_the_kernels(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("editables")
    with (project / "pyproject.toml").open("a") as file:
        file.write('\n[tool.hatch.build.targets.wheel.force-include]\n"kernels" = "my_data"\n')
    with ZipFile(build_in_process(project, tmp_path / "dist", "editable")) as archive:
        names = archive.namelist()
    assert {"my_masks/__init__.py", "my_data/masks.yaml"} <= set(names)
    assert "my_model/__init__.py" not in names  # that one stays where it is
