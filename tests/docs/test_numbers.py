"""Numbers that the docs quote: counts come from the code, figures from the runs of docs/figures/speed.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from statistics import geometric_mean

import pytest

from attngen.build.kernel_filter import KernelFilter
from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.figures import mean_and_range
from attngen.lab.bench.ladder import RUNGS
from attngen.lab.bench.masks.cases import mask_cases
from attngen.lab.bench.small.shapes import oracle_shapes, small_shapes
from attngen.lang.parser import FUNCTIONS
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, preset_names
from tests.docs.blocks import ROOT, tables
from tests.docs.runs import run

#: Numbers that are written as words.
WORDS = {8: "eight", 19: "nineteen", 20: "twenty"}

MASKS = ROOT / "docs/performance/masks.md"
#: Cells of the table of means: a figure, and in brackets how many functions it is of.
CELL = r"\| \S+ \S+ "
MASK_TABLE = ("function", "d 128: FlexAttention", "attngen", "ratio", "d 64: FlexAttention", "attngen", "ratio")


@cache
def kernels(spec: str) -> int:
    return len(expand(load_spec(specs_dir() / f"{spec}.yaml")))


def small_form(spec: str) -> int:
    """Kernels of ``--dtype bf16 --head-dim 128``."""
    every = expand(load_spec(specs_dir() / f"{spec}.yaml"))
    return len(KernelFilter(dtype=("bf16",), head_dim=("128",)).of(every, spec))


def ratios_of_masks(head_dim: int, direction: str) -> list[float]:
    """Speeds over FlexAttention's of the masks that it could run."""
    ratios = run(f"masks {direction}", "H200").ratios(f" d{head_dim}", "FlexAttention")
    if direction == "backward":
        ratios.pop(f"gate of each head, learned d{head_dim}")  # see the page
    return list(ratios.values())


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
    ("docs/engines.md", r"the (\w+) of its \w+ kernels", small_form("integrations/engines")),
    ("docs/engines.md", r"the \w+ of its (\w+) kernels", kernels("integrations/engines")),
    ("docs/benchmarks.md", r"With `--suite masks`, (\w+) masks and scores", len(mask_cases())),
    ("docs/benchmarks.md", r"simpler forms of itself: (\w+) kernels", len(RUNGS)),
    ("docs/tour.md", r"one kernel in (\w+) steps", len(RUNGS)),
    ("specs/ladder.yaml", r"One kernel in (\w+) steps", len(RUNGS)),
    ("docs/performance/forward.md", r"These are the (\w+)\s+calls of `attngen bench specs/hopper.yaml --suite small`",
     len(small_shapes())),
    ("docs/benchmarks.md", r"`--oracle` makes (\w+) calls", len(oracle_shapes())),
    ("README.md", r"the (\w+) that FlexAttention can run", len(ratios_of_masks(128, "forward"))),
    ("README.md", r"Of (\w+) masks and scores", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance.md", r"(\w+) of \w+ masks and scores of models", len(ratios_of_masks(128, "forward"))),
    ("docs/performance.md", r"\w+ of (\w+) masks and scores of models", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/flex_attention.md", r"\[(\w+) masks of\s+models\]", len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance/masks.md", r"The suite had (\w+) \[masks\]\(../terms.md#attention\) and \[scores\]",
     len(next(tables(MASKS, *MASK_TABLE)))),
    ("docs/performance/masks.md", r"sizes as constants \| [\d.]+ \((\w+)\)",
     len(ratios_of_masks(128, "forward"))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL}\| [\d.]+ \((\w+)\)",
     len(ratios_of_masks(128, "backward"))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL * 2}\| [\d.]+ \((\w+)\)",
     len(ratios_of_masks(64, "forward"))),
    ("docs/performance/masks.md", rf"sizes as constants {CELL * 3}\| [\d.]+ \((\w+)\)",
     len(ratios_of_masks(64, "backward"))),
    ("docs/performance/masks.md", r"(\w+) functions of papers, models and libraries",
     len(next(tables(MASKS, "function", "call", "FlexAttention", "attngen", "ratio")))),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "number"), COUNTS)
def test_counts(page: str, pattern: str, number: int) -> None:
    (quoted,) = re.findall(pattern, " ".join((ROOT / page).read_text().replace("\n#", "\n").split()))
    assert quoted in (str(number), WORDS.get(number)), f"{page} says {quoted}, there are {number}"


