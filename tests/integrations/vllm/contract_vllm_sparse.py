"""Sparse latent attention inside of a release of vLLM, on the CPU: run by ``engine_contracts``.

Configurations, the backend's choice, metadata builders and base classes are vLLM's own. Its operators that need a GPU
(which request a token belongs to, and positions as rows of the cache) stand here in torch, and attention is the eager
reference.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
from vllm import forward_context as forward
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import MLAAttention, sparse_mla_attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import metadata as metadata_operators
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from attngen.integrations.vllm import plugin
from tests.integrations.engines.index_batches import PAGE, index_batch
from tests.integrations.engines.sparse_batches import BLOCK, MIXED, sparse_batch
from tests.integrations.vllm import vllm_indexer_cases as indexer_cases
from tests.integrations.vllm import vllm_sparse_mla_cases as cases

SERVED = vllm.__version__.split("+")[0] in plugin.SPARSE_RELEASES or any(
    f"vllm-{release}" in vllm.__file__ for release in plugin.SPARSE_RELEASES
)
if SERVED:
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.mla import indexer as indexer_metadata
    from vllm.v1.kv_cache_interface import SparseCacheRole

    from attngen.integrations.vllm import indexer

#: DeepSeek-V3.2's form, with few of everything but columns of latent rows.
TINY = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 3,
    "num_hidden_layers": 1, "vocab_size": 128, "max_position_embeddings": 1024, "q_lora_rank": 32,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "index_topk": 24, "index_n_heads": 4, "index_head_dim": 128,
}  # fmt: skip

HOPPER = SimpleNamespace(major=9, minor=0)
GIVEN: dict[str, Any] = {
    "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
    "has_sink": False, "use_sparse": True, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": HOPPER, "attn_type": "decoder",
}  # fmt: skip


def backend() -> Any:
    plugin.register()
    return AttentionBackendEnum[plugin.SPARSE_MLA_NAME].get_class()


def test_its_name_is_known_to_the_command_line() -> None:
    plugin.register()
    name = plugin.SPARSE_MLA_NAME
    assert AttentionConfig(backend=name.lower()).backend is AttentionBackendEnum[name]
    assert backend().get_name() == name
    assert backend().is_mla()
    assert backend().is_sparse()


def test_configurations() -> None:
    validate = backend().validate_configuration
    if not SERVED:
        assert validate(**GIVEN) == [f"this release of vLLM; ATTNGEN_MLA_SPARSE is for {plugin.SPARSE_RELEASES[0]}"]
        return
    for allowed in (
        {}, {"head_size": 512}, {"dtype": torch.float16}, {"kv_cache_dtype": "fp8_ds_mla"},
        {"kv_cache_dtype": "fp8"}, {"use_dcp": True},
        {"use_kv_connector": True},
    ):  # fmt: skip
        assert validate(**{**GIVEN, **allowed}) == []
    for changed in (
        {"head_size": 320}, {"kv_cache_dtype": "fp8_e5m2"}, {"kv_cache_dtype": "fp8", "dtype": torch.float16},
        {"use_mla": False}, {"use_sparse": False}, {"block_size": 8},
        {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, {"use_batch_invariant": True}, {"has_sink": True},
        {"device_capability": SimpleNamespace(major=8, minor=0)}, {"use_pcp": True},
    ):  # fmt: skip
        assert len(validate(**{**GIVEN, **changed})) == 1, changed


def test_dense_backends_name_the_sparse_one() -> None:
    plugin.register()
    for name in ("ATTNGEN", "ATTNGEN_MLA"):
        said = AttentionBackendEnum[name].get_class().validate_configuration(**GIVEN)
        assert any("--attention-backend ATTNGEN_MLA_SPARSE" in reason for reason in said)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """vLLM's operators and streams that need a GPU, in torch."""
    with (
        mock.patch.object(sparse_mla_attention, "triton_convert_req_index_to_global_index", cases.convert),
        mock.patch.object(index_group, "triton_convert_req_index_to_global_index", cases.convert),
        mock.patch.object(metadata_operators, "compute_token_to_req_indices", cases.requests_of_tokens),
        mock.patch.object(index_group, "_create_side_stream"),
        mock.patch.object(index_group, "_create_event"),
        mock.patch.object(index_group, "current_stream"),
        mock.patch.object(sparse_mla_attention, "PIN_MEMORY", False),
    ):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("sparse")
    (folder / "config.json").write_text(json.dumps(TINY))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024, seed=0
    )


