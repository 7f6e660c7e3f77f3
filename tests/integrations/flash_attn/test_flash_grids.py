"""flash-attention's own grids: a sample by the reference, and a kernel that can be planned for every call of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import AttngenError
from attngen.integrations.shared import choice
from attngen.plan import plan
from attngen.runtime.arguments import torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.registry.lookup import registry
from tests.gpu.flash_grid_runs import run_all, summary, unexpected
from tests.integrations.flash_attn import flash_families, flash_grids
from tests.integrations.flash_attn.flash_reference import Wanted
from tests.runtime.support import FakeDriver
from tests.sampling import few


def test_the_grids_have_as_many_cases_as_the_file() -> None:
    """200,128 with the check of schemas, which has no axis."""
    assert sum(flash_grids.collected(family) for family in flash_grids.GRIDS) == 200_127
    drawn = flash_grids.draw(3000)
    assert len({str(case) for case in drawn}) == len(drawn) == pytest.approx(3000, abs=5)
    assert [str(case) for case in flash_grids.draw(3000)] == [str(case) for case in drawn]


@few(
    "case",
    flash_grids.draw(60, seed=3, longest=130),
    ids=lambda case: f"{case.family}-{case.seed}",
    always=(24, 48),
    often=range(0, 60, 4),
)
def test_a_sample_by_the_reference(case: flash_grids.Case) -> None:
    actual = flash_families.run(case, "cpu")
    if case.get("qv"):
        assert (actual.verdict, "qv is not supported" in actual.reason) == ("refused", True)
    else:
        assert actual == flash_grids.Outcome("right"), str(case)


class _Fatal:
    """A value that ends the process which receives it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_case_that_ends_its_process_stops_no_other(tmp_path: Path) -> None:
    kind = {"num_splits": 2, "seqlen": 3, "head_dim": 64, "dtype": "fp32"}
    cases = [flash_grids.Case("combine", 1, values) for values in (kind, {**kind, "fatal": _Fatal()}, kind)]
    results = run_all(cases, 1, tmp_path, "cpu")
    assert [outcome.verdict for _, outcome in results] == ["right", "wrong", "right"]
    assert summary(results)["combine"] == {"right": 2, "wrong": 1}
    assert len(unexpected(results)) == 1


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The kernels that calls have compiled: planned only, so that launches do nothing. Results are not looked at."""
    asked: list[Any] = []

    def compile_(*wanted: Any) -> None:
        for place, kernel in enumerate(wanted):
            with suppress(*(AttngenError,) * (place > 0)):
                made = plan(kernel)
                asked.append(kernel)
                registry.add_compiled(Kernel({**made.to_dict(), "resources": {"shared_memory": 0}}, bytes))

    fake = FakeDriver()
    monkeypatch.setattr(fake, "load", lambda image, symbol, *_: SimpleNamespace(symbol=symbol))
    monkeypatch.setattr(fake, "launch", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(attngen.jit._maker, "_compile", compile_)
    monkeypatch.setattr(Wanted, "add", lambda *_: None)
    for name in ("_judge", "_judge_cache", "_judge_rows", "beyond"):
        monkeypatch.setattr(flash_families, name, lambda *_: None)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    kernel_call.PREPARED.clear()
    with drivers.use(fake), attngen.jit():
        yield asked
    registry.clear()


@pytest.mark.exhaustive
def test_every_call_has_a_kernel_that_can_be_planned(planned: list[Any]) -> None:
    """Refused is ``qv`` alone."""
    verdicts: Counter[str] = Counter()
    for case in flash_grids.draw(250, seed=1, longest=260):
        if case.family not in ("forward", "varlen", "cache"):
            continue
        actual = flash_families.run(case, "cpu")
        verdicts[actual.verdict] += 1
        assert (actual.verdict == "refused") == bool(case.get("qv")), f"{case}: {actual.reason}"
    assert verdicts["right"] > 180
    assert {kernel.direction for kernel in planned} == {"forward", "backward"}
