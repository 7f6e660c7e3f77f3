"""The backend inside of a release of vLLM, on the CPU: run by ``engine_contracts``, which puts vLLM on the path.

vLLM's binaries are not there: configurations, builders, layers and registries are vLLM's own, and the attention is the
eager reference.
"""

from __future__ import annotations

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
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.utils import torch_utils
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec

from attngen.integrations.vllm import plugin
from tests.integrations.engines import engine_batches
from tests.integrations.vllm import vllm_cases, vllm_mla_cases
from tests.integrations.vllm.vllm_cases import CASES, Case, Engine, check

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 128, "head_dim": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024, seed=0
    )


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    patches: list[Any] = []

    def config(images: bool = False, mask: Any = None, rswa_window: int | None = None) -> Any:
        made = VllmConfig(
            model_config=model, cache_config=CacheConfig(block_size=16), parallel_config=ParallelConfig(),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
            ),
            device_config=DeviceConfig(device="cpu"), additional_config={} if mask is None else {"attngen": mask},
            attention_config=AttentionConfig(backend="ATTNGEN"),
        )  # fmt: skip
        for name, value in (("is_mm_prefix_lm", images), ("rswa_window", rswa_window)):
            patches.append(mock.patch.object(ModelConfig, name, value))
            patches[-1].start()
        return made

    @contextmanager
    def current(config: Any) -> Iterator[None]:
        with set_current_vllm_config(config):
            yield

    plugin.register()
    yield Engine(CommonAttentionMetadata, config, current, AttentionType)
    for patch in reversed(patches):
        patch.stop()


def backend() -> Any:
    plugin.register()
    return AttentionBackendEnum["ATTNGEN"].get_class()


def test_the_release_is_one_of_those_that_are_named() -> None:
    installed = vllm.__version__ if vllm.__version__ != "dev" else Path(vllm.__file__).parents[1].name.split("-")[-1]
    assert installed in plugin.RELEASES


def test_its_name_is_known_to_the_command_line() -> None:
    plugin.register()
    plugin.register()
    assert AttentionConfig(backend="attngen").backend is AttentionBackendEnum["ATTNGEN"]
    assert AttentionConfig(backend_per_kind={"sliding_window": "ATTNGEN"}).backend_per_kind
    assert backend().get_name() == "ATTNGEN"


@pytest.mark.parametrize("name", CASES)
def test_results(engine: Engine, name: str) -> None:
    check(engine, CASES[name])


def test_configurations() -> None:
    hopper = SimpleNamespace(major=9, minor=0)
    given: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": True, "use_per_head_quant_scales": True,
        "device_capability": hopper, "attn_type": "decoder", "has_sliding_window": True, "use_non_causal": True,
        "use_batch_invariant": True, "use_kv_connector": True, "use_adaptive_verification": True, "use_rswa": True,
    }  # fmt: skip
    validate = backend().validate_configuration
    assert validate(**given) == []
    for kind in AttentionType:
        assert validate(**{**given, "attn_type": kind}) == []
    for dtype in ("fp8", "fp8_e4m3", "fp8_per_token_head", "bfloat16", "float16", None):
        assert validate(**{**given, "kv_cache_dtype": dtype}) == []
    assert validate(**{**given, "kv_cache_dtype": "fp8_e5m2"}) == [
        "a cache in fp8_e5m2; there are auto, float16, bfloat16, fp8, fp8_e4m3, fp8_per_token_head"
    ]
    assert "MLA: --attention-backend ATTNGEN_MLA serves it" in validate(**{**given, "use_mla": True})
    assert validate(**{**given, "dtype": torch.float32}) == [
        "dtype torch.float32 is not torch.float16 or torch.bfloat16"
    ]
    assert validate(**{**given, "block_size": 8}) == ["block_size not supported"]
    assert validate(**{**given, "use_pcp": True}) == ["PCP not supported"]
    assert validate(**{**given, "has_sliding_window": False, "use_dcp": True}) == []


def test_any_layout_of_the_cache_is_taken() -> None:
    layouts = get_supported_kv_cache_layouts([backend()])
    assert {layout.name for layout in layouts} >= {"LBNHC", "LBHNC", "BLNHC", "BLHNC"}


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC"])
def test_layouts(engine: Engine, layout: str) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout].layer_view_order
    for scaled in ("", "row"):
        check(engine, Case(order=tuple(axis for axis in order if axis < 3), fp8=scaled))


def test_rows_with_scales_take_as_many_bytes_as_in_vllms_backend() -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    for name in ("auto", "fp8", "fp8_per_token_head"):
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=128, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(name)
        )
        assert backend().customize_spec(spec) == TritonAttentionBackend.customize_spec(spec)


