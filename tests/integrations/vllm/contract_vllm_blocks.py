"""Models that choose blocks of keys inside of a release of vLLM, on the CPU: run by ``engine_contracts``.

vLLM's functions and methods, which are in Triton, must have the arguments that attngen's have in their place, and its
layers must call them by these names. Metadata are vLLM's classes; scores and attention are the eager reference.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import forward_context

from attngen.integrations.engines.block_lists import VARIABLE
from attngen.integrations.vllm import block_lists, plugin
from tests.integrations.vllm import vllm_block_lists_cases as cases

pytestmark = pytest.mark.skipif(
    not any(f"vllm-{release}" in vllm.__file__ for release in plugin.SPARSE_RELEASES),
    reason="this release has other models",
)

#: vLLM's functions, before a name is bound.
THEIRS: dict[tuple[str, str], Callable[..., Any]] = {}


def member(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.fixture(scope="module", autouse=True)
def _models() -> None:
    """The modules of both models, imported while the plugin is there."""
    for module in block_lists.REPLACED:
        assert module not in sys.modules
    for model in ("minimax_m3", "qwen4_exp"):  # as vLLM does; their parts import each other
        importlib.import_module(f"vllm.models.{model}.nvidia.model")
    for module, names in block_lists.REPLACED.items():
        for name in names:
            THEIRS[module, name] = member(importlib.import_module(module), name)


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and kinds of a function's parameters, without the first of a method."""
    listed = list(inspect.signature(inspect.unwrap(function)).parameters.values())
    return [(one.name, one.kind) for one in listed[listed[0].name in ("self", "impl") :]]


def test_ours_take_the_arguments_of_theirs() -> None:
    #: Given by AMD's models alone.
    optional = {
        "attention_block_table", "sparse_block_table_out", "sparse_context_lens_out", "block_page_stride"
    }  # fmt: skip
    for (module, name), theirs in THEIRS.items():
        wanted = [one for one in parameters(theirs) if one[0] not in optional]
        assert parameters(block_lists.REPLACED[module][name]) == wanted, name


def test_layers_call_them_by_name() -> None:
    """Names are looked up when a layer runs, and Hopper's models take these classes."""
    qsa = importlib.import_module("vllm.models.qwen4_exp.nvidia.qsa")
    indexer = importlib.import_module("vllm.models.qwen4_exp.nvidia.indexer_qsa")
    forward = inspect.getsource(indexer.QSAIndexer.forward)
    assert "from .ops.qsa_indexer import (" in forward
    for name in block_lists.REPLACED["vllm.models.qwen4_exp.nvidia.ops.qsa_indexer"]:
        assert f"{name}(" in forward
    attention = inspect.getsource(qsa.Qwen4ExpQSAFlashAttentionImpl.forward_qsa)
    assert "from .ops.qsa import qsa_sparse_paged_attention" in attention
    assert "layer.topk_indices_buffer" in attention or '"topk_indices_buffer"' in attention
    assert "self.output_width + 1" in inspect.getsource(indexer.QSAIndexer.packed_output_width.fget)
    assert "self.token_topk + self.compress_ratio - 1" in inspect.getsource(indexer.QSAIndexer.output_width.fget)
    msa = importlib.import_module("vllm.models.minimax_m3.common.indexer")
    assert "return MiniMaxM3IndexerTritonImpl" in inspect.getsource(msa.select_indexer_impl_cls)
    sparse = importlib.import_module("vllm.models.minimax_m3.common.sparse_attention")
    assert "MiniMaxM3SparseTritonImpl" in inspect.getsource(sparse.select_main_backend_and_impl_cls)
    model = inspect.getsource(importlib.import_module("vllm.models.minimax_m3.nvidia.model").MiniMaxM3SparseAttention)
    assert "self.indexer(index_query)" in model
    assert "self.topk_indices_buffer = topk_indices_buffer" in model


def test_the_plugin_binds_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    plugin.register()
    for (module, name), theirs in THEIRS.items():
        assert member(sys.modules[module], name) is theirs, "without the variable nothing changes"
    monkeypatch.setenv(VARIABLE, "1")
    try:
        plugin.register()
        for module, name in THEIRS:
            assert member(sys.modules[module], name) is block_lists.REPLACED[module][name]
    finally:
        for (module, name), theirs in THEIRS.items():
            owner, _, last = name.rpartition(".")
            setattr(member(sys.modules[module], owner) if owner else sys.modules[module], last, theirs)


def test_msa_with_vllms_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = importlib.import_module("vllm.models.minimax_m3.common.indexer")

    def made(decode: Any, prefill: Any, **given: Any) -> Any:
        return classes.MiniMaxM3IndexerMetadata(
            seq_lens=torch.zeros(1), max_seq_len=700, slot_mapping=torch.zeros(1),
            decode=classes.MiniMaxM3IndexerDecodeMetadata(**vars(decode)),
            prefill=classes.MiniMaxM3IndexerPrefillMetadata(**vars(prefill)), **given,
        )  # fmt: skip

    def context(of_layers: Any) -> None:
        given = partial(SimpleNamespace, attn_metadata=of_layers)
        monkeypatch.setattr(forward_context, "get_forward_context", given)

    torch.manual_seed(0)
    cases.check_msa(block_lists, made, context)


def test_qsa() -> None:
    torch.manual_seed(0)
    cases.check_qsa(block_lists)
