"""The function through which vLLM calls its own build of flash-attn, argument for argument, on attngen's kernels.

Defined in ``attngen.integrations.vllm.flash_attn``.
"""

from attngen.integrations.vllm.flash_attn import (
    fa_version_unsupported_reason,
    flash_attn_varlen_func,
    get_scheduler_metadata,
    is_fa_version_supported,
)

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]
