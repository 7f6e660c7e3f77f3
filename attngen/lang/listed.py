"""Keys by index: what a variant takes that lists the keys of each query.

A query of such a variant sees the keys that its row of ``indices`` lists, and of these the ones that the mask allows.
Entries that are negative, or not less than the number of keys, list nothing; a key that is listed twice counts twice.
``topk_length`` counts the entries of a row that matter, from the first one on.
"""

from __future__ import annotations

from attngen.lang.variant import Tensor

#: Keys of each query, as places in its sequence, and how many entries of a row count.
INDICES = Tensor("indices", "int32", ("b", "seqlen_q", "topk"))
TOPK_LENGTH = Tensor("topk_length", "int32", ("b", "seqlen_q"))

#: What ``keys:`` of a variant may say, and the tensors that it adds to those of a call.
KEYS = {"index": (INDICES,), "counted_index": (INDICES, TOPK_LENGTH)}
