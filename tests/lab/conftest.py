"""Fixtures of the tests of benchmarks: a spec's kernels, and a registry that holds none of them before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.runtime.registry.lookup import registry
from attngen.schema import load_spec_text
from tests.lab.bench_support import SPEC


@pytest.fixture
def prepared() -> list[Prepared]:
    return prepare_unrendered(load_spec_text(SPEC))


@pytest.fixture
def clean_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()
