"""vLLM's models that choose blocks of keys, with a stub in vLLM's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.errors import NoKernelError
from attngen.integrations.engines import block_lists as engine_lists
from attngen.integrations.engines.block_lists import Lists, require_kernels
from attngen.runtime.registry.lookup import registry
from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import vllm_block_lists_cases as cases
from tests.integrations.vllm import vllm_stub


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    with imported_with(vllm_stub, "attngen.integrations.vllm.block_lists") as module:
        yield module


def test_msa_over_the_layers_of_a_step(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cases.check_msa(
        own, lambda **given: SimpleNamespace(**given),
        lambda of_layers: monkeypatch.setattr(vllm_stub.CONTEXT, "attn_metadata", of_layers),
    )  # fmt: skip


@pytest.mark.parametrize("megabytes", [512, 0])
def test_qsa_whatever_vllms_bound_of_memory(own: Any, megabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sys.modules["vllm"].envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", megabytes)
    cases.check_qsa(own)


MSA = {"block_size": 128, "topk_blocks": 16, "local_blocks": 1, "init_blocks": 0, "score_type": "max",
       "num_kv_heads": 4, "num_index_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"init_blocks": 1}, "always selects the first blocks"), ({"score_type": "sum"}, "other scores"),
        ({"block_size": 48}, "16 blocks of 48 keys"), ({"local_blocks": 16}, "16 of them before each token"),
        ({"num_index_heads": 2}, "2 heads for 4 KV heads"),
    ],
)  # fmt: skip
def test_other_indexers_are_refused(own: Any, changed: dict[str, Any], reason: str) -> None:
    assert own._lists_of_msa(SimpleNamespace(**MSA)).entries == 16
    with pytest.raises(NotImplementedError, match=reason):
        own._lists_of_msa(SimpleNamespace(**{**MSA, **changed}))


def test_caches_in_8_bits_are_refused(own: Any) -> None:
    with pytest.raises(
        NotImplementedError, match="ATTNGEN_BLOCK_LISTS does not serve caches of keys and values in 8 bits"
    ):
        own.attend_for_msa(SimpleNamespace(use_fp8_kv=True), None, None, None, None)
    with pytest.raises(NotImplementedError, match="in 8 bits; unset it"):
        own.attend_for_qsa(None, None, None, None, None, None, False, k_scale=1.0, output_gate=None)


def test_names_are_bound_when_their_module_is_imported(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "attngen_late_module"
    (tmp_path / f"{name}.py").write_text(
        "class Impl:\n    def forward(self, topk): pass\ndef select(page, more=0): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def forward(impl: Any, topk: int) -> None: ...

    def select(page: int) -> None: ...

    monkeypatch.setattr(own, "REPLACED", {name: {"Impl.forward": forward, "select": select}})
    own.when_imported()
    own.when_imported()
    module = __import__(name)
    assert module.Impl.forward is forward
    assert module.select is select
    monkeypatch.delitem(sys.modules, name)
    for other in ("gone", "select"):
        monkeypatch.setitem(own.REPLACED, name, {other: forward})
        with pytest.raises(NotImplementedError, match=f"has no {other} in this release of vLLM, or one with other"):
            __import__(name)


def test_kernels_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists(128, 15, 1, per_head=True)
    require_kernels(lists, 128, "bf16", "cpu")
    monkeypatch.setattr(engine_lists, "find", lambda *given: SimpleNamespace(kernels=[]))
    with pytest.raises(NoKernelError, match=r"run 'attngen build specs/integrations/sparse_gqa.yaml'"):
        require_kernels(lists, 128, "bf16", "cuda")
    registry.clear()
