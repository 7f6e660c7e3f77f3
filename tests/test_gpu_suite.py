"""The modules of tests/gpu can be imported where there is no GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.sampling import few

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("*.py"))


@few("name", MODULES, always=4)
def test_it_can_be_imported(name: str) -> None:
    assert import_module(f"tests.gpu.{name}").__doc__
