"""See ``attngen.lab.bench.plot``: this is its public name."""

from attngen.lab.bench.plot import (
    STYLE,
    plot,
)

__all__ = [
    "plot",
    "STYLE",
]
