"""Draw docs/figures/speed.svg from speed.json beside it: ``python docs/figures/speed.py``. Needs matplotlib.

The figures are those of the forward on an H200, without contenders that were not measured at all lengths.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from attngen.lab.bench.figures import read_runs
from attngen.lab.bench.plot import STYLE

DATA = Path(__file__).with_suffix(".json")
TITLE = "forward attention, bf16, 16,384 tokens, NVIDIA H200 at its power limit"
CONTENDERS = ("FlashAttention-3", "FlashAttention-4", "attngen")
SEQLENS = (1024, 4096, 16384)

#: Panels, by row: head dimensions of the full mask, then of the causal one.
PANELS = [(mask, head_dim) for mask in ("full", "causal") for head_dim in (64, 128, 256)]

#: One file from the same figures: no date, the same identifiers, text as text.
SAME = {"svg.hashsalt": "speed", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}


def main() -> None:
    """Write the picture: a panel for each head dimension and mask, a line for each contender."""
    (run,) = (run for run in read_runs(DATA) if (run.figures, run.card) == ("forward", "NVIDIA H200"))
    with rc_context({**STYLE, **SAME}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axis, (mask, head_dim) in zip(panels.flat, PANELS, strict=True):
            cells = [run.cells[f"{mask} d{head_dim} bf16 {seqlen // 1024}k"] for seqlen in SEQLENS]
            for colour, name in zip(("C7", "C0", "C1"), CONTENDERS, strict=True):
                width = 2.5 if name == "attngen" else 1.2
                axis.plot(SEQLENS, [cell[name] for cell in cells], "o-", color=colour, linewidth=width, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks(SEQLENS, [f"{seqlen // 1024}k" for seqlen in SEQLENS])
            axis.set_ylim(0, 850)
            axis.set_title(f"d {head_dim} {mask}")
        for axis in panels[:, 0]:
            axis.set_ylabel("TFLOP/s")
        for axis in panels[-1]:
            axis.set_xlabel("sequence length")
        panels[0, 0].legend(loc="lower right")
        figure.suptitle(TITLE)
        figure.savefig(DATA.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
