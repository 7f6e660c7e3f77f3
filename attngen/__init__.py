"""attngen: attention kernels generated from a spec.

Importing this package imports neither torch nor a compiler: each public name is imported at its first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attngen.formats import VERSION
from attngen.runtime.exported import install as _install

if TYPE_CHECKING:
    from attngen import errors, integrations, parallel
    from attngen.build.first_call import jit
    from attngen.inspect.debug import debug
    from attngen.runtime.operations.append.call import append_kv
    from attngen.runtime.operations.attention.entry import (
        attention,
        attention_paged,
        attention_varlen,
        define_operators,
    )
    from attngen.runtime.operations.attention.introspection import explain, tile_map
    from attngen.runtime.operations.index_scores.call import index_scores
    from attngen.runtime.operations.merge.call import merge
    from attngen.runtime.operations.quantize.call import quantize
    from attngen.runtime.operations.topk.call import topk
    from attngen.runtime.registry.lookup import load
    from attngen.variants import variant

__version__ = VERSION

__all__ = [
    "append_kv", "attention", "attention_paged", "attention_varlen", "debug", "define_operators", "errors", "explain",
    "index_scores", "integrations", "jit", "load", "merge", "parallel", "quantize", "tile_map", "topk", "variant",
]  # fmt: skip

#: Public name → the module that holds it; None for a submodule of that name.
_HOMES = {
    "append_kv": "attngen.runtime.operations.append.call",
    "attention": "attngen.runtime.operations.attention.entry",
    "attention_paged": "attngen.runtime.operations.attention.entry",
    "attention_varlen": "attngen.runtime.operations.attention.entry",
    "debug": "attngen.inspect.debug",
    "define_operators": "attngen.runtime.operations.attention.entry",
    "errors": None,
    "explain": "attngen.runtime.operations.attention.introspection",
    "index_scores": "attngen.runtime.operations.index_scores.call",
    "integrations": None,
    "jit": "attngen.build.first_call",
    "load": "attngen.runtime.registry.lookup",
    "merge": "attngen.runtime.operations.merge.call",
    "parallel": None,
    "quantize": "attngen.runtime.operations.quantize.call",
    "tile_map": "attngen.runtime.operations.attention.introspection",
    "topk": "attngen.runtime.operations.topk.call",
    "variant": "attngen.variants",
}


_install()  # what torch.export.load needs of attngen

if os.environ.get("ATTNGEN_JIT", "0") not in ("", "0"):
    from attngen.build.first_call import jit

    jit()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attngen' has no attribute '{name}'")
    home = _HOMES[name]
    value = import_module(f"attngen.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value  # so that this runs once per name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
