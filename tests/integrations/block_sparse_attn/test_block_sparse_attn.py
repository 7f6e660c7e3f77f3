"""Block-Sparse-Attention's functions: sequences and heads beside attention in float64 over the pairs that they see."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations import block_sparse_attn
from attngen.integrations.block_sparse_attn import (
    block_sparse_attn_func,
    block_streaming_attn_func,
    token_streaming_attn_func,
)
from tests.integrations.drops import next_factors
from tests.integrations.oracles import masked_attention
from tests.sampling import few, sampled

HEADS, KV_HEADS, DIM = 6, 3, 16
#: Queries and keys of the sequences: more keys, one block less of keys than positions end in, more queries, no query.
LENGTHS = [(300, 520), (270, 300), (400, 130), (0, 5)]
TYPES = [1, -1, 0, 1, -1, -1]
#: First and last blocks, or keys, of each head.
BLOCKS, KEYS = [[9, 9], [1, 1], [0, 0], [0, 0], [0, 2], [1, 0]], [[9, 9], [3, 40], [0, 0], [0, 0], [0, 1], [200, 150]]


def call_of(device: str = "cpu", dtype: torch.dtype = torch.float32, dim: int = DIM) -> tuple[list[Tensor], list[Any]]:
    """Packed q, k and v, and the packing."""
    q_lengths, k_lengths = zip(*LENGTHS, strict=True)
    inputs = [
        torch.randn(sum(lengths), heads, dim, device=device).to(dtype).requires_grad_()
        for lengths, heads in ((q_lengths, HEADS), (k_lengths, KV_HEADS), (k_lengths, KV_HEADS))
    ]
    starts = [torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (q_lengths, k_lengths)]
    return inputs, [*starts, max(q_lengths), max(k_lengths)]


def masks(device: str = "cpu") -> Tensor:
    """Blocks of the heads that choose them."""
    return torch.rand(len(LENGTHS), TYPES.count(1), 4, 5, device=device) < 0.6


def seen_of(
    sequence: int, blocks: Tensor, streaming: list[list[int]], causal: bool, exact: bool, types: list[int]
) -> Tensor:
    """Pairs (h, sq, sk) of a sequence, pair by pair from the meaning of the arguments."""
    queries, keys = LENGTHS[sequence]
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    of_heads = []
    for head, kind in enumerate(types):
        first, last = streaming[head]
        if kind > 0:
            own = blocks[sequence, types[: head + 1].count(1) - 1 if kind == 1 else kind - 1].cpu()
            seen = own.repeat_interleave(128, 0).repeat_interleave(128, 1)[:queries, :keys]
        elif kind == 0:
            seen = torch.ones(queries, keys, dtype=torch.bool)
        elif exact:
            seen = (key < first) | (key > position - last)
        else:  # the last block is that of the key of the row's last query, or of the sequence's last key
            of_row = torch.arange(queries)[:, None] // 128 * 128 + 127 + keys - queries
            end = torch.div(of_row, 128, rounding_mode="floor") if causal else (keys - 1) // 128
            seen = (key // 128 < first) | (key // 128 > end - last)
        of_heads.append(seen & (key <= position) if causal else seen.expand(queries, keys))
    return torch.stack(of_heads)


def exact_of(
    inputs: list[Tensor], seen: list[Tensor], scale: float | None = None, factors: list[Tensor] | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed results (total_q, h, d), and lse (b, h, longest)."""
    q, k, v = inputs
    outs, sums, at_q, at_k = [], [], 0, 0
    for place, (queries, keys) in enumerate(LENGTHS):
        parts = [
            x.transpose(0, 1)[None] for x in (q[at_q : at_q + queries], k[at_k : at_k + keys], v[at_k : at_k + keys])
        ]
        drops = None if factors is None else factors[place]
        out, lse = masked_attention(*parts, seen[place].to(q.device), scale, drops, compute)
        outs.append(out[0].transpose(0, 1))
        sums.append(torch.nn.functional.pad(lse[0], (0, 400 - queries), value=-math.inf))
        at_q, at_k = at_q + queries, at_k + keys
    return torch.cat(outs), torch.stack(sums)


def near(actual: Any, wanted: Any) -> None:
    for one, exact in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact.double(), rtol=1e-4, atol=1e-5)


@sampled(
    always=1,
    form=[(False, False), (True, False), (True, True)],
    types=[TYPES, [1, -1, 0, 2, -1, -1]],
    scale=[0.4, None],
)
def test_results_and_gradients(form: tuple[bool, bool], types: list[int], scale: float | None) -> None:
    causal, exact = form
    torch.manual_seed(types[3])
    inputs, packing = call_of()
    blocks, streaming = masks(), KEYS if exact else BLOCKS
    seen = [seen_of(i, blocks, streaming, causal, exact, types) for i in range(len(LENGTHS))]
    wanted = exact_of(inputs, seen, scale)
    info = torch.tensor(streaming, dtype=torch.int32).flatten()
    out, lse, probabilities = block_sparse_attn_func(
        *inputs, *packing[:2], torch.tensor(types, dtype=torch.int32), info, blocks, *packing[2:], 0.0,
        softmax_scale=scale, is_causal=causal, exact_streaming=exact, return_attn_probs=True,
    )  # fmt: skip
    near((out, lse), wanted)
    assert probabilities.numel() == 0
    dout = torch.randn_like(out)
    near(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted[0], inputs, dout.double()))


