"""The backend of vLLM, with a stub in vLLM's place; its releases themselves: ``engine_contracts``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.integrations.engines import layers as engines
from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import vllm_stub


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    with imported_with(vllm_stub, "attngen.integrations.vllm.backend", "tests.integrations.vllm.vllm_cases") as module:
        yield module


@contextmanager
def current(config: Any) -> Iterator[None]:
    vllm_stub.CURRENT[0] = config
    yield
    vllm_stub.CURRENT[0] = None


def config(images: bool = False, mask: Any = None, rswa_window: int | None = None) -> Any:
    made = vllm_stub.Config()
    made.model_config = SimpleNamespace(is_mm_prefix_lm=images, rswa_window=rswa_window)
    if mask is not None:
        made.additional_config["attngen"] = mask
    return made


def engine(cases: Any) -> Any:
    return cases.Engine(vllm_stub.CommonAttentionMetadata, config, current, vllm_stub.AttentionType)


NAMES = (
    "mixed", "bfloat16", "decoding alone", "blocks side by side", "heads outermost", "blocks of 32", "window", "sinks",
    "sinks and window", "softcap", "softcap and window", "alibi", "alibi and window", "not causal",
    "not causal, window", "causal by request", "causal by request, window", "images", "images beyond the chunk",
    "images and window", "images within the window", "images and softcap", "no image in this batch",
    "prompts and windows", "fp8", "fp8 by head", "fp8, head dim 512", "fp8 by row",
    "fp8 by row, heads within rows", "fp8 by row, heads outermost", "padded requests and tokens", "captured",
    "encoder", "encoder, window", "cross", "shared blocks", "shared blocks, drafts", "shared blocks, captured",
    "shared blocks in 8 bits", "shared blocks and a window",
)  # fmt: skip


def test_every_case_is_run(cases: Any) -> None:
    assert set(NAMES) == set(cases.CASES)


@pytest.mark.parametrize("name", NAMES)
def test_results(cases: Any, name: str) -> None:
    cases.check(engine(cases), cases.CASES[name])


@pytest.mark.parametrize(
    ("name", "prefixes"), [*((name, 1) for name in NAMES), *((name, 3) for name in NAMES if name.startswith("shared"))]
)
def test_shared_blocks_are_read_once(
    cases: Any, name: str, prefixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With the option, results are the same, and prefixes are found where there are any."""
    monkeypatch.setenv("ATTNGEN_SHARED_PREFIX", str(prefixes))
    lengths: list[int] = []
    find = cases.vllm_backend.shared_prefix

    def noted(*given: Any, **options: Any) -> Any:
        prefix = find(*given, **options)
        lengths.append(int(prefix.length.max()))
        return prefix

    monkeypatch.setattr(cases.vllm_backend, "shared_prefix", noted)
    cases.check(engine(cases), cases.CASES[name])
    serves = name.startswith("shared blocks") and "window" not in name
    assert (max(lengths, default=0) > 0) == serves


def test_a_number_of_prefixes_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_SHARED_PREFIX", "many")
    with pytest.raises(CallError, match="must be the most prefixes that requests of a batch share, got 'many'"):
        engines.shared_prefixes()


LANDMARKS = attngen.variant("q_pos >= kv and (q_pos - kv < 4 or kv % 8 == 0)", name="landmarks")


