"""Keys by index: the arguments of a variant whose calls list the keys of each query.

A query of such a variant sees the keys that its row of ``indices`` lists and that the mask allows. Entries that are
negative, or not less than the number of keys, are ignored; a key that is listed twice counts twice. With
``topk_length``, only so many entries at the beginning of each row are read. Entries may be numbers of blocks of keys
instead, and each KV head may have a list of its own.

A second cache and its lists may come beside the first. Its rows have the form of those of k, and lists name them by
their slot, ``page * page_size + row``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from attngen.lang.declared import Tensor

#: Keys of each query, by their positions in its sequence, and the number of entries of each row that count.
INDICES = Tensor("indices", "int32", ("b", "seqlen_q", "topk"))
TOPK_LENGTH = Tensor("topk_length", "int32", ("b", "seqlen_q"))

#: The bytes of a second cache, and its lists.
EXTRA_K = Tensor("extra_k", "uint8", ("extra_pages", "extra_page_size", "hk", "extra_row_bytes"))
EXTRA_INDICES = Tensor("extra_indices", "int32", ("b", "seqlen_q", "extra_topk"))
EXTRA_TOPK_LENGTH = Tensor("extra_topk_length", "int32", ("b", "seqlen_q"))


@dataclass(frozen=True, slots=True)
class KeyLists:
    """Contents of a variant's lists: entries are numbers of blocks of ``block`` keys, ``per_head`` says that each KV
    head has lists of its own, ``counted`` that ``topk_length`` comes with them, and ``extra`` that a second cache
    does."""

    per_head: bool
    block: int
    counted: bool = False
    extra: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a call passes beside those that the variant declares."""
        if self.extra:
            return INDICES, TOPK_LENGTH, EXTRA_K, EXTRA_INDICES, EXTRA_TOPK_LENGTH
        if not self.per_head:
            return (INDICES, TOPK_LENGTH) if self.counted else (INDICES,)
        indices = Tensor(INDICES.name, INDICES.dtype, ("b", "seqlen_q", "hk", "topk"))
        length = Tensor(TOPK_LENGTH.name, TOPK_LENGTH.dtype, indices.shape[:-1])
        return (indices, length) if self.counted else (indices,)


#: Keys of a block that an entry may name.
BLOCKS = (4, 8, 16, 32, 64, 128)

#: Lists by the value of a variant's field ``keys``.
LISTS = {
    f"{'counted_' * counted}{'head_' * per_head}{'index' if block == 1 else f'blocks_of_{block}'}": KeyLists(
        per_head=per_head, block=block, counted=counted
    )
    for counted, per_head, block in product((False, True), (False, True), (1, *BLOCKS))
} | {"counted_index_of_two_caches": KeyLists(per_head=False, block=1, counted=True, extra=True)}

#: Tensors that a variant adds to those of a call, by the value of its field ``keys``.
KEYS = {name: lists.tensors for name, lists in LISTS.items()}
