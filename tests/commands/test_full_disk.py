"""A full disk is named as such, wherever a command writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.commands import bench
from attngen.errors import AttngenError
from attngen.packaging import make
from attngen.tools.tune import run as tune
from attngen.tools.tune.journal import Journal

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
        lambda path: tune._write(path, "a GPU", {}, []),
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


def test_a_full_disk_anywhere_else_is_a_clear_error(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort: an error that no command expects."""
    monkeypatch.setattr("attngen.schema.reading.load_spec", full)
    assert attngen("check", spec) == "cannot write to a file: the disk is full; free some space\n"
