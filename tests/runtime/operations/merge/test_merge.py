"""Merging parts: the same as attention over all keys, with its gradients, where parts or rows see nothing, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.attention.operators import operators_of
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.pages import starts_of
from tests.runtime.support import kernel, variant
from tests.sampling import few

FULL = variant("full", None)


def qkv(dtype: torch.dtype = torch.float64, keys: int = 11, heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shapes = ((2, 5, heads, 8), (2, keys, 2, 8), (2, keys, 2, 8))
    return [torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def parts_of(q: Any, k: Any, v: Any, ends: Sequence[int], layout: str = "bshd") -> tuple[Any, Any]:
    axis = 1 if layout == "bshd" else 2
    parts = []
    for first, last in zip((0, *ends), (*ends, k.shape[axis]), strict=True):
        own = (t.narrow(axis, first, last - first) for t in (k, v))
        parts.append(attngen.attention(q, *own, variant=FULL, return_lse=True, layout=layout))
    return tuple(zip(*parts, strict=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("ends", [(), (4,), (4, 4), (0, 3, 11), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)])
def test_parts_give_the_whole(layout: str, ends: tuple[int, ...]) -> None:
    """Parts of no keys among them: results and gradients are those of one call."""
    leaves = qkv()
    given = [t.transpose(1, 2) if layout == "bhsd" else t for t in leaves]
    merged = attngen.merge(*parts_of(*given, ends, layout), layout=layout)
    whole = attngen.attention(*given, variant=FULL, return_lse=True, layout=layout)
    above = [torch.randn_like(t) for t in whole]
    for a, b in zip(merged, whole, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(t, leaves, above) for t in (merged, whole)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_any_grouping_gives_the_same() -> None:
    outs, lses = parts_of(*qkv(), (2, 5, 9))
    pairs = [attngen.merge(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
    for a, b in zip(attngen.merge(*zip(*pairs, strict=True)), attngen.merge(outs, lses), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_tensor_of_parts() -> None:
    outs, lses = parts_of(*qkv(), (2, 5))
    for a, b in zip(attngen.merge(torch.stack(outs), torch.stack(lses)), attngen.merge(outs, lses), strict=True):
        assert torch.equal(a, b)


def test_packed_rows() -> None:
    q, k, v = (t.detach().flatten(0, 1) for t in qkv())
    starts = starts_of([5, 5])

    def part(first: int, last: int) -> Any:
        own = (t.unflatten(0, (2, 11))[:, first:last].flatten(0, 1) for t in (k, v))
        keys = starts_of([last - first] * 2)
        return attngen.attention_varlen(q, *own, starts, keys, 5, last - first, variant=FULL, return_lse=True)

    merged = attngen.merge(*zip(part(0, 6), part(6, 11), strict=True))
    for a, b in zip(merged, part(0, 11), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_prefix_of_all_sequences_is_computed_once() -> None:
    q, k, v = (t.detach() for t in qkv())
    prefix = [torch.randn(1, 7, 2, 8, dtype=torch.float64) for _ in range(2)]
    rows = q.flatten(0, 1)[None]  # the queries of all sequences as one
    out, lse = attngen.attention(rows, *prefix, variant=FULL, return_lse=True)
    shared = out.view(q.shape), lse.unflatten(2, (2, 5))[0].transpose(0, 1)
    own = attngen.attention(q, k, v, variant=FULL, return_lse=True)
    merged = attngen.merge(*zip(shared, own, strict=True))
    joined = [torch.cat([p.expand(2, -1, -1, -1), t], dim=1) for p, t in zip(prefix, (k, v), strict=True)]
    for a, b in zip(merged, attngen.attention(q, *joined, variant=FULL, return_lse=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- rows and parts that see nothing -------------------------------------------------------------------------


def with_blind_rows(dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three parts: in row 0 none has seen a key, in row 1 the first alone has, in row 2 the others have."""
    torch.manual_seed(4)
    outs = [torch.randn(1, 3, 2, 4, dtype=dtype) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=dtype) for _ in range(3)]
    for i, lse in enumerate(lses):
        lse[:, :, 0] = -math.inf
        lse[:, :, 1 if i else 2] = -math.inf
    return outs, lses


def test_rows_that_a_part_did_not_see_do_not_matter() -> None:
    outs, lses = with_blind_rows()
    out, lse = attngen.merge(outs, lses)
    assert (out[:, 0] == 0).all()
    assert (lse[:, :, 0] == -math.inf).all()
    assert torch.equal(out[:, 1], outs[0][:, 1])
    assert torch.equal(lse[:, :, 1], lses[0][:, :, 1])
    for junk in (math.nan, math.inf):
        loud = [
            torch.where((lse == -math.inf).transpose(1, 2)[..., None], junk, out)
            for out, lse in zip(outs, lses, strict=True)
        ]
        assert all(not torch.isfinite(t).all() for t in loud)
        for a, b in zip(attngen.merge(loud, lses), (out, lse), strict=True):
            assert torch.equal(a, b)


