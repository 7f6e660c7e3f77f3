"""Triangle attention on kernels: results and gradients against float64, with the bias's summed over rows; whole tiles
and ragged ones, rows without real keys, lengths, several entries of a batch, other strides, a graph. And attention with
a pair bias, whose samples share the bias of their sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.integrations.cuequivariance import attention_pair_bias, triangle_attention
from attngen.runtime.registry.lookup import Package
from tests.gpu.family import in_graph
from tests.gpu.packages import no_worse, only_package
from tests.integrations.oracles import gated_pair_bias, normalized, triangle

pytestmark = only_package("cuequivariance")

DEVICE = "cuda"
HALVES = torch.bfloat16, torch.float16
#: Batch, rows, heads, queries, keys.
SHAPES = (
    (1, 5, 4, 256, 256), (2, 3, 2, 257, 257), (1, 2, 2, 130, 71), (2, 70, 1, 33, 40), (1, 9, 8, 384, 384),
    (3, 1, 2, 64, 200),
)  # fmt: skip


def given(
    shape: tuple[int, int, int, int, int], head_dim: int, dtype: torch.dtype, of_bias: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v and a bias."""
    batch, rows, heads, queries, keys = shape
    torch.manual_seed(sum(shape) + head_dim)
    q, k, v = (torch.randn(batch, rows, heads, n, head_dim, device=DEVICE, dtype=dtype) for n in (queries, keys, keys))
    bias = torch.randn(batch, 1, heads, queries, keys, device=DEVICE).to(of_bias)
    return [tensor.requires_grad_() for tensor in (q, k, v, bias)]


def mask_of(shape: tuple[int, int, int, int, int]) -> Tensor:
    """Rows with gaps, with padding of more than a tile, and without real keys."""
    batch, rows, _, _, keys = shape
    mask = torch.rand(batch, rows, 1, 1, keys, device=DEVICE) < 0.7
    mask[0, 0] = torch.arange(keys, device=DEVICE) >= keys // 2
    mask[-1, -1] = False
    return mask


