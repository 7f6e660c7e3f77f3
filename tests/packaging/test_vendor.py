"""The copy of the runtime that packages carry: it is the runtime, and needs torch alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import attngen
from attngen.packaging.vendor import COPIED, runtime_files

#: Modules of torch's requirements, and of Python.
ALLOWED = {"torch", "cuda"} | set(sys.stdlib_module_names)


def test_the_copy_imports_torch_and_itself_alone() -> None:
    files = runtime_files()
    for name, data in files.items():
        depth = name.count("/") + 1
        for node in ast.walk(ast.parse(data)):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED, name
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{name}:{node.lineno} leaves the copy"
                if not node.level:
                    assert str(node.module).partition(".")[0] in ALLOWED, f"{name}:{node.lineno}"


@pytest.mark.exhaustive
def test_every_relative_import_leads_to_a_file_or_to_what_is_left_out() -> None:
    files = runtime_files()
    missing = set()
    for name, data in files.items():
        for node in ast.walk(ast.parse(data)):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = name.split("/")[: -node.level]
            module = [*folder, *(node.module or "").split(".")] if node.module else folder
            if node.module and "/".join(module) + ".py" in files:
                continue
            missing |= {"/".join([*module, alias.name]) for alias in node.names} - {
                n.removesuffix(".py") for n in files
            }
    assert missing == {"runtime/registry/discovery"}


def test_the_copy_differs_in_its_imports_alone() -> None:
    folder = Path(attngen.__file__).parent
    changed = 0
    for name, data in runtime_files().items():
        assert name.partition("/")[0].removesuffix(".py") in COPIED | {"__init__"}
        if name == "__init__.py":
            continue
        ours = (folder / name).read_text().splitlines()
        theirs = data.decode().splitlines()
        assert len(ours) == len(theirs)
        for mine, copied in zip(ours, theirs, strict=True):
            if mine != copied:
                changed += 1
                assert mine.lstrip().startswith("from attngen"), (name, mine)
                assert copied.lstrip().startswith("from ."), (name, copied)
    assert changed > 50
