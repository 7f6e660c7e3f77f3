"""Stubs of operations in a package: signatures and the first lines of docstrings, as their modules have them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attngen.operations import ATTENTION, OPERATIONS
from attngen.packaging.vendor import module_text

#: Arguments whose types are the package's own.
_OWN_TYPES = {"variant": "_Variant"}


def operation_stubs() -> Iterator[str]:
    """Declaration of each public function of an operation; attention's have an overload for each variant."""
    for operation in OPERATIONS:
        if operation is not ATTENTION:
            for module, names in operation.modules.items():
                text = module_text(module)
                functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
                yield from (_stub(text, functions[name]) for name in names)


def _stub(text: str, function: ast.FunctionDef) -> str:
    """A function with its summary in place of its body, and ``...`` for each default."""
    given = function.args
    replaced = [(node, "...") for node in (*given.defaults, *given.kw_defaults) if node is not None]
    for argument in (*given.args, *given.kwonlyargs):
        if argument.arg in _OWN_TYPES and argument.annotation:
            replaced.append((argument.annotation, _OWN_TYPES[argument.arg]))
    lines = text.splitlines()
    for node, new in sorted(replaced, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
        assert node.lineno == node.end_lineno
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + new + line[node.end_col_offset :]
    declared = lines[function.lineno - 1 : function.body[0].lineno - 1]
    summary = " ".join((ast.get_docstring(function) or "").partition("\n\n")[0].split())
    return "\n".join((*declared, f'    """{summary}"""')).replace("  # fmt: skip", "")
