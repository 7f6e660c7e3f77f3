"""Caches in 8 bits that are widened for many queries: the kernel on the host, and which calls take it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import prepare_unrendered
from attngen.lab.verify.interpreter import kernel_of
from attngen.lab.verify.widened import try_widen
from attngen.runtime.arguments import debug, torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.attention import dispatch, entry, kernel_call
from attngen.runtime.operations.widen import kernel as widen
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import HostDriver, widening_kernels
from tests.sampling import few

SPEC = """
schema: 1
package: serving
arch: [sm90a]
kernels:
  - {variant: [causal, sliding_window], head_dim: 128, dtype: bf16, layout: [dense, paged], split_kv: true}
  - variant: [causal, sliding_window]
    head_dim: 128
    dtype: bf16
    kv_dtype: fp8_e4m3
    layout: [dense, paged]
    split_kv: true
  - {variant: full, head_dim: 128, dtype: bf16, kv_dtype: fp8_e4m3, split_kv: true}
  - {variant: causal, head_dim: 512, dtype: bf16, kv_dtype: [bf16, fp8_e4m3], layout: paged}
"""
WIDENER = "serving/widen_sm90a_bf16"

#: Imported before tests put something in the place of what it imports.
_ = entry


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("kernel", widening_kernels(), ids=lambda kernel: kernel.dtype)
def test_the_kernel_writes_what_torch_does(kernel: Kernel) -> None:
    with drivers.use(HostDriver()):
        trial = try_widen(kernel, "cpu", 5, small=True)
    assert not trial.problems, "\n".join(trial.problems)


class FakeDriver(HostDriver):
    """A card with as many multiprocessors as an H200, which runs nothing."""

    def multiprocessors(self, device: int) -> int:
        return 132

    def launch(self, kernels: Any, device: int) -> None:
        self.launches += [(symbol, grid) for symbol, grid, *_ in kernels]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    registry.clear()
    registry.add(package_of_kernels([kernel_of(one.plan) for one in prepare_unrendered(load_spec_text(SPEC))], "here"))
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    driver = FakeDriver()
    with drivers.use(driver):
        yield driver
    registry.clear()


def a_call(queries: int, keys: int, *, batch: int = 1, pages: int | None = 16, **more: Any) -> dict[str, Any]:
    """Return the arguments of ``explain``: 32 query heads and 8 KV heads of 128."""
    shape = (batch, keys, 8, 128) if pages is None else (batch * keys // pages, pages, 8, 128)
    cache = torch.empty(shape, dtype=torch.float8_e4m3fn)
    arguments = {"q": torch.empty(batch, queries, 32, 128, dtype=torch.bfloat16), "k": cache, "v": cache}
    arguments |= {"k_descale": torch.ones(()), "v_descale": torch.ones(batch, 8), "variant": "causal"}
    if pages is not None:
        arguments["page_table"] = torch.zeros(batch, keys // pages, dtype=torch.int32)
        arguments["seqused_k"] = torch.full((batch,), keys, dtype=torch.int32)
    return arguments | more


@pytest.mark.parametrize("pages", [None, 16, 48])
def test_many_queries_take_an_ordinary_kernel(gpu: FakeDriver, pages: int | None) -> None:
    facts = attngen.explain(**a_call(512, 8160 if pages == 48 else 8192, pages=pages)).to_dict()
    assert facts["widened_by"] == WIDENER
    assert "_bf16_d128_" in facts["kernel"]
    assert "decode" not in facts["kernel"]
    assert f"k and v are widened to bf16 first, by {WIDENER}" in str(
        attngen.explain(**a_call(512, 8160 if pages == 48 else 8192, pages=pages))
    )


def test_few_queries_read_the_cache_as_it_is(gpu: FakeDriver) -> None:
    for queries in (1, 4, 16, 64):
        facts = attngen.explain(**a_call(queries, 8192)).to_dict()
        assert "widened_by" not in facts
        assert "kv_fp8_e4m3" in facts["kernel"]


@pytest.mark.parametrize(("queries", "kernel"), [(1, "decode"), (16, "decode"), (256, "wide")])
def test_many_queries_of_head_dim_512_take_the_kernel_of_16_bits(gpu: FakeDriver, queries: int, kernel: str) -> None:
    """The one that takes any number of rows."""
    cache = torch.empty(512, 16, 8, 512, dtype=torch.float8_e4m3fn)
    q = torch.empty(1, queries, 32, 512, dtype=torch.bfloat16)
    facts = attngen.explain(**a_call(queries, 8192, q=q, k=cache, v=cache)).to_dict()
    assert facts.get("widened_by") == (WIDENER if kernel == "wide" else None)
    assert f"_{kernel}_" in facts["kernel"]


def test_calls_that_are_not_worth_widening_read_the_cache(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that shows little of it, a share of keys that the call names, no ordinary kernel, too much memory."""
    narrow = a_call(256, 131072, variant="sliding_window", window=1024)
    for given in (narrow, a_call(512, 8192, num_splits=4), a_call(512, 8192, pages=None, variant="full")):
        assert "widened_by" not in attngen.explain(**given).to_dict()
    monkeypatch.setattr(widen, "_MOST_BYTES", 2 * 8192 * 8 * 256 - 1)
    assert "widened_by" not in attngen.explain(**a_call(512, 8192)).to_dict()


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
def test_the_ordinary_call_has_pages_in_order(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, page_layout: str
) -> None:
    """The ordinary call runs on the widened keys: the widening is the one launch here, the other call is looked at."""
    made: list[Any] = []
    run = dispatch.run

    def note(given: Any) -> Any:
        made.append(given)
        return run(given) if given.k.dtype != torch.bfloat16 else given.q

    monkeypatch.setattr(dispatch, "run", note)
    call = a_call(512, 8192, batch=2)
    if page_layout == "HND":
        call |= {name: call[name].transpose(1, 2).contiguous() for name in "kv"}
    call |= {"k_pages": call.pop("k"), "v_pages": call.pop("v")}
    call["v_descale"] = torch.ones(2 * 512, 8, 1)  # of pages
    call["k_descale"] = torch.ones(2 * 512, 8, 1)
    with pytest.raises(attngen.errors.NoKernelError, match="takes a scale for"):
        attngen.attention_paged(**call, page_layout=page_layout)
    call |= {"k_descale": torch.ones(()), "v_descale": torch.ones(2, 8)}
    attngen.attention_paged(**call, page_layout=page_layout)
    assert [name for name, _ in gpu.launches] == ["widen_sm90a_bf16"]
    wide = made[-1]
    assert wide.k.shape == ((64, 256, 8, 128) if page_layout == "NHD" else (64, 8, 256, 128))
    assert wide.page_table.tolist() == torch.arange(64).view(2, 32).tolist()
    assert (wide.k_descale, wide.v_descale) == (None, None)
    assert torch.equal(wide.seqused_k, call["seqused_k"])


