"""Decisions of the Hopper backward beyond those of all plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.model import Columns, Structure

#: Keys of a consumer of a backward by single blocks: M of wgmma.
KEYS_OF_CONSUMER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBackward(Structure):
    """Roles, pipeline and memory of a Hopper kernel of dQ, dK and dV in CUDA."""

    # consumers keep dK and dV in registers: of 64 keys each, or one dV and one dK
    overlap: str  # what the softmax of a step runs over: pingpong (products of the other consumer) |
    # gradients (dQ and dK of the step before) | nothing;
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
    def own_rows(self) -> int:
        """See ``Structure``."""
        return 64

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
