"""Conditions that decide a block of pairs in the kernels that make tile maps."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.lang.blocks import Block
from attngen.lang.statements import Code, Statement, reads


@dataclass(frozen=True, slots=True)
class BlocksView:
    """Conditions on a block of pairs for all of which the mask reads tensors at one element: whether some pair may be
    visible, and whether all must be. The block begins at ``q_lo`` and ``kv_lo``; its size is (queries, keys)."""

    size: Block
    lines: tuple[Statement, ...]
    may: Code
    must: Code

    @property
    def reads(self) -> frozenset[str]:
        """Names that the code reads."""
        return reads([*self.lines, self.may, self.must])
