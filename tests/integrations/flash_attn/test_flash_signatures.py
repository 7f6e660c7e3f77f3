"""Parameters of the drop-ins for flash-attention: their names, order and defaults are those of the releases."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_attn import v4 as flash_attn_4
from attngen.integrations.vllm import flash_attn as vllm_flash_attn

_TWO = "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
_SCALES = "q_descale=None, k_descale=None, v_descale=None"
_THREE = f"{_SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_TUNED = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FOUR = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
_CHUNKS_OF_GATHERED = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
_METADATA = (
    "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
    "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), {chunk}has_softcap=False, num_splits=0, "
    "pack_gqa=None, sm_margin=0"
)

#: By release: the drop-in, the module that it stands for, and the parameters of each function.
RELEASES: dict[str, tuple[Any, str, dict[str, str]]] = {
    "flash-attn 2.8.3": (
        flash_attn,
        "flash_attn",
        {
            "flash_attn_func": f"q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}",
            "flash_attn_kvpacked_func": f"q, kv, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}",
            "flash_attn_qkvpacked_func": f"qkv, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}",
            "flash_attn_varlen_func": (
                f"q, k, v, {_PACKED}, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}, block_table=None"
            ),
            "flash_attn_varlen_kvpacked_func": (
                f"q, kv, {_PACKED}, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}"
            ),
            "flash_attn_varlen_qkvpacked_func": (
                f"qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, {_TWO}"
            ),
            "flash_attn_with_kvcache": (
                "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
                "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
                "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
                "return_softmax_lse=False"
            ),
        },
    ),
    "flash-attn 3.0.0": (
        flash_attn_3,
        "flash_attn_interface",
        {
            "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {_THREE}, {_TUNED}",
            "flash_attn_qkvpacked_func": (
                f"qkv, softmax_scale=None, causal=False, {_THREE}, deterministic=False, num_heads_q=None, "
                "sm_margin=0, return_attn_probs=False"
            ),
            "flash_attn_varlen_func": (
                f"q, k, v, {_PACKED}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, "
                f"{_THREE}, {_TUNED}"
            ),
            "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
            "flash_attn_with_kvcache": (
                "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
                "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
                f"max_seqlen_q=None, rotary_seqlens=None, {_SCALES}, softmax_scale=None, causal=False, "
                "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
                "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
            ),
            "get_scheduler_metadata": _METADATA.format(chunk="attention_chunk=0, "),
        },
    ),
    "flash-attn-4 4.0.0b36": (
        flash_attn_4,
        "flash_attn.cute",
        {
            "flash_attn_func": (
                f"q, k, v, qv=None, gather_kv_indices=None, {_FOUR}, aux_tensors=None, aux_scalars=None, "
                f"block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {_CHUNKS_OF_GATHERED}"
            ),
            "flash_attn_varlen_func": (
                "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
                "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
                f"{_FOUR}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
                "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
                f"{_CHUNKS_OF_GATHERED}"
            ),
        },
    ),
    "vLLM 0.33.0": (
        vllm_flash_attn,
        "vllm.vllm_flash_attn",
        {
            "flash_attn_varlen_func": (
                "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
                "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
                "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
                f"scheduler_metadata=None, {_SCALES}, num_splits=0, output_scale=None, fa_version=2, s_aux=None, "
                "cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, block_sparse_tensors=None, "
                "aux_tensors=None, aux_tensor_leading_dims=None, dynamic_causal=None, gather_kv_indices=None, "
                "gather_kv_valid_length=None"
            ),
            "get_scheduler_metadata": _METADATA.format(chunk=""),
            "is_fa_version_supported": "fa_version",
            "fa_version_unsupported_reason": "fa_version",
        },
    ),
}


def shape(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults of parameters, in their order; all can be given by place or by name."""
    parameters = inspect.signature(function).parameters.values()
    assert {each.kind for each in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [(each.name, each.default) for each in parameters]


@pytest.mark.parametrize("release", RELEASES)
def test_parameters_are_those_of_the_release(release: str) -> None:
    ours, _, functions = RELEASES[release]
    assert set(ours.__all__) == set(functions)
    for name, parameters in functions.items():
        recorded = eval(f"lambda {parameters}: None", {"torch": torch})
        assert shape(getattr(ours, name)) == shape(recorded), name


@pytest.mark.parametrize("release", RELEASES)
def test_parameters_are_those_of_the_module_that_is_installed(release: str) -> None:
    ours, original, functions = RELEASES[release]
    try:
        module = import_module(original)
    except (ImportError, RuntimeError, OSError) as error:  # most need a GPU or libraries of CUDA
        pytest.skip(f"{original} cannot be imported: {error}")
    there = [name for name in functions if hasattr(module, name)]
    if not there:  # a namespace, of which another package has a part
        pytest.skip(f"{original} has none of the functions")
    for name in there:
        assert shape(getattr(ours, name)) == shape(getattr(module, name)), name
