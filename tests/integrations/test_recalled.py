"""Calls of a drop-in that were made before: they have the reference's results, and others are not mistaken for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.integrations.flash_mla import functions as flash_mla
from attngen.integrations.flash_mla.functions import flash_mla_with_kvcache
from attngen.integrations.shared import catalogue, choice, constants, recalled
from attngen.runtime.arguments import seen, torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import kernel_call, recall
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import FakeDriver, kernel
from tests.sampling import few

pytestmark = pytest.mark.skipif(seen._TensorGuards is None, reason="torch has no such check")

HEADS = 3


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A driver that computes on the CPU; the variants of the calls that were not recognized."""
    names: list[str] = []
    attend = choice.attend

    def noted(candidates: Any, *given: Any, **options: Any) -> Any:
        names.append(candidates[0].variant)
        return attend(candidates, *given, **options)

    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flash_mla, "attend", noted)
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.clear()
    listed = [catalogue.variant(name) for name in ("listed_keys", "listed_keys_sink", "listed_keys_of_two_caches_sink")]
    kernels = [
        kernel(one, head_dim=dims, layout=layout)
        for one in listed
        for dims in ((576, 512), 512)
        for layout in ("dense", "paged")
    ]
    kernels += [kernel(catalogue.variant(name), head_dim=(576, 512), layout="paged") for name in ("causal", "full")]
    registry.add(package_of_kernels(kernels, "memory"))
    kept = recall.SEEN, kernel_call.PREPARED, recalled._KNOWN, recalled._NOTED, constants._KEPT
    for cache in kept:
        cache.clear()
    with drivers.use(FakeDriver()):
        yield names
    for cache in kept:
        cache.clear()
    registry.clear()


def given(
    seed: int, *, dim: int = 576, queries: int = 1, topk: int = 12, pages: int = 4, **more: Any
) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(2, queries, HEADS, dim).bfloat16(), "k_cache": torch.randn(pages, 16, 1, dim).bfloat16(),
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "indices": torch.randint(-8, 16 * pages, (2, queries, topk), dtype=torch.int32), **more,
    }  # fmt: skip


def call(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A call, whose result must be the reference's."""
    out, lse = flash_mla_with_kvcache(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "on_gpu", lambda tensor: False)
        patch.setattr(torch_state, "on_gpu", lambda tensor: False)
        patch.setattr(recalled, "key_of", lambda *_: None)
        patch.setattr(flash_mla, "attend", choice.attend)
        wanted, wanted_lse = flash_mla_with_kvcache(**arguments)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    return out, lse


FORMS: dict[str, dict[str, Any]] = {
    "one query": {},
    "several queries": {"queries": 3},
    "output like q": {"dim": 512},
    "pages": {"enable_batch_invariant": True},
    "counts": {"topk_length": torch.tensor([5, 0], dtype=torch.int32)},
    "counts of several queries": {"queries": 3, "topk_length": torch.tensor([5, 12], dtype=torch.int32)},
    "sinks": {"attn_sink": torch.tensor([0.5, -1.0, 2.0])},
    "a scale": {"softmax_scale": 0.3},
}


@few("form", FORMS, always=range(0, 999, 3))
def test_later_calls_are_recognized(form: str, slow: list[str]) -> None:
    for seed in range(6):
        call(given(seed, **FORMS[form]))
    assert len(slow) == 2


def test_two_caches(slow: list[str]) -> None:
    for seed in range(6):
        extra = given(seed + 100, topk=4, pages=3)
        more = {"extra_k_cache": extra["k_cache"], "extra_indices_in_kvcache": extra["indices"]}
        call(given(seed, attn_sink=torch.tensor([0.5, -1.0, 2.0]), **more))
    assert len(slow) == 2
    call(given(9, attn_sink=torch.tensor([0.5, -1.0, 2.0]), **more, extra_topk_length=torch.tensor([2, 0]).int()))
    assert len(slow) == 3


def in_pages(seed: int, *, pages: int = 4, batch: int = 2, queries: int = 1, **more: Any) -> dict[str, Any]:
    """A call over whole sequences in pages of 16 keys."""
    torch.manual_seed(seed)
    return {
        "q": torch.randn(batch, queries, HEADS, 576).bfloat16(), "k_cache": torch.randn(pages, 16, 1, 576).bfloat16(),
        "block_table": torch.randint(0, pages, (batch, 3), dtype=torch.int32), "head_dim_v": 512,
        "cache_seqlens": torch.randint(queries, 49, (batch,), dtype=torch.int32), **more,
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"queries": 3}, {"enable_batch_invariant": True}], ids=str)
def test_later_calls_over_pages_are_recognized(more: dict[str, Any], slow: list[str]) -> None:
    for seed in range(6):
        call(in_pages(seed, **more))
    assert len(slow) == 2
    for other in ({"batch": 3}, {"queries": 2}, {"pages": 5}, {"causal": not more.get("causal")}):
        known = len(slow)
        for seed in range(4):
            call(in_pages(seed, **{**more, **other}))
        assert known < len(slow) <= known + 3
    before = len(slow)
    call(in_pages(9, **more))
    assert len(slow) == before


