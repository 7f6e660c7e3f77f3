"""Backward kernels whose last or first tiles of keys are cut, and forward ones whose first tiles of queries are: right
for any cut, and the same bits on every run."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.inspect.cases import Case
from attngen.inspect.gradient_contract import expected_gradients
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.poison import poisoned_gradients
from attngen.runtime.arguments.checked import Call
from attngen.runtime.geometry import sizes as geometry
from attngen.runtime.geometry.cuts import NONE, Cut
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch import tile_map
from attngen.runtime.launch.gradients import GradientBuffers
from attngen.runtime.launch.map_cache import KEPT, kept_maps
from attngen.runtime.launch.pinned import PinnedGradients
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec_text
from tests.gpu.family import PACKAGE as FORWARD
from tests.gpu.family import Run, bits, compiled_kernels, only_known
from tests.gpu.family import kernels as forward_kernels
from tests.gpu.gradient_runs import gradient_run
from tests.gpu.test_backward import ALL, attention, kernels

#: Kernels of one of each loop, and of each way in which consumers share the tensor cores.
CUT = [
    f"backward {name}"
    for name in (
        "causal-bf16-d64-dense-wgmma", "causal-bf16-d128-dense-wgmma", "sliding_window-bf16-d128-dense-wgmma",
        "packed_documents-bf16-d128-dense-wgmma", "allowed-bf16-d128-dense-wgmma", "chunked-bf16-d64-dense-wgmma",
        "relative_bias-bf16-d128-dense-wgmma", "softcap-bf16-d64-dense-wgmma", "causal-bf16-d128-varlen-wgmma",
        "sliding_window-bf16-d64-varlen-wgmma", "first_keys-bf16-d64-dense-wgmma", "first_keys-bf16-d128-dense-wgmma",
        "first_keys-bf16-d128-varlen-wgmma",
    )
]  # fmt: skip

#: The same of forward passes.
QUERIES = ["first_queries-bf16-d64-dense-wgmma", "first_queries-bf16-d128-dense-wgmma"]


@cache
def full_in_8_bits() -> dict[int, Kernel]:
    """Kernels of full attention by their head dims."""
    prepared = [one for one in to_build() if one.plan.direction == "forward"]
    return {kernel.head_dim_qk: kernel for kernel in compiled_kernels(prepared)}


def to_build() -> list[Prepared]:
    """The kernels in 8 bits."""
    text = "schema: 1\narch: [sm90a]\nkernels:\n  - {variant: full, head_dim: [64, 96, 128], dtype: fp8_e4m3}\n"
    return prepare(load_spec_text(text))


def tiles_of(launch: Any, call: Call) -> int:
    return -(-call.seqlen_k // launch.tile_n) * call.batch * call.kv_heads


@pytest.fixture(params=[2, 3, 8])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls have some or all of their tiles cut, into so many parts, whatever the rule says."""
    parts: int = request.param

    def any_cut(launch: Any, call: Call, heads_in_l2: int, capacity: Any) -> Cut:
        if not launch.by_keys:
            rows = -(-call.seqlen_q // launch.tile_m)
            return Cut(
                call.batch * call.heads * random.Random(f"{rows} {parts}").choice([1, -(-rows // 2), rows]), parts
            )
        tiles = tiles_of(launch, call)
        if launch.cuts_first:
            units = call.batch * call.kv_heads
            rows = tiles // units
            return Cut(units * random.Random(f"{tiles} {parts} {heads_in_l2}").choice([1, -(-rows // 2), rows]), parts)
        return Cut(random.Random(f"{tiles} {parts} {heads_in_l2}").choice([1, -(-tiles // 2), tiles]), parts)

    monkeypatch.setattr(geometry, "cut_of", any_cut)
    return parts


def test_the_kernels_are_built() -> None:
    assert set(CUT) <= set(ALL)


@pytest.mark.parametrize("name", CUT)
def test_parts_keep_the_contract(name: str, cut: int) -> None:
    """Every case of a backward, against float64; workspaces hold NaN, and parts without a step count as others do."""
    kernel = kernels()[name]
    assert any(launch.cuts for launch in kernel.launches)

    attempt = try_pinned(kernel, torch.device("cuda"), 70_000 + cut, small=False)
    assert attempt.problems == ()


@pytest.mark.parametrize("name", CUT)
def test_dk_and_dv_have_the_same_bits_on_every_run(name: str, cut: int) -> None:
    """Parts are added in their order, whoever is last."""
    lengths = (700, 1, 333) if "varlen" in name else (700,) * 3
    launch = gradient_run(kernels()[name], Case("cut", lengths, lengths, heads=4, kv_heads=2), seed=cut)
    first = launch()
    for _ in range(20):
        dq, *others = launch()
        close((dq,), first[:1])
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(first[1:], others, strict=True))


@pytest.mark.parametrize("name", QUERIES)
def test_parts_of_query_tiles_keep_the_contract(name: str, cut: int) -> None:
    kernel = forward_kernels()[name]
    assert kernel.main.cuts

    attempt = try_pinned(kernel, torch.device("cuda"), 71_000 + cut, small=False)
    assert attempt.problems == ()


@pytest.mark.parametrize("name", QUERIES)
def test_outputs_of_parts_have_the_same_bits_on_every_run(name: str, cut: int) -> None:
    run = Run.of(name, Case("cut", (1500,) * 3, (1500,) * 3, heads=4, kv_heads=2), seed=cut, radius=100, first=150)
    first = [bits(one) for one in run.results()]
    for _ in range(20):
        assert all(torch.equal(bits(one), other) for one, other in zip(run.results(), first, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_parts_of_query_tiles_in_8_bits(head_dim: int, cut: int) -> None:
    """Tiles that are all alike: against float64, and the same bits on every run."""
    kernel = full_in_8_bits()[head_dim]
    assert kernel.main.cuts
    attempt = try_pinned(kernel, torch.device("cuda"), 72_000 + cut, small=False)
    assert attempt.problems == ()
    for batch, seqlen_q, seqlen_k in ((1, 700, 1500), (3, 192, 97), (2, 1000, 1000)):
        q = torch.randn(batch, seqlen_q, 6, head_dim, device="cuda").bfloat16()
        k, v = (torch.randn(batch, seqlen_k, 2, head_dim, device="cuda").bfloat16() for _ in range(2))
        x = attngen.quantize(q, k, v)
        with only_known(package_of_kernels([kernel], "tests/gpu")):
            runs = [attngen.attention(x.q, x.k, x.v, variant="full", return_lse=True, **x.descales) for _ in range(10)]
        assert all(torch.equal(bits(one), bits(other)) for run in runs for one, other in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "batch", "kv_heads"), [(64, 2100, 2, 2), (128, 1900, 1, 4), (128, 1999, 2, 1)]
)
def test_long_rows_of_maps_are_cut(
    head_dim: int, seqlen: int, batch: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map with its visible pairs says how many of its rows are long, which parts share then."""
    kernels()
    generator = torch.Generator("cuda").manual_seed(seqlen)
    at = torch.arange(seqlen, device="cuda")
    allowed = (at[:, None] // 150 == at // 150).repeat(batch, 1, 1)
    allowed[0, :, 300:400] = torch.rand(seqlen, 100, device="cuda", generator=generator) < 0.9
    allowed[-1, :, -200:] = True
    shapes = ((batch, seqlen, 4, head_dim), *[(batch, seqlen, kv_heads, head_dim)] * 2)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for shape in shapes)
    above = torch.randn(shapes[0], device="cuda", generator=generator).bfloat16()
    KEPT.clear()
    for _ in range(3):  # the second use of a map completes it
        out = attention(q, k, v, variant="allowed", allowed=allowed)
        cut = torch.autograd.grad(out, (q, k, v), above)
    (entry,) = (entry for (sizes, *_), entry in kept_maps().items() if sizes[1] == "dqkv")
    assert entry.words is not None
    assert int(entry.words[entry.shape.map_words - 1]) >= 2
    seen = allowed[:, None]
    exact = [one.detach().double().transpose(1, 2).requires_grad_() for one in (q, k, v)]
    scores = exact[0] @ exact[1].repeat_interleave(4 // kv_heads, 1).transpose(2, 3) / head_dim**0.5
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ exact[2].repeat_interleave(4 // kv_heads, 1)
    expected = torch.autograd.grad(wanted, exact, above.double().transpose(1, 2))
    for one, other in zip(cut, expected, strict=True):
        assert float((one.double() - other.transpose(1, 2)).norm() / other.norm()) < 6e-3
    monkeypatch.setattr(tile_map, "_LONG", 1e9)
    KEPT.clear()
    for _ in range(3):
        whole = torch.autograd.grad(attention(q, k, v, variant="allowed", allowed=allowed), (q, k, v), above)
    close(cut, whole)


@pytest.mark.parametrize(
    ("name", "seqlen", "batch", "kv_heads"),
    [
        ("listed_queries-bf16-d64-dense-wgmma", 2100, 2, 2),
        ("listed_queries-bf16-d128-dense-wgmma", 2500, 1, 4),
        ("listed_queries-bf16-d128-dense-wgmma", 2200, 2, 1),
    ],
)
def test_long_query_tiles_of_maps_are_cut(name: str, seqlen: int, batch: int, kv_heads: int) -> None:
    """The same of a forward, whose map lists the KV tiles of each query tile."""
    head_dim = forward_kernels()[name].head_dim_qk
    first = 40
    generator = torch.Generator("cuda").manual_seed(seqlen)
    at = torch.arange(seqlen, device="cuda")
    allowed = (at[:, None] // 150 == at // 150).repeat(batch, 1, 1)
    allowed[0, 300:400] = torch.rand(100, seqlen, device="cuda", generator=generator) < 0.9
    allowed[-1, -200:] = True
    allowed[:, 700] = False
    seen = allowed | (at[:, None] < first)
    shapes = ((batch, seqlen, 4, head_dim), *[(batch, seqlen, kv_heads, head_dim)] * 2)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes)
    KEPT.clear()
    how: dict[str, Any] = {"package": FORWARD, "backend": "cuda", "return_lse": True}
    runs = [attngen.attention(q, k, v, variant="listed_queries", allowed=allowed, first=first, **how) for _ in range(6)]
    (entry,) = (entry for (sizes, *_), entry in kept_maps().items() if sizes[1] == "forward")
    assert entry.words is not None
    assert int(entry.words[entry.shape.map_words - 1]) >= 2
    exact = [one.double().transpose(1, 2) for one in (q, k, v)]
    scores = exact[0] @ exact[1].repeat_interleave(4 // kv_heads, 1).transpose(2, 3) / head_dim**0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    wanted = (scores.softmax(-1).nan_to_num(0) @ exact[2].repeat_interleave(4 // kv_heads, 1)).transpose(1, 2)
    for out, lse in runs:
        assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=2e-3)
    assert all(torch.equal(bits(out), bits(runs[-1][0])) for out, _ in runs[3:])


def test_the_rule_cuts_a_call_of_few_tiles_and_graphs_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients as without a cut, again and again, though nothing clears a counter in between."""
    kernel = kernels()["backward causal-bf16-d128-dense-wgmma"]
    case = Case("few", (1024,), (1024,), heads=8, kv_heads=4)
    inputs = make_inputs(kernel.variant, case, kernel.layout, Element(kernel.dtype, 128, 128), "cuda", 3)
    call = inputs.bind(kernel.variant)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(3))
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}

    def run() -> tuple[PinnedGradients, tuple[Tensor, ...], GradientBuffers]:
        buffers, _ = poisoned_gradients(kernel, call, given, None)
        launch = PinnedGradients(kernel, call, buffers)
        launch()
        return launch, (buffers.dq, buffers.dk, buffers.dv), buffers

    launch, results, buffers = run()
    assert buffers.workspaces["partials"].numel() > 0
    first = tuple(one.clone() for one in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
        launch()
    for _ in range(5):
        for one in (*results, *buffers.workspaces.values()):
            one.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        close(results, first)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(results[1:], first[1:], strict=True))
    monkeypatch.setattr(geometry, "cut_of", lambda *_: NONE)
    close(run()[1], first)


def close(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Sums of dQ in another order may round to the next number in bf16, which is up to 2^-7 of the largest away."""
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=8e-3 * (1e-6 + float(other.abs().max())))
