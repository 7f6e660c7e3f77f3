"""Quantizing in plain torch: the transform against a matrix in float64, scales against loops, errors, bad calls."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.quantize.arguments import GRANULARITIES, random_signs, transform_size
from attngen.runtime.operations.quantize.call import Quantized
from attngen.runtime.operations.quantize.in_torch import transformed
from tests.runtime.operations.append.test_append import turned
from tests.runtime.operations.quantize.quantized import ROUNDED, a_call
from tests.runtime.support import variant
from tests.sampling import few, sampled

INPUTS = [torch.bfloat16, torch.float16, torch.float32]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def hadamard(size: int) -> Tensor:
    """Return Sylvester's matrix: entry (i, j) is -1 where i and j have an odd number of bits in common."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()


def matrix_of(signs: Tensor) -> Tensor:
    """Return D H / sqrt(n) in blocks, (head_dim, head_dim) float64."""
    size = transform_size(signs.shape[0])
    blocks = torch.block_diag(*[hadamard(size)] * (signs.shape[0] // size))
    return signs.double()[:, None] * blocks / math.sqrt(size)


def signs_of(seed: int, head_dim: int) -> Tensor:
    chance = random.Random(seed)
    return torch.tensor([-1.0 if chance.random() < 0.5 else 1.0 for _ in range(head_dim)])


def rows_of(given: dict[str, Any], name: str) -> Tensor:
    """Return (batch, heads, seqlen, head_dim) in float64 as it is before it is rounded."""
    x = given[name] if given.get("layout") == "bhsd" else given[name].transpose(1, 2)
    x = x.double()
    if "rotary_cos" in given and name != "v":
        for b in range(x.shape[0]):
            start = int(given["rotary_offsets"][b]) if "rotary_offsets" in given else 0
            for j in range(x.shape[2]):
                x[b, :, j] = turned(
                    x[b, :, j], given["rotary_cos"], given["rotary_sin"], start + j,
                    interleaved=given.get("rotary_interleaved", False),
                )  # fmt: skip
    if name == "v" or not given.get("hadamard", True):
        return x
    signs = given.get("signs", signs_of(given.get("seed", 0), x.shape[-1]))
    return x @ matrix_of(signs)


def scales_of(x: Tensor, granularity: str | int, kv_heads: int, largest: float, *, of_v: bool = False) -> Tensor:
    """Return scales by loops over what each is of."""

    def one(part: Tensor) -> float:
        top = float(part.abs().max())
        return top / largest if top else 1.0

    group = x.shape[1] // kv_heads
    if granularity == "tensor":
        return torch.tensor(one(x))
    if granularity == "head" or (granularity == "token" and of_v):
        by_head = [[one(x[b, h * group : (h + 1) * group]) for h in range(kv_heads)] for b in range(x.shape[0])]
        return torch.tensor(by_head)
    block = 1 if granularity == "token" else int(granularity)
    starts = range(0, x.shape[2], block)
    return torch.tensor([[[one(rows[i : i + block]) for i in starts] for rows in heads] for heads in x])


def in_units(values: Tensor, scale: Tensor, granularity: str | int, layout: str) -> Tensor:
    """Values of 8-bit numbers, (batch, heads, seqlen, head_dim) float64."""
    x = (values if layout == "bhsd" else values.transpose(1, 2)).double()
    scale = scale.double()
    if scale.dim() == 2:
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)[:, :, None, None]
    elif scale.dim() == 3:
        block = 1 if granularity == "token" else int(granularity)
        scale = scale.repeat_interleave(block, 2)[:, :, : x.shape[2], None]
    return x * scale


@sampled(rounded=[*ROUNDED], layout=["bshd", "bhsd"], granularity=[*GRANULARITIES], element=[*INPUTS])
def test_scales_and_errors(element: torch.dtype, granularity: str | int, layout: str, rounded: torch.dtype) -> None:
    """Each scale is the largest magnitude of its own; each number is off by half a step of 8 bits at most."""
    torch.manual_seed(1)
    given = a_call(element, granularity=granularity, layout=layout, lengths=(131, 64), dims=(96, 40), dtype=rounded)
    results = attngen.quantize(**given)
    bits = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[rounded]
    for name in "qkv":
        values, scale = getattr(results, name), results.descales[f"{name}_descale"]
        assert (values.shape, values.dtype, values.is_contiguous()) == (given[name].shape, rounded, True)
        exact = rows_of(given, name)
        wanted = scales_of(exact, granularity, 2, LARGEST[rounded], of_v=name == "v")
        assert scale.dtype == torch.float32
        torch.testing.assert_close(scale.double(), wanted.double(), rtol=1e-6, atol=0.0)
        ours = in_units(values, scale, granularity, layout)
        step = in_units(torch.ones_like(values), scale, granularity, layout)
        least = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}[rounded]  # the smallest subnormal number
        allowed = (exact.abs() * 2.0 ** -(bits + 1)).maximum(least / 2 * step) * (1 + 1e-5) + 1e-6 * exact.abs().max()
        assert ((ours - exact).abs() <= allowed).all()
        top = values.float().abs().max()
        assert top == LARGEST[rounded], "the largest number takes the whole range"


