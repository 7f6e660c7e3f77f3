"""Tests start with an empty registry that looks at no real cache nor installed package, and with no prepared call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attngen.runtime.arguments import torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.registry import discovery
from attngen.runtime.registry.lookup import registry
from tests.runtime.support import FakeDriver


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(discovery, "metadata", SimpleNamespace(entry_points=lambda group: []))
    registry.clear()
    kernel_call.PREPARED.clear()
    yield
    registry.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver that computes on the CPU, and a dispatch that takes CPU tensors for GPU ones."""
    fake = FakeDriver()
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    with drivers.use(fake):
        yield fake
