"""Kernels by mma.sync for cards without wgmma, planned for the GPU that is here and compared with float64."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.build.pipeline import Prepared, compile_kernels, prepare
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.arguments.checked import Call
from attngen.runtime.geometry import sizes
from attngen.runtime.geometry.cuts import Cut
from attngen.runtime.geometry.splits import Capacity
from attngen.runtime.kernels.module import KernelLaunch, read_kernel
from attngen.schema import load_spec
from attngen.store.store import Store
from tests.fuzz.trials import plan_for_card
from tests.gpu.family import for_this_gpu
from tests.gpu.generated import CARD_PLANNER, describe, run
from tests.gpu.test_memory import sanitize
from tests.sampling import some

SPEC = Path(__file__).with_name("cards.yaml")
SCHEDULES = ("mma_forward", "mma_decode", "mma_backward")


#: Seeds of generated specs, a few for each run.
SEEDS, _AT_ONCE = range(500), 8

#: Processes of a run, each of which takes long to begin.
_JOBS = 4

#: Seeds whose kernels once did not compile, or were wrong.
FAILED = (213, 215, 216, 237, 304, 341, 361, 398, 414, 432)


def to_build() -> list[Prepared]:
    generated = [kernel for seed in (*SEEDS[:_AT_ONCE], *FAILED) for kernel in plan_for_card(seed, True).kernels]
    return [*cards(), *generated]


@cache
def cards() -> list[Prepared]:
    """Return the kernels of the spec, planned for the GPU that is here."""
    kernels = [for_this_gpu(kernel) for kernel in prepare(load_spec(SPEC))]
    return [kernel for kernel in kernels if kernel.plan.schedule in SCHEDULES]


@cache
def built() -> dict[str, Path]:
    """Folder of each kernel in the cache, by name."""
    kernels, failures = compile_kernels(cards(), store=Store())
    assert not failures, "\n".join(f"{failure.name}: {failure.error}" for failure in failures)
    return {name: Store().path(kernel.key) for name, kernel in kernels.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_of_other_cards(schedule: str) -> None:
    names = [kernel.plan.name for kernel in cards() if kernel.plan.schedule == schedule]
    assert len(names) >= 3
    problems = []
    for name in names:
        trial = try_pinned(read_kernel(built()[name]), torch.device("cuda", 0), random.randrange(2**31), small=True)
        problems += [f"{name}: {problem}" for problem in trial.problems]
        assert not trial.broken, "\n".join(problems)
        assert trial.results
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_of_the_first_keys(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward kernels whose first tiles of keys are cut, into any number of parts."""

    def any_cut(launch: KernelLaunch, call: Call, heads_in_l2: int, capacity: Capacity) -> Cut:
        rows = -(-call.seqlen_k // launch.tile_n)
        rows = random.Random(f"{rows} {parts}").choice([1, -(-rows // 2), rows])  # the same for the same call
        return Cut(call.batch * call.kv_heads * rows, parts)

    monkeypatch.setattr(sizes, "cut_of", any_cut)
    names = [kernel.plan.name for kernel in cards() if getattr(kernel.plan.structure, "cuts_first", False)]
    assert len(names) == 3
    for name in names:
        kernel = read_kernel(built()[name])
        trial = try_pinned(kernel, torch.device("cuda", 0), random.randrange(2**31), small=True)
        assert trial.problems == (), name


@pytest.mark.parametrize("tool", some(["memcheck", "racecheck", "synccheck"], ["memcheck"]))
def test_under_the_sanitizer(tool: str) -> None:
    built()  # compiled before, so that the sanitizer sees no compiler
    count = sum(kernel.plan.operands.q.bytes == kernel.plan.operands.k.bytes == 2 for kernel in cards())
    sanitize(tool, program="tests.gpu.sanitized_cards", count=count, kernels=("fwd_", "bwd_", "classify_"))


@pytest.mark.parametrize("first", [*some(SEEDS[::_AT_ONCE], SEEDS[:1]), None])
def test_generated_specs_for_cards(first: int | None) -> None:
    """They compile for their cards, and their kernels, planned again for this GPU, are right."""
    seeds = FAILED if first is None else SEEDS[first : first + _AT_ONCE]
    rows = run(seeds, jobs=_JOBS, planner=CARD_PLANNER)
    assert {row.seed for row in rows} == set(seeds)
    assert describe(rows) == []
