"""NATTEN's functions on the reference, beside attention over coordinates of tokens in float64."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.natten import na1d, na2d, na3d
from attngen.integrations.natten.functions import Axis, orders_of
from tests.integrations.natten.neighbourhoods import Neighbourhood, along, dense
from tests.sampling import few, seeds

FUNCTIONS: dict[int, Callable[..., Any]] = {1: na1d, 2: na2d, 3: na3d}

CASES = [
    Neighbourhood((150,), (9,), (1,), (1,), (False,)),
    Neighbourhood((131,), (8,), (3,), (4,), (False,)),
    Neighbourhood((131,), (8,), (5,), (3,), (True,)),
    Neighbourhood((140,), (140,), (7,), (1,), (True,)),  # causal attention
    Neighbourhood((13, 17), (3, 4), (1, 1), (1, 1), (False, False)),
    Neighbourhood((13, 17), (4, 5), (2, 4), (3, 2), (False, True)),
    Neighbourhood((9, 16), (9, 16), (1, 1), (1, 1), (False, False)),  # full attention
    Neighbourhood((9, 16), (9, 5), (2, 5), (1, 3), (True, False)),
    Neighbourhood((5, 6, 7), (3, 2, 4), (1, 2, 3), (1, 1, 1), (False, False, False)),
    Neighbourhood((6, 5, 8), (2, 3, 2), (2, 1, 1), (2, 1, 3), (True, False, False)),
    Neighbourhood((1, 9, 20), (1, 3, 7), (1, 1, 1), (1, 3, 2), (False, True, True)),
]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def qkv(
    of: Neighbourhood, heads: int = 2, kv_heads: int = 1, columns: tuple[int, int] = (8, 16), batch: int = 2
) -> Any:
    return [
        torch.randn(batch, *of.grid, count, dim, dtype=torch.float64, requires_grad=True)
        for count, dim in ((heads, columns[0]), (kv_heads, columns[0]), (kv_heads, columns[1]))
    ]


def check(of: Neighbourhood, inputs: Sequence[Tensor], more: Sequence[Tensor] = (), **options: Any) -> None:
    """Compare output, log-sum-exp and the gradients of both."""
    additional = dict(zip(("additional_keys", "additional_values"), more, strict=bool(more)))
    out, lse = FUNCTIONS[len(of.grid)](*inputs, **of.options, **additional, **options, return_lse=True)
    wanted = dense(*inputs, of, more, **options)
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(lse.double(), wanted[1])
    leaves, weights = [*inputs, *more], (torch.randn_like(out), torch.randn_like(lse))
    gradients = torch.autograd.grad((out, lse), leaves, weights)
    exact = torch.autograd.grad(wanted, leaves, (weights[0], weights[1].double()))
    for one, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@few("of", CASES, always=range(0, 99, 6), ids=lambda of: str(tuple(of)).replace(" ", ""))
def test_results_and_gradients(of: Neighbourhood, poisoned: None) -> None:
    check(of, qkv(of))


@few("of", [CASES[0], CASES[5], CASES[6], CASES[9]], ids=lambda of: str(len(of.grid)), always=range(0, 999, 2))
def test_further_keys(of: Neighbourhood, poisoned: None) -> None:
    inputs = qkv(of)
    more = [torch.randn(2, 5, *given.shape[-2:], dtype=torch.float64, requires_grad=True) for given in inputs[1:]]
    check(of, inputs, more, scale=0.3)


@pytest.mark.exhaustive
@seeds(80, always=1)
def test_random_neighbourhoods(seed: int, poisoned: None) -> None:
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 2, 3, 3))
    grid = [draw.randint(2, (300, 20, 7)[rank - 1]) for _ in range(rank)]
    dilation = [min(draw.choice((1, 1, 2, 3)), tokens) for tokens in grid]
    size = [draw.randint(1, tokens // gap) for tokens, gap in zip(grid, dilation, strict=True)]
    stride = [draw.randint(1, each) for each in size]
    of = Neighbourhood(grid, size, stride, dilation, [draw.random() < 0.4 for _ in grid])
    inputs = qkv(of, heads=draw.choice((2, 4)), kv_heads=draw.choice((1, 2)), columns=(8, draw.choice((8, 16))))
    more = [torch.randn(2, 3, *given.shape[-2:], dtype=torch.float64, requires_grad=True) for given in inputs[1:]]
    check(of, inputs, more if draw.random() < 0.3 else ())


def test_windows_by_hand() -> None:
    """The oracle itself: a window is shifted at the ends, and a group of queries shares that of its leader."""

    def windows(*axis: Any) -> list[tuple[int, ...]]:
        return [tuple(row.nonzero().flatten().tolist()) for row in along(*axis)]

    low, high = (0, 1, 2), (3, 4, 5)
    assert windows(6, 3, 1, 1, False) == [low, low, (1, 2, 3), (2, 3, 4), high, high]
    assert windows(6, 4, 1, 1, False)[2:5] == [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)]
    assert windows(6, 3, 2, 1, False) == [low, low, (2, 3, 4), (2, 3, 4), high, high]
    assert windows(6, 3, 3, 1, False) == [low] * 3 + [high] * 3
    assert windows(7, 2, 1, 3, False) == [(0, 3), (1, 4), (2, 5), (0, 3), (1, 4), (2, 5), (3, 6)]
    assert windows(6, 3, 2, 1, True) == [(0,), (0, 1), (1, 2), (1, 2, 3), (3, 4), (3, 4, 5)]


def test_values_for_all_axes() -> None:
    of = Neighbourhood((9, 12), (3, 3), (2, 2), (2, 2), (True, True))
    inputs = qkv(of)
    out = na2d(*inputs, 3, 2, 2, True)
    torch.testing.assert_close(out, na2d(*inputs, *of[1:]))
    torch.testing.assert_close(na2d(*inputs, 3, None, None, None), na2d(*inputs, [3, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_torch_moves_in_wide_elements(dtype: torch.dtype, poisoned: None) -> None:
    """Head dims of 8 to 1 elements, and tensors of other layouts."""
    torch.manual_seed(0)
    of = CASES[4]
    for columns in (8, 6, 1):
        wide = [torch.randn(2, *of.grid, 2, columns + pad, dtype=torch.float64).to(dtype) for pad in (0, 2, 8)]
        q, k, v = (given[..., :columns] for given in wide)
        v = v.transpose(-1, -2).contiguous().transpose(-1, -2)
        wanted, plain = dense(q, k, v, of)[0], dense(q, k, v, of, compute=dtype)[0]
        error = float((plain.double() - wanted).abs().max())
        out = na2d(q, k, v, *of[1:])
        assert out.dtype == dtype
        assert float((out.double() - wanted).abs().max()) <= max(2 * error, torch.finfo(dtype).eps)


@pytest.mark.parametrize("of", [CASES[5], CASES[9]], ids=["2", "3"])
def test_orders_there_and_back(of: Neighbourhood, poisoned: None) -> None:
    """Copies are what torch's operators make, zeros in places without a token."""
    axes = [Axis(1, 1, 1, 1, causal=False)] * (3 - len(of.grid))
    first, second, third = [*axes, *(Axis(*axis) for axis in zip(*of, strict=True))]
    geometry = orders_of((first, second, third))
    for order in (geometry.queries, geometry.keys):
        grid = torch.randn(2, *order.tokens, 3, 8)
        rows = order.to_rows(grid)
        assert rows.shape == (2, order.rows, 3, 8)
        assert torch.equal(rows, order._plain_rows(grid))
        assert torch.equal(order.to_grid(rows), grid)
        assert torch.equal(order._plain_grid(rows), grid)
        assert int((rows != 0).sum()) == grid.numel()


