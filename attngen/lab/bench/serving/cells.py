"""The cells of the serving suite: problems that a server has, and the forms of cache that each of them runs in."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attngen.dtypes import dtype as dtype_row
from attngen.operations import APPEND_VARIANT

#: The same in all cells: the dtype of queries and caches, but for those in 8 bits, and the head dim, but for latent
#: attention.
DTYPE, HEAD_DIM = "bf16", 128
EIGHT_BITS = "fp8_e4m3"

#: Head dims of latent attention, whose values are the first columns of the keys.
LATENT_DIMS = (576, 512)

#: Keys that a window shows, and the bound of capped logits.
WINDOW, SOFTCAP = 1024, 30.0

#: Lengths of the ragged cell: how many, and the bounds of their log-uniform distribution.
_RAGGED, _SHORTEST, _LONGEST = 64, 128, 32768


@dataclass(frozen=True)
class Problem:
    """Queries at the ends of sequences: ``seqlen_q`` of each, and ``lengths`` keys, including those of the queries.

    ``head_dims`` are those of q and k, and of v. All sequences begin with the same ``prefix`` keys, over pages.
    """

    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    seqlen_q: int = 1
    variant: str = "causal"
    dtype: str = DTYPE
    kv_dtype: str = DTYPE
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)
    prefix: int = 0

    @property
    def latent(self) -> bool:
        """Whether values are the first columns of the keys."""
        return self.head_dims == LATENT_DIMS

    @property
    def call(self) -> tuple[str, tuple[int, int]]:
        """Variant and head dims, by which kernels are chosen."""
        return self.variant, self.head_dims

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have one length."""
        return len(set(self.lengths)) == 1

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that the mask shows, over all heads and sequences; 0 where tokens are written."""
        if self.variant == APPEND_VARIANT:
            return 0
        return self.heads * sum(sum(self._shown(length)) for length in self.lengths)

    def _shown(self, length: int) -> Iterable[int]:
        """Keys that each query of a sequence sees."""
        if self.variant == "tree":
            return (length - self.seqlen_q + sum(row) for row in ancestors(self.seqlen_q))
        most = WINDOW if self.variant == "sliding_window" else length
        return (min(length - self.seqlen_q + 1 + row, most) for row in range(self.seqlen_q))

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that some query sees, of a shared prefix once; where tokens are written, bytes that are read
        and written."""
        if self.variant == APPEND_VARIANT:
            rows = self.batch * self.seqlen_q * (2 * self.kv_heads + self.heads)
            return 2 * rows * HEAD_DIM * dtype_row(self.dtype).bytes
        keys = sum(self.lengths) - (self.batch - 1) * self.prefix
        if self.variant == "sliding_window":
            keys = sum(min(length, WINDOW + self.seqlen_q - 1) for length in self.lengths)
        columns = self.head_dims[0] if self.latent else sum(self.head_dims)
        return keys * self.kv_heads * columns * dtype_row(self.kv_dtype).bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of its two products."""
        return 2 * sum(self.head_dims) * self.pairs

    def of(self, variant: str) -> Problem:
        """The problem with another variant."""
        return replace(self, variant=variant)


def ancestors(tokens: int) -> list[list[bool]]:
    """The draft tokens that each of them sees: itself and those above it in a binary tree, token 0 at the root."""
    rows: list[list[bool]] = []
    for token in range(tokens):
        row = [False] * tokens if token == 0 else list(rows[(token - 1) // 2])
        row[token] = True
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Form of the cache: dense without ``page_size``, else in pages of that many keys.

    ``heads_first``: (batch, kv_heads, seqlen, head_dim), and pages as (pages, kv_heads, page_size, head_dim).
    """

    page_size: int | None = None
    heads_first: bool = False

    @property
    def name(self) -> str:
        """Contiguous, or pages of some size."""
        return "contiguous" if self.page_size is None else f"pages {self.page_size}"


