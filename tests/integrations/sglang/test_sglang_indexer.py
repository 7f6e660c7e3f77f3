"""SGLang's indexer with attngen's scores, with a stub in SGLang's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub
from tests.integrations.sglang.sglang_stub import ForwardMode, Indexer

MODULES = (
    "attngen.integrations.sglang.dsa", "attngen.integrations.sglang.indexer",
    "tests.integrations.sglang.sglang_dsa_cases",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    methods = {name: getattr(Indexer, name) for name in ("_get_topk_paged", "_get_topk_ragged")}
    with imported_with(sglang_stub, *MODULES) as module:
        yield module
    for name, method in methods.items():
        setattr(Indexer, name, method)


def backend(cases: Any, monkeypatch: pytest.MonkeyPatch, made: Any, *, asked: str = "1", **changed: Any) -> Any:
    monkeypatch.setenv("ATTNGEN_INDEXER", asked)
    pool = sglang_stub.DSAPool(torch.zeros(len(made.pages), 64, 576, dtype=torch.bfloat16))
    vars(pool).update(index_pages=made.pages.flatten(1), index_page_size=64)
    vars(cases.sglang_dsa).update(cases.settings())
    one = cases.sglang_dsa.AttngenDSABackend(cases.runner(pool, cases.index_slots(made), **changed))
    monkeypatch.setattr(import_module("attngen.integrations.sglang.indexer"), "get_token_to_kv_pool", lambda: pool)
    return one


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_steps(cases: Any, mode: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = cases.index_step(mode), ForwardMode[mode]
    monkeypatch.setattr(sglang_stub, "FUSED", [fused])
    one = backend(cases, monkeypatch, made)
    one.init_forward_metadata(cases.step(kind, made))
    chosen = cases.selected(one, cases.indexer(Indexer), kind, made)
    made.check(made.positions(chosen) if fused else chosen)


def test_prompts_in_parts_and_in_a_buffer(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = cases.index_step("EXTEND"), ForwardMode.EXTEND
    monkeypatch.setattr(sglang_stub, "BUDGET", [4 * 100 * 2])
    one = backend(cases, monkeypatch, made)
    one.init_forward_metadata(cases.step(kind, made))
    assert cases.selected(one, cases.indexer(Indexer), kind, made, into=made.out) is made.out
    made.check(made.positions(made.out))


def test_others_keep_theirs(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = cases.index_step("DECODE"), ForwardMode.DECODE
    for asked in ("1", "0"):
        one = backend(cases, monkeypatch, made, asked=asked)
    one.init_forward_metadata(cases.step(kind, made))
    said, args = cases.selected(one, cases.indexer(Indexer), kind, made)
    assert said == "theirs"
    assert args[2] is made.q


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"head_dim": 64}, "an indexer with 4 heads of 64, only with up to 128 of 128"),
        ({"n_heads": 130}, "an indexer with 130 heads of 128"),
        ({"num_local_tokens": 3}, "an indexer that always selects the first or the last tokens"),
    ],
)
def test_what_is_not_served_is_said_in_words(
    cases: Any, changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kind = cases.index_step("DECODE"), ForwardMode.DECODE
    one = backend(cases, monkeypatch, made)
    one.init_forward_metadata(cases.step(kind, made))
    with pytest.raises(NotImplementedError, match=f"ATTNGEN_INDEXER does not serve {words}"):
        cases.selected(one, cases.indexer(Indexer, **changed), kind, made)


def test_caches_that_ranks_share_are_refused(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_stub.DeepseekSparseAttnBackend, "_kv_shard_pool", SimpleNamespace())
    with pytest.raises(ValueError, match="ATTNGEN_INDEXER does not serve caches that ranks share"):
        backend(cases, monkeypatch, cases.index_step("DECODE"))
