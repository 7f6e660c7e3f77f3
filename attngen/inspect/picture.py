"""Pictures of masks: text anywhere, images where matplotlib is installed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from attngen.errors import LoadError
from attngen.glyphs import printable
from attngen.inspect.seen import at_place

#: Most characters across and down.
WIDTH, HEIGHT = 64, 32

#: The character of a cell of which no pair is seen, some are, all are.
GLYPHS = "·▒█"

#: Pixels of a square of an SVG, and the colors of squares of which some pairs are seen, all are.
_SQUARE, _FILLS = 7, ("#9cc3e6", "#1f5f99")


class Drawn:
    """An image that notebooks show and ``save`` writes."""

    def draw(self, figure: Any, axes: Any) -> None:
        """Draw it into a figure of matplotlib."""
        raise NotImplementedError

    def save(self, file: str | Path | io.BytesIO) -> None:
        """Write an image, PNG unless the name says otherwise. Raises LoadError without matplotlib."""
        if isinstance(file, str | Path) and (text := self.svg()) is not None and Path(file).suffix == ".svg":
            Path(file).write_text(text, "utf-8")
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise LoadError("an image needs matplotlib, which is not installed; str() of the picture is text") from None
        figure: Any = Figure(figsize=(5, 5), layout="constrained")
        self.draw(figure, figure.add_subplot())
        figure.savefig(file, **({"format": "png"} if isinstance(file, io.BytesIO) else {}))

    def svg(self) -> str | None:
        """The image as SVG, if it can be drawn without matplotlib."""
        return None

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
        lines = [self._sizes()]
        if (rows, columns) != (1, 1):
            lines[0] += f"; a character is {rows} x {columns}"
        lines.append(f"{GLYPHS[2]} all seen  {GLYPHS[1]} some  {GLYPHS[0]} none")
        if queries and keys:
            lines += ["".join(row) for row in cells]
        return printable("\n".join(lines))

    __repr__ = __str__

    def _sizes(self) -> str:
        queries, keys = self.mask.shape[2:]
        return f"{self.title}: {queries} queries down, {keys} keys across"

    def svg(self) -> str:
        """The image as SVG: a square for each tile, dark where all pairs are seen, light where some are."""
        queries, keys = self.mask.shape[2:]
        side = -(-max(queries, keys) // HEIGHT) or 1
        rows, columns = -(-queries // side), -(-keys // side)
        width, height = _SQUARE * columns, _SQUARE * rows
        paths = ["", "", ""]
        for y, band in enumerate(self.mask.split(side, dim=2) if queries and keys else ()):
            x = 0
            for kind, run in groupby(GLYPHS.index(_glyph(cell)) for cell in band.split(side, dim=3)):
                count = len(list(run))
                paths[kind] += f"M{_SQUARE * x} {_SQUARE * y}h{_SQUARE * count}v{_SQUARE}h-{_SQUARE * count}z"
                x += count
        title = f"{self._sizes()}; a square is {side} x {side}; dark: all seen, light: some"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {height + 2}" width="{width + 2}" '
            f'height="{height + 2}" role="img">\n<title>{escape(title)}</title>\n'
            f'<path fill="#fff" stroke="#888" d="M0 0h{width}v{height}h-{width}z"/>\n'
            + "".join(
                f'<path fill="{fill}" d="{path}"/>\n' for fill, path in zip(_FILLS, paths[1:], strict=True) if path
            )
            + "</svg>\n"
        )

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
