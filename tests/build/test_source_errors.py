"""An error of a source ends the search for a tile: it is compiled once, and its line is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen.build.compiles import COMPILER, Compiles, Prepared, Silent
from attngen.build.source_errors import source_error
from attngen.errors import AttngenError, ChoiceError
from attngen.plan import plan
from attngen.plan.attempts import Attempts, next_attempt
from attngen.plan.model import Refused
from attngen.render import Source, render
from attngen.store import Store
from attngen.store.jobs import worker_processes
from tests.plan.specs import kernel_spec
from tests.sampling import few
from tests.store.fakes import LOG

SOURCE = Source("kernel", '#include "ring.cuh"\n\nint a = b;\n', "cuda", {"ring.cuh": "#pragma once\nint c = d;\n"})


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            'kernel.cu(3): error: identifier "b" is undefined\n\nkernel.cu(3): error: another\n',
            'kernel: an error of the source at kernel.cu:3: identifier "b" is undefined\n    int a = b;\n',
        ),
        (
            'kernel.cu(2): warning #177-D: unused\nring.cuh(2): error: identifier "d" is undefined\n',
            'kernel: an error of the source at ring.cuh:2: identifier "d" is undefined\n    int c = d;\n',
        ),
        (
            "ptxas application ptx input, line 22; error   : Unknown modifier '.foo'\nptxas fatal   : aborted\n",
            "kernel: an error of the source at line 22 of its PTX: Unknown modifier '.foo'\n",
        ),
    ],
)
def test_what_no_tile_mends_is_said_with_its_line(log: str, said: str) -> None:
    error = source_error(SOURCE, ChoiceError(f"kernel: NVRTC refused the source: NVRTC_ERROR_COMPILATION (6)\n{log}"))
    assert error is not None
    assert not isinstance(error, ChoiceError)
    assert str(error).startswith(said)


@pytest.mark.parametrize(
    "log",
    [
        "ptxas error   : Entry function 'kernel' uses too much shared data (0x40000 bytes, 0x38c00 max)",
        'kernel.cu(3): error: static assertion failed with "bytes"',
        "660 B of spills at 168 registers",
        "its compiler process died of SIGABRT",
    ],
)
def test_what_another_tile_may_mend_is_left(log: str) -> None:
    assert source_error(SOURCE, ChoiceError(f"kernel: {log}")) is None
    assert source_error(replace(SOURCE, backend="triton"), ChoiceError(f"kernel: {log}")) is None


class Started(Silent):
    """An observer that keeps the attempts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, name: str) -> None:
        self.names.append(name)


def failed(
    folder: Path, backend: str | None, right: str = "", wrong: str = "", compiler: str = COMPILER, **fields: Any
) -> tuple[Source, AttngenError, list[str]]:
    """The only failure of a kernel whose tile is open and whose source says something wrong, and its attempts."""
    spec = kernel_spec(backend=backend, **fields)
    planned = plan(spec)
    assert next_attempt(Attempts(spec), [Refused(planned.name, planned.backend, "")]) is not None
    source = render(planned)
    assert right in source.text
    source = replace(source, text=source.text.replace(right, wrong, 1))
    observer = Started()
    outcome = Compiles(Store(folder / "cache"), observer, compiler)
    with worker_processes() as workers:
        outcome.run([Prepared(spec, planned, source)], 1, workers)
    (failure,) = outcome.failures
    return source, failure.error, observer.names


def test_a_wrong_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    source, error, names = failed(tmp_path, "cuda", compiler="tests.store.fakes:compile_misspelt")
    assert str(error).startswith(f"{source.name}: an error of the source at {source.file_name}:1: ")
    assert f"    // {source.name}\n" in str(error)
    assert names == (tmp_path / "log").read_text().split() == [source.name]


@few(
    ("fields", "remedy"),
    [
        ({}, "'backend: triton' avoids it"),
        ({"passes": "backward", "backward": None}, "'backward: {backend: triton}' avoids it"),
    ],
)
def test_another_backend_is_named_where_the_spec_leaves_it_open(
    tmp_path: Path, fields: dict[str, Any], remedy: str
) -> None:
    _, error, names = failed(tmp_path, None, compiler="tests.store.fakes:compile_misspelt", **fields)
    assert str(error).endswith(f"no other tile is tried; {remedy}")
    assert len(names) == 1


def line_of(source: Source, word: str) -> int:
    return 1 + source.text[: source.text.index(word)].count("\n")


@pytest.mark.exhaustive
def test_nvrtc_names_the_line(tmp_path: Path) -> None:
    source, error, names = failed(tmp_path, "cuda", "= threadIdx.x % 32", "= nothing_of_that_name")
    place = f"{source.file_name}:{line_of(source, 'nothing_of_that_name')}"
    said = f'{source.name}: an error of the source at {place}: identifier "nothing_of_that_name" is undefined\n'
    assert str(error).startswith(said)
    assert "= nothing_of_that_name;\n" in str(error)
    assert names == [source.name]


@pytest.mark.exhaustive
@few("right", ["tl.program_id(0)", "tl.exp2(x"])  # of the kernel, and of a function that it calls
def test_triton_names_the_line(tmp_path: Path, right: str) -> None:
    wrong = right.replace("tl.", "tl.nothing_")
    source, error, names = failed(tmp_path, "triton", right, wrong)
    place = f"{source.file_name}:{line_of(source, wrong)}"
    assert str(error).startswith(f"{source.name}: an error of the source at {place}: AttributeError(")
    assert "nothing_" in str(error).splitlines()[0]
    assert wrong in str(error).splitlines()[1]
    assert names == [source.name]
