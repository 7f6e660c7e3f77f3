"""Kernels of each card, and the evidence for it: planning, the docs and ``attngen doctor`` say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import yaml

from attngen.arch import ARCHES
from attngen.cards import KINDS, SUPPORT
from attngen.errors import PlanError
from attngen.operations import OPERATIONS
from attngen.plan import plan
from attngen.resources import root
from attngen.schema import KernelSpec, expand, load_spec_text
from tests.docs.blocks import tables
from tests.sampling import few

CARDS = root() / "docs" / "cards.md"
HELPERS = [resolve_name(row.specs) for row in OPERATIONS if row.specs]


def test_every_arch_has_its_cards() -> None:
    assert list(SUPPORT) == list(ARCHES)


def test_the_docs_say_the_same() -> None:
    lines = CARDS.read_text("utf-8").splitlines()
    for arch, row in SUPPORT.items():
        (line,) = (line for line in lines if line.startswith(f"| {row.cards} | {arch} |"))
        assert row.evidence in line, line


def kernels(kind: str, arch: str) -> tuple[KernelSpec, ...]:
    entry = {"head_dim": 128, **yaml.safe_load(f"{{{KINDS[kind].fields}}}")}
    spec = {"schema": 1, "arch": arch, "variants": {"listed": {"keys": "index"}}, "kernels": [entry]}
    return expand(load_spec_text(yaml.safe_dump(spec), "mine.yaml"))


def planned(kind: str, arch: str) -> Iterator[str]:
    """Backends in which all kernels of a kind can be planned, with those that come with them."""
    for backend in ("cuda", "triton"):
        asked = [replace(kernel, backend=backend) for kernel in kernels(kind, arch)]
        try:
            for kernel in (*asked, *(helper for helpers in HELPERS for helper in helpers(asked))):
                plan(kernel)
        except PlanError:
            continue
        yield backend


@few("arch", ARCHES, always=range(0, 999, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_what_planning_does(kind: str, arch: str) -> None:
    assert KINDS[kind].backends(arch) == tuple(planned(kind, arch))


@few("kind", KINDS, always=range(0, 999, 4))
def test_a_refusal_names_the_arches_that_have_the_kernel(kind: str) -> None:
    has = KINDS[kind].arches
    for arch in (name for name in ARCHES if name not in has):
        refusals = []
        for kernel in kernels(kind, arch):
            try:
                plan(kernel)
            except PlanError as error:
                refusals.append(error.message)
        take = f"; arch {', '.join(has)} {'takes' if len(has) == 1 else 'take'} it"
        assert refusals, arch
        assert all(text.endswith(take) for text in refusals), refusals


def test_the_docs_have_the_table() -> None:
    (rows,) = tables(CARDS, "kernels", *ARCHES)
    written = {"CUDA": "cuda", "Triton": "triton"}
    assert [row[0] for row in rows] == list(KINDS)
    for name, *cells in rows:
        for arch, cell in zip(ARCHES, cells, strict=True):
            backends = tuple(written[part] for part in cell.split(", ") if part != "–")
            assert backends == KINDS[name].backends(arch), f"docs/cards.md: {name} on {arch}"
