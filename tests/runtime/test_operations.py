"""The table of operations: each folder has a complete row, and what reads the table has the names of each row."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

import attngen
from attngen.errors import InternalError
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.interpreter import reason_against
from attngen.operations import ATTENTION, OPERATIONS, Operation, operation_of
from attngen.packaging.sizes import _BYTES
from attngen.packaging.vendor import ROOTS, runtime_files
from attngen.packaging.view import PackageView, VariantView, fill
from attngen.plan import catalogue
from attngen.resources import root
from attngen.schema import models
from attngen.schema.presets import preset
from tests import test_public_names as public_names

PACKAGE = Path(attngen.__file__).parent
FOLDERS = PACKAGE / "runtime/operations"

#: The public names of ``attngen``.
PUBLIC = public_names.PUBLIC["attngen"].split()

#: Those of a package, which are not its calls.
BESIDE_CALLS = {"Quantized", "SharedPrefix", "TileMap", "debug", "errors", "variants"}

VIEW = PackageView("mine", "1.0", "mine.yaml", ("sm90a",), (VariantView.of(preset("causal")),))

#: Directions that entries of a spec ask for.
PASSES = set(models.Pass.__metadata__[0].allowed)  # type: ignore[attr-defined]

each_row = pytest.mark.parametrize("row", OPERATIONS, ids=[row.name for row in OPERATIONS])
WITH_KERNELS = [row for row in OPERATIONS if row.directions]
each_row_with_kernels = pytest.mark.parametrize("row", WITH_KERNELS, ids=[row.name for row in WITH_KERNELS])
PUBLIC_CALLS = [(module, name) for row in OPERATIONS for module, names in row.modules.items() for name in names]


def modules_with(pattern: str, folder: Path) -> list[str]:
    """Modules of a folder whose text has a line that begins as given."""
    return [path.stem for path in sorted(folder.glob("*.py")) if re.search(pattern, path.read_text(), re.MULTILINE)]


def test_every_folder_has_a_row() -> None:
    folders = {path.parent.name for path in FOLDERS.glob("*/__init__.py")} - {"shared"}
    assert sorted(row.name for row in OPERATIONS) == sorted(folders)


@each_row
def test_a_row_names_every_operator_of_its_folder(row: Operation) -> None:
    assert list(row.operators) == modules_with(r"^    (return )?define_once\(", FOLDERS / row.name)
    for name in row.operators:
        module = import_module(f"attngen.{row.folder}.{name}")
        for operator in module.NAMES:
            assert hasattr(torch.ops.attngen, operator)


def test_rows_name_every_schedule() -> None:
    """Those of other directions are listed in the catalogue."""
    families = PACKAGE / "families"
    every = {f"{folder.name}.{name}" for folder in families.iterdir() for name in modules_with("^SCHEDULE\\b", folder)}
    assert set(catalogue._MODULES) == every
    assert len(catalogue._MODULES) == len(every)
    assert all(schedule.direction in operation_of(schedule.direction).directions for schedule in catalogue._rows())


@each_row_with_kernels
def test_a_row_with_kernels_is_complete(row: Operation) -> None:
    """Its directions have schedules; a spec asks for them, or they come with what it asks for; they can be tried."""
    assert all(catalogue.schedules(direction) for direction in row.directions)
    assert inspect.signature(resolve_name(row.trial)).parameters.keys() == {"kernel", "device", "seed", "small"}
    assert bool(row.specs) != bool(PASSES & {*row.directions})
    assert bool(row.variant) == bool(row.specs)  # the entries of a spec have its variants
    if row is ATTENTION:
        return
    assert list(inspect.signature(resolve_name(row.facts)).parameters) == ["plan"]
    for name in row.schedules:
        assert import_module(f"attngen.families.{name}").SCHEDULE.direction in row.directions


def test_sizes_are_estimated_of_all_that_specs_ask_for() -> None:
    assert {*_BYTES} >= PASSES


def test_public_names() -> None:
    assert attngen.__all__ == PUBLIC
    beside = {"debug", "errors", "integrations", "jit", "load", "parallel", "trees", "variant"}
    assert sorted([*beside, *(name for _, name in PUBLIC_CALLS)]) == PUBLIC
    for name in PUBLIC:
        assert getattr(attngen, name) is not None


def test_type_checkers_see_the_public_names() -> None:
    """Imports that only they read, each with ``as``, by which it is public."""
    (block,) = (
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {(node.module, one.name, one.asname) for node in block.body for one in node.names}  # type: ignore
    assert sorted(name for _, name, _ in imported) == PUBLIC
    assert {(f"attngen.{module}", name, name) for module, name in PUBLIC_CALLS} <= imported


@each_row
def test_packages_carry_and_export_a_row(row: Operation) -> None:
    code, stub = (ast.parse(fill(template, view=VIEW)) for template in ("init.py.j2", "init.pyi.j2"))
    imported = {(node.module, one.name) for node in code.body if isinstance(node, ast.ImportFrom) for one in node.names}
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    (exported,) = (
        ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert exported == sorted({*BESIDE_CALLS, *(name for _, name in PUBLIC_CALLS)})
    for module, names in row.modules.items():
        assert module in ROOTS
        assert f"{module.replace('.', '/')}.py" in runtime_files()
        assert {(f"_runtime.{module}", name) for name in (*names, *row.results)} <= imported
        for name in row.results:
            assert isinstance(resolve_name(f"attngen.{module}:{name}"), type)
            assert f"from ._runtime.{module} import {name} as {name}" in ast.unparse(stub)
        assert {*names} <= declared


@pytest.mark.parametrize(("module", "name"), PUBLIC_CALLS, ids=[name for _, name in PUBLIC_CALLS])
def test_docs_have_a_call(module: str, name: str) -> None:
    assert f'::: attngen.{module}.{name}\n    options: {{heading: "attngen.{name}"' in _text("docs/api.md")
    (listed,) = re.findall(r"^\| `<package>/__init__.py` \| (.*) \|$", _text("docs/packaging.md"), re.MULTILINE)
    assert f"`{name}`" in listed


def _text(path: str) -> str:
    return (root() / path).read_text("utf-8")


def test_an_unknown_direction_is_an_error() -> None:
    """It is nowhere taken for attention."""
    unknown = SimpleNamespace(direction="gather")
    for ask in (
        lambda: operation_of("gather"),
        lambda: catalogue.schedules("gather"),
        lambda: try_pinned(unknown, torch.device("cpu"), 0, small=True),
    ):
        with pytest.raises(InternalError, match="has kernels of direction 'gather'; known: append, merge, quantize"):
            ask()
    interpreted = SimpleNamespace(direction="gather", backend="triton", dtype_name="fp16")
    assert reason_against(interpreted) == "the interpreter runs attention, no gather"
