"""Kernels of a spec as contestants."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.errors import CallError, NoKernelError
from attngen.runtime.module import Kernel
from attngen.runtime.registry import registry
from attngen.spec import load_spec_text, preset
from attngen.tools import bench_kernels, bench_machine, bench_peers, bench_race
from attngen.tools.bench_cases import BenchCase, bench_cases
from attngen.tools.bench_check import Oracle
from attngen.tools.bench_kernels import Team, chosen, teams
from attngen.tools.bench_machine import Memory, Monitor, Reading, parse_reading
from attngen.tools.bench_peers import Peer, Tensors, reason_against
from attngen.tools.bench_race import Track, foresee
from attngen.tools.bench_report import Result
from attngen.tools.bench_timing import Contestant, race
from attngen.tools.bench_workloads import Terms, Workload, terms_of, workload
from attngen.tools.build import Prepared, prepare
from attngen.tools.interpreter import kernel_of

@pytest.fixture
def prepared() -> list[Prepared]:
    return prepare(load_spec_text(SPEC))


@pytest.fixture
def clean_registry() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def test_kernels_that_compute_the_same_make_a_team(prepared: list[Prepared]) -> None:
    reasons = [bench_kernels.reason_against(kernel.plan, 90) for kernel in prepared]
    assert reasons.count(None) == 4
    assert reasons.count("only dense calls are raced") == 1
    assert reasons.count("built for sm80, this GPU is sm90") == 1
    assert [bench_kernels.reason_against(kernel.plan, None) for kernel in prepared].count(None) == 5
    causal, full, alibi = teams([kernel for kernel, reason in zip(prepared, reasons, strict=True) if reason is None])
    assert (causal.variant, causal.dtype, causal.head_dim_qk) == (preset("causal"), "fp16", 32)
    first, second = causal.members
    assert first.startswith("attngen triton m")
    assert second.startswith("attngen triton m16n16")
    assert list(full.members) == list(alibi.members) == ["attngen triton"]


def test_choosing_kernels(prepared: list[Prepared]) -> None:
    assert len(chosen(prepared, None, ())) == len(prepared)
    assert {k.plan.variant.name for k in chosen(prepared, None, ["full", "alibi"])} == {"full", "alibi"}
    assert [k.plan.layout for k in chosen(prepared, "varlen", ["causal"])] == ["varlen"]
    with pytest.raises(CallError, match="no kernel of variant 'casual'; did you mean 'causal'"):
        chosen(prepared, None, ["casual"])
    with pytest.raises(CallError, match="no kernel 'd33'"):
        chosen(prepared, "d33", ())


@pytest.mark.usefixtures("clean_registry")
def test_each_kernel_is_called_by_itself(prepared: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    dense = [k.plan for k in prepared if k.plan.variant.name == "causal" and k.plan.layout == "dense"]
    work, inputs = racing(preset("causal"), "causal", 20)
    seen = []

    def attention(*tensors: torch.Tensor, variant: str, package: str, **arguments: Any) -> None:
        (kernel,) = registry.find(variant, package).kernels
        seen.append((kernel.name, tensors[0].shape, arguments))

    monkeypatch.setattr(bench_kernels, "attention", attention)
    contestants = [bench_kernels.enter(plan.name, kernel_of(plan), work, inputs) for plan in dense]
    for contestant in contestants:
        for call in contestant.calls:
            call()
    assert [name for name, *_ in seen] == [plan.name for plan in dense for _ in inputs]
    assert all(arguments == {} for *_, arguments in seen)