@dataclass(frozen=True, slots=True)
class Lane:
    """One call of attngen in a cell. ``beside`` names the lane by whose time its own is divided. ``shared``: keys of
    the problem's prefix are read once for all sequences."""

    name: str
    problem: Problem
    form: CacheShape
    beside: str | None = None
    shared: bool = False

    @property
    def calls(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Variants and head dims of its kernels."""
        problem = self.problem
        return (problem.call, ("full", problem.head_dims)) if self.shared else (problem.call,)


@dataclass(frozen=True, slots=True)
class ServingCell:
    """Lanes that are measured together. Means are over the cells of a group."""

    group: str
    name: str
    lanes: tuple[Lane, ...]

    @property
    def problems_of_peers(self) -> tuple[Problem, ...]:
        """The problems that other libraries solve; none where attngen is only compared with itself."""
        alone = self.group in ("variants", "append_kv", "e4m3")
        return () if alone else tuple(dict.fromkeys(lane.problem for lane in self.lanes))


def cells() -> tuple[ServingCell, ...]:
    """All cells, in the order in which they are run."""
    return (
        *_decode(), *_prefixes(), *_append(), *_prefill(), *_latent(), *_eight_bits(), *_variants(), *_writes()
    )  # fmt: skip


def _decode() -> Iterable[ServingCell]:
    rows = [
        (1, 32, 8, 1024), (1, 32, 8, 8192), (1, 32, 8, 65536), (1, 32, 4, 262144), (8, 32, 8, 4096),
        (32, 32, 8, 4096), (64, 64, 8, 8192), (128, 32, 8, 4096), (64, 16, 1, 8192),
    ]  # fmt: skip
    for batch, heads, kv_heads, length in rows:
        problem = Problem(heads, kv_heads, (length,) * batch)
        yield _over_pages("decode", f"decode b{batch} {heads}/{kv_heads} {length // 1024}k", problem, (16, 64))
    chance = random.Random(0)
    spread = math.log(_LONGEST / _SHORTEST)
    lengths = tuple(round(_SHORTEST * math.exp(spread * chance.random())) for _ in range(_RAGGED))
    yield _over_pages("decode", f"decode b{_RAGGED} 32/8 128-32k", Problem(32, 8, lengths), (16, 64))


def _prefixes() -> Iterable[ServingCell]:
    """Decoding of sequences that begin with the same pages."""
    for batch, prefix, own in ((64, 16384, 512), (16, 16384, 512), (128, 2048, 1024)):
        problem = Problem(32, 8, (prefix + own,) * batch, prefix=prefix)
        form = CacheShape(16)
        lanes = (Lane(form.name, problem, form), Lane("shared", problem, form, beside=form.name, shared=True))
        yield ServingCell("prefix", f"prefix {prefix // 1024}k b{batch} 32/8 {own} own", lanes)


def _append() -> Iterable[ServingCell]:
    for tokens in (4, 16, 64):
        problem = Problem(32, 8, (8192,) * 16, tokens)
        yield _over_pages("append", f"append {tokens} to b16 32/8 8k", problem, (16, 64))


def _prefill() -> Iterable[ServingCell]:
    sizes = (16, 64, 256)
    yield _over_pages("prefill", "prefill 512 at 8k b4 32/8", Problem(32, 8, (8192,) * 4, 512), sizes)
    yield _over_pages("prefill", "prefill 4k b8 32/8", Problem(32, 8, (4096,) * 8, 4096), sizes)


def _latent() -> Iterable[ServingCell]:
    """Decoding over a cache of latent rows, which all heads share."""
    for batch, heads, length, tokens in (
        (128, 128, 4096, 1), (128, 128, 16384, 1), (16, 128, 4096, 1), (1, 128, 65536, 1), (64, 64, 8192, 1),
        (128, 16, 4096, 1), (16, 16, 4096, 1), (16, 64, 8192, 2),
    ):  # fmt: skip
        problem = Problem(heads, 1, (length,) * batch, tokens, head_dims=LATENT_DIMS)
        queries = "" if tokens == 1 else f" {tokens} queries"
        yield _over_pages("mla", f"mla b{batch} {heads}/1 {length // 1024}k{queries}", problem, (64,))


def _eight_bits() -> Iterable[ServingCell]:
    """Caches in 8 bits beside ones in 16: decoding, appending and part of a prompt, queries in 16 bits and in 8."""
    for name, problem in (
        ("decode b8 32/8 4k", Problem(32, 8, (4096,) * 8)),
        ("decode b32 32/8 4k", Problem(32, 8, (4096,) * 32)),
        ("decode b64 64/8 8k", Problem(64, 8, (8192,) * 64)),
        ("append 4 to b16 32/8 8k", Problem(32, 8, (8192,) * 16, 4)),
        ("append 16 to b16 32/8 8k", Problem(32, 8, (8192,) * 16, 16)),
        ("prefill 512 at 8k b4 32/8", Problem(32, 8, (8192,) * 4, 512)),
        ("prefill 512 at 32k b1 32/8", Problem(32, 8, (32768,), 512)),
    ):
        cached = replace(problem, kv_dtype=EIGHT_BITS)
        both = replace(cached, dtype=EIGHT_BITS)
        dense, paged = CacheShape(), CacheShape(64)
        wide = [Lane(f"{DTYPE} {form.name}", problem, form) for form in (dense, paged)]
        narrow = [
            Lane(f"e4m3 {form.name}", cached, form, beside=lane.name)
            for lane, form in zip((wide[0], wide[1], wide[1]), (dense, paged, CacheShape(16)), strict=True)
        ]
        yield ServingCell(
            "e4m3", f"e4m3 {name}", (*wide, *narrow, Lane("e4m3 and q", both, paged, beside=wide[1].name))
        )


def _variants() -> Iterable[ServingCell]:
    """The cost of a mask or a score next to causal attention of its sizes, of a window next to the keys it shows."""
    for form in (CacheShape(), CacheShape(64)):
        shown, whole = (Problem(32, 8, (length,) * 4) for length in (WINDOW, 131072))
        yield ServingCell(
            "variants",
            f"window 1k of 128k b4 32/8, {form.name}",
            (
                Lane("1k keys", shown, form),
                Lane("window", whole.of("sliding_window"), form, beside="1k keys"),
            ),
        )
    eight = Problem(32, 8, (8192,) * 16)
    for form in (CacheShape(), CacheShape(64)):
        lanes = [Lane(name, eight.of(name), form, beside="causal") for name in ("softcap", "causal_sink")]
        yield ServingCell("variants", f"scores b16 32/8 8k, {form.name}", (Lane("causal", eight, form), *lanes))
    draft = replace(eight, seqlen_q=16)
    lanes = [Lane("causal", draft, CacheShape(64)), Lane("tree", draft.of("tree"), CacheShape(64), beside="causal")]
    yield ServingCell("variants", "tree of 16 b16 32/8 8k, pages 64", tuple(lanes))


def _writes() -> Iterable[ServingCell]:
    """Writing new tokens into caches, with queries and keys rotated: a step of decoding, and parts of prompts."""
    for batch, tokens in ((1, 1), (128, 1), (8, 2048)):
        problem = Problem(32, 8, (max(1024, tokens),) * batch, tokens, APPEND_VARIANT)
        yield _over_pages("append_kv", f"append_kv {tokens} to b{batch} 32/8", problem, (16, 64))


def _over_pages(group: str, name: str, problem: Problem, sizes: Sequence[int]) -> ServingCell:
    dense = CacheShape()
    paged = [Lane(CacheShape(size).name, problem, CacheShape(size), beside=dense.name) for size in sizes]
    return ServingCell(group, name, (Lane(dense.name, problem, dense), *paged))
