"""Expected speed of a forward kernel by mma.sync on cards that were not measured, by arithmetic.

docs/notebook/mma.md derives the model and compares it with measurements on an H100 and an H200. A step of a warp keeps
four units busy for some cycles: tensor cores, shared memory, issue slots and exponentials. They overlap in part, so
that its time lies between the longest of them and their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attngen.families.mma_forward.structure import MmaForward
from attngen.parts.explained.base import ScheduleExplanation
from attngen.plan.model import Plan

#: How far the units overlap: 1 is not at all, infinity is entirely. Fitted to ten kernels on an H100
#: (docs/notebook/mma.md, "Expected on cards that were not at hand").
_OVERLAP = 1.6

#: Schedulers of a multiprocessor, lanes of a warp, and bytes that a lane copies at once.
_SCHEDULERS, _LANES, _COPY = 4, 32, 16

#: Cycles that a scheduler's share of a unit takes: for 512 bytes of shared memory of all four warps, and for one
#: exponential of each lane (docs/notebook/mma.md, "Expected on cards that were not at hand").
_CYCLES_OF_512_BYTES, _CYCLES_OF_EXPONENTIAL = 16, 8

#: Instructions of a step beside products, loads, copies: these, and for each logit of a lane. Counted in cubins
#: (docs/notebook/mma.md, "Expected on cards that were not at hand").
_OTHERS, _OTHERS_OF_LOGIT = 200, 3.75

#: Instructions that separate the columns of 512 bytes of V in 8 bits. Counted in the source, not measured.
_PERMUTATIONS = 4


@dataclass(frozen=True, slots=True)
class _Card:
    """Multiprocessors, clock, and cycles of a scheduler for a product (m16n8k16 in 16 bits), by published peaks."""

    name: str
    multiprocessors: int
    ghz: float
    product: int


_CARDS = {
    "sm80": (_Card("A100", 108, 1.41, 8),),
    "sm86": (_Card("A10", 72, 1.695, 16), _Card("RTX 3090", 82, 1.695, 32)),
    "sm89": (_Card("L40S", 142, 2.52, 16), _Card("RTX 4090", 128, 2.52, 32)),
    "sm120a": (_Card("RTX PRO 6000", 188, 2.6, 16), _Card("RTX 5090", 170, 2.41, 32)),
}


@dataclass(frozen=True, slots=True)
class MmaForwardExplanation(ScheduleExplanation):
    """The explanation of a forward by mma.sync: what to expect of it on the cards that it is for."""

    def expected(self) -> dict[str, float]:
        """TFLOP/s of full tiles by card."""
        structure = self.plan.structure
        assert isinstance(structure, MmaForward)
        return {card.name: _tflops(self.plan, structure, card) for card in _CARDS.get(self.plan.arch_name, ())}

    def facts(self) -> dict[str, list[str]]:
        """See ``ScheduleExplanation.facts``."""
        speeds = " and ".join(f"{tflops:.0f} TFLOP/s ({name})" for name, tflops in self.expected().items())
        source = "in full tiles, by arithmetic from rates of instructions; no such card was measured"
        return {"expected": [f"about {speeds} {source}"]} if speeds else {}

    def to_dict(self) -> dict[str, Any]:
        """See ``ScheduleExplanation.to_dict``."""
        speeds = {name: round(tflops, 1) for name, tflops in self.expected().items()}
        return {"expected": speeds} if speeds else {}


def _tflops(plan: Plan, structure: MmaForward, card: _Card) -> float:
    """TFLOP/s of full tiles: two operations of each product's multiplications, of Q K^T and of P V."""
    rows, size = 16 * structure.row_blocks, plan.operands.k.bytes
    columns = structure.columns_qk + structure.columns_v
    products = rows * plan.tile_n * columns * size // (16 * 8 * 32)
    loads, copies = _loads(plan, structure), plan.tile_n * columns * size // (_COPY * plan.threads)
    logits = rows * plan.tile_n // _LANES
    permutations = _PERMUTATIONS * plan.tile_n * structure.columns_v // 512 if size == 1 else 0
    units = (
        products * card.product,
        loads * _CYCLES_OF_512_BYTES + copies * _CYCLES_OF_512_BYTES // 2,
        products + loads + copies + permutations + _OTHERS + _OTHERS_OF_LOGIT * logits,
        logits * _CYCLES_OF_EXPONENTIAL,
    )
    cycles = sum(unit**_OVERLAP for unit in units) ** (1 / _OVERLAP)
    operations = 2 * rows * plan.tile_n * (plan.head_dim_qk + plan.head_dim_v)
    return operations / cycles * _SCHEDULERS * card.multiprocessors * card.ghz / 1e3


def _loads(plan: Plan, structure: MmaForward) -> int:
    """Loads and stores of 512 bytes of shared memory of a warp in a step: fragments of K, V and Q; and P, which pairs
    of warps exchange instead of half of V."""
    size, rows = plan.operands.k.bytes, 16 * structure.row_blocks
    in_shared = structure.columns_qk if plan.q_operand == "shared" else structure.q_kept
    v = structure.columns_v // 2 if structure.pairs else structure.columns_v
    p = 2 * 16 * plan.tile_n * plan.operands.p.bytes // 512 if structure.pairs else 0
    return (plan.tile_n * (structure.columns_qk + v) + rows * in_shared) * size // 512 + p
