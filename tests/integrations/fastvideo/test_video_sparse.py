"""FastVideo's video sparse attention: results and gradients beside its arithmetic in float64."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations import fastvideo
from tests.integrations.oracles import lists_of, masked_attention, pairs_of_blocks
from tests.sampling import sampled

BATCH, HEADS, DIM = 2, 3, 16


def inputs_of(
    q_sizes: Tensor, sizes: Tensor, tokens: int, dtype: torch.dtype = torch.float32, dim: int = DIM
) -> list[Tensor]:
    """q, k and v (b, h, s, d), with zeros where blocks have no token."""
    made = []
    for valid in (q_sizes, sizes, sizes):
        rows = torch.randn(BATCH, HEADS, len(valid), tokens, dim)
        rows.masked_fill_((torch.arange(tokens) >= valid[:, None])[..., None], 0.0)
        made.append(rows.flatten(2, 3).to(dtype).requires_grad_())
    return made


def exact(
    inputs: list[Tensor], q_sizes: Tensor, sizes: Tensor, tokens: int, topk: int, weight: Tensor | None,
    compute: torch.dtype = torch.float64, chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and the blocks that are chosen unless they are given."""
    q, k, v = (x.to(compute) for x in inputs)
    means = [
        x.unflatten(2, (-1, tokens)).sum(3) / valid[:, None]
        for x, valid in ((q, q_sizes), (k, sizes), (v, sizes))
    ]  # fmt: skip
    scores = means[0] @ means[1].mT / math.sqrt(q.shape[-1])
    coarse = (scores.softmax(-1) @ means[2]).repeat_interleave(tokens, 2)
    if chosen is None:
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order, True)
    seen = pairs_of_blocks(chosen, tokens, tokens, q.shape[2], k.shape[2])
    seen = seen & (torch.arange(tokens) < sizes[:, None]).flatten()
    fine, _ = masked_attention(q, k, v, seen, compute=compute)
    return (coarse if weight is None else coarse * weight.to(compute)) + fine, chosen


def near(actual: Any, wanted: Any) -> None:
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


@sampled(
    always=3,
    block=[((4, 4, 4), 64), (4, 64), (64, 64), ((2, 8, 8), 128), ((3, 8, 8), 192), ((4, 8, 8), 256)],
    gate=[False, True],
    form=["bhsd", "bshd"],
)
def test_results_and_gradients(block: tuple[Any, int], gate: bool, form: str) -> None:
    block_size, tokens = block
    torch.manual_seed(tokens)
    q_sizes, sizes = (torch.randint(1, tokens + 1, (n,), dtype=torch.int32) for n in (3, 5))
    inputs = inputs_of(q_sizes, sizes, tokens)
    weight = torch.randn_like(inputs[0]).requires_grad_() if gate else None
    wanted, _ = exact(inputs, q_sizes, sizes, tokens, 2, weight)
    function = fastvideo.video_sparse_attn if form == "bhsd" else fastvideo.video_sparse_attn_bshd

    def moved(tensor: Tensor) -> Tensor:
        return tensor if form == "bhsd" else tensor.transpose(1, 2)

    given = None if weight is None else moved(weight)
    out = moved(function(*map(moved, inputs), sizes, q_sizes, 2, block_size, given))
    near([out], [wanted])
    leaves = inputs if weight is None else [*inputs, weight]
    dout = torch.randn_like(out)
    near(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, leaves, dout.double()))


def test_all_blocks_and_equal_scores() -> None:
    """Of equal scores those of the first blocks count as higher; more than there are means all."""
    sizes = torch.full((3,), 64)
    q, k, v = (x.detach() for x in inputs_of(sizes, sizes, 64))
    _, chosen = exact([q, k, v], sizes, sizes, 64, 2, None, chosen=torch.tensor([True, True, False]).expand(2, 3, 3, 3))
    equal = torch.zeros_like(k)
    for topk, shown in ((2, chosen), (7, torch.ones_like(chosen))):
        out = fastvideo.video_sparse_attn(q, equal, v, sizes, sizes, topk)
        near([out], [exact([q, equal, v], sizes, sizes, 64, topk, None, chosen=shown)[0]])


def test_half_precision_errs_as_plain_torch() -> None:
    torch.manual_seed(5)
    sizes = torch.randint(1, 65, (6,))
    inputs = [x.detach() for x in inputs_of(sizes, sizes, 64, torch.bfloat16)]
    out = fastvideo.video_sparse_attn(*inputs, sizes, sizes, 6)  # all blocks: rounding may change which are chosen
    true, plain = (exact(inputs, sizes, sizes, 64, 6, None, dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert (out - true).abs().max() <= 2 * (plain - true).abs().max()


@pytest.mark.parametrize("bools", [False, True])
def test_block_sparse_attention(bools: bool) -> None:
    torch.manual_seed(2)
    sizes = torch.randint(0, 65, (4,))
    q, k, v = inputs_of(torch.full((3,), 64), sizes, 64)
    shown = torch.rand(BATCH, HEADS, 3, 4) < 0.5
    shown[0, 0, 0] = False
    seen = pairs_of_blocks(shown, 64, 64, 192, 256) & (torch.arange(64) < sizes[:, None]).flatten()
    wanted, natural = masked_attention(q, k, v, seen)
    if bools:
        out, lse = fastvideo.block_sparse_attn(q, k, v, shown, sizes)
    else:
        out, lse = fastvideo.block_sparse_attn_from_indices(q, k, v, *lists_of(shown, 4), sizes)
    assert not lse.requires_grad
    near((out, lse), (wanted, natural.detach() / math.log(2)))
    dout = torch.randn_like(out)
    near(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout.double()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": (3, 3, 3)}, "gives blocks of 27 queries and 27 keys.* the next are 64 and 64"),
        ({"block_size": (4, 4)}, r"block_size must be an integer or three of them, such as \(4, 4, 4\)"),
        ({"block_size": 128}, "q has 192 tokens, which blocks of 128 do not divide; fill it up with zeros to 256"),
        ({"topk": 0}, "topk must be an integer of at least 1, got 0"),
        ({"q_variable_block_sizes": 2}, "q_variable_block_sizes must be a torch.Tensor, got int; where early"),
        ({"variable_block_sizes": torch.ones(4)}, r"variable_block_sizes must have shape \(3,\)"),
        ({"compress_attn_weight": torch.ones(2, 3, 1, 16)}, r"must have shape \(2, 3, 192, 16\), as q"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    sizes = torch.full((3,), 64)
    options = {"variable_block_sizes": sizes, "q_variable_block_sizes": sizes, "topk": 2, **given}
    with pytest.raises(CallError, match=message):
        fastvideo.video_sparse_attn(*inputs_of(sizes, sizes, 64), **options)


def test_the_arguments_are_those_of_fastvideo() -> None:
    """In fastvideo-kernel 0.3."""
    video = [
        "q", "k", "v", "variable_block_sizes", "q_variable_block_sizes", "topk", "block_size", "compress_attn_weight",
    ]  # fmt: skip
    for function, names in (
        (fastvideo.video_sparse_attn, video),
        (fastvideo.video_sparse_attn_bshd, video),
        (fastvideo.block_sparse_attn, ["q", "k", "v", "block_map", "variable_block_sizes"]),
        (
            fastvideo.block_sparse_attn_from_indices,
            ["q", "k", "v", "q2k_idx", "q2k_num", "variable_block_sizes"],
        ),
    ):
        assert [*inspect.signature(function).parameters] == names
