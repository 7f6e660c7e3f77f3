"""Pictures of masks: text anywhere, images where matplotlib is installed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attngen.errors import LoadError
from attngen.tools.explain.seen import at_place

#: Most characters across and down.
WIDTH, HEIGHT = 64, 32

#: The character of a cell of which no pair is seen, some are, all are.
GLYPHS = "·▒█"


class Drawn:
    """An image that notebooks show and ``save`` writes."""

    def draw(self, figure: Any, axes: Any) -> None:
        """Draw it into a figure of matplotlib."""
        raise NotImplementedError

    def save(self, file: str | Path | io.BytesIO) -> None:
        """Write an image, PNG unless the name says otherwise. Raises LoadError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise LoadError("an image needs matplotlib, which is not installed; str() of the picture is text") from None
        figure: Any = Figure(figsize=(5, 5), layout="constrained")
        self.draw(figure, figure.add_subplot())
        figure.savefig(file, **({"format": "png"} if isinstance(file, io.BytesIO) else {}))

    def _repr_png_(self) -> bytes | None:
        """Return the image that notebooks show; None where matplotlib is not installed, and they show the text."""
        try:
            stream = io.BytesIO()
            self.save(stream)
        except LoadError:
            return None
        return stream.getvalue()


@dataclass(frozen=True)
class Picture(Drawn):
    """Visible pairs of heads of sequences: ``mask`` is (sequences, heads, queries, keys), bools on the CPU."""

    title: str
    mask: Tensor

    def __str__(self) -> str:
        queries, keys = self.mask.shape[2:]
        rows, columns = -(-queries // HEIGHT) or 1, -(-keys // WIDTH) or 1
        cells = [[_glyph(cell) for cell in band.split(columns, dim=3)] for band in self.mask.split(rows, dim=2)]
        lines = [f"{self.title}: {queries} queries down, {keys} keys across"]
        if (rows, columns) != (1, 1):
            lines[0] += f"; a character is {rows} x {columns}"
        lines.append(f"{GLYPHS[2]} all seen  {GLYPHS[1]} some  {GLYPHS[0]} none")
        if queries and keys:
            lines += ["".join(row) for row in cells]
        return "\n".join(lines)

    __repr__ = __str__

    def draw(self, figure: Any, axes: Any) -> None:
        """Draw the share of heads and sequences that see each pair into a figure of matplotlib."""
        share = self.mask.float().mean((0, 1))
        axes.imshow(share.numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set(title=self.title, xlabel="kv", ylabel="q")


def picture(name: str, mask: Tensor, b: int | None, h: int | None) -> Picture:
    """The picture of a mask (batch, heads, queries, keys): of sequence ``b`` and head ``h``, or of all of them.

    Raises CallError.
    """
    values, place = at_place(mask, b, h)
    return Picture(f"{name} ({place})" if mask.shape[0] * mask.shape[1] > 1 else name, values.cpu())


def _glyph(cell: Tensor) -> str:
    return GLYPHS[int(cell.any()) + int(cell.all())]
