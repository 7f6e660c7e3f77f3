"""See ``attngen.integrations.flash_attn.v4``: this is its public name."""

from attngen.integrations.flash_attn.v4 import (
    flash_attn_func,
    flash_attn_varlen_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
]
