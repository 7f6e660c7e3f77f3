"""Names that a spec may give to things, and reasons why a name is refused.

Names become file names and keyword arguments, so they are plain ASCII identifiers that no part of a call already uses.
In kernels they have a namespace of their own (``plan/symbols.py``).
"""

from __future__ import annotations

import keyword
import re
import sys
import unicodedata

from attngen.lang import declarations
from attngen.schema.quoting import show

MAX_NAME = 48

#: Packages and variants; lowercase, since file systems may ignore case.
VARIANT_PATTERN = rf"^[a-z][a-z0-9_]{{0,{MAX_NAME - 1}}}$"
#: Scalars, tensors, let values and named extents.
SYMBOL_PATTERN = rf"^[A-Za-z][A-Za-z0-9_]{{0,{MAX_NAME - 1}}}$"
#: Left side of a let entry: a name, or a function such as ``f(x, y)``.
LET_PATTERN = r"^[A-Za-z][A-Za-z0-9_]*( *\( *[A-Za-z][A-Za-z0-9_]*( *, *[A-Za-z][A-Za-z0-9_]*)* *\))?$"
#: Base name of a spec file: it is quoted in headers of generated sources.
FILE_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}$"

#: Lengths that a shape may name. Any other name is taken from the tensor at the call.
EXTENTS: tuple[str, ...] = ("b", "h", "hk", "seqlen_q", "seqlen_k", "total_q", "total_k")

#: Names that a scalar, a tensor or a let value may not take: those of the language and of a call, and keywords.
RESERVED: frozenset[str] = declarations.RESERVED | frozenset(keyword.kwlist)

#: Modules that programs import besides a package, which would hide them: attngen, and what it needs or runs with.
_BESIDE = (
    "attngen click cuda cupy cupy_backends cupyx editables flash_attn hatchling hypothesis jax jinja2 jsonschema "
    "markupsafe matplotlib mypy numpy nvidia packaging pip platformdirs pre_commit psutil pydantic pydantic_core "
    "pytest pytest_cov rich ruff setuptools torch transformers triton xdist yaml"
)

#: Names that a package may not take. ``test`` belongs to Python, though ``stdlib_module_names`` leaves it out.
TAKEN: frozenset[str] = sys.stdlib_module_names | frozenset(_BESIDE.split()) | {"test"}


def _check(name: object, pattern: str, what: str) -> str:
    if not isinstance(name, str):
        raise ValueError(f"found {show(name)}; {what}")
    for character in name:
        if not character.isascii():
            label = unicodedata.name(character, "unnamed")
            raise ValueError(f"found {show(name)}, which holds {character!a} ({label}); {what}")
    # fullmatch: `$` alone would let a final newline through
    if not re.fullmatch(pattern, name):
        near = re.sub(r"\W", "_", name).lower()
        hint = f"; did you mean '{near}'?" if re.fullmatch(pattern, near) else ""
        raise ValueError(f"found {show(name)}{hint}; {what}")
    return name


def check_variant_name(name: object) -> str:
    """Return the name of a variant or a package, or raise ValueError with what is allowed."""
    name = _check(
        name, VARIANT_PATTERN, f"allowed: at most {MAX_NAME} of a-z, 0-9 and _, the first one a letter, no '__'"
    )
    if "__" in name or name in keyword.kwlist:
        raise ValueError(f"found {name!r}; allowed: no Python keyword and no '__'")
    return name


def check_package_name(name: object) -> str:
    """Return the name of a package, or raise ValueError with what is allowed."""
    name = check_variant_name(name)
    if name in TAKEN:
        raise ValueError(
            f"'{name}' is a module that programs import, which the package would hide; "
            f"allowed: a name of its own, such as 'attngen_{name}'"
        )
    return name


def check_symbol(name: object) -> str:
    """Return the name of a scalar, a tensor or an extent, or raise ValueError with what is allowed."""
    name = _check(
        name, SYMBOL_PATTERN, f"allowed: at most {MAX_NAME} ASCII letters, digits and _, the first one a letter"
    )
    if name in RESERVED or "__" in name:
        raise ValueError(
            f"'{name}' is reserved: a call or the expression language already uses it; "
            f"allowed: another name, such as '{_near(name)}'"
        )
    return name


def _near(name: str) -> str:
    """Return a legal name that is close to a reserved one."""
    return f"my_{re.sub('_+', '_', name).strip('_').lower()}"[:MAX_NAME]


def check_let_name(text: object) -> str:
    """Return the left side of a let entry, or raise ValueError with what is allowed."""
    text = _check(text, LET_PATTERN, "allowed: a name or a function of names, as in 'distance' or 'f(x, y)'")
    check_symbol(re.split(r"[ (]", text)[0])
    return text


def check_extent(extent: object) -> int | str:
    """Return one extent of a tensor's shape, or raise ValueError with what is allowed."""
    if isinstance(extent, int) and not isinstance(extent, bool) and 1 <= extent < 2**31:
        return extent
    if isinstance(extent, str) and extent in EXTENTS:
        return extent
    if isinstance(extent, str) and extent in ("heads", "kv_heads"):
        raise ValueError(f"found '{extent}'; did you mean '{'h' if extent == 'heads' else 'hk'}'?")
    if isinstance(extent, str):
        return check_symbol(extent)
    raise ValueError(
        f"found {show(extent)}; allowed: an integer from 1 to 2^31 - 1, {', '.join(EXTENTS)}, "
        "or a name bound at the call"
    )


def check_file_name(name: str) -> str:
    """Return the base name of a spec file, or raise ValueError with what is allowed."""
    return _check(name, FILE_PATTERN, "allowed in a spec's file name: ASCII letters, digits, '_', '.', '+', '-'")
