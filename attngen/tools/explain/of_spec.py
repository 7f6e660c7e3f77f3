"""See ``attngen.inspect.of_spec``: this is its public name."""

from attngen.inspect.of_spec import (
    explain_spec,
)

__all__ = [
    "explain_spec",
]
