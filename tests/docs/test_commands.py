"""Every command that README and docs show is run, in a folder that holds the specs they speak of.

The spec of README is compiled, for CUDA; of the shipped specs, which other tests compile, each is cut down to its first
kernel, and a fake compiler stands in. What cannot run here is listed with the reason, and how much of it is run all the
same.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from attngen import cli, resources
from attngen.build import pipeline as build
from attngen.inspect import visits
from attngen.lab.bench import grid
from attngen.lab.bench.serving import suite as serving
from attngen.lab.bench.small import oracle
from attngen.lab.bench.small import suite as small
from attngen.runtime.registry.lookup import registry
from attngen.schema import Spec
from attngen.schema.tuned import tuned_text
from tests.docs.blocks import DOCUMENTS, README, ROOT, blocks, code_spans
from tests.sampling import some
from tests.store import fakes

#: Commands of others that blocks show: what they begin with, and why they are not run here.
NOT_OURS = {
    "pip install": "needs a network",
    "pip download": "needs a network; .ci/run does it",
    "pip wheel": "tests/packaging/test_project.py builds such a project",
    "python -m venv": ".ci/run makes such an environment",
    ". /tmp/": "enters such an environment",
    ".ci/release": ".ci/run calls it",
    "git tag": "changes the repository",
    "twine upload": "needs an account",
    "pytest": "runs these tests",
    "ruff": "checks the source",
    "mypy": "checks the source",
    "pre-commit": "installs hooks in the checkout",
    "python -m tests.render.generated": "tests/render/test_golden.py calls its parts",
    "python -m tests.gpu.record": "tests/test_gpu_record.py runs it",
    "vllm serve": "an engine",
    "python -m sglang.launch_server": "an engine",
    "python -m tests.integrations.engines.engine_contracts": "downloads the engines",
    "python -m tests.integrations.engines.sparse_runs": "needs an engine and a GPU",
    "ATTNGEN_JIT=1 vllm serve": "an engine",
    "ATTNGEN_SHARED_PREFIX=1 vllm serve": "an engine",
    "ATTNGEN_JIT=1 ATTNGEN_MASK=": "an engine",
    "ATTNGEN_INDEXER=1 vllm serve": "an engine",
    "ATTNGEN_BLOCK_LISTS=1 vllm serve": "an engine",
    "PYTHONPATH=. ATTNGEN_": "an engine",
    "python docs/examples/": "tests/docs/test_examples.py runs the scripts",
    "hf ": "needs an account",
    "export ": "sets a variable for other programs",
    "build/hub/bin/": "that environment",
    "torchrun --nproc-per-node": "tests/docs/test_examples.py runs the script",
}

#: Commands of attngen that need a GPU, and the option with which they do all else.
WITHOUT_A_GPU = {"bench": "--dry-run"}

#: Commands and options that do nothing without one, whose arguments are parsed; tests/lab and tests/gpu run them.
ON_A_GPU = {"tune", "verify", "--report"}

#: The spec of README, whose kernel is compiled.
MINE = "my_mask.yaml"

#: The page whose first program has the functions of which a spec is written.
FUNCTIONS = ROOT / "docs/flex_attention.md"

#: The model whose spec is written.
CONFIG = '{"model_type": "llama", "num_hidden_layers": 2, "dtype": "bfloat16"}'

#: Values for the words in capitals that prose uses.
PLACEHOLDERS = {"SPEC": f"specs/{MINE}", "KERNEL": "my_mask", "NAME": "example", "P": "sliding_window", "FILE": "file"}


@dataclass(frozen=True)
class Shown:
    """A command that a document shows."""

    path: Path
    line: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.line}"


def _in_blocks() -> Iterator[Shown]:
    for path in DOCUMENTS:
        for block in blocks(path, "bash"):
            for line in (line for line in block.text.splitlines() if not line.startswith("#")):
                yield from (Shown(path, part.strip()) for part in line.split("&&") if part.strip())


def _in_prose() -> Iterator[Shown]:
    """Yield commands with arguments; ``attngen build`` alone is the name of a command."""
    for path in DOCUMENTS:
        for span in dict.fromkeys(code_spans(path)):
            if re.match(r"attngen [a-z]+ \S", span):
                yield Shown(path, span)


BLOCKS, PROSE = list(_in_blocks()), list(_in_prose())
OURS = [shown for shown in BLOCKS if shown.line.startswith("attngen ")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A folder with the shipped specs as they are, and one in which each asks for one kernel; one cache."""
    root = tmp_path_factory.mktemp("commands")
    copies = {"whole": root / "whole", "small": root / "small"}
    for folder in copies.values():
        shutil.copytree(resources.specs_dir(), folder / "specs")
        (folder / "specs" / MINE).write_text(blocks(README, "yaml")[0].text)
        shutil.copy(folder / "specs/presets/causal.yaml", folder / "specs/presets/example.yaml")
        (folder / "config.json").write_text(CONFIG)
        (folder / "my_module.py").write_text(blocks(FUNCTIONS, "python")[0].text)
        (folder / "h100.yaml").write_text(tuned_text("a card", {}, []))
    for path in (copies["small"] / "specs").rglob("*.yaml"):
        path.write_text(_first_kernel(path.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(root / "cache"))
        built = _run(f"attngen build specs/{MINE}", copies)  # which prose reads, in whatever order tests run
        assert built.exit_code == 0, built.output
        yield copies
    registry.clear()


def _first_kernel(text: str) -> str:
    spec = yaml.safe_load(text)
    if spec.get("kernels"):
        lists = {name: value for name, value in spec["kernels"][0].items() if isinstance(value, list)}
        # pages ask for the small form of a drop-in's spec by this head dim
        first = {name: 128 if name == "head_dim" and 128 in values else values[0] for name, values in lists.items()}
        spec["kernels"] = [{**spec["kernels"][0], **first}]
    return yaml.safe_dump(spec, sort_keys=False)


def _parsed(line: str) -> tuple[click.Command, str, list[str]]:
    """Return a command, its name and its arguments, with what it needs in place of placeholders."""
    word, *arguments = [_filled(word) for word in shlex.split(line)[1:]]
    command = cli.group.get_command(click.Context(cli.group), word)
    assert command is not None, line
    takes_specs = any(p.name in ("spec", "specs") and isinstance(p, click.Argument) for p in command.params)
    without = {"--schema", "masks", "trees", "parallel"}.intersection(arguments)  # these read no spec
    if takes_specs and not without and not any(one.endswith(".yaml") for one in arguments):
        arguments.append(f"specs/{MINE}")  # prose names an option alone
    return command, word, arguments


def _run(line: str, folders: dict[str, Path]) -> Result:
    """Run a command in the folder of its specs."""
    _, word, arguments = _parsed(line)
    option = WITHOUT_A_GPU.get(word)
    if option is not None and option not in arguments:
        arguments.append(option)
    registry.clear()  # a process of its own would know what the last one built
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folders["small" if option is None else "whole"])
        if word == "explain":  # a few tiles of queries stand for all
            patch.setattr(visits, "_WORK", 2**20)
        if word == "bench":
            for suite in (grid, oracle, serving, small):
                patch.setattr(suite, "prepare_unrendered", _prepared_once)
        if f"specs/{MINE}" not in arguments:
            fakes.compile_by(patch, "tests.runtime.manifests:compile_as_manifest")
        return CliRunner().invoke(cli.group, [word, *arguments], input="y\n")  # where it asks


