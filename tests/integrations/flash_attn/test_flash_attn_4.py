"""flash-attn 4's functions against dense attention in float64, on the CPU, so by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_attn import v4 as flash_attn_4
from tests.integrations.flash_attn.test_flash_attn import BATCH, HEADS, near, qkv
from tests.integrations.oracles import flash_attention
from tests.sampling import few

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.7},
    {"causal": True, "window_size": (4, None)},
    {"causal": True, "window_size": (-1, -1)},
    {"window_size": (3, 2), "softcap": 1.5},
    {"window_size": (None, 2)},
    {"window_size": torch.tensor([3, 2])},
    {"causal": True, "softcap": 1.5},
]


def wanted_with_sink(inputs: list[Tensor], sink: Tensor | None, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    given = dict(given)
    window = given.pop("window_size", (None, None))
    pair = window.tolist() if isinstance(window, Tensor) else window
    out, lse = flash_attention(*inputs, window_size=tuple(pair), **given)
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.double()[:, None])
    return out * torch.exp(lse - total).transpose(1, 2)[..., None], total


@few("given", OPTIONS, ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(9, 13), (13, 9)])
def test_every_combination(given: dict[str, Any], sinks: bool, rows: int, keys: int) -> None:
    inputs = [t.requires_grad_() for t in qkv(rows, keys)]
    sink = torch.randn(HEADS, requires_grad=True) if sinks else None
    out, lse = flash_attn_4.flash_attn_func(*inputs, **given, learnable_sink=sink, return_lse=True)
    wanted = wanted_with_sink(inputs, sink, given)
    assert lse is not None
    near((out, lse), wanted)
    leaves = inputs if sink is None else [*inputs, sink]
    weights = torch.randn_like(out), torch.where(lse.isinf(), 0.0, torch.randn_like(lse))
    gradients = torch.autograd.grad((out, lse), leaves, weights)
    near(gradients, torch.autograd.grad(wanted, leaves, tuple(w.double() for w in weights)))
    plain, nothing = flash_attn_4.flash_attn_func(*inputs, **given, learnable_sink=sink)
    assert nothing is None
    assert torch.equal(plain, out)


@pytest.mark.parametrize("sinks", [False, True])
def test_packed_and_used_sequences(sinks: bool) -> None:
    """As version 3 computes them; without longest lengths, too."""
    q, k, v = (t.flatten(0, 1) for t in qkv(9, 9))
    starts, used = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    sink = torch.randn(HEADS) if sinks else None
    for longest in ((9, 9), (None, None)):
        out, lse = flash_attn_4.flash_attn_varlen_func(
            q, k, v, None, starts, starts, *longest, seqused_q=used, causal=True, learnable_sink=sink, return_lse=True
        )
        wanted, wanted_lse = flash_attn_3.flash_attn_varlen_func(
            q, k, v, starts, starts, 9, 9, used, causal=True, return_attn_probs=True
        )
        assert lse is not None
        rows = torch.cat([torch.arange(7), 9 + torch.arange(4)])
        if sink is not None:
            wanted = wanted * torch.sigmoid(wanted_lse - sink[:, None]).T[..., None]
            wanted_lse = torch.logaddexp(wanted_lse, sink[:, None])
        near((out[rows], lse[:, rows]), (wanted[rows], wanted_lse[:, rows]))
        assert not out[7:9].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 1.5}], ids=str)
def test_pages(packed: bool, sinks: bool, given: dict[str, Any]) -> None:
    q, k, v = qkv(3, 16)
    pages = [t.reshape(4, 8, *t.shape[2:])[[2, 0, 3, 1]] for t in (k, v)]
    table = torch.tensor([[1, 3], [0, 2]], dtype=torch.int32)
    used = torch.tensor([16, 11], dtype=torch.int32)
    sink = torch.randn(HEADS) if sinks else None
    starts = torch.tensor([0, 3, 6], dtype=torch.int32) if packed else None
    rows = (q.flatten(0, 1) if packed else q).requires_grad_()
    out, lse = flash_attn_4.flash_attn_varlen_func(
        rows, *pages, cu_seqlens_q=starts, seqused_k=used, page_table=table, learnable_sink=sink, return_lse=True,
        **given,
    )  # fmt: skip
    assert lse is not None
    for b, count in enumerate(used.tolist()):
        part = slice(b, b + 1)
        wanted, wanted_lse = wanted_with_sink([q[part], k[part, :count], v[part, :count]], sink, given)
        actual = (out[3 * b : 3 * b + 3], lse[:, 3 * b : 3 * b + 3]) if packed else (out[b], lse[b])
        near(actual, (wanted[0], wanted_lse[0]))
    with pytest.raises(CallError, match="keys in pages have no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(
    "name",
    ["qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
     "gather_bwd_recompute_p", "gather_bwd_token_chunk", "seqlen_k_per_split"],
)  # fmt: skip
def test_what_no_kernel_has_is_refused(name: str) -> None:
    value: Any = True if name == "gather_bwd_recompute_p" else 1
    q, k, v = qkv()
    for function in (flash_attn_4.flash_attn_func, flash_attn_4.flash_attn_varlen_func):
        if name in function.__code__.co_varnames:
            with pytest.raises(NoKernelError, match=f"{name} is not supported: "):
                function(q, k, v, **{name: value})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window_size": (-1, 2)}, "flash-attn 4 moves the window by a negative side"),
        ({"learnable_sink": torch.zeros(HEADS + 1)}, "learnable_sink must be floating-point of shape"),
        ({"learnable_sink": torch.zeros(HEADS, dtype=torch.int32)}, "learnable_sink must be floating-point of shape"),
    ],
)
def test_arguments_that_mean_something_else_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        flash_attn_4.flash_attn_func(*qkv(), **options)


def test_what_pages_do_not_go_with() -> None:
    q, k, v = qkv()
    table = torch.zeros(BATCH, 1, dtype=torch.int32)
    for options in ({"cu_seqlens_k": torch.zeros(BATCH + 1)}, {"seqused_q": torch.ones(BATCH)}):
        with pytest.raises(CallError, match=next(iter(options))):
            flash_attn_4.flash_attn_varlen_func(q, k, v, page_table=table, **options)


@pytest.mark.exhaustive
def test_in_a_compiled_program() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_4.flash_attn_func(q, k, v, causal=True, window_size=(4, None))[0] * 2

    near(torch.compile(program, fullgraph=True, backend="eager")(*qkv()), program(*qkv()))