def test_graphs_of_any_batch(engine: Engine) -> None:
    builder = backend().get_builder_cls()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    assert builder.get_cudagraph_support(engine.config(), spec) == AttentionCGSupport.ALWAYS
    assert builder.get_cudagraph_support(engine.config(images=True), spec) == AttentionCGSupport.UNIFORM_BATCH


def layer_of(engine: Engine, config: Any, **options: Any) -> Any:
    with engine.current(config):
        return Attention(4, 32, 32**-0.5, 2, cache_config=config.cache_config, prefix="layers.0.attn",
                         attn_backend=options.pop("attn_backend", backend()), **options)  # fmt: skip


def test_a_layer_runs_as_in_a_model(engine: Engine) -> None:
    """vLLM's layer, with its context of a forward: cache update, attention, and the profiling run before any of it."""
    config = engine.config()
    layer = layer_of(engine, config)
    case = Case(padded=1, extra_tokens=3)
    made = engine_batches.batch(case.queries, case.lengths, padded=1, extra_tokens=3)
    q, k, v = (t.flatten(1) for t in (made.q, made.k, made.v))
    with engine.current(config), set_forward_context(None, config):
        assert not layer(q, k, v).any()
    layer.kv_cache = made.cache
    spec = layer.get_kv_cache_spec(config)
    builder = layer.get_attn_backend().get_builder_cls()(spec, ["layers.0.attn"], config, torch.device("cpu"))
    built = builder.build(0, vllm_cases.metadata(engine, case, made))
    with engine.current(config), set_forward_context(
        {"layers.0.attn": built}, config, slot_mapping={"layers.0.attn": made.slots}
    ):  # fmt: skip
        out = layer(q, k, v)
    wanted = made.expected(lambda b, q, kv: kv <= q, 32**-0.5)
    torch.testing.assert_close(out.view(-1, 4, 32)[: len(wanted)].double(), wanted, atol=1e-5, rtol=1e-5)


def test_cross_attention_by_its_wrapper(engine: Engine) -> None:
    config = engine.config()
    cross = create_cross_attention_backend(backend())
    made = engine_batches.batch((30, 12), (30, 12))  # all keys of both encoders are new
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    with engine.current(config):
        builder = cross.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        impl = cross.get_impl_cls()(4, 32, 32**-0.5, 2, attn_type=AttentionType.ENCODER_DECODER)
    queries, starts = torch.randn(5, 4, 32), torch.tensor([0, 3, 5], dtype=torch.int32)
    encoder = torch.tensor([30, 12], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([3, 2], dtype=torch.int32),
        num_reqs=2, num_actual_tokens=5, max_query_len=3, max_seq_len=3, block_table_tensor=made.table,
        slot_mapping=torch.zeros(5, dtype=torch.int64), encoder_seq_lens=encoder,
        encoder_seq_lens_cpu=encoder.numpy(), seq_lens_cpu_upper_bound=torch.tensor([3, 2], dtype=torch.int32),
    )  # fmt: skip
    layer = SimpleNamespace(kv_sharing_target_layer_name=None)
    out = impl.forward(layer, queries, made.k, made.v, made.cache, builder.build(0, common), torch.empty(5, 4, 32))
    for b, rows in enumerate((slice(0, 3), slice(3, 5))):
        seen = torch.ones(rows.stop - rows.start, int(encoder[b]), dtype=torch.bool)
        wanted = engine_batches.attention(queries[rows], made.keys[b], made.values[b], seen, 32**-0.5)
        torch.testing.assert_close(out[rows].double(), wanted, atol=1e-5, rtol=1e-5)


