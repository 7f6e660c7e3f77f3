"""The order of the packages: lower ones import only upper ones, and a call imports no compiler."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from attngen.cli import EXTRAS
from attngen.operations import ATTENTION, OPERATIONS
from tests import forked

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "attngen"

#: From upper to lower. A module may import those of its own layer and of the layers above.
LAYERS = (
    {
        "errors", "dtypes", "arch", "cards", "drivers", "formats", "files", "cache_root", "glyphs", "operations",
        "records", "resources",
    },
    {"lang"},
    {"manifest"},
    {"schema"},
    {"plan"},
    {"render"},
    {"parts"},
    {"families"},  # the catalogue of the plan names them as text
    {"compile"},
    {"store"},
    {"runtime"},
    {"build"},
    {"inspect"},
    {"integrations"},
    {"variants", "trees"},
    {"parallel"},
    {"packaging"},
    {"commands", "cli"},
    {"lab"},  # nothing imports it but, by name, the command line
    {"tools"},  # earlier import paths
)  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

#: The doors: what they import is fetched at the first use.
FACADES = {"__init__.py", "__main__.py"}

#: Modules that a shipped package must not need; the runtime reads manifests.
NOT_FOR_RUNTIME = {"schema", "plan", "render", "parts", "families", "compile", "build", "inspect"}

#: The same inside ``attngen/runtime``, between device and call.
RUNTIME = (
    "cache", "device", "arguments", "kernels", "geometry", "reference", "registry", "launch", "autograd", "operations",
    "exported",
)  # fmt: skip

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).as_posix() not in FACADES)


@cache
def imported_names(path: Path) -> list[tuple[int, list[str]]]:
    """Line and dotted parts of each import of attngen, inside functions too."""
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "attngen":
                imported.append((node.lineno, parts))
    return imported


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and top-level part (``lang``, ``schema`` …) of each import of attngen."""
    for line, parts in imported_names(path):
        if len(parts) > 1 and parts[1] in RANK:
            yield line, parts[1]


def test_every_part_has_a_layer() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(RANK)


def test_lower_packages_import_only_upper_ones() -> None:
    wrong = []
    for path in MODULES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for line, part in imports(path):
            if RANK[part] > RANK[own] or (own in ("runtime", "integrations") and part in NOT_FOR_RUNTIME):
                wrong.append(f"{path}:{line}: {own} must not import {part}")
    assert not wrong


def graph(folder: Path, package: str) -> dict[str, set[str]]:
    """Imports of each module, inside functions and for types alone, too."""
    names = {}
    for path in folder.rglob("*.py"):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        if path.relative_to(folder).as_posix() in FACADES:
            continue
        full = (".".join(parts) for _, parts in imported_names(path))
        imported[name] = {one if one in names else one.rpartition(".")[0] for one in full} & (names.keys() - {name})
    return imported


def cycles(imported: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules each of which imports the others, directly or not."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in imported.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reach = {name: reached(name) for name in imported}
    groups = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in imported}
    return sorted((set(group) for group in groups if group), key=sorted)


#: Rooms that stand beside each other, and those of them that import others. No more should: what two of them need
#: belongs to ``attngen/parts`` or to their ``shared``.
BESIDE = {
    "families": {
        "latent": {"decode"},
        "latent_backward": {"latent"},
        "mma_forward": {"hopper_forward"},
        "wide": {"decode", "latent"},
    },
    "runtime/operations": {
        "quantize": {"append"},
        "attention": {"append", "quantize", "widen"},
        "shared_prefix": {"attention", "merge"},
    },
    "integrations": {
        "diffusers": {"torch_sdpa"},
        "sglang": {"engines"},
        "torch_sdpa": {"flash_attn", "transformers"},
        "transformers": {"flash_attn"},
        "vllm": {"engines", "flash_attn"},
    },
}


@pytest.mark.parametrize("folder", BESIDE)
def test_rooms_import_no_others_but_those_listed(folder: str) -> None:
    rooms = {path.parent.name for path in (PACKAGE / folder).glob("*/__init__.py")}
    place = ["attngen", *folder.split("/")]
    others: dict[str, set[str]] = {}
    for room in rooms:
        for path in (PACKAGE / folder / room).rglob("*.py"):
            for _, parts in imported_names(path):
                if parts[: len(place)] == place and parts[len(place)] in rooms - {room, "shared"}:
                    others.setdefault(room, set()).add(parts[len(place)])
    assert others == BESIDE[folder]


def test_modules_import_in_one_direction() -> None:
    assert cycles(graph(PACKAGE, "attngen")) == []


def test_cycles_are_found(tmp_path: Path) -> None:
    """Through imports inside of functions, of names, and under ``TYPE_CHECKING``."""
    (tmp_path / "part").mkdir()
    for name, text in {
        "part/__init__.py": "",
        "part/a.py": "def f():\n    from attngen.part import b",
        "part/b.py": "from attngen.part.c import name",
        "part/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import attngen.part.a",
        "part/d.py": "from attngen.part import a",
    }.items():
        (tmp_path / name).write_text(text)
    assert cycles(graph(tmp_path, "attngen")) == [{"attngen.part.a", "attngen.part.b", "attngen.part.c"}]


#: Packages whose parts have an order of their own.
ORDERED = {"runtime": RUNTIME}


@pytest.mark.parametrize("package", ORDERED)
def test_every_part_of_a_package_has_a_place(package: str) -> None:
    parts = {path.stem for path in (PACKAGE / package).iterdir()} - {"__init__", "__pycache__"}
    assert parts == set(ORDERED[package])


