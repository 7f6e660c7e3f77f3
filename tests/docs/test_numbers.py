"""Numbers that the docs quote: counts come from the code, figures from the tables of the pages of performance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from statistics import geometric_mean

import pytest

from attngen.lab.bench.ladder import RUNGS
from attngen.lab.bench.masks.cases import mask_cases
from attngen.lab.bench.small.shapes import oracle_shapes, small_shapes
from attngen.lang.parser import FUNCTIONS
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, preset_names
from tests.docs.blocks import ROOT, tables

#: Numbers that are written as words.
WORDS = {8: "eight", 19: "nineteen", 20: "twenty"}

FORWARD, BACKWARD, MASKS = (ROOT / f"docs/performance/{name}.md" for name in ("forward", "backward", "masks"))
#: Cells of the table of means: a figure, and in brackets how many functions it is of.
CELL = r"\| \S+ \S+ "
MASK_TABLE = ("function", "d 128: FlexAttention", "attngen", "ratio", "d 64: FlexAttention", "attngen", "ratio")


@cache
def kernels(spec: str) -> int:
    return len(expand(load_spec(specs_dir() / f"{spec}.yaml")))


def ratios_of_masks(column: int, direction: int) -> list[float]:
    """Ratios of the table of masks that FlexAttention could run, in their column; 0: forward, 1: backward."""
    (rows,) = tables(MASKS, *MASK_TABLE)
    cells = {row[0]: row[column].split(" / ")[direction] for row in rows}
    if direction:
        cells.pop("gate of each head, learned")  # see the page
    return [float(cell) for cell in cells.values() if cell != "–"]


def forward_ratios(card: str) -> list[float]:
    """Ratios to the fastest library in a card's table of the forward."""
    (rows,) = tables(FORWARD, card, "FA3", "FA4", "cuDNN", "attngen", "ratio")
    return [float(ratio) for row in rows for ratio in row[5].split(" / ")]


def backward_ratios(card: str) -> Iterator[float]:
    """The same of the backward, from the speeds of its table, which has the rows of a card below one another."""
    rows, of = next(tables(BACKWARD, "attngen / FA4 / cuDNN", "1k", "4k", "16k")), ""
    for name, *cells in rows:
        of = name.partition(",")[0] if name.startswith("H") else of
        for cell in cells if of == card else ():
            our, *theirs = cell.split(" / ")
            yield float(our) / max(float(speed) for speed in theirs if speed != "–")


# --- counts ---------------------------------------------------------------------------------------------------

#: Pages with a pattern of one group, and the number that this must hold.
COUNTS = [
    ("README.md", r"or one of (\w+) presets", len(preset_names())),
    ("docs/python.md", r"The (\w+) \[presets\]", len(preset_names())),
    ("README.md", r"comparisons, (\w+) functions", len(FUNCTIONS)),
    ("README.md", r"the (\w+) shipped kernels for Hopper", kernels("hopper")),
    ("docs/tour.md", r"forward, in CUDA \((\w+) kernels\)", kernels("hopper")),
    ("docs/performance.md", r"`attngen build specs/hopper.yaml`, (\w+) kernels", kernels("hopper")),
    ("docs/performance/serving.md", r"wheel of `specs/hopper.yaml`, (\w+) kernels", kernels("hopper")),
    ("docs/performance/serving.md", r"`specs/hopper_all.yaml`, (\w+) kernels", kernels("hopper_all")),
    ("docs/performance/serving.md", r"`specs/hopper_triton.yaml`, when it had 54 of its (\w+) kernels",
     kernels("hopper_triton")),
    ("specs/hopper.yaml", r"(\w+) kernels; hopper_triton.yaml", kernels("hopper")),
    ("specs/hopper_all.yaml", r"both layouts; (\w+) kernels", kernels("hopper_all")),
    ("docs/benchmarks.md", r"With `--suite masks`, (\w+) masks and scores", len(mask_cases())),
    ("docs/benchmarks.md", r"simpler forms of itself: (\w+) kernels", len(RUNGS)),
    ("docs/tour.md", r"one kernel in (\w+) steps", len(RUNGS)),
    ("specs/ladder.yaml", r"One kernel in (\w+) steps", len(RUNGS)),
    ("docs/performance/forward.md", r"These are the (\w+)\s+calls of `attngen bench specs/hopper.yaml --suite small`",
     len(small_shapes())),
    ("docs/benchmarks.md", r"`--oracle` makes (\w+) calls", len(oracle_shapes())),
    # of the run that the table of masks is from, when the suite was smaller
    ("README.md", r"the (\w+) that FlexAttention can run", len(ratios_of_masks(3, 0))),
    ("README.md", r"Of (\w+) masks and scores", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance.md", r"(\w+) of the then \w+ masks and scores", len(ratios_of_masks(3, 0))),
    ("docs/performance.md", r"\w+ of the then (\w+) masks and scores", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/flex_attention.md", r"\[(\w+) masks of\s+models\]", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance/masks.md", r"The suite had (\w+) \[masks\]\(../terms.md#attention\) and \[scores\]",
     len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance/masks.md", r"sizes as constants \| [\d.]+ \((\w+)\)", len(ratios_of_masks(3, 0))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL}\| [\d.]+ \((\w+)\)", len(ratios_of_masks(3, 1))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL * 2}\| [\d.]+ \((\w+)\)", len(ratios_of_masks(6, 0))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL * 3}\| [\d.]+ \((\w+)\)", len(ratios_of_masks(6, 1))),
    ("docs/performance/masks.md", r"(\w+) functions of papers, models and libraries",
     len(next(tables(MASKS, "function", "call", "FlexAttention", "attngen", "ratio")))),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "number"), COUNTS)
