"""GPU tests: all of them are skipped, with the reason, where there is no GPU that kernels can be built for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    from attngen.arch import arch_of

    major, minor = torch.cuda.get_device_capability()
    return None if arch_of(10 * major + minor) else f"no kernels can be built for sm{major}{minor}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu" in item.path.as_posix()]
    reason = _reason() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Finish what a test started: an error of its kernels is its own, and nothing can run after one that loses all."""
    yield
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{request.node.nodeid} lost the CUDA context: {error}", returncode=1)


@pytest.fixture(autouse=True)
def _workers(fresh_workers: None) -> None:
    """Jobs run in processes of their own, as they do for users."""


@pytest.fixture
def only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Make the kernels of one shipped spec known, and no others."""
    from attngen.runtime.registry import registry
    from tests.gpu.packages import package

    chosen = package(request.param)
    before = [found for rank, found in registry.packages() if rank == "loaded"]
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))  # the user's builds are not seen
    registry.clear()
    registry.add(chosen)
    yield chosen
    registry.clear()
    for other in before:
        registry.add(other)
