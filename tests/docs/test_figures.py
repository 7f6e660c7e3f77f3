"""The picture of the speed and the table of docs/performance/forward.md show the same figures."""

from __future__ import annotations

import json
import re

import pytest

from attngen.lab.bench.ladder import RUNGS
from tests.docs.blocks import ROOT, tables

COLUMNS = ("FA3", "FA4", "cuDNN", "attngen")
DATA = ROOT / "docs/figures/speed.json"


def test_picture_and_table_agree() -> None:
    (rows,) = tables(ROOT / "docs/performance/forward.md", "bf16", *COLUMNS, "ratio")
    data = json.loads(DATA.read_text())
    table = {
        row[0].removesuffix(" 1k / 4k / 16k"): {
            name: [None if speed == "–" else int(speed) for speed in cell.split(" / ")]
            for name, cell in zip(COLUMNS, row[1:5], strict=True)
        }
        for row in rows
    }
    assert data["tflops"] == table
    assert data["seqlens"] == [1024, 4096, 16384]


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
    data, picture = json.loads(DATA.read_text()), DATA.with_suffix(".svg").read_text()
    for text in (data["title"], *data["tflops"]):
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
