"""Calls that quantize, of all kinds, and their comparison with plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.runtime.operations.quantize import in_torch as quantize_torch
from attngen.runtime.operations.quantize.arguments import LARGEST, Quantize, check
from attngen.runtime.operations.quantize.call import Quantized, quantize_centered

DTYPES = [torch.bfloat16, torch.float16]
ROUNDED = [torch.float8_e4m3fn, torch.float8_e5m2]
POSITIONS = 96

#: Sizes of heads, of every form: rows shared by one to eight threads, transforms of 8 to 256.
HEAD_DIMS = [(8, 8), (16, 40), (24, 72), (32, 64), (48, 96), (64, 64), (80, 128), (96, 96), (128, 128), (144, 32),
             (160, 16), (192, 128), (224, 8), (248, 248), (256, 256)]  # fmt: skip

#: Arguments of a call that are left out.
DEFAULTS = {
    "granularity": "head", "hadamard": True, "seed": 0, "layout": "bshd", "rotary_interleaved": False,
    "dtype": torch.float8_e4m3fn,
}  # fmt: skip


def a_call(
    element: torch.dtype, *, dims: tuple[int, int] = (64, 64), lengths: tuple[int, int] = (70, 45), batch: int = 2,
    heads: int = 4, kv_heads: int = 2, half: int = 0, table_dtype: torch.dtype = torch.float32, offsets: bool = False,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a call with some large numbers in it."""
    shapes = ((lengths[0], heads, dims[0]), (lengths[1], kv_heads, dims[0]), (lengths[1], kv_heads, dims[1]))
    given: dict[str, Any] = {}
    for name, (seqlen, count, width) in zip("qkv", shapes, strict=True):
        middle = (count, seqlen) if more.get("layout") == "bhsd" else (seqlen, count)
        x = torch.randn(batch, *middle, width)
        given[name] = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.01)).to(element)
    if half:
        turns = torch.randn(POSITIONS, half)
        given |= {"rotary_cos": turns.cos().to(table_dtype), "rotary_sin": turns.sin().to(table_dtype)}
        if offsets:
            given["rotary_offsets"] = torch.arange(7, 7 + batch, dtype=torch.int32)
    return given | more


def in_torch(given: dict[str, Any]) -> Quantized:
    """Result of a call in plain torch."""
    call = Quantize(**{name: given.get(name, DEFAULTS.get(name)) for name in Quantize._fields})
    return Quantized(*quantize_torch.quantize(call, check(call)))


def less_their_mean(given: dict[str, Any]) -> tuple[Quantized, Quantized]:
    """Keys less the mean of their head, by the call for them, and subtracted first: the same bits."""
    q, k, v, layout = (given[name] for name in ("q", "k", "v", "layout"))
    tokens = 1 if layout == "bshd" else 2
    mean = (k + 3).mean(dim=tokens, keepdim=True)
    centered = quantize_centered(q, k, v, layout=layout, k_mean=mean.squeeze(tokens))
    return centered, attngen.quantize(q, k - mean, v, layout=layout)


def both(given: dict[str, Any]) -> None:
    """Assert that a call gives with the kernel what it gives in torch, and changes none of its tensors. Bits are the
    same but where products transform rows, which add up in another order."""
    before = {name: t.clone() for name, t in given.items() if isinstance(t, Tensor)}
    wanted, results = in_torch(given), attngen.quantize(**given)
    by_products = given.get("hadamard", True) and "rotary_cos" not in given and given["q"].shape[-1] in (128, 256)
    for name in Quantized._fields:
        ours, theirs = getattr(results, name), getattr(wanted, name)
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
        if by_products and name[0] in "qk":
            alike(ours, theirs)
        elif name in "qkv":
            differ = bits(ours) != bits(theirs)
            assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()}, {differ.nonzero()[0].tolist()}"
        else:
            assert torch.equal(ours, theirs), name
    for name, t in before.items():
        assert torch.equal(bytes_of(t), bytes_of(given[name])), name


def alike(ours: Tensor, theirs: Tensor) -> None:
    """Assert that scales are equal to 1e-6, and numbers of 8 bits but for one in ten thousand, which is a neighbour, or
    as near as sums of float32 are that add up in another order.

    A sum whose terms nearly cancel may be 0 in one order, and a small number of either sign in another: that is no
    neighbour among numbers of five exponent bits, and 0 and -0 are far apart as bits.
    """
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
        return
    differ = bits(ours) != bits(theirs)
    apart = (in_order(ours) - in_order(theirs)).abs()
    far = (apart > 1) & ~((ours.float() - theirs.float()).abs() <= ORDER_OF_SUMS * LARGEST[ours.dtype])
    places = [(at, float(ours[tuple(at)]), float(theirs[tuple(at)])) for at in far.nonzero()[:8].tolist()]
    message = f"{int(differ.sum())} of {ours.numel()} differ, {int(far.sum())} by more than a step: {places}"
    assert not far.any(), message
    assert int(differ.sum()) <= max(1e-4 * ours.numel(), 1), message


#: Change of a number by the order of its sum, as a part of the largest one: a row's largest sum is at least a root of
#: 128 smaller than the sum of all magnitudes, and each of some dozen additions rounds off 2^-24 of that, or 2^-23.
ORDER_OF_SUMS = 2.0**-18


def in_order(t: Tensor) -> Tensor:
    """Integers in the order of 8-bit numbers, one apart where these are neighbours; 0 and -0 are one."""
    code = bits(t).int()
    return torch.where(code >= 0x80, 0x80 - code, code)


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def bits(t: Tensor) -> Tensor:
    """Return 8-bit numbers as their bits; NaN has one form."""
    return torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8))
