"""``attngen.block_mask`` on the CPU: masks against a loop, shapes that are shared, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.block_mask.arguments import BlockLists, check
from attngen.runtime.operations.block_mask.in_torch import block_mask


def by_hand(indices: Tensor, counts: Tensor | None, key_blocks: int) -> list[Any]:
    """Set one block after the other; counts are clamped, and entries that are no block left out."""
    batch, heads = (max(indices.shape[i], 0 if counts is None else counts.shape[i]) for i in (0, 1))
    query_blocks, capacity = indices.shape[2:]
    mask = [[[[False] * key_blocks for _ in range(query_blocks)] for _ in range(heads)] for _ in range(batch)]
    lists = indices.expand(batch, heads, -1, -1).tolist()
    counted = None if counts is None else counts.expand(batch, heads, -1).tolist()
    for b in range(batch):
        for h in range(heads):
            for row in range(query_blocks):
                count = capacity if counted is None else min(max(counted[b][h][row], 0), capacity)
                for block in lists[b][h][row][:count]:
                    if 0 <= block < key_blocks:
                        mask[b][h][row][block] = True
    return mask


def random_lists(*shape: int, key_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists with duplicates in any order, and counts of none to all; what does not count is no block."""
    counts = torch.randint(0, shape[-1] + 1, shape[:-1], dtype=torch.int32)
    indices = torch.randint(0, key_blocks, shape, dtype=torch.int32)
    beyond = torch.randint(-(2**31), 2**31, shape).int()
    return torch.where(torch.arange(shape[-1]) < counts[..., None], indices, beyond), counts


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 7, 1), (2, 1, 1, 20), (1, 2, 3, 0)])
@pytest.mark.parametrize("key_blocks", [1, 6, 33])
def test_it_sets_what_one_would_by_hand(shape: tuple[int, ...], key_blocks: int) -> None:
    indices, counts = random_lists(*shape, key_blocks=key_blocks)
    mask = attngen.block_mask(indices, counts, key_blocks=key_blocks)
    assert mask.dtype == torch.bool
    assert mask.is_contiguous()
    assert mask.tolist() == by_hand(indices, counts, key_blocks)
    whole = torch.randint(0, key_blocks, shape, dtype=torch.int32)
    assert attngen.block_mask(whole, key_blocks=key_blocks).tolist() == by_hand(whole, None, key_blocks)


def test_batch_and_heads_are_shared() -> None:
    indices, counts = random_lists(2, 3, 4, 5, key_blocks=9)
    full = torch.full_like(counts, 5)
    for lists, counted in ((indices[:1].clamp(0, 8), counts), (indices[:, :1].clamp(0, 8), full), (indices, counts)):
        mask = attngen.block_mask(lists, counted, key_blocks=9)
        assert mask.shape == (2, 3, 4, 9)
        assert mask.tolist() == by_hand(lists, counted, 9)
    few = torch.full((1, 3, 4), 2, dtype=torch.int32)
    lists = indices[:, :1].clamp(0, 8)
    assert attngen.block_mask(lists, few, key_blocks=9).tolist() == by_hand(lists, few, 9)


def test_any_strides() -> None:
    indices, counts = random_lists(4, 3, 2, 5, key_blocks=9)
    turned, counted = indices.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), counts.mT.contiguous().mT
    assert torch.equal(
        attngen.block_mask(turned, counted, key_blocks=9), attngen.block_mask(indices, counts, key_blocks=9)
    )
    one = indices[:1, :1, :1].clamp(0, 8).expand(2, 2, 2, 5)
    assert attngen.block_mask(one, key_blocks=9).tolist() == by_hand(one, None, 9)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    mask = attngen.block_mask(torch.zeros(shape, dtype=torch.int32), key_blocks=5)
    assert mask.shape == (*shape[:3], 5)
    assert not mask.any()
    assert attngen.block_mask(torch.zeros((*shape[:3], 0), dtype=torch.int32), key_blocks=0).shape == (*shape[:3], 0)


def test_what_is_wrong_is_left_out_where_nobody_looks() -> None:
    """As on a GPU without a kernel."""
    indices = torch.tensor([[[[0, 7, -1, 2**31 - 1, 3], [1, 1, 8, 2, 2]]]], dtype=torch.int32)
    for counts in (None, torch.tensor([[[-4, 99]]], dtype=torch.int32), torch.tensor([[[5, -(2**31)]]]).int()):
        call = BlockLists(indices, counts, 7)
        assert block_mask(call, check(call)).tolist() == by_hand(indices, counts, 7)