def test_parts_import_only_what_stands_before_them() -> None:
    wrong = []
    for path in (path for path in MODULES if path.relative_to(PACKAGE).parts[0] in ORDERED):
        package, own = path.relative_to(PACKAGE).parts[:2]
        order, own = ORDERED[package], own.removesuffix(".py")
        for line, parts in imported_names(path):
            if parts[1] == package and order.index(parts[2]) > order.index(own):
                wrong.append(f"{path}:{line}: {own} must not import {parts[2]}")
    assert not wrong


def loaded(code: str, *names: str, after_torch: bool = False) -> list[str]:
    """Modules among ``names`` that are loaded after ``code`` in a fresh process, or in one with torch alone."""
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nprint(*[n for n in {names} if n in sys.modules])"
    command = [sys.executable, "-c", script]
    if after_torch:
        done = forked.preload("import torch\n", ()).run(command, env=os.environ, cwd=ROOT)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


COMPILERS = (
    "triton", "cupy", "cupy_backends", "jinja2", "pydantic", "yaml", "attngen.schema", "attngen.plan", "attngen.render",
)  # fmt: skip
OTHERS = ("torch", "numpy", "rich", "click", "platformdirs", "attngen.compile", "attngen.lang")


def test_importing_attngen_imports_nothing_else() -> None:
    assert loaded("import attngen", *COMPILERS, *OTHERS) == []


def test_the_modules_of_a_call_hold_no_compiler() -> None:
    code = "import attngen\nfor name in attngen.__all__:\n    getattr(attngen, name)"
    assert loaded(code, *COMPILERS, "attngen.compile.triton", after_torch=True) == []


#: What a call on the CPU needs nothing of.
OF_KERNELS = (
    "attngen.compile", "attngen.store", "attngen.manifest", "attngen.runtime.device", "attngen.runtime.geometry",
    "attngen.runtime.kernels", "attngen.runtime.launch", "attngen.runtime.operations.shared",
    *(f"attngen.{row.folder}" for row in OPERATIONS if row.directions and row is not ATTENTION),
)  # fmt: skip


def test_calls_on_the_cpu_load_nothing_of_kernels(tmp_path: Path) -> None:
    """No variant is built: the definition of one that is would be read from its kernels."""
    code = (
        f"import os\nos.environ['ATTNGEN_CACHE'] = {str(tmp_path)!r}\n"
        "import attngen, torch\n"
        "q = torch.ones(1, 8, 2, 16, requires_grad=True)\n"
        "starts = torch.tensor([0, 8], dtype=torch.int32)\n"
        "attngen.attention(q, q, q, variant='causal').sum().backward()\n"
        "attngen.attention_varlen(q[0], q[0], q[0], starts, starts, 8, 8).sum().backward()\n"
        "attngen.attention_paged(q, q, q, starts[None, :1], starts[1:])"
    )
    assert loaded(code, *OF_KERNELS, after_torch=True) == []


def test_a_call_on_arrays_imports_no_other_library() -> None:
    code = (
        "import attngen, numpy\n"
        "q = numpy.ones((1, 2, 1, 16), numpy.float32)\n"
        "assert type(attngen.attention(q, q, q, variant='causal')) is numpy.ndarray"
    )
    assert loaded(code, "cupy", "jax", *COMPILERS[2:], after_torch=True) == []


def test_reading_the_cache_needs_no_compiler_and_no_torch() -> None:
    code = "from attngen.store import Store\nfrom attngen.store.index import read_indexes\nread_indexes(Store())"
    assert loaded(code, *COMPILERS, "attngen.compile.toolchain", "torch", "numpy") == []


def test_help_imports_no_command() -> None:
    code = "from attngen.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    names = (*COMPILERS, "torch", "attngen.lab")
    assert [name for name in loaded(code, *names) if name in names] == []


def test_commands_are_there_without_the_extra_that_they_need() -> None:
    """One that needs a module of ``EXTRAS`` says so when it runs."""
    code = "from attngen import cli\nfor name in cli.COMMANDS:\n    cli.group.get_command(None, name)"
    assert loaded(code, *EXTRAS) == []


def test_without_torch_one_sentence_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it fails
import attngen
causal = attngen.variant("q >= kv", name="mine")
for call in (
    lambda: causal.plot(8), lambda: causal.mask(8), lambda: causal.explain(), lambda: attngen.attention,
    lambda: attngen.integrations.sdpa, lambda: attngen.integrations.flex_attention,
):
    try:
        call()
    except (attngen.errors.LoadError, ImportError) as error:
        print(error)
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    subjects = [
        line.partition(" needs torch, which is not installed; install its build for your GPU")[0] for line in lines
    ]
    assert subjects == [
        "a picture of a mask", "a mask", "explaining a mask", "attngen.attention", "attngen.integrations.sdpa",
        "attngen.integrations.flex_attention",
    ]  # fmt: skip


def test_building_needs_no_torch() -> None:
    code = (
        "sys.modules['torch'] = None  # an import of it fails\n"
        "import attngen.build.pipeline, attngen.compile.triton, attngen.plan, attngen.render, attngen.schema\n"
        "import attngen.packaging.hook, attngen.packaging.make\n"
        "import triton, triton.compiler\n"
        "del sys.modules['torch']"
    )
    assert loaded(code, "torch") == []


def test_keys_and_lookups_of_compilers_import_none() -> None:
    code = (
        "from attngen.compile import toolchain\n"
        "import attngen.compile.cuda, attngen.compile.nvrtc, attngen.store.receipt\n"
        "toolchain.missing('cuda', 'sm90a'), attngen.store.receipt.generator_digest()"
    )
    assert loaded(code, "triton", "cupy", "cupy_backends", "numpy", "torch") == []
