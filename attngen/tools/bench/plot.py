"""The earlier path of ``attngen.lab.bench.plot``, kept for programs that import it."""

from attngen.lab.bench.plot import (
    STYLE,
    plot,
)

__all__ = [
    "plot",
    "STYLE",
]
