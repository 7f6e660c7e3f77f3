"""The group of commands: quick help, errors without a traceback, exit codes that mean something."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.errors import CompileError, SpecError
from tests.forked import ROOT
from tests.sampling import sampled


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_help_lists_every_command(runner):
    result = runner.invoke(cli.group, ["--help"])
    assert result.exit_code == 0
    for name in cli.group.list_commands(click.Context(cli.group)):
        assert cli.COMMANDS[name].split()[0] in result.output


def test_help_imports_nothing_heavy():
    heavy = ("torch", "triton", "pydantic", "jinja2", "yaml", "rich.console", "cupy", "numpy")
    code = f"""
import sys
from attngen.cli import main
try:
    main(["--help"])
except SystemExit as exit:
    assert exit.code == 0
print([name for name in {heavy!r} if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_each_command_has_a_module_and_help(runner):
    context = click.Context(cli.group)
    for name in cli.group.list_commands(context):
        command = cli.group.get_command(context, name)
        assert command is not None
        assert command.help


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("attngen b", {"build", "bench"}),
        ("attngen --v", {"--version"}),
        ("attngen cache ", {"list", "verify", "clear"}),
        ("attngen build --js", {"--json"}),
        ("attngen bench --suite m", {"masks"}),
    ],
)
def test_shells_complete_words(runner, words, completed):
    """As bash asks after the line of docs/tour.md."""
    asked = {"_ATTNGEN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    lines = runner.invoke(cli.group, [], prog_name="attngen", env=asked).stdout.splitlines()
    assert set(lines) == {f"plain,{word}" for word in completed}


def test_completing_a_command_imports_none():
    code = """
import os, sys
from attngen.cli import main
try:
    main([])
except SystemExit:
    pass
print([name for name in sys.modules if name.startswith(("attngen.commands.", "attngen.lab."))])
"""
    asked = {"_ATTNGEN_COMPLETE": "zsh_complete", "COMP_WORDS": "attngen b", "COMP_CWORD": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
    assert "build" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "[]"


def test_version(runner):
    result = runner.invoke(cli.group, ["--version"])
    assert result.output.startswith("attngen ")


def test_unknown_command(runner):
    result = runner.invoke(cli.group, ["biuld"])
    assert result.exit_code == 2
    assert "No such command 'biuld'; did you mean 'build'?" in result.output


@pytest.mark.parametrize(("error", "code"), [(SpecError("bad", field="x"), 2), (CompileError("broken"), 1)])
def test_errors_are_told_without_a_traceback(runner, monkeypatch, error, code):
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, context, name: failing)
    result = runner.invoke(cli.group, ["anything"])
    assert result.exit_code == code
    assert result.stderr == f"{error}\n"
    assert result.stdout == ""


@sampled(
    always=1,
    arguments={"help": ["--help"], "list": ["list"], "check": ["check", "specs/ladder.yaml"]},
    output=["unread", "closed", "full"],
)
def test_output_that_nobody_takes_leaves_no_traceback(arguments: list[str], output: str) -> None:
    """As with ``attngen list | true``, ``attngen list >&-``, and a full disk."""
    reads, writes = os.pipe()
    os.close(reads)
    redirection = {"unread": "", "closed": ">&-", "full": "> /dev/full"}[output]
    command = f"exec {sys.executable} -m attngen {' '.join(arguments)} {redirection}"
    ran = subprocess.run(["sh", "-c", command], stdout=writes, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writes)
    told = "the output cannot be written: the disk is full\n" if output == "full" else ""
    assert (ran.returncode, ran.stderr) == (0 if output == "closed" else 1, told)
