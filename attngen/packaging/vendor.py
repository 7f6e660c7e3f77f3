"""The copy of the runtime in a package: the modules that a call needs, with imports relative to the copy.

There is one runtime, in ``attngen.runtime`` and the modules that it imports; each package gets a fresh copy.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path, PurePosixPath

import attngen
from attngen.formats import VERSION
from attngen.operations import OPERATIONS
from attngen.resources import variants_file

#: Modules that a package's own ``__init__`` imports; their imports add the rest.
ROOTS = (
    "errors", "runtime.arguments.debug", "runtime.launch.tile_map", "runtime.registry.lookup",
    *(module for operation in OPERATIONS for module in operation.modules),
)  # fmt: skip

#: What a copy with drop-ins has besides: the drop-ins, the shipped variants that they name, and the path of their file.
WITH_DROP_INS = frozenset({"integrations", "resources"})

#: Looks for other packages, which a package itself does not do.
LEFT_OUT = frozenset({"runtime.registry.discovery"})

#: Parts of attngen that may be copied: none of them imports anything but torch, cuda-bindings and the standard library.
COPIED = frozenset({
    "errors", "dtypes", "arch", "cards", "drivers", "files", "formats", "glyphs", "lang", "manifest",
    "operations", "records", "runtime",
})  # fmt: skip

_FOLDER = Path(attngen.__file__).parent
_IMPORT = re.compile(r"from attngen[\w.]* import")


@cache
def runtime_files(*drop_ins: str) -> dict[str, bytes]:
    """Return the files of the copy by their path in it, sorted; with these modules of drop-ins, if any are named."""
    modules: set[str] = set()
    waiting = [*ROOTS, *drop_ins]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            waiting += [name for name, _ in _imports(module) if name not in LEFT_OUT]
    copied = COPIED | WITH_DROP_INS if drop_ins else COPIED
    strays = sorted(module for module in modules if module.split(".")[0] not in copied)
    assert not strays, f"the runtime imports what a package must not need: {', '.join(strays)}"
    files = {f"{module.replace('.', '/')}.py": _relative(module).encode() for module in modules}
    for folder in {parent for path in files for parent in PurePosixPath(path).parents} - {PurePosixPath()}:
        files[f"{folder}/__init__.py"] = _door(folder)
    if drop_ins:
        variants = variants_file()
        files[variants.relative_to(_FOLDER).as_posix()] = variants.read_bytes()
    files["__init__.py"] = f'"""The runtime of attngen {VERSION}, which this package carries."""\n'.encode()
    return dict(sorted(files.items()))


def _door(folder: PurePosixPath) -> bytes:
    """A folder's ``__init__`` without what it exports, which other modules of the copy do not ask for."""
    text = (_FOLDER / folder / "__init__.py").read_text("utf-8")
    docstring, *exports = ast.parse(text).body
    return "".join(text.splitlines(keepends=True)[: docstring.end_lineno] if exports else text).encode()


def module_text(module: str) -> str:
    """Source of a module of attngen."""
    return (_FOLDER / f"{module.replace('.', '/')}.py").read_text("utf-8")


@cache
def _imports(module: str) -> list[tuple[str, ast.ImportFrom]]:
    """Every module of attngen that a module imports, also inside functions, and the statement that does."""
    imported = []
    for node in ast.walk(ast.parse(module_text(module))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "attngen" for alias in node.names), f"{module}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "attngen":
            named = node.module.removeprefix("attngen").lstrip(".")
            for alias in node.names:
                inner = f"{named}.{alias.name}".lstrip(".")
                is_module = (_FOLDER / f"{inner.replace('.', '/')}.py").is_file()
                imported.append((inner if is_module else named, node))
    return imported


def _relative(module: str) -> str:
    """Return the text of a module with its imports of attngen made relative."""
    lines = module_text(module).splitlines(keepends=True)
    for _, node in _imports(module):
        lines[node.lineno - 1] = _IMPORT.sub(
            f"from {_dotted(module, node.module or '')} import", lines[node.lineno - 1]
        )
    return "".join(lines)


def _dotted(module: str, target: str) -> str:
    """The relative name by which a module imports a target, ``attngen.a.b``."""
    here, there = module.split(".")[:-1], target.split(".")[1:]
    shared = 0
    while shared < min(len(here), len(there)) and here[shared] == there[shared]:
        shared += 1
    return "." * (1 + len(here) - shared) + ".".join(there[shared:])