@pytest.mark.parametrize("tokens", [False, True])
def test_streaming_functions(tokens: bool) -> None:
    torch.manual_seed(8)
    inputs, packing = call_of()
    types, streaming = [0, -1, 0, -1, -1, -1], KEYS if tokens else BLOCKS
    seen = [seen_of(i, masks(), streaming, True, tokens, types) for i in range(len(LENGTHS))]
    given = (*packing[:2], torch.tensor(types, dtype=torch.int32), torch.tensor(streaming, dtype=torch.int32))
    if tokens:
        out = token_streaming_attn_func(*inputs, *given, *packing[2:])
    else:
        out = block_streaming_attn_func(*inputs, *given, *packing[2:], 0.0)
    near([out], exact_of(inputs, seen)[:1])


@pytest.mark.exhaustive
@few(("causal", "exact"), [(True, True), (True, False), (False, False)])
def test_dropout(causal: bool, exact: bool) -> None:
    inputs, packing = call_of()
    blocks, streaming = masks(), KEYS if exact else BLOCKS
    seen = [seen_of(i, blocks, streaming, causal, exact, TYPES) for i in range(len(LENGTHS))]
    torch.manual_seed(4)
    factors = next_factors(0.25, LENGTHS, HEADS)
    torch.manual_seed(4)
    out = block_sparse_attn_func(
        *inputs, *packing[:2], torch.tensor(TYPES, dtype=torch.int32), torch.tensor(streaming, dtype=torch.int32),
        blocks, *packing[2:], 0.25, is_causal=causal, exact_streaming=exact,
    )  # fmt: skip
    wanted, _ = exact_of(inputs, seen, factors=factors)
    near([out], [wanted])
    dout = torch.randn_like(out)
    near(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, inputs, dout.double()))


@pytest.mark.exhaustive
def test_compiled_programs() -> None:
    """No number is read, so that nothing breaks the graph."""
    inputs, packing = call_of()
    given = (*packing[:2], torch.tensor(TYPES).int(), torch.tensor(KEYS).int(), masks(), *packing[2:], 0.0)

    def program(*tensors: Tensor) -> Any:
        return block_sparse_attn_func(*tensors, *given, is_causal=True, exact_streaming=True, return_attn_probs=True)

    actual = torch.compile(program, backend="aot_eager", fullgraph=True)(*inputs)
    near(actual[:2], program(*inputs)[:2])


INFO, ALL_BLOCKS = torch.zeros(12, dtype=torch.int32), torch.ones(4, 2, 4, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_mask_type": torch.zeros(5, dtype=torch.int32)}, r"head_mask_type must be int32 of shape \(6,\)"),
        ({"head_mask_type": torch.zeros(6)}, "head_mask_type must be int32 of shape .*, got torch.float32"),
        ({"streaming_info": torch.zeros(6).int()}, r"streaming_info must be int32 of shape \(12,\) or \(6, 2\)"),
        ({"streaming_info": None}, "head_mask_type has −1, for which streaming_info says"),
        ({"base_blockmask": None}, "head_mask_type selects 2 heads of base_blockmask, but base_blockmask is None"),
        ({"base_blockmask": ALL_BLOCKS[:, :1]}, "selects 2 heads of base_blockmask, but base_blockmask has 1"),
        ({"base_blockmask": ALL_BLOCKS[..., :4]}, r"base_blockmask must have shape \(4, 2, 4, 5\)"),
        ({"exact_streaming": True}, "exact_streaming needs is_causal and streaming_info"),
        ({"p_dropout": 1.0}, "the rate of dropout must be at least 0 and below 1"),
    ],
)  # fmt: skip
def test_refusals(given: dict[str, Any], message: str) -> None:
    inputs, packing = call_of()
    options: dict[str, Any] = {
        "cu_seqlens_q": packing[0], "cu_seqlens_k": packing[1], "max_seqlen_q_": 400, "max_seqlen_k_": 520,
        "head_mask_type": torch.tensor(TYPES, dtype=torch.int32), "streaming_info": INFO, "base_blockmask": ALL_BLOCKS,
        "p_dropout": 0.0, **given,
    }  # fmt: skip
    with pytest.raises(CallError, match=message):
        block_sparse_attn_func(*inputs, **options)


def test_the_arguments_are_those_of_block_sparse_attention() -> None:
    """In block_sparse_attn 0.0.2."""
    packed = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "head_mask_type", "streaming_info"]
    longest, after = ["max_seqlen_q_", "max_seqlen_k_"], ["deterministic", "softmax_scale"]
    wanted = {
        "block_sparse_attn_func": [
            *packed, "base_blockmask", *longest, "p_dropout", *after, "is_causal", "exact_streaming",
            "return_attn_probs",
        ],
        "block_streaming_attn_func": [*packed, *longest, "p_dropout", *after, "is_causal", "return_attn_probs"],
        "token_streaming_attn_func": [*packed, *longest, *after, "return_attn_probs"],
    }  # fmt: skip
    for name, arguments in wanted.items():
        assert [*inspect.signature(getattr(block_sparse_attn, name)).parameters] == arguments
