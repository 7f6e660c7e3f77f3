"""A full disk is named as such, wherever a command writes."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.errors import AttngenError
from attngen.lab.commands import bench
from attngen.lab.tune import run as tune
from attngen.lab.tune.journal import Journal
from attngen.packaging import make

SPEC = "schema: 1\npackage: mine\narch: sm90a\nkernels: [{variant: causal, head_dim: 64, backend: triton}]\n"


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(SPEC)
    return tmp_path / "mine.yaml"


def attngen(*arguments: object) -> str:
    result = CliRunner().invoke(cli.group, list(map(str, arguments)))
    assert result.exit_code == cli.EXIT_FAILURE
    assert isinstance(result.exception, SystemExit)  # and no traceback
    return result.stderr


@pytest.mark.parametrize("call", ["write_bytes", "mkdir"])
def test_render_only(spec: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(Path, call, full)
    out = spec.parent / "out"
    assert (
        attngen("build", spec, "--render-only", "--out", out) == f"cannot write to {out / 'mine'}: the disk is full\n"
    )


def test_the_cache(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(spec.parent / "cache"))
    monkeypatch.setattr(Path, "mkdir", full)
    assert "cannot write to the cache" in (said := attngen("build", spec))
    assert "the disk is full; free some space ('attngen cache clear' empties the cache)" in said


def test_a_spec_to_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", full)
    path = tmp_path / "new.yaml"
    assert attngen("new", "mine", "--out", path) == f"{path}: cannot be written: the disk is full\n"


def test_results_of_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        def to_dict(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(Exception, match="the disk is full") as raised:
        bench._write(Report(), tmp_path / "out.json")  # type: ignore[arg-type]
    assert not isinstance(raised.value, OSError)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: tune._write(path, "tuned: 1"),
        lambda path: Journal.opened(path, {}, restart=True),
    ],
)  # fmt: skip
def test_results_of_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Any]) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(AttngenError, match="cannot be written: the disk is full"):
        write(tmp_path / "out.yaml")


def test_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(AttngenError, match="cannot write to .*: the disk is full"), make._beside(tmp_path / "dist"):
        pass


def full_without_a_name(*_: Any, **__: Any) -> Any:
    """As a write to an open file fails."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_temporary_files_of_a_package(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(Path, "write_bytes", full_without_a_name)
    said = attngen("package", spec, "--out", tmp_path / "dist")
    assert re.fullmatch(
        rf"cannot write to {tmp_path}/tmp/attngen-\w+/pyproject.toml: the disk is full; free some space, or set TMPDIR "
        r"to a folder with more\n", said,
    )  # fmt: skip
    assert os.listdir(tmp_path / "tmp") == []


def test_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hatchling writes it among the temporary files, and does not say where."""
    from hatchling.builders.sdist import SdistBuilder

    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    (tmp_path / "README.md").touch()
    monkeypatch.setattr(SdistBuilder, "build", full_without_a_name)
    with pytest.raises(AttngenError) as raised:
        make.build_target("sdist", tmp_path, tmp_path / "dist")
    assert str(raised.value) == (
        f"sdist: cannot write to {tmp_path}/dist or {tempfile.gettempdir()}: the disk is full; free some space, or set "
        "TMPDIR to a folder with more"
    )


def test_a_full_disk_anywhere_else_is_a_clear_error(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort: an error that no command expects."""
    monkeypatch.setattr("attngen.schema.loading.read_spec", full)
    assert attngen("check", spec) == "cannot write to a file: the disk is full; free some space\n"
