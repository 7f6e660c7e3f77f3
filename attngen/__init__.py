"""attngen: attention kernels generated from a spec.

Importing this package imports neither torch nor a compiler: each public name is imported at its first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attngen.formats import VERSION
from attngen.runtime.calls.exported import install as _install

if TYPE_CHECKING:
    from attngen import errors, integrations, parallel
    from attngen.build.first_call import jit
    from attngen.inspect.debug import debug
    from attngen.runtime.calls.append import append_kv
    from attngen.runtime.calls.entry import attention, attention_paged, attention_varlen, define_operators
    from attngen.runtime.calls.index_scores import index_scores
    from attngen.runtime.calls.introspection import explain, tile_map
    from attngen.runtime.calls.merge import merge
    from attngen.runtime.calls.quantize import quantize
    from attngen.runtime.calls.topk import topk
    from attngen.runtime.registry.lookup import load
    from attngen.variants import variant

__version__ = VERSION

__all__ = [
    "append_kv", "attention", "attention_paged", "attention_varlen", "debug", "define_operators", "errors", "explain",
    "index_scores", "integrations", "jit", "load", "merge", "parallel", "quantize", "tile_map", "topk", "variant",
]  # fmt: skip

#: Public name → the module that holds it; None for a submodule of that name.
_HOMES = {
    "append_kv": "attngen.runtime.calls.append",
    "attention": "attngen.runtime.calls.entry",
    "attention_paged": "attngen.runtime.calls.entry",
    "attention_varlen": "attngen.runtime.calls.entry",
    "debug": "attngen.inspect.debug",
    "define_operators": "attngen.runtime.calls.entry",
    "errors": None,
    "explain": "attngen.runtime.calls.introspection",
    "index_scores": "attngen.runtime.calls.index_scores",
    "integrations": None,
    "jit": "attngen.build.first_call",
    "load": "attngen.runtime.registry.lookup",
    "merge": "attngen.runtime.calls.merge",
    "parallel": None,
    "quantize": "attngen.runtime.calls.quantize",
    "tile_map": "attngen.runtime.calls.introspection",
    "topk": "attngen.runtime.calls.topk",
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
