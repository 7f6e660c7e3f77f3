"""Docstrings say the thing itself, and variables are called what they hold."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_INDIRECT = re.compile(
    r"(Return|Yield)s? whether\b|((Return|Yield)s? )?(what|how|why|which|where|when|who|whose)\b", re.IGNORECASE
)

_PERHAPS = re.compile(rf'"""\s*({_INDIRECT.pattern})|\bfound\b', re.IGNORECASE)

#: Files by folder: those of ``attngen`` and ``tests`` themselves, and of each folder in them with all below it.
FILES: dict[str, list[Path]] = {}
for _file in sorted([*(ROOT / "attngen").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
    FILES.setdefault("/".join(_file.relative_to(ROOT).parts[:-1][:2]), []).append(_file)


def suspect(text: str) -> bool:
    """Whether a module may have such a fault: most need not be parsed."""
    names = Counter(re.findall(r"^(\w+) *[:=]", text, re.MULTILINE))
    return bool(_PERHAPS.search(text)) or max(names.values(), default=0) > 1


def faults(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and fault of each docstring that begins indirectly, and of each binding of ``found``."""
    for node in ast.walk(module):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if _INDIRECT.match(ast.get_docstring(node) or ""):
                    yield node.body[0].lineno, "begin the docstring with the thing itself, or with a verb"
            case ast.Name(id="found", ctx=ast.Store()) | ast.arg(arg="found"):
                yield node.lineno, "call the variable what it holds, not 'found'"


def rebound(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and fault of each constant of a module that a statement before it has already bound."""
    seen = set()
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            stored = (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            names = {node.id for node in stored if isinstance(node.ctx, ast.Store)}
            yield from ((statement.lineno, f"{name} is bound a second time") for name in sorted(names & seen - {"_"}))
            seen |= names


@pytest.mark.parametrize("folder", sorted(FILES))
def test_words_and_constants(folder: str) -> None:
    texts = {path.relative_to(ROOT): path.read_text("utf-8") for path in FILES[folder]}
    modules = {path: ast.parse(text) for path, text in texts.items() if suspect(text)}
    lines = [
        f"{path}:{line}: {fault}"
        for path, module in modules.items()
        for line, fault in (*faults(module), *rebound(module))
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Return what a call takes."""', 1),
        ('"""Yields how many there are."""', 1),
        ('"""What a call takes."""', 1),
        ('"""Whether a call takes more."""', 0),
        ('def f():\n    """Return the arguments of a call."""\n    """Return what is no docstring."""', 0),
        ("found = 1\nfound: int = 1\nfor found in x: pass\nif found := x: pass\ndef f(found): return found", 5),
    ],
)
def test_faults(text: str, count: int) -> None:
    assert suspect(text) or not count
    assert len(list(faults(ast.parse(text)))) == count


def test_a_constant_that_is_bound_twice_is_noticed() -> None:
    text = "A: int = 1\n_ = 2\nB = 3\n_ = 4\nA = 5"
    assert suspect(text)
    assert list(rebound(ast.parse(text))) == [(5, "A is bound a second time")]


#: Names of several classes: public ones, and those that engines ask for.
_SHARED = {"AttngenMLABackend", "AttngenMetadata", "Explanation", "Plan"}


def test_classes_of_attngen_have_names_of_their_own() -> None:
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "attngen").rglob("*.py"))}
    named = {path: re.findall(r"\bclass (\w+)", text) for path, text in texts.items()}
    counts = Counter(name for names in named.values() for name in names)
    modules: dict[str, list[str]] = {}
    for path, text in texts.items():
        several = any(counts[name] > 1 for name in named[path])
        for node in ast.walk(ast.parse(text)) if several else ():
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in modules.items() if len(places) > 1 and name not in _SHARED} == {}


@pytest.mark.parametrize("folder", ["launch", "geometry"])
def test_what_each_call_goes_through_names_its_types(folder: str) -> None:
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "attngen/runtime" / folder).glob("*.py")}
    assert [
        name for name, text in texts.items() if re.search(r"^from typing import .*\bAny\b", text, re.MULTILINE)
    ] == []
