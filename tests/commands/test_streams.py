"""Colors as the environment wants them, and text that every stream can print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.glyphs import ERRORS, printable
from tests.build.test_build import SPEC
from tests.forked import ROOT
from tests.sampling import few

RED, BOLD = "\x1b[31m", "\x1b[1m"
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


@few(
    ("environment", "terminal", "colored"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR_FORCE": "0"}, False, False),
        ({"CLICOLOR": "0"}, True, False),
        ({"CLICOLOR": "1"}, False, False),
        ({"CLICOLOR": "0", "FORCE_COLOR": "1"}, False, True),
    ],
    always=(1,),
)
def test_colors_are_those_that_the_environment_wants(
    monkeypatch: pytest.MonkeyPatch, spec: Path, environment: dict[str, str], terminal: bool, colored: bool
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # ``color`` of the runner stands for a terminal: click strips nothing then, unless asked to
    result = CliRunner().invoke(cli.group, ["check", "none.yaml"], color=terminal)
    assert "there is no file" in result.stderr
    assert (RED in result.stderr) == colored
    if colored is not terminal:
        return
    headed = CliRunner().invoke(cli.group, ["explain", str(spec), "sm90a_tma_bf16_d64_causal"], color=terminal)
    assert (BOLD in headed.stdout) == colored


def test_a_usage_error_and_a_table_have_no_colors_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(SPEC)
    monkeypatch.setenv("NO_COLOR", "1")
    for arguments in (["check"], ["build", "--jobs", "0", "mine.yaml"], ["cache", "list"], ["biuld"]):
        assert "\x1b[3" not in CliRunner().invoke(cli.group, arguments, color=True).output


#: Every command that ends without a GPU and without compiling for long, and each form of ``show``.
COMMANDS = [
    ["--help"], ["bench", "--help"], ["build", "mine.yaml"], ["build", "mine.yaml"],
    ["build", "mine.yaml", "--render-only"], ["list"], ["list", "--json"], ["show", "sm80"], ["show", "nothing"],
    *[["show", "KERNEL", *form] for form in ([], ["--source"], ["--ptx"], ["--ttgir"], ["--sass"], ["--json"])],
    ["check", "mine.yaml"], ["check", "no µs.yaml"], ["explain", "mine.yaml"], ["explain", "mine.yaml", "causal"],
    ["explain", "mine.yaml", "causal", "--html", "page.html"], ["explain", "hopper.yaml"],
    ["spec", "none:none"], ["new", "other"], ["cache", "list"], ["cache", "verify"], ["doctor"],
    ["bench", "mine.yaml", "--dry-run"], ["package", "mine.yaml"], ["verify", "mine.yaml", "--only", "µ"],
    ["tune", "mine.yaml"],
]  # fmt: skip

#: A kernel of which times are predicted, in microseconds.
HOPPER = "schema: 1\narch: sm90a\nkernels: [{variant: causal, head_dim: 64, backend: cuda}]\n"

PROGRAM = """
import json, sys, traceback
from pathlib import Path
import attngen
from attngen import cli
from attngen.commands import doctor
from attngen.build import pipeline
pipeline.COMPILER = "tests.store.fakes:compile_quickly"
doctor._arches = doctor._cuda_compiler = list
kernel, codes = "", []
for command in json.loads(sys.argv[1]):
    command = [kernel if word == "KERNEL" else word for word in command]
    try:
        cli.main(command)
    except SystemExit as ended:
        codes.append(ended.code)
    except BaseException:
        codes.append(traceback.format_exc())
    if not kernel and Path("generated").exists():
        from attngen.runtime.registry.lookup import registry
        kernel = next(k.name for _, p in registry.packages() for k in p.every_kernel)
import torch
sys.stdout.reconfigure(errors="strict")
causal = attngen.variant("q_pos >= kv", name="causal")
print(causal.plot(64), causal.explain(64))
q = torch.randn(1, 40, 2, 16)
print(attngen.debug.scores(q, q, q, variant=causal).plot())
print(attngen.explain(q, q, q, variant=causal))
Path("codes.json").write_text(json.dumps(codes))
"""


@few("encoding", ["ascii", "latin-1"], always=0, often=(0,))
def test_no_command_fails_for_what_a_stream_cannot_print(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "mine.yaml").write_text(SPEC)
    (tmp_path / "hopper.yaml").write_text(HOPPER)
    environment = {
        **os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding,
        "PYTHONPATH": str(ROOT), "ATTNGEN_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, check=False)
    said = done.stderr.decode(errors="replace")  # click writes UTF-8 where a stream says ASCII
    assert done.returncode == 0, said
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert [code for code in codes if code not in (None, 0, 1, 2)] == []
    assert "Traceback" not in said
    picture = done.stdout[done.stdout.index(b"64 queries down") :].decode(encoding)
    assert "#+" in picture
    assert "\\u2588" not in picture


def test_a_character_that_is_lacking_is_replaced_by_one_like_it() -> None:
    assert "a·b".encode("latin-1", ERRORS) == b"a\xb7b"
    assert "3 µs ·░▒▓█ …".encode("ascii", ERRORS) == b"3 us .:+%# ..."
    assert "日".encode("ascii", ERRORS) == b"\\u65e5"
    assert printable("·▒█") == "·▒█"  # where the tests run, or pytest's own stream
