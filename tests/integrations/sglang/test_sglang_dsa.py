"""Sparse latent attention in SGLang, with a stub in SGLang's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub

MODULES = ("attngen.integrations.sglang.dsa", "tests.integrations.sglang.sglang_dsa_cases")


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    with imported_with(sglang_stub, *MODULES) as module:
        yield module


def backend(cases: Any, made: Any, **changed: Any) -> Any:
    pool = changed.pop("pool", None) or sglang_stub.DSAPool(made.stored)
    names = ("eagle_topk", "dcp", "deterministic")
    context = {name: changed.pop(name) for name in names if name in changed}
    vars(cases.sglang_dsa).update(cases.settings(**context))
    return cases.sglang_dsa.AttngenDSABackend(cases.runner(pool, cases.slots_of_requests(made), **changed))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_steps(cases: Any, mode: str, packed: bool) -> None:
    made, kind = cases.batch(mode, packed=packed), sglang_stub.ForwardMode[mode]
    one = backend(cases, made)
    one.init_forward_metadata(cases.step(kind, made))
    cases.check(one, kind, made)


@pytest.mark.parametrize("heads", [1, 65])
def test_any_number_of_heads(cases: Any, heads: int) -> None:
    made, mode = cases.batch("DECODE", heads=heads), sglang_stub.ForwardMode.DECODE
    one = backend(cases, made)
    one.init_forward_metadata(cases.step(mode, made))
    cases.check(one, mode, made)


def test_sinks(cases: Any) -> None:
    made, mode = cases.batch("EXTEND"), sglang_stub.ForwardMode.EXTEND
    one = backend(cases, made)
    one.init_forward_metadata(cases.step(mode, made))
    cases.check(one, mode, made, sinks=torch.tensor([0.5, -1.0, 3.0]))


def test_batches_that_are_padded_for_other_ranks(cases: Any) -> None:
    """Lengths of more tokens than there are, and none at all: lists end with -1 in any case."""
    made, mode = cases.batch("EXTEND"), sglang_stub.ForwardMode.EXTEND
    one = backend(cases, made)
    one.init_forward_metadata(cases.step(mode, made))
    known = one.forward_metadata.dsa_cache_seqlens_int32
    for lengths in (torch.cat([known, known.new_zeros(4)]), known[:2], None):
        one.forward_metadata.dsa_cache_seqlens_int32 = lengths
        cases.check(one, mode, made)


def test_short_prompts_over_keys_of_each_head(cases: Any) -> None:
    cases.check_short_prompts(backend(cases, cases.batch("EXTEND")), sglang_stub.ForwardMode.EXTEND)


def test_graphs_need_no_schedule(cases: Any) -> None:
    schedule = backend(cases, cases.batch("DECODE"))._compute_flashmla_metadata(torch.ones(3), 1)
    assert schedule.slice(slice(0, 2)) is schedule
    schedule.copy_(schedule)


def test_models_ask_by_the_backends_name(cases: Any) -> None:
    for _ in range(2):
        backend(cases, cases.batch("DECODE"))
    assert sglang_stub.AttentionBackendRegistry.handlers["attngen"](None, None) == "sparse"
    assert cases.sglang_dsa.models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS == ["dsa", "attngen"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"is_draft_worker": True}, "draft models; pass --speculative-draft-attention-backend dsa"),
        ({"eagle_topk": 4}, "trees of drafts"), ({"index_kpool": 4}, "selections of pooled keys"),
        ({"dcp": 2}, "context parallelism with sparse attention; pass --attention-backend dsa"),
        ({"hisparse_coordinator": object()}, "caches in host memory"),
        ({"deterministic": True}, "--enable-deterministic-inference with sparse attention"),
        ({"kv_lora_rank": 256}, "latent rows of 320 columns, 256 of which are values"),
        ({"qk_rope_head_dim": 32}, "latent rows of 544 columns"),
        ({"pool": SimpleNamespace(dsa_kv_cache_store_fp8=True, kv_cache_dim=528, dtype=torch.float8_e4m3fn)},
         "latent rows of 528 bytes, only of 656; pass --kv-cache-dtype bfloat16"),
        ({"pool": SimpleNamespace(dsa_kv_cache_store_fp8=False, kv_cache_dim=576, dtype=torch.float8_e4m3fn)},
         "latent rows of torch.float8_e4m3fn without scales"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said_in_words(cases: Any, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend attngen does not serve {words}"):
        backend(cases, cases.batch("DECODE"), **changed)


def test_a_mask_of_ones_own_is_refused(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_MASK", "chunked")
    with pytest.raises(ValueError, match="does not serve a user's mask"):
        backend(cases, cases.batch("DECODE"))
