"""Layers over a paged cache: the first of a step is called, others alike repeat its launches with their addresses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments import debug, torch_state
from attngen.runtime.arguments import seen as seen_module
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.chain import Chain
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append.path import APPEND
from attngen.runtime.operations.attention import entry, layers
from attngen.runtime.operations.attention.layers import PagedBatch, PagedCache, PagedLayer
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import HostDriver, kernels
from tests.runtime.operations.attention.test_mixed import leaving_out
from tests.runtime.pages import cache, starts_of
from tests.runtime.support import FakeDriver, kernel, variant, window_variant
from tests.sampling import few

pytestmark = pytest.mark.skipif(seen_module._TensorGuards is None, reason="torch has no check of tensors")

SINKS = variant("sinking", sink="sinks[h]", tensors=[Declared("sinks", "fp32", ("h",))])
LENGTHS = [40, 7, 9, 33, 21]


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were looked at whole."""
    calls: list[Any] = []

    def run(given: Any, repeats: Any = None) -> Any:
        calls.append(given)
        return entry.run_or_trace(given, repeats)

    monkeypatch.setattr(layers, "run_or_trace", run)
    return calls


def step(rows: list[int], decodes: int | None, seed: int, padding: int = 0) -> tuple[PagedBatch, Tensor, Tensor]:
    """A batch over pages of 16, the queries of a layer, and memory for its output, both with rows of padding."""
    c = cache(LENGTHS, 16, head_dim=64, dtype=torch.bfloat16)
    tokens = sum(rows)
    batch = PagedBatch(c.page_table, c.seqused_k, starts_of(rows), max(rows), tokens, decodes)
    torch.manual_seed(seed)
    q = torch.randn(tokens + padding, 4, 64).bfloat16()
    return batch, q, torch.full_like(q, 7.0)


def of_layer(seed: int) -> tuple[Tensor, Tensor]:
    """Pages of keys and values, each layer's own."""
    c = cache(LENGTHS, 16, head_dim=64, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(t.shape, generator=generator).bfloat16() for t in (c.k_pages, c.v_pages))
    return k, v


def agree(layer: PagedLayer, q: Tensor, out: Tensor, batch: PagedBatch) -> None:
    """Run a layer; its output is that of the reference, and nothing is written behind it."""
    layer(q, out, batch)
    given, rows = layer._given, batch.tokens
    wanted = attngen.attention_paged(
        q[:rows], given.k, given.v, batch.page_table, batch.seqused_k, cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_seqlen_q, variant=given.variant, softmax_scale=given.softmax_scale,
        backend="reference", **given.arguments,
    )  # fmt: skip
    torch.testing.assert_close(out[:rows], wanted, rtol=0, atol=1e-6)
    assert bool((out[rows:] == 7.0).all())


@few("padding", [0, 3])
@pytest.mark.parametrize(
    ("rows", "decodes", "launches"),
    [([1] * 5, None, 1), ([1, 1, 0, 12, 3], 3, 2), ([12, 3, 1, 1, 1], -3, 2), ([2, 3, 1, 12, 3], None, 1)],
)
def test_layers_of_a_step(
    gpu: FakeDriver, called: list[Any], rows: list[int], decodes: int | None, launches: int, padding: int
) -> None:
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    ours = [PagedLayer(*of_layer(n), variant="causal", softmax_scale=0.2) for n in range(3)]
    for seed in range(2):
        batch, _, _ = step(rows, decodes, 0)
        called.clear()
        gpu.launches.clear()
        for n, layer in enumerate(ours):
            _, q, out = step(rows, decodes, 10 * seed + n, padding)
            agree(layer, q, out, batch)
        assert (len(called), len(gpu.launches)) == (launches, 3 * launches)


def test_batches_of_the_same_sizes_in_the_same_memory(gpu: FakeDriver, called: list[Any]) -> None:
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    layer = PagedLayer(*of_layer(0), variant="causal", softmax_scale=0.2)
    first, q, out = step([1] * 5, None, 0)
    agree(layer, q, out, first)
    assert len(called) == 1
    first.seqused_k.sub_(3)
    given = first.page_table, first.seqused_k, first.cu_seqlens_q
    again = PagedBatch(*given, 1, 5)
    agree(layer, torch.randn_like(q), out, again)
    assert len(called) == 1
    before = layer._alike.last
    for changed in (
        PagedBatch(*(t.clone() for t in given), 1, 5), PagedBatch(*given, 1, 5, 2), PagedBatch(*given, 2, 5),
        PagedBatch(given[0][:, :-1], *given[1:], 1, 5),
    ):  # fmt: skip
        agree(layer, q, out, changed)
        assert layer._alike.last is not before
        before = layer._alike.last


