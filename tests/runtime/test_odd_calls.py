"""Odd calls are refused in a sentence: each names what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError

Q, K, V = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (5, 2), (5, 2)))
PAGES = torch.randn(4, 4, 2, 16)
TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"package": 3}, "package must be the name of a package, got int"),
        ({"package": ["x"]}, "package must be the name of a package, got list"),
        ({"deterministic": "yes"}, "deterministic must be True or False, got 'yes'"),
        ({"page_table": TABLE}, "unknown argument 'page_table'; attention_paged takes it"),
        ({"cu_seqlens_q": LENGTHS}, "unknown argument 'cu_seqlens_q'; attention_varlen takes it"),
    ],
)
def test_keywords(given: dict[str, Any], told: str) -> None:
    with pytest.raises(CallError, match=told):
        attngen.attention(Q, K, V, **given)


def test_sparse_tensors_and_what_is_no_dtype() -> None:
    with pytest.raises(CallError, match=r"slope has layout torch.sparse_coo; allowed: a dense tensor, slope.to_dense"):
        attngen.attention(Q, K, V, variant="alibi", slope=torch.rand(4).to_sparse())
    with pytest.raises(CallError, match="q must be a torch.Tensor, got str"):
        attngen.tile_map("q", K.to(torch.float8_e4m3fn), variant="causal")
    with pytest.raises(CallError, match="signs has layout torch.sparse_coo"):
        attngen.quantize(Q, K, V, signs=torch.ones(16).to_sparse())
    with pytest.raises(CallError, match=r"dtype must be one of torch.float8_e4m3fn, .* got \[\]"):
        attngen.quantize(Q, K, V, dtype=[])


def test_a_text_beside_meta_tensors_is_refused() -> None:
    with pytest.raises(CallError, match="k must be a torch.Tensor, got str"):
        attngen.attention(Q.to("meta"), "k", V.to("meta"))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (3, 2)], layout=layout)
    with pytest.raises(CallError, match=r"q is a nested tensor; .*attngen.attention_varlen takes packed sequences"):
        attngen.attention(nested, K, V)


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.empty(1, 3, 4, 16).expand(2, 3, 4, 16), "out is written, but its rows share memory"),
        (torch.empty(2, 3, 4, 16, requires_grad=True), "out is written, but requires a gradient"),
    ],
)
def test_results_that_cannot_be_written(out: torch.Tensor, told: str) -> None:
    with pytest.raises(CallError, match=told):
        attngen.attention_paged(Q, PAGES, PAGES, TABLE, LENGTHS, out=out)


def test_a_keyword_of_other_calls_has_no_nearest_one() -> None:
    with pytest.raises(CallError, match="unknown argument 'deterministic'; keys in pages have none"):
        attngen.attention_paged(Q, PAGES, PAGES, TABLE, LENGTHS, deterministic=True)


def test_a_cache_whose_entries_share_memory() -> None:
    cache = torch.zeros(1, 9, 2, 16).expand(2, 9, 2, 16)
    with pytest.raises(CallError, match="k_cache is written, but its rows share memory"):
        attngen.append_kv(K, V, cache, cache, torch.tensor([0, 0], dtype=torch.int32))


def test_merge_refuses_numbers() -> None:
    with pytest.raises(CallError, match="outs must be a sequence of tensors, or a tensor, got int"):
        attngen.merge(3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors", [(Q.to("meta"), K, V), (Q, K.to("meta"), V)])
def test_tensors_with_and_without_data(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(CallError, match=r"q is on \w+, but k is on \w+; all tensors must be on one device"):
        attngen.attention(*tensors)


def test_quantize_under_vmap() -> None:
    with pytest.raises(CallError, match=r"quantize has no rule for the transforms of torch.func"):
        torch.func.vmap(attngen.quantize)(Q[None], K[None], V[None])
