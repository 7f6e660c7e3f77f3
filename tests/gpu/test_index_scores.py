"""Index scores and the selection of the largest: every launch against float64, odd sizes, pages, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.index_scores.kernel import SCORES, PreparedScores
from attngen.runtime.operations.topk.kernel import SELECTION, PreparedTopk, Topk, check, select
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from tests.gpu.family import compiled_kernels

SPEC = """
schema: 1
package: index
arch: [sm90a]
variants:
  ranges:
    tensors: {first: {dtype: int32, shape: [seqlen_q]}, last: {dtype: int32, shape: [seqlen_q]}}
    mask: kv >= first[q] and kv < last[q]
  strided:
    scalars: {stride: {type: int32, min: 1}}
    mask: kv % stride == 0 and kv <= q_pos
kernels:
  - {variant: [causal, full, ranges, strided], head_dim: 128, dtype: fp8_e4m3, passes: index_scores}
  - {variant: sliding_window, head_dim: [64, 128], dtype: [bf16, fp16], passes: index_scores}
  - {variant: causal, head_dim: [64, 128], dtype: [fp8_e4m3, bf16], layout: paged, passes: index_scores}
"""

#: Largest difference from float64, in units of the sum of |w| |q| · |k|. Tensor cores sum products of 8 bits in fewer
#: bits than float32 has.
_ALLOWED = {torch.float8_e4m3fn: 5e-4, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def to_build() -> list[Prepared]:
    return prepare(load_spec_text(SPEC))


@cache
def kernels() -> list[Kernel]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    return compiled_kernels(to_build())


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_index_scores"))
    yield
    registry.clear()


def operands(
    dtype: torch.dtype, batch: int, queries: int, keys: int, heads: int, head_dim: int = 128
) -> dict[str, Tensor]:
    """Return dense operands."""
    return {
        "q": torch.randn(batch, queries, heads, head_dim, device="cuda").to(dtype),
        "k": torch.randn(batch, keys, head_dim, device="cuda").to(dtype),
        "weights": torch.randn(batch, queries, heads, device="cuda"),
        "k_scale": torch.rand(batch, keys, device="cuda") + 0.5,
    }


def by_kernel(helper: Any, kind: type) -> bool:
    """Whether the last calls ran kernels."""
    return all(isinstance(each, kind) for each in helper.prepared.values())


def check_scores(given: dict[str, Any], dtype: torch.dtype, **more: Any) -> Tensor:
    """Compare scores with float64, over poisoned memory."""
    torch.full((2**22,), 3.0, device="cuda")
    SCORES.prepared.clear()
    scores = attngen.index_scores(**given, **more)
    assert by_kernel(SCORES, PreparedScores)
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    wanted = attngen.index_scores(**{name: value.cpu() for name, value in doubled.items()}, **_on_cpu(more))
    largest = attngen.index_scores(
        **{name: (value.abs() if name in ("q", "k", "weights") else value).cpu() for name, value in doubled.items()},
        **_on_cpu(more),
    )
    wanted, largest = wanted.cuda(), largest.cuda()
    hidden = wanted == -torch.inf
    assert torch.equal(scores == -torch.inf, hidden)
    error = ((scores.double() - wanted).abs() / (largest + 1e-6))[~hidden]
    assert not error.numel() or float(error.max()) < _ALLOWED[dtype], float(error.max())
    return scores


def _on_cpu(more: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in more.items()}


@pytest.mark.parametrize("heads", [1, 32, 33, 64, 128])
@pytest.mark.parametrize("queries", [1, 3, 37])
def test_every_launch_agrees_with_float64(queries: int, heads: int) -> None:
    for keys in (max(queries, 5), 517, 2048):
        check_scores(operands(torch.float8_e4m3fn, 2, queries, keys, heads), torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_16_bits_and_windows(dtype: torch.dtype, head_dim: int) -> None:
    for queries in (2, 70):
        given = operands(dtype, 2, queries, 700, 64, head_dim)
        check_scores(given, dtype, variant="sliding_window", window=130)


def test_masks_of_tensors_and_scalars() -> None:
    given = operands(torch.float8_e4m3fn, 2, 50, 1001, 64)
    first = torch.randint(0, 1001, (50,), dtype=torch.int32, device="cuda")
    last = (first + torch.randint(0, 300, (50,), device="cuda")).clamp(max=1001).int()
    check_scores(given, torch.float8_e4m3fn, variant="ranges", first=first, last=last)
    for stride in (1, 3, 64):
        check_scores(given, torch.float8_e4m3fn, variant="strided", stride=stride)
    check_scores({**given, "k_scale": given["k_scale"]}, torch.float8_e4m3fn, variant="full")


def test_used_lengths_and_strides() -> None:
    given = operands(torch.float8_e4m3fn, 3, 9, 640, 64)
    used = torch.tensor([640, 0, 301], dtype=torch.int32, device="cuda")
    bits = given["k"].view(torch.uint8)
    bits[2, 301:] = 0x7F  # NaN
    check_scores(given, torch.float8_e4m3fn, seqused_k=used)
    wide = operands(torch.float8_e4m3fn, 2, 20, 1280, 64)
    given = {"q": wide["q"][:, ::2], "k": wide["k"][:, ::2], "weights": wide["weights"][:, ::2]}
    check_scores({**given, "k_scale": wide["k_scale"][:, ::2]}, torch.float8_e4m3fn)


@pytest.mark.parametrize("page_size", [1, 16, 64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_keys_in_pages(dtype: torch.dtype, page_size: int) -> None:
    batch, keys = 3, 768
    listed = keys // page_size
    for queries, head_dim in ((1, 128), (2, 64 if page_size > 1 else 128), (40, 128)):
        given: dict[str, Any] = operands(dtype, batch, queries, keys, 64, head_dim)
        pages = torch.randn(batch * listed + 3, page_size, head_dim, device="cuda").to(dtype)
        table = torch.randperm(batch * listed, device="cuda").int().view(batch, listed)
        used = torch.tensor([keys, 333, 40], dtype=torch.int32, device="cuda")
        for b, length in enumerate(used.tolist()):
            table[b, -(-length // page_size) :] = 2**30  # never read
        scale = torch.rand(pages.shape[:2], device="cuda") + 0.5
        check_scores({**given, "k": pages, "k_scale": scale}, dtype, page_table=table, seqused_k=used)


def test_scales_behind_the_keys_of_a_page() -> None:
    cache = torch.zeros(20, 64 * 132, dtype=torch.uint8, device="cuda")
    k = cache[:, : 64 * 128].view(torch.float8_e4m3fn).view(20, 64, 128)
    scale = cache.view(torch.float32)[:, 64 * 32 :]
    k.copy_(torch.randn(20, 64, 128, device="cuda").to(torch.float8_e4m3fn))
    scale.copy_(torch.rand(20, 64, device="cuda"))
    given = operands(torch.float8_e4m3fn, 2, 2, 64, 64)
    table = torch.randperm(20, device="cuda").int().view(2, 10)
    used = torch.tensor([600, 77], dtype=torch.int32, device="cuda")
    check_scores({**given, "k": k, "k_scale": scale}, torch.float8_e4m3fn, page_table=table, seqused_k=used)


#: Queries and keys of packed sequences: prompts, parts of them, decoding and drafts, sequences without queries and
#: without keys; many that decode; and a long prompt beside others.
PACKED = {
    "mixed": ([70, 0, 9, 1, 3, 0, 1, 300], [70, 100, 200, 333, 130, 0, 0, 1500]),
    "decoding": ([b % 3 for b in range(300)], [(37 * b) % 900 for b in range(300)]),
    "prompt": ([1, 600, 1], [1500, 600, 1]),
}


def packed(name: str, dtype: torch.dtype, page_size: int, heads: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands of packed queries over pages, and the other arguments. Rows of pages that no sequence has are NaN."""
    counts, lengths = PACKED[name]
    lengths = [max(count, length) if length else 0 for count, length in zip(counts, lengths, strict=True)]
    listed = [-(-length // page_size) for length in lengths]
    keys = torch.randn(sum(listed) + 2, page_size, 128, device="cuda")
    table = torch.full((len(counts), max(listed) + 2), 2**30, dtype=torch.int32, device="cuda")
    free = torch.randperm(sum(listed), device="cuda").int() + 1
    for b, (length, number, own) in enumerate(zip(lengths, listed, free.split(listed), strict=True)):
        table[b, :number] = own
        if length % page_size:
            keys[own[-1].item(), length % page_size :] = torch.nan
    keys[0] = keys[-1] = torch.nan
    operands = {
        "q": torch.randn(sum(counts), heads, 128, device="cuda").to(dtype), "k": keys.to(dtype),
        "weights": torch.randn(sum(counts), heads, device="cuda"),
        "k_scale": torch.rand(keys.shape[:2], device="cuda") + 0.5,
    }  # fmt: skip
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    more = {"page_table": table, "seqused_k": used, "cu_seqlens_q": starts, "max_seqlen_q": max(counts)}
    return operands, more


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("dtype", "page_size", "heads"),
    [(torch.float8_e4m3fn, 64, 64), (torch.float8_e4m3fn, 16, 32), (torch.bfloat16, 64, 64), (torch.bfloat16, 1, 100)],
    ids=str,
)
def test_packed_queries_over_pages(name: str, dtype: torch.dtype, page_size: int, heads: int) -> None:
    given, more = packed(name, dtype, page_size, heads)
    scores = check_scores(given, dtype, **more)
    # In a tensor of the caller's, what lies behind the keys of a sequence is -inf or as it was.
    out = torch.full((len(scores), scores.shape[1] + 5), 3.0, device="cuda")[:, :-5]
    SCORES.prepared.clear()
    assert attngen.index_scores(**given, **more, out=out) is out
    assert by_kernel(SCORES, PreparedScores)
    requests = torch.repeat_interleave(more["seqused_k"], more["cu_seqlens_q"].diff())
    own = torch.arange(out.shape[1], device="cuda") < requests[:, None]
    assert torch.equal(out[own], scores[own])
    assert ((out[~own] == -torch.inf) | (out[~own] == 3.0)).all()
    tiles = -(-requests // 64) * 64
    assert (out[torch.arange(out.shape[1], device="cuda") >= tiles[:, None]] == 3.0).all()


def test_a_graph_serves_other_sequences() -> None:
    """Captured for sequences without keys; replayed for others, with tables, lengths and starts in place."""
    given, more = packed("mixed", torch.float8_e4m3fn, 64, 64)
    tensors = {name: value for name, value in more.items() if isinstance(value, Tensor)}
    empty = {name: torch.zeros_like(value) for name, value in tensors.items()}
    lengths = torch.cat([
        torch.arange(int(used) - int(count), int(used), device="cuda") + 1
        for used, count in zip(more["seqused_k"], more["cu_seqlens_q"].diff(), strict=True)
    ]).clamp(min=0).int()  # fmt: skip
    none = torch.zeros_like(lengths)

    def select_keys() -> Tensor:
        scores = torch.empty(len(given["q"]), 64 * more["page_table"].shape[1], device="cuda")
        attngen.index_scores(**given, **{**more, **empty}, out=scores)
        table, starts = empty["page_table"], empty["cu_seqlens_q"]
        return attngen.topk(scores, 40, lengths=none, page_table=table, page_size=64, cu_seqlens_q=starts)

    for _ in range(2):
        assert (select_keys() == -1).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select_keys()
    for name, value in tensors.items():
        empty[name].copy_(value)
    none.copy_(lengths)
    graph.replay()
    scores = attngen.index_scores(**given, **more)
    indices = attngen.topk(scores, 40)
    b = torch.repeat_interleave(torch.arange(len(more["seqused_k"]), device="cuda"), more["cu_seqlens_q"].diff())
    slots = more["page_table"][b[:, None], indices.clamp(min=0).long() // 64] * 64 + indices % 64
    assert torch.equal(out, slots.where(indices >= 0, -1).int())


def test_slots_in_rows_that_lie_apart() -> None:
    scores, wide = torch.randn(64, 3, 20001, device="cuda"), torch.full((64, 3, 3000), 7, device="cuda").int()
    lengths = torch.randint(0, 20002, (64, 3), device="cuda", dtype=torch.int32)
    table = torch.randint(0, 2**20, (64, 700), device="cuda", dtype=torch.int32)
    for k in (1, 512, 2048):
        out = wide[..., :k]
        SELECTION.prepared.clear()
        assert attngen.topk(scores, k, lengths=lengths, page_table=table, page_size=32, out=out) is out
        assert by_kernel(SELECTION, PreparedTopk)
        call = Topk(scores.cpu(), k, lengths.cpu(), table.cpu(), None, 32)
        assert torch.equal(out.cpu(), select(call, check(call)))
    assert (wide[..., 2048:] == 7).all()


def chosen(scores: Tensor, k: int, lengths: Tensor | None = None) -> Tensor:
    """Select with a kernel, and compare with a stable sort on the CPU."""
    SELECTION.prepared.clear()
    out = attngen.topk(scores, k, lengths=lengths)
    assert by_kernel(SELECTION, PreparedTopk)
    call = Topk(scores.cpu(), k, None if lengths is None else lengths.cpu())
    assert torch.equal(out.cpu(), select(call, check(call)))
    return out


@pytest.mark.parametrize("columns", [1, 7, 2048, 8192, 20001, 65536, 300000])
def test_selections_of_every_length(columns: int) -> None:
    for k in (1, 5, 2048, 3073, 5000):
        scores = torch.randn(3, 2, columns, device="cuda")
        lengths = torch.randint(-1, columns + 2, (3, 2), device="cuda", dtype=torch.int32)
        chosen(scores, k)
        chosen(scores, k, lengths)
        chosen(torch.randn(4, columns + 3, device="cuda")[:, 1 : columns + 1], k)  # rows at any multiple of 4 bytes


@pytest.mark.parametrize("k", [2048, 9000])
def test_ties_and_special_values(k: int) -> None:
    shape = 6, 50000
    normal = torch.randn(shape, device="cuda")
    chosen(normal.clamp(min=1.8), k)
    chosen(torch.randint(-3, 4, shape, device="cuda").float(), k)
    chosen(torch.ones(shape, device="cuda"), k)
    chosen(normal.sort(1).values, k)
    chosen(normal.sort(1, descending=True).values, k)
    chosen(torch.where(normal > 0, 0.0, -0.0), k)
    chosen(normal * 1e-41, k)
    chosen(torch.where(normal > -1.9, -torch.inf, normal), k)
    chosen(torch.full(shape, -torch.inf, device="cuda"), k)
    chosen(torch.where(normal > 1.5, torch.nan, normal), k)
    chosen(torch.where(normal > 2.5, torch.inf, normal), k)


def test_graphs_and_compiled_programs() -> None:
    given = operands(torch.float8_e4m3fn, 1, 64, 4096, 64)

    def select_keys(q: Tensor) -> Tensor:
        return attngen.topk(attngen.index_scores(**{**given, "q": q}), 512)

    wanted = select_keys(given["q"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select_keys(given["q"])
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    compiled = torch.compile(select_keys, fullgraph=True)
    assert torch.equal(compiled(given["q"]), wanted)


def test_calls_that_no_kernel_takes_run_in_torch() -> None:
    given = operands(torch.float8_e4m3fn, 1, 5, 100, 130)
    SCORES.prepared.clear()
    scores = attngen.index_scores(**given)
    assert not by_kernel(SCORES, PreparedScores)
    assert torch.isfinite(scores[0, -1]).all()
    SELECTION.prepared.clear()
    attngen.topk(torch.randn(2, 30000, device="cuda"), 25000)
    assert not by_kernel(SELECTION, PreparedTopk)