def config_of(model: Any) -> Any:
    plugin.register()
    return VllmConfig(
        model_config=model, cache_config=CacheConfig(block_size=BLOCK), parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
        ),
        device_config=DeviceConfig(device="cpu"), attention_config=AttentionConfig(backend=plugin.SPARSE_MLA_NAME),
    )  # fmt: skip


class Expansion(torch.nn.Linear):
    """The projection of latents to keys and values of each head, as vLLM's linear layers return results."""

    def __init__(self, heads: int) -> None:
        super().__init__(512, heads * 256, bias=False)
        torch.nn.init.normal_(self.weight, std=512**-0.5)

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(latents), None

    def of_heads(self) -> torch.Tensor:
        """Columns of keys, then of values, of each head: (512, heads, 256)."""
        return self.weight.detach().T.unflatten(1, (-1, 256))


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
def test_a_layer_runs_as_in_a_model(model: Any) -> None:
    """vLLM's layer: decoding and drafts in the absorbed form, and a prompt, all of whose keys are selected, over keys
    and values of each head; and the profiling run before any of it."""
    made = sparse_batch((1, 3, 140), (33, 50, 140))
    config, rows, project, heads = config_of(model), cases.buffer(made), Expansion(3), 3
    with (
        on_the_cpu(),
        torch.no_grad(),
        set_current_vllm_config(config),
        mock.patch.object(sparse_mla_attention, "get_tensor_model_parallel_world_size", return_value=1),
        mock.patch.dict(vars(config.model_config.hf_text_config), index_topk=256),
    ):
        layer = MLAAttention(
            num_heads=heads, scale=cases.SCALE, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            q_lora_rank=32, kv_lora_rank=512, kv_b_proj=project, cache_config=config.cache_config,
            prefix="layers.0.attn", attn_backend=backend(), use_sparse=True,
            indexer=SimpleNamespace(topk_indices_buffer=rows), topk_indices_buffer=rows,
            prefill_backend_cls=MLAPrefillBackendEnum["ATTNGEN"].get_class(),
        )  # fmt: skip
        expand = project.of_heads()
        layer.W_UK_T, layer.W_UV = expand[..., :128].permute(1, 2, 0), expand[..., 128:].transpose(0, 1)
        spec = layer.get_kv_cache_spec(config)
        builder = backend().get_builder_cls()(spec, ["layers.0.attn"], config, torch.device("cpu"))
        built = builder.build(0, cases.common(made, CommonAttentionMetadata))
        tokens, q = len(made.q), torch.randn(len(made.q), heads, 192)
        own = made.slots_of_tokens()
        new = made.cache.flatten(0, 1)[own]
        given = (q, new[:, :512], new[:, None, 512:], made.cache)
        assert not layer.forward_impl(*given, None, output=torch.ones(tokens, heads * 128)).any()
        out = layer.forward_impl(*given, built, output=torch.empty(tokens, heads * 128))
    assert (built.num_decodes, built.num_prefills, built.prefill.use_dense_mha) == (2, 1, True)
    lists = [row[row >= 0] for row in made.slots().long()]
    lists[4:] = [own[4 : 5 + place] for place in range(140)]
    for token, listed in enumerate(lists):
        keys = made.cache.flatten(0, 1)[listed].double()
        of_heads = torch.einsum("kl,lhd->khd", keys[:, :512], expand.double())
        logits = torch.einsum("hd,khd->hk", q[token, :, :128].double(), of_heads[..., :128])
        logits = (logits + q[token, :, 128:].double() @ keys[:, 512:].T) * cases.SCALE
        wanted = torch.einsum("hk,khd->hd", logits.softmax(-1), of_heads[..., 128:])
        torch.testing.assert_close(out[token].view(heads, 128).double(), wanted, atol=1e-4, rtol=1e-4)


