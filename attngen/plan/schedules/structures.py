"""Decisions of the Hopper schedules beyond those of all plans: roles, pipeline and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.model import Columns, Structure

#: Keys of a consumer of a backward by single blocks.
KEYS_OF_CONSUMER = 64


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
    cuts: bool = False  # a call may split the keys of the first query tiles of each unit among several blocks

    def __post_init__(self) -> None:
        """Check that a warp has lanes for each consumer: the templates count on it."""
        if not 1 <= self.consumers <= self.most_consumers:
            raise ValueError(f"{self.consumers} consumers, of 1 to {self.most_consumers}")

    @property
    def shares(self) -> bool:
        """Whether the blocks of a cluster split the keys of a work item and merge their results."""
        return self.sharing > 1

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBackward(Structure):
    """Roles, pipeline and memory of a Hopper kernel of dQ, dK and dV in CUDA."""

    # consumers keep dK and dV in registers: of 64 keys each, or one dV and one dK
    overlap: str  # what the softmax of a step runs over: pingpong (products of the other consumer) |
    # gradients (dQ and dK of the step before) | dk | nothing;
    # in a cluster: roles (products of other warpgroups) | dv (that of the step before, too)
    packed: bool  # dS is computed from probabilities in 16 bits, not in float32
    rows_ahead: int  # times 16 rows whose LSE and D a consumer loads before it needs them; 0: it does not
    rows_early: bool  # the loader reads LSE and D of a step before there is a stage for them
    q_stages: int  # tiles of Q in flight; those of dO are the plan's stages
    box_bytes: int  # of a row of one copy, over which it is swizzled
    dq_columns: int  # columns of dQ of a consumer, or of a block of a cluster
    dq_by_rows: bool  # a consumer multiplies half of dQ's rows, not half of its columns
    ordered: bool  # dQ is added up in a fixed order, by counters of tiles of keys after the dQ accumulator
    cluster: int = 1  # blocks that divide a tile of keys, 64 each; 1: one block has all
    column_blocks: int = 1  # of these, blocks that have the same keys, and divide the columns of all matrices
    dq_part: int = 0  # columns of dQ that the warpgroup of queries of a cluster multiplies at once
    own_spans: bool = False  # each consumer knows which tiles of queries its own keys see, and which need no mask
    cuts: bool = False  # a call may split the last tiles of keys among several blocks
    cuts_first: bool = False  # the first tiles of keys of each KV head instead, which many more queries see
    query_chunk: int = (
        0  # query tiles that all heads of a group visit before the next ones; 0: one head after the other
    )
    slots: bool = False  # a step names the slot of its tile in a tile map, which has the mask as bits
    bias_stages: int = 0  # of the ring of these tiles, for each consumer
    stages_dq: bool = True  # dQ that is complete comes through shared memory to be rounded, else straight from L2
    reads_ds: bool = False  # a warp of the producer adds up gradients of the variant's tensors from tiles of dS
    clears: bool = False  # another one may clear gradients of biases where no step stores a tile of dS

    #: Constant of the kernel: query rows of a step whose elements a warp has.
    queries_of_warp: ClassVar[str] = "kBlockM"

    @property
    def pingpong(self) -> bool:
        """Whether consumers alternate at the tensor cores."""
        return self.overlap == "pingpong"

    def dout_early(self, stages: int) -> bool:
        """Whether dO of a step is asked for before its row statistics are read: where it has as many stages as Q, one
        of which is free by then."""
        return self.stores_apart and self.q_stages <= stages

    @property
    def stores_apart(self) -> bool:
        """Whether each consumer stores dK and dV through its own part of dS, without meeting the other one."""
        return self.pingpong

    @property
    def holds_mask_bits(self) -> bool:
        """Whether consumers apply the mask of a tile map by bits; those of a cluster evaluate it for each element."""
        return self.slots

    @property
    def in_cluster(self) -> bool:
        """See ``Structure``."""
        return self.cluster > 1

    @property
    def clears_gradients(self) -> bool:
        """See ``Structure``."""
        return self.clears

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 64 if self.cluster > 1 else 64 * self.consumers

    @property
    def key_blocks(self) -> int:
        """Blocks of a cluster that have the same columns, and divide the keys."""
        return self.cluster // self.column_blocks

    def columns_of(self, columns: tuple[Columns, ...]) -> int:
        """Columns of a matrix that a block has."""
        return columns[0].width // self.column_blocks

    @staticmethod
    def parts_of(width: int) -> int:
        """Products that columns of dK or dV are split into where four warpgroups run: ptxas plans each with the 128
        registers that a thread of them begins with."""
        return 2 if width > 192 else 1

    @property
    def sum_columns(self) -> int:
        """Columns of the dQ accumulator, which may be more than dQ has."""
        return self.dq_columns if self.dq_by_rows else max(self.consumers, self.cluster) * self.dq_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaForward(Structure):
    """Tile and memory of a forward by mma.sync, whose warps have 16 or 32 query rows each."""

    row_blocks: int  # of 16 rows, of a warp
    blocks: int  # that a multiprocessor runs at once
    q_in_ring: bool  # Q lies in the last stage of the ring until registers hold it
    q_kept: int  # columns of Q that stay in shared memory although registers hold the others
    one_address: bool  # a lane copies all boxes of a row by one address
    copy_share: int  # copies stand among the first products of a tile: one of so many shares of these
    paired_copies: bool  # two copies of a lane stand together among the products
    shares_keys: bool  # warps of a tile may have rows of several heads of a group, so that all see about the same keys
    q_first: bool  # copies of Q are issued before the tiles are found that its rows see
    bounded_rows: bool  # the compiler knows how many rows are copied at once
    q_by_warps: bool  # each warp copies its own rows of Q, not all warps those of each
    pairs: bool  # two warps share their rows of P, and each has half of the columns of O for all of these
    s_apart: bool  # a branch keeps other work before S,
    v_apart: bool  # and exponentials before the products with V
    columns_qk: int  # that are multiplied: multiples of 16; rows in shared memory may be longer
    columns_v: int
    box_bytes: int  # of a row, over which it is swizzled
    longest_first: bool  # query tiles from the last to the first, head by head within an L2 head group
    raise_above: str  # literal: growth of the running max, in units of log2, at which a lazy row max follows
    peak: int = 0  # log2 of P of the largest logit, so that a dtype with few exponents is used from its top
    key_values: int = 0  # values of each key that mask and score read, and that come with a tile of K
    fixed_max: str = "0.0f"  # literal; constant instead of row maxima, in units of log2, where logits are bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaBackward(Structure):
    """Tile and memory of a backward by mma.sync, whose warps have S and dP of 32 keys and some queries each."""

    blocks: int  # that a multiprocessor runs at once
    columns_qk: int  # that are multiplied: multiples of 32; rows in shared memory may be longer
    columns_v: int
    box_bytes: int  # of a row, over which it is swizzled
    bounded_rows: bool  # the compiler knows how many rows are copied at once
    shares_p: bool  # several warps have the same keys, and divide the columns of dV and dK
    late_columns: int  # of dQ of a warp, that are added to the sums among the products of the next step; 0: all at once
    keys_once: bool  # registers hold the values of keys that the mask loads
    late_beside_s: int  # additions of a lane among the products of S, of as many as these columns; others beside dP
    by_columns: bool  # dQ is computed 16 columns after the other, some of which are added among the products of others
    centered: bool  # dP begins with -D
    ordered: bool  # dQ is added up in a fixed order, by counters of tiles of keys after the dQ accumulator
    cuts_first: bool  # several blocks may divide one of the first tiles of keys of a KV head

    one_address: ClassVar[bool] = True
    queries_of_warp: ClassVar[str] = "kWarpM"
    #: P passes to the products in pairs of 16 bits, and rows of LSE and D lie in their order.
    packed: ClassVar[bool] = True
    rows_ahead: ClassVar[int] = 0
    overlap: ClassVar[str] = "nothing"
    cluster: ClassVar[int] = 0
    own_spans: ClassVar[bool] = False
