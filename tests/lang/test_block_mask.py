"""The field ``blocks`` of a variant: a tensor of the call shows blocks of keys to blocks of queries."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen.errors import SpecError


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("mask", [None, "q_pos >= kv", "abs(q - kv) < 100 or kv < 3"])
def test_queries_see_the_blocks_that_are_shown(size: int, mask: str | None) -> None:
    torch.manual_seed(0)
    queries, keys = 300, 413
    blocks = torch.rand(2, 3, -(-queries // size), -(-keys // size)) < 0.5
    seen = attngen.variant(mask, blocks=size).mask((2, 3, queries, keys), block_mask=blocks)
    of_mask = attngen.variant(mask).mask((2, 3, queries, keys))
    shown = blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)[..., :queries, :keys]
    assert torch.equal(seen, shown & of_mask)


def test_the_same_as_a_mask_that_reads_the_tensor() -> None:
    tensors = {"block_mask": {"dtype": "bool", "shape": ["b", "h", "query_blocks", "key_blocks"]}}
    written = attngen.variant("block_mask[b, h, q // 64, kv // 64] and q_pos >= kv", tensors=tensors)
    assert attngen.variant("q_pos >= kv", blocks=64).value.definition == written.value.definition


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": "index"}, "'keys: index' lists the keys of each query, and 'blocks: 64' those of each block"),
        (
            {"tensors": {"block_mask": {"dtype": "bool", "shape": ["b"]}}},
            "has 'blocks: 64', which declares 'block_mask' itself; leave it out",
        ),
    ],
)
def test_what_says_it_otherwise_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        attngen.variant(blocks=64, **fields)  # type: ignore[arg-type]


def test_other_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="64, 128"):
        attngen.variant(blocks=32)