def compare(inputs: list[Tensor], mask: Tensor | None, **options: Any) -> None:
    """Results and gradients; the rows that a mask hides whole are the mean of v, and take no part in gradients, as -1e9
    is rounded otherwise in float64."""
    results = triangle_attention(*inputs, mask, return_aux=True, **options)
    if "kv_lengths" in options:
        mask = torch.arange(inputs[1].shape[3], device=DEVICE) < options["kv_lengths"]
    real = torch.ones_like(results[1]) if mask is None else mask.any(-1).expand_as(results[1]).float()
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = triangle(*wide, mask)
    usual = triangle(*inputs[:3], inputs[3].to(inputs[0].dtype), mask)
    out, lse, most = results
    seen = real[..., None].bool()
    no_worse(out.where(seen, 0.0).detach(), usual.out.where(seen, 0.0).detach(), exact.out.where(seen, 0.0).detach())
    torch.testing.assert_close(lse.double() * real, exact.lse * real, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(most.double() * real, exact.most * real, atol=1e-4, rtol=1e-4)
    above = torch.randn_like(out) * seen
    gradients = torch.autograd.grad(out, inputs, above)
    plain = torch.autograd.grad(usual.out, inputs, above)
    wanted = torch.autograd.grad(exact.out, wide, above.double())
    size = max(float(one.abs().max()) for one in wanted)
    for one, other, right in zip(gradients, plain, wanted, strict=True):
        assert one.dtype == other.dtype
        no_worse(one, other, right, times=3, least=2e-3 * size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_against_float64(
    dtype: torch.dtype, masked: bool, shape: tuple[int, int, int, int, int], only: Package
) -> None:
    compare(given(shape, 32, dtype), mask_of(shape) if masked else None)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_other_head_dims(head_dim: int, only: Package) -> None:
    compare(given(SHAPES[1], head_dim, torch.bfloat16), mask_of(SHAPES[1]))


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_biases_of_16_bits(head_dim: int, masked: bool, only: Package) -> None:
    for shape in SHAPES[:3]:
        inputs = given(shape, head_dim, torch.bfloat16, torch.bfloat16)
        compare(inputs, mask_of(shape) if masked else None)


def test_float32(only: Package) -> None:
    inputs, mask = given(SHAPES[1], 32, torch.float32), mask_of(SHAPES[1])
    out = triangle_attention(*inputs, mask)
    wide = [tensor.detach().double() for tensor in inputs]
    torch.testing.assert_close(out.double(), triangle(*wide, mask).out, atol=5e-3, rtol=5e-3)


def test_rows_without_real_keys(only: Package) -> None:
    inputs, mask = given(SHAPES[1], 32, torch.bfloat16), mask_of(SHAPES[1])
    out, lse, most = triangle_attention(*inputs, mask, return_aux=True)
    wanted = inputs[2][-1, -1].double().mean(-2, keepdim=True)
    torch.testing.assert_close(out[-1, -1].double(), wanted.expand_as(out[-1, -1]), atol=4e-3, rtol=1e-2)
    assert (lse[-1, -1] == -1e9).all()
    assert (most[-1, -1] < -0.99e9).all()
    assert all(bool(one.isfinite().all()) for one in torch.autograd.grad(out.sum(), inputs))


def test_lengths(only: Package) -> None:
    batch, rows, _, _, keys = shape = SHAPES[1]
    lengths = torch.randint(1, keys, (batch, rows, 1, 1, 1), device=DEVICE, dtype=torch.int32)
    lengths[0, 0], lengths[0, 1] = 0, keys + 9
    compare(given(shape, 32, torch.bfloat16), None, kv_lengths=lengths)
    out, lse, most = triangle_attention(*given(shape, 32, torch.bfloat16), kv_lengths=lengths, return_aux=True)
    assert not out[0, 0].any()
    assert not lse[0, 0].any()
    assert not most[0, 0].any()


@pytest.mark.parametrize("form", ["by tokens", "by columns", "turned bias", "odd columns"])
def test_strides(form: str, only: Package) -> None:
    """The bits of contiguous inputs."""
    shape = 2, 40, 2, 40, 40
    (q, k, v, bias), mask = (tensor.detach() for tensor in given(shape, 32, torch.bfloat16)), mask_of(shape)
    wanted = triangle_attention(q, k, v, bias, mask)
    match form:
        case "by tokens":  # as a projection leaves them
            q, k, v = (one.transpose(2, 3).contiguous().transpose(2, 3) for one in (q, k, v))
        case "by columns":  # around the ending node
            q, k, v = (one.movedim(1, 3).contiguous().movedim(3, 1) for one in (q, k, v))
        case "turned bias":
            bias = bias.movedim(2, 4).contiguous().movedim(4, 2)
        case "odd columns":
            bias = torch.nn.functional.pad(bias, (0, 3))[..., :40]
    assert torch.equal(triangle_attention(q, k, v, bias, mask), wanted)


def test_autocast(only: Package) -> None:
    inputs, mask = given(SHAPES[0], 32, torch.float32), mask_of(SHAPES[0])
    halves = [tensor.detach().bfloat16() for tensor in inputs[:3]]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = triangle_attention(*inputs, mask)
    assert torch.equal(out, triangle_attention(*halves, inputs[3], mask))


def test_in_a_compiled_program(only: Package) -> None:
    inputs, mask = given(SHAPES[0], 32, torch.bfloat16), mask_of(SHAPES[0])
    out = torch.compile(triangle_attention, fullgraph=True)(*inputs, mask)
    wanted = triangle_attention(*inputs, mask)
    assert torch.equal(out, wanted)
    (one,), (other,) = (torch.autograd.grad(result.sum(), inputs[3:]) for result in (out, wanted))
    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_in_a_graph(only: Package) -> None:
    inputs, mask = [tensor.detach() for tensor in given(SHAPES[1], 32, torch.bfloat16)], mask_of(SHAPES[1])
    graph, out = in_graph(lambda: triangle_attention(*inputs, mask))
    for tensor in inputs:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(out, triangle_attention(*inputs, mask))


#: Head dim, dtype of the heads, dtype of the pairs.
KINDS = (
    (48, torch.bfloat16, torch.bfloat16), (24, torch.bfloat16, torch.bfloat16), (64, torch.bfloat16, torch.float32),
    (32, torch.float32, torch.float32),
)  # fmt: skip
#: Names of what gets a gradient in these tests.
LEAVES = "single_repr", "pair_repr", "w_proj_q", "w_proj_g", "w_proj_z"


def pairs_of(
    kind: tuple[int, torch.dtype, torch.dtype], sequences: int, samples: int, tokens: int
) -> dict[str, Tensor]:
    """Arguments of attention with a pair bias of 4 heads, that are tensors."""
    head_dim, dtype, of_pairs = kind
    torch.manual_seed(tokens + head_dim)
    single, pairs, wide = 64, 32, 4 * head_dim
    shapes = {
        "single_repr": (sequences * samples, tokens, single), "pair_repr": (sequences, tokens, tokens, pairs),
        "w_ln_a": (single,), "b_ln_a": (single,), "w_ln_z": (pairs,), "b_ln_z": (pairs,), "b_proj_q": (wide,),
        **{f"w_proj_{x}": (wide, single) for x in "qkvg"}, "w_proj_o": (single, wide), "w_proj_z": (4, pairs),
    }  # fmt: skip
    given = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, device=DEVICE) * (shape[-1] ** -0.5 if name.startswith("w_proj") else 1)
        given[name] = values.to(of_pairs if name == "pair_repr" or name.endswith("_z") else dtype)
        given[name].requires_grad_(name in LEAVES)
    return given


def by_hand(x: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    """Attention with a pair bias in the dtype of the arguments."""
    single = normalized(x["single_repr"], x["w_ln_a"], x["b_ln_a"], 1e-5, centered=True)
    q, k, v = (single @ x[f"w_proj_{name}"].mT for name in "qkv")
    heads = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q + x["b_proj_q"], k, v)]
    pairs = normalized(x["pair_repr"], x["w_ln_z"], x["b_ln_z"], 1e-5, centered=True) @ x["w_proj_z"].mT
    bias = pairs.movedim(-1, 1).to(single.dtype)
    return gated_pair_bias(single, heads, bias, mask, (x["w_proj_g"], None), (x["w_proj_o"], None))


