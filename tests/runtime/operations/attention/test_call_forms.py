"""Functions that take the arguments of every call refuse those of another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError

Q = torch.zeros(1, 8, 2, 8)
STARTS = torch.tensor([0, 8], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 8, "max_seqlen_k": 8}


def explain(q: torch.Tensor, **given: Any) -> Any:
    return attngen.explain(q, q, q, variant="causal", **given)


def scores(q: torch.Tensor, **given: Any) -> Any:
    return attngen.debug.scores(q, q, q, variant="causal", **given)


def compare(q: torch.Tensor, **given: Any) -> Any:
    return attngen.debug.compare(q, q, q, variant="causal", **given)


def tile_map(q: torch.Tensor, **given: Any) -> Any:
    return attngen.tile_map(q, q, variant="causal", **given)


@pytest.mark.parametrize("function", [explain, scores, compare, tile_map])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_seqlen_q": 8}, "max_seqlen_q goes with cu_seqlens_q, which this call does not have"),
        ({"cu_seqlens_k": STARTS}, "cu_seqlens_k goes with cu_seqlens_q"),
        ({**PACKED, "layout": "bhsd"}, "layout is for dense tensors; packed tensors have one"),
        ({"foo": 1}, "causal: unknown argument 'foo'"),
        ({"softmax_scal": 1.0}, "unknown argument 'softmax_scal'"),
    ],
)
def test_arguments_that_a_dense_call_does_not_take(
    function: Callable[..., Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(CallError, match=message):
        function(Q[0] if "cu_seqlens_q" in given else Q, **given)


@pytest.mark.parametrize("function", [explain, scores, compare])
@pytest.mark.parametrize("given", [{"page_layout": "HND"}, {"num_splits": 2}, {"split_size": 128}])
def test_arguments_that_go_with_pages_alone(function: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(CallError, match=f"{next(iter(given))} goes with page_table, which this call does not have"):
        function(Q, **given)


def test_the_arguments_of_a_call_are_explained_as_they_are() -> None:
    tiles = attngen.tile_map(Q, Q, variant="causal")
    assert explain(Q, tile_map=tiles).runs == "reference"
    assert explain(Q[0], **PACKED).runs == "reference"