@pytest.mark.parametrize("head_dim", [1, 6, 8, 24, 64, 80, 96, 128, 192, 256])
def test_the_transform_is_that_of_the_matrix(head_dim: int) -> None:
    torch.manual_seed(2)
    signs = signs_of(7, head_dim)
    x = torch.randn(3, 5, head_dim)
    size = transform_size(head_dim)
    assert head_dim % size == 0
    assert head_dim // size % 2
    ours = transformed(x, signs).double() / math.sqrt(size)
    torch.testing.assert_close(ours, x.double() @ matrix_of(signs), rtol=1e-6, atol=1e-6)
    matrix = matrix_of(signs)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim).double(), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [8, 96, 100, 256])
def test_signs_follow_from_the_seed(head_dim: int) -> None:
    """Bit i of a seed's signs is number i; half of them change."""
    for seed in (0, 1, -5, 2**40):
        bits = random_signs(seed, head_dim)
        assert [-1.0 if bits >> i & 1 else 1.0 for i in range(head_dim)] == signs_of(seed, head_dim).tolist()
        q = k = v = torch.eye(head_dim)[None, :, None, :]
        ours = attngen.quantize(q, k, v, seed=seed)
        given = attngen.quantize(q, k, v, signs=signs_of(seed, head_dim))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, given, strict=True))
    assert random_signs(0, 256) != random_signs(1, 256)
    assert 96 < random_signs(0, 256).bit_count() < 160


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("half", "offsets"), [(32, False), (32, True), (5, True)])
def test_rotations_come_before_the_transform(half: int, offsets: bool, interleaved: bool) -> None:
    torch.manual_seed(5)
    given = a_call(
        torch.float32, half=half, offsets=offsets, rotary_interleaved=interleaved, granularity="token", lengths=(20, 9)
    )
    results = attngen.quantize(**given)
    for name in "qk":
        exact = rows_of(given, name)
        ours = in_units(getattr(results, name), results.descales[f"{name}_descale"], "token", "bshd")
        assert (ours - exact).abs().max() <= exact.abs().max() / 28
        torch.testing.assert_close(
            results.descales[f"{name}_descale"].double(),
            scales_of(exact, "token", 2, 448.0).double(),
            rtol=1e-5,
            atol=0.0,
        )


def test_products_stay_as_they_are() -> None:
    """q kᵀ is what it was but for the error of 8 bits, smaller with the transform where columns are large."""
    torch.manual_seed(8)
    large = 10 * (torch.arange(128) % 60 == 7)  # columns of both
    q, k = (torch.randn(1, 256, 2, 128) * (1 + large) for _ in "qk")
    exact = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())

    def error(**more: Any) -> float:
        results = attngen.quantize(q, k, k, **more)
        granularity = more.get("granularity", "head")
        ours, theirs = (
            in_units(x, scale, granularity, "bshd")
            for x, scale in ((results.q, results.q_descale), (results.k, results.k_descale))
        )
        return float((ours @ theirs.transpose(2, 3) - exact).square().mean().sqrt())

    typical = float(exact.square().mean().sqrt())
    for granularity in GRANULARITIES:
        assert error(granularity=granularity) < 0.05 * typical
    assert error() < error(hadamard=False)
    assert error(granularity=64) <= error(granularity="tensor") * 1.02


