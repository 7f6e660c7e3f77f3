"""The cache key: a hash of everything that a compile reads. A lookup imports this for ``digest``, and no compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.plan.model import Plan
    from attngen.render import Source

#: Version of the format of an entry; another one gives another key.
ENTRY_FORMAT = 1


def digest(value: Any) -> str:
    """Return the SHA-256 of a plain JSON value, in hexadecimal; the order of its mappings does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=True)
    return sha256(text.encode()).hexdigest()


@cache
def compile_digest() -> str:
    """Return a hash over the sources of ``attngen.compile``: the options of a compiler matter as much as its
    version."""
    import attngen.compile

    folder = Path(attngen.compile.__file__).parent
    return digest({path.name: path.read_text("utf-8") for path in folder.glob("*.py")})


def cache_key(
    plan: Mapping[str, Any],
    source: str,
    *,
    headers: Mapping[str, str],
    options: Mapping[str, Any],
    toolchain: Mapping[str, Any],
) -> str:
    """Return the key of a kernel, 64 hexadecimal digits.

    ``plan`` is the plan as a mapping, with arch and the manifest's version in it; ``headers`` maps the name of
    each file that the source includes to its text; ``toolchain`` identifies the compiler.
    """
    return digest(
        {
            "entry": ENTRY_FORMAT,
            "plan": plan,
            "source": source,
            "headers": headers,
            "options": options,
            "toolchain": toolchain,
        }
    )


def key_of(plan: Plan, source: Source) -> str:
    """Return the key of a planned and rendered kernel under the installed compiler. Imports no compiler."""
    from attngen.compile.toolchain import toolchain

    return cache_key(
        plan.to_dict(),
        source.text,
        headers=source.headers,
        options={"compiler": _options(plan), "compile": compile_digest()},
        toolchain=toolchain(source.backend, plan.arch.name),
    )


def _options(plan: Plan) -> Any:
    from attngen.compile.options import nvrtc_options, triton_options

    if plan.backend == "cuda":
        return nvrtc_options(plan.arch.name)
    return triton_options(plan.num_warps, plan.stages, plan.max_registers, fast_math=plan.fast_math)