def test_gradients_of_rows_that_saw_nothing_are_zero() -> None:
    outs, lses = with_blind_rows()
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = attngen.merge(outs, lses)
    above = (torch.randn_like(out), torch.randn_like(lse))
    gradients = torch.autograd.grad((out, lse), leaves, above)
    assert all(torch.isfinite(t).all() for t in gradients)
    for i, (of_out, of_lse) in enumerate(zip(gradients[:3], gradients[3:], strict=True)):
        blind = lses[i].detach() == -math.inf
        assert (of_lse[blind] == 0).all()
        assert (of_out.transpose(1, 2)[blind] == 0).all()
        assert (of_lse[~blind] != 0).all()
    torch.testing.assert_close(gradients[0][:, 1], above[0][:, 1])  # the only part of its row gets all of it


def test_gradcheck_beside_rows_that_saw_nothing() -> None:
    """The numbers that are −inf cannot be moved, and stay as they are; all others are checked, twice."""
    outs, lses = with_blind_rows()
    seen = [lse != -math.inf for lse in lses]
    finite = [lse[one].clone().requires_grad_() for lse, one in zip(lses, seen, strict=True)]

    def merged(*given: torch.Tensor) -> Any:
        logs = [
            torch.full_like(lse, -math.inf).masked_scatter(one, values)
            for lse, one, values in zip(lses, seen, given[3:], strict=True)
        ]
        out, lse = attngen.merge(given[:3], logs)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    inputs = (*(t.requires_grad_() for t in outs), *finite)
    assert torch.autograd.gradcheck(merged, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(merged, inputs, fast_mode=True)


def test_large_numbers_do_not_overflow() -> None:
    outs, lses = with_blind_rows(torch.float32)
    for shift in (-3e38, -1e4, 1e4, 3e38):
        out, lse = attngen.merge(outs, [t + shift for t in lses])
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse[:, :, 1:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    outs = [torch.randn(2, 9, 4, 16).to(dtype) for _ in range(64)]
    lses = [5 * torch.randn(2, 4, 9) for _ in range(64)]
    out, lse = attngen.merge(outs, lses)
    exact, exact_lse = attngen.merge([t.double() for t in outs], [t.double() for t in lses])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


# --- programs, calls and errors ------------------------------------------------------------------------------


@pytest.mark.exhaustive
@few("backend", ["eager", "aot_eager"], always=(1,))
def test_a_program_compiles(backend: str) -> None:
    registry.add(package_of_kernels([kernel(variant("merged", None), package="merging")], "memory"))
    operators_of("merging/merged")
    leaves = qkv(torch.float32)

    def program(q: Any, k: Any, v: Any) -> Any:
        parts = [
            attngen.attention(q, k[:, rows], v[:, rows], variant="merging/merged", return_lse=True)
            for rows in (slice(0, 5), slice(5, None))
        ]
        out, lse = attngen.merge(*zip(*parts, strict=True))
        return out.square().sum() + lse.sum()

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, program)), strict=True):
        torch.testing.assert_close(a, b)


_OUT, _LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "options", "message"),
    [
        ([], [], {}, "at least one, got 0 and 0"),
        ([_OUT], [_LSE, _LSE], {}, "as many log-sum-exps as outputs, at least one, got 1 and 2"),
        ([_OUT, _OUT.half()], [_LSE] * 2, {}, r"outs\[0\] has torch.float32 on cpu, but outs\[1\] has torch.float16"),
        ([_OUT, _OUT[:, :2]], [_LSE, _LSE[..., :2]], {}, r"has shape \(2, 3, 4, 8\), but outs\[1\] has \(2, 2, 4, 8\)"),
        ([_OUT, _OUT[0]], [_LSE, _LSE[0]], {}, r"outs\[1\] must have 4 dimensions, got shape \(3, 4, 8\)"),
        ([_OUT[0, 0]], [_LSE], {}, "must have 3 or 4 dimensions"),
        ([_OUT], [_LSE.mT], {}, r"lses\[0\] must have shape \(2, 4, 3\) beside outs\[0\], got \(2, 3, 4\)"),
        ([_OUT], [_LSE], {"layout": "bhsd"}, r"lses\[0\] must have shape \(2, 3, 4\)"),
        ([_OUT], [_LSE], {"layout": "bsdh"}, "layout must be one of bshd, bhsd, got 'bsdh'; did you mean 'bshd'"),
        ([_OUT], [_LSE.half()], {}, r"lses\[0\] must be float32 on cpu, got torch.float16 on cpu"),
        ([_OUT.int()], [_LSE], {}, "has dtype torch.int32; allowed: torch.bfloat16"),
        ([1], [_LSE], {}, r"outs\[0\] must be a torch.Tensor, got int"),
        (torch.tensor(1.0), [_LSE], {}, "outs must be a sequence of tensors"),
        ([_OUT.expand(2, 3, 4, 8), torch.zeros(3, 3, 4, 8)], [_LSE, torch.zeros(3, 4, 3)], {}, r"has \(3, 3, 4, 8\)"),
    ],
)  # fmt: skip
def test_errors_name_the_tensors_that_do_not_fit(outs: Any, lses: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attngen.merge(outs, lses, **options)
