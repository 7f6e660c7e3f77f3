"""See ``attngen.integrations.torch_sdpa.context_parallel``: this is its public name."""

from attngen.integrations.torch_sdpa.context_parallel import (
    attend,
    context_parallel,
)

__all__ = [
    "context_parallel",
    "attend",
]
