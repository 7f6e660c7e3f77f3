"""The picture of the speed and the table of docs/performance.md show the same figures."""

from __future__ import annotations

import json

from tests.docs.blocks import ROOT, tables

DATA = ROOT / "docs/figures/speed.json"


def test_picture_and_table_agree() -> None:
    (rows,) = tables(ROOT / "docs/performance.md", "bf16", "FA3", "cuDNN", "ours", "ratio")
    data = json.loads(DATA.read_text())
    table = {
        row[0].removesuffix(" 1k / 4k / 16k"): {
            name: [int(speed) for speed in cell.split(" / ")]
            for name, cell in zip(("FA3", "cuDNN", "ours"), row[1:4], strict=True)
        }
        for row in rows
    }
    assert data["tflops"] == table
    assert data["seqlens"] == [1024, 4096, 16384]


def test_ratios_of_the_table_follow_from_its_speeds() -> None:
    (rows,) = tables(ROOT / "docs/performance.md", "bf16", "FA3", "cuDNN", "ours", "ratio")
    for row in rows:
        one, other, ours, ratios = ([float(part) for part in cell.split(" / ")] for cell in row[1:])
        for a, b, c, ratio in zip(one, other, ours, ratios, strict=True):
            assert abs(c / max(a, b) - ratio) < 0.012, row  # speeds and ratios are rounded each for itself


def test_every_panel_is_in_the_picture() -> None:
    """The picture is drawn by ``docs/figures/speed.py``; its title and panels are text."""
    data, picture = json.loads(DATA.read_text()), DATA.with_suffix(".svg").read_text()
    for text in (data["title"], *data["tflops"]):
        assert f">{text}</text>" in picture, f"docs/figures/speed.svg lacks {text!r}: run python docs/figures/speed.py"
