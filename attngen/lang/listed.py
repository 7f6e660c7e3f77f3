"""Keys by index: the arguments of a variant whose calls list the keys of each query.

A query of such a variant sees the keys that its row of ``indices`` lists and that the mask allows. Entries that are
negative, or not less than the number of keys, are ignored; a key that is listed twice counts twice. With
``topk_length``, only so many entries at the beginning of each row are read.
"""

from __future__ import annotations

from attngen.lang.variant import Tensor

#: Keys of each query, by their positions in its sequence, and the number of entries of each row that count.
INDICES = Tensor("indices", "int32", ("b", "seqlen_q", "topk"))
TOPK_LENGTH = Tensor("topk_length", "int32", ("b", "seqlen_q"))

#: Tensors that a variant adds to those of a call, by the value of its field ``keys``.
KEYS = {"index": (INDICES,), "counted_index": (INDICES, TOPK_LENGTH)}
