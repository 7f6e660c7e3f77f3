"""Options with a few allowed values: a call refuses any other, and says which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen import parallel
from attngen.errors import CallError, SpecError
from attngen.integrations import cudnn, cuequivariance, fastvideo, sdpa
from attngen.integrations.engines import layers as engines
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_mla import functions as flash_mla
from attngen.integrations.natten import functions as natten
from attngen.integrations.sageattention import functions as sageattention
from attngen.integrations.torch_sdpa import flash as torch_flash
from attngen.integrations.vllm import flash_attn as vllm_flash_attn

Q = torch.randn(1, 4, 2, 16)
PAGES, ROW = torch.randn(2, 16, 2, 64), torch.randn(1, 1, 2, 64)
TABLE, USED = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
STARTS = torch.tensor([0, 4], dtype=torch.int32)
LATENTS = torch.randn(2, 64, 1, 576)
LISTS = torch.zeros(1, 4, 1, 1, dtype=torch.int32)

CALLS: dict[str, Callable[[Any], Any]] = {
    "attention layout": lambda x: attngen.attention(Q, Q, Q, layout=x),
    "attention backend": lambda x: attngen.attention(Q, Q, Q, backend=x),
    "attention quantize": lambda x: attngen.attention(Q, Q, Q, quantize=x),
    "attention deterministic": lambda x: attngen.attention(Q, Q, Q, deterministic=x),
    "attention return_lse": lambda x: attngen.attention(Q, Q, Q, return_lse=x),
    "varlen backend": lambda x: attngen.attention_varlen(Q[0], Q[0], Q[0], STARTS, STARTS, 4, 4, backend=x),
    "paged backend": lambda x: attngen.attention_paged(ROW, PAGES, PAGES, TABLE, USED, backend=x),
    "paged page_layout": lambda x: attngen.attention_paged(ROW, PAGES, PAGES, TABLE, USED, page_layout=x),
    "append page_layout": lambda x: attngen.append_kv(
        ROW, ROW, PAGES.clone(), PAGES.clone(), USED, page_table=TABLE, page_layout=x
    ),
    "quantize granularity": lambda x: attngen.quantize(Q, Q, Q, granularity=x),
    "quantize layout": lambda x: attngen.quantize(Q, Q, Q, layout=x),
    "quantize dtype": lambda x: attngen.quantize(Q, Q, Q, dtype=x),
    "merge layout": lambda x: attngen.merge([Q, Q], [torch.zeros(1, 2, 4)] * 2, layout=x),
    "explain layout": lambda x: attngen.explain(Q, Q, Q, layout=x),
    "explain backend": lambda x: attngen.explain(Q, Q, Q, backend=x),
    "explain direction": lambda x: attngen.explain(Q, Q, Q, direction=x),
    "explain page_layout": lambda x: attngen.explain(
        ROW, PAGES, PAGES, page_table=TABLE, seqused_k=USED, page_layout=x
    ),
    "tile_map layout": lambda x: attngen.tile_map(Q, Q, variant="causal", layout=x),
    "tile_map backend": lambda x: attngen.tile_map(Q, Q, variant="causal", backend=x),
    "jit": lambda x: attngen.jit(x),
    "scores dtype": lambda x: attngen.debug.scores(Q, Q, Q, dtype=x),
    "scores plot": lambda x: attngen.debug.scores(Q, Q, Q).plot(x),
    "comparison layout": lambda x: attngen.debug.compare(Q, Q, Q, layout=x),
    "comparison plot": lambda x: attngen.debug.compare(Q, Q, Q).plot(x),
    "scalar type": lambda x: attngen.variant(score="s + z", scalars={"z": {"type": x}}),
    "tensor dtype": lambda x: attngen.variant(score="s + z[b]", tensors={"z": {"dtype": x, "shape": ["b"]}}),
    "keys": lambda x: attngen.variant(keys=x),
    "dropout": lambda x: attngen.variant(dropout=x),
    "weights": lambda x: attngen.variant(weights=x),
    "sink_in_lse": lambda x: attngen.variant(sink="1.0", sink_in_lse=x),
    "plan method": lambda x: parallel.plan("causal", 512, 2, method=x),
    "simulate method": lambda x: parallel.simulate("causal", 2, tokens=512, method=x),
    "cudnn layout": lambda x: cudnn.block_sparse_attention_forward(Q, Q, Q, LISTS, layout=x),
    "cudnn sparse_block_size": lambda x: cudnn.block_sparse_attention_forward(Q, Q, Q, LISTS, sparse_block_size=x),
    "fastvideo block_size": lambda x: fastvideo.video_sparse_attn(Q, Q, Q, USED, USED, 1, x),
    "attention_pair_bias norm_kind": lambda x: cuequivariance.attention_pair_bias(
        Q[0, :, 0][None], Q, None, 2, Q[0, 0, 0], None, *[Q[0, 0]] * 6, norm_kind=x
    ),
    "sdpa backend": lambda x: sdpa(backend=x),
    "sageattn tensor_layout": lambda x: sageattention.sageattn(Q, Q, Q, tensor_layout=x),
    "na1d kernel_size": lambda x: natten.na1d(Q, Q, Q, x),
    "na1d backend": lambda x: natten.na1d(Q, Q, Q, 3, backend=x),
    "na1d kernel_schedule": lambda x: natten.na1d(Q, Q, Q, 3, kernel_schedule=x),
    "torch_flash dispatch_key": lambda x: torch_flash.activate(x),
    "flash_attn_3 window_size": lambda x: flash_attn_3.flash_attn_func(Q, Q, Q, window_size=x),
    "flash_mla kv_format": lambda x: flash_mla.flash_mla_with_kvcache(
        torch.randn(1, 1, 2, 576), LATENTS, TABLE, USED, 512, kv_format=x
    ),
    "fa_version": lambda x: vllm_flash_attn.is_fa_version_supported(x),
    "Mask layers": lambda x: engines.Mask("causal", layers=x),
    "configured layers": lambda x: engines.configured({"mask": "causal", "layers": x}),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_unknown_value_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises((CallError, SpecError)):
        call("unknown")


def test_layers_of_a_mask() -> None:
    with pytest.raises(CallError, match="one of all, full, sliding, got 'ful'; did you mean 'full'?"):
        engines.Mask("causal", layers="ful")


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"variant": None}, "got a NoneType"), ({"variant": "causal", "arguments": [1]}, "got a list")],
)
def test_other_fields_of_a_mask(given: dict[str, Any], kind: str) -> None:
    with pytest.raises(CallError, match=kind):
        engines.Mask(**given)
