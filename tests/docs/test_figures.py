"""Figures of the docs: tables of the pages of performance and the picture show what docs/figures/speed.json holds."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from attngen.lab.bench.ladder import RUNGS
from tests.docs.blocks import ROOT, tables
from tests.docs.runs import SPEED_FILE, run

COLUMNS = ("FA3", "FA4", "cuDNN", "attngen")
#: Names of the columns in the file of runs.
CONTENDERS = {"FA3": "FlashAttention-3", "FA4": "FlashAttention-4", "cuDNN": "SDPA cuDNN", "attngen": "attngen"}


def figure(text: str) -> float | None:
    return None if text == "–" else float(text)


def milliseconds(time: float | None) -> str:
    return "–" if time is None else f"{time:#.3g}".rstrip(".")


def times_as_fast(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.{2 if ratio < 9.995 else 0}f}"


def cells_of(name: str, columns: Mapping[str, str]) -> dict[str, dict[str, float | None]]:
    """Cells of the file of runs from a row of a table such as ``d 64 full``, by column its speeds at 1k, 4k and 16k."""
    _, head_dim, mask = name.split()[:3]
    speeds = {CONTENDERS[column]: [figure(one) for one in text.split(" / ")] for column, text in columns.items()}
    return {
        f"{mask} d{head_dim} bf16 {length}": {name: row[at] for name, row in speeds.items()}
        for at, length in enumerate(("1k", "4k", "16k"))
    }


@pytest.mark.parametrize(("card", "title"), [("H200", "bf16"), ("H100", "bf16, H100")])
def test_the_tables_of_the_forward_show_the_runs(card: str, title: str) -> None:
    (rows,) = tables(ROOT / "docs/performance/forward.md", title, *COLUMNS, "ratio")
    table = [cells_of(row[0], dict(zip(COLUMNS, row[1:5], strict=True))) for row in rows]
    assert {name: cell for part in table for name, cell in part.items()} == run("forward", card).cells


def test_the_table_of_the_backward_shows_the_runs() -> None:
    (rows, *_) = tables(ROOT / "docs/performance/backward.md", "attngen / FA4 / cuDNN", "1k", "4k", "16k")
    by_card: dict[str, dict[str, dict[str, float | None]]] = {}
    card = ""
    for name, *cells in rows:
        card = name.partition(",")[0] if name.startswith("H") else card
        speeds = zip(*(cell.split(" / ") for cell in cells), strict=True)
        columns = dict(zip(("attngen", "FA4", "cuDNN"), map(" / ".join, speeds), strict=True))
        by_card.setdefault(card, {}).update(cells_of(name.rpartition(", ")[2], columns))
    assert by_card == {card: run("backward", card).cells for card in ("H100", "H200")}


def test_the_table_of_masks_shows_the_runs() -> None:
    header = ("function", "d 128: FlexAttention", "attngen", "ratio", "d 64: FlexAttention", "attngen", "ratio")
    (rows,) = tables(ROOT / "docs/performance/masks.md", *header)
    for at, direction in enumerate(("forward", "backward")):
        table = {
            f"{row[0]} d{head_dim}": [cell.split(" / ")[at] for cell in row[column : column + 3]]
            for head_dim, column in ((128, 1), (64, 4))
            for row in rows
        }
        shown = run(f"masks {direction}", "H200")
        ratios = shown.ratios(peer="FlexAttention")
        assert table == {
            name: [milliseconds(cell["FlexAttention"]), milliseconds(cell["attngen"]), times_as_fast(ratios.get(name))]
            for name, cell in shown.cells.items()
        }


@pytest.mark.parametrize(
    ("page", "card"),
    [
        ("performance/forward.md", "bf16"),
        ("performance/forward.md", "bf16, H100"),
        ("notebook/hopper_forward.md", "bf16, H100"),
    ],
)
def test_ratios_of_the_tables_follow_from_their_speeds(page: str, card: str) -> None:
    (rows,) = tables(ROOT / "docs" / page, card, *COLUMNS, "ratio")
    for row in rows:
        *libraries, ours, ratios = (cell.split(" / ") for cell in row[1:])
        for *theirs, our, ratio in zip(*libraries, ours, ratios, strict=True):
            best = max(float(speed) for speed in theirs if speed != "–")
            assert abs(float(our) / best - float(ratio)) < 0.012, row  # speeds and ratios are rounded each for itself


def test_every_panel_is_in_the_picture() -> None:
    """The picture is drawn by ``docs/figures/speed.py``; its title and panels are text."""
    picture = SPEED_FILE.with_suffix(".svg").read_text()
    panels = {" ".join(cell.split()[:2]) for cell in run("forward", "H200").cells}
    for mask, head_dim in map(str.split, panels):
        text = f"d {head_dim.removeprefix('d')} {mask}"
        assert f">{text}</text>" in picture, f"docs/figures/speed.svg lacks {text!r}: run python docs/figures/speed.py"


def test_speeds_of_the_cookbook_are_those_of_the_table_of_masks() -> None:
    header = ("function", "d 128: FlexAttention", "attngen", "ratio", "d 64: FlexAttention", "attngen", "ratio")
    (rows,) = tables(ROOT / "docs/performance/masks.md", *header)
    ratios = {row[0]: tuple(row[3].split(" / ")) for row in rows}
    text = " ".join((ROOT / "docs/cookbook.md").read_text().split())
    quoted = re.findall(r"(\S+) times FlexAttention forward, (\S+) backward \(`([^`]+)`\)", text)
    assert len(quoted) >= 24
    for forward, backward, name in quoted:
        assert ratios[name] == (forward, backward), name


def test_the_ladder_of_the_docs_has_all_rungs_and_ratios_of_its_speeds() -> None:
    (described,) = tables(ROOT / "docs/benchmarks.md", "rung", "what changes in the entry")
    header = ("rung", "full 4k / 16k", "over mma.sync", "causal 4k / 16k", "over mma.sync")
    (measured,) = tables(ROOT / "docs/performance/forward.md", *header)
    assert [row[0] for row in described] == [row[0] for row in measured] == list(RUNGS)
    for speeds, ratios in ((1, 2), (3, 4)):
        first = measured[0][speeds].split(" / ")
        for row in measured:
            for speed, base, ratio in zip(row[speeds].split(" / "), first, row[ratios].split(" / "), strict=True):
                assert (ratio == "–") == ("–" in (speed, base)), row
                assert ratio == "–" or abs(float(speed) / float(base) - float(ratio)) < 0.012, row
