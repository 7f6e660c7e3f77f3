"""Every error that attngen raises on purpose. A message names the place, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

#: The remedy for a kernel whose files do not match, built here or installed with a package.
REMEDY = "build it again, or reinstall its package"


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a user's file. Lines and columns count from 1; 0 means unknown."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class AttngenError(Exception):
    """Base of all errors that attngen raises on purpose; the command line prints these without a traceback.

    ``each``: the errors that this one stands for, where it is several.
    """

    each: tuple[AttngenError, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the error as ``--json`` prints it; what is not known is None."""
        return {"message": str(self), "file": None, "line": None, "field": None}


class SpecError(AttngenError):
    """A spec that cannot be accepted: where it is, which field, what is allowed."""

    def __init__(self, message: str, *, location: Location | None = None, field: str | None = None) -> None:
        self.message = message
        self.location = location
        self.field = field
        place = f"{location}: " if location else ""
        subject = f"{field}: " if field else ""
        super().__init__(f"{place}{subject}{message}")

    def to_dict(self) -> dict[str, Any]:
        """Return the error as ``--json`` prints it, its place apart from its message."""
        place = self.location
        file, line = (place.file, place.line or None) if place else (None, None)
        return {"message": self.message, "file": file, "line": line, "field": self.field}


class PlanError(SpecError):
    """A kernel that cannot be planned: shows the arithmetic of the budget that it exceeds."""


class CompileError(AttngenError):
    """A generated source that its compiler rejects, or whose result breaks a rule of the plan."""


class ChoiceError(CompileError):
    """A kernel that does not compile as it was planned, where another choice of the plan may: a tile, a backend.

    ``slow`` is set if the machine code is right but slow: whether ptxas serialized its MMAs, and how many bytes a
    thread spills.
    """

    def __init__(self, message: str, *, slow: tuple[bool, int] | None = None) -> None:
        super().__init__(message)
        self.slow = slow


class CrashError(ChoiceError):
    """A kernel whose compiler process died of a signal: another choice may compile, if the compiler works at all."""


class SourceError(CompileError):
    """A source that its compiler cannot read, whatever the tile: a fault of a kernel's templates."""


class ToolchainError(CompileError):
    """A compiler that is missing or does not work. It says nothing about a kernel, so nothing is built in its place."""


class InternalError(AttngenError):
    """A fault of attngen itself, met on one kernel; the message asks to report it."""


class StoreError(AttngenError):
    """A cache folder that cannot be used: read-only, full, or locked by a process that does not release it."""


class DiskFullError(StoreError):
    """A disk or a quota that is full: nothing more can be written, whatever is built."""


class PackageError(AttngenError):
    """A package that cannot be made: it is too large, its name is taken, a setting is wrong."""


class SettingError(PackageError):
    """A setting of a package that is wrong: a version, a size, a platform."""


class LoadError(AttngenError):
    """An artifact that this machine cannot load: wrong architecture, old driver, damaged file."""


class CallError(AttngenError, ValueError):
    """A call whose arguments are wrong or contradict each other; raised before anything is launched."""


class NoKernelError(CallError):
    """No built kernel takes the call; the message lists each candidate and the reason against it."""


def needs_torch(what: str, error: ModuleNotFoundError) -> str:
    """The sentence about what an absent torch prevents. Raises ``error`` again if it is about another module."""
    if error.name != "torch":
        raise error
    return f"{what} needs torch, which is not installed; install its build for your GPU, or the one for CPUs"


def together(errors: Iterable[AttngenError]) -> AttngenError:
    """One error that stands for several; the request is wrong only if each of them says so."""
    each = list({str(one): one for error in errors for one in error.each or (error,)}.values())
    if len(each) == 1:
        return each[0]
    kind = next(kind for kind in (PlanError, SpecError, InternalError) if all(isinstance(e, kind) for e in each)
                or kind is InternalError)  # fmt: skip
    error: AttngenError = kind("\n".join(map(str, each)))
    if isinstance(error, SpecError) and isinstance(each[0], SpecError):
        error.location, error.field = each[0].location, each[0].field
    error.each = tuple(each)
    return error


class Gathered:
    """Errors of parts that can be checked one after the other, so that one run reports all of them.

    ``with gathered:`` keeps a SpecError that is raised inside, and goes on after it.
    """

    def __init__(self) -> None:
        self.errors: list[AttngenError] = []

    def __enter__(self) -> None:
        """Do nothing: every part that is checked adds to the same errors."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, SpecError):
            self.errors.extend(error.each or (error,))
            return True
        return False

    def throw(self) -> None:
        """Raise what was kept, if anything was."""
        if self.errors:
            raise together(self.errors)


def internal_error(subject: str, error: Exception) -> InternalError:
    """Return the error that names what failed, and where in attngen, for an exception that nobody expected."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
    return InternalError(
        f"{subject}: attngen failed on it with {type(error).__name__}: {error}{place}; this is a fault of attngen, "
        "please report it with the spec"
    )


def suggest(name: str, allowed: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` for the nearest allowed name, or the empty string."""
    nearest = get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
