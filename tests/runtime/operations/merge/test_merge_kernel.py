"""The kernel that merges two results, run on the host through the runtime that launches it, beside float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lab.verify.merged import try_merge
from attngen.runtime.operations.merge import kernel as merge_kernel
from attngen.runtime.operations.merge.arguments import Merge, check
from attngen.runtime.operations.merge.in_torch import merge
from attngen.runtime.operations.merge.kernel import MERGES
from tests.runtime.host_kernels import HostDriver, merging_kernels, on_host
from tests.sampling import few, sampled

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's."""
    with on_host(monkeypatch, merging_kernels(), MERGES.prepared) as driver:
        yield driver


def results(*shape: int, dtype: torch.dtype = torch.bfloat16, layout: str = "bshd") -> tuple[Any, Any]:
    """Two outputs and log-sum-exps. Neither, one or the other part saw a key; those that did not hold NaN."""
    outs, lses = [], []
    for part in range(2):
        lse = 4 * torch.randn(shape[:-1])
        lse[torch.rand(lse.shape) < 0.2] = -math.inf
        lse.view(-1)[:1], lse.view(-1)[1 + part : 2 + part] = -math.inf, -math.inf
        outs.append(torch.randn(shape).masked_fill((lse == -math.inf)[..., None], math.nan).to(dtype))
        lses.append(lse if layout == "bhsd" and len(shape) == 4 else lse.transpose(-1, -2).contiguous())
    return outs, lses


def both(
    host: HostDriver, outs: list[Tensor], lses: list[Tensor], layout: Any = "bshd", launches: int = 1
) -> tuple[Tensor, Tensor]:
    """Merge by a kernel, and in float64."""
    before = len(host.launches)
    out, lse = attngen.merge(outs, lses, layout=layout)
    assert len(host.launches) == before + launches
    wanted, wanted_lse = merge([t.double() for t in outs], [t.double() for t in lses], layout)
    assert (out.dtype, lse.dtype) == (outs[0].dtype, torch.float32)
    assert not launches or (out.is_contiguous() and lse.is_contiguous())
    torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(out.dtype).eps / 2 + 1e-6, atol=4e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    return out, lse