def layer_and_builder(config: Any, made: Any, kv_cache_dtype: str, layers: int = 1) -> tuple[list[Any], Any]:
    """Layers of a model that share one selection, and the builder of their metadata."""
    heads, columns = made.q.shape[1:]
    latent = {
        "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": columns - 512,
        "qk_head_dim": columns - 384, "v_head_dim": 128, "kv_b_proj": None,
    }  # fmt: skip
    rows = cases.buffer(made)
    groups = index_group.SparseMLAIndexGroupBuilder(rows)
    impls = []
    with set_current_vllm_config(config), mock.patch.object(
        sparse_mla_attention, "get_tensor_model_parallel_world_size", return_value=1
    ):  # fmt: skip
        for number in range(layers):
            impls.append(backend().get_impl_cls()(
                heads, columns, cases.SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None, **latent,
                indexer=SimpleNamespace(topk_indices_buffer=rows) if number == 0 else None, topk_indices_buffer=rows,
                index_group_builder=groups,
            ))  # fmt: skip
        config.compilation_config.static_forward_context["layer"] = SimpleNamespace(prefill_backend=None, impl=impls[0])
        spec = MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=columns, dtype=torch.float32, cache_dtype_str=kv_cache_dtype
        )
        spec = backend().customize_spec(spec)
        builder = backend().get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    return impls, builder


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla", "fp8"])
@pytest.mark.parametrize("columns", [576, 512])
def test_a_mixed_batch(model: Any, columns: int, cache: str) -> None:
    made = sparse_batch(columns=columns, padded=2, extra_tokens=3)
    forms = {"auto": lambda: made, "fp8_ds_mla": made.packed, "fp8": lambda: made.in_e4m3(0.02)}
    made, of_layer = forms[cache](), SimpleNamespace(_k_scale=torch.tensor(0.02))
    tolerance = 1e-5 if cache == "auto" else 0.02
    with on_the_cpu():
        (layer,), builder = layer_and_builder(config_of(model), made, cache)
        built = builder.build(0, cases.common(made, CommonAttentionMetadata))
        cases.check(made, layer, built, tolerance=tolerance, layer=of_layer)
        cases.check(made, layer, built, gap=32, tolerance=tolerance, layer=of_layer)
    assert layer.supports_dense_mha_prefill == (columns == 576 or cache != "fp8_ds_mla")


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 3, 3)])
def test_decoding_of_layers_that_share_a_selection(model: Any, queries: tuple[int, ...]) -> None:
    """vLLM turns the positions of a group of layers into slots once, in its first layer."""
    made = sparse_batch(queries, (20, 33, 50))
    with on_the_cpu():
        layers, builder = layer_and_builder(config_of(model), made, "auto", layers=2)
        built = builder.build_for_cudagraph_capture(cases.common(made, CommonAttentionMetadata))
        with mock.patch.object(index_group, "triton_convert_req_index_to_global_index", side_effect=_into) as once:
            for layer in layers:
                cases.check(made, layer, built)
        assert once.call_count == 1
    assert type(builder)._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    assert builder.reorder_batch_threshold == 128


