"""Wheels that are made once for all tests that look at them. Their kernels are for the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.support import FAKE_COMPILER, OTHER, install, make, write_spec
from tests.store import fakes


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fake_compiler(_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing for real, and share what was compiled with the other tests."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(_cache))
    fakes.compile_by(monkeypatch, FAKE_COMPILER)


@pytest.fixture(scope="session")
def wheels(_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of ``attngen_small`` and ``attngen_other``, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(_cache))
        fakes.compile_by(patch, FAKE_COMPILER)
        specs = [write_spec(folder / "specs"), write_spec(folder / "specs", OTHER, "other.yaml")]
        made = [make(spec, folder / "dist") for spec in specs]
    return {m.package: m.files[0] for m in made}


@pytest.fixture
def wheel(wheels: dict[str, Path]) -> Path:
    """The wheel of ``attngen_small``."""
    return wheels["attngen_small"]


@pytest.fixture
def site(tmp_path: Path, wheel: Path) -> Path:
    """A folder into which ``attngen_small`` is installed."""
    return install(tmp_path / "site", wheel)
