"""The backends of vLLM and SGLang on the GPU, with stubs in the engines' places: every case of their CPU tests, larger,
against float64; a captured graph that serves another batch; rows whose bits do not depend on their batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import indexed
from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub
from tests.integrations.sglang.test_sglang import NAMES as SGLANG_CASES
from tests.integrations.vllm import vllm_stub
from tests.integrations.vllm.test_vllm import NAMES

#: Cases of SGLang, but for those with a pool of windows, and in graphs, whose stubs are on the CPU.
SGLANG_NAMES = [name for name in SGLANG_CASES if "graph" not in name and "pool" not in name]

#: Factor by which requests, windows and images are longer than in the tests on the CPU.
TIMES = 13


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    indexed("engines")
    registry.clear()


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
    made.scheduler_config.max_num_batched_tokens = 8192
    return made


def engine(cases: Any) -> Any:
    return cases.Engine(vllm_stub.CommonAttentionMetadata, config, current, vllm_stub.AttentionType, "cuda")


def larger(case: Any) -> Any:
    """A case for kernels: head dim 128 (256 with images and a soft cap, or 512), bf16, groups of four heads."""
    encoder = case.kind == "encoder_only"
    queries = tuple(n if n == 1 and not encoder else n * TIMES for n in case.queries)
    images = case.images and {b: [(x * TIMES, y * TIMES) for x, y in pairs] for b, pairs in case.images.items()}
    prompts = case.prompts and tuple(n * TIMES for n in case.prompts)
    return replace(
        case, queries=queries, lengths=tuple(n * TIMES for n in case.lengths), images=images, prompts=prompts,
        window=case.window and case.window * TIMES, prompt_window=case.prompt_window * TIMES, heads=8,
        dim=256 if case.images and case.softcap else max(case.dim, 128), dtype=torch.bfloat16,
        model={name: value * TIMES for name, value in case.model.items()},
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_results(cases: Any, name: str) -> None:
    cases.check(engine(cases), larger(cases.CASES[name]))


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("shared blocks", 1), ("shared blocks, drafts", 3), ("shared blocks, captured", 1),
        ("shared blocks, captured", 2), ("shared blocks in 8 bits", 2),
    ],
)  # fmt: skip
def test_shared_blocks(cases: Any, name: str, prefixes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_SHARED_PREFIX", str(prefixes))
    case = cases.CASES[name]
    cases.check(engine(cases), replace(larger(case), queries=case.queries, shared=case.shared * TIMES))


@pytest.mark.parametrize("shared", [0, 5])
def test_a_graph_serves_another_batch(cases: Any, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured for four requests of one token; replayed for three others of other lengths, and one of padding."""
    monkeypatch.setenv("ATTNGEN_SHARED_PREFIX", str(int(shared > 0)))
    dim, scale = 128, 128**-0.5
    made = cases.engine_batches.batch(
        (1, 1, 1), (900, 16, 333), heads=8, dim=dim, dtype=torch.bfloat16, padded=1, extra_tokens=1, device="cuda",
        shared=shared,
    )  # fmt: skip
    case = cases.Case(queries=(1, 1, 1), lengths=(900, 16, 333), padded=1, extra_tokens=1)
    common = cases.metadata(engine(cases), case, made)
    lengths, table = common.seq_lens.clone(), made.table.clone()
    builder = cases.vllm_backend.AttngenMetadataBuilder(SimpleNamespace(), [], config(), torch.device("cuda"))
    with current(config()):
        impl = cases.vllm_backend.AttngenImpl(8, dim, scale, 2)
    common.seq_lens.fill_(1)
    made.table.zero_()
    slots = made.slots.clone()
    made.slots.fill_(-1)
    built = builder.build_for_cudagraph_capture(common)
    output = torch.empty_like(made.q)

    def step() -> None:
        impl.do_kv_cache_update(None, made.k, made.v, made.cache, made.slots)
        impl.forward(None, made.q, made.k, made.v, made.cache, built, output)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    common.seq_lens.copy_(lengths)
    made.table.copy_(table)
    made.slots.copy_(slots)
    output.fill_(torch.nan)
    graph.replay()
    wanted = made.expected(lambda b, q, kv: kv <= q, scale)
    assert float((output[:3].cpu().double() - wanted).abs().max()) <= 0.02


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_of_many_steps(cases: Any, fp8: bool) -> None:
    """Layers with caches of their own, whose later ones repeat the launches of the first: decoding, and beside prompts,
    which run on a stream of their own."""
    layers, heads, dim = 3, 8, 128
    scales = [(torch.tensor(0.02 + 0.005 * n), torch.tensor(0.03)) for n in range(layers)]
    with current(config()):
        impls = [
            cases.vllm_backend.AttngenImpl(heads, dim, dim**-0.5, 2, None, None, "fp8" if fp8 else "auto")
            for _ in range(layers)
        ]
    builder = cases.vllm_backend.AttngenMetadataBuilder(SimpleNamespace(), [], config(), torch.device("cuda"))
    for seed, (queries, lengths) in enumerate((
        ((1,) * 9, tuple(range(300, 309))), ((1,) * 9, tuple(range(500, 509))), ((1, 1, 1, 200), (900, 40, 600, 300)),
        ((1,) * 7, (30,) * 7), ((1, 1, 100, 90), (700, 3, 100, 333)), ((1,) * 9 + (300,), (500,) * 10),
        ((1, 1, 180), (640, 41, 290)), ((1, 1, 1, 1, 170, 31), (333, 41, 290, 77, 170, 31)), ((1,) * 11, (200,) * 11),
    )):  # fmt: skip
        made = [
            cases.engine_batches.batch(
                queries, lengths, heads=heads, dim=dim, dtype=torch.bfloat16, extra_tokens=4, device="cuda",
                seed=10 * seed, fp8=scales[n] if fp8 else None, least_blocks=400,  # one form of cache in all steps
            )
            for n in range(layers)
        ]  # fmt: skip
        for n, one in enumerate(made if not fp8 else []):  # all have one table, but values of their own
            for values in (one.v, one.cache[..., dim:], *one.values):
                values.mul_(0.5**n)
        case = cases.Case(queries=queries, lengths=lengths, extra_tokens=4)
        common = cases.metadata(engine(cases), case, made[0])
        common = common.replace(num_actual_tokens=sum(queries))
        built, outputs = builder.build(0, common), []
        for impl, one, (k_scale, v_scale) in zip(impls, made, scales, strict=True):
            layer = SimpleNamespace(_k_scale=k_scale.cuda(), _v_scale=v_scale.cuda())
            one.q.copy_(torch.randn_like(one.q))
            outputs.append(torch.full_like(one.q, torch.nan))
            impl.do_kv_cache_update(layer, one.k, one.v, one.cache, common.slot_mapping)
            impl.forward(layer, one.q, one.k, one.v, one.cache, built, outputs[-1])
        assert fp8 or [one is not None for one in built.batch(16).repeats.values()] == [True]
        for one, output in zip(made, outputs, strict=True):
            wanted = one.expected(lambda b, q, kv: kv <= q, dim**-0.5)
            assert float((output[: sum(queries)].cpu().double() - wanted).abs().max()) <= (0.03 if fp8 else 0.02)
            assert bool(output[sum(queries) :].isnan().all())
    renewals = impls[0]._paged[1]._alike.renewals  # sizes that are new are launched without a call
    assert fp8 or {how[0] for how in renewals} == {False, True}


