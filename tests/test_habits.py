"""Hooks of git: subjects of commits, and where the tools come from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "commit_subject.py"

fault = run_path(str(SCRIPT))["fault"]


@pytest.mark.parametrize(
    "subject",
    ["Add a softmax kind", "Refuse dtypes that no kernel takes", "Move " + 67 * "x", "Merge branch 'a'",
     'Revert "Faster loads"', "fixup! Faster loads"],
)  # fmt: skip
def test_good_subjects(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "reason"),
    [("Faster loads", "begin with a verb"), ("Added a kind", "begin with a verb"),
     ("docs: add a page", "not with 'docs:'"), ("Move " + 68 * "x", "73 characters; allowed: at most 72")],
)  # fmt: skip
def test_bad_subjects(subject: str, reason: str) -> None:
    assert reason in fault(subject)


@pytest.mark.parametrize(("text", "status"), [("# note\n\nAdd a kind\n\nWhy.\n", 0), ("A kind\n", 1), ("# note\n", 0)])
def test_message_files(tmp_path: Path, text: str, status: int) -> None:
    message = tmp_path / "message"
    message.write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, message], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("begin with a verb" in done.stderr) == bool(status)


def test_hooks_use_the_environment() -> None:
    """No hook has a tool of its own version; those of CI are among them."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    entries = {hook["entry"] for hook in local["hooks"]}
    assert {"ruff check .", "ruff format .", "mypy"} <= entries


def test_hosted_ci_runs_what_ci_runs() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert not any("env" in part for part in (job, *job["steps"])), "settings belong in .ci/run"