class Card(HostDriver):
    """A card with as many multiprocessors as an H200."""

    def multiprocessors(self, device: int) -> int:
        return 132

    def clusters(self, *of: Any) -> int:
        return 15

    def stream(self, device: int) -> int:
        return 0


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("page_layout", ["NHD", "HND"])
def test_calls_of_other_sizes(monkeypatch: pytest.MonkeyPatch, page_layout: str) -> None:
    """Once a call of about the same sizes was looked at, others are only launched, and the ordinary call reads the same
    keys."""
    registry.clear()
    attention = [
        kernel_of(one.plan) for one in prepare_unrendered(load_spec_text(SPEC)) if not one.plan.name.startswith("widen")
    ]
    registry.add(package_of_kernels([*attention, *widening_kernels()], "here"))
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made, looked, shapes = [], [], set()
    run, bind = dispatch.run, kernel_call.bind_call

    def noted(given: Any, repeats: Any = None) -> Any:
        made.append(given)
        return run(given, repeats) if given.k.dtype != torch.bfloat16 else given.q

    monkeypatch.setattr(dispatch, "run", noted)
    monkeypatch.setattr(kernel_call, "bind_call", lambda given: looked.append(given) or bind(given))
    rng = random.Random(2)
    torch.manual_seed(0)
    k, v = (torch.randn(700, 16, 2, 128).to(torch.float8_e4m3fn) for _ in "kv")
    for turn in range(8):
        batch = rng.randint(5, 8)
        lengths = torch.tensor([rng.randint(300, 500) for _ in range(batch)], dtype=torch.int32)
        table = torch.stack([torch.randperm(700)[:40] for _ in range(batch)]).int()[:, : rng.randint(33, 40)]
        scale = torch.rand(batch, 2) if turn % 2 else torch.rand(2)[None].expand(batch, -1)
        starts = torch.arange(batch + 1, dtype=torch.int32) * 300
        given = {"cu_seqlens_q": starts, "max_seqlen_q": 300, "k_descale": scale, "v_descale": scale}
        pages = [x.transpose(1, 2).contiguous() if page_layout == "HND" else x for x in (k, v)]
        q = torch.zeros(300 * batch, 32, 128).bfloat16()
        made.clear()
        looked.clear()
        with drivers.use(Card()), torch.no_grad():
            attngen.attention_paged(q, *pages, table, lengths, variant="causal", page_layout=page_layout, **given)
        assert bool(looked) is (turn < 4), turn
        wide = made[-1]
        for ours, cache in ((wide.k, k), (wide.v, v)):
            rows = ours.transpose(1, 2) if page_layout == "HND" else ours
            for b, length in enumerate(lengths.tolist()):
                wanted = (cache[table[b].long()].flatten(0, 1)[:length].float() * scale[b, :, None]).bfloat16()
                assert torch.equal(rows[wide.page_table[b].long()].flatten(0, 1)[:length], wanted)
        if not looked:
            shapes.add(wide.k.shape)
    assert len(shapes) < 3, "of few kinds"
    registry.clear()


def test_kernels_that_widen_come_with_both_kinds() -> None:
    names = [one.plan.name for one in prepare_unrendered(load_spec_text(SPEC))]
    assert names.count("widen_sm90a_bf16") == 1
    alone = SPEC[: SPEC.index("  - {")] + SPEC[SPEC.index("  - variant") : SPEC.rindex("  - {")]
    assert not any(one.plan.name.startswith("widen") for one in prepare_unrendered(load_spec_text(alone)))
