"""Decisions of the forward by mma.sync beyond those of all plans."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Structure


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
