"""The earlier path of ``attngen.inspect.of_spec``, kept for programs that import it."""

from attngen.inspect.of_spec import (
    explain_spec,
)

__all__ = [
    "explain_spec",
]
