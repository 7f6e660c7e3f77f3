"""Names that docs use by attribute, such as ``attngen.integrations.flash_attn_4``, exist once attngen is imported."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import DOCUMENTS, blocks, code_spans
from tests.docs.test_names import OTHERS

#: Headings of the page that is made of docstrings.
_HEADING = re.compile(r'heading: "(attngen[\w.]+)"')

#: Finds names in a process that imports nothing but attngen.
_FIND = """
import json, sys, attngen
def is_there(name):
    owner = attngen
    for part in name.split(".")[1:]:
        owner = getattr(owner, part, None)
        if owner is None: return False
    return True
print(json.dumps([name for name in json.load(sys.stdin) if not is_there(name)]))
"""


def chains(program: str) -> Iterator[str]:
    """Attributes of ``attngen`` in a program that imports it under its own name."""
    try:
        tree = ast.parse(textwrap.dedent(program))
    except SyntaxError:  # of a part of a program, whose inline names are looked for all the same
        yield from re.findall(r"\battngen(?:\.[A-Za-z_]\w*)+", program)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute):
                parts, owner = [owner.attr, *parts], owner.value
            if isinstance(owner, ast.Name) and owner.id == "attngen":
                yield ".".join(["attngen", *parts])


def named(path: Path) -> Iterator[str]:
    for span in code_spans(path):
        if " -m " not in span and Path(span).suffix != ".json":  # programs, and a file of the command line
            yield from re.findall(r"(?<![\w.\"'])attngen(?:\.[A-Za-z_]\w*)+(?=$|[(, ])", span)
    for block in blocks(path, "python"):
        yield from chains(block.text)
    yield from _HEADING.findall(path.read_text())


@pytest.mark.exhaustive
def test_names_are_attributes() -> None:
    pages = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which names what was once there, too
    documents = {name: path for path in pages for name in named(path) if name not in OTHERS}
    assert {"attngen.attention", "attngen.integrations.flash_attn_4", "attngen.jit.save"} <= documents.keys()
    answer = subprocess.run(
        [sys.executable, "-c", _FIND], input=json.dumps(sorted(documents)), capture_output=True, text=True, check=True
    )
    missing = json.loads(answer.stdout)
    assert not missing, [f"{documents[name].name} names {name}" for name in missing]
