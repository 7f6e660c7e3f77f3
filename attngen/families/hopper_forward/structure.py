"""Decisions of the Hopper schedules beyond those of all plans: roles, pipeline and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.model import Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperForward(Structure):
    """Roles, pipeline and memory of a Hopper forward; a consumer has 64 query rows."""

    most_consumers: ClassVar[int] = 32 // Structure.lanes_of_part - 1

    pingpong: bool  # consumers alternate at the tensor cores
    keeps_turn: bool  # ping-pong hands over when the products of a step are done, not when they are issued
    keeps_masked_turn: bool  # it does so in steps of partial tiles
    overlap: bool  # O += P V runs under the softmax of the next tile
    longest_first: bool  # query tiles from the last to the first, head by head within an L2 head group
    staged: bool  # outputs leave through shared memory
    boxes_out: bool  # from there by TMA, where all rows of a box exist
    q_stages: int  # tiles of Q in flight
    box_bytes: int  # of a row of one copy, over which it is swizzled
    out_columns: int  # columns of O that are staged at once
    whole_first: bool  # a tile that all rows see, if there is one, comes before the others, from the last to the first
    nearest_first: bool  # the tile of keys nearest to the rows comes before the others
    short_early: bool  # a call may take its shortest tiles after some of the longest, so that blocks end together
    lookahead: int  # steps before the end of a work tile at which the next one is taken
    value_loader: bool  # V has a loader of its own
    v_by_columns: bool  # V is K-major in shared memory, as 8-bit products require
    transposes: bool  # V arrives as rows of keys, and warps transpose it
    recompute_above: str  # literal; see docs/performance.md
    recompute_growth: str
    raise_above: str  # growth of the running max, in units of log2, at which a lazy row max follows
    ahead: int  # fragments of V in flight at once where it is transposed
    peak: int  # log2 of P of the largest logit, so that a dtype with few exponents is used from its top
    softmax: str
    recompute_below: str = (
        ""  # literal; a lane's sum of a partial first tile below which the row max is recomputed; "": any
    )
    fixed_max: str = "0.0f"  # literal; constant instead of row maxima, in units of log2, where logits are bounded
    recompute_by_count: bool = False  # a step may add one for each key of a lane, however little there was before
    capped: bool = False  # tanh of a soft-capped score is a polynomial where no argument is large
    terms: tuple[float, ...] = ()  # of a polynomial in place of exp2, in tiles without a mask; none: exp2
    fused: bool = False  # exponentials follow the score in both branches of the mask, not after them
    sharing: int = 1  # most blocks of a cluster that split the keys of a work item
    bias_stages: int = 0  # of the ring of these tiles
    entries: int = 1  # of the batch, in a work tile: they share these tiles
    cuts: bool = False  # a call may split the keys of the first query tiles of each unit among several blocks

    def __post_init__(self) -> None:
        """Check that a warp has lanes for each consumer: the templates count on it."""
        if not 1 <= self.consumers <= self.most_consumers:
            raise ValueError(f"{self.consumers} consumers, of 1 to {self.most_consumers}")

    @property
    def own_rows(self) -> int:
        """See ``Structure``."""
        return 0 if self.end_aligned or self.map_rows or self.entries > 1 else 64

    @property
    def shares(self) -> bool:
        """Whether the blocks of a cluster split the keys of a work item and merge their results."""
        return self.sharing > 1

    @property
    def bounds_tiles(self) -> bool:
        """See ``Structure``; it takes a row max, by which a row asks for the bound."""
        return self.softmax in ("first_max", "lazy", "exact_max")

    @property
    def takes_powers(self) -> bool:
        """See ``Structure``."""
        return bool(self.terms)

    @property
    def splits_keys(self) -> bool:
        """Whether a block may visit only some of the KV tiles that the rows of its work item see."""
        return self.shares or self.cuts

    @property
    def holds_mask_bits(self) -> bool:
        """Whether consumers apply the mask of a tile map by bits, in the order of their accumulators."""
        return True

    @property
    def lists_sequences(self) -> bool:
        """Whether its tile scheduler can leave out shorter sequences: one that takes tile after tile."""
        return not self.shares

    @property
    def finds_ends(self) -> bool:
        """Whether consumers find out which ends of what rows see lie in a partial tile: not in 8 bits, nor where blocks
        share keys."""
        return not (self.v_by_columns or self.shares)

    @property
    def schedule(self) -> str:
        """Order of the consumers at the tensor cores, as specs name it: pingpong or cooperative."""
        return "pingpong" if self.pingpong else "cooperative"
