"""FlashMLA's decoding and sparse prefill, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.flash_mla.functions``.
"""

from attngen.integrations.flash_mla.functions import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
