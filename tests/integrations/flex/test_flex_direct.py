"""Operations that a trace records without running them, and expressions whose check is left to the first call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from attngen.integrations.flex import direct as flex_direct
from attngen.integrations.flex import mask as flex_mask
from attngen.integrations.flex import meaning as flex_meaning
from attngen.integrations.flex import trace as flex_trace
from attngen.integrations.flex import translate as flex_translate
from attngen.integrations.flex.identity import FunctionInputs
from tests.integrations.flex.flex_mods import MODS

CPU = torch.device("cpu")


def _trace(function: Any, kind: str) -> flex_trace.Trace:
    return flex_trace.traced(function, kind, CPU, FunctionInputs(function), flex_translate.WORDS)


def _told(operand: Any) -> Any:
    """An operand of a trace as a value that can be compared."""
    if isinstance(operand, flex_trace.TraceStep):
        return operand.name, operand.dtype, operand.shape, _told(operand.args), operand.kwargs, operand.line
    if isinstance(operand, flex_trace.CapturedTensor):
        return operand.slot, operand.name
    if isinstance(operand, flex_trace.Made):
        return operand.dtype, operand.shape, operand.sources
    return [_told(one) for one in operand] if isinstance(operand, list | tuple) else (type(operand), operand)


def test_traces_are_those_that_torch_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [
        (name, function, kind)
        for name, maker in MODS.items()
        for function, kind in zip(maker("cpu"), ("mask_mod", "score_mod"), strict=True)
        if function is not None and name != "rows_by_number"  # torch makes tensors of its numbers
    ]
    direct = [_told(_trace(function, kind).result) for _, function, kind in functions]
    monkeypatch.setattr(flex_trace, "DIRECT", {})
    monkeypatch.setattr(flex_trace._Recorder, "gather", lambda *_: None)
    for actual, (name, function, kind) in zip(direct, functions, strict=True):
        assert actual == _told(_trace(function, kind).result), name


def test_rules_give_the_dtypes_of_torch() -> None:
    """Every function with every mixture of dtypes and numbers: its rule says what torch does, or nothing."""
    dtypes = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    tensors = [torch.ones((), dtype=dtype) for dtype in dtypes]
    decided = 0
    for function, (name, rule) in flex_direct.DIRECT.items():
        for args in [(x,) for x in tensors] + [(x, y) for x in tensors for y in (*tensors, 3, 2.5, 2**40)]:
            rest = [one for one in args if not isinstance(one, Tensor)]
            actual = rule([one.dtype for one in args if isinstance(one, Tensor)], rest)
            if actual is not None:
                assert function(*args).dtype is actual, (name, args)
                decided += 1
    assert decided > 1000


def _declared_counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    real = flex_meaning.declared
    monkeypatch.setattr(flex_meaning, "declared", lambda fields: made.append(fields) or real(fields))
    return made


def test_making_an_ordinary_mask_checks_no_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _declared_counts(monkeypatch)
    monkeypatch.setattr(flex_mask, "PROGRAMS", [False])  # as if no program had been compiled, which asks at once
    doc, width, flex_size = torch.arange(64) // 10, torch.tensor(7), 8
    flex_meaning.forget()
    masks: list[Callable[..., Tensor]] = [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: (q >= kv) & (q - kv < 1024),
        lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        lambda b, h, q, kv: ((q // flex_size) - (kv // flex_size)).abs() <= 2,
        lambda b, h, q, kv: ~((q % 4 != kv % 4) | (q < kv)),
        lambda b, h, q, kv: (q - kv < width) | (kv < width),
        ours.noop_mask,
        ours.and_masks(lambda b, h, q, kv: q >= kv, ours.or_masks(lambda b, h, q, kv: kv < 4)),
    ]
    for mask_mod in masks:
        mask = ours.create_block_mask(mask_mod, None, None, 64, 64, "cpu")
        assert not made
        assert mask.visible().shape == (1, 1, 64, 64)
        assert len(made) == 1
        made.clear()


@pytest.mark.parametrize(
    ("mask_mod", "reason"),
    [
        (lambda b, h, q, kv: (q * kv * q * kv) > 5, "beyond int64"),
        (lambda b, h, q, kv: q // (kv - 3) > 5, "may be zero"),
        (lambda b, h, q, kv: (q << kv) > 5, "shift"),
        (lambda b, h, q, kv: torch.sort(q)[0] > 5, "sort"),
        (lambda b, h, q, kv: q - kv, "a mask is a condition"),
    ],
)
def test_what_the_language_refuses_is_still_refused_when_the_mask_is_made(mask_mod: Any, reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        ours.create_block_mask(mask_mod, None, None, 64, 64, "cpu")


@pytest.mark.parametrize("first", ["doc", "doc_0"])
def test_a_name_that_clashes_with_an_extent_gets_a_number(first: str) -> None:
    doc, doc_0 = torch.arange(64) // 10, torch.arange(64) // 20
    functions = {
        "doc": lambda b, h, q, kv: (doc[q] == doc[kv]) | (doc_0[q] == 1),
        "doc_0": lambda b, h, q, kv: (doc_0[q] == 1) | (doc[q] == doc[kv]),
    }
    flex_meaning.forget()
    mask = ours.create_block_mask(functions[first], None, None, 64, 64, "cpu")
    assert torch.equal(mask.visible()[0, 0], (doc[:, None] == doc) | (doc_0[:, None] == 1))


def _random_mask(random_: random.Random, tensors: list[Tensor], numbers: list[Tensor]) -> Callable[..., Tensor]:
    """Return a mask of what is taken for certain, and of some that may be, such as large products."""

    def number(depth: int, names: tuple[Tensor, ...]) -> Tensor:
        kind = random_.randrange(9) if depth else 0
        if kind == 0:
            return random_.choice(names)
        first = number(depth - 1, names)
        if kind == 1:
            return random_.choice(tensors)[first]
        other = random_.choice([random_.randrange(1, 2 ** random_.choice((3, 20, 40))), number(depth - 1, names)])
        operators: list[Callable[[Any, Any], Any]] = [
            lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: -x, lambda x, y: abs(x),
            lambda x, y: x // y if isinstance(y, int) else torch.maximum(x, y.to(x.dtype)),
            lambda x, y: x % y if isinstance(y, int) else torch.minimum(x, y.to(x.dtype)),
        ]  # fmt: skip
        actual: Tensor = operators[kind - 2](first, other)
        return actual

    def condition(depth: int, names: tuple[Tensor, ...]) -> Tensor:
        if depth == 0 or random_.random() < 0.3:
            x, y = number(depth, names), number(depth, names)
            return random_.choice([x >= y, x < y, x == y, x != 5])
        x, y = condition(depth - 1, names), condition(depth - 1, names)
        return random_.choice([x & y, x | y, ~x, torch.logical_and(x, y)])

    seed = random_.getrandbits(64)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        random_.seed(seed)
        return condition(3, (b, h, q, kv, *numbers)) & (q >= 0)

    return mask_mod


def _certain(function: Any, monkeypatch: pytest.MonkeyPatch, answer: bool) -> tuple[bool, bool]:
    """Whether a mask is certain to be supported, and whether the language supports it."""
    try:
        actual = flex_meaning.Functions(function, None, CPU)
        template = actual._traced()
        certain = template.taken(actual._functions, actual._tensors)
    except CallError:
        return False, False
    monkeypatch.setattr(flex_meaning, "_answer", lambda tensor, question: answer)
    try:
        template.meaning(actual._functions, actual._tensors)
    except CallError:
        return certain, False
    return certain, True


@pytest.mark.parametrize(
    "count",
    [
        20,
        pytest.param(60, marks=pytest.mark.exhaustive),
        pytest.param(500, marks=pytest.mark.exhaustive),
        pytest.param(3000, marks=[pytest.mark.exhaustive, pytest.mark.long]),
    ],
)
def test_what_is_taken_for_certain_is_taken(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(count)
    tensors = [torch.arange(64, dtype=dtype) // 9 for dtype in (torch.int32, torch.int64, torch.uint8)]
    numbers = [torch.tensor(5), torch.tensor(9, dtype=torch.int32)]
    functions = [_random_mask(random.Random(random_.random()), tensors, numbers) for _ in range(count)]
    functions += [mask for maker in MODS.values() if (mask := maker("cpu")[0]) is not None]
    counts = {True: 0, False: 0}
    for function in functions:
        for answer in (True, False):
            certain, takes = _certain(function, monkeypatch, answer)
            counts[certain] += 1
            assert takes or not certain
    assert min(counts.values()) > 20, counts


def test_a_mask_over_a_number_means_what_that_is_at_the_call() -> None:
    limit = torch.tensor([5])
    mask = ours.create_block_mask(lambda b, h, q, kv: kv < limit[0], None, None, 8, 8, "cpu")
    assert mask.visible().sum() == 5 * 8
    limit.fill_(3)
    assert mask.visible().sum() == 3 * 8