def _into(*args: Any, out: Any, valid_counts_out: Any, **options: Any) -> None:
    slots, counts = cases.convert(*args, **options)
    out.copy_(slots)
    valid_counts_out.copy_(counts)


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
def test_log_sum_exps_and_drafts(model: Any) -> None:
    made = sparse_batch(*MIXED)
    with on_the_cpu():
        (layer,), builder = layer_and_builder(config_of(model), made, "auto")
        layer.need_to_return_lse_for_decode = True
        cases.check(made, layer, builder.build(0, cases.common(made, CommonAttentionMetadata)), in_two_parts=False)
        alone = sparse_batch((1, 1), (20, 33))
        built = builder.build(0, cases.common(alone, CommonAttentionMetadata))
        built.req_id_per_token.fill_(-1)
        with mock.patch.dict(builder.update_draft_decode_metadata.__globals__,
                             compute_token_to_req_indices=cases.requests_of_tokens):  # fmt: skip
            builder.update_draft_decode_metadata(built)
    assert built.req_id_per_token.tolist() == [0, 1]


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
def test_the_caches_rows_are_whole_in_its_blocks() -> None:
    for name, dtype, bytes_of_row in (("auto", torch.bfloat16, 1152), ("fp8_ds_mla", torch.uint8, 656)):
        spec = MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype=dtype, cache_dtype_str=name,
            state_content_bytes=656 if name == "fp8_ds_mla" else None,
        )  # fmt: skip
        assert backend().customize_spec(spec).block_stride_alignment == bytes_of_row


@pytest.fixture
def model_module() -> Iterator[Any]:
    """The module of the models, with its own indexer again afterwards."""
    module = importlib.import_module("vllm.models.deepseek_v32.attention")
    theirs = module.sparse_attn_indexer
    yield module
    module.sparse_attn_indexer = theirs


@contextmanager
def forward_context(metadata: Any, mode: Any) -> Iterator[None]:
    """vLLM's context of a step."""
    given = {"attn_metadata": metadata, "cudagraph_runtime_mode": mode}
    with mock.patch.object(forward, "_forward_context", SimpleNamespace(**given)):
        yield


def index_builder(config: Any, drafts: int = 0) -> Any:
    """vLLM's builder of an indexer's metadata, for so many drafts of a request."""
    if drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=drafts, enable_adaptive_verification=False, parallel_drafting=False
        )
    spec = MLAAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer_metadata, "num_compute_units", return_value=1),
    ):
        return indexer_metadata.DeepseekV32IndexerMetadataBuilder(
            spec, [indexer_cases.CACHE], config, torch.device("cpu"), block_table_width=4
        )


def common_of(made: Any) -> Any:
    """vLLM's metadata of a batch of an indexer."""
    return CommonAttentionMetadata(
        query_start_loc=made.starts, query_start_loc_cpu=made.starts, seq_lens=made.used, num_reqs=len(made.lengths),
        num_actual_tokens=sum(made.queries), max_query_len=max(made.queries), max_seq_len=max(made.lengths),
        block_table_tensor=made.table, slot_mapping=torch.zeros(len(made.q), dtype=torch.int64),
        seq_lens_cpu_upper_bound=made.used,
    )  # fmt: skip


