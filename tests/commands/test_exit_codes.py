"""Exit codes of every command; whoever asked for JSON gets JSON, errors included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.build.test_build import SPEC
from tests.commands.test_build import attngen
from tests.sampling import few
from tests.store import fakes

#: Two entries: a kernel that can be built, and one that cannot be planned, in line 5.
HALF = """\
schema: 1
arch: sm90a
kernels:
  - {variant: causal, head_dim: 64, backend: triton}
  - {variant: full, head_dim: 64, backend: triton, epilogue: staged}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of specs: one that is right, one half right, one wrong, one whose kernels do not compile."""
    fakes.compile_by(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SPEC)
    (tmp_path / "half.yaml").write_text(HALF)
    (tmp_path / "wrong.yaml").write_text(SPEC.replace("mask", "mesk"))
    (tmp_path / "unplanned.yaml").write_text("\n".join(line for line in HALF.splitlines() if "causal" not in line))
    (tmp_path / "rejected.yaml").write_text(SPEC.replace("near", "reject"))
    (tmp_path / "empty.yaml").write_text("schema: 1\n")
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    (tmp_path / "file").touch()
    return tmp_path


#: Arguments, exit code, and a part of what is said.
CASES = [
    ("build mine.yaml", 0, ""),
    ("build none.yaml", 2, "there is no file"),
    ("build circle.yaml", 2, "there is no file"),
    ("build wrong.yaml", 2, "did you mean 'mask'"),
    ("build mine.yaml --arch sm75", 2, "no kernels for 'sm75'"),
    ("build mine.yaml --jobs 0", 2, "--jobs"),
    ("build half.yaml", 2, "epilogue"),
    ("build unplanned.yaml", 2, "epilogue"),
    ("build rejected.yaml", 1, "rejected"),
    ("build half.yaml --render-only", 2, "epilogue"),
    ("build mine.yaml --render-only --out file/below", 1, "cannot write"),
    ("check mine.yaml", 0, ""),
    ("check half.yaml", 2, "epilogue"),
    ("check none.yaml", 2, "there is no file"),
    ("check", 2, "name at least one spec"),
    ("list", 0, ""),
    ("list --packages mine", 2, "No such option"),
    ("show nothing", 2, "no kernel 'nothing' is built"),
    ("explain wrong.yaml", 2, "did you mean 'mask'"),
    ("explain mine.yaml d65", 2, "has no kernel 'd65'"),
    ("explain mine.yaml --scalar width", 2, "is not NAME=VALUE"),
    ("explain mine.yaml --scalar wodth=3", 2, "no scalar 'wodth'"),
    ("explain mine.yaml --scalar width=wide", 2, "'wide' is not"),
    ("explain mine.yaml --set width=99999999999", 2, "'99999999999' is not"),
    ("explain empty.yaml", 2, "no kernels: the spec builds nothing; add an entry"),
    ("build empty.yaml", 2, "no kernels: the spec builds nothing; add an entry"),
    ("build empty.yaml --render-only", 2, "no kernels: the spec builds nothing; add an entry"),
    ("check empty.yaml", 2, "no kernels: the spec builds nothing; add an entry"),
    ("package empty.yaml", 2, "no kernels: the spec builds nothing; add an entry"),
    ("explain mine.yaml --head 16", 2, "--head must be 0 to 15, got 16"),
    ("explain mine.yaml --tensor t=none.pt", 2, "'t'"),
    ("verify none.yaml", 2, "there is no file"),
    ("verify mine.yaml --only d65", 2, "has no kernel 'd65'"),
    ("package mine.yaml --max-size big", 2, "size 'big' is not understood"),
    ("package mine.yaml --platform Linux", 2, "is not a platform tag"),
    ("package mine.yaml --version new", 2, "version 'new'"),
    ("package mine.yaml --licence none.txt", 2, "licence"),
    ("package mine.yaml --arch sm75", 2, "no kernels for 'sm75'"),
    ("package mine.yaml --out file/below", 1, "cannot write to"),
    ("package rejected.yaml", 1, "do not compile"),
    ("cache list", 0, ""),
    ("cache lost", 2, "No such command 'lost'"),
]


@few(("line", "code", "says"), CASES, ids=[case[0] for case in CASES], always=range(0, 999, 2))
def test_exit_codes(folder: Path, line: str, code: int, says: str) -> None:
    result = attngen(*line.split(), code=code)
    assert says in result.stderr


@few(
    ("line", "code", "says"),
    [case for case in CASES if case[1]],
    always=[n for n, case in enumerate(case for case in CASES if case[1]) if n % 6 == 0 or case[0] == "cache lost"],
    ids=[case[0] for case in CASES if case[1]],
)
def test_errors_as_json(folder: Path, line: str, code: int, says: str) -> None:
    """Standard output is one JSON object, whatever went wrong."""
    told = json.loads(attngen(*line.split(), "--json", code=code).stdout)
    assert isinstance(told, dict)
    if "errors" in told:
        assert told["errors"]
        assert all(set(row) == {"message", "file", "line", "field"} for row in told["errors"])
        # an option's value may be the flag itself; else the message says what stderr does
        assert any(says in json.dumps(row, ensure_ascii=False) for row in told["errors"])


def test_an_error_as_json_has_its_place(folder: Path) -> None:
    (error,) = json.loads(attngen("build", "unplanned.yaml", "--json", code=2).stdout)["errors"]
    assert (error["file"], error["line"], error["field"]) == ("unplanned.yaml", 4, "epilogue")
    assert "unplanned.yaml" not in error["message"]
    (folder / "two.yaml").write_text(HALF.replace("causal, head_dim: 64", "causal, head_dim: 65"))
    errors = json.loads(attngen("explain", "two.yaml", "--json", code=2).stdout)["errors"]
    assert [(row["line"], row["field"]) for row in errors] == [(4, "head_dim"), (5, "epilogue")]


@pytest.mark.exhaustive
def test_failures_of_single_kernels_have_their_places(folder: Path) -> None:
    report = json.loads(attngen("build", "half.yaml", "--json", code=2).stdout)
    (failure,) = report["failures"]
    assert (failure["file"], failure["line"], failure["field"]) == ("half.yaml", 5, "epilogue")
    assert [kernel["refused"] for kernel in report["kernels"]] == [[]]
    failures = json.loads(attngen("build", "rejected.yaml", "--json", code=1).stdout)["failures"]
    assert len(failures) == 2
    for failure in failures:
        line = (folder / "rejected.yaml").read_text().splitlines()[failure["line"] - 1]
        assert (failure["file"], failure["field"]) == ("rejected.yaml", None)
        assert "variant" in line


def test_a_failed_compile_outweighs_what_was_asked_wrongly(folder: Path) -> None:
    (folder / "rejected.yaml").write_text(
        SPEC.replace("near", "reject") + "  - {variant: causal, head_dim: 64, backend: triton, epilogue: staged}\n"
    )
    result = attngen("build", "rejected.yaml", code=1)
    assert "epilogue" in result.stderr
    assert "rejected" in result.stderr


@pytest.mark.exhaustive
def test_a_build_that_is_not_on_a_terminal_tells_of_each_kernel(folder: Path) -> None:
    lines = attngen("build", "rejected.yaml", code=1).stderr.splitlines()
    told = [line for line in lines if line.startswith("[")]
    assert [line.split()[0] for line in told] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert sum(line.endswith(" failed") for line in told) == 2
    assert all("fwd_" in line for line in told)
    assert attngen("build", "mine.yaml").stderr.count("[") == 4
    assert attngen("build", "mine.yaml").stderr == ""


def test_check_finds_a_fault_of_rendering_and_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen import render

    right = render.render

    def fails_on_near(planned):
        if planned.variant.name == "near":
            raise KeyError("n")
        return right(planned)

    monkeypatch.setattr(render, "render", fails_on_near)
    (report,) = json.loads(attngen("check", "mine.yaml", "--json", code=1).stdout)["specs"]
    assert {kernel["variant"] for kernel in report["kernels"]} == {"causal"}
    assert [("near" in row["kernel"], row["file"]) for row in report["errors"]] == [(True, "mine.yaml")] * 2
    assert "failed on it with KeyError" in report["errors"][0]["message"]