def test_attention_takes_quantized_tensors() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 40, 4, 64), torch.randn(2, 40, 2, 64), torch.randn(2, 40, 2, 64)
    causal = variant()
    exact = attngen.attention(q, k, v, variant=causal)
    for granularity in ("head", "tensor"):
        results = attngen.quantize(q, k, v, granularity=granularity)
        assert isinstance(results, Quantized)
        out = attngen.attention(results.q, results.k, results.v, variant=causal, **results.descales)
        assert out.dtype == torch.bfloat16
        assert (out.float() - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()


# --- what is not ordinary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_have_scale_1(granularity: str | int) -> None:
    x = torch.zeros(2, 70, 2, 64)
    results = attngen.quantize(x, x, x, granularity=granularity)
    for scale in results.descales.values():
        assert (scale == 1).all()
    assert all((values.float() == 0).all() for values in results[:3])


@few("granularity", GRANULARITIES, always=range(0, 999, 3))
@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-42])
def test_tiny_numbers_give_no_nan(granularity: str | int, size: float) -> None:
    x = torch.randn(1, 70, 2, 64) * size
    results = attngen.quantize(x, x, x, granularity=granularity, hadamard=False)
    for scale in results.descales.values():
        assert (scale >= 2.0**-126).all()
    for values in results[:3]:
        assert not values.float().isnan().any()
    if size == 1e-30:
        assert results.q.float().abs().max() == 448


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_that_are_not_finite_change_no_other_row(granularity: str | int, hadamard: bool) -> None:
    """Beside the same call with zeros in the place of those rows."""
    torch.manual_seed(4)
    given = a_call(torch.bfloat16, granularity=granularity, hadamard=hadamard, lengths=(130, 130))
    strange = {name: given[name].clone() for name in "qkv"}
    for name, place, what in (("q", (0, 3, 1), torch.nan), ("k", (1, 70, 0), torch.inf), ("v", (0, 9, 1), -torch.inf)):
        given[name][place] = 0
        strange[name][place] = 0
        strange[name][(*place, 5)] = what
    clean, results = attngen.quantize(**given), attngen.quantize(**{**given, **strange})
    for ours, wanted in zip(results[3:], clean[3:], strict=True):
        assert torch.equal(ours, wanted)
    for name, place, what in (("q", (0, 3, 1), torch.nan), ("k", (1, 70, 0), torch.inf), ("v", (0, 9, 1), -torch.inf)):
        ours, wanted = getattr(results, name).float(), getattr(clean, name).float()
        row = ours[place].clone()
        ours[place] = wanted[place]
        assert torch.equal(ours, wanted), name
        if hadamard and name != "v":  # all n numbers of the transform
            assert (row.isnan() if math.isnan(what) else row.abs() == 448).all()
        else:
            assert row[5].isnan() if math.isnan(what) else row[5] == math.copysign(448, what)
            assert (row[:5] == 0).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_nothing_to_quantize(granularity: str | int, shape: tuple[int, int]) -> None:
    x = torch.zeros(*shape, 2, 16)
    results = attngen.quantize(x, x, x, granularity=granularity)
    assert all(values.shape == x.shape for values in results[:3])
    assert all((scale == 1).all() for scale in results[3:])


