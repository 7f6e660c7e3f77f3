"""NVRTC through CuPy: which one compiles, how it is loaded, and what happens where either does not work."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen.arch import ARCHES
from attngen.build.pipeline import Prepared, build, compile_kernels
from attngen.cli import group
from attngen.commands import doctor
from attngen.compile import compile_source, nvrtc, probe, toolchain
from attngen.compile.cuda import compile_text
from attngen.compile.options import nvrtc_options
from attngen.errors import ChoiceError, CompileError, CrashError, ToolchainError
from attngen.render import render
from attngen.store import Store
from attngen.store.key import key_of
from tests.plan.specs import kernel_spec, planned

ROOT = Path(__file__).parents[2]

#: Distribution → the folder that its libraries lie in.
LAYOUTS = {
    "nvidia-cuda-nvrtc-cu12": "nvidia/cuda_nvrtc/lib", "nvidia-cuda-nvrtc": "nvidia/cu13/lib",
    **dict.fromkeys(toolchain.CUPY, "cupy_backends"),
}  # fmt: skip

#: A kernel of one line.
KERNEL = 'extern "C" __global__ void probe(int* x) { x[blockIdx.x] = 1; }'

Install = Callable[..., Path]


def forget() -> None:
    """Look at the installed distributions again."""
    for cached in (toolchain.installed_nvrtc, toolchain.toolchain, probe.require_working):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install wheels of NVRTC or CuPy ahead of the real ones; ``libraries`` maps names of files to what they hold."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def add(distribution: str, version: str, libraries: dict[str, bytes] | None = None) -> Path:
        major, minor = version.split(".")[:2]
        if libraries is None:
            libraries = {f"libnvrtc-builtins.so.{major}.{minor}": b"no ELF", f"libnvrtc.so.{major}": b"no ELF"}
        folder = site / LAYOUTS[distribution]
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in libraries.items():
            (folder / name).write_bytes(data)
        lines = [f"{LAYOUTS[distribution]}/{name},sha256={version},9" for name in (*libraries, "libnvrtc.alt.so.9")]
        metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "RECORD").write_text("\n".join(lines))
        forget()
        return folder

    yield add
    forget()


@pytest.fixture
def broken(install: Install) -> Path:
    """An NVRTC 12.9 whose libraries are damaged, and which compiles for sm90a whatever else is installed."""
    return install("nvidia-cuda-nvrtc-cu12", "12.9.99")


def functions() -> object:
    """CuPy's module of NVRTC's functions, loaded."""
    installed = toolchain.chosen_nvrtc()
    assert installed is not None
    return nvrtc.load(installed)


# --- which one ------------------------------------------------------------------------------------------------


def test_the_oldest_one_compiles_for_every_arch(install: Install) -> None:
    install("nvidia-cuda-nvrtc-cu12", "12.9.86")
    install("nvidia-cuda-nvrtc", "13.0.88")
    assert {toolchain.toolchain("cuda", arch)["nvidia-cuda-nvrtc-cu12"] for arch in ARCHES} == {"12.9.86"}
    assert toolchain.newer_driver_note(ARCHES) is None
    chosen = toolchain.chosen_nvrtc()
    assert chosen is not None
    assert (str(chosen), chosen.library.name) == ("NVRTC 12.9.86", "libnvrtc.so.12")
    assert [chosen.min_driver(arch) for arch in ("sm90a", "sm120a")] == [12000, 12080]


def test_nvrtc_13_alone_compiles_and_says_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = toolchain.Nvrtc("nvidia-cuda-nvrtc", "13.0.88", "0", Path("libnvrtc.so.13"))
    monkeypatch.setattr(toolchain, "installed_nvrtc", lambda: (alone,))
    assert toolchain.chosen_nvrtc() is alone
    assert alone.min_driver("sm90a") == 13000
    assert toolchain.newer_driver_note(["sm80", "sm90a", "sm90a", "sm100a", "ptx80"]) == (
        "CUDA kernels are compiled by NVRTC 13.0.88 and need a driver for CUDA 13.0 (r580) or later for sm80, sm90a, "
        "sm100a; those by NVRTC 12.9 need CUDA 12.0 (r525) or later for sm80, sm90a; CUDA 12.8 (r570) or later for "
        "sm100a: pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"
    )
    assert toolchain.newer_driver_note(["ptx80"]) is None


def test_a_release_that_is_too_old_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    old = toolchain.Nvrtc("nvidia-cuda-nvrtc-cu12", "12.8.93", "0", Path("libnvrtc.so.12"))
    monkeypatch.setattr(toolchain, "installed_nvrtc", lambda: (old,))
    message = toolchain.missing("cuda", "sm90a")
    assert message is not None
    assert "NVRTC 12.9 or later is needed, found nvidia-cuda-nvrtc-cu12 12.8.93; pip install" in message


def test_keys_tell_compilers_apart(install: Install) -> None:
    plan = planned("causal", backend="cuda")
    source = render(plan)
    keys = {key_of(plan, source)}
    install("nvidia-cuda-nvrtc", "13.0.88")
    keys.add(key_of(plan, source))
    install("nvidia-cuda-nvrtc-cu12", "12.9.99")
    assert toolchain.toolchain("cuda", "sm90a")["nvidia-cuda-nvrtc-cu12"] == "12.9.99"
    keys.add(key_of(plan, source))
    assert len(keys) >= 2  # where a real 12.9 is installed, another 13 changes nothing
    assert len(keys) == 3 or str(toolchain.chosen_nvrtc()).startswith("NVRTC 12.9")


def test_keys_leave_out_the_version_of_cupy(install: Install) -> None:
    plan = planned("causal", backend="cuda")
    source, (distribution,) = render(plan), toolchain.installed_cupy()
    before = key_of(plan, source)
    install(distribution, "99.0.0")
    assert toolchain.installed_cupy() == {distribution: "99.0.0"}
    assert key_of(plan, source) == before


# --- loading it -----------------------------------------------------------------------------------------------


def in_a_process(script: str, site: str = "") -> str:
    """Output of a fresh process, without torch, whose import would load the builtins of its NVRTC."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [site]), str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = f"""
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "3"
from attngen.compile.cuda import compile_text
from attngen.errors import ToolchainError
%s
try:
    cubin, _ = compile_text("probe", {KERNEL!r}, {{}}, "sm90a")
    print(cubin[:4], "torch" in sys.modules, os.environ["OPENBLAS_NUM_THREADS"])