def test_counts(page: str, pattern: str, number: int) -> None:
    (quoted,) = re.findall(pattern, " ".join((ROOT / page).read_text().replace("\n#", "\n").split()))
    assert quoted in (str(number), WORDS.get(number)), f"{page} says {quoted}, there are {number}"


# --- figures of the first page, and of the page with all results ------------------------------------------------

CELLS = {
    **{f"forward, {card}": forward_ratios(name) for card, name in (("H200", "bf16"), ("H100", "bf16, H100"))},
    **{f"backward, {card}": list(backward_ratios(card)) for card in ("H200", "H100")},
}


def near(quoted: str, value: float) -> bool:
    """Whether a figure is that value but for the rounding of the speeds that it is made of."""
    return abs(float(quoted) - value) < 0.007


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_speeds_of_the_first_page(direction: str) -> None:
    (rows,) = tables(ROOT / "README.md", "speed over the best peer", "H200", "H100")
    quoted = next(row[1:] for row in rows if row[0] == direction)
    for card, cell in zip(("H200", "H100"), quoted, strict=True):
        ratios = CELLS[f"{direction}, {card}"]
        mean, least, most = re.findall(r"\d\.\d+", cell)
        assert near(mean, geometric_mean(ratios)), (cell, geometric_mean(ratios))
        assert near(least, min(ratios)), (cell, min(ratios))
        assert near(most, max(ratios)), (cell, max(ratios))


def test_speeds_of_the_page_with_all_results() -> None:
    (rows,) = tables(ROOT / "docs/performance.md", "", "attngen", "beside", "card", "all figures")
    quoted = {row[0].partition(",")[0]: re.findall(r"\d\.\d+", row[1]) for row in rows}
    for direction in ("forward", "backward"):
        ratios = CELLS[f"{direction}, H200"]
        for figure, value in zip(quoted[direction], (geometric_mean(ratios), min(ratios), max(ratios)), strict=True):
            assert near(figure, value), (direction, figure, value)


def test_speeds_of_the_page_on_training() -> None:
    text = " ".join((ROOT / "docs/training.md").read_text().split())
    pattern = r"it is ([\d.]+) times as fast as FlashAttention-4 and cuDNN .*?, and ([\d.]+) times"
    ((peers, masks),) = re.findall(pattern, text)
    assert near(peers, geometric_mean(CELLS["backward, H200"]))
    assert abs(float(masks) - geometric_mean(ratios_of_masks(3, 1))) < 0.06


@pytest.mark.parametrize(
    ("page", "pattern", "column"),
    [
        ("README.md", r"are ([\d.]+) times as fast as in FlexAttention forward and ([\d.]+) times backward", 3),
        ("docs/performance.md", r"d 128, forward / backward \| ([\d.]+) × / ([\d.]+) ×, at least 1.36", 3),
        ("docs/performance.md", r"the same at d 64 \| ([\d.]+) × / ([\d.]+) ×, at least 1.36", 6),
        ("docs/performance/masks.md", r"sizes as constants \| ([\d.]+) \(69\) \| ([\d.]+) \(68\)", 3),
        ("docs/performance/masks.md", rf"sizes as constants {CELL * 2}\| ([\d.]+) \(65\) \| ([\d.]+) \(64\)", 6),
    ],
)
def test_means_of_masks(page: str, pattern: str, column: int) -> None:
    (quoted,) = re.findall(pattern, " ".join((ROOT / page).read_text().split()))
    for figure, direction in zip(quoted, (0, 1), strict=True):
        assert abs(float(figure) - geometric_mean(ratios_of_masks(column, direction))) < 0.06, (page, figure)
