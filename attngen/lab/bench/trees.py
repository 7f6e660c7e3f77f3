"""The trees suite: attention over a pack of prefix trees beside the same sequences packed apart, forward and backward.

Both sides are attngen's: ``prefix_tree`` over each prefix once, and causal kernels of packed sequences over all tokens.
They compute the same outputs, and the same gradients once those of shared tokens are added up, which is checked before
they are timed. Kernels are compiled on the first call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attngen.build.first_call import jit
from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.check import relative_error
from attngen.lab.bench.report import Report, Result, Row
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, ReadyContender, Suite, by_parts
from attngen.lab.bench.timing import Batches, Contender, UncheckedOutputs
from attngen.lab.verify.gpu import Gpu
from attngen.runtime.operations.attention.entry import attention, attention_varlen
from attngen.trees import PackedTrees, pack

#: Version of the JSON document.
FORMAT = 1

#: A tree by its levels: the runs below each run of the level before, and their tokens.
Levels = tuple[tuple[int, int], ...]

#: Groups of answers to a prompt, several groups in a pack, and a binary search with a choice every 512 tokens.
CELLS: dict[str, Levels] = {
    "32 answers of 512 to 8k": ((1, 8192), (32, 512)),
    "16 answers of 2k to 1k": ((1, 1024), (16, 2048)),
    "4 prompts of 2k, 8 answers of 1k each": ((4, 2048), (8, 1024)),
    "8 answers of 4k to 256": ((1, 256), (8, 4096)),
    "binary tree of 6 levels of 512": ((1, 512), *[(2, 512)] * 5),
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

TREE, APART = "tree", "apart"

#: Largest difference of the two sides, relative by norm, of an output or a gradient in bf16.
AGREEMENT = 3e-2


@dataclass(frozen=True)
class TreeCell:
    """A tree, and the heads of the attention over it."""

    short: str
    levels: Levels
    head_dim: int = HEAD_DIM
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @property
    def name(self) -> str:
        """The cell in a few words."""
        return f"{self.short}, d{self.head_dim}"

    @cached_property
    def packed(self) -> PackedTrees:
        """The sequences as one pack, on the CPU."""
        return pack(_sequences(self.levels, itertools.count()))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(places) for places in self.packed.places]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of each side."""
        return {TREE: self.packed.ids.shape[1], APART: sum(self.lengths)}

    @property
    def pairs(self) -> dict[str, int]:
        """Visible pairs of each side, of one head."""
        return {
            TREE: int((self.packed.positions + 1).sum()),
            APART: sum(length * (length + 1) // 2 for length in self.lengths),
        }


def _sequences(levels: Levels, tokens: Iterator[int], before: tuple[int, ...] = ()) -> list[list[int]]:
    """Sequences from the root to each leaf, of tokens that are all different."""
    if not levels:
        return [list(before)]
    count, length = levels[0]
    runs = [(*before, *itertools.islice(tokens, length)) for _ in range(count)]
    return [one for run in runs for one in _sequences(levels[1:], tokens, run)]


@dataclass(frozen=True, kw_only=True)
class TreeRow(Row[Result]):
    """One cell."""

    cell: TreeCell

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.cell.name

    def milliseconds(self, side: str, direction: str) -> float | None:
        """The time of a side; None if it was not measured."""
        return next(one.milliseconds for one in self.results if one.contender == f"{side} {direction}")

    def speed(self, direction: str) -> float | None:
        """The time of sequences apart over that of the tree; None if one of them was not measured."""
        tree, apart = (self.milliseconds(side, direction) for side in (TREE, APART))
        return None if tree is None or apart is None else apart / tree

    def to_dict(self) -> dict[str, Any]:
        """See ``Row``."""
        cell = self.cell
        return {
            **super().to_dict(), "levels": [list(level) for level in cell.levels], "head_dim": cell.head_dim,
            "heads": cell.heads, "kv_heads": cell.kv_heads, "tokens": cell.tokens, "pairs": cell.pairs,
            "speed": {direction: self.speed(direction) for direction in DIRECTIONS},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TreeReport(Report[TreeRow]):
    """A run of the trees suite so far."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {**super().to_dict(), "format": FORMAT, "suite": "trees"}


class TreeSuite(Suite[TreeCell, TreeReport]):
    """Trees beside their sequences apart. Raises CallError if the options name no cell."""

    noun = "cell"

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        cells = [TreeCell(*each, head_dim) for head_dim in options.head_dims or (HEAD_DIM,) for each in CELLS.items()]
        self.cases = by_parts(
            cells, options.cells, "cell of the trees suite", lambda cell: cell.name, lambda cell: cell.short
        )
        self.report = TreeReport(package="trees")

    def session(self) -> AbstractContextManager[Any]:
        """See ``Suite``: kernels are compiled on the first call."""
        return jit()

    def planned(self, case: TreeCell) -> TreeRow:
        """See ``Suite``."""
        names = [f"{side} {direction}" for direction in DIRECTIONS for side in (TREE, APART)]
        return TreeRow(results=tuple(map(Result, names)), cell=case)

    def compiled(self, gpu: Gpu, observer: Observer) -> TreeReport:
        """See ``Suite``."""
        return self.report

    def measured(self, bench: Bench, case: TreeCell) -> TreeRow:
        """See ``Suite``."""
        sides = TreeInputs(case, bench.device, bench.generator)
        entered = []
        for direction, side in itertools.product(DIRECTIONS, (TREE, APART)):
            products = 4 if direction == DIRECTIONS[0] else 10  # FLOPs for each pair and column
            flops = products * case.pairs[side] * case.heads * case.head_dim
            make = partial(_entry, bench, sides, side, direction)
            entered.append(bench.enter(Result(f"{side} {direction}", flops=flops), make))
        results, reading = bench.measure(entered)
        return TreeRow(results=results, cell=case, reading=reading)


def _entry(bench: Bench, sides: TreeInputs, side: str, direction: str) -> ReadyContender:
    """A side in a direction; the tree is compared with the sequences apart."""
    forward = direction == DIRECTIONS[0]
    call = partial(sides.forward, side) if forward else sides.backward(side)
    sampler = Batches(Contender(side, [call]), bench.clock, UncheckedOutputs())
    if side == APART:
        return ReadyContender(sampler)
    error: Callable[[Any], float] = sides.error if forward else sides.error_of_gradients
    return ReadyContender(sampler, error, AGREEMENT)


class TreeInputs:
    """q, k and v of a pack in bf16, (1, tokens, heads, head_dim), and of its sequences, (tokens, heads, head_dim).

    The gradient of a token's output in the pack is the sum of those in its sequences.
    """

    def __init__(self, cell: TreeCell, device: torch.device, generator: torch.Generator) -> None:
        self.cell, self.packed = cell, cell.packed.to(device)
        self.places = torch.cat(self.packed.places)
        starts = [0, *itertools.accumulate(cell.lengths)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)

        def new(tokens: int, heads: int) -> Tensor:
            size = (tokens, heads, cell.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        rows = [new(cell.tokens[TREE], heads) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)]
        dout = new(cell.tokens[APART], cell.heads)
        self.leaves = {
            TREE: [one[None].requires_grad_() for one in rows],
            APART: [one[self.places].requires_grad_() for one in rows],
        }
        self.douts = {TREE: self._added(dout)[None].to(torch.bfloat16), APART: dout}

    def forward(self, side: str) -> Tensor:
        """The output of a side, without gradients unless they are enabled."""
        q, k, v = self.leaves[side]
        if side == TREE:
            out = attention(q, k, v, **self.packed.arguments())
        else:
            longest = max(self.cell.lengths)
            out = attention_varlen(q, k, v, self.starts, self.starts, longest, longest, variant="causal")
        assert isinstance(out, Tensor)
        return out

    def backward(self, side: str) -> Callable[[], Sequence[Tensor]]:
        """A call that returns dQ, dK and dV of a side; its forward pass runs here."""
        with torch.enable_grad():
            out = self.forward(side)
        return partial(torch.autograd.grad, out, self.leaves[side], self.douts[side], retain_graph=True)

    def error(self, out: Tensor) -> float:
        """Relative difference of the tree's output from that of sequences apart, in the first and the last head."""
        with torch.no_grad():
            expected = self.forward(APART)
        return max(relative_error(out[0, :, h][self.places], expected[:, h].double()) for h in (0, -1))

    def error_of_gradients(self, gradients: Sequence[Tensor]) -> float:
        """The same of the gradients, of which sequences apart have several for a shared token."""
        expected = self.backward(APART)()
        return max(
            relative_error(one[0, :, h], self._added(other[:, h]).double())
            for one, other in zip(gradients, expected, strict=True)
            for h in (0, -1)
        )

    def _added(self, rows: Tensor) -> Tensor:
        """Rows of all sequences, added up by their place in the pack, in float32."""
        added = torch.zeros(self.cell.tokens[TREE], *rows.shape[1:], dtype=torch.float32, device=rows.device)
        return added.index_add_(0, self.places, rows.float())