def test_encoders_by_their_wrapper(engine: Engine) -> None:
    config = engine.config()
    wrapped = create_encoder_only_attention_backend(backend())
    made = engine_batches.batch((9, 20), (9, 20))
    with engine.current(config):
        builder = wrapped.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], config, torch.device("cpu"))
        impl = wrapped.get_impl_cls()(4, 32, 32**-0.5, 2, attn_type=AttentionType.ENCODER_ONLY)
    built = builder.build(0, vllm_cases.metadata(engine, Case(queries=(9, 20), lengths=(9, 20)), made))
    assert built.causal is False
    out = impl.forward(None, made.q, made.k, made.v, torch.empty(0), built, torch.empty_like(made.q))
    wanted = made.expected(lambda b, q, kv: torch.ones(len(q), kv.shape[1], dtype=torch.bool), 32**-0.5)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_chunks_by_their_wrapper(engine: Engine) -> None:
    """Llama 4's chunks: vLLM makes a request of each chunk."""
    config = engine.config()
    wrapped = create_chunked_local_attention_backend(backend(), 32)
    made = engine_batches.batch((5, 1, 40), (70, 33, 40))
    with engine.current(config):
        spec = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=32)
        builder = wrapped.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        impl = wrapped.get_impl_cls()(4, 32, 32**-0.5, 2)
    assert builder.get_cudagraph_support(config, spec) == AttentionCGSupport.NEVER
    case = Case(queries=(5, 1, 40), lengths=(70, 33, 40))
    unpinned = {"PIN_MEMORY": False, "is_pin_memory_available": lambda: False}  # there is no GPU
    with mock.patch.multiple(torch_utils, **unpinned):
        built = builder.build(0, vllm_cases.metadata(engine, case, made))
    impl.do_kv_cache_update(None, made.k, made.v, made.cache, made.slots)
    out = impl.forward(None, made.q, made.k, made.v, made.cache, built, torch.empty_like(made.q))
    wanted = made.expected(lambda b, q, kv: (kv <= q) & (kv // 32 == q // 32), 32**-0.5)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    again = builder.update_block_table(built, made.table, made.slots)
    assert torch.equal(again.block_table, built.block_table)


def mla(name: str) -> Any:
    plugin.register()
    if name == "prefill":
        return MLAPrefillBackendEnum["ATTNGEN"].get_class()
    return AttentionBackendEnum["ATTNGEN_MLA"].get_class()


def test_latent_attention_is_configured() -> None:
    hopper = SimpleNamespace(major=9, minor=0)
    given: dict[str, Any] = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": hopper, "attn_type": "decoder", "use_batch_invariant": True,
    }  # fmt: skip
    backend = mla("decode")
    assert backend.is_mla()
    assert backend.validate_configuration(**given) == []
    assert backend.validate_configuration(**{**given, "kv_cache_dtype": "fp8_ds_mla"}) == []
    for changed in (
        {"kv_cache_dtype": "fp8_ds_mla", "head_size": 512}, {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16},
        {"head_size": 320}, {"kv_cache_dtype": "fp8"}, {"use_mla": False}, {"use_sparse": True}, {"block_size": 8},
        {"device_capability": SimpleNamespace(major=8, minor=0)},
    ):  # fmt: skip
        assert len(backend.validate_configuration(**{**given, **changed})) == 1, changed
    assert AttentionConfig(mla_prefill_backend="ATTNGEN").mla_prefill_backend is MLAPrefillBackendEnum["ATTNGEN"]
    dimensions = SimpleNamespace(dtype=torch.bfloat16, mla_dimensions=MLADimensions(
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ))  # fmt: skip
    assert mla("prefill").validate_configuration(hopper, dimensions) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 5, 3)])
def test_latent_attention_of_few_queries(engine: Engine, queries: tuple[int, ...], packed: bool) -> None:
    """vLLM's own builder and base classes; the layer, its projections and the cache update are not needed for this."""
    config, backend, made = engine.config(), mla("decode"), vllm_mla_cases.decode(queries, (40, 33, 7))
    made = made.packed() if packed else made
    latent = {
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128
    }  # fmt: skip
    prefill = mla("prefill")(
        num_heads=3, scale=vllm_mla_cases.SCALE, vllm_config=config,
        **{name: size for name, size in latent.items() if name != "q_lora_rank"},
    )  # fmt: skip
    layer = SimpleNamespace(**latent, prefill_backend=prefill, num_heads=3)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    with (
        engine.current(config),
        mock.patch.object(mla_attention, "get_num_attention_heads_from_layers", return_value=3),
        mock.patch.object(ModelConfig, "get_head_size", return_value=576),
    ):
        config.compilation_config.static_forward_context["layer"] = layer
        impl = backend.get_impl_cls()(
            3, 576, vllm_mla_cases.SCALE, 1, None, None, "fp8_ds_mla" if packed else "auto", None,
            AttentionType.DECODER, None, **latent, qk_head_dim=192, kv_b_proj=None,
        )  # fmt: skip
        builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        built = builder.build(0, made.common(CommonAttentionMetadata))
    assert (built.num_decodes, built.num_prefills) == (3, 0)
    made.check(impl, built, in_two_parts=True, tolerance=0.02 if packed else 1e-5)


def test_prompts_of_latent_attention(engine: Engine) -> None:
    vllm_mla_cases.check_prompts(
        mla("prefill")(
            num_heads=3, scale=vllm_mla_cases.SCALE, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, vllm_config=engine.config(),
        )
    )  # fmt: skip
