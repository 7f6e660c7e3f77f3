"""A schedule answers what is asked of it: nothing else of attngen asks which one it is."""

from __future__ import annotations

import ast
from pathlib import Path
from pkgutil import resolve_name

import pytest

import attngen
from attngen.plan.catalogue import schedules

PACKAGE = Path(attngen.__file__).parent
ALL = [row for direction in ("forward", "backward") for row in schedules(direction)]
#: Attributes of each schedule: its view, and its answers to ``attngen explain``.
OWN = {
    PACKAGE.parent / f"{name.partition(':')[0].replace('.', '/')}.py"
    for row in ALL
    for name in (row.view, row.explanation)
}
OTHERS = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path not in OWN
    and not path.is_relative_to(PACKAGE / "families")  # each of them fills the templates of one schedule
)


def asked(text: str) -> list[str]:
    """Return the lines of a module that know one schedule: by its module, its structure or its name."""
    mentions = []
    names = {row.name for row in ALL}
    suspect = any(word in text for word in ("attngen.families", *names))
    for node in ast.walk(ast.parse(text)) if suspect else ():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attngen.families."):
            mentions.append(f"{node.lineno}: from {node.module} import …")
        elif isinstance(node, ast.ImportFrom) and node.module == "attngen.families":
            modules = {one.name for one in node.names} & ({path.stem for path in (PACKAGE / "families").iterdir()})
            mentions += [f"{node.lineno}: import of {name}" for name in modules]
        elif isinstance(node, ast.Constant) and node.value in names:
            mentions.append(f"{node.lineno}: {node.value!r}")
    return mentions


def test_nothing_outside_asks_which_schedule_it_is() -> None:
    mentions = {path: asked(path.read_text("utf-8")) for path in OTHERS}
    assert {path: lines for path, lines in mentions.items() if lines} == {}


def test_imports_and_names_of_schedules_are_noticed() -> None:
    assert asked("from attngen.families.hopper_forward.structure import HopperForward")
    assert asked("from attngen.families import hopper_forward")
    assert asked("def f(plan):\n    return plan.schedule == 'hopper_cluster'")
    assert not asked("from attngen.plan.catalogue import named")


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_a_schedule_names_what_exists(row: object) -> None:
    for name in ("view", "explanation"):
        assert callable(resolve_name(getattr(row, name)))
