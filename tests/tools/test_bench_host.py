"""The race of host times, with contestants of this test and tensors on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.tools import host_programs


def test_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    def attention(q: Any, k: Any, v: Any, *, variant: str) -> Any:
        assert variant == "causal"
        seen.append((q.data_ptr(), q.requires_grad))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def absent() -> Any:
        raise ImportError("no such library\nsecond line")

    package = ModuleType("a_package")
    package.attention = attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_package", package)
    monkeypatch.setattr(host_programs, "block", lambda *names: None)
    monkeypatch.setattr(host_programs, "qkv", lambda: [torch.randn(1, 4, 2, 8) for _ in range(3)])
    monkeypatch.setattr(host_programs, "PEERS", {"SDPA": host_programs.sdpa, "absent": absent})
    monkeypatch.setattr(host_programs, "SETS", 3)
    monkeypatch.setattr(host_programs, "CALLS", 6)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = host_programs.race("a_package", 2)
    assert found["device"] == "a GPU"
    assert found["not in the race"] == {"absent": "ImportError: no such library"}
    assert set(found["host time"]) == {"64 sets of tensors", "the same tensors", "64 sets that learn"}
    for results in found["host time"].values():
        assert set(results) == {"attngen", "SDPA"}
        assert results["SDPA"]["times SDPA's"] == 1
        assert all(figures["us"] > 0 for figures in results.values())
    # three rounds before the race and two in it, over as many sets as a case has, which learn in the last one
    calls = [seen[place : place + 30] for place in (0, 30, 60)]
    assert [len({address for address, _ in part}) for part in calls] == [3, 1, 3]
    assert [{learns for _, learns in part} for part in calls] == [{False}, {False}, {True}]