except ToolchainError as error:
    print(error)
"""


def test_a_process_without_torch_finds_the_builtins() -> None:
    """Builtins are found whatever the run path says: torch's import loads them, and its NVRTC may need that."""
    assert in_a_process(SCRIPT % "") == "b'\\x7fELF' False 3\n"


def test_builtins_are_loaded_before_the_library(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both before CuPy's first call."""
    module = functions()
    folder = install("nvidia-cuda-nvrtc-cu12", "12.9.99")
    loaded: list[str] = []
    monkeypatch.setattr(module, "getVersion", lambda: loaded.append("CuPy") or (12, 9))
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)
    installed = toolchain.chosen_nvrtc()
    assert installed is not None
    nvrtc.load.__wrapped__(installed)
    assert loaded == [*(str(folder / name) for name in ("libnvrtc-builtins.so.12.9", "libnvrtc.so.12")), "CuPy"]


@pytest.mark.parametrize("libraries", [{"libnvrtc.so.12": b""}, None], ids=["no builtins", "damaged"])
def test_a_library_that_cannot_be_loaded_is_named(install: Install, libraries: dict[str, bytes] | None) -> None:
    folder = install("nvidia-cuda-nvrtc-cu12", "12.9.99", libraries)
    with pytest.raises(ToolchainError) as caught:
        compile_text("probe", "", {}, "sm90a")
    message = str(caught.value)
    assert message.startswith(f"NVRTC 12.9.99 (nvidia-cuda-nvrtc-cu12) does not work: it cannot be loaded: {folder}/")
    assert message.endswith("reinstall it: pip install --force-reinstall --no-deps nvidia-cuda-nvrtc-cu12==12.9.99")


@pytest.mark.parametrize("held", [False, True], ids=["mislabelled", "held before"])
def test_a_library_of_another_release_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """Whether the wheel has it, or the process holds it, as with NVRTC 13 after an import of torch."""
    real = toolchain.chosen_nvrtc()
    assert real is not None
    nvrtc.load(real)
    folder = install("nvidia-cuda-nvrtc-cu12", "12.99.1")
    if not held:
        (folder / "libnvrtc.so.12").unlink()
        (folder / "libnvrtc.so.12").symlink_to(real.library)
    monkeypatch.setattr(nvrtc, "_keep_loaded", lambda path: None)
    release = ".".join(map(str, real.release))
    installed = toolchain.Nvrtc("nvidia-cuda-nvrtc-cu12", "12.99.1", "0", folder / "libnvrtc.so.12")
    expected = [
        f"libnvrtc.so.12 is NVRTC {release}; reinstall it",
        f"had loaded NVRTC {release} before ({real.library})",
    ]
    with pytest.raises(ToolchainError) as caught:
        nvrtc.load(installed)
    assert expected[held] in str(caught.value)


