"""``attngen.index_scores`` on the CPU: masks, scales, pages, lengths, and refusals; and what brings its kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import prepare_unrendered
from attngen.errors import CallError, PlanError, SpecError
from attngen.inspect.operations import explain_helpers
from attngen.schema import load_spec_text

SPEC = """
schema: 1
package: index
arch: [sm90a]
kernels:
  - {variant: [causal, sliding_window], head_dim: 128, dtype: [fp8_e4m3, bf16], layout: [dense, paged],
     passes: index_scores}
"""


def operands(batch: int = 2, queries: int = 5, keys: int = 11, heads: int = 3, head_dim: int = 16) -> dict[str, Tensor]:
    return {
        "q": torch.randn(batch, queries, heads, head_dim),
        "k": torch.randn(batch, keys, head_dim),
        "weights": torch.randn(batch, queries, heads),
    }


def by_hand(q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    scores = sum(weights[..., h, None] * torch.clamp(q[:, :, h] @ k.transpose(1, 2), min=0) for h in range(q.shape[2]))
    assert isinstance(scores, Tensor)
    return scores.masked_fill(~visible, -torch.inf)


def test_it_sums_over_heads_what_the_mask_shows() -> None:
    given = operands()
    q, kv = torch.arange(5)[:, None] + 6, torch.arange(11)
    for variant, visible, own in (
        ("causal", kv <= q, {}), ("full", kv < 99, {}), ("sliding_window", (kv <= q) & (kv > q - 3), {"window": 3}),
    ):  # fmt: skip
        scores = attngen.index_scores(**given, variant=variant, **own)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, by_hand(**given, visible=visible.expand(2, 5, 11)))


def test_masks_of_tensors() -> None:
    from attngen import variant

    ranges = variant(
        mask="kv >= first[q] and kv < last[q]",
        tensors={"first": {"dtype": "int32", "shape": ["seqlen_q"]}, "last": {"dtype": "int32", "shape": ["seqlen_q"]}},
    )
    given = operands()
    first, last = torch.tensor([0, 3, 5, 9, 2]).int(), torch.tensor([4, 3, 11, 10, 8]).int()
    kv = torch.arange(11)
    visible = (kv >= first[:, None]) & (kv < last[:, None])
    scores = attngen.index_scores(**given, variant=ranges, first=first, last=last)
    torch.testing.assert_close(scores, by_hand(**given, visible=visible.expand(2, 5, 11)))


def test_scales_and_used_lengths() -> None:
    given, scale = operands(), torch.rand(2, 11) + 0.1
    used = torch.tensor([11, 6], dtype=torch.int32)
    scores = attngen.index_scores(**given, k_scale=scale, seqused_k=used)
    q, kv = torch.arange(5)[None, :, None] + used[:, None, None] - 5, torch.arange(11)
    wanted = by_hand(**given, visible=kv <= q)
    torch.testing.assert_close(scores, wanted * scale[:, None])


def test_pages_hold_the_same_keys() -> None:
    given = operands(keys=12)
    used, scale = torch.tensor([12, 7], dtype=torch.int32), torch.rand(2, 12) + 0.1
    table = torch.tensor([[4, 0, 5], [2, 1, 99]], dtype=torch.int32)
    pages, of_pages = torch.full((6, 4, 16), torch.nan), torch.full((6, 4), torch.nan)
    for b in range(2):
        for i, page in enumerate(table[b].tolist()):
            if page < 6:
                pages[page], of_pages[page] = given["k"][b, 4 * i : 4 * i + 4], scale[b, 4 * i : 4 * i + 4]
    dense = attngen.index_scores(**given, k_scale=scale, seqused_k=used)
    paged = attngen.index_scores(**{**given, "k": pages}, k_scale=of_pages, page_table=table, seqused_k=used)
    torch.testing.assert_close(paged, dense)


def packed() -> dict[str, Any]:
    """Packed queries over pages: five of a sequence, none, one of a sequence without keys, and three."""
    given = operands(1, queries=9)
    return {
        "q": given["q"][0], "k": torch.randn(7, 4, 16), "weights": given["weights"][0],
        "k_scale": torch.rand(7, 4) + 0.1, "cu_seqlens_q": torch.tensor([0, 5, 5, 6, 9], dtype=torch.int32),
        "max_seqlen_q": 5, "seqused_k": torch.tensor([7, 3, 0, 12], dtype=torch.int32),
        "page_table": torch.tensor([[4, 0, 99], [2, 99, 99], [99, 99, 99], [6, 1, 3]], dtype=torch.int32),
    }  # fmt: skip


def test_packed_queries_over_pages() -> None:
    given = packed()
    scores = attngen.index_scores(**given)
    assert scores.shape == (9, 12)
    for b, (first, end) in enumerate([(0, 5), (5, 5), (5, 6), (6, 9)]):
        keys = int(given["seqused_k"][b])
        pages = given["page_table"][b, : -(-keys // 4)].long()
        own = {name: given[name][None, first:end].double() for name in ("q", "weights")}
        k = given["k"][pages].reshape(1, -1, 16)[:, :keys].double()
        visible = torch.arange(keys) <= torch.arange(end - first)[:, None] + keys - (end - first)
        wanted = by_hand(own["q"], k, own["weights"], visible) * given["k_scale"][pages].reshape(1, 1, -1)[..., :keys]
        torch.testing.assert_close(scores[first:end, :keys].double(), wanted[0], atol=1e-5, rtol=1e-5)
        assert (scores[first:end, keys:] == -torch.inf).all()


def test_the_callers_tensor_gets_the_scores() -> None:
    given = packed()
    out = torch.empty(9, 20)[:, :12]
    assert attngen.index_scores(**given, out=out) is out
    assert torch.equal(out, attngen.index_scores(**given))

    def program(q: Tensor) -> Tensor:
        return attngen.index_scores(**{**given, "q": q * 1}, out=torch.zeros(9, 12))

    assert torch.equal(torch.compile(program, fullgraph=True, backend="eager")(given["q"]), out)


def test_8_bits_and_double_precision() -> None:
    given = operands(head_dim=32)
    eight = {**given, "q": given["q"].to(torch.float8_e4m3fn), "k": given["k"].to(torch.float8_e4m3fn)}
    exact = {name: value.double() for name, value in eight.items()}
    scores = attngen.index_scores(**exact)
    assert scores.dtype == torch.float64
    torch.testing.assert_close(attngen.index_scores(**eight), scores.float())


def test_selected_keys_are_visible_ones() -> None:
    scores = attngen.index_scores(**operands(keys=6))
    chosen = attngen.topk(scores, 4)
    assert chosen[0, 0].tolist() == [0, 1, -1, -1]
    assert (chosen.amax(-1) <= torch.arange(5) + 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": torch.randn(2, 5, 4)}, "weights must be torch.float32 of shape (2, 5, 3) on cpu"),
        ({"k": torch.randn(2, 11, 8)}, "q has head_dim 16, but k has 8"),
        ({"k": torch.randn(2, 11, 1, 16)}, "k must have 3 dimensions (batch x seqlen_k x head_dim)"),
        ({"k": torch.randn(2, 11, 16).bfloat16()}, "dtype"),
        ({"k_scale": torch.randn(2, 10)}, "k_scale must be torch.float32 of shape (2, 11) on cpu"),
        ({"variant": "softcap", "cap": 3.0}, "softcap: index_scores, which takes a mask alone, does not serve 'score'"),
        ({"window": 3}, "causal: unknown argument 'window'"),
        ({"page_table": torch.zeros(2, 3).int()}, "seqused_k is needed"),
        ({"cu_seqlens_q": torch.zeros(3).int()}, "cu_seqlens_q goes with page_table"),
        ({**packed(), "max_seqlen_q": None}, "max_seqlen_q is needed with cu_seqlens_q"),
        ({**packed(), "max_seqlen_q": 4}, "max_seqlen_q is 4, but sequence 0 has length 5"),
        ({**packed(), "cu_seqlens_q": torch.zeros(3).int()}, "cu_seqlens_q must have shape (batch + 1,) = (5,)"),
        ({"out": torch.zeros(2, 5, 12)}, "out must be torch.float32 of shape (2, 5, 11) on cpu"),
        ({"out": torch.zeros(2, 1, 11).expand(2, 5, 11)}, "out is written, but its rows share memory"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=re.escape(message)):
        attngen.index_scores(**{**operands(), **changes})


def test_gradients_are_refused() -> None:
    given = operands()
    given["weights"].requires_grad_()
    with pytest.raises(CallError, match="index_scores is not differentiable"):
        attngen.index_scores(**given)


def test_compiled_programs_keep_it_whole() -> None:
    given = operands()

    def program(q: Tensor) -> Tensor:
        return attngen.index_scores(**{**given, "q": q * 2}, variant="sliding_window", window=4)

    compiled = torch.compile(program, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given["q"]), program(given["q"]))


def test_an_entry_of_a_spec_brings_kernels_and_the_selection(tmp_path: Any) -> None:
    plans = [one.plan for one in prepare_unrendered(load_spec_text(SPEC))]
    assert [plan.direction for plan in plans] == ["index_scores"] * 8 + ["topk"]
    assert plans[1].name == "index_scores_sm90a_fp8_e4m3_d128_causal_paged"
    path = tmp_path / "index.yaml"
    path.write_text(SPEC)
    facts = [dict(one.facts()) for one in explain_helpers(path)]
    assert "k" in facts[-1]
    assert "128 heads" in facts[0]["head_dim"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("variant: causal, head_dim: 96, dtype: bf16", "index scores take 64 or 128"),
        ("variant: causal, head_dim: 128, dtype: fp32", "index scores take bf16, fp16, fp8_e4m3; found fp32"),
        ("variant: softcap, head_dim: 128, dtype: bf16", "variant.score: index scores take a mask alone; found cap"),
        ("variant: causal, head_dim: 128, dtype: bf16, layout: varlen", "allowed: dense, paged"),
        ("variant: causal, head_dim: 128, dtype: bf16, tile: {m: 64, n: 64}", "is for the forward"),
    ],
)
def test_specs_that_no_kernel_serves(entry: str, message: str) -> None:
    text = f"schema: 1\npackage: index\narch: [sm90a]\nkernels:\n  - {{{entry}, passes: index_scores}}\n"
    with pytest.raises((PlanError, SpecError), match=re.escape(message)):
        prepare_unrendered(load_spec_text(text))