LISTS = torch.tensor([[[[0, 2], [1, 5]]]], dtype=torch.int32)
COUNTS = torch.tensor([[[2, 1]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices": LISTS}, "indices[0, 0, 1, 1] is 5, but key_blocks is 4; allowed: 0 to 3; counts leaves out"),
        ({"indices": LISTS - 1, "counts": COUNTS}, "indices[0, 0, 0, 0] is -1, but key_blocks is 4; allowed: 0 to 3"),
        ({"indices": LISTS, "counts": COUNTS, "key_blocks": 0}, "key_blocks is 0; allowed: none"),
        ({"indices": LISTS, "counts": COUNTS + 1}, "counts[0, 0, 0] is 3; allowed: 0 to 2"),
        ({"indices": LISTS, "counts": COUNTS - 2}, "counts[0, 0, 1] is -1; allowed: 0 to 2"),
        ({"indices": LISTS, "counts": COUNTS.expand(3, 1, 2) + 2}, "counts[0, 0, 0] is 4"),
        ({"indices": LISTS, "counts": 2 * COUNTS.expand(3, 1, 2) - 2}, None),
        ({"indices": LISTS.long()}, "indices must be int32, got torch.int64; pass indices.int()"),
        ({"indices": LISTS.float()}, "indices must be int32, got torch.float32"),
        ({"indices": [[0]]}, "indices must be a torch.Tensor, got list"),
        ({"indices": LISTS[0]}, "indices must have 4 dimensions (batch x heads x query blocks x capacity), got shape"),
        ({"indices": LISTS, "counts": COUNTS[0]}, "counts must have 3 dimensions"),
        ({"indices": LISTS, "counts": COUNTS.long()}, "counts must be int32, got torch.int64; pass counts.int()"),
        ({"indices": LISTS, "counts": [2, 1]}, "counts must be a torch.Tensor, got list"),
        ({"indices": LISTS, "counts": COUNTS.to("meta")}, "counts is on meta, but indices is on cpu"),
        ({"indices": LISTS, "counts": COUNTS[..., :1]}, "indices has rows (1, 1, 2), but counts has shape (1, 1, 1)"),
        ({"indices": LISTS.expand(2, 1, 2, 2), "counts": COUNTS.expand(3, 1, 2)}, "batch and heads must be alike"),
        ({"indices": LISTS, "key_blocks": -1}, "key_blocks must not be negative, got -1"),
        ({"indices": LISTS, "key_blocks": True}, "key_blocks must be a Python integer, got True"),
        ({"indices": LISTS, "key_blocks": 2.0}, "key_blocks must be a Python integer, got 2.0"),
        ({"indices": LISTS, "key_blocks": torch.tensor(6)}, "key_blocks must be a Python integer, got a tensor"),
    ],
)
def test_what_it_refuses(arguments: dict[str, Any], message: str | None) -> None:
    arguments = {"key_blocks": 4, **arguments}
    if message is None:  # no row counts an entry that is wrong
        assert attngen.block_mask(**arguments).any()
        return
    with pytest.raises(CallError, match=re.escape(message)):
        attngen.block_mask(**arguments)


def test_an_entry_is_named_where_it_is() -> None:
    """Also if a batch shares its lists."""
    with pytest.raises(CallError, match=re.escape("indices[0, 0, 1, 1] is 5")):
        attngen.block_mask(LISTS, torch.tensor([[[2, 1]], [[2, 2]]], dtype=torch.int32), key_blocks=5)


@pytest.mark.exhaustive
def test_compiled_programs_keep_it_whole() -> None:
    """One program serves all numbers of blocks."""
    indices, counts = random_lists(2, 1, 3, 4, key_blocks=3)
    programs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        programs.append([str(node.target) for node in graph.graph.nodes if "attngen" in str(node.target)])
        return graph

    def program(indices: Tensor, counts: Tensor, keys: Tensor) -> Tensor:
        return ~attngen.block_mask(indices, counts, key_blocks=(keys.shape[0] + 63) // 64)

    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=backend)
    for length in (300, 500):
        keys = torch.empty(length)
        assert torch.equal(compiled(indices, counts, keys), program(indices, counts, keys))
    assert programs == [["attngen.blocks__mask"]]
    torch.library.opcheck(torch.ops.attngen.blocks__mask.default, (indices, counts, 5))


def test_exported_programs_have_it() -> None:
    class Program(torch.nn.Module):
        def forward(self, indices: Tensor, keys: Tensor) -> Tensor:
            return attngen.block_mask(indices, key_blocks=keys.shape[0] // 64)

    length = torch.export.Dim("length", min=129)
    exported = torch.export.export(Program(), (LISTS, torch.empty(400)), dynamic_shapes=(None, {0: length}))
    assert torch.equal(exported.module()(LISTS, torch.empty(640)), attngen.block_mask(LISTS, key_blocks=10))
