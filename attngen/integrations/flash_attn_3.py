"""flash-attn 3's functions, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.flash_attn.v3``.
"""

from attngen.integrations.flash_attn.v3 import (
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "_flash_attn_backward",
    "_flash_attn_forward",
]
