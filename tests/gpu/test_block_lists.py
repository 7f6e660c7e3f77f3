"""Blocks of keys that an index chooses, scored, selected and attended to over pages, against float64; and a captured
graph that serves longer requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attngen
from attngen import resources
from attngen.build.pipeline import Prepared, prepare
from attngen.integrations.engines import block_lists
from attngen.integrations.engines.block_lists import Lists
from attngen.integrations.engines.indexer import Requests
from attngen.integrations.shared.catalogue import variant
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.index_scores.kernel import SCORES, PreparedScores
from attngen.runtime.operations.topk.kernel import SELECTION, PreparedTopk, Topk, check, select
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels

MSA, QSA = Lists(128, 15, 1, per_head=True), Lists(4, 512, 1, per_head=False)

#: Queries and keys of sequences: prompts, parts of them, decoding and drafts, one without queries and one without keys.
PACKED = [300, 0, 9, 1, 3, 1, 700], [300, 100, 2600, 3333, 130, 0, 5000]

#: Largest difference of scores from float64, in units of |q| · |k|.
_ALLOWED = {torch.float8_e4m3fn: 5e-4, torch.bfloat16: 2e-6}


def to_build() -> list[Prepared]:
    return prepare(load_spec(resources.specs_dir() / "integrations/sparse_gqa.yaml"))


@cache
def kernels() -> list[Kernel]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    return compiled_kernels(to_build())


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_block_lists"))
    yield
    registry.clear()


class Batch(NamedTuple):
    """Packed tokens, their requests by the pages of the cache, and the request and keys of each token."""

    requests: Requests
    request: Tensor
    lengths: Tensor
    pages: int

    @property
    def counts(self) -> Tensor:
        """Tokens of each request."""
        assert self.requests.starts is not None
        return self.requests.starts.diff()


def batch(counts: list[int], used: list[int], page_size: int) -> Batch:
    listed = [-(-keys // page_size) for keys in used]
    table = torch.full((len(used), max(listed) + 2), 2**30, dtype=torch.int32, device="cuda")
    free = torch.randperm(sum(listed), device="cuda").int() + 1
    for b, (number, own) in enumerate(zip(listed, free.split(listed), strict=True)):
        table[b, :number] = own
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    lengths = [
        keys - count + i + 1 if keys else 0 for count, keys in zip(counts, used, strict=True) for i in range(count)
    ]
    request = torch.repeat_interleave(torch.arange(len(used)), torch.tensor(counts)).cuda()
    requests = Requests(table, torch.tensor(used, dtype=torch.int32, device="cuda"), max(used), starts)
    return Batch(requests, request, torch.tensor(lengths, dtype=torch.int32, device="cuda"), sum(listed) + 2)


def checked_scores(given: dict[str, Any], dtype: torch.dtype, **more: Any) -> Tensor:
    """Scores of blocks by a kernel, which are those in float64."""
    SCORES.prepared.clear()
    scores = attngen.block_scores(**given, **more)
    assert [type(each) for each in SCORES.prepared.values()] == [PreparedScores]
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in more.items()}
    q, k = given["q"].double().cpu(), given["k"].double().cpu().nan_to_num()
    wanted = attngen.block_scores(q, k, given["block"], **on_cpu).cuda()
    largest = attngen.block_scores(q.abs(), k.abs(), given["block"], **on_cpu).cuda()
    hidden = wanted == -torch.inf
    assert torch.equal(scores == -torch.inf, hidden)
    error = ((scores.double() - wanted).abs() / (largest + 1e-6))[~hidden]
    assert not error.numel() or float(error.max()) < _ALLOWED[dtype], float(error.max())
    return scores


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_scores_of_packed_queries(dtype: torch.dtype, heads: int) -> None:
    for page_size, block in ((128, 128), (16, 64)):
        made = batch(*PACKED, page_size)
        q, k = torch.randn(len(made.request), heads, 128), torch.randn(made.pages, page_size, 128)
        k[0] = k[-1] = torch.nan
        given = {"q": q.cuda().to(dtype), "k": k.cuda().to(dtype), "block": block}
        requests = made.requests
        more = {"page_table": requests.page_table, "seqused_k": requests.lengths, "cu_seqlens_q": requests.starts}
        checked_scores(given, dtype, **more, max_seqlen_q=max(PACKED[0]))


def test_scores_without_pages() -> None:
    for queries, keys, heads in ((1, 3000, 4), (500, 700, 2), (5, 5, 8), (130, 4097, 4)):
        q = torch.randn(2, queries, heads, 128, device="cuda").bfloat16()
        k = torch.randn(2, keys, 128, device="cuda").bfloat16()
        used = torch.tensor([keys, keys // 2], dtype=torch.int32, device="cuda")
        more = {"variant": variant("up_to_own"), "seqused_k": used, "context": used - queries}
        checked_scores({"q": q, "k": k, "block": 128}, torch.bfloat16, **more)


@pytest.mark.parametrize("columns", [1, 100, 256, 257, 1024, 2048])
def test_selections_of_short_rows(columns: int) -> None:
    rows = torch.randn(1001, columns, device="cuda")
    lengths = torch.randint(-1, columns + 2, (1001,), device="cuda", dtype=torch.int32)
    for scores in (
        rows,
        (2 * rows).round(),
        rows.masked_fill(rows < 1, -torch.inf),
        torch.where(rows > 1, torch.nan, rows),
    ):
        for k in (1, 15, 300):
            SELECTION.prepared.clear()
            chosen = attngen.topk(scores, k, lengths=lengths)
            assert [type(each) for each in SELECTION.prepared.values()] == [PreparedTopk]
            call = Topk(scores.cpu(), k, lengths.cpu())
            assert torch.equal(chosen.cpu(), select(call, check(call)))


def reference(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, made: Batch, block: int, page_size: int) -> Tensor:
    """Attention of each token over the keys of its blocks, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k.shape[2]
    for t, (b, length) in enumerate(zip(made.request.tolist(), made.lengths.tolist(), strict=True)):
        at = torch.arange(length, device=q.device)
        slots = made.requests.page_table[b, at // page_size] * page_size + at % page_size
        for hk in range(k.shape[2]):
            own = chosen[t, hk] if chosen.dim() == 3 else chosen[t]
            keys = slots[torch.isin(at // block, own)]
            if not len(keys):
                continue
            rows = q[t, hk * group : (hk + 1) * group].double()
            s = rows @ k.flatten(0, 1)[keys, hk].double().T * q.shape[-1] ** -0.5
            out[t, hk * group : (hk + 1) * group] = s.softmax(-1) @ v.flatten(0, 1)[keys, hk].double()
    return out


def test_msa_selects_and_attends() -> None:
    made, lists = batch([40, 0, 9, 1, 3, 1, 70], [40, 100, 2600, 3333, 130, 0, 5000], 128), MSA
    tokens = len(made.request)
    q_index = torch.randn(tokens, 4, 128, device="cuda").bfloat16()
    index = torch.randn(made.pages, 128, 128, device="cuda").bfloat16()
    q = torch.randn(tokens, 64, 128, device="cuda").bfloat16()
    cache = torch.randn(made.pages, 4, 128, 256, device="cuda").bfloat16()
    k, v = cache.transpose(1, 2).split(128, dim=-1)
    chosen = block_lists.start_lists(lists, made.lengths, 4)
    blocks = block_lists.choosable(lists, made.lengths, 4)
    block_lists.choose_head_blocks(q_index, index, lists, made.requests, blocks, chosen)
    for t in range(0, tokens, 7):
        b, length = int(made.request[t]), int(made.lengths[t])
        at = torch.arange(length, device="cuda")
        keys = index.flatten(0, 1)[made.requests.page_table[b, at // 128] * 128 + at % 128].double()
        scores = torch.nn.functional.pad(q_index[t].double() @ keys.T, (0, -length % 128), value=-torch.inf)
        best = scores.view(4, -1, 128).amax(-1) if length else scores.new_zeros(4, 0)
        if length:
            best[:, -1] = torch.inf
        wanted = best.topk(min(16, best.shape[-1])).indices.sort().values
        for head in range(4):
            own = chosen[t, head]
            assert torch.equal(own[own >= 0].sort().values.long(), wanted[head])
    out = torch.empty_like(q)
    pages = block_lists.tokens_of(lists, made.requests.page_table, made.request, made.lengths, 4)
    block_lists.attend_to_blocks(q[:, None], k, v, chosen[:, None], lists, pages, 128**-0.5, out[:, None])
    torch.testing.assert_close(out.double(), reference(q, k, v, chosen, made, 128, 128), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("heads", [(24, 2), (12, 1)])
def test_qsa_selects_and_attends(heads: tuple[int, int]) -> None:
    made, lists = batch([40, 0, 9, 1, 3, 1, 40], [40, 100, 2600, 3333, 130, 0, 5000], 64), QSA
    tokens, (h, hk) = len(made.request), heads
    of_blocks = batch(made.counts.tolist(), (made.requests.lengths // 4).tolist(), 16).requests
    pages = int((-(-of_blocks.lengths // 16)).sum()) + 2
    q_index = torch.randn(tokens, 16, 128, device="cuda").bfloat16()
    index = torch.randn(pages, 16, 128, device="cuda").bfloat16()
    q = torch.randn(tokens, h, 256, device="cuda").bfloat16()
    k, v = torch.randn(2, made.pages, 64, hk, 256, device="cuda").bfloat16()
    chosen = block_lists.start_lists(lists, made.lengths, 1)
    blocks = block_lists.choosable(lists, made.lengths, 1)
    context = made.requests.lengths - made.counts.where(made.requests.lengths > 0, 0)
    block_lists.choose_blocks(q_index, index, 128**-0.5, lists, of_blocks, context, blocks, chosen)
    for t in range(0, tokens, 5):
        b, length = int(made.request[t]), int(made.lengths[t])
        at = torch.arange(length // 4, device="cuda")
        keys = index.flatten(0, 1)[of_blocks.page_table[b, at // 16] * 16 + at % 16].double()
        best = (q_index[t].double() @ keys.T).relu().sum(0)
        own = chosen[t, 1:]
        own = own[own >= 0].long()
        assert len(own) == min(512, len(best))
        left_out = best.clone()
        left_out[own] = -torch.inf
        if len(own) and len(own) < len(best):
            assert best[own].min() > left_out.max() - 1e-3
        assert int(chosen[t, 0]) == length // 4
    out = torch.empty_like(q)
    rows = block_lists.tokens_of(lists, made.requests.page_table, made.request, made.lengths, 1)
    block_lists.attend_to_blocks(q[:, None], k, v, chosen[:, None], lists, rows, 256**-0.5, out[:, None])
    torch.testing.assert_close(out.double(), reference(q, k, v, chosen, made, 4, 64), rtol=0.02, atol=0.02)


def test_a_graph_serves_longer_requests() -> None:
    made = batch([1] * 64, [3000 + 17 * b for b in range(64)], 128)
    q = torch.randn(64, 1, 4, 128, device="cuda").bfloat16()
    index = torch.randn(made.pages, 128, 128, device="cuda").bfloat16()
    lengths = torch.zeros_like(made.lengths)
    requests = made.requests._replace(lengths=lengths, starts=None)

    def chosen() -> Tensor:
        lists = block_lists.start_lists(MSA, lengths, 4)
        block_lists.choose_head_blocks(q, index, MSA, requests, block_lists.choosable(MSA, lengths, 4), lists)
        return lists

    for _ in range(2):
        assert (chosen() == -1).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chosen()
    lengths.copy_(made.lengths)
    graph.replay()
    assert torch.equal(out, chosen())
    assert (out[..., 0] == (lengths[:, None] - 1) // 128).all()
    assert (out >= 0).all()
