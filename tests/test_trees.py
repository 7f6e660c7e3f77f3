"""Packs of prefix trees: against all prefixes by brute force, and attention and log-probabilities against sequences."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import attngen
from attngen import trees
from attngen.errors import CallError
from attngen.trees import PackedTrees

VOCABULARY = 11


def random_sequences(seed: int, count: int = 14, longest: int = 9) -> list[list[int]]:
    """Sequences of few tokens, so that many begin alike, some are equal, and some are empty."""
    draw = random.Random(seed)
    return [[draw.randrange(2) for _ in range(draw.randrange(longest))] for _ in range(count)]


def prefixes(packed: PackedTrees) -> list[tuple[int, ...]]:
    """The tokens up to and with each place, by ``parents``."""
    known: list[tuple[int, ...]] = []
    for token, parent in zip(packed.ids[0].tolist(), packed.parents.tolist(), strict=True):
        known.append((*(known[parent] if parent >= 0 else ()), token))
    return known


@pytest.mark.parametrize("seed", range(5))
def test_each_prefix_occurs_once_and_sees_its_own_beginnings(seed: int) -> None:
    given = random_sequences(seed)
    packed = trees.pack(given)
    known = prefixes(packed)
    assert sorted(known) == sorted({tuple(one[: n + 1]) for one in given for n in range(len(one))})
    assert [packed.ids[0, places].tolist() for places in packed.places] == given
    assert packed.positions[0].tolist() == [len(one) - 1 for one in known]
    ends = packed.subtree_end[0].tolist()
    for q, query in enumerate(known):
        assert [kv <= q < ends[kv] for kv in range(len(known))] == [query[: len(key)] == key for key in known]
    assert (packed.ids.dtype, packed.positions.dtype, packed.subtree_end.dtype) == (
        torch.int64, torch.int64, torch.int32,
    )  # fmt: skip
    assert packed.ids.shape == packed.positions.shape == packed.subtree_end.shape == (1, len(known))


@pytest.mark.parametrize("seed", range(3))
def test_ancestors_lie_in_few_ranges(seed: int) -> None:
    packed = trees.pack(random_sequences(seed, count=60, longest=30))
    count = packed.ids.shape[1]
    jumps = torch.zeros(count, dtype=torch.int64)
    for place, parent in enumerate(packed.parents.tolist()):
        if parent >= 0:
            jumps[place] = jumps[parent] + (parent != place - 1)
    assert 1 <= int(jumps.max()) <= math.log2(count)


def test_order_of_siblings() -> None:
    packed = trees.pack([[7, 1], [7, 2, 2, 2], [5], [7, 3, 3, 3], [7]])
    assert packed.ids.tolist() == [[7, 2, 2, 2, 3, 3, 3, 1, 5]]  # the largest first, of equal ones the first given
    assert packed.subtree_end.tolist() == [[8, 4, 4, 4, 7, 7, 7, 8, 9]]


def test_a_comb_of_many_branches_needs_no_deep_recursion() -> None:
    spine = list(range(1200))
    packed = trees.pack([*([*spine[:n], -n] for n in range(1, 1200, 2)), spine])
    assert packed.ids.shape == (1, 1800)
    assert int((packed.subtree_end == 1800).sum()) == 1 + 1  # those of token 0, and of the last leaf


def test_kinds_of_sequences() -> None:
    packed = trees.pack([[3, 4], (3, 4, 5), torch.tensor([3, 4], dtype=torch.int32), [], range(3, 6), [9]])
    assert packed.ids.tolist() == [[3, 4, 5, 9]]
    assert [places.tolist() for places in packed.places] == [[0, 1], [0, 1, 2], [0, 1], [], [0, 1, 2], [3]]
    scores = packed.log_probs(torch.zeros(1, 4, VOCABULARY))
    assert [len(one) for one in scores] == [1, 2, 1, 0, 2, 0]
    assert trees.pack([[5]]).subtree_end.tolist() == [[1]]
    assert packed.to("cpu").places[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no tokens to pack"),
        ([[], []], "no tokens to pack"),
        ([[1], [1.5]], r"sequences\[1\] must be a list of integers"),
        ([[1], 3], r"sequences\[1\] must be a list of integers"),
        ([["a"]], r"sequences\[0\] must be a list of integers"),
        ([[2**63]], r"sequences\[0\] must be a list of integers"),
        (
            [torch.zeros(3)],
            r"sequences\[0\] must be a tensor \(length,\) of an integer dtype, got \(3,\) of torch.float",
        ),
        ([torch.zeros(1, 3, dtype=torch.int64)], r"got \(1, 3\) of torch.int64"),
        ([torch.ones(2, dtype=torch.bool)], "of torch.bool"),
    ],
)
def test_what_is_not_a_sequence_is_refused(given: list[object], message: str) -> None:
    with pytest.raises(CallError, match=message):
        trees.pack(given)


def test_devices() -> None:
    assert trees.pack([[1, 2], torch.tensor([1])]).ids.device.type == "cpu"
    assert trees.pack([[1, 2]], device="meta").places[0].device.type == "meta"
    read = trees._TokenReader(None)
    read(torch.tensor([1]), "sequences[0]")
    read._seen[torch.device("cuda", 1)] = "sequences[1]"
    with pytest.raises(CallError, match=r"sequences\[0\] on cpu, sequences\[1\] on cuda:1\): pass device="):
        _ = read.device


# --- prompts and answers ------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 4], torch.tensor([1, 2, 9]), [5]]
ANSWERS = [[[6, 7], [6, 8, 8], [6, 7], []], [[4, 4], torch.tensor([4])], [[1, 2, 3], [2]]]
WHOLE = [[1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 8, 8], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4], [1, 2, 9, 4, 4], [1, 2, 9, 4],
         [5, 1, 2, 3], [5, 2]]  # fmt: skip
STARTS = (4, 4, 4, 4, 3, 3, 1, 1)


def test_prompts_are_shared_by_their_answers() -> None:
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    assert [packed.ids[0, places].tolist() for places in packed.places] == WHOLE
    assert packed.first == STARTS
    assert packed.ids.tolist() == trees.pack(WHOLE).ids.tolist()
    assert trees.pack_answers([[1], [2]], [[[3]], []]).ids.tolist() == [[1, 3]]
    with pytest.raises(CallError, match="2 prompts and 1 lists of answers"):
        trees.pack_answers([[1], [2]], [[[3]]])
    with pytest.raises(CallError, match=r"prompts\[1\] is empty"):
        trees.pack_answers([[1], []], [[[3]], [[3]]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_are_those_of_each_sequence(dtype: torch.dtype) -> None:
    packed = trees.pack_answers(PROMPTS, ANSWERS)
    logits = torch.randn(1, packed.ids.shape[1], VOCABULARY, dtype=torch.float64, generator=seeded()).to(dtype)
    whole = packed.log_probs(logits)
    few = packed.log_probs(logits[:, packed.rows])
    assert len(packed.rows) < packed.ids.shape[1]
    for tokens, start, places, one, other in zip(WHOLE, STARTS, packed.places, whole, few, strict=True):
        rows = logits[0, places].double().log_softmax(-1)[start - 1 : len(tokens) - 1]
        expected = rows.gather(1, torch.tensor(tokens[start:], dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(one.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(one, other)
        assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with pytest.raises(CallError, match=r"logits must be \(1, 16, vocabulary\), or \(1, 8, vocabulary\)"):
        packed.log_probs(logits[:, :4])


# --- attention ----------------------------------------------------------------------------------------------


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def apart(table: Sequence[Tensor], packed: PackedTrees) -> list[Tensor]:
    """Causal attention over each sequence alone; ``table`` has q, k and v of all places."""
    return [
        attngen.attention(*(one[:, places] for one in table), variant="causal")
        for places in packed.places
        if len(places)
    ]


@pytest.mark.parametrize("given", [WHOLE, random_sequences(3)], ids=["answers", "random"])
def test_attention_and_gradients_are_those_of_sequences_apart(given: list[list[int]]) -> None:
    packed = trees.pack(given)
    count = packed.ids.shape[1]
    leaves = [
        torch.randn(1, count, heads, 8, dtype=torch.float64, generator=seeded(), requires_grad=True)
        for heads in (4, 2, 2)
    ]
    out = attngen.attention(*leaves, **packed.arguments())
    expected = apart(leaves, packed)
    shared = [out[:, places] for places in packed.places if len(places)]
    weights = [torch.randn(one.shape, dtype=torch.float64, generator=seeded()) for one in expected]
    for one, other in zip(shared, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    gradients = [
        torch.autograd.grad(sum((w * one).sum() for w, one in zip(weights, outs, strict=True)), leaves)
        for outs in (shared, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    others = [attngen.attention(*leaves, variant="causal")[:, places] for places in packed.places if len(places)]
    assert max(float((one - other).detach().abs().max()) for one, other in zip(others, expected, strict=True)) > 1e-2