#: Whole specs, planned: several commands measure the same one.
_PREPARED: dict[str, list[build.Prepared]] = {}


def _prepared_once(spec: Spec) -> list[build.Prepared]:
    if spec.name not in _PREPARED:
        _PREPARED[spec.name] = build.prepare_unrendered(spec)
    return _PREPARED[spec.name]


def _filled(word: str) -> str:
    return re.sub(r"\b(?:SPEC|KERNEL|NAME|FILE|P)\b", lambda match: PLACEHOLDERS[match[0]], word.removeprefix("/tmp/"))


#: Lines of blocks that have been run: several documents show the same ones.
_HAVE_RUN: set[str] = set()


@pytest.mark.parametrize(
    "path",
    some([path for path in DOCUMENTS if any(s.path == path for s in OURS)], [README]),
    ids=lambda p: p.name,
)
def test_blocks_run(path: Path, folders: dict[str, Path]) -> None:
    """Run the commands of a document one after the other, as a reader does."""
    for shown in OURS:
        if shown.path == path:
            command, word, arguments = _parsed(shown.line)
            if ON_A_GPU.intersection((word, *arguments)):
                command.make_context(word, arguments)
                continue
            if shown.line in _HAVE_RUN:
                continue
            _HAVE_RUN.add(shown.line)
            result = _run(shown.line, folders)
            if "needs matplotlib" in result.stderr and find_spec("matplotlib") is None:
                continue
            assert result.exit_code == 0, (str(shown), result.output, result.exception)
            assert result.stdout.strip() or result.stderr.strip(), str(shown)


