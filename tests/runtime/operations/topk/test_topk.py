"""``attngen.topk`` on the CPU: the k largest of each row, ties, special values, lengths, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError

TABLE, OFFSETS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, 1, 5], dtype=torch.int32)


def by_hand(row: list[float], k: int) -> list[int]:
    """Select one score after the other."""
    left = {i: score for i, score in enumerate(row) if score != -torch.inf}
    chosen = []
    while left and len(chosen) < k:
        best = max(left, key=lambda i: (left[i] != left[i], left[i] if left[i] == left[i] else 0.0, -i))
        chosen.append(best)
        del left[best]
    return sorted(chosen) + [-1] * (k - len(chosen))


@pytest.mark.parametrize("k", [1, 3, 7, 12])
def test_it_selects_what_one_would_by_hand(k: int) -> None:
    rows = torch.randint(-3, 4, (40, 9)).float()
    rows = torch.where(torch.rand(rows.shape) < 0.1, torch.tensor(torch.nan), rows)
    rows = torch.where(torch.rand(rows.shape) < 0.2, torch.tensor(-torch.inf), rows)
    rows = torch.where(rows == 0, torch.tensor([-0.0, 0.0] * 4 + [0.0]), rows)
    assert attngen.topk(rows, k).tolist() == [by_hand(row, k) for row in rows.tolist()]


def test_indices_ascend_and_have_the_shape_of_the_rows() -> None:
    scores = torch.randn(2, 3, 50)
    chosen = attngen.topk(scores, 8)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (2, 3, 8)
    assert (chosen.diff(dim=-1) > 0).all()
    values = scores.gather(-1, chosen.long()).sort(descending=True).values
    assert torch.equal(values, torch.topk(scores, 8).values)
    assert torch.equal(attngen.topk(scores.transpose(0, 1), 8), chosen.transpose(0, 1))
    assert attngen.topk(scores[0, 0], 8).tolist() == chosen[0, 0].tolist()


def test_lengths_cut_rows() -> None:
    scores = torch.arange(12.0).view(3, 4)
    lengths = torch.tensor([3, 0, 9], dtype=torch.int32)
    assert attngen.topk(scores, 2, lengths=lengths).tolist() == [[1, 2], [-1, -1], [2, 3]]


def test_slots_of_a_cache() -> None:
    scores = torch.tensor([[1.0, 5.0, 3.0, 4.0, 2.0], [9.0, 1.0, 8.0, 2.0, 7.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    table = torch.tensor([[7, 3, 99], [0, 5, 6]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([4, 5, 1], dtype=torch.int32)
    own: dict[str, Any] = {"page_table": table, "page_size": 2}
    chosen = attngen.topk(scores, 3, lengths=lengths, cu_seqlens_q=starts, **own)
    assert chosen.tolist() == [[15, 6, 7], [0, 10, 12], [0, -1, -1]]
    of_batch = scores[:2].unsqueeze(1)
    assert attngen.topk(of_batch, 2, lengths=lengths[:2, None], **own).tolist() == [[[15, 7]], [[0, 10]]]


def test_the_callers_tensor_gets_the_result() -> None:
    scores, wide = torch.randn(4, 30), torch.zeros(4, 9, dtype=torch.int32)
    assert attngen.topk(scores, 5, out=wide[:, :5]).tolist() == attngen.topk(scores, 5).tolist() == wide[:, :5].tolist()
    assert not wide[:, 5:].any()
    compiled = torch.compile(lambda rows: attngen.topk(rows * 1, 5, out=wide[:, 1:6]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(scores), attngen.topk(scores, 5))


def test_rows_without_scores() -> None:
    assert attngen.topk(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2
    assert attngen.topk(torch.empty(0, 5), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": torch.randn(2, 3).double(), "k": 1}, "scores must be float32, got torch.float64"),
        ({"scores": [1.0], "k": 1}, "scores must be a torch.Tensor, got list"),
        ({"scores": torch.tensor(1.0), "k": 1}, "scores must have a row"),
        ({"scores": torch.randn(2, 3), "k": 0}, "k must be a positive integer, got 0"),
        ({"scores": torch.randn(2, 3), "k": True}, "k must be a positive integer, got True"),
        ({"scores": torch.randn(2, 3), "k": 1, "lengths": torch.ones(2)}, "lengths must be an int32 tensor"),
        ({"scores": torch.randn(2, 3), "k": 1, "lengths": torch.ones(3).int()}, "lengths must have shape (2,)"),
        *(
            ({"scores": torch.randn(2, 3), "k": 1, **more}, message)
            for more, message in (
                ({"out": torch.zeros(2, 2).int()}, "out must have shape (2, 1), got (2, 2)"),
                ({"out": torch.zeros(2, 1)}, "out must be an int32 tensor, got torch.float32"),
                ({"out": torch.zeros(1, 1).int().expand(2, 1)}, "out is written, but its rows share memory"),
                ({"page_size": 2}, "page_size goes with page_table"),
                ({"page_table": TABLE}, "page_size must be a positive integer with page_table, got None"),
                ({"page_table": TABLE[0], "page_size": 2}, "page_table must have shape (batch, max_pages)"),
                ({"page_table": TABLE[:1], "page_size": 2}, "scores must have 1 rows at first, as page_table has"),
                ({"page_table": TABLE, "page_size": 2, "cu_seqlens_q": TABLE[0]}, "of shape (batch + 1,) = (3,)"),
                (
                    {"page_table": TABLE, "page_size": 1},
                    "but rows of page_table have room for 2 keys",
                ),
                (
                    {"page_table": TABLE, "page_size": 2, "cu_seqlens_q": OFFSETS},
                    "cu_seqlens_q ends at 5",
                ),
            )
        ),
    ],
)
def test_what_it_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=re.escape(message)):
        attngen.topk(**arguments)


def test_compiled_programs_keep_it_whole() -> None:
    scores = torch.randn(4, 30)
    lengths = torch.tensor([30, 3, 0, 12], dtype=torch.int32)

    def program(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return attngen.topk(scores * 2, 5, lengths=lengths)

    compiled = torch.compile(program, fullgraph=True, backend="eager")
    assert torch.equal(compiled(scores, lengths), program(scores, lengths))