@pytest.mark.parametrize("form", [(1, 5, 256), (2, 3, 257), (2, 1, 130), (1, 4, 71)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pair_bias(kind: tuple[int, torch.dtype, torch.dtype], form: tuple[int, int, int], only: Package) -> None:
    """With a mask of each sequence, or of each sample; results and gradients against float64."""
    sequences, samples, tokens = form
    given = pairs_of(kind, *form)
    mask = torch.rand(sequences * (samples if samples == 5 else 1), tokens, device=DEVICE) < 0.7
    mask[:, 0] = True
    out, none = attention_pair_bias(**given, num_heads=4, mask=mask)
    assert none is None
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in given.items()}
    exact, plain = by_hand(wide, mask), by_hand(given, mask)
    no_worse(out.detach(), plain.detach(), exact.detach(), times=3)
    above = torch.randn_like(out)
    gradients, usual = (torch.autograd.grad(one, [given[x] for x in LEAVES], above) for one in (out, plain))
    right = torch.autograd.grad(exact, [wide[x] for x in LEAVES], above.double())
    for name, one, other, same in zip(LEAVES, gradients, usual, right, strict=True):
        assert one.dtype == given[name].dtype
        no_worse(one, other, same, times=3)


def test_projected_pairs_serve_again(only: Package) -> None:
    """The bits of the first call, also with padded columns."""
    given: dict[str, Any] = {name: x.detach() for name, x in pairs_of(KINDS[0], 1, 5, 257).items()}
    given |= {"num_heads": 4, "mask": torch.ones(1, 257, device=DEVICE)}
    out, pairs = attention_pair_bias(**given, return_z_proj=True)
    again = {**given, "pair_repr": pairs, "w_proj_z": None}
    assert torch.equal(attention_pair_bias(**again, is_cached_z_proj=True)[0], out)
