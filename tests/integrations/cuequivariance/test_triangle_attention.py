"""cuEquivariance's triangle attention: the reference against float64 written by hand, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.cuequivariance import triangle as functions
from attngen.integrations.cuequivariance.triangle import triangle_attention
from tests.integrations.oracles import triangle
from tests.sampling import few

BATCH, ROWS, HEADS, DIM = 2, 3, 2, 16


def given(
    queries: int = 9, keys: int = 13, batch: int = BATCH, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """q, k, v, a bias and a mask; below float64, where -1e9 leaves nothing of a logit, a row has no real key."""
    torch.manual_seed(queries + keys)
    tensors = {
        "q": torch.randn(batch, ROWS, HEADS, queries, DIM, dtype=dtype),
        "k": torch.randn(batch, ROWS, HEADS, keys, DIM, dtype=dtype),
        "v": torch.randn(batch, ROWS, HEADS, keys, DIM, dtype=dtype),
        "bias": torch.randn(batch, 1, HEADS, queries, keys, dtype=dtype),
    }
    mask = torch.rand(batch, ROWS, 1, 1, keys) < 0.6
    mask[..., 0] = True
    mask[-1, 1] &= dtype == torch.float64
    return {**tensors, "mask": mask}


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 13), (16, 16), (1, 1)], ids=str)
def test_against_float64(queries: int, keys: int, masked: bool) -> None:
    """Results, aux results and gradients; the bias has that of all rows."""
    tensors = given(queries, keys)
    mask = tensors.pop("mask")
    mask = mask if masked else None
    inputs = [tensor.requires_grad_() for tensor in tensors.values()]
    out, lse, most = triangle_attention(*inputs, mask, 0.3, return_aux=True)
    wanted = triangle(*inputs, mask, 0.3)
    torch.testing.assert_close(out, wanted.out)
    torch.testing.assert_close(lse, wanted.lse, check_dtype=False)
    torch.testing.assert_close(most, wanted.most, check_dtype=False)
    above = torch.randn_like(out)
    for own, same in zip(
        torch.autograd.grad(out, inputs, above), torch.autograd.grad(wanted.out, inputs, above), strict=True
    ):
        torch.testing.assert_close(own, same)


def test_a_row_without_real_keys_is_the_mean_of_v() -> None:
    tensors = given(dtype=torch.float32)
    out = triangle_attention(**tensors)
    assert not tensors["mask"][-1, 1].any()
    torch.testing.assert_close(out[-1, 1], tensors["v"][-1, 1].mean(-2, keepdim=True).expand_as(out[-1, 1]))


def test_lengths_are_prefix_masks_but_for_empty_rows() -> None:
    tensors = given()
    del tensors["mask"]
    lengths = torch.tensor([[5, 0, 13], [99, 1, 2]], dtype=torch.int32).view(BATCH, ROWS, 1, 1, 1)
    out, lse, most = triangle_attention(**tensors, kv_lengths=lengths, return_aux=True)
    wanted = triangle(**tensors, mask=torch.arange(13) < lengths)
    for own, same in ((out, wanted.out), (lse, wanted.lse), (most, wanted.most)):
        same[0, 1] = 0.0
        torch.testing.assert_close(own, same, check_dtype=False)


@few("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype, of_bias: torch.dtype) -> None:
    """A bias of any dtype, in whose dtype its gradient is."""
    tensors = given(dtype=dtype)
    tensors["bias"] = tensors["bias"].to(of_bias).requires_grad_()
    out = triangle_attention(**tensors)
    out.sum().backward()
    assert (out.dtype, tensors["bias"].grad.dtype) == (dtype, of_bias)
    wide = {name: tensor.double() if tensor.dtype != torch.bool else tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(out.double(), triangle(**wide).out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32], ids=str)
def test_autocast(of_bias: torch.dtype) -> None:
    tensors = given(dtype=torch.float32)
    tensors["bias"] = tensors["bias"].to(of_bias)
    with torch.autocast("cpu", torch.bfloat16):
        out = triangle_attention(**tensors)
    assert out.dtype == torch.bfloat16
    halves = {name: tensors[name].bfloat16() for name in "qkv"}
    torch.testing.assert_close(out, triangle_attention(**{**tensors, **halves}))


def test_a_batch_of_one_may_have_no_axis() -> None:
    tensors = given(batch=1)
    whole = triangle_attention(**tensors)
    assert whole.shape == (1, ROWS, HEADS, 9, DIM)
    torch.testing.assert_close(triangle_attention(**{name: tensor[0] for name, tensor in tensors.items()}), whole)


def test_any_strides() -> None:
    """As OpenFold's projections are, of a column of pairs, and with a last axis that is not contiguous."""
    tensors = given(9, 9)
    wanted = triangle_attention(**tensors)
    by_tokens = {name: tensors[name].transpose(2, 3).contiguous().transpose(2, 3) for name in "qkv"}
    torch.testing.assert_close(triangle_attention(**{**tensors, **by_tokens}), wanted)
    by_columns = {name: tensors[name].movedim(1, 3).contiguous().movedim(3, 1) for name in "qkv"}
    torch.testing.assert_close(triangle_attention(**{**tensors, **by_columns}), wanted)
    turned = {name: tensor.mT.contiguous().mT for name, tensor in tensors.items() if name != "mask"}
    turned["mask"] = tensors["mask"].movedim(-1, 0).contiguous().movedim(0, -1)
    torch.testing.assert_close(triangle_attention(**turned), wanted)