def test_derivatives_of_gradients() -> None:
    of = Neighbourhood((3, 4), (2, 3), (1, 1), (1, 1), (False, True))
    q, k, v = qkv(of, columns=(2, 2), batch=1)

    def second(out: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return list(torch.autograd.grad(sum(one.pow(3).sum() for one in first), (q, k, v)))

    torch.testing.assert_close(second(na2d(q, k, v, *of[1:])), second(dense(q, k, v, of)[0]))


@pytest.mark.exhaustive
def test_transforms_and_compiled_programs() -> None:
    of = CASES[5]
    q, k, v = (given.detach().float() for given in qkv(of))
    call = lambda q, k, v: na2d(q, k, v, *of[1:])  # noqa: E731
    out = call(q, k, v)
    torch.testing.assert_close(torch.func.vmap(call)(q[None], k[None], v[None])[0], out)
    torch.testing.assert_close(torch.func.jvp(lambda v: call(q, k, v), (v,), (v,))[1], out)
    assert call(*(given.to("meta") for given in (q, k, v))).shape == out.shape
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k, v), out)


def test_tuning_is_accepted_without_effect() -> None:
    of = CASES[0]
    inputs = qkv(of)
    tuned = na1d(
        *inputs, 9, backend="hopper-fna", q_tile_shape=(64,), kv_tile_shape=(128,), backward_q_tile_shape=(64,),
        backward_kv_tile_shape=(128,), backward_kv_splits=(2,), backward_use_pt_reduction=True,
        run_persistent_kernel=False, kernel_schedule="pp", torch_compile=True,
        attention_kwargs={"backend": "hopper-fmha", "kv_tile_size": 128},
    )  # fmt: skip
    assert torch.equal(tuned, na1d(*inputs, 9))