def test_counts_of_integrations() -> None:
    header = ("code that calls", "use", "spec", "kernels", "in the small form", "script")
    (rows,) = tables(ROOT / "docs/integrations.md", *header)
    for _, _, spec, count, small, _ in rows:
        name = f"integrations/{spec.strip('`').removesuffix('.yaml')}"
        assert int(count) == kernels(name), spec
        assert small == "–" or int(small) == small_form(name), spec


# --- figures of the first page, and of the page with all results ------------------------------------------------


def near(quoted: str, value: float) -> bool:
    """Whether a figure is that value but for the rounding of itself, and of the speeds that it is made of."""
    return abs(float(quoted) - value) < 0.008


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_speeds_of_the_first_page(direction: str) -> None:
    (rows,) = tables(ROOT / "README.md", "speed over the best peer", "H200", "H100")
    quoted = next(row[1:] for row in rows if row[0] == direction)
    for card, cell in zip(("H200", "H100"), quoted, strict=True):
        values = mean_and_range(run(direction, card).ratios().values())
        for figure, value in zip(re.findall(r"\d\.\d+", cell), values, strict=True):
            assert near(figure, value), (cell, value)


def test_speeds_of_the_page_with_all_results() -> None:
    (rows,) = tables(ROOT / "docs/performance.md", "", "attngen", "beside", "card", "all figures")
    quoted = {row[0].partition(",")[0]: re.findall(r"\d\.\d+", row[1]) for row in rows}
    for direction in ("forward", "backward"):
        values = mean_and_range(run(direction, "H200").ratios().values())
        for figure, value in zip(quoted[direction], values, strict=True):
            assert near(figure, value), (direction, figure, value)


def test_speeds_of_the_page_on_training() -> None:
    text = " ".join((ROOT / "docs/training.md").read_text().split())
    pattern = r"it is ([\d.]+) times as fast as FlashAttention-4 and cuDNN .*?, and ([\d.]+) times"
    ((peers, masks),) = re.findall(pattern, text)
    assert near(peers, geometric_mean(run("backward", "H200").ratios().values()))
    assert abs(float(masks) - geometric_mean(ratios_of_masks(128, "backward"))) < 0.06


@pytest.mark.parametrize(
    ("page", "pattern", "head_dim"),
    [
        ("README.md", r"are ([\d.]+) times as fast as in FlexAttention forward and ([\d.]+) times backward", 128),
        ("docs/performance.md", r"d 128, forward / backward \| ([\d.]+) × / ([\d.]+) ×, at least [\d.]+", 128),
        ("docs/performance.md", r"the same at d 64 \| ([\d.]+) × / ([\d.]+) ×, at least [\d.]+", 64),
        ("docs/performance/masks.md", r"sizes as constants \| ([\d.]+) \(78\) \| ([\d.]+) \(77\)", 128),
        ("docs/performance/masks.md", rf"sizes as constants {CELL * 2}\| ([\d.]+) \(74\) \| ([\d.]+) \(73\)", 64),
    ],
)
def test_means_of_masks(page: str, pattern: str, head_dim: int) -> None:
    (quoted,) = re.findall(pattern, " ".join((ROOT / page).read_text().split()))
    for figure, direction in zip(quoted, ("forward", "backward"), strict=True):
        assert abs(float(figure) - geometric_mean(ratios_of_masks(head_dim, direction))) < 0.06, (page, figure)


@pytest.mark.parametrize(
    ("page", "pattern", "head_dims", "directions"),
    [
        ("docs/performance.md", r"d 128, forward / backward \| .*?, at least ([\d.]+) ×", (128,), DIRECTIONS),
        ("docs/performance.md", r"the same at d 64 \| .*?, at least ([\d.]+) ×", (64,), DIRECTIONS),
        ("docs/performance/masks.md", r"on every function, ([\d.]+) times at least", (128, 64), DIRECTIONS),
        ("docs/performance/masks.md", r"least ratios are ([\d.]+) in the forward", (128, 64), ("forward",)),
        ("docs/performance/masks.md", r"and ([\d.]+) in the backward", (128, 64), ("backward",)),
    ],
)
def test_least_speeds_of_masks(page: str, pattern: str, head_dims: Sequence[int], directions: Sequence[str]) -> None:
    (quoted,) = re.findall(pattern, " ".join((ROOT / page).read_text().split()))
    least = min(ratio for d in head_dims for direction in directions for ratio in ratios_of_masks(d, direction))
    assert quoted == f"{least:.2f}"
