"""Every error that attngen raises on purpose. A message names the place, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a user's file. Lines and columns count from 1; 0 means unknown."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class AttngenError(Exception):
    """Base of all errors that attngen raises on purpose; the command line prints these without a traceback."""


class SpecError(AttngenError):
    """A spec that cannot be accepted: where it is, which field, what is allowed."""

    def __init__(self, message: str, *, location: Location | None = None, field: str | None = None) -> None:
        self.message = message
        self.location = location
        self.field = field
        place = f"{location}: " if location else ""
        subject = f"{field}: " if field else ""
        super().__init__(f"{place}{subject}{message}")


class PlanError(SpecError):
    """A kernel that cannot be planned: shows the arithmetic of the budget that it exceeds."""


class CompileError(AttngenError):
    """A generated source that its compiler rejects, or whose result breaks a rule of the plan."""


class StoreError(AttngenError):
    """A cache folder that cannot be used: read-only, full, or held by a process that does not let go."""


class PackageError(AttngenError):
    """A package that cannot be made: it is too large, its name is taken, a setting is wrong."""


class LoadError(AttngenError):
    """An artifact that this machine cannot load: wrong architecture, old driver, damaged file."""


class CallError(AttngenError, ValueError):
    """A call whose arguments are wrong or disagree; raised before anything is launched."""


class NoKernelError(CallError):
    """No built kernel accepts the call; the message lists each candidate and the reason it was rejected."""


def suggest(found: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest allowed name, or the empty string."""
    nearest = get_close_matches(found, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
