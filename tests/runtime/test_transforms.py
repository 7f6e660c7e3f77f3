"""Transforms of torch.func, forward mode and second derivatives, beside the same of dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import attngen
from attngen.errors import CallError
from attngen.runtime.autograd import transforms
from tests.runtime.gradient_driver import GradientDriver, build, taken_for_a_gpu
from tests.sampling import few

HEADS, KV_HEADS, DIM = 4, 2, 8


def tensors(batch: int = 2, queries: int = 6, keys: int = 6) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((batch, queries, HEADS), (batch, keys, KV_HEADS), (batch, keys, KV_HEADS))
    return [torch.randn(*shape, DIM, dtype=torch.float64) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, causal: bool = True) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    s = s if bias is None else s + bias[:, None, None]
    queries, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    s = s.masked_fill(queries + k.shape[1] - q.shape[1] < keys, -1e30) if causal else s
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = attngen.attention(q, k, v, variant="causal")
    return out


def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: function(*given).sin().sum()


def same(actual: Any, wanted: Any, atol: float = 1e-9) -> None:
    for one, other in zip(tree_leaves(actual), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


EVERY = (0, 1, 2)
DERIVATIVES: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "grad": lambda f, given: grad(loss(f), EVERY)(*given),
    "vjp": lambda f, given: vjp(f, *given)[1](given[0]),
    "jvp": lambda f, given: jvp(f, tuple(given), (given[0], given[2], given[1])),
    "jacrev": lambda f, given: jacrev(lambda q: f(q, *given[1:])[:, -1])(given[0]),
    "jacfwd": lambda f, given: jacfwd(lambda k: f(given[0], k, given[2])[:, -1])(given[1]),
    "forward over reverse": lambda f, given: hessian(lambda k: loss(f)(given[0], k, given[2]))(given[1]),
    "reverse over forward": lambda f, given: jacrev(jacfwd(lambda v: loss(f)(*given[:2], v)))(given[2]),
    "forward over forward": lambda f, given: jacfwd(jacfwd(lambda q: loss(f)(q, *given[1:])))(given[0][:, :2]),
    "for each sample": lambda f, given: vmap(
        lambda *one: grad(loss(f), EVERY)(*(t[None] for t in one))
    )(*given),
}  # fmt: skip


@few("name", DERIVATIVES, always=range(0, 999, 3))
def test_derivatives(name: str) -> None:
    given = tensors(2 if name in ("grad", "for each sample") else 1, 3, 4)
    same(DERIVATIVES[name](causal, given), DERIVATIVES[name](dense, given))


@pytest.mark.parametrize("dims", [(0, 0, 0), (2, None, 1), (None, 0, None)])
def test_a_mapped_dimension_is_part_of_the_batch(dims: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    forward = transforms.Attention.forward
    monkeypatch.setattr(transforms.Attention, "forward", staticmethod(lambda *a: calls.append(a) or forward(*a)))
    given = [t if d is None else torch.stack([t, t + 1, t - 1], d) for t, d in zip(tensors(), dims, strict=True)]
    same(vmap(causal, dims)(*given), vmap(dense, dims)(*given))
    assert len(calls) == 1
    mapped, plain = (loss(lambda *a, f=f: vmap(f, dims)(*a)) for f in (causal, dense))
    same(grad(mapped, EVERY)(*given), grad(plain, EVERY)(*given))


BIASED = attngen.variant(
    "q_pos >= kv", "s + bias[b]", tensors={"bias": {"dtype": "fp32", "shape": ["b"], "grad": True}}, name="biased"
)
#: Reads the number of a sequence outside of an index of what each sequence has, or has a tensor that all share.
COUNTED = attngen.variant("q_pos >= kv", "s + 0.1 * b", name="counted")
SLOPED = attngen.variant(
    "q_pos >= kv", "s + slope[h]", tensors={"slope": {"dtype": "fp32", "shape": ["h"], "grad": True}}, name="sloped"
)


def test_tensors_of_a_variant() -> None:
    """One for each sequence is folded; what sequences share, and numbers of sequences, take a call for each element."""
    given = [t[:, None] for t in tensors(3)]
    bias = torch.rand(3, 1, dtype=torch.float64)
    made = lambda q, k, v, bias: attngen.attention(q, k, v, variant=BIASED, bias=bias)  # noqa: E731
    same(vmap(made)(*given, bias), vmap(dense)(*given, bias))
    every = (0, 1, 2, 3)
    same(vmap(grad(loss(made), every))(*given, bias), vmap(grad(loss(dense), every))(*given, bias))
    counted = lambda *a: attngen.attention(*a, variant=COUNTED)  # noqa: E731
    same(vmap(counted)(*given), vmap(dense)(*given))  # a constant for all keys of a sequence changes nothing
    slope = torch.rand(3, HEADS, dtype=torch.float64)
    sloped = lambda q, k, v, slope: attngen.attention(q, k, v, variant=SLOPED, slope=slope)  # noqa: E731
    same(vmap(sloped)(*given, slope), vmap(dense)(*given))
    gradients = vmap(grad(loss(sloped), 3))(*given, slope)
    assert gradients.shape == slope.shape
    recorded = {variant: transforms.Recorded.of(_given(variant, given), None, None)[0] for variant in (COUNTED, BIASED)}
    alone = [None] * len(transforms.TENSORS)
    assert transforms.batch_axes(recorded[COUNTED], tuple(alone), alone) is None


def _given(variant: Any, given: list[Tensor]) -> Any:
    from attngen.runtime.arguments.given import Given

    return Given(*given, variant=variant)


def test_packed_sequences_and_used_keys() -> None:
    q, k, v = (t.flatten(0, 1) for t in tensors(2, 6, 6))
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attngen.attention_varlen(q, k, v, starts, starts, 6, 6, variant="causal")
        return out

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(*(t.unflatten(0, (2, 6)) for t in (q, k, v))).flatten(0, 1)

    for name in ("grad", "jvp"):
        same(DERIVATIVES[name](packed, [q, k, v]), DERIVATIVES[name](plain, [q, k, v]))
    twice = torch.stack([q, q + 1])
    same(vmap(packed, (0, None, None))(twice, k, v), vmap(plain, (0, None, None))(twice, k, v))
    given, used = tensors(3), torch.tensor([4, 2, 6], dtype=torch.int32)
    one = lambda q, k, v, used: attngen.attention(q[None], k[None], v[None], seqused_k=used[None])[0]  # noqa: E731
    same(vmap(one)(*given, used), attngen.attention(*given, seqused_k=used))


def test_log_sum_exps_sinks_and_rows_that_see_nothing() -> None:
    made = attngen.variant(
        "q_pos > kv", sink="mine[h]", tensors={"mine": {"dtype": "fp32", "shape": ["h"], "grad": True}}, name="sunk"
    )
    q, k, v = tensors(1, 4, 4)
    sink = torch.rand(HEADS, dtype=torch.float64)

    def both(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, lse = attngen.attention(q, k, v, variant=made, mine=sink, return_lse=True)
        return out.sum() + lse.sin().sum()

    assert torch.autograd.gradcheck(
        both, [t.requires_grad_() for t in (q, k, v, sink)], check_forward_ad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(both, [q, k, v, sink], fast_mode=True)
    out, moved = jvp(lambda q: attngen.attention(q, k, v, variant=made, mine=sink), (q.detach(),), (q.detach(),))
    assert not out[:, 0].any()
    assert not moved[:, 0].any()


def test_merged_parts_are_differentiated() -> None:
    q, k, v = tensors(2, 5, 6)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [attngen.attention(q, k[:, rows], v[:, rows], return_lse=True) for rows in (slice(0, 2), slice(2, 6))]
        return attngen.merge(*zip(*parts, strict=True))[0]

    plain = lambda q, k, v: dense(q, k, v, causal=False)  # noqa: E731
    for name in ("grad", "jvp", "for each sample"):
        same(DERIVATIVES[name](merged, [q, k, v]), DERIVATIVES[name](plain, [q, k, v]))
    small = [q[:1, :2], k[:1], v[:1]]
    same(*(DERIVATIVES["forward over reverse"](f, small) for f in (merged, plain)))


def test_keys_in_pages_are_refused_in_one_sentence() -> None:
    q = torch.randn(1, 1, 2, 8)
    table, used = torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    call = lambda q: attngen.attention_paged(q, q, q, table, used).sum()  # noqa: E731
    for transformed in (grad(call), vmap(call), lambda q: jvp(call, (q,), (q,))):
        with pytest.raises(CallError, match=r"^attention over pages has no derivative and no rule for vmap: [^\n]*$"):
            transformed(q if transformed is not vmap else q[None])


# --- kernels, which a driver computes in torch --------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


def rounded() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, 20, heads, 64).to(torch.bfloat16) for heads in (4, 2, 2)]


def near(actual: Any, wanted: Any) -> None:
    for one, other in zip(tree_leaves(actual), tree_leaves(wanted), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=0, atol=0.03 * float(other.abs().max()))


#: Launches of each, whatever wraps the tensors.
LAUNCHED = {
    "grad": ["forward", "preprocess", "dkdv", "dq"],
    "vjp": ["forward", "preprocess", "dkdv", "dq"],
    "jvp": ["forward"],
    "for each sample": ["forward", "preprocess", "dkdv", "dq"],
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_kernels_run_under_transforms(gpu: GradientDriver, name: str) -> None:
    build()
    given = rounded()
    derivatives = DERIVATIVES[name](causal, given)
    assert gpu.launches == LAUNCHED[name]
    near(derivatives, DERIVATIVES[name](dense, [t.double() for t in given]))


def test_second_derivatives_and_tangents_of_kernels(gpu: GradientDriver) -> None:
    build()
    given = [t.requires_grad_() for t in rounded()]
    doubles = [t.detach().double().requires_grad_() for t in given]

    def twice(function: Callable[..., Tensor], inputs: list[Tensor]) -> Any:
        first = torch.autograd.grad(function(*inputs).float().sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(first[0].float().square().sum() + first[2].float().sum(), inputs)

    near(twice(causal, given), twice(dense, doubles))
    assert gpu.launches == ["forward", *["preprocess", "dkdv", "dq"] * 2]  # dO depends on q, too
    q, k, v = (t.detach() for t in given)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(causal(forward_ad.make_dual(q, k.repeat_interleave(2, 2)), k, v)).tangent
    moved = jvp(lambda q: dense(q, k.double(), v.double()), (q.double(),), (k.double().repeat_interleave(2, 2),))[1]
    near(tangent, moved)


def test_a_gradient_that_no_kernel_has_is_refused(gpu: GradientDriver) -> None:
    build("shifted", 'variants:\n  shifted: {mask: "q_pos >= kv", score: "s + 0.0 * shift[h]", '
          "tensors: {shift: {dtype: float32, shape: [h]}}}\n")  # fmt: skip
    q, k, v = rounded()
    call = lambda shift: attngen.attention(q, k, v, variant="shifted", shift=shift).float().sum()  # noqa: E731
    with pytest.raises(CallError, match="tensor 'shift' requires a gradient that its spec does not declare"):
        grad(call)(torch.zeros(4))


PAGES = torch.randn(6, 8, 2, 8)
TABLE, USED = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([20, 17], dtype=torch.int32)
FEW_Q, FEW_K = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)


def appended(k: Tensor, cache: Tensor = PAGES) -> Tensor:
    cache = cache.clone()
    attngen.append_kv(k, k, cache, cache.clone(), USED - 10, page_table=TABLE)
    return cache


def scaled(scale: Tensor) -> Tensor:
    quantized = attngen.quantize(FEW_Q, FEW_K, FEW_K)
    descales = {**quantized.descales, "q_descale": scale}
    return attngen.attention(quantized.q, quantized.k, quantized.v, **descales).float().sum()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: torch.func.vmap(appended)(FEW_K[None]), "append_kv has no rule for the transforms of torch.func"),
        (
            lambda: torch.func.vmap(appended, in_dims=(None, 0))(FEW_K, PAGES[None]),
            "append_kv has no rule for the transforms of torch.func",
        ),
        (lambda: torch.func.jvp(appended, (FEW_K,), (FEW_K,)), "append_kv has no rule for the transforms"),
        (lambda: torch.func.functionalize(appended)(FEW_K), "append_kv has no rule for the transforms"),
        (
            lambda: torch.func.vmap(lambda signs: attngen.quantize(FEW_Q, FEW_K, FEW_K, signs=signs).q_descale)(
                torch.ones(1, 8)
            ),
            "quantize has no rule for the transforms of torch.func",
        ),
        (
            lambda: torch.func.jvp(lambda q: attngen.quantize(q, FEW_K, FEW_K).q_descale, (FEW_Q,), (FEW_Q,)),
            "quantize has no rule for the transforms of torch.func",
        ),
        (
            lambda: torch.func.functionalize(lambda q: attngen.attention(q, FEW_K, FEW_K))(FEW_Q),
            "attention has no rule for torch.func.functionalize, .* allowed: grad, vjp, jvp, vmap",
        ),
        (lambda: torch.func.grad(scaled)(torch.ones(2, 2)), "attention in 8 bits has no derivative"),
        (
            lambda: torch.func.grad(lambda q: attngen.attention(q, q, q).sum())(FEW_Q.to("meta")),
            "derivatives of torch.func need tensors with data",
        ),
        (
            lambda: torch.jit.trace(lambda q: attngen.attention(q, FEW_K, FEW_K), (FEW_Q,)),
            "torch.jit.trace cannot record a launch; allowed: torch.compile, torch.export",
        ),
    ],
)
def test_transforms_without_a_rule_are_refused(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(CallError, match=told):
        call()


def test_tangents_are_not_lost_without_a_word() -> None:
    compiled = torch.compile(lambda q: attngen.attention(q, FEW_K, FEW_K), backend="eager")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(FEW_Q, FEW_Q)
        with pytest.raises(CallError, match="compiled programs have no forward-mode derivative of attention"):
            compiled(dual)
        with pytest.raises(CallError, match="quantize is not differentiable"):
            attngen.quantize(dual, FEW_K, FEW_K)
