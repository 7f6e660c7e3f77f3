"""The assembler of a Triton wheel that is used is the newest of CUDA 12, whatever its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.arch import ARCHES
from attngen.compile import triton

#: By the version of the wheel: what its ``ptxas`` and its ``ptxas-blackwell`` say, and which one is right.
_WHEELS = [
    ((12, 8, 93), (12, 9, 86), "ptxas-blackwell"),
    ((12, 9, 86), (13, 1, 80), "ptxas"),
    ((12, 9, 86), None, "ptxas"),
    ((13, 1, 80), (13, 4, 59), None),
    ((), (12, 9, 86), "ptxas-blackwell"),
]


@pytest.mark.parametrize(("older", "newer", "picked"), _WHEELS)
def test_the_newest_of_cuda_12(
    monkeypatch: pytest.MonkeyPatch, older: tuple[int, ...], newer: tuple[int, ...] | None, picked: str | None
) -> None:
    releases = {"ptxas": older, "ptxas-blackwell": newer}
    monkeypatch.setattr(triton, "nvidia_tool", lambda name: None if releases[name] is None else Path(name))
    monkeypatch.setattr(triton, "tool_release", lambda path: releases[path.name])
    settings = triton._assembler(ARCHES["sm90a"])
    assert set(settings.values()) == ({picked} if picked else set())
    # Wheels differ in which of the two settings they read for Hopper.
    assert set(settings) == ({"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"} if picked else set())


def test_the_installed_wheel_has_one_that_keeps_addresses() -> None:
    settings = triton._assembler(ARCHES["sm90a"])
    assert triton.tool_release(Path(settings["TRITON_PTXAS_PATH"])) >= (12, 9)


def test_blackwell_keeps_its_own() -> None:
    assert triton._assembler(ARCHES["sm100a"]) == {}