@pytest.mark.exhaustive
@few("beside", [False, True], always=(1,))
def test_batches_of_other_sizes(gpu: FakeDriver, called: list[Any], beside: bool) -> None:
    """Their launches are made without a call, once a batch has run in the same way: as a whole, with sequences that
    decode first, or last. Tables have other columns, and rows that are further apart. ``beside``: the kernel may run
    side by side with another one."""
    one = leaving_out(variant(), "beside") if beside else kernel(variant(), layout="paged")
    registry.add(package_of_kernels([one], "memory"))
    ours = [PagedLayer(*of_layer(n), variant="causal", softmax_scale=0.2) for n in range(2)]
    chance, whole = random.Random(5), 0
    pages = cache(LENGTHS, 16, head_dim=64, dtype=torch.bfloat16)
    for turn in range(60):
        how = turn % 3
        few, many = [1] * chance.randint(1, 3), [chance.randint(1, 9) for _ in range(chance.randint(1, 3))]
        rows = [few + many, few + many, many + few][how]
        chosen = torch.tensor([chance.randrange(5) for _ in rows])
        table, lengths = pages.page_table[chosen], pages.seqused_k[chosen].contiguous()
        width = int(-(-lengths.max() // 16)) + chance.randint(0, 1)
        table = table[:, :width] if chance.random() < 0.5 else table[:, :width].contiguous()
        rows = [min(n, int(length)) for n, length in zip(rows, lengths, strict=True)]
        decodes = [None, len(few), -len(few)][how]
        q = torch.randn(sum(rows), 4, 64).bfloat16()
        batch = PagedBatch(table, lengths, starts_of(rows), max(rows) + chance.randint(0, 2), sum(rows), decodes)
        if chance.random() < 0.5:  # padding
            q = torch.cat([q, torch.randn(chance.randint(1, 5), 4, 64).bfloat16()])
        called.clear()
        for layer in ours:
            out = torch.full_like(q, 7.0)
            gpu.launches.clear()
            agree(layer, q, out, batch)
        roles = [launch.values.get("beside") for launch in gpu.launches]
        if not called and beside:
            assert roles == ([0] if decodes is None else [1, 2])
        whole += bool(called)
    assert whole == 4  # the first call of all is prepared by itself, and nothing of its kind
    assert len(ours[0]._alike.renewals) == 3


def test_sizes_that_take_a_look(gpu: FakeDriver, called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few rows, vectors of other types, a kernel that was found since, and a stream of its own."""
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    layer = PagedLayer(*of_layer(0), variant="causal", softmax_scale=0.2)
    agree(layer, *_reordered(step([1] * 5, None, 0)))
    batch, q, out = step([1, 2, 3, 1, 1], 9, 1)
    with pytest.raises(CallError, match="num_decodes is 9, but page_table has 5 rows"):
        layer(q, out, batch)
    batch, q, out = step([1, 2, 3, 1, 1], None, 1)
    with pytest.raises(CallError, match="out has shape"):
        layer(q, out[:5], batch)
    agree(layer, q, out, batch)
    for change in ("lengths", "starts", "stream", "registry"):
        called.clear()
        batch, q, out = step([2, 2, 3, 1, 1], None, 2)
        if change == "lengths":
            batch = PagedBatch(batch.page_table, batch.seqused_k[:4], batch.cu_seqlens_q, 3, 9)
            with pytest.raises(CallError, match="seqused_k"):
                layer(q, out, batch)
        elif change == "starts":
            batch = PagedBatch(batch.page_table, batch.seqused_k, batch.cu_seqlens_q.long(), 3, 9)
            with pytest.raises(CallError, match="cu_seqlens_q"):
                layer(q, out, batch)
        elif change == "stream":
            with monkeypatch.context() as patch:
                patch.setattr(gpu, "stream", lambda device: 5)
                agree(layer, q, out, batch)
        else:
            monkeypatch.setattr(registry, "generation", registry.generation + 1)
            agree(layer, q, out, batch)
        assert called, change


def _reordered(made: tuple[PagedBatch, Tensor, Tensor]) -> tuple[Tensor, Tensor, PagedBatch]:
    batch, q, out = made
    return q, out, batch


def test_layers_that_differ_are_called(gpu: FakeDriver, called: list[Any]) -> None:
    named = [variant(), window_variant(), SINKS]
    registry.add(package_of_kernels([kernel(one, layout="paged") for one in named], "memory"))
    batch, q, out = step([1] * 5, None, 0)
    sinks = [torch.randn(4) for _ in range(3)]
    for count, options in (
        (1, {"variant": "causal"}), (1, {"variant": "window", "arguments": {"window": 9}}),
        (1, {"variant": "window", "arguments": {"window": 17}}), (1, {"variant": "causal", "softmax_scale": 0.5}),
        (1, {"variant": "sinking", "arguments": {"sinks": sinks[0]}}),
        (0, {"variant": "sinking", "arguments": {"sinks": sinks[1]}}),
        (0, {"variant": "sinking", "arguments": {"sinks": sinks[2]}}),
        (0, {"variant": "window", "arguments": {"window": 17}}), (0, {"variant": "causal"}),
        (1, {"variant": SINKS, "arguments": {"sinks": sinks[0]}}),
    ):  # fmt: skip
        called.clear()
        agree(PagedLayer(*of_layer(1), **{"softmax_scale": 0.2, **options}), q, out, batch)
        assert len(called) == count, options


def test_what_is_not_like_the_first_layer_is_called(
    gpu: FakeDriver, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    batch, q, out = step([1] * 5, None, 0)
    layer, other = (PagedLayer(*of_layer(n), variant="causal", softmax_scale=0.2) for n in (0, 1))
    agree(layer, q, out, batch)
    agree(other, q, out, batch)
    assert len(called) == 1
    strided = torch.randn(5, 4, 128).bfloat16()[..., :64]
    agree(other, strided, out, batch)
    odd = torch.empty(5 * 256 + 4, dtype=torch.bfloat16)[4:].view(5, 4, 64).copy_(q)
    with pytest.raises(NoKernelError, match="q does not start at a multiple of 16 B"):
        other(odd, out, batch)
    assert len(called) == 3
    result = other(q, out, batch, return_lse=True)
    assert result is not None
    assert result.shape == (4, 5)
    with attngen.debug():
        agree(other, q, out, batch)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(layers, "in_graph", lambda stream: True)  # the default stream, as here, cannot record one
        agree(other, q, out, batch)
        fresh, *_ = step([1] * 5, None, 0)
        agree(other, q, out, fresh)
        assert not fresh.repeats
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "stream", lambda device: 5)
        agree(other, q, out, batch)
    assert len(called) == 8
    agree(other, q, out, batch)
    assert len(called) == 8


def test_parts_of_which_one_cannot_be_repeated_are_called(
    gpu: FakeDriver, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    ours = [PagedLayer(*of_layer(n), variant="causal", softmax_scale=0.2) for n in range(2)]
    run = entry.run_plain
    monkeypatch.setattr(
        entry, "run_plain", lambda given, repeats=None: run(given, repeats if given.max_seqlen_q == 1 else None)
    )
    batch, q, out = step([1, 1, 0, 12, 3], 3, 0)
    for layer in ours:
        agree(layer, q, out, batch)
    assert len(called) == 4
    assert list(batch.repeats.values()) == [None]


def test_moves_of_addresses(gpu: FakeDriver) -> None:
    """Neighbours are written at once, and the addresses between others stay."""
    chain = Chain([], 18, gpu, 0)
    block = bytearray(chain.moving)
    moved = {1: 1 << 40, 2: 5, 4: 77, 5: 78, 15: 2**63 + 1}
    moves = chain.moves(moved)
    assert [(where.start, where.stop) for where, _ in moves] == [(8, 24), (32, 48), (120, 128)]
    for where, content in moves:
        block[where] = content
    assert list(memoryview(block).cast("Q")[:18]) == [moved.get(place, 0) for place in range(18)]


def test_on_the_cpu(called: list[Any]) -> None:
    registry.add(package_of_kernels([kernel(variant(), layout="paged")], "memory"))
    batch, q, out = step([1] * 5, None, 0)
    for n in range(2):
        agree(PagedLayer(*of_layer(n), variant="causal", softmax_scale=0.2), q, out, batch)
    assert len(called) == 2


@pytest.mark.parametrize("scaled", [None, (), (2,), (6, 16, 2)], ids=str)
def test_caches_that_are_written(scaled: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(append_torch, "check_contents", lambda call, sizes: None)
    driver, runs = HostDriver(), []
    real = APPEND.serve
    monkeypatch.setattr(type(APPEND), "serve", lambda self, *given: (runs.append(given), real(*given))[1])
    registry.add(package_of_kernels(kernels(), "here"))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    scales: list[dict[str, Tensor]] = [{}, {}, {}]
    if scaled is not None:
        scales = [{name: torch.rand(scaled) + 0.5 for name in ("k_descale", "v_descale")} for _ in scales]
    caches = [[random(6, 16, 2, 64).to(torch.bfloat16 if scaled is None else torch.float8_e4m3fn) for _ in "kv"]
              for _ in range(3)]  # fmt: skip
    with drivers.use(driver):
        ours = [PagedCache(*own, **of) for own, of in zip(caches, scales, strict=True)]
        for tokens in (5, 5, 9, 1):
            slots = torch.randperm(96, generator=generator)[:tokens]
            new = [(random(tokens + 2, 2, 64), random(tokens + 2, 2, 64)) for _ in ours]
            wanted, written = [[t.clone() for t in own] for own in caches], []
            for (k, v), into, of in zip(new, wanted, scales, strict=True):
                factors = {
                    name: scale.reshape(1, -1) if scaled == (2,) else scale.clone() for name, scale in of.items()
                }
                written.append(factors)
                attngen.append_kv(k[:tokens], v[:tokens], *into, slots=slots, **factors)
            runs.clear()
            for layer, (k, v) in zip(ours, new, strict=True):
                layer.write(k, v, slots)
            assert len(runs) <= 1
            for own, into in zip(caches, wanted, strict=True):
                assert all(map(torch.equal, (t.view(torch.uint8) for t in own), (t.view(torch.uint8) for t in into)))
            if scaled == (6, 16, 2):  # scales are written, too
                for ours_of, theirs in zip(scales, written, strict=True):
                    assert all(torch.equal(ours_of[name], theirs[name]) for name in ours_of)