def test_arguments_are_nattens() -> None:
    """By name and order, of release 0.21.7."""
    for function in FUNCTIONS.values():
        assert " ".join(inspect.signature(function).parameters) == (
            "query key value kernel_size stride dilation is_causal scale additional_keys additional_values "
            "attention_kwargs backend q_tile_shape kv_tile_shape backward_q_tile_shape backward_kv_tile_shape "
            "backward_kv_splits backward_use_pt_reduction run_persistent_kernel kernel_schedule torch_compile "
            "return_lse"
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernel_size": (3,)}, "kernel_size must have one value, or one for each of 2 axes, got 1"),
        ({"kernel_size": 0}, "kernel_size must be a positive integer, or 2 of them, got 0"),
        ({"kernel_size": 3.0}, "kernel_size must be a positive integer"),
        ({"kernel_size": (3, 8)}, "8 with dilation 1 does not fit into the 7 tokens of axis 1; allowed: at most 7"),
        ({"dilation": (2, 3)}, "dilation 3 does not fit into the 7 tokens of axis 1; allowed: at most 2"),
        ({"stride": (1, 4)}, "stride 4 of axis 1 exceeds its kernel_size; allowed: at most 3"),
        ({"is_causal": (True, 1)}, "is_causal must be a bool, or 2 of them"),
        ({"query": torch.randn(1, 6, 2, 8)}, "query must be .batch, X, Y, heads, head_dim., got shape"),
        ({"value": torch.randn(1, 6, 8, 2, 8)}, "value must have the batch and the tokens of query, .1, 6, 7., got"),
        ({"key": "k"}, "key must be a torch.Tensor, got str"),
        ({"additional_keys": torch.randn(1, 4, 2, 8)}, "additional_values is missing"),
        (
            {"additional_keys": torch.randn(1, 4, 2, 8), "additional_values": torch.randn(1, 3, 2, 8)},
            r"additional_values must have shape \(1, 4, 2, 8\), got \(1, 3, 2, 8\)",
        ),
        ({"backend": "hopper-fmha"}, "backend must be None or one of .*; did you mean 'hopper-fna'?"),
        ({"kernel_schedule": "ping"}, "kernel_schedule must be None or one of non, coop, pp, got 'ping'"),
        ({"attention_kwargs": {"backand": "x"}}, "'backand' is not supported; did you mean 'backend'?"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    tensors = {name: torch.randn(1, 6, 7, 2, 8) for name in ("query", "key", "value")}
    with pytest.raises(CallError, match=message):
        na2d(**{**tensors, "kernel_size": 3, **changed})
