"""One interpreter process for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interpreter.process import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()
