"""The pipeline over a whole spec. The compiler is a fake one, all before it is real."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from attngen.build import pipeline as build_module
from attngen.build.generate import generate
from attngen.build.kernel_filter import KernelFilter
from attngen.build.pipeline import BuildReport, build
from attngen.compile import toolchain
from attngen.errors import AttngenError, DiskFullError, InternalError, SpecError, StoreError
from attngen.plan import Plan
from attngen.plan.model import Refused, TunedOn
from attngen.schema import KernelSpec, expand, load_spec
from attngen.schema.tuned import identity, tuned_text
from attngen.store import Store
from attngen.store import receipt as receipts
from attngen.store.index import read_index
from tests.sampling import few
from tests.store import fakes
from tests.store.fakes import LOG

ROOT = Path(__file__).parents[2]

SPEC = """
schema: 1
package: mine
arch: [sm80, sm90a]
variants:
  near:
    mask: "abs(q_pos - kv) < width"
    scalars: {width: {type: int32, min: 1}}
kernels:
  - variant: [causal, near]
    head_dim: 64
    backend: triton
"""


@pytest.fixture(autouse=True)
def _no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.compile_by(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def run(spec: Path, store: Store, *arch: str, **more: tuple[str, ...]) -> BuildReport:
    return build(spec, only=KernelFilter(arch, **more), jobs=1, store=store, compiler=fakes.QUICK)


def origins(report: BuildReport) -> Counter[str]:
    return Counter(kernel.origin for kernel in report.kernels)


def test_everything_is_built_then_nothing(spec: Path, store: Store, log: Path) -> None:
    first = run(spec, store)
    assert (first.package, len(first.kernels), first.failures, first.up_to_date) == ("mine", 4, (), False)
    assert origins(first) == {"built": 4}
    assert len(log.read_text().split()) == 4
    second = run(spec, store)
    assert second.up_to_date
    assert origins(second) == {"cached": 4}
    assert [k.key for k in second.kernels] == [k.key for k in first.kernels]
    assert len(log.read_text().split()) == 4
    index = read_index(store, "mine")
    assert index is not None
    assert [(e.name, e.key) for e in index.kernels] == [(k.name, k.key) for k in first.kernels]
    assert Counter((e.variant, e.arch) for e in index.kernels) == Counter(
        (variant, arch) for variant in ("causal", "near") for arch in ("sm80", "sm90a")
    )
    assert list(index.inputs) == [str(spec.resolve())]


@pytest.mark.exhaustive
def test_comments_and_the_order_of_keys_compile_nothing(spec: Path, store: Store, log: Path) -> None:
    first = run(spec, store)
    reordered = SPEC.replace("{type: int32, min: 1}", "{min: 1, type: int32}")
    spec.write_text("# a comment\n" + reordered.replace("schema: 1\npackage: mine\n", "package: mine\nschema: 1\n"))
    second = run(spec, store)
    assert not second.up_to_date
    assert origins(second) == {"cached": 4}
    assert [k.key for k in second.kernels] == [k.key for k in first.kernels]
    assert run(spec, store).up_to_date
    assert len(log.read_text().split()) == 4


@pytest.mark.exhaustive
def test_an_edit_compiles_what_it_touches(spec: Path, store: Store, log: Path) -> None:
    run(spec, store)
    spec.write_text(SPEC.replace("< width", "<= width"))
    assert origins(run(spec, store)) == {"built": 2, "cached": 2}
    spec.write_text(SPEC)
    assert origins(run(spec, store)) == {"cached": 4}


OPEN = """
schema: 1
package: mine
arch: [sm90a]
variants:
  hopeless: {mask: "q_pos >= kv"}
kernels:
  - {variant: causal, head_dim: [64, 128]}
