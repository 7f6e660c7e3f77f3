"""The backend of SGLang, with a stub in SGLang's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.integrations.engines import layers as engines
from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    with imported_with(
        sglang_stub, "attngen.integrations.sglang.backend", "tests.integrations.sglang.sglang_cases"
    ) as module:
        yield module


def engine(cases: Any) -> Any:
    return cases.Engine(
        sglang_stub.Pool, sglang_stub.SWAKVPool, sglang_stub.layer, sglang_stub.ForwardMode, sglang_stub.AttentionType
    )


NAMES = (
    "prompts and decoding", "pages of one token", "decoding", "window", "window, decoding", "a pool of windows",
    "a pool of windows, decoding", "sinks", "sinks and window", "softcap", "both ways", "encoder", "after an encoder",
    "cross", "images", "images and window",
    "fp8", "fp8, head dim 512", "graph", "graph, a pool of windows", "drafts", "drafts, graph", "log-sum-exp",
    "trees of drafts", "trees of drafts, graph",
)  # fmt: skip


def test_every_case_is_run(cases: Any) -> None:
    assert set(NAMES) == set(cases.CASES)


@pytest.mark.parametrize("name", NAMES)
def test_results(cases: Any, name: str) -> None:
    cases.check(engine(cases), cases.CASES[name])


@pytest.mark.parametrize(
    ("mode", "extents", "decodes"),
    [
        ("EXTEND", [5, 7, 1, 1], -2), ("EXTEND", [1, 5], 1), ("EXTEND", [1, 1, 5, 1], 2), ("EXTEND", [5, 1, 7], None),
        ("EXTEND", [1, 1], None), ("EXTEND", None, None), ("DECODE", [5, 1], None), ("TARGET_VERIFY", [4, 1], None),
    ],
)  # fmt: skip
def test_requests_that_decode_beside_prompts(cases: Any, mode: str, extents: Any, decodes: int | None) -> None:
    batch = SimpleNamespace(forward_mode=sglang_stub.ForwardMode[mode], extend_seq_lens_cpu=extents)
    assert cases.sglang_backend.AttngenAttnBackend._decodes(None, batch) == decodes


def test_a_mask_of_ones_own(cases: Any) -> None:
    mask = engines.Mask(attngen.variant("q_pos >= kv and (q_pos - kv < 4 or kv % 8 == 0)", name="landmarks"))
    case = cases.Case(mask=mask, seen=lambda b, q, kv: (q >= kv) & ((q - kv < 4) | (kv % 8 == 0)))
    cases.check(engine(cases), case)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda runner: setattr(runner, "is_draft_worker", True), "draft models"),
        (lambda runner: setattr(runner.kv_index_translator, "is_translating", True), "--enable-unified-memory"),
        (lambda runner: setattr(runner.model_config, "is_local_attention_model", True), "chunked local attention"),
        (lambda runner: setattr(runner.model_config, "is_encoder_decoder", True), "cross attention with pages"),
        (lambda runner: setattr(runner.model_config, "head_dim", 300), "head size 300 is not a multiple of 8"),
        (lambda runner: setattr(runner.model_config, "swa_head_dim", 300), "head size 300 is not a multiple of 8"),
    ],
)
def test_what_is_not_served_is_said_in_words(
    cases: Any, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    monkeypatch.setattr(cases.sglang_backend, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    runner = cases.runner_of(engine(cases), cases.Case(), None, torch.empty(0))
    change(runner)
    with pytest.raises(ValueError, match=f"--attention-backend attngen does not serve {words}"):
        cases.sglang_backend.AttngenAttnBackend(runner)


@pytest.mark.parametrize(
    ("spec", "window", "words"),
    [
        ({"speculative_algorithm": "NGRAM"}, None, "of NGRAM; trees are those of EAGLE, EAGLE3, STANDALONE"),
        ({}, 128, "with sliding windows"),
    ],
)
def test_trees_that_are_not_served(
    cases: Any, monkeypatch: pytest.MonkeyPatch, spec: dict[str, str], window: int | None, words: str
) -> None:
    given = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8, "speculative_algorithm": "EAGLE", **spec}
    monkeypatch.setattr(cases.sglang_backend, "get_spec", lambda: SimpleNamespace(**given))
    runner = cases.runner_of(engine(cases), cases.Case(), None, torch.empty(0))
    runner.sliding_window_size = window
    with pytest.raises(ValueError, match=rf"trees of drafts \(--speculative-eagle-topk above 1\) {words}"):
        cases.sglang_backend.AttngenAttnBackend(runner)


def test_layers_that_trees_do_not_serve() -> None:
    for layer, words in (
        (engines.Layer(window=9), "layers without windows only"),
        (engines.Layer(softcap=2.0), "without soft-capping"),
    ):
        with pytest.raises(CallError, match=f"trees of drafts are served for .*{words}"):
            layer.with_tree(torch.ones(1, 2, 2, dtype=torch.bool))


def test_head_dims_of_layers_with_a_window_and_others_stand_side_by_side(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Gemma 4, over a cache in 8 bits, too."""
    monkeypatch.setattr(cases.sglang_backend, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    runner = cases.runner_of(engine(cases), cases.Case(), None, torch.empty(0))
    runner.kv_cache_dtype = torch.float8_e4m3fn
    runner.model_config.head_dim, runner.model_config.swa_head_dim = 512, 256
    backend = cases.sglang_backend.AttngenAttnBackend
    made = backend.__new__(backend)
    assert made._refusal(runner) is None
    assert made._kinds(runner) == ["keys in pages", "head dims beyond 256", "caches in e4m3"]
    runner.model_config.swa_head_dim = 264
    assert made._refusal(runner) == "head size 264 over a cache in fp8 is not a multiple of 16 from 16 to 512"


def test_cards_without_the_kernels_are_refused(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases.sglang_backend, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    runner = cases.runner_of(engine(cases), cases.Case(), None, torch.empty(0))
    runner.device, runner.kv_cache_dtype = "cuda", torch.bfloat16
    backend = cases.sglang_backend.AttngenAttnBackend
    refusals = []
    for capability, dtype in (((8, 0), torch.bfloat16), ((8, 0), torch.float8_e4m3fn), ((10, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        runner.kv_cache_dtype = dtype
        refusals.append(backend._card_reason(backend.__new__(backend), runner))
    few = "sm80, sm86, sm89, sm90a, sm120a, ptx80"
    assert refusals == [
        None,
        "caches in e4m3, of which there are kernels for sm89, sm90a, sm120a; the card is sm80",
        f"keys in pages, of which there are kernels for {few}; the card is sm100",
    ]


def test_registering_twice_is_the_same_as_once(cases: Any) -> None:
    from attngen.integrations.sglang import plugin as sglang

    sglang.register()
    sglang.register()
    assert sys.modules["sglang.srt.arg_groups.choices"].listed == ["attngen"]
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
    assert {"attngen": sglang._make} == registry.ATTENTION_BACKENDS
