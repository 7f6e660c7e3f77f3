"""Merging two results: the kernel against float64, over poisoned memory, in graphs, programs and streams."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import attngen
from attngen.build.pipeline import Prepared
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.merge.arguments import Merge, check
from attngen.runtime.operations.merge.in_torch import merge
from attngen.runtime.operations.merge.kernel import MERGES, PreparedMerge, prepare_on
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.gpu.family import arch_here, compiled_kernels
from tests.runtime.host_kernels import MERGED, prepared_mergers

DTYPES = [torch.bfloat16, torch.float16]
LAYOUTS: list[Literal["bshd", "bhsd"]] = ["bshd", "bhsd"]

#: What shares in float32 add to the rounding of a result, as parts of the magnitudes that are added.
SHARES = 2.0**-20


def to_build() -> list[Prepared]:
    return prepared_mergers(*MERGED, arch=arch_here().name)


@cache
def kernels() -> dict[str, Kernel]:
    """The kernels of all dtypes, for the GPU that is here."""
    return dict(zip(MERGED, compiled_kernels(to_build()), strict=True))


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    def forget() -> None:
        registry.clear()
        for kept in (MERGES.prepared, MERGES._kinds):
            kept.clear()

    forget()
    registry.add(package_of_kernels(list(kernels().values()), "tests/gpu/test_merge"))
    yield
    forget()


def results(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two outputs and log-sum-exps. In a part of the rows neither, one or the other saw a key; what those hold that did
    not is NaN, an infinity or a large number."""
    outs, lses = [], []
    for _ in range(2):
        rows = 6 * torch.randn(shape[:-1], device="cuda")
        rows[torch.rand(rows.shape, device="cuda") < 0.2] = -math.inf
        junk = torch.tensor([math.nan, math.inf, -math.inf, 6e4], device="cuda")
        junk = junk[torch.randint(0, 4, shape, device="cuda")]
        outs.append(torch.where((rows == -math.inf)[..., None], junk, torch.randn(shape, device="cuda")).to(dtype))
        lses.append(rows if layout == "bhsd" and len(shape) == 4 else rows.transpose(-1, -2).contiguous())
    return outs, lses


def poison(*like: Tensor) -> None:
    """Leave NaN in the memory that results will have."""
    wide = [torch.full((2 * one.numel() + 4096,), math.nan, dtype=one.dtype, device="cuda") for one in like]
    del wide


def both(outs: Any, lses: Any, layout: Any = "bshd", *, launches: bool = True) -> tuple[Tensor, Tensor]:
    """Merge by a kernel, and in float64."""
    poison(outs[0], outs[1], lses[0], lses[1])
    out, lse = attngen.merge(outs, lses, layout=layout)
    compare(out, lse, outs, lses, layout)
    if launches:
        kept = list(MERGES.prepared.values())
        assert kept
        assert all(isinstance(one, PreparedMerge) for one in kept)
        assert out.is_contiguous()
        assert lse.is_contiguous()
    return out, lse