"""


def narrow(spec: Path, store: Store) -> BuildReport:
    return build(spec, jobs=1, store=store, compiler="tests.store.fakes:compile_narrow")


@pytest.mark.exhaustive
def test_what_is_refused_is_planned_again_until_it_is_clean(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(OPEN)
    report = narrow(spec, store)
    assert report.failures == ()
    assert [kernel.manifest["tile_n"] for kernel in report.kernels] == [32, 32]
    first = report.kernels[0]
    wide = "fwd_sm90a_wgmma_bf16_d64_causal_m192n128s2c3"
    assert first.refused[0] == {"name": wide, "backend": "cuda", "reason": "1280 B of spills"}
    assert report.to_dict()["kernels"][0]["refused"] == list(first.refused)
    compiled = log.read_text().split()
    assert sorted(compiled[:2]) == ["fwd_sm90a_wgmma_bf16_d128_causal_m128n128s2c2", wide]
    assert first.name in compiled
    # what was refused is remembered, in a build that has to look again, too
    spec.write_text(OPEN.replace("[64, 128]", "[64, 128, 256]"))
    again = narrow(spec, store)
    assert origins(again) == {"cached": 2, "built": 1}
    assert [k.key for k in again.kernels[:2]] == [k.key for k in report.kernels]
    assert all("d256" in name for name in log.read_text().split()[len(compiled) :])


@pytest.mark.exhaustive
def test_the_least_spilling_one_is_kept_where_all_spill(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(OPEN.replace("variant: causal, head_dim: [64, 128]", "variant: hopeless, head_dim: 64"))
    (kernel,) = narrow(spec, store).kernels
    assert kernel.manifest["tile_n"] == 16
    assert "spill" in kernel.manifest["allow"]
    assert kernel.name in [row["name"] for row in kernel.refused]


@pytest.mark.exhaustive
def test_a_backward_that_cuda_gives_up_says_the_price_and_what_to_declare(spec: Path, store: Store, log: Path) -> None:
    text = OPEN.replace("hopeless: {", "hopeless: {scalars: {n: {type: int32}, m: {type: int32, max: 9}}, ")
    text = text.replace("q_pos >= kv", "q_pos >= kv + n + m")
    spec.write_text(text.replace("causal, head_dim: [64, 128]", "hopeless, head_dim: 64, passes: backward"))
    report = build(spec, jobs=1, store=store, compiler="tests.store.fakes:compile_no_cuda")
    (kernel,) = report.kernels
    assert kernel.manifest["backend"] == "triton"
    assert kernel.advice == (
        "a backward in CUDA was 1.4 to 1.9 times as fast at head dim 128 (docs/notebook/building.md); "
        "declare a max for n, so that fewer integers need 64 bits"
    )
    assert report.to_dict()["kernels"][0]["advice"] == kernel.advice


@pytest.mark.exhaustive
def test_a_tile_that_the_spec_fixes_fails_with_the_reason(spec: Path, store: Store, log: Path) -> None:
    fixed = "{variant: causal, head_dim: 64, tile: {m: 192, n: 64}, warps: {consumer: 3, overlap: true}, backend: cuda}"
    spec.write_text(OPEN.replace("{variant: causal, head_dim: [64, 128]}", fixed))
    report = narrow(spec, store)
    assert report.kernels == ()
    (failure,) = report.failures
    assert "640 B of spills" in str(failure.error)


@pytest.mark.exhaustive
def test_a_compiler_that_only_a_later_attempt_needs_may_be_missing(
    spec: Path, store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda backend, arch: "no triton" if backend == "triton" else None)
    spec.write_text(OPEN.replace("[64, 128]}", "64}\n  - {variant: hopeless, head_dim: 64}"))
    report = narrow(spec, store)
    assert [kernel.manifest["backend"] for kernel in report.kernels] == ["cuda"]
    (failure,) = report.failures
    assert re.search(r"no triton\nTried before it:\n.*1280 B of spills", str(failure.error))


def choices(path: Path, spec: Path, choice: dict[str, object], gpu: str = "a card") -> Path:
    """A file with one choice for the first kernel of a spec."""
    first = expand(load_spec(spec))[0]
    row = {"kernel": "the first", "of": identity(first), "speedup": 1.2, **choice}
    path.write_text(tuned_text(gpu, {}, [row]))
    return path


@pytest.mark.exhaustive
def test_measured_choices_are_taken_and_named(spec: Path, store: Store, log: Path, tmp_path: Path) -> None:
    spec.write_text(OPEN)
    plain = build(spec, jobs=1, store=store, compiler=fakes.QUICK)
    tuned = choices(tmp_path / "card.yaml", spec, {"tile": {"n": 64}, "warps": {"consumer": 2}})
    report = build(spec, tuned=[tuned], jobs=1, store=store, compiler=fakes.QUICK)
    assert origins(report) == {"built": 1, "cached": 1}
    assert report.kernels[0].name == "fwd_sm90a_wgmma_bf16_d64_causal_m128n64s2c2"
    (row,) = report.kernels[0].manifest["tuned"]
    own, chosen = plain.kernels[0].manifest, report.kernels[0].manifest
    pairs = chosen["tile_m"] * chosen["tile_n"] / (own["tile_m"] * own["tile_n"])
    assert (row["file"], row["gpu"]) == ("card.yaml", "a card")
    assert row["times"][2] == pytest.approx(own["times"][2] * pairs / 1.2, rel=1e-3)
    assert report.kernels[1].manifest["tuned"] == []
    # each is up to date by itself; another choice is built
    assert build(spec, tuned=[tuned], store=store, compiler=fakes.QUICK).up_to_date
    choices(tuned, spec, {"tile": {"n": 96}, "warps": {"consumer": 2}})
    assert origins(build(spec, tuned=[tuned], jobs=1, store=store, compiler=fakes.QUICK)) == {"built": 1, "cached": 1}
    assert build(spec, jobs=1, store=store, compiler=fakes.QUICK).kernels[0].key == plain.kernels[0].key


@pytest.mark.exhaustive
def test_cards_that_differ_have_a_kernel_each(spec: Path, store: Store, log: Path, tmp_path: Path) -> None:
    """A card without a choice takes the plan's own; cards that choose alike share one kernel."""
    spec.write_text(OPEN)
    narrow, wide = {"tile": {"n": 64}, "warps": {"consumer": 2}}, {"tile": {"n": 96}, "warps": {"consumer": 2}}
    (own, _) = build(spec, jobs=1, store=store, compiler=fakes.QUICK).kernels

    def names(*chosen: dict[str, object] | None) -> dict[str, list[str]]:
        files = []
        for i, choice in enumerate(chosen):
            files.append(choices(tmp_path / f"{i}.yaml", spec, choice or {}, gpu=f"card {i}"))
            if choice is None:
                files[-1].write_text(tuned_text(f"card {i}", {}, []))
        kernels = build(spec, tuned=files, jobs=1, store=store, compiler=fakes.QUICK).kernels
        return {kernel.name: [row["gpu"] for row in kernel.manifest.get("tuned", ())] for kernel in kernels[:-1]}

    n64, n96 = (f"fwd_sm90a_wgmma_bf16_d64_causal_m128n{n}s2c2" for n in (64, 96))
    assert names(narrow, wide) == {n64: ["card 0"], n96: ["card 1"]}
    assert names(narrow, narrow) == {n64: ["card 0", "card 1"]}
    assert names(None, wide) == {own.name: [], n96: ["card 1"]}