def landmarks(b: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & ((q - kv < 4) | (kv % 8 == 0))


@pytest.mark.parametrize(
    "mask", [engines.Mask(LANDMARKS), f"{__name__}:LANDMARKS", {"mask": f"{__name__}:LANDMARKS", "layers": "full"}]
)
def test_a_mask_of_ones_own(cases: Any, mask: Any) -> None:
    case = cases.Case(mask=mask, seen=landmarks)
    cases.check(engine(cases), case)


def test_a_preset_with_its_arguments_from_the_environment(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_MASK", '{"mask": "chunked", "arguments": {"chunk": 8}}')
    case = cases.Case(seen=lambda b, q, kv: (kv <= q) & (kv // 8 == q // 8))
    cases.check(engine(cases), case)


def test_arguments_of_each_step(cases: Any) -> None:
    variant = attngen.variant(
        "kv <= q_pos and kv >= lowest[b]", name="lowest", tensors={"lowest": {"dtype": "int32", "shape": ["b"]}}
    )
    mask = engines.Mask(variant, lambda step: {"lowest": (step.lengths - 3).int()})
    case = cases.Case(queries=(1, 1), lengths=(20, 9), mask=mask, seen=lambda b, q, kv: kv >= (20, 9)[b] - 3)
    cases.check(engine(cases), case)


def test_a_mask_for_layers_with_windows_leaves_others(cases: Any) -> None:
    mask = engines.Mask(LANDMARKS, layers="sliding")
    cases.check(engine(cases), cases.Case(mask=mask))
    cases.check(engine(cases), cases.Case(mask=mask, window=5, seen=landmarks))


def test_a_mask_that_ignores_what_the_layer_has_is_refused(cases: Any) -> None:
    with pytest.raises(CallError, match="the layer has sinks, but the mask 'landmarks' declares no 'sinks'"):
        cases.run(engine(cases), cases.Case(mask=engines.Mask(LANDMARKS), sinks=True))
    with pytest.raises(CallError, match="the mask 'chunked' needs chunk"):
        cases.run(engine(cases), cases.Case(mask="chunked"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"variant": "x"}, "a mask is a name, or a mapping"),
        ({"mask": "causal", "layer": "full"}, "a mask has no field 'layer'"),
        ({"mask": "causal", "layers": "some"}, "layers of a mask must be one of all, full, sliding"),
        ("no_such_module:mask", "cannot be imported"),
        ("{", "is not JSON"),
    ],
)
def test_wrong_masks_say_what_is_wrong(setting: Any, words: str) -> None:
    with pytest.raises(CallError, match=words):
        engines.configured(setting)


def test_a_profiling_run_gives_zeros(cases: Any) -> None:
    with current(config()):
        impl = cases.vllm_backend.AttngenImpl(4, 32, 0.1, 2)
    output = torch.full((7, 4, 32), torch.nan)
    assert impl.forward(None, output, None, None, None, None, output) is output
    assert not output.any()


def test_batches_do_not_change_a_row(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases.vllm_backend.envs, "VLLM_BATCH_INVARIANT", True)
    with current(config()):
        assert cases.vllm_backend.AttngenImpl(4, 32, 0.1, 2)._split_size == engines.INVARIANT_SPLIT
    cases.check(engine(cases), cases.Case())


def test_what_layers_combine_is_refused_in_words(cases: Any) -> None:
    with current(config()), pytest.raises(NotImplementedError, match="ATTNGEN does not serve soft-capping together"):
        cases.vllm_backend.AttngenImpl(4, 32, 0.1, 2, None, None, "auto", 30.0, sinks=torch.zeros(4))


def test_what_is_not_served_is_said_in_words(cases: Any) -> None:
    validate = cases.vllm_backend.AttngenBackend.validate_configuration
    hopper, ada = SimpleNamespace(major=9, minor=0), SimpleNamespace(major=8, minor=9)
    given = {"head_size": 128, "dtype": torch.bfloat16, "use_mla": False, "device_capability": hopper}
    assert validate(**given) == []
    assert "head size 300 is not a multiple of 8 from 8 to 512" in validate(**{**given, "head_size": 300})
    assert validate(**{**given, "head_size": 512}) == []
    for size in (256, 512):  # layers of one model may have both
        assert validate(**{**given, "head_size": size}, kv_cache_dtype="fp8") == []
    assert validate(**{**given, "head_size": 264}, kv_cache_dtype="fp8") == [
        "head size 264 over a cache in fp8 is not a multiple of 16 from 16 to 512"
    ]
    assert validate(**given, kv_cache_dtype="fp8_per_token_head") == []
    assert "MLA: --attention-backend ATTNGEN_MLA serves it" in validate(**{**given, "use_mla": True})
    volta, ampere, blackwell = (SimpleNamespace(major=major, minor=0) for major in (7, 8, 10))
    for card, size, dtype, refused in (
        (volta, 128, "auto", "keys in pages"), (blackwell, 128, "auto", "keys in pages"), (ampere, 128, "auto", None),
        (ampere, 128, "fp8", "caches in e4m3"), (ampere, 512, "auto", "head dims beyond 256"), (ada, 128, "fp8", None),
        (ada, 128, "fp8_per_token_head", "scales of pages"),
    ):  # fmt: skip
        reasons = validate(**{**given, "device_capability": card, "head_size": size, "kv_cache_dtype": dtype})
        number = f"sm{card.major}{card.minor}"
        assert [refused] * bool(refused) == [reason.partition(", of which")[0] for reason in reasons], number
        assert all(reason.endswith(f"; the card is {number}") for reason in reasons)
    apart = validate(**given, use_dcp=True, has_sliding_window=True)
    assert apart == ["a sliding window with decode context parallelism: a rank's keys are not consecutive"]


@dataclass(frozen=True)
class CacheSpec:
    """Fields of vLLM's description of a cache that the backend reads."""

    per_token_head: bool
    head_size: int = 128
    head_size_v: int = 128
    state_content_bytes: int | None = None

    @property
    def kv_quant_mode(self) -> Any:
        return SimpleNamespace(is_per_token_head=self.per_token_head)


def test_rows_have_room_for_their_scales(cases: Any) -> None:
    customize = cases.vllm_backend.AttngenBackend.customize_spec
    assert customize(CacheSpec(per_token_head=True)).state_content_bytes == 2 * 128 + 8
    for kept in (CacheSpec(per_token_head=False), CacheSpec(per_token_head=True, state_content_bytes=300)):
        assert customize(kept) is kept


def test_scales_of_rows_need_contiguous_blocks(cases: Any) -> None:
    cache = torch.zeros(3, 2, 16, 80, dtype=torch.uint8)[..., :72].view(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="in blocks that are not contiguous"):
        cases.vllm_backend._rows_and_scales(cache, 32)


def test_graphs_serve_any_batch_but_with_images(cases: Any) -> None:
    support = cases.vllm_backend.AttngenMetadataBuilder.get_cudagraph_support
    assert support(config(), None) == vllm_stub.AttentionCGSupport.ALWAYS
    assert support(config(images=True), None) == vllm_stub.AttentionCGSupport.UNIFORM_BATCH


def test_the_table_of_a_graph_has_all_columns(cases: Any) -> None:
    case = cases.Case()
    made = cases.engine_batches.batch(case.queries, case.lengths)
    common = cases.metadata(engine(cases), case, made)
    spec = SimpleNamespace(block_size=16)
    builder = cases.vllm_backend.AttngenMetadataBuilder(spec, [], config(), torch.device("cpu"))
    eager, captured = builder.build(0, common), builder.build_for_cudagraph_capture(common)
    assert eager.batch(16).page_table.shape[1] == 3 == -(-max(case.lengths) // 16)
    assert captured.batch(16).page_table is made.table
    assert builder.build(0, common, fast_build=True).batch(16).page_table is made.table
    other = builder.update_block_table(eager, made.table.flip(0), made.slots)
    assert other.batch(16).page_table[0, 0] == made.table[-1, 0]


def test_parts_of_ranks_are_joined(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode context parallelism: a rank has each second key of what came before, and its own heads of the queries."""
    backend = cases.vllm_backend
    made = cases.engine_batches.batch((2, 1), (21, 12), kv_heads=1)
    scale, ranks = 32**-0.5, 2
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Group:
        world_size, rank_in_group = ranks, 0

        def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
            return torch.cat([t, t], dim)  # both ranks have the same queries here

    def combine(out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool) -> Any:
        parts.append((out, lse))
        if len(parts) < ranks:
            return out[:, :4], lse[:, :4]
        outs, lses = zip(*parts, strict=True)
        joined, log = attngen.merge(list(outs), [one.transpose(0, 1) for one in lses])
        return joined[:, :4], log.transpose(0, 1)[:, :4]

    monkeypatch.setattr(backend, "get_dcp_group", Group)
    monkeypatch.setattr(backend.dcp, "cp_lse_ag_out_rs", combine)
    outputs = []
    for rank in range(ranks):
        monkeypatch.setattr(backend, "get_dcp_world_size_and_rank", lambda enabled, rank=rank: (ranks, rank))
        given = config()
        given.parallel_config.decode_context_parallel_size = ranks
        spec = SimpleNamespace(block_size=16, dcp_sharded=True)
        builder = backend.AttngenMetadataBuilder(spec, [], given, torch.device("cpu"))
        with current(given):
            impl = backend.AttngenImpl(4, 32, scale, 1)
        here = torch.zeros(5, 1, 16, 64)
        table = torch.tensor([[1], [2]], dtype=torch.int32)
        for b, before in enumerate((19, 11)):
            mine = torch.arange(rank, before, ranks)
            here[table[b, 0], :, : len(mine), :32] = made.keys[b][mine].transpose(0, 1)
            here[table[b, 0], :, : len(mine), 32:] = made.values[b][mine].transpose(0, 1)
        common = cases.metadata(engine(cases), cases.Case(queries=(2, 1), lengths=(21, 12)), made)
        common = common.replace(block_table_tensor=table)
        output = torch.full_like(made.q, torch.nan)
        impl.forward(SimpleNamespace(), made.q, made.k, made.v, here, builder.build(0, common), output)
        outputs.append(output)
    wanted = made.expected(lambda b, q, kv: kv <= q, scale)
    torch.testing.assert_close(outputs[-1].double(), wanted, atol=1e-5, rtol=1e-5)


def test_registering_twice_is_the_same_as_once(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.integrations.vllm import plugin as vllm

    paths: dict[Any, str] = {}
    members: dict[str, dict[str, Any]] = {}
    for module, enum, register in (
        ("vllm.v1.attention.backends.registry", "AttentionBackendEnum", "register_backend"),
        ("vllm.v1.attention.backends.mla.prefill.registry", "MLAPrefillBackendEnum", "register_mla_prefill_backend"),
    ):
        known = members[enum] = {}

        def note(key: Any, path: str, known: dict[str, Any] = known, enum: str = enum) -> None:
            if isinstance(key, str):
                assert key not in known
                known[key] = (enum, key)
                key = known[key]
            paths[key] = path

        monkeypatch.setattr(sys.modules[module], enum, SimpleNamespace(__members__=known))
        monkeypatch.setattr(sys.modules[module], register, note)
    vllm.register()
    once = dict(paths)
    vllm.register()
    assert paths == once
    assert {enum: set(known) for enum, known in members.items()} == {
        "AttentionBackendEnum": {"ATTNGEN", "ATTNGEN_MLA", "ATTNGEN_MLA_SPARSE"},
        "MLAPrefillBackendEnum": {"ATTNGEN"}
    }  # fmt: skip
    for (_, name), path in paths.items():
        module, _, of = path.rpartition(".")
        assert getattr(importlib.import_module(module), of).get_name() == name