def test_other_calls_are_not_mistaken_for_those_before(slow: list[str]) -> None:
    for seed in range(4):
        call(given(seed))
    known = len(slow)
    plain = given(9)
    strided = plain["q"].transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.empty(plain["indices"].numel() + 1, dtype=torch.int32)[1:].view_as(plain["indices"])
    columns = torch.randn(2, 1, HEADS, 2 * 576).bfloat16()[..., ::2]
    others = [
        {"indices": plain["indices"][:, :, :7].contiguous()}, {"indices": odd.copy_(plain["indices"])},
        {"q": columns}, {"k_cache": torch.cat([plain["k_cache"]] * 2, 1)[:, :16]},
        {"attn_sink": torch.tensor([0.5, -1.0, 2.0])}, {"softmax_scale": 1.0}, {"enable_batch_invariant": True},
        {"topk_length": torch.tensor([1, 2], dtype=torch.int32)}, {"q": strided},
    ]  # fmt: skip
    for place, changed in enumerate(others):
        call({**plain, **changed})
        call(plain)
        assert known + place <= len(slow)
    assert len(slow) >= known + len(others) - 1  # one query's strides along the axis of queries do not matter
    before = len(slow)
    call(plain)
    assert len(slow) == before


def test_what_looks_at_calls_sees_them(slow: list[str]) -> None:
    for seed in range(4):
        call(given(seed))
    known = len(slow)
    with attngen.debug(), pytest.raises(CallError, match="-1 names none"):
        flash_mla_with_kvcache(**given(5))
    assert len(slow) == known + 1
    with torch.enable_grad():
        assert not flash_mla_with_kvcache(**given(6))[0].requires_grad
    registry.add(package_of_kernels([kernel(catalogue.variant("causal"), layout="varlen", package="other")], "another"))
    call(given(7))  # another generation of kernels
    assert len(slow) == known + 2


def test_arguments_in_one_memory_are_told_apart(slow: list[str]) -> None:
    """Two arguments at one address: later calls have them at two."""
    arguments = given(0, topk=4, topk_length=torch.zeros(2, dtype=torch.int32))
    memory = torch.tensor([3, 1, 2, 5, 7, 9, 1, 0], dtype=torch.int32)
    shared = {"indices": memory.view(2, 1, 4), "topk_length": memory[:2]}
    for _ in range(4):
        call({**arguments, **shared})
    for seed in range(4):
        call({**given(seed, topk=4), "topk_length": torch.tensor([seed, 4], dtype=torch.int32)})


@pytest.mark.exhaustive
def test_forms_that_share_a_key_do_not_note_forever(slow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    note = recalled.seen
    monkeypatch.setattr(recalled, "seen", lambda *given: made.append(1) or note(*given))
    cache = given(0)["k_cache"]
    wide = torch.cat([cache] * 2, 3)[..., :576]
    for seed in range(40):
        call({**given(seed), "k_cache": cache if seed // 2 % 2 else wide})
    assert len(made) <= recalled._MOST_NOTED
