"""Hopper's backward kernels in CUDA in words: their launches, and the roles of the kernel of all products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attngen.families.hopper_backward.blocks_pipes import ROWS
from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.families.hopper_backward.launches import first_stored
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.lang.printing import canonical
from attngen.parts.explained.backward import describe
from attngen.parts.explained.base import ScheduleExplanation
from attngen.plan.model import Launch
from attngen.plan.own_gradients import Way, gradients_of

_OVERLAPS = {
    "gradients": "runs under dQ and dK of the one before",
    "pingpong": "runs under products of the other consumer: they take turns at the tensor cores",
    "nothing": "runs under no product of its own warpgroup",
    "roles": "runs under products of other warpgroups",
    "dv": "runs under dV of the one before, and products of other warpgroups",
}


#: Descriptions of the ways by which gradients of tensors are added up.
_WAYS = {
    Way.HEAD: "in a register of each consumer thread, added once for each head of a tile of keys",
    Way.KEY: "in registers of consumers, added once for each head of a tile of keys",
    Way.COLUMN: "columns of tiles of dS, summed by a warp of the producer",
    Way.ROW: "rows of tiles of dS, summed by a warp of the producer",
    Way.DIAGONAL: "diagonals of tiles of dS, summed by a warp of the producer",
    Way.BLOCK: "blocks of tiles of dS, summed by a warp of the producer",
    Way.PAIR: "tiles of dS, stored or added by a warp of the producer",
    Way.EACH: "pair by pair in registers of consumers, added when a thread comes to another entry: the slowest way",
}
#: The same where warps of consumers do it.
_WAYS_OF_WARPS = {
    Way.DIAGONAL: "diagonals, summed among the lanes of consumers",
    Way.BLOCK: "blocks of the keys of a warp of consumers, summed among its lanes",
}


@dataclass(frozen=True, slots=True)
class BlockExplanation(ScheduleExplanation):
    """The explanation of a Hopper backward by single blocks."""

    more: ClassVar[dict[str, str]] = {
        "preprocess": "; clears the dQ accumulator",
        "dqkv": "; adds dQ to the dQ accumulator, and rounds what is complete",
    }

    @property
    def roles(self) -> HopperBackward:
        """The structure of the plan."""
        assert isinstance(self.plan.structure, HopperBackward)
        return self.plan.structure

    def launch(self, launch: Launch) -> list[str]:
        """Lines on one launch: its purpose, and the warpgroups and the memory of the launch of all products."""
        plan, roles = self.plan, self.roles
        clears = launch.name == "preprocess" and first_stored(plan)
        does = describe(launch) + ("; clears the states of dQ" if clears else self.more.get(launch.name, ""))
        if launch.name != plan.main:
            return [does]
        sizes = ", ".join(f"{region.name} {region.bytes}" for region in roles.shared if region.bytes >= 1024)
        flight = f"{roles.q_stages} tiles of Q, {launch.stages} {self.of_dout()}of dO, 2 of dS"
        return [
            does + (", those of the first keys first" if plan.ordered else ""),
            *self.warpgroups(),
            f"loop: {launch.iteration}; the softmax of a step {_OVERLAPS[roles.overlap]}",
            *self.steps(),
            f"in flight: {flight}",
            f"shared memory {roles.shared_bytes} B: {sizes}",
        ]

    def steps(self) -> Iterator[str]:
        """Other decisions about steps and their order."""
        roles = self.roles
        if roles.own_spans:
            yield "a consumer whose keys no query of a step sees multiplies nothing but dQ of the step before"
        if roles.query_values:
            yield "what the mask reads of a query comes with its tile"
        if roles.distance_values:
            yield "what the score computes from the distance of a query and a key alone comes with the tile of Q"
        if roles.biases:
            stages = "1 stage" if roles.bias_stages == 1 else f"{roles.bias_stages} stages"
            size = f"{roles.biases} x {self.plan.tile_m} x 64"
            yield f"tiles of biases come with those of Q: {stages} of {size} for each consumer"
        if roles.table_bytes:
            yield f"each consumer holds the tables that the score reads, {roles.table_bytes} B"
        if roles.query_chunk:
            most = f"chunks of at most {roles.query_chunk} query tiles together"
            yield f"heads of a group go through {most}, the last ones first"
        clustered = roles.cluster > 1
        for each in gradients_of(self.plan.variant, fast_math=self.plan.fast_math, tiles_only=clustered):
            way = (_WAYS if clustered or not each.by_warps else _WAYS_OF_WARPS)[each.way]
            yield f"gradient of {canonical(each.load)}: {way}"
        if roles.clears:
            yield "where no step stores a tile of a bias's gradient, the warp that rounds dQ clears it"
        if roles.cuts:
            which = "first" if roles.cuts_first else "last"
            yield f"where blocks would wait for a few, the {which} tiles of keys are cut into parts of their steps"

    def warpgroups(self) -> Iterator[str]:
        """Yield a line for each role."""
        roles = self.roles
        yield f"producer: 1 warpgroup, {self.registers('loader')}: loads, adds up dQ and rounds it"
        yield f"consumers: {roles.consumers} warpgroups of 64 keys, {self.registers('consumers')}"

    def registers(self, role: str) -> str:
        """The registers of a role."""
        return f"{self.roles.registers_of(role)} registers a thread"

    def of_dout(self) -> str:
        """Contents of a stage of dO, where it is not a whole tile."""
        return ""


@dataclass(frozen=True, slots=True)
class ClusterExplanation(BlockExplanation):
    """The explanation of a Hopper backward by clusters."""

    more: ClassVar[dict[str, str]] = {**BlockExplanation.more, "dqkv": "; adds dQ to the dQ accumulator"}

    def warpgroups(self) -> Iterator[str]:
        """Yield a line for each role."""
        roles = self.roles
        blocks = f"{roles.key_blocks} blocks of {roles.keys} keys"
        if roles.column_blocks > 1:
            blocks = f"{roles.column_blocks} x {blocks}, for half of the columns each"
        yield f"a cluster of {blocks}, in each of which 1 warpgroup"
        order = "; a warp of it keeps the order of dQ's sums" if roles.ordered else ""
        order = "; a warp of it adds up gradients of tensors" if roles.reads_ds else order
        yield f"loads: {self.registers('query_loader')}; a half of Q and dO for both blocks{order}"
        adds = ", adds that of the block with the other columns," if roles.column_blocks > 1 else ""
        yield f"multiplies S{adds} and keeps dV: {self.registers('values')}"
        yield f"multiplies dP{adds} and keeps dK: {self.registers('keys')}"
        yield (
            f"multiplies {roles.dq_columns} columns of dQ, {roles.dq_part} at once, and adds them to the dQ "
            f"accumulator: {self.registers('queries')}"
        )

    def of_dout(self) -> str:
        """A note where a stage of dO holds half a tile."""
        return "half ones " if self.roles.parts_of(self.roles.columns_of(self.plan.columns_v)) > 1 else ""


@dataclass(frozen=True, slots=True)
class BlocksExplanation(ScheduleExplanation):
    """The explanation of a Hopper backward by blocks."""

    def launch(self, launch: Launch) -> list[str]:
        """Lines on one launch: its purpose, and the warpgroups and the memory of those that multiply."""
        roles, does = self.plan.structure, describe(launch)
        assert isinstance(roles, BlocksBackward)
        if launch.name not in ("dkdv", "dq"):
            return [does]
        by_keys = launch.name == "dkdv"
        rows, moved = ("keys", "Q and dO") if by_keys else ("queries", "K and V")
        regions = roles.shared if by_keys else roles.of_queries
        apart = (launch.tile_n if by_keys else launch.tile_m) == ROWS
        of_s, of_dp = (" and keeps dV", "dK") if by_keys else ("", "dQ")
        visits = "with a row for each consumer, which visits what its own rows see and waits for no other"
        shares = f"one consumer multiplies S{of_s}, the other dP and keeps {of_dp}; P passes through shared memory"
        return [
            does,
            f"producer: 1 warpgroup, {roles.registers_of('loader')} registers a thread: loads",
            f"consumers: {roles.consumers} warpgroups of {'the same ' if apart else ''}64 {rows}, "
            f"{roles.registers_of('consumers')} registers each",
            f"loop: tile_map, {shares if apart else visits}",
            f"in flight: {launch.stages} blocks of {moved}",
            f"shared memory {launch.shared_bytes} B: "
            + ", ".join(f"{region.name} {region.bytes}" for region in regions if region.bytes >= 1024),
        ]
