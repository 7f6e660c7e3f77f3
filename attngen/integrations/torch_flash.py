"""attngen as a flash attention of torch: SDPA's flash backend, and ``torch.nn.attention.varlen.varlen_attn``.

Defined in ``attngen.integrations.torch_sdpa.flash``.
"""

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
