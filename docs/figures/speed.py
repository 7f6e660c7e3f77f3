"""Draw docs/figures/speed.svg from speed.json beside it: ``python docs/figures/speed.py``. Needs matplotlib.

The figures are those of the first table of docs/performance/forward.md, to which a test holds them. What was not raced
at all lengths is left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from attngen.lab.bench.plot import STYLE

DATA = Path(__file__).with_suffix(".json")
LABELS = {"FA3": "FlashAttention-3", "FA4": "FlashAttention-4", "attngen": "attngen"}

#: One file from the same figures: no date, the same identifiers, text as text.
SAME = {"svg.hashsalt": "speed", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}


def main() -> None:
    """Write the picture: a panel for each head dimension and mask, a line for each contender."""
    data = json.loads(DATA.read_text())
    with rc_context({**STYLE, **SAME}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        panels = figure.subplots(2, 3, sharex=True)
        for axis, (cell, lines) in zip(panels.flat, data["tflops"].items(), strict=True):
            for colour, (name, label) in zip(("C7", "C0", "C1"), LABELS.items(), strict=True):
                width = 2.5 if name == "attngen" else 1.2
                axis.plot(data["seqlens"], lines[name], "o-", color=colour, linewidth=width, label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(data["seqlens"], [f"{n // 1024}k" for n in data["seqlens"]])
            axis.set_ylim(0, 850)
            axis.set_title(cell)
        for axis in panels[:, 0]:
            axis.set_ylabel("TFLOP/s")
        for axis in panels[-1]:
            axis.set_xlabel("sequence length")
        panels[0, 0].legend(loc="lower right")
        figure.suptitle(data["title"])
        figure.savefig(DATA.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
