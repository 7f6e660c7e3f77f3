"""The largest logit of each row, from kernels of each family that run on the host, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.operations.attention import largest
from tests.plan.specs import planned
from tests.render.checked_barriers import COMPILER, compiled, device
from tests.render.test_barriers import LATENT, masked
from tests.sampling import few

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SUNK = (
    'variants:\n  sunk: {mask: "kv < q", sink: "sinks[h]", tensors: {sinks: {dtype: float32, shape: [h]}}}\n'
    '  listed: {keys: counted_index, sink: "sinks[h]", sink_in_lse: false, '
    "tensors: {sinks: {dtype: float32, shape: [h]}}}\n"
)
#: Sinks above all logits, and below.
SINKS = torch.tensor([40.0, -40.0, 1.0, 0.0, 9.0, -9.0, 2.0, 3.0])


@dataclass(frozen=True, eq=False)
class Row:
    """A kernel and a call: queries, keys, query and KV heads, sequences, and blocks that run at once."""

    name: str
    fields: dict[str, Any]
    sizes: tuple[int, int, int, int, int]
    variant: str = "causal"
    arguments: dict[str, Any] = field(default_factory=dict)
    blocks: int = 1
    often: bool = False


ROWS = (
    Row("forward", {}, (300, 270, 4, 1, 1), often=True),
    Row("forward-sink", {"declared": SUNK}, (70, 200, 4, 2, 2), "sunk", {"sinks": SINKS[:4]}, often=True),
    Row("forward-exact", {"declared": SUNK, "softmax": "exact_max"}, (70, 200, 4, 2, 1), "sunk", {"sinks": SINKS[:4]}),
    Row("forward-score", {}, (130, 130, 2, 1, 1), "softcap", {"cap": 2.0}),
    Row("forward-alibi", {}, (130, 130, 2, 1, 1), "alibi", {"slope": torch.tensor([0.5, 0.1])}),
    Row("forward-packed", {"pack_gqa": "true", "layout": "varlen"}, (70, 80, 4, 1, 3)),
    Row("forward-paged", {"layout": "paged", "head_dim": 128}, (100, 130, 4, 2, 2)),
    Row(
        "forward-cut", {"head_dim": 128, **masked("kv <= q and (q - kv < 32 or kv < 32) or q < 32")},
        (490, 490, 1, 1, 1), "masked", blocks=5,
    ),
    Row("forward-split", {"split_kv": "tiles", "declared": SUNK}, (100, 600, 2, 1, 1), "sunk", {"sinks": SINKS[:2]}, 3),
    Row("mma", {"arch": "sm80", "declared": SUNK}, (70, 300, 4, 2, 1), "sunk", {"sinks": SINKS[:4]}, often=True),
    Row("mma-pairs", {"arch": "sm80", "head_dim": 256}, (40, 90, 2, 1, 1)),
    Row(
        "decode", {"split_kv": "true", "layout": "paged", "head_dim": 128, "declared": SUNK}, (2, 1500, 4, 1, 1),
        "sunk", {"sinks": SINKS[:4]},
    ),
    Row("mma-decode", {"arch": "sm80", "split_kv": "true", "head_dim": 64}, (1, 900, 4, 1, 2)),
    Row("wide", {"head_dim": 320}, (100, 200, 2, 1, 1), blocks=4),
    Row("latent-few", {"layout": "paged", **LATENT}, (1, 300, 8, 1, 1), blocks=2),
    Row("latent", {"layout": "paged", **LATENT}, (1, 700, 40, 1, 2), blocks=3),
    Row("latent-listed", {"declared": SUNK, **LATENT}, (3, 150, 40, 1, 1), "listed", blocks=4),
    Row("latent-listed-few", {"declared": SUNK, **LATENT}, (3, 150, 8, 1, 1), "listed", {"sinks": SINKS}, blocks=4),
)  # fmt: skip


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of torch that allocates, whose memory holds NaN."""
    return lambda *given, **options: make(*given, **options).fill_(math.nan)


def call(plan: Any, row: Row) -> tuple[dict[str, Any], Callable[..., Any], tuple[Tensor, ...]]:
    """Arguments of the row's call, the function, and its tensors."""
    torch.manual_seed(0)
    rows, keys, heads, kv_heads, batch = row.sizes
    dtype = getattr(torch, plan.operands.q.torch)
    qk, columns = plan.head_dim_qk, plan.head_dim_v
    q = torch.randn(batch, rows, heads, qk).to(dtype)
    given: dict[str, Any] = {"variant": plan.variant.without_max_logits(), **row.arguments}
    if row.variant == "listed":
        given |= {
            "indices": torch.randint(-1, keys, (batch, rows, 2 * keys), dtype=torch.int32),
            "topk_length": torch.randint(0, 2 * keys, (batch, rows), dtype=torch.int32),
            "sinks": torch.linspace(-9, 9, heads),
        }
        given["topk_length"][0, 0] = 0
    if plan.layout == "paged":
        pages = -(-keys // 64)
        k = torch.randn(batch * pages, 64, kv_heads, qk).to(dtype)
        v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(dtype)
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
        lengths = torch.tensor([keys, keys // 3][:batch], dtype=torch.int32)
        return given, attngen.attention_paged, (q, k, v, table, lengths)
    k = torch.randn(batch, keys, kv_heads, qk).to(dtype)
    v = k[..., :columns] if plan.v_of_key else torch.randn(*k.shape[:3], columns).to(dtype)
    if plan.layout == "varlen":
        starts = torch.tensor([0, rows // 2, rows // 2, rows * batch - 5], dtype=torch.int32)
        ends = torch.tensor([0, keys // 3, keys, keys * batch - 7], dtype=torch.int32)
        packed = tuple(tensor.flatten(0, 1) for tensor in (q, k, v))
        return given, attngen.attention_varlen, (*packed, starts, ends, rows * batch, keys * batch)
    return given, attngen.attention, (q, k, v)


@pytest.mark.exhaustive
@few("row", ROWS, always=[n for n, row in enumerate(ROWS) if row.often], ids=lambda row: row.name)
def test_kernels_give_the_largest_logits(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(row.variant, max_logits="true", **{"backend": "cuda", **row.fields})
    assert plan.variant.max_logits
    given, attend, tensors = call(plan, row)
    rows = []
    monkeypatch.setattr(largest, "of_heads", lambda each, starts: rows.append(each) or of_heads(each, starts))
    wanted = attend(*tensors, **given, backend="reference", return_lse=True, return_max_logits=True)
    with device(compiled(plan), [], row.blocks, 0):
        monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
        actual = attend(*tensors, **given, return_lse=True, return_max_logits=True)
        alone = attend(*tensors, **given, return_max_logits=True)
    end = int(tensors[3][-1]) if plan.layout == "varlen" else None
    for one, other in zip((*actual[1:], rows[1]), (*wanted[1:], rows[0]), strict=True):
        torch.testing.assert_close(one[..., :end], other[..., :end], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(actual[0][:end].float(), wanted[0][:end].float(), atol=0.03, rtol=0.03)
    assert torch.equal(alone[1], actual[2])
    assert torch.equal(alone[0][:end], actual[0][:end])


of_heads = largest.of_heads
