"""Caches in pages on the GPU: kernels against float64, calls that wait for nothing, a graph whose lengths grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.errors import CallError
from attngen.lab.verify.gpu import Gpu, try_pinned
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from tests.gpu.family import compiled_kernels, for_this_gpu

DEVICE = "cuda"

SPEC = """
schema: 1
package: attngen_gpu_paged
arch: [sm90a]
variants:
  tree:
    mask: "kv < seqlen_k - seqlen_q or tree[b, q, kv - seqlen_k + seqlen_q]"
    tensors:
      tree: {dtype: bool, shape: [b, seqlen_q, seqlen_q]}
kernels:
  - variant: [full, causal, sliding_window, softcap, alibi, causal_sink, chunked]
    head_dim: [64, 128]
    dtype: bf16
    layout: paged
  - variant: causal
    head_dim: [{qk: 192, v: 128}, 96]
    dtype: fp16
    layout: paged
  - {variant: tree, head_dim: 128, dtype: bf16, layout: paged, tile_map: never}
"""

ASKED = expand(load_spec_text(SPEC))


def to_build() -> list[Prepared]:
    return [kernel for kernel in prepare(load_spec_text(SPEC)) if kernel.plan.direction == "forward"]


@cache
def kernels() -> dict[str, Kernel]:
    """Compile what the cache lacks, for the GPU that is here."""
    here = [for_this_gpu(kernel) for kernel in to_build()]
    assert len(here) == len(ASKED)
    return {kernel.plan.name: built for kernel, built in zip(here, compiled_kernels(here), strict=True)}


@pytest.fixture(autouse=True)
def _registered() -> None:
    registry.add(package_of_kernels(list(kernels().values()), "tests/gpu/test_paged"))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise where something waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def call(*tensors: Any, **options: Any) -> Any:
    return attngen.attention_paged(*tensors, package="attngen_gpu_paged", **options)


class Cache:
    """Empty pages in random order, a table of them, and lengths, for some sequences."""

    def __init__(
        self, batch: int, keys: int, page_size: int, *, kv_heads: int = 2, dim: int = 128, page_layout: str = "NHD"
    ) -> None:
        torch.manual_seed(page_size)
        each = -(-keys // page_size)
        shape = (batch * each + 5, page_size, kv_heads, dim)
        if page_layout == "HND":
            shape = (shape[0], kv_heads, page_size, dim)
        self.pages = [torch.full(shape, torch.nan, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
        self.table = torch.randperm(shape[0], device=DEVICE)[: batch * each].view(batch, each).int()
        self.lengths = torch.zeros(batch, device=DEVICE, dtype=torch.int32)
        self.page_layout = page_layout
        self.kv_heads, self.dim = kv_heads, dim

    def fill(self, *lengths: int) -> None:
        """Append random keys and values, so many to each sequence."""
        starts = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        new = [torch.randn(sum(lengths), self.kv_heads, self.dim, device=DEVICE).bfloat16() for _ in "kv"]
        attngen.append_kv(
            *new, *self.pages, self.lengths, page_table=self.table, cu_seqlens=starts, page_layout=self.page_layout
        )
        self.lengths += starts.diff()


@pytest.mark.parametrize("index", range(len(ASKED)), ids=[f"{one.variant.name}-d{one.head_dim_qk}" for one in ASKED])
def test_kernels_keep_their_contract(index: int) -> None:
    """Against float64: any page size, invalid entries after lengths, NaN after rows; nothing around results."""
    trial = try_pinned(list(kernels().values())[index], Gpu.current().device, 11, small=False)
    assert trial.problems == ()


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_calls_wait_for_nothing_and_are_right(page_layout: str, page_size: int, rows: int) -> None:
    c = Cache(3, 700, page_size, page_layout=page_layout)
    c.fill(700, 301, 350)
    q = torch.randn(3, rows, 8, 128, device=DEVICE).bfloat16()
    out = torch.empty_like(q)
    tensors = (q, *c.pages, c.table, c.lengths)
    call(*tensors, page_layout=page_layout)  # loads the kernel, and finds what it costs
    with without_waiting():
        result, lse = call(*tensors, page_layout=page_layout, out=out, return_lse=True)
    assert result is out
    wanted, wanted_lse = call(*tensors, page_layout=page_layout, return_lse=True, backend="reference")
    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-3)
    assert lse.stride() == wanted_lse.stride()


def test_contents_are_checked_under_debug() -> None:
    c = Cache(2, 64, 16)
    c.fill(64, 10)
    q = torch.randn(2, 1, 8, 128, device=DEVICE).bfloat16()
    c.table[1, 0] = c.pages[0].shape[0]
    with attngen.debug(), pytest.raises(CallError, match=r"page_table\[1, 0\] is"):
        call(q, *c.pages, c.table, c.lengths)


@pytest.mark.parametrize("variant", ["causal", "sliding_window"])
def test_a_graph_stays_right_while_lengths_grow(variant: str) -> None:
    """Captured once at length 1, replayed up to 8,192: each step appends a token, rotates, and attends."""
    batch, keys = 4, 8192
    c = Cache(batch, keys, 64)
    options = {"variant": variant, **({"window": 1000} if variant == "sliding_window" else {})}
    turns = torch.outer(torch.arange(keys, device=DEVICE), 1.0 / 10_000 ** (torch.arange(64, device=DEVICE) / 64))
    rotary = {"rotary_cos": turns.cos(), "rotary_sin": turns.sin()}
    q, rotated, out = (torch.randn(batch, 1, 8, 128, device=DEVICE).bfloat16() for _ in range(3))
    k, v = (torch.randn(batch, 1, 2, 128, device=DEVICE).bfloat16() for _ in "kv")

    def step() -> None:
        attngen.append_kv(k, v, *c.pages, c.lengths, page_table=c.table, q=q, q_out=rotated, **rotary)
        c.lengths.add_(1)
        call(rotated, *c.pages, c.table, c.lengths, out=out, **options)

    step()
    c.lengths.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for pages in c.pages:
        pages.fill_(torch.nan)
    c.lengths.zero_()
    for t in range(keys):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        if t < 3 or t & (t + 1) == 0 or t % 1000 == 0:
            assert c.lengths.tolist() == [t + 1] * batch
            wanted = call(rotated, *c.pages, c.table, c.lengths, backend="reference", **options)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


def test_a_compiled_step_is_right() -> None:
    c = Cache(4, 256, 16)
    c.fill(100, 1, 57, 200)
    k, v = (torch.randn(4, 1, 2, 128, device=DEVICE).bfloat16() for _ in "kv")
    q = torch.randn(4, 1, 8, 128, device=DEVICE).bfloat16()

    def step(q: Tensor, out: Tensor) -> Tensor:
        attngen.append_kv(k, v, *c.pages, c.lengths, page_table=c.table)
        result = call(q, *c.pages, c.table, c.lengths + 1, variant="causal", out=out)
        assert isinstance(result, Tensor)
        return result + 1

    compiled = torch.compile(step, fullgraph=True)
    outs = [torch.empty_like(q) for _ in range(2)]
    torch.testing.assert_close(compiled(q, outs[0]), step(q, outs[1]), rtol=0, atol=0)
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["pages", "slots", "dense"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_appending_is_what_it_is_on_the_cpu(where: str, interleaved: bool) -> None:
    """To the bit in the cache of values, and nothing waits; tokens without a place are left out."""
    torch.manual_seed(1)
    tokens = torch.tensor([0, 5, 5, 6, 20], dtype=torch.int32)
    k, q = torch.randn(22, 2, 64), torch.randn(22, 6, 64)
    used = torch.tensor([3, 0, 60, 9], dtype=torch.int32)
    turns = torch.outer(torch.arange(99.0), 1.0 / 10 ** (torch.arange(24) / 24))
    caches = [torch.zeros(40, 8, 2, 64) if where != "dense" else torch.zeros(4, 90, 2, 64) for _ in "kv"]
    place: dict[str, Tensor] = {
        "pages": {"page_table": torch.randperm(40).int().view(4, 10)},
        "slots": {"slots": torch.randperm(320)[:22] - 1},
        "dense": {},
    }[where]
    given = {"cu_seqlens": tokens, "q": q, "rotary_cos": turns.cos(), "rotary_sin": turns.sin(), **place}
    here = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    theirs = attngen.append_kv(k, k.flip(0), *caches, used, rotary_interleaved=interleaved, **given)
    ours_caches = [torch.zeros_like(cache_, device=DEVICE) for cache_ in caches]
    ours_k, ours_used = k.to(DEVICE), used.to(DEVICE)
    ours_v = ours_k.flip(0)
    with without_waiting():
        ours = attngen.append_kv(ours_k, ours_v, *ours_caches, ours_used, rotary_interleaved=interleaved, **here)
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.cpu()[:20], theirs[:20])
    torch.testing.assert_close(ours_caches[0].cpu(), caches[0])
    assert torch.equal(ours_caches[1].cpu(), caches[1])


def test_tokens_without_a_place_are_left_out() -> None:
    k = torch.ones(2, 2, 1, 64, device=DEVICE)
    dense = [torch.zeros(2, 4, 1, 64, device=DEVICE) for _ in "kv"]
    used = torch.tensor([1, 3], device=DEVICE, dtype=torch.int32)
    with without_waiting():
        attngen.append_kv(k, k, *dense, used)
    assert dense[0].sum(dim=(2, 3)).tolist() == [[0, 64, 64, 0], [0, 0, 0, 64]]


def test_merging_waits_for_nothing_and_has_gradients() -> None:
    torch.manual_seed(2)
    outs = [torch.randn(2, 9, 4, 64, device=DEVICE, requires_grad=True) for _ in range(5)]
    lses = [torch.randn(2, 4, 9, device=DEVICE) for _ in range(5)]
    for i, lse in enumerate(lses):
        lse[:, :, i] = -torch.inf
        lse[:, :, 8] = -torch.inf
        lse.requires_grad_()
    with without_waiting():
        out, lse = attngen.merge(outs, lses)
        gradients = torch.autograd.grad(
            (out, torch.where(lse == -torch.inf, 0.0, lse)),
            (*outs, *lses),
            (torch.ones_like(out), torch.ones_like(lse)),
        )
    there = [t.detach().cpu().double().requires_grad_() for t in (*outs, *lses)]
    wanted_out, wanted_lse = attngen.merge(there[:5], there[5:])
    wanted = torch.autograd.grad(
        (wanted_out, torch.where(wanted_lse == -torch.inf, 0.0, wanted_lse)), there,
        (torch.ones_like(wanted_out), torch.ones_like(wanted_lse)),
    )  # fmt: skip
    for ours, theirs in zip((out, lse, *gradients), (wanted_out, wanted_lse, *wanted), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_shared_prefix_is_computed_once() -> None:
    c = Cache(4, 128, 16)
    c.fill(100, 1, 57, 128)
    prefix = [torch.randn(1, 333, 2, 128, device=DEVICE).bfloat16() for _ in "kv"]
    q = torch.randn(4, 1, 8, 128, device=DEVICE).bfloat16()
    shared = Cache(1, 333, 16)
    attngen.append_kv(*prefix, *shared.pages, shared.lengths, page_table=shared.table)
    shared.lengths += 333
    out, lse = call(q.view(1, 4, 8, 128), *shared.pages, shared.table, shared.lengths, variant="full", return_lse=True)
    own = call(q, *c.pages, c.table, c.lengths, return_lse=True)
    merged, _ = attngen.merge([out.view_as(q), own[0]], [lse.transpose(0, 2), own[1]])
    joined = Cache(4, 333 + 128, 16)
    many = [t.expand(4, -1, -1, -1) for t in prefix]
    attngen.append_kv(*many, *joined.pages, joined.lengths, page_table=joined.table)
    joined.lengths += 333
    for b, length in enumerate(c.lengths.tolist()):
        rows = [pages[c.table[b].long()].flatten(0, 1)[:length] for pages in c.pages]
        attngen.append_kv(
            *(t[None] for t in rows), *joined.pages, joined.lengths[b : b + 1], page_table=joined.table[b : b + 1]
        )
    whole = call(q, *joined.pages, joined.table, joined.lengths + c.lengths, backend="reference")
    torch.testing.assert_close(merged, whole, rtol=2e-2, atol=2e-2)