@pytest.mark.exhaustive
def test_quantize_is_one_operator_of_a_program() -> None:
    """One operator, of which nothing is known but the shapes of its results."""
    torch.manual_seed(0)
    for granularity in GRANULARITIES:
        given = a_call(torch.bfloat16, granularity=granularity, half=16)

        @torch.compile(backend="eager", fullgraph=True)
        def program(q: Tensor, given: dict[str, Any] = given) -> Quantized:
            return attngen.quantize(**{**given, "q": q + 0})

        for ours, wanted in zip(program(given["q"]), attngen.quantize(**given), strict=True):
            assert torch.equal(ours.float(), wanted.float())
    arguments = [given.get(name) for name in ("q", "k", "v")]
    torch.library.opcheck(
        torch.ops.attngen.qkv__quantize.default,
        (*arguments, "64", True, None, 3, "bshd", None, None, False, None, torch.float8_e4m3fn),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_positions_beyond_the_rotation_are_named() -> None:
    given = a_call(torch.float32, half=8, lengths=(90, 20), offsets=True)
    with pytest.raises(CallError, match="token 89 of q, sequence 0, has position 96, but rotary_cos has 96"):
        attngen.quantize(**given)


def test_signs_are_signs() -> None:
    given = a_call(torch.float32, signs=torch.linspace(0, 1, 64).sign() * 2 - 1)
    given["signs"][3] = 0.5
    with pytest.raises(CallError, match="signs must be 1 or -1, but number 3 is 0.5"):
        attngen.quantize(**given)


def test_there_is_no_derivative() -> None:
    x = torch.zeros(1, 2, 1, 16, requires_grad=True)
    with pytest.raises(CallError, match="quantize is not differentiable"):
        attngen.quantize(x, x, x)
    with torch.no_grad():
        assert not attngen.quantize(x, x, x).q.requires_grad


_X, _COS = torch.zeros(2, 3, 2, 16), torch.zeros(9, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": _X[0]}, r"q must have 4 dimensions \(batch x seqlen x heads x head_dim\), got shape \(3, 2, 16\)"),
        ({"q": [1]}, "q must be a torch.Tensor, got list"),
        ({"v": None}, "v must be a torch.Tensor, got NoneType"),
        ({"q": _X.double()}, "q has dtype torch.float64; allowed: torch.bfloat16, torch.float16, torch.float32"),
        ({"k": _X.half()}, "q is torch.float32 on cpu, but k is torch.float16 on cpu"),
        ({"k": _X.to("meta")}, "but k is torch.float32 on meta"),
        ({"k": _X[:1]}, "q has 2 batch entries, but k has 1 and v has 2"),
        ({"k": _X[..., :8]}, "q and k must have one head_dim, and v must have one; got 16, 8 and 16"),
        ({"k": _X[:, :2]}, "k has 2 tokens of 2 heads, but v has 3 of 2"),
        ({"v": _X[:, :, :1]}, "k has 3 tokens of 2 heads, but v has 3 of 1"),
        ({"q": torch.zeros(2, 3, 3, 16)}, "q has 3 heads, which is not a multiple of k's 2"),
        ({"layout": "bhsd", "v": _X[:, :1]}, "k has 2 tokens of 3 heads, but v has 2 of 1"),
        ({"layout": "bsdh"}, "layout must be one of bshd, bhsd, got 'bsdh'; did you mean 'bshd'"),
        ({"granularity": 32}, "granularity must be one of 'tensor', 'head', 64, 128, 'token', got 32"),
        ({"granularity": 64.0}, "granularity must be one of .*, got 64.0"),
        ({"granularity": "heads"}, "granularity must be one of .*, got 'heads'; did you mean 'head'"),
        ({"granularity": [64]}, r"granularity must be one of .*, got \[64\]"),
        ({"dtype": torch.int8}, "dtype must be one of torch.float8_e4m3fn, torch.float8_e5m2, got torch.int8"),
        ({"dtype": "fp8"}, "dtype must be one of torch.float8_e4m3fn, torch.float8_e5m2, got fp8"),
        ({"hadamard": 1}, "hadamard must be True or False, got 1"),
        ({"seed": 1.0}, "seed must be an integer, got 1.0"),
        ({"seed": 2**63}, "seed must fit 64 bits, got 9223372036854775808"),
        ({"signs": torch.ones(8)}, r"signs must hold 1 or -1 for each of 16 numbers of a row, got .* of shape \(8,\)"),
        ({"signs": [1] * 16}, "signs must be a torch.Tensor, got list"),
        ({"signs": torch.ones(16), "hadamard": False}, "signs are for the Hadamard transform"),
        ({"signs": torch.ones(16, device="meta")}, "signs are on meta, but q is on cpu"),
        ({"rotary_cos": _COS}, "rotary_cos and rotary_sin must be passed together"),
        ({"rotary_cos": _COS, "rotary_sin": _COS[:3]}, r"rotary_sin must be a float tensor of shape \(9, 8\)"),
        ({"rotary_cos": _COS.double(), "rotary_sin": _COS.double()}, "rotary_cos must be a float tensor"),
        ({"rotary_cos": _COS[:0], "rotary_sin": _COS[:0]}, "rotary_cos has no row"),
        ({"rotary_cos": torch.zeros(9, 9), "rotary_sin": torch.zeros(9, 9)}, "rotary_cos turns 18 numbers, but head_d"),
        ({"rotary_interleaved": 1}, "rotary_interleaved must be True or False, got 1"),
        ({"rotary_offsets": torch.zeros(2).int()}, "rotary_offsets are for a rotation"),
        (
            {"rotary_offsets": torch.zeros(3).int(), "rotary_cos": _COS, "rotary_sin": _COS},
            r"rotary_offsets must have shape \(2,\), got \(3,\)",
        ),
        (
            {"rotary_offsets": torch.zeros(2), "rotary_cos": _COS, "rotary_sin": _COS},
            "rotary_offsets must be an int32 vector",
        ),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attngen.quantize(**{"q": _X, "k": _X, "v": _X, **changed})