class Invariant:
    """Requests whose outputs must not depend on the batch, by vLLM's backend over one cache in pages."""

    def __init__(
        self, cases: Any, monkeypatch: pytest.MonkeyPatch, queries: tuple[int, ...], lengths: tuple[int, ...],
        heads: int, kv_heads: int, dim: int,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(cases.vllm_backend.envs, "VLLM_BATCH_INVARIANT", True)
        self.made = cases.engine_batches.batch(
            queries, lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, device="cuda"
        )
        with current(config()):
            self.layer = cases.vllm_backend.AttngenImpl(heads, dim, dim**-0.5, kv_heads)
        self.layer.do_kv_cache_update(None, self.made.k, self.made.v, self.made.cache, self.made.slots)
        device = torch.device("cuda")
        self.builder = cases.vllm_backend.AttngenMetadataBuilder(SimpleNamespace(), [], config(), device)

    def outputs(self, requests: Sequence[int]) -> list[torch.Tensor]:
        """Outputs of some of the requests, as a batch of their own in this order."""
        made, first = self.made, self.made.starts.tolist()
        counts = [made.queries[request] for request in requests]
        rows = torch.cat([torch.arange(first[request], first[request + 1]) for request in requests]).cuda()
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        common = vllm_stub.CommonAttentionMetadata(
            starts.cuda(), starts, made.used[list(requests)].cuda(), len(requests), len(rows), max(counts),
            max(made.lengths[request] for request in requests), made.table[list(requests)], made.slots[rows],
        )  # fmt: skip
        q = made.q[rows]
        output = torch.full_like(q, torch.nan)
        self.layer.forward(None, q, None, None, made.cache, self.builder.build(0, common), output)
        return list(output.split(counts))


def test_bits_of_a_row_do_not_depend_on_its_batch(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 200 random batches, with decoding and prompts in any order."""
    chance = random.Random(2)
    queries = (1, 300, 1, 1, 7, 1, 64, 1, 1, 129)
    lengths = (9000, 1200, 12000, 50, 4100, 1, 64, 4096, 4097, 8200)
    requests = Invariant(cases, monkeypatch, queries, lengths, heads=8, kv_heads=2, dim=128)
    alone = [requests.outputs([request])[0] for request in range(len(queries))]
    assert not any(one.isnan().any() for one in alone)
    for _ in range(200):
        chosen = chance.sample(range(len(queries)), chance.randrange(2, len(queries) + 1))
        for request, one in zip(chosen, requests.outputs(chosen), strict=True):
            assert torch.equal(one, alone[request]), f"request {request} of {chosen}"


def test_bits_do_not_depend_on_the_queries_of_another_request(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 heads share 2 KV heads of 64 columns: one query beside nine others, and beside ten."""
    requests = Invariant(cases, monkeypatch, (1, 9, 10), (19802,) * 3, heads=14, kv_heads=2, dim=64)
    first, _ = requests.outputs([0, 1])
    assert not first.isnan().any()
    assert torch.equal(requests.outputs([0, 2])[0], first)
    assert torch.equal(requests.outputs([0])[0], first)


class Pool(sglang_stub.Pool):
    """SGLang's pool of a layer, on the GPU."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffers = tuple(buffer.cuda() for buffer in self.buffers)

    def set_kv_buffer(self, layer: Any, location: Any, k: Any, v: Any, *scales: Any) -> None:
        super().set_kv_buffer(layer, location, k.cuda(), v.cuda(), *scales)


@pytest.mark.parametrize("name", SGLANG_NAMES)
def test_sglang(name: str) -> None:
    with imported_with(
        sglang_stub, "attngen.integrations.sglang.backend", "tests.integrations.sglang.sglang_cases"
    ) as cases:
        engine = cases.Engine(
            Pool, None, sglang_stub.layer, sglang_stub.ForwardMode, sglang_stub.AttentionType, "cuda"
        )  # fmt: skip
        cases.check(engine, replace(cases.CASES[name], heads=8, dim=128, dtype=torch.bfloat16))