@sampled(
    always=3, dtype=DTYPES, shape=[(2, 3, 5, 64), (4, 5, 8), (1, 33, 2, 80), (3, 1, 7, 192), (1, 7, 512), (1, 1, 1, 8)]
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_random_results(host: HostDriver, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    both(host, *results(*shape, dtype=dtype, layout=layout), layout=layout)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_any_strides(host: HostDriver, layout: str) -> None:
    outs, lses = results(2, 3, 5, 16, layout=layout)
    wanted = both(host, outs, lses, layout)
    wide = [torch.cat([out, out], -1)[..., 16 * part : 16 * part + 16] for part, out in enumerate(outs)]
    turned = [out.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for out in outs]
    logs = [lse.permute(2, 0, 1).contiguous().permute(1, 2, 0) for lse in lses]
    spread = [lse.repeat_interleave(3, -1)[..., 1::3] for lse in lses]
    for given, beside in ((wide, lses), (turned, logs), ([outs[0], turned[1]], [spread[0], lses[1]])):
        for a, b in zip(both(host, given, beside, layout), wanted, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(both(host, torch.stack(outs), torch.stack(lses), layout), wanted, strict=True):  # type: ignore[arg-type]
        assert torch.equal(a, b)


def test_a_part_that_all_sequences_share(host: HostDriver) -> None:
    outs, lses = results(3, 2, 4, 24)
    for part in range(2):
        own = [t[:1] if i == part else t for i, t in enumerate(outs)]
        logs = [t[:1] if i == part else t for i, t in enumerate(lses)]
        out, lse = both(host, own, logs)
        expanded = [t.expand(3, -1, -1, -1) for t in own], [t.expand(3, -1, -1) for t in logs]
        for a, b in zip(both(host, *expanded), (out, lse), strict=True):
            assert torch.equal(a, b)
    one = [outs[0][:1], outs[1][:1]], [lses[0][:1], lses[1][:1]]
    assert both(host, *one)[0].shape == (1, 2, 4, 24)


def test_rows_of_one_part_are_kept_as_they_are(host: HostDriver) -> None:
    for dtype in DTYPES:
        outs, lses = results(1, 9, 2, 16, dtype=dtype)
        lses[1][:] = -math.inf
        outs[1][:] = math.nan
        lses[0][:, :, 0], lses[0][:, :, 1:] = -math.inf, lses[0][:, :, 1:].nan_to_num(neginf=1.0)
        outs[0][:] = torch.randn(outs[0].shape)
        for given, beside in ((outs, lses), (outs[::-1], lses[::-1])):
            out, lse = both(host, given, beside)
            assert torch.equal(out[:, 1:], outs[0][:, 1:])
            assert (out[:, 0] == 0).all()
            assert torch.equal(lse, lses[0])


def test_large_log_sum_exps_do_not_overflow(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    for shift in (-3e38, -1e4, 1e4, 3e38):
        out, lse = attngen.merge(outs, [t + shift for t in lses])
        assert torch.isfinite(out).all()
        assert not lse.isnan().any()


def test_what_is_not_finite_shows(host: HostDriver) -> None:
    """As in torch."""
    outs, lses = results(1, 6, 1, 8)
    outs, given = [torch.ones_like(out) for out in outs], [lse.nan_to_num(neginf=0.5) for lse in lses]
    for part, row, value in ((0, 1, math.nan), (1, 2, math.nan), (0, 3, math.inf), (1, 4, math.inf)):
        given[part][0, 0, row] = value
    given[0][0, 0, 5], given[1][0, 0, 5] = math.nan, -math.inf
    for a, b in zip(attngen.merge(outs, given), merge(outs, given, "bshd"), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert len(host.launches) == 1


def test_calls_that_are_left_to_torch(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    three = [*outs, outs[0]], [*lses, lses[0]]
    both(host, *three, launches=0)
    both(host, outs[:1], lses[:1], launches=0)
    both(host, [out[..., :12] for out in outs], lses, launches=0)  # 24 bytes
    both(host, [torch.cat([out, out], -1)[..., 1:17] for out in outs], lses, launches=0)
    both(host, [out.mT.contiguous().mT for out in outs], lses, launches=0)
    both(host, [out[:0] for out in outs], [lse[:0] for lse in lses], launches=0)
    both(host, [out[..., :0] for out in outs], lses, launches=0)
    for a, dtype in zip(attngen.merge(outs, [lses[0].double(), lses[1]]), (torch.bfloat16, torch.float64), strict=True):
        assert a.dtype == dtype
    both(host, [out.float() for out in outs], lses, launches=0)
    assert attngen.merge([out.double() for out in outs], lses)[0].dtype == torch.float64
    negative = torch._neg_view(-lses[0])
    assert negative.is_neg()
    both(host, outs, [negative, lses[1]], launches=0)
    both(host, outs, lses)


def test_gradients_are_torchs(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    for which in (outs, lses):
        leaf = which[1].clone().requires_grad_()
        given = [outs, lses]
        given = [[one[0], leaf] if one is which else one for one in given]
        merged = attngen.merge(*given)
        assert merged[0].requires_grad
        assert not host.launches
        with torch.no_grad():
            attngen.merge(*given)
        assert len(host.launches) == 1
        host.launches.clear()


def test_transforms_and_traces_of_jit_are_torchs(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    wanted = merge(outs, lses, "bshd")

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return attngen.merge(given[:2], given[2:])

    mapped = torch.func.vmap(call)(*(torch.stack([one, one]) for one in (*outs, *lses)))
    traced = torch.jit.trace(call, (*outs, *lses), check_trace=False)(*outs, *lses)
    for a, b, c in zip(mapped, wanted, traced, strict=True):
        torch.testing.assert_close(a[1], b)
        torch.testing.assert_close(c, b)
    _, moved = torch.func.jvp(lambda lse: call(*outs, lse, lses[1])[0], (lses[0],), (torch.ones(2, 4, 3),))
    assert moved.isfinite().all()
    assert moved.any()
    assert not host.launches


class Program(torch.nn.Module):
    """A program that merges, whatever the number of rows."""

    def forward(self, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        out, lse = attngen.merge(outs, lses)
        return out + 1, lse


@few("how", ["export", "compile"])
def test_programs_keep_it_whole(host: HostDriver, how: str) -> None:
    """One operator, which serves all numbers of rows."""
    outs, lses = results(2, 3, 4, 16)
    programs: list[list[str]] = []

    def noted(graph: torch.fx.GraphModule, _: Any = None) -> Any:
        programs.append([str(node.target) for node in graph.graph.nodes if "attngen" in str(node.target)])
        return graph

    if how == "compile":
        program = torch.compile(Program(), fullgraph=True, dynamic=True, backend=noted)
    else:
        rows = {1: torch.export.Dim("rows", min=2)}
        beside = {2: rows[1]}
        exported = torch.export.export(Program(), (outs, lses), dynamic_shapes=([rows] * 2, [beside] * 2))
        program = noted(exported.module())
    for given in ((outs, lses), results(2, 7, 4, 16)):
        for a, b in zip(program(*given), Program()(*given), strict=True):
            assert torch.equal(a, b)
    assert programs in ([["attngen.parts__merge"]], [["attngen.parts__merge.default"]])
    torch.library.opcheck(torch.ops.attngen.parts__merge.default, (*outs, *lses, "bshd"))


@pytest.mark.exhaustive
def test_programs_with_gradients_are_torchs(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    leaf = outs[0].nan_to_num().requires_grad_()
    targets: list[str] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    program = torch.compile(Program(), fullgraph=True, backend=noted)
    for a, b in zip(program([leaf, outs[1]], lses), Program()([leaf, outs[1]], lses), strict=True):
        torch.testing.assert_close(a, b)
    assert not any("attngen" in one for one in targets)
    with torch.no_grad():
        program([leaf, outs[1]], lses)
    assert any("attngen" in one for one in targets)


@pytest.mark.exhaustive
def test_transforms_in_programs_are_torchs(host: HostDriver) -> None:
    """torch's compiler sees no gradient that is asked for within a program."""
    outs, lses = results(2, 3, 4, 16)
    given = [*(out.nan_to_num() for out in outs), *lses]

    def merged(*given: Tensor) -> Tensor:
        return attngen.merge(given[:2], given[2:])[0]

    def gradient(*given: Tensor) -> Tensor:
        return torch.func.grad(lambda *given: merged(*given).square().sum())(*given)

    def tangent(*given: Tensor) -> Any:
        return torch.func.jvp(lambda first: merged(first, *given[1:]), given[:1], given[:1])

    def mapped(*given: Tensor) -> Tensor:
        return torch.func.vmap(lambda first: merged(first, *given[1:]))(torch.stack([given[0], 2 * given[0]]))

    for program in (gradient, tangent, mapped):
        compiled = torch.compile(program, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*given), program(*given))
    assert not host.launches


def test_calls_of_all_sizes_are_prepared_once(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides and ranks may change between calls of one dtype and layout."""
    made: list[Any] = []
    prepare = merge_kernel.prepare
    monkeypatch.setattr(merge_kernel, "prepare", lambda *call: made.append(call) or prepare(*call))
    given = [results(2, 3, 4, 16), results(1, 5, 4, 16), results(7, 4, 24), results(2, 3, 4, 64)]
    for _ in range(2):
        for outs, lses in given:
            both(host, outs, lses)
            both(host, [outs[0], outs[1].transpose(0, 1).contiguous().transpose(0, 1)], lses)
    outs, lses = given[0]
    both(host, [outs[0][:1], outs[1]], [lses[0][:1], lses[1]])
    assert len(made) == 1
    for _ in range(2):  # sizes that no kernel takes
        both(host, [out[..., :12] for out in outs], lses, launches=0)
    assert len(made) == 2
    with pytest.raises(CallError, match="lses\\[1\\] must have shape"):
        attngen.merge(outs, [lses[0], lses[1][:, :2]])
    assert len(made) == 2


def test_errors_are_those_of_torchs_path(host: HostDriver) -> None:
    outs, lses = results(2, 3, 4, 16)
    for given, beside, layout, message in (
        ([outs[0], outs[1].half()], lses, "bshd", "outs\\[0\\] has torch.bfloat16"),
        ([outs[0], outs[1][:, :2]], lses, "bshd", "lses\\[1\\] must have shape"),
        (outs, lses, "bhsd", "lses\\[0\\] must have shape"),
        (outs, lses, "hsbd", "layout must be one of"),
        (outs, lses, ["bshd"], "layout must be one of"),
    ):
        for _ in range(2):
            with pytest.raises(CallError, match=message):
                attngen.merge(given, beside, layout=layout)  # type: ignore[arg-type]


def test_steps_and_rows_of_more_than_32_bits_are_left_to_torch(host: HostDriver) -> None:
    kernel = merging_kernels()[0]

    def reason(out: Tensor, lse: Tensor) -> str:
        call = Merge(out, out, lse, lse, "bshd")
        return str(merge_kernel.prepare_on(kernel, call, check(call), host))

    lse = torch.empty(2, 1, 1, device="meta")
    far = torch.empty(2, 1, 1, 8, dtype=torch.bfloat16, device="meta").as_strided((2, 1, 1, 8), (2**31, 8, 8, 1))
    assert "steps of more elements" in reason(far, lse)
    many = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="meta").expand(1, 2**31 - 8, 1, 8)
    assert "more rows than" in reason(many, torch.empty(1, 1, 1, device="meta").expand(1, 1, 2**31 - 8))


def test_the_trial_of_the_kernels(host: HostDriver) -> None:
    for kernel in merging_kernels():
        trial = try_merge(kernel, "cpu", 1, small=True)
        assert all(case.ok for case in trial.results), [case.describe() for case in trial.results if not case.ok]
