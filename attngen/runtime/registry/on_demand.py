"""The maker of kernels that calls lack: none, unless a program turns on ``attngen.jit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from attngen.runtime.registry.select import Request


class Maker(Protocol):
    """Interface of the maker that ``attngen.jit`` installs while it is on."""

    def make(self, request: Request, soon: Request | None = None) -> bool:
        """Make the kernel of a request known to the registry, and return whether there may be one now.

        Meanwhile that of a request that will follow ``soon`` may be made, too.
        """

    def used(self, request: Request) -> None:
        """Record a request that a kernel serves."""


#: False in the runtime that a package carries, which builds nothing.
_IN_ATTNGEN = __name__ == "attngen.runtime.registry.on_demand"

#: None: nobody.
maker: Maker | None = None


def make(request: Request, soon: Request | None = None) -> bool:
    """Make a kernel for a request that none takes; True if one was made. Raises NoKernelError if that failed."""
    return maker is not None and maker.make(request, soon)


def note(request: Request) -> None:
    """Record a request that a kernel serves, if there is a maker."""
    if maker is not None:
        maker.used(request)


def offer() -> list[str]:
    """The line of an error that suggests ``attngen.jit``; none while it is on, and in a package's runtime."""
    if maker is not None or not _IN_ATTNGEN:
        return []
    return ["attngen.jit(), or ATTNGEN_JIT=1, compiles one when it is first called"]


def remedy() -> str:
    """The line of an error above the lines of a spec that add the missing kernel."""
    if _IN_ATTNGEN:
        return "To build one, add to a spec and run 'attngen build':"
    return "This package was made without one. Its maker can add to its spec, and package it again:"
