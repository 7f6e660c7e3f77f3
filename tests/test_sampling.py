"""The sample of a product of parameters: every value, pairs where there is room, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling
from tests.sampling import few, sampled, seeds, some


@pytest.fixture(autouse=True)
def _rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that the run would leave out are there."""
    monkeypatch.setattr(sampling, "_ASKED", {"rest": True, "long": True})


def split(mark: pytest.MarkDecorator) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    names, cases = mark.args
    assert all(len(case.values) == len(names) for case in cases)
    always = [case.values for case in cases if not case.marks]
    return always, [case.values for case in cases if case.marks]


def test_every_value_is_in_the_sample_and_every_combination_somewhere() -> None:
    for sizes in ((5,), (2, 2, 2), (17, 2), (2, 4), (5, 2, 2), (3, 2, 4), (4, 4)):
        axes = {f"axis_{n}": [f"{n}{i}" for i in range(size)] for n, size in enumerate(sizes)}
        always, rest = split(sampled(**axes))
        assert len(always) == max(sizes)
        assert [set(values) for values in zip(*always, strict=True)] == [set(axis) for axis in axes.values()]
        assert len({*always, *rest}) == len(always) + len(rest)
        size = 1
        for length in sizes:
            size *= length
        assert len(always) + len(rest) == size


def test_short_axes_meet_where_the_longest_has_room() -> None:
    always, _ = split(sampled(long="abcde", one=[0, 1], other=[0, 1]))
    assert {values[1:] for values in always} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_part_of_a_sample_runs_always() -> None:
    always, rest = split(sampled(always=2, long="abcde", short=[0, 1]))
    assert (always, len(rest)) == ([("a", 0), ("b", 1)], 8)


def test_a_mapping_names_its_values() -> None:
    (case,) = sampled(mask={"causal": "q >= kv"}).args[1]
    assert (case.id, case.values) == ("causal", ("q >= kv",))


def test_the_first_seeds_run_always() -> None:
    name, cases = seeds(5, always=3).args
    assert name == "seed"
    assert [case.values for case in cases] == [(seed,) for seed in range(5)]
    assert [bool(case.marks) for case in cases] == [False] * 3 + [True] * 2


def names_of(case: Any) -> list[str]:
    return sorted(mark.name for mark in case.marks)


def test_of_the_others_a_tenth_is_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"letter": "abcde", "number": range(4), "half": [0, 1]}
    for cases, each in ((sampled(**axes, always=2).args[1], 3 + 4), (seeds(42, always=2).args[1], 4)):
        names = [names_of(case) for case in cases]
        assert names.count([]) == 2
        assert names.count(["exhaustive"]) == each
        assert names.count(["exhaustive", "long"]) == 40 - 2 + 2 * (len(cases) == 42) - each
    often = [case for case in sampled(**axes, always=2).args[1] if "long" not in names_of(case)]
    assert [set(values) for values in zip(*(case.values for case in often), strict=True)] == [*map(set, axes.values())]
    monkeypatch.setitem(sampling._ASKED, "long", False)
    assert [case.values for case in sampled(**axes, always=2).args[1]] == [case.values for case in often]


def test_a_run_of_the_sample_collects_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sampling._ASKED, "rest", False)
    values = (
        sampled(long="abc", short=[0, 1]).args[1], few("row", "abcd", always=(1, 3), ids=["a", "b", "c", "d"]).args[1],
        seeds(9, always=2).args[1], some("abc", "ca"),
    )  # fmt: skip
    assert [[case.values for case in cases] for cases in values] == [
        [("a", 0), ("b", 1), ("c", 0)], [("b",), ("d",)], [(0,), (1,)], [("a",), ("c",)]
    ]  # fmt: skip
    assert [case.id for case in values[1]] == ["b", "d"]


@pytest.mark.parametrize(
    ("marks", "rest", "exhaustive", "long"),
    [
        ("", True, False, True),
        ("not exhaustive", False, False, True),
        ("exhaustive", True, True, True),
        ("exhaustive and not long", True, True, False),
        ("gpu", True, False, True),
    ],
)
def test_what_an_expression_of_marks_asks_for(
    marks: str, rest: bool, exhaustive: bool, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_ASKED", {})
    sampling.ask(marks)
    assert {"rest": rest, "exhaustive": exhaustive, "long": long} == sampling._ASKED


def test_named_rows_run_always() -> None:
    rows = [(1, "a"), pytest.param(2, "b", id="second"), (3, "c")]
    for always, expected in ((1, [1]), (2, [1, 2]), ((1, 2), [2, 3])):
        _, cases = few(("number", "letter"), rows, always=always).args
        assert [case.values[0] for case in cases if not case.marks] == expected
        assert [case.values for case in cases] == [(1, "a"), (2, "b"), (3, "c")]
        assert cases[1].id == "second"
    assert [case.values for case in few("row", ["ab", "cd"]).args[1]] == [("ab",), ("cd",)]


def test_a_function_without_cases_in_a_run_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ({"rest": False, "long": True}, {"rest": True, "long": False}):
        monkeypatch.setattr(sampling, "_ASKED", asked)
        assert sampling.left_out([few("row", "abc", always=0, often=()).name])
