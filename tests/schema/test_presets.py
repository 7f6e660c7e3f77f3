"""Each preset against a definition written out by hand, one pair of query and key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from attngen.schema import preset, preset_names
from tests.sampling import few

torch = pytest.importorskip("torch")

BATCH, HEADS = 2, 3
Visible = Callable[..., bool]


def documents(length: int) -> torch.Tensor:
    return torch.tensor([[i // 3 for i in range(length)], [i // 4 for i in range(length)]], dtype=torch.int32)


def starts(length: int) -> torch.Tensor:
    return torch.tensor([[i // 3 * 3 for i in range(length)], [i // 4 * 4 for i in range(length)]], dtype=torch.int32)


def real_keys(length: int) -> torch.Tensor:
    return torch.arange(length).expand(2, length) != 3


def same_document(b: int, i: int, j: int) -> bool:
    size = (3, 4)[b]
    return i // size == j // size


#: Preset → whether query i of batch b, at position p, sees key j; and what the call gives.
MASKS: dict[str, tuple[Visible, dict[str, Any]]] = {
    "full": (lambda b, i, p, j: True, {}),
    "causal": (lambda b, i, p, j: j <= p, {}),
    "causal_top_left": (lambda b, i, p, j: j <= i, {}),
    "sliding_window": (lambda b, i, p, j: p - 3 < j <= p, {"window": 3}),
    "prefix_lm": (lambda b, i, p, j: j <= p or j < (2, 5)[b], {"prefix": torch.tensor([2, 5], dtype=torch.int32)}),
    "sink_window": (lambda b, i, p, j: j <= p and (j < 2 or j > p - 3), {"sinks": 2, "window": 3}),
    "chunked": (lambda b, i, p, j: j <= p and p // 4 == j // 4, {"chunk": 4}),
    "dilated": (lambda b, i, p, j: j in {p, p - 2, p - 4}, {"window": 3, "dilation": 2}),
    "causal_sink": (lambda b, i, p, j: j <= p, {"sinks": torch.tensor([0.5, -1.0, 2.0])}),
    "sliding_window_sink": (lambda b, i, p, j: p - 3 < j <= p, {"window": 3, "sinks": torch.tensor([0.5, -1.0, 2.0])}),
    "alibi": (lambda b, i, p, j: j <= p, {"slope": torch.tensor([0.5, 0.25, 0.125])}),
    "softcap": (lambda b, i, p, j: j <= p, {"cap": 2.0}),
    "softcap_window": (lambda b, i, p, j: p - 3 < j <= p, {"cap": 2.0, "window": 3}),
    "packed_documents": (lambda b, i, p, j: j <= p and same_document(b, p, j), {"doc": documents}),
    "packed_bidirectional": (lambda b, i, p, j: p >= 0 and same_document(b, p, j), {"doc": documents}),
    "prefix_tree": (
        lambda b, i, p, j: j <= p < (8, 12)[b] - j % 4,
        {"subtree_end": lambda n: torch.tensor([[8 - j % 4 for j in range(n)], [12 - j % 4 for j in range(n)]])},
    ),
    "causal_packed": (lambda b, i, p, j: j <= p and same_document(b, p, j), {"doc_start": starts}),
    "relative_bias": (
        lambda b, i, p, j: True,
        {"radius": 2, "table": torch.arange(HEADS * 5, dtype=torch.float32).reshape(HEADS, 5)},
    ),
    "triangle": (
        lambda b, i, p, j: True,
        {"rows": 2, "bias": torch.arange(HEADS).float()[:, None, None].expand(1, -1, 12, 16), "real": real_keys},
    ),
    "neighbourhood_2d": (
        lambda b, i, p, j: abs(i // 3 - j // 3) <= 1 and abs(i % 3 - j % 3) <= 1,
        {"width": 3, "radius": 1},
    ),
    "allowed": (
        lambda b, i, p, j: (b + i * j) % 3 == 0,
        {
            "allowed": torch.tensor(
                [[[(b + i * j) % 3 == 0 for j in range(12)] for i in range(12)] for b in range(BATCH)]
            )
        },
    ),
}

#: Preset → the score of a logit of head h, so far from key j.
SCORES: dict[str, Callable[[float, int, int, int], float]] = {
    "alibi": lambda s, h, distance, j: s - (0.5, 0.25, 0.125)[h] * distance,
    "softcap": lambda s, h, distance, j: 2 * math.tanh(s / 2),
    "softcap_window": lambda s, h, distance, j: 2 * math.tanh(s / 2),
    "triangle": lambda s, h, distance, j: s + h if j != 3 else -1e9,
    "relative_bias": lambda s, h, distance, j: s + 5 * h + max(-2, min(2, -distance)) + 2,
}


def environment(seqlen_q: int, seqlen_k: int, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the names and tensors of an evaluation over (batch, head, query, key)."""
    given = {name: value(seqlen_k) if callable(value) else value for name, value in given.items()}
    query = torch.arange(seqlen_q)[:, None]
    env = {
        "b": torch.arange(BATCH)[:, None, None, None], "h": torch.arange(HEADS)[:, None, None], "q": query,
        "kv": torch.arange(seqlen_k), "q_pos": query + seqlen_k - seqlen_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
    }  # fmt: skip
    env |= {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    return env, {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def test_every_preset_is_defined_here():
    assert set(MASKS) == set(preset_names())
    assert set(SCORES) == {name for name in preset_names() if preset(name).score is not None}


@few("lengths", [(12, 12), (5, 12), (12, 5), (1, 12)], ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks(name, lengths):
    from attngen.lang.eager import evaluate

    seqlen_q, seqlen_k = lengths
    visible, given = MASKS[name]
    env, tensors = environment(seqlen_q, seqlen_k, given)
    shape = (BATCH, HEADS, seqlen_q, seqlen_k)
    shown = evaluate(preset(name).mask, env, tensors).expand(shape)[:, 0]
    offset = seqlen_k - seqlen_q
    expected = [
        [[visible(b, i, i + offset, j) for j in range(seqlen_k)] for i in range(seqlen_q)] for b in range(BATCH)
    ]
    assert shown.tolist() == expected


@pytest.mark.parametrize("lengths", [(12, 12), (5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores(name, lengths):
    from attngen.lang.eager import evaluate

    seqlen_q, seqlen_k = lengths
    env, tensors = environment(seqlen_q, seqlen_k, MASKS[name][1])
    logits = torch.linspace(-6, 6, seqlen_q * seqlen_k).reshape(seqlen_q, seqlen_k)
    score = preset(name).score
    assert score is not None
    scores = evaluate(score, env | {"s": logits}, tensors).expand(BATCH, HEADS, seqlen_q, seqlen_k)[0]
    expected = [
        [
            [SCORES[name](float(logits[i, j]), h, i + seqlen_k - seqlen_q - j, j) for j in range(seqlen_k)]
            for i in range(seqlen_q)
        ]
        for h in range(HEADS)
    ]
    torch.testing.assert_close(scores, torch.tensor(expected))
