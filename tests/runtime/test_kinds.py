"""Ragged calls whose sizes never repeat: prepared once for their kind, and their sizes are checked each time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.plan import plan
from attngen.runtime.arguments import debug
from attngen.runtime.arguments.given import Given
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.chain import Chain
from attngen.runtime.launch.ragged import RaggedCalls
from attngen.runtime.operations.attention import dispatch, kernel_call, recall
from attngen.runtime.registry import binding, order
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from tests.runtime.manifests import with_parameters
from tests.runtime.pages import Cache, cache, starts_of
from tests.runtime.support import FakeDriver, bias_variant, kernel, variant
from tests.sampling import sampled

CAUSAL = variant()


def install(*variants: Any, **fields: Any) -> None:
    registry.add(package_of_kernels([kernel(one, **fields) for one in variants], "memory"))


def kinds() -> list[Any]:
    return list(kernel_call.PREPARED.values())


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were bound by the slow path."""
    calls: list[Any] = []

    def bind(given: Any) -> Any:
        calls.append(given)
        return binding.bind_call(given)

    monkeypatch.setattr(kernel_call, "bind_call", bind)
    return calls


def same(function: Any, *tensors: Any, **options: Any) -> None:
    """Assert that the launched kernel and the reference agree."""
    ours, lse = function(*tensors, return_lse=True, **options)
    wanted, wanted_lse = function(*tensors, return_lse=True, backend="reference", **options)
    rows = wanted.shape[0]
    torch.testing.assert_close(ours[:rows], wanted, rtol=0, atol=0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    assert (ours.shape, lse.shape, lse.stride()) == (wanted.shape, wanted_lse.shape, wanted_lse.stride())


def batches(rng: random.Random, packed: bool) -> tuple[Cache, torch.Tensor, dict[str, Any]]:
    """A cache of random lengths, queries and what a call says of them."""
    batch = rng.randint(2, 5)
    rows = [rng.randint(1, 5) for _ in range(batch)] if packed else [3] * batch
    c = cache([rng.randint(0, 60) for _ in range(batch)], 16, head_dim=64, dtype=torch.bfloat16)
    k, v = (torch.nn.functional.pad(t, [0] * 7 + [30 - t.shape[0]]) for t in (c.k_pages, c.v_pages))
    c = replace(c, k_pages=k, v_pages=v)  # the cache of a server keeps its size
    q = torch.randn(sum(rows), 4, 64).bfloat16()
    if packed:
        return c, q, {"cu_seqlens_q": starts_of(rows), "max_seqlen_q": max(rows) + rng.randint(0, 3)}
    return c, q.unflatten(0, (batch, 3)), {}


@sampled(always=2, loads=["pointer", "descriptor"], packed=[False, True], into=[False, True])
def test_pages_of_any_sizes(gpu: FakeDriver, bound: list[Any], loads: str, packed: bool, into: bool) -> None:
    install(CAUSAL, layout="paged", loads=loads)
    rng = random.Random(loads)
    for _ in range(8):
        c, q, given = batches(rng, packed)
        tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
        same(attngen.attention_paged, *tensors, **given)
        if into:
            memory = torch.full_like(q, 7.0)
            out = attngen.attention_paged(*tensors, out=memory, **given)
            assert out is memory
            assert torch.equal(out, attngen.attention_paged(*tensors, backend="reference", **given))
    assert all(isinstance(one, RaggedCalls) for one in kinds())
    assert len([call for call in bound if call.backend is None]) == 1 + into
    assert len(gpu.loads) == 1


@sampled(loads=["pointer", "descriptor"], used=[False, True])
def test_packed_sequences_of_any_sizes(gpu: FakeDriver, bound: list[Any], loads: str, used: bool) -> None:
    install(bias_variant(), layout="varlen", loads=loads)
    rng = random.Random(1)
    for _ in range(8):
        batch = rng.randint(2, 5)
        rows, keys = ([rng.randint(1, 40) for _ in range(batch)] for _ in range(2))
        q = torch.randn(sum(rows), 4, 64).bfloat16()
        k, v = (torch.randn(sum(keys), 2, 64).bfloat16() for _ in range(2))
        given: dict[str, Any] = {
            "table": torch.randn(4, 20),
            "radius": rng.randint(0, 9),
            "limit": rng.randint(0, max(keys)),
        }
        if used:
            given["seqused_k"] = torch.tensor([rng.randint(0, n) for n in keys], dtype=torch.int32)
        same(
            attngen.attention_varlen,
            q,
            k,
            v,
            starts_of(rows),
            starts_of(keys),
            max(rows),
            max(keys),
            variant="bias",
            **given,
        )
    # a bound of its scalars is a length, so that each call is bound
    assert len([call for call in bound if call.backend is None]) == 8
    assert len(gpu.loads) == 1


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_packed_sequences_into_memory(gpu: FakeDriver, bound: list[Any], loads: str) -> None:
    """Rows of a larger tensor take the output, whatever the sizes."""
    install(CAUSAL, layout="varlen", loads=loads)
    rng = random.Random(2)
    for _ in range(4):
        rows, keys = ([rng.randint(2, 40) for _ in range(3)] for _ in range(2))
        q = torch.randn(sum(rows), 4, 64).bfloat16()
        k, v = (torch.randn(sum(keys), 2, 64).bfloat16() for _ in range(2))
        memory = torch.full((sum(rows) + 16, 4, 64), 7.0).bfloat16()
        given = Given(
            q, k, v, cu_seqlens_q=starts_of(rows), cu_seqlens_k=starts_of(keys), out=memory[8:-8], variant="causal",
            form="varlen", layout="varlen", max_seqlen_q=max(rows), max_seqlen_k=max(keys),
        )  # fmt: skip
        dispatch.run(given)
        assert torch.equal(memory[8:-8], dispatch.run(given._replace(out=None, backend="reference")))
        assert bool((memory[:8] == 7).all())
        assert bool((memory[-8:] == 7).all())
    assert len([call for call in bound if call.backend is None]) == 1


def test_wrong_sizes_are_refused_after_right_ones(gpu: FakeDriver) -> None:
    install(CAUSAL, layout="paged")
    c = cache([40, 7, 9], 16, head_dim=64, dtype=torch.bfloat16)
    q, starts = torch.randn(6, 4, 64).bfloat16(), starts_of([3, 2, 1])
    tensors = {"page_table": c.page_table, "seqused_k": c.seqused_k, "cu_seqlens_q": starts, "max_seqlen_q": 3}

    def call(**changed: Any) -> torch.Tensor:
        pages = {"k_pages": c.k_pages, "v_pages": c.v_pages, "q": q}
        return attngen.attention_paged(**{**pages, **tensors, **changed}, variant="causal")

    call()
    for wrong, message in (
        ({"cu_seqlens_q": starts[:3]}, r"cu_seqlens_q must have shape \(batch \+ 1,\) = \(4,\)"),
        ({"page_table": c.page_table[:2]}, r"cu_seqlens_q must have shape \(batch \+ 1,\) = \(3,\)"),
        ({"seqused_k": c.seqused_k[:2]}, r"seqused_k must have shape \(3,\), got \(2,\)"),
        ({"seqused_k": c.seqused_k.long()}, "seqused_k must be an int32 vector"),
        ({"seqused_k": None}, "seqused_k is needed"),
        ({"page_table": None}, "page_table must be a torch.Tensor"),
        ({"max_seqlen_q": None}, "max_seqlen_q is needed"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must not be negative"),
        ({"max_seqlen_q": True}, "max_seqlen_q must be a Python integer, got True"),
        ({"max_seqlen_q": 5.5}, "max_seqlen_q must be a Python integer"),
        ({"page_table": c.page_table.t().contiguous().t()}, "page_table's rows must be contiguous"),
        ({"page_table": c.page_table[0]}, r"page_table must be int32 of shape \(batch, max_pages\)"),
        ({"out": torch.empty(5, 4, 64).bfloat16()}, r"out has shape \(5, 4, 64\), but the result has \(6, 4, 64\)"),
        ({"out": torch.empty(6, 4, 64)}, "out has dtype"),
        ({"out": torch.empty(1, 4, 64).bfloat16().expand(6, 4, 64)}, "its rows share memory"),
    ):
        with pytest.raises(CallError, match=message):
            call(**wrong)
        call()
    call(out=torch.empty(6, 4, 64).bfloat16())
    with pytest.raises(CallError, match="out has shape"):
        call(out=torch.empty(9, 4, 64).bfloat16())
    assert call(max_seqlen_q=4).shape == q.shape


def test_nothing_to_compute_between_other_calls(gpu: FakeDriver) -> None:
    install(CAUSAL, layout="paged")
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    for rows in ([0, 0], [2, 3], [0, 0], [1, 4]):
        q = torch.randn(sum(rows), 4, 64).bfloat16()
        given = {"cu_seqlens_q": starts_of(rows), "max_seqlen_q": max(rows)}
        same(attngen.attention_paged, q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, **given)
    assert len(gpu.launches) == 2
    assert any(isinstance(one, RaggedCalls) for one in kinds())


@pytest.mark.parametrize("few", [False, True])
def test_each_call_takes_the_kernel_for_its_sizes(gpu: FakeDriver, few: bool) -> None:
    kernels = [kernel(CAUSAL, package="pages", layout="paged", split_kv=each) for each in (False, True)]
    registry.add(package_of_kernels(kernels, "memory"))
    c = cache([40, 7, 3], 16, head_dim=64, dtype=torch.bfloat16)
    order = [1, 200, 3, 150] if few else [200, 1, 150, 3]
    for rows in order:
        q = torch.randn(3 * rows, 4, 64).bfloat16()
        given = {"cu_seqlens_q": starts_of([rows] * 3), "max_seqlen_q": rows}
        same(attngen.attention_paged, q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, **given)
        assert gpu.launches[-1].symbol.endswith("_split") == (rows < 100)
    assert len(kinds()) == 1
    assert len(gpu.loads) == 2


def test_typical_sizes_are_rounded_up() -> None:
    numbers = (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 100, 129)
    assert [order.rounded(n, 1) for n in numbers] == [0, 1, 2, 4, 4, 8, 8, 8, 16, 16, 128, 256]
    assert [order.rounded(n, 2) for n in numbers] == [0, 1, 2, 3, 4, 6, 6, 8, 12, 16, 128, 192]


SERVING = """
kernels:
  - {variant: causal, head_dim: 64, layout: paged, pack_gqa: [false, true], split_kv: true}
  - {variant: causal, head_dim: 64, layout: paged, kv_dtype: fp8_e4m3, split_kv: true}
  - {variant: sliding_window, head_dim: 64, layout: varlen}
  - {variant: causal, head_dim: 64, layout: varlen, backend: triton}
"""


def planned(text: str) -> list[Kernel]:
    """The kernels of a spec as if they had been compiled."""
    kernels = []
    for spec in expand(load_spec_text("schema: 1\npackage: planned\narch: [sm90a]\n" + text)):
        made = plan(spec)
        manifest = made.to_dict()
        if made.backend == "triton":
            with_parameters(manifest, made)
        manifest["resources"] = {"shared_memory": 65536}
        kernels.append(Kernel(manifest, bytes, origin="planned"))
    return kernels


class Loading(FakeDriver):
    """Loads kernels that have no cubin."""

    def load(self, *of: Any, **more: Any) -> Any:
        return of[1]


@pytest.mark.parametrize("form", ["paged", "fp8", "varlen", "triton"])
def test_numbers_are_those_of_a_call_that_is_prepared_for_its_sizes(
    form: str, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rng, driver = random.Random(form), Loading()
    registry.add(package_of_kernels(planned(SERVING), "memory"))
    pages = [torch.zeros(50, 16, 2, 64).to(torch.float8_e4m3fn if form == "fp8" else torch.bfloat16) for _ in "kv"]
    ragged: list[Any] = []
    monkeypatch.setattr(Chain, "__call__", lambda launch, a, s, n, sized: ragged.append((launch, sized)))
    for trial in range(12):
        batch = rng.randint(2, 40)
        rows = [1] * batch if form == "fp8" or trial % 2 else [rng.randint(1, 90) for _ in range(batch)]
        q = torch.zeros(sum(rows), 8, 64).bfloat16()
        if form in ("paged", "fp8"):
            table = torch.zeros(batch, rng.randint(1, 60), dtype=torch.int32)
            scale = torch.ones(batch, 2) if form == "fp8" else None
            function, tensors = attngen.attention_paged, (q, *pages, table, torch.ones(batch, dtype=torch.int32))
            given = {"cu_seqlens_q": starts_of(rows), "max_seqlen_q": max(rows), "variant": "causal"}
            given |= {"k_descale": scale, "v_descale": scale}
        else:
            keys = [n + rng.randint(0, 300) for n in rows]
            k = torch.zeros(sum(keys), 2, 64).bfloat16()
            function = attngen.attention_varlen
            tensors = (q, k, k, starts_of(rows), starts_of(keys), max(rows), max(keys))
            given = {"variant": "causal"} if form == "triton" else {"variant": "sliding_window", "window": 99}
        with drivers.use(driver), torch.no_grad():
            function(*tensors, **given)
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "seen_key", lambda given: None)
                patch.setattr(kernel_call, "kind_of", lambda *of: None)
                function(*tensors, **given)
        (_, ours), (_, alone) = ragged
        assert ours.numbers == alone.numbers
        assert ours.functions == alone.functions
        assert (ours.words, ours.workspaces, ours.split_counters) == (
            alone.words, alone.workspaces, alone.split_counters
        )  # fmt: skip
        ragged.clear()
    assert sum(isinstance(one, RaggedCalls) for one in kinds()) == 1


OF_PAGES = """
kernels:
  - {variant: causal, head_dim: 64, layout: paged, kv_dtype: fp8_e4m3, split_kv: true, descale: [head, page]}
"""


def test_scales_of_pages_are_not_taken_for_those_of_sequences(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ in nothing but the rows of their scales, after the first kind is recognized by its tensors."""
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.add(package_of_kernels(planned(OF_PAGES), "memory"))
    pages = [torch.zeros(50, 16, 2, 64).to(torch.float8_e4m3fn) for _ in "kv"]
    launched: list[Any] = []
    monkeypatch.setattr(Chain, "__call__", lambda launch, a, s, n, sized: launched.append(sized.functions))

    def call(rows: int) -> Any:
        q, scale = torch.zeros(7, 1, 8, 64).bfloat16(), torch.ones(rows, 2)
        table, used = torch.zeros(7, 5, dtype=torch.int32), torch.ones(7, dtype=torch.int32)
        with drivers.use(driver), torch.no_grad():
            attngen.attention_paged(q, *pages, table, used, variant="causal", k_descale=scale, v_descale=scale)
        return launched.pop()

    driver = Loading()
    of_pages = call(50)
    kernel_call.PREPARED.clear()
    recall.SEEN.clear()
    of_sequences = [call(7) for _ in range(4)]
    assert of_sequences[0] != of_pages
    assert call(50) == of_pages
    assert call(7) == of_sequences[0]
