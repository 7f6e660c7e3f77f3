"""Heat maps of numbers: text anywhere, images where matplotlib is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attngen.glyphs import printable
from attngen.inspect.picture import HEIGHT, WIDTH, Drawn

#: From nothing to the largest number.
SHADES = " ·░▒▓█"


@dataclass(frozen=True)
class HeatMap(Drawn):
    """Numbers as shades: ``values`` is (rows, columns), floats on the CPU; what is not finite is left out.

    ``across`` and ``down`` say what the axes are, ``labels`` what each row is called. ``limit`` is the number of the
    full shade; the largest one if it is None.
    """

    title: str
    values: Tensor
    down: str
    across: str
    labels: tuple[str, ...]
    limit: float | None = None

    @property
    def span(self) -> tuple[float, float]:
        """The numbers of the lightest and of the full shade: from 0, or from the least number below it."""
        finite = self.values[self.values.isfinite()]
        if not finite.numel():
            return 0.0, self.limit or 1.0
        low = min(float(finite.min()), 0.0)
        high = float(finite.max()) if self.limit is None else self.limit
        return low, high if high > low else low + 1.0

    def __str__(self) -> str:
        rows, columns = self.values.shape
        across, down = -(-columns // WIDTH) or 1, -(-rows // HEIGHT) or 1
        low, high = self.span
        head = f"{self.title}: {self.down} down, {self.across} across"
        if (down, across) != (1, 1):
            head += f"; a character is the largest of {down} x {across}"
        lines = [head, f"'{SHADES}' from {low:.3g} to {high:.3g}"]
        width = max((len(label) for label in self.labels), default=0)
        bands = self.values.split(down, dim=0) if rows and columns else ()
        for number, band in enumerate(bands):
            cells = "".join(_shade(cell, low, high) for cell in band.split(across, dim=1))
            lines.append(f"{self.labels[number * down]:>{width}} |{cells}|")
        return printable("\n".join(lines))

    __repr__ = __str__

    def draw(self, figure: Any, axes: Any) -> None:
        """Draw the numbers into a figure of matplotlib."""
        low, high = self.span
        image = axes.imshow(self.values.numpy(), cmap="magma", vmin=low, vmax=high, aspect="auto")
        figure.colorbar(image, ax=axes)
        axes.set(title=self.title, xlabel=self.across, ylabel=self.down)
        if len(self.labels) <= HEIGHT:
            axes.set_yticks(range(len(self.labels)), self.labels)


def _shade(cell: Tensor, low: float, high: float) -> str:
    finite = cell[cell.isfinite()]
    if not finite.numel():
        return SHADES[0]
    share = (float(finite.max()) - low) / (high - low)
    return SHADES[max(0, min(int(share * len(SHADES)), len(SHADES) - 1))]
