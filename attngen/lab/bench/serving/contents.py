"""Queries and caches of a problem: one pool of random tokens, which each form of cache reads in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.lab.bench.check import relative_error
from attngen.lab.bench.serving.cells import EIGHT_BITS, SOFTCAP, WINDOW, CacheShape, Problem, ancestors
from attngen.lab.bench.timing import input_sets
from attngen.runtime.operations.attention.entry import attention

#: Room for a sequence is a multiple of this, and so of all page sizes.
_ROOM = 256

#: The scale of numbers in 8 bits.
_SCALE = 0.75


@dataclass(frozen=True)
class SequencePages:
    """The pages of each sequence. ``listed`` are those of all sequences in turn, ``starts`` where each starts in it.

    ``table`` (batch, max_pages), the others vectors; all int32. ``last`` counts the keys of a sequence's last page.
    """

    table: Tensor
    starts: Tensor
    listed: Tensor
    last: Tensor


class ServingInputs:
    """Random queries, keys and values of a problem, in as many sets as exceed twice the L2 cache.

    All forms read the same bytes; they differ in the bytes that are the keys of a sequence.
    """

    def __init__(self, problem: Problem, device: torch.device, l2_bytes: int, generator: torch.Generator) -> None:
        self.problem, self.device = problem, device
        self.room = -(-max(problem.lengths) // _ROOM) * _ROOM
        sets = input_sets(problem.cache_bytes, l2_bytes)

        def new(dtype: str, *shape: int) -> list[Tensor]:
            drawn = torch.bfloat16 if dtype == EIGHT_BITS else getattr(torch, dtype_row(dtype).torch)
            made = getattr(torch, dtype_row(dtype).torch)
            return [torch.randn(shape, generator=generator, device=device, dtype=drawn).to(made) for _ in range(sets)]

        self.queries = new(problem.dtype, problem.batch, problem.seqlen_q, problem.heads, problem.head_dims[0])
        cached = (problem.kv_dtype, problem.batch * self.room, problem.kv_heads)
        self._keys = new(*cached, problem.head_dims[0])
        self._values = self._keys if problem.latent else new(*cached, problem.head_dims[1])
        #: The scales of tensors in 8 bits, one for each sequence and KV head.
        self.scales = {
            f"{name}_descale": torch.full((problem.batch, problem.kv_heads), _SCALE, device=device, dtype=torch.float32)
            for name, dtype in (("q", problem.dtype), ("k", problem.kv_dtype), ("v", problem.kv_dtype))
            if dtype == EIGHT_BITS
        }
        self.lengths = torch.tensor(problem.lengths, dtype=torch.int32, device=device)
        self._pages: dict[int, SequencePages] = {}

    @property
    def sets(self) -> int:
        """Sets of inputs that are used in turn."""
        return len(self.queries)

    @property
    def full(self) -> bool:
        """Whether every sequence fills its room, so that no lengths need to be given."""
        return min(self.problem.lengths) == self.room

    def cache(self, number: int, form: CacheShape) -> tuple[Tensor, Tensor]:
        """Keys and values of a set in a form of cache."""
        rows, heads = form.page_size or self.room, self.problem.kv_heads
        axes = (-1, heads, rows) if form.heads_first else (-1, rows, heads)
        keys, values = (each[number].view(*axes, each[number].shape[-1]) for each in (self._keys, self._values))
        return keys, values[..., : self.problem.head_dims[1]]

    def pages(self, page_size: int) -> SequencePages:
        """The pages of each sequence, in random order."""
        if page_size not in self._pages:
            counts = [-(-length // page_size) for length in self.problem.lengths]
            pages = self.problem.batch * self.room // page_size
            order = torch.randperm(pages, dtype=torch.int32, device="cpu")[: sum(counts)]
            table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cpu")
            shared = self.problem.prefix // page_size
            for row, own in zip(table, order.split(counts), strict=True):
                row[: len(own)] = own
                row[:shared] = table[0, :shared]
            order = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
            starts = torch.tensor([0, *counts], device="cpu").cumsum(0).int()
            last = torch.tensor(
                [(length - 1) % page_size + 1 for length in self.problem.lengths], dtype=torch.int32, device="cpu"
            )
            self._pages[page_size] = SequencePages(*(each.to(self.device) for each in (table, starts, order, last)))
        return self._pages[page_size]

    def of_sequence(self, number: int, form: CacheShape, b: int, hk: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence and KV head of a set, (length, head_dim) each."""
        length, rows = self.problem.lengths[b], []
        for tensor in self.cache(number, form):
            heads = tensor[:, hk] if form.heads_first else tensor[:, :, hk]  # (pages or batch, rows, head_dim)
            if form.page_size is None:
                rows.append(heads[b, :length])
            else:
                own = self.pages(form.page_size).table[b, : -(-length // form.page_size)].long()
                bits = heads.view(torch.uint8) if heads.element_size() == 1 else heads  # 8-bit floats are not picked
                rows.append(bits[own].flatten(0, 1)[:length].view(heads.dtype))
        return rows[0], rows[1]

    def own(self, variant: str) -> dict[str, Any]:
        """The variant's own arguments."""
        problem = self.problem
        if variant == "tree":
            tree = torch.tensor(ancestors(problem.seqlen_q), device=self.device)
            return {"tree": tree.expand(problem.batch, -1, -1).contiguous()}
        if variant == "causal_sink":
            return {"sinks": torch.linspace(-1.0, 1.0, problem.heads, device=self.device, dtype=torch.float32)}
        scalars: dict[str, dict[str, Any]] = {"sliding_window": {"window": WINDOW}, "softcap": {"cap": SOFTCAP}}
        return scalars.get(variant, {})


class ServingOracle:
    """The last set's output for the first KV head of the first sequence and the last one of the last, in float64."""

    def __init__(self, contents: ServingInputs, problem: Problem, form: CacheShape, package: str) -> None:
        """``problem`` may differ from that of the contents in its variant."""
        group, number = problem.heads // problem.kv_heads, contents.sets - 1
        self._picked: list[tuple[int, slice]] = []
        expected = []
        for b, hk in sorted({(0, 0), (problem.batch - 1, problem.kv_heads - 1)}):
            heads = slice(hk * group, (hk + 1) * group)
            k, v = (
                each[None, :, None].double() * (_SCALE if f"{name}_descale" in contents.scales else 1.0)
                for name, each in zip("kv", contents.of_sequence(number, form, b, hk), strict=True)
            )
            own = contents.own(problem.variant)
            if "tree" in own:
                own["tree"] = own["tree"][b : b + 1]
            if "sinks" in own:
                own["sinks"] = own["sinks"][heads]
            q = contents.queries[number][b : b + 1, :, heads].double()
            q *= _SCALE if "q_descale" in contents.scales else 1.0
            out = attention(q, k, v, variant=problem.variant, package=package, backend="reference", **own)
            assert isinstance(out, Tensor)
            expected.append(out)
            self._picked.append((b, heads))
        self._expected = torch.cat(expected)

    def error(self, out: Tensor) -> float:
        """Relative error of (batch, seqlen_q, heads, head_dim)."""
        return relative_error(torch.cat([out[b : b + 1, :, heads] for b, heads in self._picked]), self._expected)