def test_masks_of_numbers() -> None:
    tensors = given()
    wanted = triangle_attention(**tensors)
    torch.testing.assert_close(triangle_attention(**{**tensors, "mask": tensors["mask"].float()}), wanted)


def test_largest_logits_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = given()
    *_, whole = triangle_attention(**tensors, return_aux=True)
    monkeypatch.setattr(functions, "_MOST_LOGITS", 2 * HEADS * 9 * 13)
    torch.testing.assert_close(triangle_attention(**tensors, return_aux=True)[2], whole)


def test_copies_of_a_bias() -> None:
    """Only one whose rows have no multiple of 8 columns, or are not contiguous, is copied."""
    whole, odd = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 13)
    assert functions._in_whole_columns(whole) is whole
    padded = functions._in_whole_columns(odd)
    assert padded.shape == whole.shape
    torch.testing.assert_close(padded[..., :13], odd)
    last = functions._in_whole_columns(odd.movedim(1, -1).contiguous().movedim(-1, 1))  # heads last, as projected
    assert torch.equal(last, padded)
    assert last.is_contiguous()


@few("dynamic", [True, False], always=0)
def test_in_a_compiled_program(dynamic: bool) -> None:
    tensors = given(dtype=torch.float32)
    tensors["bias"].requires_grad_()
    compiled = torch.compile(triangle_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    out, same = compiled(**tensors), triangle_attention(**tensors)
    torch.testing.assert_close(out, same)
    for one, other in zip(
        torch.autograd.grad(out.sum(), tensors["bias"]), torch.autograd.grad(same.sum(), tensors["bias"]), strict=True
    ):
        torch.testing.assert_close(one, other)


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "axes": (lambda x: {"q": x["q"][0, 0]}, "q must have 5 axes, or 4"),
    "keys": (lambda x: {"v": x["v"][..., 1:, :]}, r"v must have the shape \(2, 3, 2, 13, 16\)"),
    "bias of each row": (lambda x: {"bias": x["bias"].expand(-1, ROWS, -1, -1, -1)}, "bias must have the shape"),
    "bias of integers": (lambda x: {"bias": x["bias"].int()}, "bias must be in float32"),
    "mask of pairs": (lambda x: {"mask": torch.ones(BATCH, ROWS, 1, 9, 13)}, "mask must have the shape"),
    "both": (lambda x: {"kv_lengths": torch.ones(BATCH, ROWS, 1, 1, 1, dtype=torch.int32)}, "exclude each other"),
    "lengths of 64 bits": (
        lambda x: {"mask": None, "kv_lengths": torch.ones(BATCH, ROWS, 1, 1, 1, dtype=torch.int64)},
        "kv_lengths must have the shape .* torch.int32",
    ),
    "no tensor": (lambda x: {"bias": None}, "bias must be a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    tensors = given()
    with pytest.raises(CallError, match=message):
        triangle_attention(**{**tensors, **changed(tensors)})
