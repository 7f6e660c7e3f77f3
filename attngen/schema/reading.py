"""Specs from files and texts, whole: one that has errors is refused with all of them."""

from __future__ import annotations

from pathlib import Path

from attngen.errors import AttngenError, SpecError, together
from attngen.schema.expand import expand_each
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.loading import Draft, Spec, read_spec, read_spec_text


def load_spec(path: str | Path) -> Spec:
    """Read, check and return a spec; SpecError for anything wrong with it, unreadable files included."""
    return _whole(read_spec(path))


def load_spec_text(text: str, file: str = "spec.yaml") -> Spec:
    """Return the spec in ``text``; includes are looked for beside ``file``, which need not exist."""
    return _whole(read_spec_text(text, file))


def _whole(draft: Draft) -> Spec:
    """Return a spec without errors, or raise SpecError with all of them, in the order of the file.

    Entries of ``kernels`` are expanded only to find theirs: those that remain once the others are known.
    """
    if not draft.errors:
        return draft.spec
    raise together(errors_of(draft)[0])


def errors_of(draft: Draft) -> tuple[list[AttngenError], tuple[KernelSpec, ...]]:
    """The errors of a spec, in the order of the file, and the kernels of those entries that have none."""
    kernels, errors = expand_each(draft.spec)
    errors = [error for error in errors if not (draft.unsure and _names_a_variant(error))]
    return sorted((*draft.errors, *errors), key=place_of), kernels


def _names_a_variant(error: AttngenError) -> bool:
    return isinstance(error, SpecError) and error.field == "variant"


def place_of(error: AttngenError) -> tuple[str, int]:
    """File and line of an error, for sorting."""
    place = error.location if isinstance(error, SpecError) else None
    return (place.file, place.line) if place else ("", 0)