def compare(out: Tensor, lse: Tensor, outs: Any, lses: Any, layout: str = "bshd") -> None:
    """Compare results with those of float64, each number within its own rounding."""
    wide, logs = [one.double() for one in outs], [one.double() for one in lses]
    wanted, wanted_lse = merge(wide, logs, layout)
    magnitudes, _ = merge([one.abs() for one in wide], logs, layout)
    kind = torch.finfo(out.dtype)
    allowed = kind.eps / 2 * (wanted.abs() + kind.tiny) + SHARES * magnitudes
    assert (out.dtype, lse.dtype) == (outs[0].dtype, torch.float32)
    assert bool(((out.double() - wanted).abs() <= allowed).all())
    nothing = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    assert bool(((lse.double() - wanted_lse).abs() <= 2.0**-21 * (2 + wanted_lse.abs()))[~nothing].all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_sizes(dtype: torch.dtype, layout: str) -> None:
    """Rows that end within blocks and warps, of every width up to 512."""
    draw = random.Random(3)
    widths = [8 * n for n in (1, 2, 3, 5, 7, 8, 10, 12, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64)]
    for width in widths:
        shape = draw.choice((1, 2, 3, 64)), draw.choice((1, 2, 7, 130)), draw.choice((1, 5, 8, 32)), width
        both(*results(shape, dtype, layout), layout)
        both(*results(shape[1:], dtype, layout))


@pytest.mark.parametrize("shape", [(64, 1, 32, 128), (1, 8192, 32, 128), (8192, 32, 192), (2, 3001, 17, 512)])
def test_large_results(shape: tuple[int, ...]) -> None:
    for layout in LAYOUTS:
        both(*results(shape, torch.bfloat16, layout), layout)


def test_results_beyond_32_bits_of_bytes() -> None:
    """Places in memory are counted in 64 bits. Both parts are the same for all sequences, so that they take none."""
    (outs, lses), sequences = results((1, 3, 32, 128), torch.bfloat16, "bshd"), 2**32 // (3 * 32 * 128 * 2) + 5
    every = [one.expand(sequences, -1, -1, -1) for one in outs], [one.expand(sequences, -1, -1) for one in lses]
    out, lse = attngen.merge(*every)
    compare(out[:1], lse[:1], outs, lses)
    for whole in (out, lse):
        assert torch.equal(whole[-1], whole[0])
        assert torch.equal(whole[sequences // 2 - 3 : sequences // 2 + 3], whole[:1].expand(6, *whole.shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(dtype: torch.dtype, layout: Any) -> None:
    outs, lses = results((3, 9, 5, 48), dtype, layout)
    wanted = both(outs, lses, layout)
    turned = [one.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for one in outs]
    halves = [torch.cat([torch.full_like(one, math.nan), one], -1)[..., 48:] for one in outs]
    logs = [one.permute(2, 1, 0).contiguous().permute(2, 1, 0) for one in lses]
    spread = [one.repeat_interleave(3, -1)[..., 1::3] for one in lses]
    for given, beside in (
        (turned, lses),
        (halves, logs),
        ([outs[0], halves[1]], [spread[0], logs[1]]),
        (turned, spread),
    ):
        for ours, theirs in zip(both(given, beside, layout), wanted, strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(both(torch.stack(outs), torch.stack(lses), layout), wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_all_sequences_share(layout: Any) -> None:
    outs, lses = results((6, 4, 3, 64), torch.bfloat16, layout)
    for part in range(2):
        own, logs = list(outs), list(lses)
        own[part], logs[part] = own[part][:1], logs[part][:1]
        wanted = both(own, logs, layout)
        expanded = [one.expand(6, -1, -1, -1) for one in own], [one.expand(6, -1, -1) for one in logs]
        for ours, theirs in zip(both(*expanded, layout), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_part_keep_their_bits(dtype: torch.dtype) -> None:
    outs, lses = results((4, 33, 8, 128), dtype, "bshd")
    outs[0] = torch.randn_like(outs[0])
    lses[0] = torch.randn_like(lses[0])
    outs[1].fill_(math.nan)
    lses[1].fill_(-math.inf)
    for given, beside in ((outs, lses), (outs[::-1], lses[::-1])):
        out, lse = both(given, beside)
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])
    out, lse = both([outs[1], outs[1]], [lses[1], lses[1]])
    assert not out.any()
    assert (lse == -math.inf).all()


def test_large_log_sum_exps_do_not_overflow() -> None:
    outs, lses = results((4, 33, 8, 64), torch.float16, "bshd")
    for shift in (-3e38, -1e4, 1e4, 3e38):
        out, lse = attngen.merge(outs, [one + shift for one in lses])
        assert torch.isfinite(out).all()
        assert not lse.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_beside_the_results(dtype: torch.dtype) -> None:
    kernel = kernels()[ATTENTION_DTYPES[dtype]]
    for shape in ((3, 7, 5, 24), (1, 1, 1, 8), (1, 129, 2, 64)):
        outs, lses = results(shape, dtype, "bshd")
        call = Merge(outs[0], outs[1], lses[0], lses[1], "bshd")
        sizes = check(call)
        prepared = prepare_on(kernel, call, sizes, drivers.current())
        assert isinstance(prepared, PreparedMerge)
        memory = torch.full((outs[0].numel() + 256,), 9.0, dtype=dtype, device="cuda")
        logs = torch.full((lses[0].numel() + 64,), 9.0, device="cuda")
        first = 16 // dtype.itemsize
        inputs = [one.clone() for one in (*outs, *lses)]
        prepared([*(one.data_ptr() for one in (*outs, *lses)), memory[first:].data_ptr(), logs[3:].data_ptr()])
        compare(
            memory[first:][: outs[0].numel()].view(sizes.out), logs[3:][: lses[0].numel()].view(sizes.lse), outs, lses
        )
        for whole, begin, count in ((memory, first, outs[0].numel()), (logs, 3, lses[0].numel())):
            assert (whole[:begin] == 9).all()
            assert (whole[begin + count :] == 9).all()
        for one, before in zip((*outs, *lses), inputs, strict=True):
            torch.testing.assert_close(one, before, rtol=0, atol=0, equal_nan=True)


def test_replays_of_a_graph() -> None:
    outs, lses = results((64, 1, 32, 128), torch.bfloat16, "bshd")
    both(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attngen.merge(outs, lses)
        total = out.float().sum(-1)
    for _ in range(10):
        new_outs, new_lses = results((64, 1, 32, 128), torch.bfloat16, "bshd")
        for old, new in zip((*outs, *lses), (*new_outs, *new_lses), strict=True):
            old.copy_(new)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        compare(out, lse, outs, lses)
        assert torch.equal(total, out.float().sum(-1))


def test_streams_change() -> None:
    """Each call sees what its stream wrote before, and its reader waits for it."""
    streams, kept = [torch.cuda.Stream() for _ in range(3)], []
    given = [results((5, 3, 4, 64), torch.float16, "bshd") for _ in range(30)]
    torch.cuda.synchronize()
    for case, (outs, lses) in enumerate(given):
        with torch.cuda.stream(streams[case % 3]):
            torch.cuda._sleep(100_000)
            late = [one.clone() for one in outs], [one.clone() for one in lses]
            kept.append([one.clone() for one in attngen.merge(*late)])
    torch.cuda.synchronize()
    for (outs, lses), (out, lse) in zip(given, kept, strict=True):
        compare(out, lse, outs, lses)


def test_a_call_does_not_wait_for_the_gpu() -> None:
    outs, lses = results((2, 3, 4, 64), torch.bfloat16, "bshd")
    both(outs, lses)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attngen.merge(outs, lses)
        attngen.merge([one[:, :2] for one in outs], [one[..., :2] for one in lses])  # of other sizes
        registry.clear()  # without a kernel, too
        attngen.merge(outs, lses)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_launch_of_a_kernel() -> None:
    outs, lses = results((64, 1, 32, 128), torch.bfloat16, "bshd")
    both(outs, lses)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        attngen.merge(outs, lses)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in seen.key_averages()}
    assert sum(count for name, count in counts.items() if name.startswith("merge_")) == 1
    assert not any("at::" in name or name.startswith(("Memcpy", "Memset")) for name in counts), counts


def test_all_other_calls_are_torchs() -> None:
    outs, lses = results((2, 3, 4, 64), torch.bfloat16, "bshd")
    both([*outs, outs[0]], [*lses, lses[0]], launches=False)
    both([one[..., 4:60] for one in outs], lses, launches=False)  # rows begin at multiples of 8 bytes
    both([one[..., :60] for one in outs], lses, launches=False)
    both([one[:0] for one in outs], [one[:0] for one in lses], launches=False)
    both([one.float() for one in outs], lses, launches=False)
    out, lse = attngen.merge(outs, [one.double() for one in lses])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float64)
    leaf = lses[0].nan_to_num(neginf=0.0).requires_grad_()
    out, lse = attngen.merge([one.nan_to_num(0.0, 0.0, 0.0) for one in outs], [leaf, lses[1]])
    (gradient,) = torch.autograd.grad(out.float().sum() + lse.sum(), leaf)
    assert torch.isfinite(gradient).all()
    assert gradient.any()


def test_compiled_programs_have_one_operator() -> None:
    outs, lses = results((2, 3, 4, 64), torch.bfloat16, "bshd")
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if "attngen" in str(node.target))
        return graph

    program = torch.compile(lambda outs, lses: attngen.merge(outs, lses), fullgraph=True, backend=backend)
    compare(*program(outs, lses), outs, lses)
    assert targets == ["attngen.parts__merge"]
    torch.library.opcheck(torch.ops.attngen.parts__merge.default, (*outs, *lses, "bshd"))


def test_programs_of_inductor() -> None:
    outs, lses = results((2, 3, 4, 64), torch.bfloat16, "bshd")
    compare(*torch.compile(lambda outs, lses: attngen.merge(outs, lses), fullgraph=True)(outs, lses), outs, lses)


@pytest.mark.parametrize("dtype", MERGED)
def test_the_trial_of_the_kernels(dtype: str) -> None:
    trial = try_pinned(kernels()[dtype], torch.device("cuda"), 5, small=False)
    assert all(case.ok for case in trial.results), [case.describe() for case in trial.results if not case.ok]
