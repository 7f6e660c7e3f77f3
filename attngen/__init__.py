"""attngen: attention kernels generated from a spec.

Importing this package imports neither torch nor a compiler: each public name is imported at its first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attngen.formats import VERSION
from attngen.operations import OPERATIONS as _OPERATIONS
from attngen.runtime.exported import install as _install

if TYPE_CHECKING:
    from attngen import errors as errors
    from attngen import integrations as integrations
    from attngen import parallel as parallel
    from attngen import trees as trees
    from attngen.build.first_call import jit as jit
    from attngen.inspect.debug import debug as debug
    from attngen.runtime.operations.append.call import append_kv as append_kv
    from attngen.runtime.operations.attention.entry import attention as attention
    from attngen.runtime.operations.attention.entry import attention_paged as attention_paged
    from attngen.runtime.operations.attention.entry import attention_varlen as attention_varlen
    from attngen.runtime.operations.attention.entry import define_operators as define_operators
    from attngen.runtime.operations.attention.introspection import explain as explain
    from attngen.runtime.operations.attention.introspection import tile_map as tile_map
    from attngen.runtime.operations.block_mask.call import block_mask as block_mask
    from attngen.runtime.operations.index_scores.call import block_scores as block_scores
    from attngen.runtime.operations.index_scores.call import index_scores as index_scores
    from attngen.runtime.operations.merge.call import merge as merge
    from attngen.runtime.operations.quantize.call import quantize as quantize
    from attngen.runtime.operations.shared_prefix.call import shared_prefix as shared_prefix
    from attngen.runtime.operations.topk.call import topk as topk
    from attngen.runtime.registry.lookup import load as load
    from attngen.variants import variant as variant

__version__ = VERSION

#: Public name → the module that holds it; None for a submodule of that name.
_HOMES: dict[str, str | None] = {
    **{name: f"attngen.{module}" for one in _OPERATIONS for module, names in one.modules.items() for name in names},
    "debug": "attngen.inspect.debug",
    "errors": None,
    "integrations": None,
    "jit": "attngen.build.first_call",
    "load": "attngen.runtime.registry.lookup",
    "parallel": None,
    "trees": None,
    "variant": "attngen.variants",
}

__all__ = sorted(_HOMES)


_install()  # what torch.export.load needs of attngen

if os.environ.get("ATTNGEN_JIT", "0") not in ("", "0"):
    from attngen.build.first_call import jit

    jit()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attngen' has no attribute '{name}'")
    home = _HOMES[name]
    try:
        value = import_module(f"attngen.{name}") if home is None else getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        from attngen.errors import needs_torch

        raise ModuleNotFoundError(needs_torch(f"attngen.{name}", error), name=error.name) from None
    globals()[name] = value  # so that this runs once per name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
