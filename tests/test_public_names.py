"""Public names: each import path that programs use stays, wherever the code behind it moves."""

from __future__ import annotations

import importlib
from importlib.metadata import distribution

import click
import pytest
import torch

import attngen
from attngen.cli import group

#: Module → names that programs import from it. Rows are added; one goes only with a word in the changelog.
PUBLIC = {
    "attngen": "append_kv attention attention_paged attention_varlen block_mask block_scores debug define_operators "
    "errors explain index_scores integrations jit load merge parallel quantize shared_prefix tile_map topk trees "
    "variant",
    "attngen.integrations": "sdpa",  # beside its modules below
    "attngen.integrations.bert_padding": "index_first_axis index_put_first_axis pad_input unpad_input "
    "unpad_input_for_concatenated_sequences",
    "attngen.integrations.block_sparse_attn": "block_sparse_attn_func block_streaming_attn_func "
    "token_streaming_attn_func",
    "attngen.integrations.context_parallel": "context_parallel",
    "attngen.integrations.cuequivariance": "attention_pair_bias triangle_attention",
    "attngen.integrations.cudnn": "BSA block_sparse_attention_backward block_sparse_attention_forward",
    "attngen.integrations.diffusers": "register served",
    "attngen.integrations.engines": "Mask Step",
    "attngen.integrations.fastvideo": "block_sparse_attn block_sparse_attn_from_indices video_sparse_attn "
    "video_sparse_attn_bshd",
    "attngen.integrations.flash_attn": "_flash_attn_backward _flash_attn_forward _flash_attn_varlen_backward "
    "_flash_attn_varlen_forward flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func "
    "flash_attn_varlen_func flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache",
    "attngen.integrations.flash_attn_3": "_flash_attn_backward _flash_attn_forward flash_attn_combine flash_attn_func "
    "flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_with_kvcache get_scheduler_metadata",
    "attngen.integrations.flash_attn_4": "BlockSparseTensorsTorch flash_attn_func flash_attn_varlen_func",
    "attngen.integrations.flash_mla": "FlashMLASchedMeta flash_mla_sparse_fwd flash_mla_with_kvcache get_mla_metadata",
    "attngen.integrations.flex_attention": "AuxOutput AuxRequest BlockMask FlexKernelOptions and_masks "
    "create_block_mask create_mask create_nested_block_mask flex_attention noop_mask or_masks",
    "attngen.integrations.natten": "na1d na2d na3d",
    "attngen.integrations.sageattention": "sageattn sageattn_varlen",
    "attngen.integrations.sglang": "register",
    "attngen.integrations.torch_flash": "activate register",
    "attngen.integrations.transformers": "register use_pages",
    "attngen.integrations.vllm": "register",
    "attngen.integrations.vllm_flash_attn": "fa_version_unsupported_reason flash_attn_varlen_func "
    "get_scheduler_metadata is_fa_version_supported",
    "attngen.trees": "PackedTrees pack pack_answers",
    # what schedules from outside, and scripts around the pipeline, are written with
    "attngen.compile": "compile_source",
    "attngen.plan": "Plan plan",
    "attngen.plan.schedule": "Schedule",
    "attngen.plan.schedules": "named schedules with_schedule",
    "attngen.render": "render",
    "attngen.render.views.hopper_forward": "argument_lines",
    "attngen.schema": "expand load_spec load_spec_text preset",
    "attngen.tools.bench.plot": "STYLE plot",
    "attngen.tools.build.pipeline": "build compile_kernels prepare",
    "attngen.tools.explain.of_spec": "explain_spec",
}

#: Operators of no variant, in ``torch.ops.attngen``, which exported programs name.
OPERATORS = (
    "kv__append", "qkv__quantize", "scores__topk", "keys__index_scores", "keys__block_scores",
    "blocks__mask", "dropout__state", "dropout__draw",
)  # fmt: skip

COMMANDS = (
    "new", "spec", "check", "build", "list", "show", "explain", "verify", "bench", "tune", "package", "doctor", "cache",
)  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay(module: str) -> None:
    home = importlib.import_module(module)
    assert [name for name in PUBLIC[module].split() if not hasattr(home, name)] == []


def test_the_list_has_every_name_of_attngen() -> None:
    assert PUBLIC["attngen"].split() == sorted(attngen.__all__)
    modules = {name.rpartition(".")[2] for name in PUBLIC if name.startswith("attngen.integrations.")}
    assert {*modules, *PUBLIC["attngen.integrations"].split()} == set(attngen.integrations.__all__)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_stay(operator: str) -> None:
    assert hasattr(torch.ops.attngen, operator)


def test_commands_and_entry_points_stay() -> None:
    assert group.list_commands(click.Context(group)) == [*COMMANDS]
    own = {(point.group, point.name): point.value for point in distribution("attngen").entry_points}
    assert own == {
        ("console_scripts", "attngen"): "attngen.cli:main",
        ("hatch", "attngen"): "attngen.packaging.hook",
        ("vllm.general_plugins", "attngen"): "attngen.integrations.vllm:register",
        ("sglang.srt.plugins", "attngen"): "attngen.integrations.sglang:register",
    }
