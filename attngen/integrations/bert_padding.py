"""flash-attn's helpers for padded batches (``flash_attn.bert_padding``), with the same arguments and results.

Defined in ``attngen.integrations.flash_attn.bert_padding``.
"""

from attngen.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