#: The first of each command, and options that no other test of commands takes.
ALWAYS = [
    *{shown.line.split()[1]: shown for shown in reversed(PROSE)}.values(),
    *(shown for shown in PROSE if shown.line.endswith(("--full", "--tuned h100.yaml"))),
]


@pytest.mark.parametrize("shown", some(PROSE, ALWAYS), ids=str)
def test_commands_in_prose_run(shown: Shown, folders: dict[str, Path]) -> None:
    (folders["small"] / "specs/example.yaml").unlink(missing_ok=True)  # what 'attngen new' writes
    command, word, arguments = _parsed(shown.line)
    if ON_A_GPU.union(WITHOUT_A_GPU).intersection((word, *arguments)):  # whole runs are those of the blocks
        command.make_context(word, arguments)
        return
    result = _run(shown.line, folders)
    assert result.exit_code == 0, (str(shown), result.output, result.exception)


@pytest.mark.exhaustive
def test_forms_of_show_of_a_cuda_kernel(folders: dict[str, Path]) -> None:
    """Each form of ``show``, of a kernel in CUDA: what there is, and a sentence for what there cannot be."""
    for line in ("attngen build specs/my_mask.yaml", "attngen show my_mask"):
        assert _run(line, folders).exit_code == 0
    shown = {form: _run(f"attngen show my_mask --{form}", folders) for form in FORMS}
    assert {form: result.exit_code == 0 for form, result in shown.items()} == FORMS
    assert "__global__" in shown["source"].stdout
    assert "HGMMA" in shown["sass"].stdout
    for form in ("ptx", "ttgir"):
        assert f"has no {form.upper()}: CUDA kernels are compiled to machine code" in shown[form].stderr


#: Whether there is such a form of a CUDA kernel.
FORMS = {"source": True, "sass": True, "json": True, "ptx": False, "ttgir": False}


@pytest.mark.parametrize("shown", [shown for shown in BLOCKS if shown not in OURS], ids=str)
def test_other_commands_are_known(shown: Shown) -> None:
    reasons = [why for start, why in NOT_OURS.items() if shown.line.startswith(start)]
    assert reasons, f"{shown} is neither a command of attngen nor one that tests know"


@pytest.mark.parametrize("name", cli.group.list_commands(click.Context(cli.group)))
def test_every_command_tells_its_options(name: str) -> None:
    """The table of README names them alone; each says how it is used."""
    result = CliRunner().invoke(cli.group, [name, "--help"])
    assert result.exit_code == 0
    assert f"{name} [OPTIONS]" in result.stdout
