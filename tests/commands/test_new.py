"""``attngen new``: scaffolds that pass ``attngen check`` as they stand, and never an overwritten file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.arch import ARCHES
from attngen.dtypes import ATTENTION_DTYPES
from attngen.lang.ir import INDEX_NAMES
from attngen.lang.parser import FUNCTIONS
from attngen.lang.variant import Variant
from attngen.schema import load_spec, preset, preset_names
from tests.sampling import few


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(cli.group, list(arguments))


def same_but_for_the_name(variant: Variant, name: str) -> dict:
    return variant.to_dict() | {"name": name}


def test_scaffold_checks(folder):
    result = run("new", "mine")
    assert result.exit_code == 0, result.output
    assert result.output == "wrote specs/mine.yaml; next: attngen check specs/mine.yaml\n"
    assert run("check", "specs/mine.yaml", "--strict").exit_code == 0


def test_scaffold_lists_all_that_a_spec_may_name(folder):
    run("new", "mine", "--out", "mine.yaml")
    lines = (folder / "mine.yaml").read_text().splitlines()
    assert max(map(len, lines)) <= 120
    words = set(re.findall(r"\w+", " ".join(line.partition("#")[2] for line in lines)))
    assert words >= {*ARCHES, *FUNCTIONS, *INDEX_NAMES, *ATTENTION_DTYPES}


@few("name", preset_names(), always=(0, 9))
def test_scaffold_from_a_preset_checks(folder, name):
    assert run("new", "mine", "--preset", name, "--out", "mine.yaml").exit_code == 0
    result = run("check", "mine.yaml", "--strict")
    assert result.exit_code == 0, result.output
    scaffolded = load_spec("mine.yaml").variants["mine"].variant
    assert scaffolded.to_dict() == same_but_for_the_name(preset(name), "mine")


def test_never_overwrites(folder):
    (folder / "mine.yaml").write_text("precious")
    result = run("new", "mine", "--out", "mine.yaml")
    assert result.exit_code == 2
    assert "mine.yaml: exists already" in result.stderr
    assert (folder / "mine.yaml").read_text() == "precious"


@pytest.mark.parametrize("name", ["../mine", "Mine", "a b", "class", "a\nb", "{x}", ""])
def test_refuses_bad_names(folder, name):
    result = run("new", name)
    assert result.exit_code == 2
    assert not (folder / "specs").exists()


def test_unknown_preset(folder):
    result = run("new", "mine", "--preset", "causl")
    assert result.exit_code == 2
    assert "did you mean 'causal'?" in result.stderr
    assert not (folder / "specs").exists()


def test_folder_that_cannot_be_made(folder):
    (folder / "specs").write_text("a file")
    result = run("new", "mine")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr or "exists already" in result.stderr
