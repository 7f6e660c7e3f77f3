"""Shape of a tile map: words, slots and strides."""

from __future__ import annotations

from attngen.manifest import TileMapAxes
from attngen.runtime.arguments.checked import Call
from attngen.runtime.kernels.module import KernelLaunch

#: Slots of a tile map for each of its words: ``kSlotsOfWord`` of tile_map.cuh.
SLOTS_OF_WORD = 16


class MapShape:
    """Shape of a tile map: (batch, heads, rows, 2, words) of int32; batch or heads are 1 where shared.

    A row is a tile of queries and its bits are those of the tiles of keys, or the other way round (``by_keys``). A map
    with slots is flat: these words, a slot for each tile of a word, and ``tile_words`` for each slot that is used, the
    visible pairs of its tile. Its words end with the ``order`` in which blocks take rows, for each batch entry, and
    with the number of long rows that each order begins with, at most. Where blocks cut these only if they outlast the
    others, ``heads_of_block`` says how many of the heads that run side by side there are for each block, else it is 0,
    and ``cut_rows`` how many rows of an order they cut at most. ``work`` counts the rows of all heads, those that share
    a map included; ``few`` says that blocks which cut rows outnumber them twice.
    """

    __slots__ = (
        "batch", "by_keys", "cut_rows", "few", "heads", "heads_of_block", "order", "owner", "rows", "slots",
        "tile_words", "tiles", "words", "work",
    )  # fmt: skip

    def __init__(self, launch: KernelLaunch, axes: TileMapAxes, call: Call) -> None:
        self.owner = axes.owner
        # Lengths of its own for each sequence make a map for each sequence, whatever the mask reads.
        per_batch = axes.batch or call.ragged or call.seqused_k is not None
        self.batch = call.batch if per_batch else 1
        self.heads = call.heads if axes.heads else 1
        by_keys = launch.by_keys
        sizes = ((call.seqlen_k, launch.tile_n), (call.seqlen_q, launch.tile_m))
        (own, of_own), (other, of_other) = sizes if by_keys else sizes[::-1]
        self.rows, listed = -(-own // (axes.rows or of_own)), -(-other // (axes.columns or of_other))
        self.words = -(-listed // 32)
        self.tiles = self.batch * self.heads * self.rows * listed
        self.by_keys = by_keys
        self.order = self.rows * self.batch + 1 if axes.slots else 0
        self.slots = SLOTS_OF_WORD * self.map_words if axes.slots else 0
        consumers = of_own // 64
        self.tile_words = 128 * consumers * axes.bits
        self.heads_of_block, self.cut_rows, self.few = 0.0, 0, False
        self.work = self.rows * call.batch * (call.kv_heads if launch.by_keys else call.heads)

    @property
    def keeps_pairs(self) -> bool:
        """Whether a kept map should get the bits of visible pairs, for which the host waits.

        A single row of tiles, as in a step of decoding, is not worth it: the next step has another number of keys.
        """
        return self.tile_words > 0 and self.rows > 1

    @property
    def all_rows(self) -> int:
        """Rows of all batch entries and heads."""
        return self.rows * self.heads * self.batch

    @property
    def row_words(self) -> int:
        """Words of all rows: the bits of full tiles, then those of partial tiles."""
        return 2 * self.words * self.all_rows

    @property
    def map_words(self) -> int:
        """Words of all rows, and of the order."""
        return self.row_words + self.order

    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor, without visible pairs."""
        if self.slots:
            return (self.map_words + self.slots,)
        return (self.batch, self.heads, self.rows, 2, self.words)

    def stride(self, axis: str) -> int:
        """Stride along b, h or the rows (q or kv) in words; 0 along an axis that is shared."""
        row = 2 * self.words
        if axis in ("q", "kv"):
            return row
        if axis == "h":
            return row * self.rows if self.heads > 1 else 0
        return row * self.rows * self.heads if self.batch > 1 else 0