@contextmanager
def indexer_on_the_cpu(budget: int) -> Iterator[None]:
    """vLLM's operators of an indexer's metadata, in torch, and so many MiB of scores."""
    with (
        mock.patch.object(indexer_metadata, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", indexer_cases.build_chunk),
        mock.patch.object(indexer_metadata, "_PREPARE_UNIFORM_DECODE_KERNEL", indexer_cases.prepare_decode),
        mock.patch.object(indexer_metadata.envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", budget),
    ):
        yield


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
@pytest.mark.parametrize(
    ("queries", "lengths", "drafts", "chunks"),
    [
        ((1, 1, 70, 9), (33, 200, 70, 130), 0, 1),
        ((1, 2000, 70), (33, 2000, 70), 0, 17),
        ((1, 1, 1), (33, 1, 200), 0, 0),
        ((2, 2, 2), (33, 2, 200), 1, 0),
        ((4, 4), (33, 200), 3, 0),  # each token a request of its own
        ((3, 1, 4), (33, 70, 200), 3, 0),
    ],
)
def test_steps_of_an_indexer(
    model: Any, model_module: Any, queries: Any, lengths: Any, drafts: int, chunks: int
) -> None:
    made = index_batch(queries, lengths, extra_tokens=2, width=32 if chunks else 4)
    theirs = inspect.signature(model_module.sparse_attn_indexer)
    indexer.serve(indexer_cases.layer(model_module.DeepseekV32Indexer), config_of(model).parallel_config)
    assert model_module.sparse_attn_indexer.attngen
    indexer_cases.select(theirs.bind, made)
    assert "sparse_attn_indexer" in inspect.unwrap(
        model_module.DeepseekV32Attention._sparse_indexer_and_attn
    ).__code__.co_names  # fmt: skip
    builder = index_builder(config_of(model), drafts)
    with indexer_on_the_cpu(1):
        built = builder.build(0, common_of(made))
        assert len(built.prefill.chunks if built.prefill else ()) == chunks
        for mode in (CUDAGraphMode.NONE, *([CUDAGraphMode.FULL] if not chunks else [])):
            made.out.fill_(7)
            with forward_context({indexer_cases.CACHE: built}, mode):
                indexer_cases.select(model_module.sparse_attn_indexer, made, skip_topk_buffer_clear=False)
            made.check(made.out)
        with forward_context(None, CUDAGraphMode.NONE):
            indexer_cases.select(model_module.sparse_attn_indexer, made, pages=torch.tensor([]))


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
def test_layers_whose_indexer_is_served(model: Any, model_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_INDEXER", "1")
    monkeypatch.setattr(indexer, "_served", set())
    made, config = sparse_batch((1,), (20,)), config_of(model)
    one = indexer_cases.layer(model_module.DeepseekV32Indexer, topk_indices_buffer=cases.buffer(made))
    with (
        on_the_cpu(),
        set_current_vllm_config(config),
        mock.patch.object(sparse_mla_attention, "get_tensor_model_parallel_world_size", return_value=1),
    ):
        for given in (one, None):  # the second shares the selection of the first
            MLAAttention(
                num_heads=3, scale=cases.SCALE, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                q_lora_rank=32, kv_lora_rank=512, kv_b_proj=Expansion(3), cache_config=config.cache_config,
                prefix=f"layers.{given is None:d}.attn", attn_backend=backend(), use_sparse=True, indexer=given,
                topk_indices_buffer=one.topk_indices_buffer,
                prefill_backend_cls=MLAPrefillBackendEnum["ATTNGEN"].get_class(),
            )  # fmt: skip
    assert indexer._served == {indexer_cases.CACHE}
    assert model_module.sparse_attn_indexer.attngen


@pytest.mark.skipif(not SERVED, reason="it is for other releases")
def test_rows_of_an_indexer_on_two_ranks(model: Any, model_module: Any) -> None:
    """vLLM's ranks share the tokens of prompts and exchange what they selected."""
    made, halves = index_batch((1, 70, 9), (33, 70, 130)), []
    indexer.serve(indexer_cases.layer(model_module.DeepseekV32Indexer), config_of(model).parallel_config)
    builder = index_builder(config_of(model))
    for rank in range(2):
        with (
            indexer_on_the_cpu(1),
            mock.patch.object(sparse_attn_indexer, "get_tensor_model_parallel_rank", return_value=rank),
            mock.patch.object(sparse_attn_indexer, "get_tp_group") as group,
        ):
            built = builder.build(0, common_of(made))
            built.prefill.row_shard_sizes = [50, 29]
            group().all_gatherv.side_effect = lambda local, **_: halves.append(local) or made.out[1:]
            with forward_context({indexer_cases.CACHE: built}, CUDAGraphMode.NONE):
                indexer_cases.select(model_module.sparse_attn_indexer, made)
    assert [len(half) for half in halves] == [50, 29]
    made.check(torch.cat([made.out[:1], *halves]))
