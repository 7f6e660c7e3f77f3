"""Attention of programs that know nothing of plans, within ``attngen.parallel``: SDPA, flash-attn, transformers.

Defined in ``attngen.integrations.torch_sdpa.context_parallel``.
"""

from attngen.integrations.torch_sdpa.context_parallel import (
    attend,
    context_parallel,
)

__all__ = [
    "context_parallel",
    "attend",
]
