"""q, k and v of stride 0 along an axis: the same on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import NoKernelError
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.launch.expanded import need_copies
from attngen.runtime.registry import select
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.gradient_driver import GradientDriver, build, close, taken_for_a_gpu
from tests.runtime.support import FakeDriver, kernel, variant
from tests.sampling import sampled


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


def install(*chosen: Any, **fields: Any) -> None:
    package = f"tma_{fields.get('layout', 'dense')}"
    made = [kernel(one, loads="descriptor", package=package, **fields) for one in chosen]
    registry.add(package_of_kernels(made, "memory"))


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def expanded_heads(layout: str, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    q = random(2, 12, heads, 64)
    k, v = (random(2, 20, 1, 64).mul(scale).expand(2, 20, heads, 64) for scale in (1.0, 0.5))
    tensors = (q, k, v) if layout == "bshd" else tuple(t.transpose(1, 2) for t in (q, k, v))
    return tensors[0], tensors[1], tensors[2]


def near(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_heads_that_are_one_head_reach_the_kernel_as_one(gpu: FakeDriver, layout: str) -> None:
    install(variant("causal"))
    q, k, v = expanded_heads(layout)
    wanted = attngen.attention(q, k, v, variant="causal", layout=layout, backend="reference")
    for _ in range(2):  # the second one is prepared
        near(attngen.attention(q, k, v, variant="causal", layout=layout), wanted)
    assert [launch.values["kv_heads"] for launch in gpu.launches] == [1, 1]
    told = attngen.explain(q, k, v, variant="causal", layout=layout)
    assert told.runs == "kernel"
    assert "k and v are expanded along their heads: kernels get them as one KV head" in str(told)


def test_heads_of_packed_sequences_and_of_pages(gpu: FakeDriver) -> None:
    install(variant("causal"), layout="varlen")
    install(variant("paged"), layout="paged", tiles=(64, 16))
    q, k, v = (t.flatten(0, 1) if t.stride(2) else t[:, :, :1].flatten(0, 1).expand(40, 4, 64)
               for t in expanded_heads("bshd"))  # fmt: skip
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 24], [0, 20, 40]))
    given = q, k, v, starts_q, starts_k, 19, 20
    wanted = attngen.attention_varlen(*given, variant="causal", backend="reference")
    near(attngen.attention_varlen(*given, variant="causal"), wanted)
    for layout in ("NHD", "HND"):
        pages = [t.unflatten(0, (-1, 8)).transpose(*((1, 2) if layout == "HND" else (0, 0))) for t in (k, v)]
        table, used = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32), torch.tensor([15, 6], dtype=torch.int32)
        paged = (q[:8].unflatten(0, (2, 4)), *pages, table, used)
        options: dict[str, Any] = {"variant": "paged", "page_layout": layout}
        wanted = attngen.attention_paged(*paged, **options, backend="reference")
        near(attngen.attention_paged(*paged, **options), wanted)
    assert {launch.values["kv_heads"] for launch in gpu.launches} == {1}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_other_expanded_axes_are_copied_where_no_kernel_steps_along_them(gpu: FakeDriver, name: str, axis: int) -> None:
    install(variant("causal"))
    given = {"q": random(2, 12, 4, 64), "k": random(2, 20, 2, 64), "v": random(2, 20, 2, 64)}
    given[name] = given[name].narrow(axis, 0, 1).expand_as(given[name])
    wanted = attngen.attention(**given, variant="causal", backend="reference")
    near(attngen.attention(**given, variant="causal"), wanted)
    assert len(gpu.launches) == 1
    assert "what is expanded of q, k and v is copied first" in str(attngen.explain(**given, variant="causal"))


def test_a_kernel_that_steps_along_them_gets_no_copy(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(variant("causal"), loads="pointer", package="plain")], "memory"))
    q, k, v = random(2, 12, 4, 64), random(1, 20, 2, 64).expand(2, 20, 2, 64), random(2, 20, 2, 64)
    near(
        attngen.attention(q, k, v, variant="causal"), attngen.attention(q, k, v, variant="causal", backend="reference")
    )
    assert gpu.launches[0].values["stride_k_b"] == 0
    assert "expanded" not in attngen.explain(q, k, v, variant="causal").to_dict()


def test_a_variant_that_tells_kv_heads_apart_gets_all_of_them(gpu: FakeDriver) -> None:
    of_kv = variant("of_kv", "q_pos >= kv", score="s + slope[hk]", tensors=[Declared("slope", "fp32", ("hk",))])
    install(of_kv, variant("counts", "q_pos >= kv", score="s * kv_heads"))
    q, k, v = expanded_heads("bshd")
    for name, own in (("of_kv", {"slope": torch.arange(4.0)}), ("counts", {})):
        wanted = attngen.attention(q, k, v, variant=name, backend="reference", **own)
        near(attngen.attention(q, k, v, variant=name, **own), wanted)
        assert gpu.launches[-1].values["kv_heads"] == 4


def test_a_tile_map_is_that_of_the_call(gpu: FakeDriver) -> None:
    install(variant("mapped", "allowed[q, kv]", tensors=[Declared("allowed", "bool", ("seqlen_q", "seqlen_k"))]),
            tile_map=(False, False))  # fmt: skip
    q, k, v = expanded_heads("bshd")
    allowed = torch.rand(12, 20) < 0.5
    tiles = attngen.tile_map(q, k, variant="mapped", allowed=allowed)
    out = attngen.attention(q, k, v, variant="mapped", allowed=allowed, tile_map=tiles)
    near(out, attngen.attention(q, k, v, variant="mapped", allowed=allowed, backend="reference"))


def test_expanded_tensors_that_no_kernel_takes_are_refused(gpu: FakeDriver) -> None:
    install(variant("causal"))
    q, k, v = (t[..., :8] for t in expanded_heads("bshd"))
    for kept in (k, k.clone()):
        with pytest.raises(NoKernelError, match="head_dim of q and k is 64, the call has 8"):
            attngen.attention(q, kept, v, variant="causal")


def gradients(kind: str, *, backend: str | None = None, compiled: bool = False) -> tuple[Tensor, ...]:
    """Gradients of q and of what k and v were expanded from, or, if they are leaves, of k and v."""
    q = random(2, 40, 4, 64).requires_grad_()
    sources = [random(2, 70, 1, 64).mul(scale) for scale in (1.0, 0.5)]
    if kind == "batch":
        sources = [t.expand(2, 70, 4, 64)[:1].clone() for t in sources]
    for source in sources:
        source.requires_grad_(kind != "leaves")
    k, v = (t.expand(2, 70, 4, 64) for t in sources)
    if kind == "leaves":
        sources = [k.detach().requires_grad_(), v.detach().requires_grad_()]
        k, v = sources
    elif kind == "kept":
        k.retain_grad()
    call = torch.compile(attngen.attention, backend="aot_eager") if compiled else attngen.attention
    out = call(q, k, v, variant="causal", backend=backend)
    (out.float() * random(2, 40, 4, 64).float()).sum().backward()
    gradients_of_inputs = (q.grad, sources[0].grad, sources[1].grad, *((k.grad,) if kind == "kept" else ()))
    assert all(gradient is not None for gradient in gradients_of_inputs)
    return gradients_of_inputs  # type: ignore[return-value]


@sampled(always=2, compiled=[False, True], kind=["heads", "batch", "leaves", "kept"])
def test_gradients(trained: GradientDriver, kind: str, compiled: bool) -> None:
    build()
    close(gradients(kind, compiled=compiled and kind != "kept"), gradients(kind, backend="reference"))
    assert trained.launches == ["forward", "preprocess", "dkdv", "dq"]


@pytest.mark.exhaustive
def test_gradients_of_kernels_that_refuse_expanded_tensors(
    trained: GradientDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    take = select.reason_against

    def refuse(kernel: Any, request: Any, driver: Any) -> str | None:
        return "it is expanded" if need_copies(request.call) else take(kernel, request, driver)

    monkeypatch.setattr(select, "reason_against", refuse)
    torch._dynamo.reset()
    for kind in ("heads", "batch"):
        close(gradients(kind, compiled=True), gradients(kind, backend="reference"))
