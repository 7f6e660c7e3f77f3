"""The modules of tests/gpu can be imported where there is no GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    assert import_module(f"tests.gpu.{name}").__doc__
