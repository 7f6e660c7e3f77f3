"""README and docs are true: snippets run, specs load, commands and links exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from attngen import arch, cli, resources
from attngen.errors import SpecError
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import Spec, expand, load_spec, load_spec_text, preset_names
from tests.docs.blocks import DOCUMENTS, README, ROOT, TOUR, Block, anchors, blocks, code_spans, links, tables
from tests.sampling import few, some

YAML = [block for path in DOCUMENTS for block in blocks(path, "yaml")]
PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
#: Pages whose programs always run.
ALWAYS = ("README.md",)

#: First word of a block's comment where the block is no program to run.
NOT_RUN, EXCERPT = "not run:", "excerpt of the kernel of "


def load(block: Block, folder: Path) -> Spec:
    """Load the spec of a block as a file of the folder, in which what it includes is there."""
    (folder / "masks").mkdir(exist_ok=True)
    (folder / "masks/mine.yaml").write_text('schema: 1\nvariants: {mine: {mask: "q >= kv"}}\n')
    return load_spec_text(block.text, str(folder / f"block_of_line_{block.line}.yaml"))


def plans_of(spec: Spec) -> list[Plan]:
    return [plan(kernel) for kernel in expand(spec)]


@few("block", YAML, ids=str, always=range(0, 999, 3))
def test_specs_load(block: Block, tmp_path: Path) -> None:
    spec = load(block, tmp_path)
    plans = plans_of(spec)
    assert len({planned.name for planned in plans}) == len(plans) > 0


# --- Python -------------------------------------------------------------------------------------------------


@pytest.fixture
def known_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The variants of the Hopper spec and of all YAML blocks, as if they were built; and no GPU."""
    torch = pytest.importorskip("torch")
    from attngen.runtime.kernels.module import Kernel
    from attngen.runtime.registry.lookup import package_of_kernels, registry

    monkeypatch.chdir(tmp_path)  # where snippets write pictures
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    hopper = load_spec(resources.specs_dir() / "hopper.yaml")
    specs = [(hopper, {kernel.variant.name for kernel in expand(hopper)})]
    specs += [(spec, set(spec.model.variants)) for spec in (load(block, tmp_path) for block in YAML)]
    for spec, wanted in specs:
        first = {kernel.variant.name: kernel for kernel in reversed(expand(spec))}
        manifests = [plan(first[name]).to_dict() for name in sorted(wanted)]
        kernels = [Kernel({**manifest, "resources": {"shared_memory": 0}}, bytes) for manifest in manifests]
        if kernels:
            registry.add(package_of_kernels(kernels, "documentation"))
    yield
    registry.clear()


@pytest.mark.parametrize(
    "path", some(PYTHON, [path for path in PYTHON if path.name in ALWAYS]), ids=lambda path: path.name
)
@pytest.mark.usefixtures("known_variants")
def test_python_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a file, one after the other in one namespace; what they print stands below them."""
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks(path, "python"):
        if block.note.startswith(NOT_RUN):
            continue
        # newlines in front, so that a traceback names the line of the document
        exec(compile("\n" * block.line + block.text, str(path), "exec"), namespace)
        printed = capsys.readouterr().out
        assert block.output in (None, printed), f"{block} prints {printed!r}"
    for picture in Path.cwd().glob("*.svg"):
        shown = ROOT / "docs/figures/masks" / picture.name
        assert shown.read_text() == picture.read_text(), f"{path.name} draws another {picture.name} than it shows"


def test_comments_on_blocks_are_known() -> None:
    for path in DOCUMENTS:
        for block in blocks(path, "python"):
            assert not block.note or block.note.startswith(NOT_RUN), f"{block}: {block.note}"


def test_excerpt_is_true(tmp_path: Path) -> None:
    """Every line of the excerpt, but for its indent, stands in the rendered kernel, in this order.

    ``...`` leaves lines out.
    """
    (excerpt,) = [block for block in blocks(TOUR, "cuda") if block.note.startswith(EXCERPT)]
    name = excerpt.note.removeprefix(EXCERPT)
    (spec,) = [spec for spec in (load(b, tmp_path) for b in blocks(README, "yaml")) if name in spec.variants]
    (planned,) = plans_of(spec)
    rest = [line.strip() for line in render(planned).text.splitlines() if line]
    skipping = True
    for line in filter(None, map(str.strip, excerpt.text.splitlines())):
        if line == "...":
            skipping = True
            continue
        hint = "take the lines again from what 'attngen build SPEC --render-only' writes for the spec above"
        assert line in rest, f"docs/tour.md: the kernel has no line {line!r} here; {hint}"
        place = rest.index(line)
        assert skipping or place == 0, f"docs/tour.md: the kernel has lines before {line!r}; {hint}"
        rest, skipping = rest[place + 1 :], False


def test_error_message_is_true(tmp_path: Path) -> None:
    (block,) = blocks(README, "yaml")
    with pytest.raises(SpecError) as caught:
        load_spec_text(block.text.replace("window[h]", "windw[h]"), "specs/my_mask.yaml")
    assert str(caught.value) in TOUR.read_text()


# --- commands and links -------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        shells = [line for b in blocks(path, "bash") for line in b.text.splitlines()]
        for text in [*shells, *code_spans(path)]:
            for line in re.findall(r"(?:^|&& )(attngen [a-z].*)", text):
                yield path.name, line


def test_commands_exist() -> None:
    lines = sorted(set(command_lines()))
    assert lines
    for name, line in lines:
        check_command(name, line)


def check_command(name: str, line: str) -> None:
    _, word, *arguments = shlex.split(line)
    context = click.Context(cli.group)
    command = cli.group.get_command(context, word)
    assert command is not None, f"{name}: there is no command '{word}'"
    if isinstance(command, click.Group) and arguments:
        command = command.get_command(context, arguments.pop(0))
        assert command is not None, f"{name}: {line}"
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for argument in arguments:
        assert not argument.startswith("-") or argument in options, f"{name}: '{word}' has no option {argument}"


def test_links_lead_somewhere() -> None:
    for path, link in ((page, link) for page in DOCUMENTS for link in links(page)):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{path.name}: {link}"


# --- what the README counts and lists -----------------------------------------------------------------------


def test_readme_gives_the_commands_on_lines_of_their_own() -> None:
    lines = README.read_text().splitlines()
    assert "pip install -e '.[build]' && attngen build specs/hopper.yaml" in lines
    assert "pip install -e '.[test]' && pytest -n auto" in lines


def test_readme_lists_what_there_is() -> None:
    assert set(arch.ARCHES) <= {*re.findall(r"sm\d+a?|ptx\d+", README.read_text())}
    hopper = expand(load_spec(resources.specs_dir() / "hopper.yaml"))
    assert f"the {len(hopper)} shipped kernels for Hopper" in README.read_text()


def test_the_page_on_python_lists_the_presets() -> None:
    table = {row[0]: row[1] for rows in tables(ROOT / "docs/python.md", "", "") for row in rows}
    assert set(re.findall(r"`([a-z0-9_]+)`", table["Shipped variants"])) == set(preset_names())


def test_the_tour_lists_all_commands() -> None:
    (commands,) = tables(TOUR, "command", "")
    listed = [row[0].strip("`").removeprefix("attngen ") for row in commands]
    assert listed == cli.group.list_commands(click.Context(cli.group))
