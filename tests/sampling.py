"""Parameters of which a sample runs always, and all others where ``-m exhaustive`` asks for them.

Of combinations and seeds beyond the sample, nine of ten are ``long``. A run that leaves cases out does not even collect
them: there are more of them than of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, TypeVar

import pytest

Axis = Iterable[Any] | Mapping[str, Any]

_ROW = type(pytest.param())
_Value = TypeVar("_Value")

#: Sample of this run; ``tests/conftest.py`` sets it.
_ASKED = {"exhaustive": False, "rest": True, "long": True}


def ask(marks: str) -> None:
    """Note which tests an expression of marks asks for."""
    _ASKED["rest"] = "not exhaustive" not in marks
    _ASKED["exhaustive"] = "exhaustive" in marks and _ASKED["rest"]
    _ASKED["long"] = "not long" not in marks


def exhaustive() -> bool:
    """Whether this run is one of the tests that only ``-m exhaustive`` runs."""
    return _ASKED["exhaustive"]


def rest() -> bool:
    """Whether this run collects what a default run leaves out."""
    return _ASKED["rest"]


def left_out(marks: Iterable[str]) -> bool:
    """Whether this run has no test with these marks."""
    return any(
        (mark == "long" and not _ASKED["long"]) or (mark == "exhaustive" and not _ASKED["rest"]) for mark in marks
    )


def covering(facts: Mapping[str, tuple[Any, Iterable[Any]]]) -> list[str]:
    """Return the names that show their kind with a value which no name of this kind before them has.

    Each name has a kind, and as many values as all others, in the same order.
    """
    seen: set[Any] = set()
    kept = []
    for name, (kind, values) in facts.items():
        shown = {(kind, place, value) for place, value in enumerate(values)}
        if shown - seen:
            kept.append(name)
            seen |= shown
    return kept


def sampled(*, always: int | Container[int] | None = None, every: int = 1, **axes: Axis) -> pytest.MarkDecorator:
    """Return the parametrization of a test by all combinations of the values of ``axes``.

    The sample goes once along the longest axis and round and round along the others, so that it has every value of
    each, and pairs of the short ones as far as the longest reaches; ``always`` keeps so many of it, or those at the
    places that it names. CI has all of it, and a tenth of the other combinations, or ``every`` so many-th of both. A
    mapping gives its values names.
    """
    named = [_named(axis) for axis in axes.values()]
    diagonal = _diagonal([len(axis) for axis in named])
    kept = {
        choice for place, choice in enumerate(diagonal)
        if always is None or (place < always if isinstance(always, int) else place in always)
    }  # fmt: skip
    choices = list(product(*(range(len(axis)) for axis in named)))
    rest_of_all = [choice for choice in choices if choice not in diagonal]
    often = {*kept, *diagonal[::every], *sorted(_tenth(rest_of_all))[::every]}
    cases = []
    for choice in choices:
        names, values = zip(*(axis[i] for axis, i in zip(named, choice, strict=True)), strict=True)
        cases += _case(values, always=choice in kept, name="-".join(names), marks=_marks(choice in often))
    return _parametrized(tuple(axes), cases)


def seeds(number: int, *, always: int) -> pytest.MarkDecorator:
    """Return the parametrization of a test by ``seed``: the first ones run always, all others with the rest."""
    return few("seed", range(number), always=always, often=_tenth(range(always, number)))


def few(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    always: int | Container[int] = 1,
    often: Container[int] | None = None,
    ids: Sequence[str] | Callable[[Any], Any] | None = None,
) -> pytest.MarkDecorator:
    """Return the parametrization of a test by rows of a table.

    So many of the first rows run always, or those at the places that ``always`` names; all others with the rest. Where
    rows repeat each other, ``often`` names the places of those that are not ``long``.
    """
    places = range(always) if isinstance(always, int) else always
    single = "," not in names if isinstance(names, str) else len(names) == 1
    rows = []
    for place, value in enumerate(values):
        row = value if isinstance(value, _ROW) else pytest.param(*((value,) if single else value))
        name = ids[place] if isinstance(ids, Sequence) else row.id
        marks = (*row.marks, *_marks(often is None or place in often or place in places))
        rows += _case(row.values, always=place in places, name=name, marks=marks)
    return _parametrized(names, rows, ids=ids if callable(ids) else None)


def some(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Return the values of a parameter: those of ``always`` run always, all others with the rest."""
    return [case for value in values for case in _case((value,), always=value in always)]


def _parametrized(names: Any, rows: list[Any], **options: Any) -> pytest.MarkDecorator:
    """The parametrization by these rows; without any, a mark by which the run does not collect the function."""
    none = pytest.mark.long if rest() else pytest.mark.exhaustive
    return pytest.mark.parametrize(names, rows, **options) if rows else none


def _tenth(cases: Sequence[_Value]) -> set[_Value]:
    """One of ten cases, drawn so that no axis repeats in step with them."""
    return set(Random(len(cases)).sample(cases, -(-len(cases) // 10)))


def _marks(often: bool) -> tuple[pytest.MarkDecorator, ...]:
    return () if often else (pytest.mark.long,)


def _case(
    values: Iterable[Any], *, always: bool, name: Any = None, marks: Iterable[pytest.MarkDecorator | pytest.Mark] = ()
) -> list[Any]:
    """Return the case of these values, or none where the run leaves it out."""
    marks = tuple(marks) if always else (*marks, pytest.mark.exhaustive)
    return [] if left_out(mark.name for mark in marks) else [pytest.param(*values, id=name, marks=marks)]


def _named(axis: Axis) -> list[tuple[str, Any]]:
    return (
        list(axis.items())
        if isinstance(axis, Mapping)
        else [(getattr(value, "__name__", str(value)), value) for value in axis]
    )


def _diagonal(lengths: list[int]) -> list[tuple[int, ...]]:
    longest = lengths.index(max(lengths))
    steps, step = [], 1
    for axis, length in enumerate(lengths):
        fits = axis != longest and step * length <= lengths[longest]
        steps.append(step if fits else 1)
        step *= length if fits else 1
    return [tuple(i // s % n for s, n in zip(steps, lengths, strict=True)) for i in range(lengths[longest])]
