"""Every command test has a cache of its own, and none finds the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attngen.runtime.registry.lookup import registry


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    yield tmp_path / "cache"
    registry.clear()