@pytest.mark.exhaustive
@few(
    "choice",
    [{"tile": {"n": 250}}, {"tile": {"n": 128}, "warps": {"consumer": 3, "overlap": True}}],
    ids=str,
    always=(1,),
)
def test_a_choice_that_does_not_fit_is_passed_over(
    spec: Path, store: Store, log: Path, tmp_path: Path, choice: dict[str, object]
) -> None:
    """Refused by the plan, or by the compiler: nobody asked for it, so that the kernel is built all the same."""
    spec.write_text(OPEN)
    expected = [kernel.name for kernel in narrow(spec, store).kernels]
    report = build(
        spec, tuned=[choices(tmp_path / "card.yaml", spec, choice)], jobs=1, store=store,
        compiler="tests.store.fakes:compile_narrow",
    )  # fmt: skip
    assert report.failures == ()
    assert [kernel.name for kernel in report.kernels] == expected


@pytest.mark.exhaustive
def test_choices_of_another_spec_are_remarked_on(spec: Path, store: Store, log: Path, tmp_path: Path) -> None:
    tuned = choices(tmp_path / "card.yaml", spec, {"tile": {"n": 64}})
    spec.write_text(OPEN)
    warnings = build(spec, tuned=[tuned], jobs=1, store=store, compiler=fakes.QUICK).warnings
    assert f"{tuned} has no choice for a kernel of this spec that leaves it open" in warnings


