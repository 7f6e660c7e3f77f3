"""Host times, with contenders of this test and tensors on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.lab.bench import host_programs


def test_host_times_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(host_programs, "BACKENDS", {"SDPA, math": "MATH", "SDPA, cuDNN": "CUDNN_ATTENTION"})
    monkeypatch.setattr(host_programs, "SETS", 3)
    monkeypatch.setattr(host_programs, "PASSES", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    figures = host_programs.calls("a_package", 2)
    assert figures["device"] == "a GPU"
    assert set(figures["not measured"]) == {"absent", "SDPA, cuDNN"}
    assert figures["not measured"]["absent"] == "ImportError: no such library"
    assert figures["SDPA picks"] in ("FLASH_ATTENTION", "MATH")
    cases = ["forward", "forward that learns", "backward", "forward and backward", "forward, the same tensors"]
    assert list(figures["host time"]) == cases
    for results in figures["host time"].values():
        assert set(results) == {"attngen", "SDPA", "SDPA, math"}
        assert results["SDPA"]["times SDPA's"] == 1
        assert all(each["us"] > 0 for each in results.values())
    # three rounds that are not counted and two that are, of two passes each, over as many sets as a case has
    calls = [seen[place : place + 30] for place in range(0, 150, 30)]
    assert [len({address for address, _ in part}) for part in calls] == [3, 3, 3, 3, 1]
    assert [{learns for _, learns in part} for part in calls] == [{False}, {True}, {True}, {True}, {False}]
    assert len(seen) == 150


def test_only_what_is_asked_for_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_programs, "clock", lambda: now[0])

    def taking(seconds: float) -> Any:
        def call(one: Any) -> Any:
            now[0] += seconds
            return one

        return call

    assert host_programs.host_time("SDPA", taking(5.0), taking(2e-6), [1, 2, 3]) == pytest.approx(2.0)