# --- what CuPy returns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm90a", "sm120a"])
def test_cubins_are_whole(arch: str) -> None:
    """The bytes that NVRTC gives a caller in C."""
    installed, module = toolchain.chosen_nvrtc(), functions()
    assert installed is not None
    program = module.createProgram(KERNEL, "probe.cu", [], [])
    module.compileProgram(program, nvrtc_options(arch))
    library, size = ctypes.CDLL(str(installed.library)), ctypes.c_size_t()
    assert library.nvrtcGetCUBINSize(ctypes.c_void_p(program), ctypes.byref(size)) == 0
    whole = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(ctypes.c_void_p(program), whole) == 0
    module.destroyProgram(program)
    assert compile_text("probe", KERNEL, {}, arch)[0] == whole.raw


def test_cubins_of_another_length_than_their_tables_say_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin, _ = compile_text("probe", KERNEL, {}, "sm90a")
    module = functions()
    monkeypatch.setattr(module, "getCUBIN", lambda program: cubin)  # as a CuPy would that drops nothing
    assert compile_text("probe", KERNEL, {}, "sm90a")[0] == cubin
    for returned, said in (
        (cubin[:-2], "lacks 2"),
        (cubin + b"\0", "lacks -1"),
        (b"", "no ELF file"),
        (b"x" * 99, "no ELF"),
    ):
        monkeypatch.setattr(module, "getCUBIN", lambda program, returned=returned: returned)
        with pytest.raises(ToolchainError, match=said):
            compile_text("probe", KERNEL, {}, "sm90a")


# --- CuPy -----------------------------------------------------------------------------------------------------


def test_two_distributions_of_cupy_are_refused(install: Install) -> None:
    ((distribution, version),) = toolchain.installed_cupy().items()
    install("cupy", "14.2.0")
    message = toolchain.missing("cuda", "sm90a")
    assert message is not None
    assert f"CUDA kernels cannot be compiled: {distribution} {version} and cupy 14.2.0 are both installed" in message
    assert f"pip uninstall --yes {distribution} cupy, then pip install 'cupy-cuda12x>=14'" in message
    with pytest.raises(ToolchainError, match="are both installed"):
        compile_text("probe", KERNEL, {}, "sm90a")
    (finding,) = doctor._cuda_compiler()
    assert (finding.state, finding.text) == ("broken", message)


def test_a_machine_without_cupy_compiles_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "CUPY", ())
    message = "CUDA kernels cannot be compiled: CuPy is not installed; pip install 'cupy-cuda12x>=14', or say"
    assert str(toolchain.missing("cuda", "sm90a")).startswith(message)
    assert toolchain.missing("triton", "sm90a") is None


