"""Scores of blocks of keys: the kernels, run on the host through the runtime that launches them, beside plain torch,
and that beside another formula."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.index_scores import arguments as index_scores
from attngen.runtime.operations.index_scores.arguments import IndexScores
from attngen.runtime.operations.index_scores.kernel import SCORES
from tests.runtime.host_kernels import SPEC_OF_BLOCK_SCORES, HostDriver, kernels_for_indices, on_host
from tests.sampling import few


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's."""
    with on_host(
        monkeypatch, kernels_for_indices(SPEC_OF_BLOCK_SCORES), SCORES.prepared, unchecked=index_scores
    ) as driver:
        yield driver


def operands(
    queries: int, keys: int, heads: int, *, batch: int = 2, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    q, k = torch.randn(batch, queries, heads, head_dim), torch.randn(batch, keys, head_dim)
    return {"q": q.to(dtype), "k": k.to(dtype)}


def both(host: HostDriver, launch: str, **given: Any) -> Tensor:
    """Score by a launch of a kernel and in torch; what both gave."""
    launches = len(host.launches)
    scores = attngen.block_scores(**given)
    assert [name.split("_heads_")[1] for name, _ in host.launches[launches:]] == [launch]
    arguments = tuple((name, value) for name, value in given.items() if name not in IndexScores._fields)
    fields = {**dict.fromkeys(IndexScores._fields), "variant": "causal", **given, "arguments": arguments, "out": None}
    call = IndexScores(**{name: fields[name] for name in IndexScores._fields})
    wanted = index_scores.score(call, index_scores.check(call))
    if given.get("out") is not None:  # blocks behind the keys of a sequence may hold anything
        assert scores is given["out"]
        scores = scores.where(wanted > -torch.inf, -torch.inf)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-3)
    return wanted


@few(
    ("launch", "queries", "heads", "block"),
    [
        ("4", 90, 4, 128), ("4_few", 3, 3, 128), ("2", 240, 1, 64), ("2_few", 1, 2, 192), ("8", 60, 5, 128),
        ("8_few", 2, 8, 64),
    ],
    always=(1,),
)  # fmt: skip
def test_every_launch(host: HostDriver, launch: str, queries: int, heads: int, block: int) -> None:
    both(host, launch, **operands(queries, 700, heads, batch=1), block=block)


@pytest.mark.exhaustive
def test_narrow_rows_and_used_lengths(host: HostDriver) -> None:
    given = operands(3, 330, 4, head_dim=64, batch=3)
    given["k"][1, 70:] = torch.nan
    both(host, "4_few", **given, block=128, seqused_k=torch.tensor([330, 70, 0], dtype=torch.int32))


@pytest.mark.exhaustive
@few("window", [1, 70, 300])
def test_windows_that_end_within_blocks(host: HostDriver, window: int) -> None:
    given = operands(3, 1000, 4, dtype=torch.float16)
    both(host, "4_few", **given, block=128, variant="sliding_window", window=window)


def packed(
    starts: list[int], used: list[int], heads: int = 4, *, page_size: int = 16, listed: int = 40
) -> dict[str, Any]:
    """Packed queries over pages, of which no entry behind a sequence may be read."""
    total, batch = starts[-1], len(used)
    table = torch.randperm(batch * listed).int().view(batch, listed)
    for b, length in enumerate(used):
        table[b, -(-length // page_size) :] = 2**30
    return {
        "q": torch.randn(total, heads, 64).bfloat16(), "k": torch.randn(batch * listed + 1, page_size, 64).bfloat16(),
        "page_table": table, "seqused_k": torch.tensor(used, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "max_seqlen_q": max(end - start for start, end in pairwise(starts)),
    }  # fmt: skip


@few(
    ("launch", "starts", "heads"),
    [("4_few", [0, 3, 3, 4, 6], 4), ("4", [0, 400, 400, 401, 1000], 3), ("2_few", [0, 1, 2, 2, 3], 1)], always=0,
)  # fmt: skip
def test_packed_queries_over_pages(host: HostDriver, launch: str, starts: list[int], heads: int) -> None:
    both(host, launch, **packed(starts, [600, 70, 3, 500], heads), block=128)


def test_scores_of_the_callers(host: HostDriver) -> None:
    """Blocks behind the keys of a sequence, and rows of no sequence, stay as they are."""
    given = packed([0, 9, 9, 10], [270, 100, 3])
    given["q"] = torch.cat([given["q"], torch.zeros(2, 4, 64).bfloat16()])
    out = torch.full((12, 4, 7), torch.nan)[..., :5]
    both(host, "4_few", **given, block=128, out=out)
    assert out[:9, :, 3:].isnan().all()
    assert out[9, :, 1:].isnan().all()
    assert out[10:].isnan().all()


def test_another_formula_and_what_attention_takes() -> None:
    """All products at once, in float64; the blocks that topk selects of them, behind which -1 follow."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 50, 3, 16, dtype=torch.float64), torch.randn(2, 70, 16, dtype=torch.float64)
    scores = attngen.block_scores(q, k, 8)
    products = torch.einsum("bqhd,bkd->bqhk", q, k).masked_fill(
        ~torch.ones(50, 70).bool().tril(20)[:, None], -torch.inf
    )
    products = torch.nn.functional.pad(products, (0, 2), value=-torch.inf).view(2, 50, 3, 9, 8)
    torch.testing.assert_close(scores, products.amax(-1))
    earlier = torch.arange(20, 70) // 8
    lists = attngen.topk(scores.float(), 4, lengths=earlier.int()[:, None].expand(2, 50, 3).contiguous())
    ranks = (scores[..., None, :] > scores[..., None]) & (torch.arange(9) < earlier[:, None])[:, None, None]
    chosen = (ranks.sum(-1) < 4) & (torch.arange(9) < earlier[:, None])[:, None]
    of_lists = torch.zeros(2, 50, 3, 10).bool().scatter(-1, lists.long().where(lists >= 0, 9), True)[..., :9]
    assert torch.equal(of_lists, chosen)


def test_refused_calls() -> None:
    given = operands(3, 20, 2)
    for block in (0, None, True, 2.5):
        with pytest.raises(CallError, match="block must be a positive integer"):
            attngen.block_scores(**given, block=block)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="block_scores, which takes a mask alone"):
        attngen.block_scores(**given, block=8, variant=attngen.variant(score="s * 2", name="doubled"))
    with pytest.raises(CallError, match=r"out must be torch.float32 of shape \(2, 3, 2, 3\)"):
        attngen.block_scores(**given, block=8, out=torch.zeros(2, 3, 2, 4))
    with pytest.raises(CallError, match="not differentiable"):
        attngen.block_scores(given["q"].requires_grad_(), given["k"], 8)