@pytest.mark.exhaustive
def test_kernels_that_come_to_be_one_are_one(spec: Path, store: Store, log: Path) -> None:
    both = "{variant: causal, head_dim: 64}\n  - {variant: causal, head_dim: 64, tile: {n: 32}}"
    spec.write_text(OPEN.replace("{variant: causal, head_dim: [64, 128]}", both))
    report = narrow(spec, store)
    assert report.failures == ()
    assert [kernel.refused for kernel in report.kernels] == [[]]


def test_a_kernel_that_cannot_be_planned_costs_itself(
    spec: Path, store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attngen.plan as planning

    real = planning.plan

    def plan(kernel: KernelSpec) -> Plan:
        if kernel.variant.name == "near":
            raise KeyError("n")
        return real(kernel)

    monkeypatch.setattr(planning, "plan", plan)
    report = run(spec, store)
    assert len(report.kernels) == 2
    assert len(report.failures) == 2
    assert isinstance(report.failures[0].error, InternalError)
    assert re.search(r"mine.yaml:10: near, forward, .*KeyError: 'n' at test_build.py", str(report.failures[0].error))
    assert not run(spec, store).up_to_date
    with pytest.raises(InternalError, match="near"):
        generate(spec, spec.parent / "out")


@few("compiler", ["compile_without_room", "compile_and_fill"], always=(1,))
def test_a_full_disk_ends_the_build(spec: Path, store: Store, log: Path, compiler: str) -> None:
    """Neither is a plan refused, nor does any other kernel fail: the next build goes on."""
    with pytest.raises(DiskFullError, match="the disk is full; .*the next build begins where this one ended"):
        build(spec, jobs=1, store=store, compiler=f"tests.store.fakes:{compiler}")
    tried = len(log.read_text().split())
    assert tried == {"compile_without_room": 1, "compile_and_fill": 2}[compiler]
    assert not (store.root / "refusals").exists()
    assert origins(run(spec, store)) == Counter(built=5 - tried, cached=tried - 1)


@pytest.mark.exhaustive
def test_an_include_is_an_input(spec: Path, store: Store, log: Path) -> None:
    (spec.parent / "masks").mkdir()
    masks = spec.parent / "masks" / "far.yaml"
    masks.write_text('schema: 1\nvariants: {far: {mask: "q_pos - kv > 10"}}\n')
    spec.write_text(SPEC.replace("variants:", "include: masks/far.yaml\nvariants:").replace("near]", "near, far]"))
    run(spec, store)
    assert run(spec, store).up_to_date
    masks.write_text(masks.read_text().replace("10", "11"))
    assert origins(run(spec, store)) == {"built": 2, "cached": 4}


@pytest.mark.exhaustive
def test_another_generator_or_toolchain_is_noticed(
    spec: Path, store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(spec, store)
    monkeypatch.setattr(receipts, "generator_digest", lambda: "other")
    report = run(spec, store)
    assert not report.up_to_date
    assert origins(report) == {"cached": 4}


@pytest.mark.exhaustive
def test_lost_and_damaged_kernels_are_built_again(spec: Path, store: Store, log: Path) -> None:
    keys = [kernel.key for kernel in run(spec, store).kernels]
    store.remove(keys[0])
    (store.path(keys[1]) / "kernel.cubin").write_bytes(b"no cubin")
    report = run(spec, store)
    assert origins(report) == {"built": 2, "cached": 2}
    assert len([w for w in report.warnings if "damaged" in w]) == 1
    assert store.verify() == []
    (store.root / "builds" / "mine.json").unlink()
    assert not run(spec, store).up_to_date
    assert run(spec, store).up_to_date


def test_arches_can_be_restricted(spec: Path, store: Store, log: Path) -> None:
    assert len(run(spec, store, "sm80").kernels) == 2
    assert run(spec, store, "sm80").up_to_date
    assert origins(run(spec, store, "sm90a")) == {"built": 2}
    index = read_index(store, "mine")
    assert index is not None
    assert Counter(entry.arch for entry in index.kernels) == {"sm80": 2, "sm90a": 2}
    assert origins(run(spec, store)) == {"cached": 4}
    # Kernels of another state of the spec are not carried along.
    spec.write_text(SPEC.replace("< width", "<= width"))
    run(spec, store, "sm80")
    index = read_index(store, "mine")
    assert index is not None
    assert Counter(entry.arch for entry in index.kernels) == {"sm80": 2}
    with pytest.raises(SpecError, match="the spec lists no kernels for 'sm90'; did you mean 'sm90a'"):
        run(spec, store, "sm90")


@pytest.mark.exhaustive
def test_dtypes_and_head_dims_can_be_restricted(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(SPEC.replace("head_dim: 64", "head_dim: [64, {qk: 192, v: 128}]\n    dtype: [bf16, fp16]"))
    wide = run(spec, store, "sm90a", dtype=("bf16",), head_dim=("192/128",))
    assert {(one.manifest["dtype"], one.manifest["head_dim_v"]) for one in wide.kernels} == {("bf16", 128)}
    assert len(wide.kernels) == 2
    assert run(spec, store, "sm90a", head_dim=("192/128",), dtype=("bf16",)).up_to_date
    assert origins(run(spec, store, "sm90a", dtype=("bf16",))) == {"built": 2, "cached": 2}
    # What an earlier build made of the rest stays in the index; of its own part nothing is left twice.
    index = read_index(store, "mine")
    assert index is not None
    assert len({entry.name for entry in index.kernels}) == len(index.kernels) == 4
    with pytest.raises(SpecError, match=r"head_dim: the spec lists no kernels for '192'; .*it builds for: 64, 192/128"):
        run(spec, store, head_dim=("192",))
    with pytest.raises(SpecError, match=r"dtype: the spec lists no kernels for 'f16'; did you mean 'fp16'"):
        run(spec, store, dtype=("f16",))


def test_a_selection_that_takes_no_kernel_is_refused(spec: Path, store: Store) -> None:
    spec.write_text(f"{SPEC}  - {{variant: causal, head_dim: 128, arch: sm86, backend: triton}}\n")
    with pytest.raises(SpecError, match="the spec lists no kernels for arch sm86, head_dim 64 together"):
        run(spec, store, "sm86", head_dim=("64",))


def test_a_kernel_that_fails_does_not_stop_the_others(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(SPEC.replace("near", "reject"))
    report = run(spec, store)
    assert origins(report) == {"built": 2}
    assert [str(f.error) for f in report.failures] == [f"{f.name}: rejected" for f in report.failures]
    assert len(report.failures) == 2
    index = read_index(store, "mine")
    assert index is not None
    assert len(index.kernels) == 2
    again = run(spec, store)
    assert not again.up_to_date
    assert len(again.failures) == 2


def test_a_compiler_that_crashes_fails_its_kernel(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(SPEC.replace("near", "abort"))
    report = run(spec, store)
    assert origins(report) == {"built": 2}
    assert all("died of SIGABRT" in str(f.error) for f in report.failures)
    assert run(spec, store).failures
    assert os.listdir(store.root / "tmp") == []
    assert os.listdir(store.root / "locks") == []


@pytest.mark.exhaustive
def test_a_build_of_which_nothing_compiles_keeps_the_earlier_index(spec: Path, store: Store, log: Path) -> None:
    run(spec, store)
    spec.write_text(SPEC.replace("near", "reject").replace("causal, ", ""))
    assert len(run(spec, store).failures) == 2
    index = read_index(store, "mine")
    assert index is not None
    assert len(index.kernels) == 4


@pytest.mark.exhaustive
def test_every_kernel_that_cannot_be_planned_is_named(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(SPEC.replace("backend: triton", "backend: cuda").replace("sm80", "sm100a"))
    report = run(spec, store)
    assert [kernel.manifest["arch"] for kernel in report.kernels] == ["sm90a", "sm90a"]
    assert len(report.failures) == 2
    for failure in report.failures:
        assert re.search(rf"{spec}:\d+: .*cuda has no forward for sm100a", str(failure.error))
        assert "sm100a" in failure.name


def test_nothing_is_compiled_where_no_kernel_can_be_planned(spec: Path, store: Store, log: Path) -> None:
    spec.write_text(SPEC.replace("backend: triton", "backend: cuda").replace("sm80, sm90a", "sm100a"))
    with pytest.raises(SpecError, match="cuda has no forward for sm100a"):
        run(spec, store)
    assert log.read_text() == ""


@pytest.mark.exhaustive
def test_the_observer_sees_each_compile(spec: Path, store: Store, log: Path) -> None:
    events: list[tuple[str, object]] = []

    class Recorder:
        def planned(self, total: int, missing: int) -> None:
            events.append(("planned", (total, missing)))

        def started(self, name: str) -> None:
            events.append(("started", name))

        def finished(self, name: str, error: AttngenError | None) -> None:
            events.append(("finished", name))

    report = build(spec, jobs=1, store=store, observer=Recorder(), compiler=fakes.QUICK)
    assert events[0] == ("planned", (4, 4))
    assert Counter(kind for kind, _ in events[1:]) == {"started": 4, "finished": 4}
    assert {name for _, name in events[1:]} == {kernel.name for kernel in report.kernels}


def test_a_cache_that_cannot_be_written_stops_the_build(spec: Path, tmp_path: Path, log: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="set ATTNGEN_CACHE"):
        run(spec, Store(tmp_path / "file" / "cache"))
    assert log.read_text() == ""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fresh_workers")  # which have the limits of this process
def test_a_disk_that_fills_up_is_reported(spec: Path, store: Store, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))  # cubins have 20,000 bytes; workers inherit it
    try:
        report = run(spec, store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert report.kernels == ()
    assert len(report.failures) == 4
    assert all(os.strerror(errno.EFBIG) in str(f.error) for f in report.failures)
    assert os.listdir(store.root / "tmp") == []


def start_build(spec: Path, store: Store, fake: str = fakes.QUICK) -> subprocess.Popen[bytes]:
    code = (
        f"from attngen.build.pipeline import build; from attngen.store import Store; from pathlib import Path\n"
        f"build({str(spec)!r}, jobs=2, store=Store(Path({str(store.root)!r})), compiler={fake!r})"
    )
    # A killed build leaves its scratch folder behind: not in the machine's.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(store.root.parent)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)


@pytest.mark.exhaustive
def test_builds_at_once_compile_each_kernel_once(spec: Path, store: Store, log: Path) -> None:
    builds = [start_build(spec, store, "tests.store.fakes:compile_slowly") for _ in range(2)]
    for process in builds:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors.decode()
    assert sorted(Counter(log.read_text().split()).values()) == [1, 1, 1, 1]
    assert run(spec, store).up_to_date
    assert os.listdir(store.root / "tmp") == []
    assert os.listdir(store.root / "locks") == []


@pytest.mark.exhaustive
@few("begun", [0, 1, 3], always=(2,))
def test_a_killed_build_is_taken_up_again(spec: Path, store: Store, log: Path, begun: int) -> None:
    process = start_build(spec, store, "tests.store.fakes:compile_two")
    while len(log.read_text().splitlines()) < begun:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    with open(log, "a") as file:
        file.write("killed\n")  # so that its workers end
    process.communicate()
    assert store.verify() == []
    report = run(spec, store)
    assert len(report.kernels) == 4
    assert store.verify() == []


def test_keys_see_every_field_of_a_plan(spec: Path) -> None:
    """Reliability check 26, for the plan: what is not in ``to_dict`` would not be in the key."""
    from dataclasses import fields, replace

    from attngen.schema import load_spec, load_spec_text

    prepared = build_module.prepare(load_spec(spec))
    plan, other = prepared[0].plan, prepared[-1].plan
    entry = "schema: 1\npackage: mine\narch: sm80\nkernels: [{variant: causal, head_dim: 64, passes: backward}]\n"
    (backward,) = build_module.prepare(load_spec_text(entry, "mine.yaml"))
    for field in fields(plan):
        if field.name == "spec_file":
            continue  # it names the spec in the header of the source, which the key covers too
        if field.name in ("backend_reason", "tile_reason"):
            continue  # of the choice: the kernel is the same, however it was asked for
        value = getattr(plan, field.name)
        changed: object
        if isinstance(value, bool):
            changed = not value
        elif isinstance(value, int):
            changed = value + 1
        elif field.name == "arch_name":
            changed = other.arch_name
        elif field.name == "layout":
            changed = "paged"
        elif field.name == "dtype_name":
            changed = "fp16"
        elif isinstance(value, str):
            changed = value + "x"
        elif field.name == "variant":
            changed = other.variant
        elif field.name == "refused":
            changed = (Refused("other", "cuda", "40 B of spills"),)
        elif field.name == "tuned":
            changed = (TunedOn("a.yaml", "a card"),)
        elif field.name in ("times", "visible"):
            changed = (1.0, 2.0, 3.0)
        elif field.name in ("launches", "workspaces"):
            changed = getattr(backward.plan, field.name)
        elif isinstance(value, tuple):
            changed = ("spill",) if field.name == "allow" else value[:-1]
        else:
            continue
        assert replace(plan, **{field.name: changed}).to_dict() != plan.to_dict(), field.name


def test_rendered_sources_are_written_and_kept_up(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "generated"
    first = generate(spec, out)
    assert first.folder == out / "mine"
    assert len(first.changed) == 4
    assert {path.name for path in first.folder.iterdir()} == set(first.changed)
    assert generate(spec, out).changed == ()
    (first.folder / first.changed[0]).write_text("broken")
    (first.folder / "notes.py").write_text("# mine\n")
    assert generate(spec, out).changed == first.changed[:1]
    spec.write_text(SPEC.replace("causal, ", ""))
    fewer = generate(spec, out)
    assert (len(fewer.kernels), fewer.changed, len(fewer.removed)) == (2, (), 2)
    assert len(list(first.folder.iterdir())) == 3
    assert generate(spec, out, KernelFilter(arch=("sm80",))).removed == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        generate(spec, tmp_path / "file")


def test_rendered_sources_name_no_path_of_this_machine(spec: Path, tmp_path: Path) -> None:
    generated = generate(spec, tmp_path / "generated")
    for path in generated.folder.iterdir():
        assert str(tmp_path) not in path.read_text()
        assert str(ROOT) not in path.read_text()
