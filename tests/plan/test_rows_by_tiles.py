"""Rows that lie where a tensor says, in runs of tiles: the plans and the code of rows one after the other."""

from __future__ import annotations

import pytest

from attngen.build.pipeline import Prepared, plans, prepare_each
from attngen.plan.model import Plan
from attngen.schema import load_spec_text

_SPEC = """
schema: 1
variants:
  own: {{mask: "{mask}", score: "{score}", scalars: {{w: {{type: int32, min: 1}}}}, tensors: {{
    slope: {{dtype: fp32, shape: [h]}},
    at: {{dtype: int32, shape: [seqlen_q], monotone: {{axis: 0{runs}}}, range: {{min: 0, max: 1000000}}}}}}{more}}}
kernels:
  - {{variant: own, arch: sm90a, head_dim: {head_dim}, dtype: bf16, passes: [forward, backward], backend: {backend}}}
"""

_CAUSAL, _WINDOW = "{0} >= kv", "{0} >= kv and {0} - kv < w"
_ALIBI = "s + slope[h] * (kv - {0})"


def _text(
    mask: str, head_dim: str, row: str = "at[q]", *, score: str = "s", runs: str = ", runs: 128", more: str = "",
    backend: str = "cuda",
) -> str:  # fmt: skip
    mask, score = mask.format(row), score.format(row)
    return _SPEC.format(mask=mask, score=score, head_dim=head_dim, runs=runs, more=more, backend=backend)


def _plans(text: str) -> list[Plan]:
    return [plan for _, plan in plans(load_spec_text(text))]


@pytest.mark.parametrize("head_dim", ["64", "128", "{qk: 192, v: 128}", "256"])
@pytest.mark.parametrize(("mask", "score"), [(_CAUSAL, "s"), (_CAUSAL, _ALIBI)])
def test_plans_are_those_of_rows_by_their_number(mask: str, score: str, head_dim: str) -> None:
    by_tiles = _plans(_text(mask, head_dim, score=score))
    plain = _plans(_text(mask, head_dim, "q", score=score, runs=""))
    assert [plan.name for plan in by_tiles] == [plan.name for plan in plain]


def test_single_rows_that_a_tensor_places_are_heavier() -> None:
    by_tiles, by_rows = (_plans(_text(_CAUSAL, "64", score=_ALIBI, runs=runs)) for runs in (", runs: 128", ""))
    assert by_tiles[1].name != by_rows[1].name
    assert by_rows[1].name == _plans(_text(_CAUSAL, "64", score=_ALIBI, runs=", runs: 64"))[1].name


@pytest.mark.parametrize(("head_dim", "plain_rows"), [("64", 192), ("128", 128)])
def test_tiles_of_a_window_end_where_runs_do(head_dim: str, plain_rows: int) -> None:
    by_tiles, plain = _plans(_text(_WINDOW, head_dim))[0], _plans(_text(_WINDOW, head_dim, "q", runs=""))[0]
    assert 128 % by_tiles.tile_m == 0
    assert plain.tile_m == plain_rows


def _sources(text: str) -> list[Prepared]:
    kernels, failures = prepare_each(load_spec_text(text))
    assert not failures
    return list(kernels)


@pytest.mark.parametrize("score", ["s", _ALIBI])
def test_one_load_finds_the_positions_of_a_tile(score: str) -> None:
    for kernel in _sources(_text(_WINDOW, "128", score=score)):
        text = kernel.source.text
        assert "const int row_shift = u_at[some_row] - some_row;" in text
        assert "q_row + row_shift" in text
        assert "u_at[static_cast<long long>(q_row)]" not in text


def test_random_numbers_follow_positions() -> None:
    dropped = ", dropout: true"
    for kernel in _sources(_text(_CAUSAL, "128", more=dropped)):
        assert "const int first_position = u_at[" in kernel.source.text
    _, failures = prepare_each(load_spec_text(_text(_CAUSAL, "128", more=dropped, backend="triton")))
    assert all("draw random numbers by row" in str(failure) for failure in failures)
    assert len(failures) == 2
