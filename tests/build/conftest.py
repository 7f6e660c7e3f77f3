"""Fixtures of calls, for kernels that calls have compiled: those of ``tests/runtime``."""

from __future__ import annotations

from tests.runtime.conftest import _isolated, gpu

__all__ = ["_isolated", "gpu"]
