"""Generated legal specs: each is planned and rendered, and compiles; none ends in a traceback, none is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.errors import AttngenError
from attngen.schema import load_spec_text
from attngen.store.jobs import Job, run_jobs
from attngen.store.limits import available_cores
from attngen.store.store import Store
from tests.compile.frontend import to_ptx
from tests.fuzz.legal import legal
from tests.fuzz.trials import Planned, asked_for, plan_for_card, plan_one
from tests.gpu import generated

PLANNED = range(4)
ALL = range(2000)
#: Specs whose CUDA sources go through NVRTC in each run, without ptxas, and those that become cubins: a kernel takes
#: half a second of a core for the one, and 2 to 8 s for the other.
CHECKED, COMPILED = (61, 195), (2,)


def planned(seeds: Sequence[int]) -> list[Planned]:
    """Return the plans of seeds, made on all cores."""
    calls = [Job(f"legal_{seed}", "tests.fuzz.trials:plan_one", (seed,)) for seed in seeds]
    results = sorted(run_jobs(calls, available_cores()), key=lambda result: result.index)
    assert [str(result.error) for result in results if result.error is not None] == []
    return [result.value for result in results]


def refused(specs: list[Planned]) -> list[str]:
    return [f"seed {spec.seed}: {spec.verdict}: {spec.problem}" for spec in specs if spec.verdict is not None]


def uncompiled(specs: list[Planned], folder: Path) -> list[str]:
    """Compile specs; return a line for each kernel that could not be, though its spec left the plan a choice."""
    kernels = {kernel.plan.name: spec for spec in specs for kernel in spec.kernels}
    compiled, failures = compile_kernels([k for spec in specs for k in spec.kernels], store=Store(folder))
    assert len(compiled) + len(failures) == len(kernels)
    return [str(failure.error) for failure in failures if not asked_for(kernels[failure.name].fixed, failure.error)]


def test_the_same_seed_gives_the_same_spec() -> None:
    assert legal(3) == legal(3)
    assert len({re.sub(r"legal_\d+", "", legal(seed).text) for seed in range(30)}) == 30


@pytest.mark.exhaustive
def test_specs_are_of_all_kinds() -> None:
    """The generator leaves no kind of spec out; no other test would notice."""
    texts = [legal(seed).text for seed in ALL[:400]]
    wanted = (
        "dense", "varlen", "bf16", "fp16", "fp32", "backward", "sink:", "dropout: true", "grad: true", "tanh",
        "-inf", "monotone", "int64", "int16", "const:", "total_q", "total_k", "q_global", "kv_global", "extent_",
        "exp(",
        "log(", "sqrt(", " / ", "** 3", "pack_gqa: true", "persistent: false", "pingpong", "cooperative",
        "softmax: lazy", "softmax: exact_max", "order: natural", "epilogue: direct", "deterministic: true",
        "split_kv: tiles", "split_kv: true", "layout: paged", "kv_dtype: fp8_e4m3", "descale: page",
        "fp8_e4m3", "kv_dtype: fp8_e5m2", "out_dtype: fp16", "descale: token", "descale: 64",
        "fast_math: false", "alignment: element", "tile_map: always", "loads: pointer", "backend: cuda",
        "backend: triton", "registers:", "overlap: false", "stages:", " or ", " ^ ", "not ", "abs(", "% ", "// ", ">> ",
    )  # fmt: skip
    assert {word: sum(word in text for text in texts) for word in wanted if not any(word in t for t in texts)} == {}
    assert sum("backend" not in text for text in texts) > 60


@pytest.mark.exhaustive
def test_open_fields_of_a_spec_are_left_out() -> None:
    """A spec that fixes no field is there as often as one that does."""
    fixed = Counter(bool(legal(seed).fixed) for seed in ALL[:60])
    assert min(fixed.values()) > 15


@pytest.mark.exhaustive
def test_every_spec_is_planned_and_rendered() -> None:
    assert refused(planned(PLANNED)) == []


def test_specs_for_cards_are_planned() -> None:
    assert refused([plan_for_card(seed, False) for seed in (*range(4), 432)]) == []  # 432: split_kv with a softmax


def test_a_refusal_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts tell a refusal from a traceback."""

    class Broken:
        fixed = ()

        def __init__(self, error: Exception) -> None:
            self.error = error

        def prepare(self) -> list[Prepared]:
            raise self.error

    verdicts = []
    for error in (AttngenError("no"), KeyError("n")):
        monkeypatch.setattr("tests.fuzz.trials.legal", lambda seed, error=error: Broken(error))
        verdicts.append((plan_one(1, False).verdict, plan_one(1, False).problem))
    assert verdicts == [("plan refuses", "no"), ("traceback", "KeyError: 'n'")]


@pytest.mark.exhaustive
def test_cuda_sources_are_right() -> None:
    sources = [kernel.source for spec in planned(CHECKED) for kernel in spec.kernels if kernel.plan.backend == "cuda"]
    assert sources
    for source in sources:
        to_ptx(source)


@pytest.mark.exhaustive
def test_a_few_compile(tmp_path: Path) -> None:
    specs = planned(COMPILED)
    assert refused(specs) + uncompiled(specs, tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.long
def test_all_specs_compile(tmp_path: Path) -> None:
    wrong = []
    for first in range(0, len(ALL), 100):
        specs = planned(ALL[first : first + 100])
        wrong += refused(specs)
        wrong += uncompiled(specs, tmp_path)
    assert wrong == []


def test_the_runner_of_the_gpu_goes_on_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "TRIER", "tests.fuzz.crashing:try_one")
    rows = [generated.Row(seed, f"kernel_{seed}", "compiled", folder="/nowhere") for seed in range(6)]
    rows.append(generated.Row(6, "legal_6", "plan refuses", "no"))
    outcomes = sorted(generated.tried(rows, 1), key=lambda row: row.seed)
    verdicts = ["passed", "crashed", "wrong", "passed", "crashed", "wrong", "plan refuses"]
    assert [row.verdict for row in outcomes] == verdicts
    assert "an illegal memory access" in outcomes[1].problem
    assert len(generated.describe(outcomes)) == 5
    assert generated.describe(outcomes)[0].startswith(
        "seed 1, kernel_1: crashed: kernel_1: its compiler process exited"
    )


def test_a_spec_that_is_written_is_read_as_it_is() -> None:
    """Every spec is one variant and one entry, of nothing but fields of a spec."""
    for seed in range(20):
        spec = load_spec_text(legal(seed).text, "legal.yaml")
        assert list(spec.variants) == [f"legal_{seed}"]
