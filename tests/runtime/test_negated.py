"""Tensors with the negative bit hold numbers of the other sign: every call refuses them, on a GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.arguments.keys import note
from tests.sampling import few

Q, K, V = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (5, 2), (5, 2)))
PAGES = torch.randn(4, 4, 2, 16)
TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
COS, SIN = torch.rand(16, 8), torch.rand(16, 8)


def negated(tensor: Tensor) -> Tensor:
    """Return a tensor of the same numbers whose memory holds their negatives."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (attngen.attention, {"q": Q, "k": K, "v": V, "seqused_k": LENGTHS.clamp(max=5)}),
    "biased": (attngen.attention, {"q": Q, "k": K, "v": V, "variant": "alibi", "slope": torch.rand(4)}),
    "paged": (
        attngen.attention_paged,
        {"q": Q, "k_pages": PAGES, "v_pages": PAGES, "page_table": TABLE, "seqused_k": LENGTHS,
         "out": torch.empty(2, 3, 4, 16)},
    ),
    "append": (
        attngen.append_kv,
        {"k": K[:, :2], "v": V[:, :2], "k_cache": PAGES.clone(), "v_cache": PAGES.clone(), "cache_seqlens": LENGTHS - 4,
         "page_table": TABLE, "q": Q[:, :2], "q_out": torch.empty(2, 2, 4, 16), "rotary_cos": COS, "rotary_sin": SIN},
    ),
    "quantize": (
        attngen.quantize,
        {"q": Q, "k": K, "v": V, "signs": torch.ones(16), "rotary_cos": COS, "rotary_sin": SIN,
         "rotary_offsets": LENGTHS},
    ),
}  # fmt: skip
PLACES = [(form, name) for form, (_, given) in CALLS.items() for name in given if isinstance(given[name], Tensor)]


@few(("form", "name"), PLACES, always=range(0, 999, 3))
def test_each_is_refused(form: str, name: str) -> None:
    call, given = CALLS[form]
    call(**given)
    seen = name.removesuffix("_pages")
    with pytest.raises(CallError, match=rf"^{seen} has the negative bit, .* allowed: {seen}\.resolve_neg\(\)"):
        call(**given | {name: negated(given[name])})


def test_negated_tensors_are_prepared_apart() -> None:
    """A call of the same shapes was made before, and its launch would be taken."""
    keys: list[list[Any]] = [[], []]
    for key, tensor in zip(keys, (Q, negated(Q)), strict=True):
        note(key, tensor)
    assert keys[0] != keys[1]


def test_gradients_with_it_are_taken_as_they_are() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in (Q, K, V)]
    direction = torch.randn_like(Q)
    gradients = [
        torch.autograd.grad(attngen.attention(*leaves), leaves, way) for way in (direction, negated(direction))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
