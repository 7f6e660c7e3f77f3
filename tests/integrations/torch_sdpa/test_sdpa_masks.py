"""Whatever a mask, a tensor or a mode may be, a call inside the block gives what it gives outside of it."""

from __future__ import annotations

import contextvars
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from attngen.integrations import sdpa
from tests.sampling import few

TORCHS = F.scaled_dot_product_attention
Q, K, V = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 11, 8), torch.randn(2, 4, 11, 8)


def near(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


# --- torch's own mask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("rows", [7, 11])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias(make: Callable[..., CausalBias], rows: int, backend: str | None) -> None:
    q = torch.randn(2, 4, rows, 8)
    bias = make(rows, 11)
    wanted = F.scaled_dot_product_attention(q, K, V, attn_mask=bias)
    with sdpa(backend=backend, explain=True) as routed:
        near(F.scaled_dot_product_attention(q, K, V, attn_mask=bias), wanted)
        near(F.scaled_dot_product_attention(q[0], K[0], V[0], bias), wanted[0])
    name = "causal" if make is causal_lower_right and rows != 11 else "causal_top_left"
    assert dict(routed.variants) == ({name: 2} if backend else {})
    assert f"mask {rows}x11 {bias.variant.name.lower()}" in routed.report()


def test_causal_bias_learns_and_drops() -> None:
    inputs = [t.clone().requires_grad_() for t in (Q, K, V)]
    wanted = torch.autograd.grad(TORCHS(*inputs, causal_lower_right(7, 11)).square().sum(), inputs)
    with sdpa(backend="reference") as routed:
        out = F.scaled_dot_product_attention(*inputs, causal_lower_right(7, 11))
        for one, other in zip(torch.autograd.grad(out.square().sum(), inputs), wanted, strict=True):
            near(one, other)
        F.scaled_dot_product_attention(*inputs, causal_lower_right(7, 11), dropout_p=0.5)
    assert dict(routed.variants) == {"causal": 1, "causal_dropout": 1}


def test_a_causal_bias_for_other_lengths_is_torchs() -> None:
    for make, variants in ((causal_upper_left, {"causal_top_left": 1}), (causal_lower_right, {})):
        bias = make(5, 11)
        told: list[Any] = []
        with sdpa(backend="reference") as routed:
            for call in (F.scaled_dot_product_attention, None):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        told.append((call or TORCHS)(Q, K, V, attn_mask=bias) if call else _outside(Q, K, V, bias))
                    except RuntimeError as error:
                        told.append(str(error))
        assert dict(routed.variants) == variants
        if isinstance(told[1], str):
            assert told[0] == told[1]
        else:
            near(told[0], told[1])


def _outside(*arguments: Any, **options: Any) -> Any:
    """Call torch's function as a thread does that is in no block."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(F.scaled_dot_product_attention(*arguments, **options))
        except Exception as error:
            results.append(error)

    # free-threaded Python would hand it the context of this one
    thread = threading.Thread(target=contextvars.Context().run, args=(run,))
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def test_causal_bias_beside_is_causal_is_refused_as_by_torch() -> None:
    with sdpa(backend="reference"), pytest.raises(ValueError, match="should not be used with causal=True"):
        F.scaled_dot_product_attention(Q, K, V, causal_upper_left(7, 11), is_causal=True)


def test_threads_without_a_block_have_torchs_function() -> None:
    wanted = F.scaled_dot_product_attention(Q, K, V, causal_lower_right(7, 11))
    with sdpa(backend="reference") as routed:
        near(_outside(Q, K, V, causal_lower_right(7, 11)), wanted)
        F.scaled_dot_product_attention(Q, K, V)
    assert routed.routed == 1
    assert F.scaled_dot_product_attention is TORCHS


@few("make", [causal_upper_left, causal_lower_right])
def test_causal_bias_in_a_compiled_program(make: Callable[..., CausalBias]) -> None:
    def program(q: Tensor, bias: CausalBias) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.0, K, V, attn_mask=bias)

    wanted = program(Q, make(7, 11))
    torch._dynamo.reset()
    with sdpa(backend="reference") as routed:
        near(torch.compile(program, backend="eager", fullgraph=True)(Q, make(7, 11)), wanted)
    assert routed.routed == 0


# --- subclasses and modes -----------------------------------------------------------------------------------


class Own(Tensor):
    """A subclass that has attention of its own, told from other functions in one of several ways."""

    tells: Callable[[Any], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Own.tells(func):
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


TELLS: list[Callable[[Any], bool]] = [
    lambda func: func is torch.nn.functional.scaled_dot_product_attention,
    lambda func: func == F.scaled_dot_product_attention,
    lambda func: func is torch._C._nn.scaled_dot_product_attention,
    lambda func: func in {TORCHS: 0},
    lambda func: func.__name__ == "scaled_dot_product_attention",
]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("tells", TELLS)
def test_a_subclass_has_its_own_attention(tells: Callable[[Any], bool], place: int) -> None:
    Own.tells = tells  # type: ignore[method-assign]
    given = [Q, K, V, torch.zeros(7, 11)]
    given[place] = given[place].as_subclass(Own)
    with sdpa(backend="reference") as routed:
        assert F.scaled_dot_product_attention(*given) == "its own"  # type: ignore[comparison-overlap]
        F.scaled_dot_product_attention(Q, K, V)
    assert dict(routed.reasons) == {"there is a Own among the tensors": 1}
    assert routed.routed == 1


@pytest.mark.parametrize("tells", TELLS)
def test_a_mode_sees_torchs_function(tells: Callable[[Any], bool]) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "seen" if tells(func) else func(*args, **(kwargs or {}))

    with sdpa(backend="reference") as routed:
        with Mode():
            assert F.scaled_dot_product_attention(Q, K, V) == "seen"  # type: ignore[comparison-overlap]
        F.scaled_dot_product_attention(Q, K, V)
    assert dict(routed.reasons) == {"the mode Mode is active": 1}
    assert routed.routed == 1


def test_a_default_device_changes_nothing() -> None:
    with sdpa(backend="reference") as routed, torch.device("cpu"):
        near(F.scaled_dot_product_attention(Q, K, V), TORCHS(Q, K, V))
    assert routed.routed == 1


def test_what_is_recorded_is_torchs() -> None:
    """A graph of calls would lack what a kernel does; a tensor without data has no address."""
    with sdpa(backend="reference") as routed:
        graph = make_fx(lambda q: F.scaled_dot_product_attention(q, K, V) * 2)(Q)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert F.scaled_dot_product_attention(Q, K, V).shape == (2, 4, 7, 8)
    near(graph(Q + 1), TORCHS(Q + 1, K, V) * 2)
    assert routed.routed == 0
    with sdpa(backend="reference") as routed, FlopCounterMode(display=False):
        near(F.scaled_dot_product_attention(Q, K, V), TORCHS(Q, K, V))
    assert routed.routed == 1


def test_a_view_with_the_opposite_sign_is_torchs() -> None:
    minus = torch.complex(torch.zeros_like(Q), -Q).conj().imag
    assert minus.is_neg()
    assert torch.equal(minus, Q)
    q = torch.randn(2, 4, 7, 8, dtype=torch.complex64).conj().imag.contiguous()
    negated = torch._neg_view(q)
    with sdpa(backend="reference") as routed:
        near(F.scaled_dot_product_attention(negated, K, V), TORCHS(-q, K, V))
    assert list(routed.reasons) == ["there is a tensor whose sign is changed when it is read"]


# --- masks of every kind ------------------------------------------------------------------------------------


def some_call(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments of a call: shapes, dtypes, strides and masks of many kinds, some of them wrong."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    three = draw.random() < 0.2
    batch, rows, keys = (draw.choice(sizes) for sizes in ((0, 1, 2), (0, 1, 3, 7), (0, 1, 5, 11)))
    kv_heads = draw.choice((1, 2))
    heads = kv_heads * draw.choice((1, 1, 2))
    dim, dim_v = draw.choice((1, 4, 8)), draw.choice((1, 8))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    leading = (batch,) if three else (batch, heads)
    q = torch.randn(*leading, rows, dim, dtype=dtype)
    shape = (batch,) if three else (batch, kv_heads)
    k, v = torch.randn(*shape, keys, dim, dtype=dtype), torch.randn(*shape, keys, dim_v, dtype=dtype)
    options: dict[str, Any] = {"enable_gqa": heads != kv_heads or draw.random() < 0.2}
    if draw.random() < 0.2:
        options["scale"] = draw.choice((0.3, 1, True, torch.tensor(0.5)))
    kind = draw.choice(("none", "causal", "bias", "bool", "bool", "float", "float"))
    if kind == "causal":
        options["is_causal"] = draw.choice((True, 1))
    elif kind == "bias":
        options["attn_mask"] = draw.choice((causal_upper_left, causal_lower_right))(rows, keys)
    elif kind != "none":
        whole = (*leading, rows, keys)
        sizes = [size if draw.random() < 0.6 else 1 for size in whole]
        sizes = sizes[draw.randrange(len(sizes) - 1) :]
        mask = torch.rand(sizes) < 0.6
        if kind == "float":
            wide = torch.randn(sizes, dtype=draw.choice((dtype, torch.float32, torch.float64, torch.float16)))
            mask = wide.masked_fill(mask, -float("inf")) if draw.random() < 0.3 else wide
            mask.requires_grad_(draw.random() < 0.2)
        form = draw.random()
        if form < 0.2:
            mask = mask.expand(whole)
        elif form < 0.4:
            mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif form < 0.5:
            mask = torch.stack([mask, mask], dim=-1)[..., 0]
        options["attn_mask"] = mask
    if draw.random() < 0.1:
        k = k[..., :1]
    return (q, k, v), options


def told(call: Callable[..., Tensor], given: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*given, **options)
        except Exception as error:
            return type(error)


@few("first", range(0, 600, 100), always=1)
def test_calls_of_every_kind_are_as_outside(first: int) -> None:
    routed_calls = 0
    for seed in range(first, first + 100):
        given, options = some_call(seed)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = told(F.scaled_dot_product_attention, given, options)
            with sdpa(backend="reference") as routed:
                out = told(F.scaled_dot_product_attention, given, options)
        routed_calls += routed.routed
        if not isinstance(wanted, Tensor):
            assert out is wanted, (seed, out, wanted, routed.report())
            continue
        assert isinstance(out, Tensor), (seed, out, routed.report())
        assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype), seed
        if out.numel() and given[1].numel():  # where nothing is computed, torch forgets what asks for a gradient
            assert out.requires_grad == wanted.requires_grad, (seed, routed.report())
        tolerance = 3e-2 if out.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            out, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, s=seed: f"{s}: {text}"
        )
    assert routed_calls > 50
