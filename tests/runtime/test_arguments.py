"""Every wrong argument has a message of its own that says what was expected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Scalar
from attngen.lang.variant import Tensor as Declared
from attngen.schema import preset
from tests.runtime.support import bias_variant, variant, window_variant


def tensors(**sizes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, s, t, h, g, d = (sizes.get(name, size) for name, size in zip("bsthgd", (2, 6, 8, 4, 2, 16), strict=True))
    return torch.randn(b, s, h, d), torch.randn(b, t, g, d), torch.randn(b, t, g, d)


Q, K, V = tensors()


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ([1.0], K, V, "q must be a torch.Tensor, got list"),
        (Q, None, V, "k must be a torch.Tensor, got NoneType"),
        (Q[0], K, V, "q must have 4 dimensions (batch x seqlen x heads x head_dim), got shape (6, 4, 16)"),
        (Q.int(), K, V, "q has dtype torch.int32; allowed: torch.bfloat16, torch.float16, torch.float32"),
        (Q, K.half(), V, "q has dtype torch.float32, but k has torch.float16; q, k and v must have one dtype"),
        (Q, K, V.to("meta"), "q is on cpu, but v is on meta; all tensors must be on one device"),
        (Q.transpose(2, 3).contiguous().transpose(2, 3), K, V, "q's last dimension must be contiguous, got strides"),
        (Q, K[:1], V, "k has batch 1, but q has 2"),
        (Q, K, V[:, :5], "k has 8 keys, but v has 5"),
        (Q, K[..., :8], V, "q has head_dim 16, but k has 8"),
        (Q, K, V[:, :, :1], "k has 2 heads, but v has 1"),
        (Q[:, :, :3], K, V, "the number of query heads (3) must be a multiple of the number of KV heads (2)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_q_k_v(q: Any, k: Any, v: Any, message: str) -> None:
    with pytest.raises(CallError) as caught:
        attngen.attention(q, k, v, variant=preset("full"))
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": np.ones(2)}, "layout must be one of bshd, bhsd, got array"),
        (
            {"layout": "packed"},
            "layout must be one of bshd, bhsd, got 'packed'; attention_varlen takes packed sequences",
        ),
        ({"layout": "bsh"}, "layout must be one of bshd, bhsd, got 'bsh'; did you mean 'bshd'?"),
        ({"backend": "tritn"}, "backend must be one of triton, cuda, reference, got 'tritn'; did you mean 'triton'?"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"softmax_scale": "1"}, "softmax_scale must be a positive Python number that is finite in float32, got '1'"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive Python number"),
        (
            {"softmax_scale": math.inf},
            "softmax_scale must be a positive Python number that is finite in float32, got inf",
        ),
        ({"softmax_scale": torch.tensor(1.0)}, "softmax_scale must be a positive Python number"),
        ({"seqused_k": [1, 2]}, "seqused_k must be a torch.Tensor, got list"),
        ({"seqused_k": torch.tensor([1, 2])}, "seqused_k must be an int32 vector, got torch.int64 of shape (2,)"),
        ({"seqused_k": torch.tensor([1]).int()}, "seqused_k must have shape (2,), got (1,)"),
        ({"seqused_k": torch.tensor([1, 9]).int()}, "seqused_k[1] is 9; sequence 1 has 8 keys"),
        ({"seqused_k": torch.zeros(4).int()[::2]}, "seqused_k must be contiguous, got stride 2"),
        ({"tile_map": 3}, "tile_map must be what this runtime's tile_map returned, got int"),
        ({"is_causal": True}, "full: unknown argument 'is_causal'; say variant='causal', or 'causal_top_left'"),
        ({"scale": 1.0}, "full: unknown argument 'scale'; did you mean 'softmax_scale'?"),
        ({"softmax_scal": 1.0}, "full: unknown argument 'softmax_scal'; did you mean 'softmax_scale'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError) as caught:
        attngen.attention(Q, K, V, variant=preset("full"), **options)
    assert message in str(caught.value)


def test_variant_must_be_a_name_or_a_variant() -> None:
    with pytest.raises(CallError, match="variant must be a name or a Variant, got int"):
        attngen.attention(Q, K, V, variant=3)  # type: ignore[arg-type]


TABLE = torch.zeros(4, 11)
GOOD: dict[str, Any] = {"table": TABLE, "limit": 5, "radius": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tabel": TABLE},
            "bias: unknown argument 'tabel'; did you mean 'table'?; 'bias' takes limit: int64, 0 to seqlen_k; ",
        ),
        ({"table": None}, "bias: missing 'table'; 'bias' takes limit: int64, 0 to seqlen_k; loud: bool = False; "),
        ({"radius": None, "limit": None}, "bias: missing 'limit', 'radius'; 'bias' takes"),
        ({"table": 3}, "bias: tensor 'table' must be a torch.Tensor, got int"),
        ({"table": TABLE.half()}, "bias: tensor 'table' must have dtype torch.float32, got torch.float16"),
        ({"table": TABLE.to("meta")}, "bias: tensor 'table' is on meta, but q is on cpu"),
        ({"table": TABLE[0]}, "bias: tensor 'table' must have shape [h, distances], got (11,)"),
        ({"table": TABLE[:3]}, "bias: tensor 'table': axis 0 must be h = 4, got (3, 11)"),
        (
            {"table": TABLE[:1]},
            "tensor 'table': axis 0 must be h = 4, got (1, 11); table.expand(...) repeats it without a copy",
        ),
        ({"limit": 9}, "bias: scalar 'limit' must lie within 0 .. 8, got 9"),
        ({"limit": 2.0}, "bias: scalar 'limit' is int64, so it must be an integer, got 2.0"),
        ({"limit": True}, "bias: scalar 'limit' is int64, so it must be an integer, got True"),
        ({"loud": 1}, "bias: scalar 'loud' is bool, so it must be True or False, got 1"),
        ({"gain": "2"}, "bias: scalar 'gain' is fp32, so it must be a number of the range of float32, got '2'"),
        ({"gain": math.nan}, "bias: scalar 'gain' is fp32"),
        ({"gain": 1e39}, "bias: scalar 'gain' is fp32"),
        ({"gain": torch.tensor(2.0)}, "bias: scalar 'gain' must be a Python number, got a tensor"),
        ({"radius": 101}, "bias: scalar 'radius' must lie within 0 .. 100, got 101"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declared_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError) as caught:
        attngen.attention(Q, K, V, variant=bias_variant(), **{**GOOD, **changes})
    assert message in str(caught.value)


def test_numbers_of_other_libraries_are_taken() -> None:
    plain = attngen.attention(Q, K, V, variant=bias_variant(), **GOOD)
    other = attngen.attention(
        Q, K, V, variant=bias_variant(), table=TABLE, limit=np.int64(5), radius=np.int32(2), gain=np.float32(1)
    )
    assert torch.equal(plain, other)


def test_defaults_and_constants() -> None:
    chosen = window_variant(const=3)
    built = attngen.attention(Q, K, V, variant=chosen)
    assert torch.equal(built, attngen.attention(Q, K, V, variant=chosen, window=3))
    assert torch.equal(built, attngen.attention(Q, K, V, variant=window_variant(default=3)))
    with pytest.raises(CallError, match="scalar 'window' was fixed to 3 when the kernels were built, got 4"):
        attngen.attention(Q, K, V, variant=chosen, window=4)


def test_extents_agree_across_tensors_and_bound_scalars() -> None:
    chosen = variant(
        "pages", "table[b, min(slot, 4)] >= kv + first[0]",
        scalars=[Scalar("slot", "int32", min=0, max="pages"), Scalar("width", "int32", min=1)],
        tensors=[Declared("table", "int32", ("b", "pages")), Declared("first", "int32", ("pages",)),
                 Declared("extra", "fp32", ("width", 3))],
    )  # fmt: skip
    good: dict[str, Any] = {
        "table": torch.zeros(2, 5).int(), "first": torch.zeros(5).int(), "extra": torch.zeros(7, 3),
        "slot": 4, "width": 7,
    }  # fmt: skip
    attngen.attention(Q, K, V, variant=chosen, **good)
    for changes, message in (
        ({"first": torch.zeros(6).int()}, "tensor 'first': axis 0 must be pages = 5, as in 'table', got (6,)"),
        ({"slot": 6}, "scalar 'slot' must lie within 0 .. 5, got 6"),
        ({"width": 6}, "scalar 'width' must lie within 7 .. 7, got 6"),
        ({"extra": torch.zeros(7, 4)}, "tensor 'extra': axis 1 must be 3, got (7, 4)"),
    ):
        with pytest.raises(CallError) as caught:
            attngen.attention(Q, K, V, variant=chosen, **{**good, **changes})
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [0, 6]}, "cu_seqlens_q must be a torch.Tensor, got list"),
        ({"cu_seqlens_k": torch.tensor([0, 8])}, "cu_seqlens_k must be an int32 vector, got torch.int64 of shape (2,)"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 8]).int()}, "must both have shape (batch + 1,), got (2,) and (3,)"),
        ({"cu_seqlens_q": torch.tensor([0, 6]).int().to("meta")}, "cu_seqlens_q is on meta, but q is on cpu"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must not be negative, got -1"),
        ({"max_seqlen_k": torch.tensor(8)}, "max_seqlen_k must be a Python integer, got a tensor: reading it"),
        ({"layout": "bshd"}, "causal: unknown argument 'layout'; packed tensors have one: total x heads x head_dim"),
        ({"max_seqlen_k": 2**30}, f"seqlen_k is {2**30}; the largest allowed is {2**30 - 1}"),
        ({"q": Q}, "q must have 3 dimensions (total x heads x head_dim), got shape (2, 6, 4, 16)"),
        ({"v": V[0, :5]}, "k has 8 keys, but v has 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_varlen(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "q": Q[0], "k": K[0], "v": V[0], "cu_seqlens_q": torch.tensor([0, 6]).int(),
        "cu_seqlens_k": torch.tensor([0, 8]).int(), "max_seqlen_q": 6, "max_seqlen_k": 8,
    }  # fmt: skip
    attngen.attention_varlen(**good, variant=preset("causal"))
    with pytest.raises(CallError) as caught:
        attngen.attention_varlen(**{**good, **changes}, variant=preset("causal"))
    assert message in str(caught.value)