def test_a_cupy_that_is_too_old_is_refused(install: Install) -> None:
    (distribution,) = toolchain.installed_cupy()
    install(distribution, "13.6.0")
    assert f"CuPy 14 or later is needed, found {distribution} 13.6.0; pip" in str(toolchain.missing("cuda", "sm90a"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fresh_workers")
def test_a_broken_cupy_stops_a_build(install: Install, tmp_path: Path) -> None:
    (distribution,) = toolchain.installed_cupy()
    install(distribution, "14.9.9", {"__init__.py": b"raise ImportError('libstdc++.so.6 is missing')"})
    (tmp_path / "mine.yaml").write_text(SPEC)
    with pytest.raises(ToolchainError) as caught:
        build(tmp_path / "mine.yaml", store=Store(tmp_path / "cache"), jobs=1)
    assert str(caught.value) == (
        f"CuPy 14.9.9 ({distribution}) does not work: ImportError: libstdc++.so.6 is missing; reinstall it: "
        f"pip install --force-reinstall --no-deps {distribution}==14.9.9"
    )


@pytest.mark.exhaustive
def test_an_nvrtc_that_cupy_does_not_find_is_an_error_of_the_toolchain() -> None:
    lost = """
from cuda import pathfinder
def lost(name):
    raise pathfinder.DynamicLibNotFoundError(f"no lib{name}.so")
pathfinder.load_nvidia_dynamic_lib = lost
"""
    said = in_a_process(SCRIPT % lost)
    assert "does not work: DynamicLibNotFoundError: no libnvrtc.so; reinstall it: pip install" in said


# --- a compiler that does not work ----------------------------------------------------------------------------

#: A kernel that the plan would also have Triton compile, and one that only Triton does.
SPEC = """
schema: 1
package: mine
arch: sm90a
kernels:
  - {variant: causal, head_dim: [64, 128]}
  - {variant: causal, head_dim: 64, dtype: fp32}
"""


@pytest.mark.exhaustive
def test_a_build_stops_with_one_error_and_no_other_backend(tmp_path: Path, broken: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPEC)
    store = Store(tmp_path / "cache")
    with pytest.raises(ToolchainError, match=r"NVRTC 12\.9\.99 .* does not work"):
        build(tmp_path / "mine.yaml", store=store, jobs=1)
    manifests = [store.read(key)[0] for key in store.all_keys()]
    assert all(artifact is not None and artifact.manifest["dtype"] == "fp32" for artifact in manifests)


@pytest.mark.exhaustive
def test_commands_say_it_once_and_exit_1(tmp_path: Path, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.yaml").write_text(SPEC)
    for command in ("build", "package"):
        result = CliRunner().invoke(group, [command, str(tmp_path / "mine.yaml"), "-j", "1"])
        assert result.exit_code == 1
        assert result.stderr.count("does not work") == 1
        assert "Traceback" not in result.output
    result = CliRunner().invoke(group, ["doctor"])
    assert result.exit_code == 1
    assert "! CUDA compiler: NVRTC 12.9.99 (nvidia-cuda-nvrtc-cu12) does not work" in result.stdout


def test_doctor_shows_cupy_nvrtc_and_the_drivers_of_its_cubins() -> None:
    (cupy,), nvrtc = toolchain.installed_cupy(), toolchain.chosen_nvrtc()
    assert nvrtc is not None
    finding, *_ = doctor._cuda_compiler()
    assert finding.state == "ok"
    assert finding.text.startswith(f"{nvrtc} ({nvrtc.distribution}), called by CuPy ")
    assert f"({cupy}), compiled a kernel in " in finding.text
    newest = {12: "CUDA 12.8 (r570)", 13: "CUDA 13.0 (r580)"}[nvrtc.release[0]]
    assert finding.text.endswith("sm100a, sm120a")
    assert newest in finding.text


@pytest.mark.exhaustive
def test_every_compile_stops_when_nvrtc_does_not_work(tmp_path: Path, broken: Path) -> None:
    """attngen.jit, verify, bench and tune compile by this function, which keeps nothing of a broken compiler."""
    kernel = kernel_spec("causal", backend="cuda")
    plan = planned("causal", backend="cuda")
    store = Store(tmp_path / "cache")
    with pytest.raises(ToolchainError, match="does not work"):
        compile_kernels([Prepared(kernel, plan, render(plan))], store=store)
    assert not (tmp_path / "cache" / "refusals").exists()


def failing(monkeypatch: pytest.MonkeyPatch, function: str, status: int) -> None:
    """Have one of CuPy's functions raise its error of a status."""
    module = functions()

    def fails(*_: object) -> None:
        raise module.NVRTCError(status)

    monkeypatch.setattr(module, function, fails)


@pytest.mark.parametrize("function", ["createProgram", "compileProgram"])
@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (6, ChoiceError, r"refused the source: NVRTC_ERROR_COMPILATION \(6\)"),
        (11, ChoiceError, r"refused the source: NVRTC_ERROR_INTERNAL_ERROR \(11\)"),
        (1, CompileError, "ran out of memory; fewer --jobs need less"),
        (7, ToolchainError, r"does not work: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE \(7\)"),
        (5, ToolchainError, r"does not work: NVRTC_ERROR_INVALID_OPTION \(5\)"),
    ],
)
def test_errors_of_sources_and_of_nvrtc_differ(
    monkeypatch: pytest.MonkeyPatch, function: str, status: int, kind: type[Exception], said: str
) -> None:
    failing(monkeypatch, function, status)
    with pytest.raises(kind, match=said) as caught:
        compile_text("probe", "", {}, "sm90a")
    assert type(caught.value) is kind


def test_a_compiler_that_refuses_everything_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "compileProgram", 6)
    probe.require_working.cache_clear()
    plan = planned("causal", backend="cuda")
    with pytest.raises(ToolchainError, match=r"NVRTC .* does not work: it cannot compile a kernel of one line for"):
        compile_source(plan, render(plan))


def crash(plan: object, source: object) -> None:
    """In place of ``compile_source``."""
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.exhaustive
def test_a_compiler_that_crashes_is_looked_at(tmp_path: Path, install: Install) -> None:
    """One that works was at odds with the plan, and the next one is tried; one that does not ends the build."""
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC.replace("[64, 128]", "64").replace("  - {variant: causal, head_dim: 64, dtype: fp32}\n", ""))
    report = build(path, store=Store(tmp_path / "cache"), jobs=1, compiler=f"{__name__}:crash")
    (failure,) = report.failures
    assert "died of SIGSEGV" in str(failure.error)
    assert "Tried before it:" in str(failure.error)
    assert issubclass(CrashError, ChoiceError)
    install("nvidia-cuda-nvrtc-cu12", "12.9.99")
    with pytest.raises(ToolchainError, match=r"NVRTC 12\.9\.99"):
        build(path, store=Store(tmp_path / "other"), jobs=1, compiler=f"{__name__}:crash")
