"""See ``attngen.integrations.torch_sdpa.flash``: this is its public name."""

from attngen.integrations.torch_sdpa.flash import (
    NAME,
    _flash_attn_backward,
    _flash_attn_varlen_backward,
    activate,
    backward,
    dense_backward,
    dense_forward,
    forward,
    forward_into,
    register,
)

__all__ = [
    "register",
    "activate",
    "forward",
    "forward_into",
    "backward",
    "dense_forward",
    "dense_backward",
    "NAME",
    "_flash_attn_backward",
    "_flash_attn_varlen_backward",
]
