"""The NVRTC that compiles for each arch: how it is chosen and loaded, and what happens where it does not work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen.arch import ARCHES
from attngen.cli import group
from attngen.compile import compile_source, nvrtc, probe, toolchain
from attngen.compile.cuda import compile_text
from attngen.compile.nvrtc import Library, NVRTCError
from attngen.errors import ChoiceError, CrashError, ToolchainError
from attngen.render import render
from attngen.store import Store
from attngen.store.key import key_of
from attngen.tools.build.pipeline import Prepared, build, compile_kernels
from tests.plan.specs import kernel_spec, planned

ROOT = Path(__file__).parents[2]

#: Distribution → the folder that its libraries lie in.
LAYOUTS = {"nvidia-cuda-nvrtc-cu12": "nvidia/cuda_nvrtc/lib", "nvidia-cuda-nvrtc": "nvidia/cu13/lib"}

Install = Callable[..., Path]


def forget() -> None:
    """Look at the installed distributions again."""
    for cached in (toolchain.installed_nvrtc, toolchain.toolchain, probe.require_working):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install wheels of NVRTC ahead of the real ones; ``libraries`` maps names of files to what they hold."""
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


# --- which one ------------------------------------------------------------------------------------------------


def test_the_oldest_one_compiles_up_to_hopper_and_the_newest_one_beyond(install: Install) -> None:
    install("nvidia-cuda-nvrtc-cu12", "12.9.86")
    install("nvidia-cuda-nvrtc", "13.0.88")
    chosen = {arch: str(toolchain.nvrtc_for(arch)) for arch in ("sm80", "sm90a", "sm100a", "sm120a")}
    assert chosen == {
        "sm80": "NVRTC 12.9.86", "sm90a": "NVRTC 12.9.86", "sm100a": "NVRTC 13.0.88", "sm120a": "NVRTC 13.0.88",
    }  # fmt: skip
    assert toolchain.newer_driver_note(ARCHES) is None
    hopper = toolchain.nvrtc_for("sm90a")
    assert hopper is not None
    assert (hopper.min_driver("sm90a"), hopper.library.name) == (12000, "libnvrtc.so.12")


def test_nvrtc_13_alone_compiles_for_hopper_and_says_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = toolchain.Nvrtc("nvidia-cuda-nvrtc", "13.0.88", "0", Path("libnvrtc.so.13"))
    monkeypatch.setattr(toolchain, "installed_nvrtc", lambda: (alone,))
    assert toolchain.nvrtc_for("sm90a") is alone
    assert alone.min_driver("sm90a") == 13000
    assert toolchain.newer_driver_note(["sm80", "sm90a", "sm90a", "sm100a"]) == (
        "CUDA kernels for sm80, sm90a are compiled by NVRTC 13.0.88 and need a driver for CUDA 13.0 (r580) or later; "
        "those by NVRTC 12.9 need CUDA 12.0 (r525) or later: pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"
    )
    assert toolchain.newer_driver_note(["sm100a"]) is None


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
    assert len(keys) == 3 or str(toolchain.nvrtc_for("sm90a")).startswith("NVRTC 12.9")


# --- loading it -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from attngen.compile.cuda import compile_text
cubin, _ = compile_text("probe", 'extern "C" __global__ void probe(int* x) { x[blockIdx.x] = 1; }', {}, "sm90a")
print(cubin[:4], 'torch' in sys.modules)
"""


def test_a_process_without_torch_finds_the_builtins() -> None:
    """Builtins are found whatever the run path says: torch's import loads them, and its NVRTC may need that."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("b'\\x7fELF' False\n", 0), done.stderr


def test_builtins_are_loaded_before_the_library(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install("nvidia-cuda-nvrtc-cu12", "12.9.99")
    loaded: list[str] = []

    class Recorder:
        def __init__(self, path: str) -> None:
            loaded.append(path)

        def getVersion(self) -> tuple[int, int]:
            return 12, 9

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", Recorder)
    monkeypatch.setattr(nvrtc, "Library", Recorder)
    installed = toolchain.nvrtc_for("sm90a")
    assert installed is not None
    nvrtc.load.__wrapped__(installed)
    assert loaded == [str(folder / name) for name in ("libnvrtc-builtins.so.12.9", "libnvrtc.so.12")]


@pytest.mark.parametrize("libraries", [{"libnvrtc.so.12": b""}, None], ids=["no builtins", "damaged"])
def test_a_library_that_cannot_be_loaded_is_named(install: Install, libraries: dict[str, bytes] | None) -> None:
    folder = install("nvidia-cuda-nvrtc-cu12", "12.9.99", libraries)
    with pytest.raises(ToolchainError) as caught:
        compile_text("probe", "", {}, "sm90a")
    message = str(caught.value)
    assert message.startswith(f"NVRTC 12.9.99 (nvidia-cuda-nvrtc-cu12) does not work: it cannot be loaded: {folder}/")
    assert message.endswith("reinstall it: pip install --force-reinstall --no-deps nvidia-cuda-nvrtc-cu12==12.9.99")


def test_a_library_of_another_release_than_its_wheel_says_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("nvidia-cuda-nvrtc-cu12", "12.9.99")
    real = Library.__new__(Library)
    monkeypatch.setattr(nvrtc, "Library", lambda path: real)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda path: None)
    monkeypatch.setattr(Library, "getVersion", lambda self: (12, 6))
    installed = toolchain.nvrtc_for("sm90a")
    assert installed is not None
    with pytest.raises(ToolchainError, match=r"libnvrtc.so.12 is NVRTC 12\.6; reinstall it"):
        nvrtc.load.__wrapped__(installed)


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


def test_a_build_stops_with_one_error_and_no_other_backend(tmp_path: Path, broken: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SPEC)
    store = Store(tmp_path / "cache")
    with pytest.raises(ToolchainError, match=r"NVRTC 12\.9\.99 .* does not work"):
        build(tmp_path / "mine.yaml", store=store, jobs=1)
    manifests = [store.read(key)[0] for key in store.all_keys()]
    assert all(artifact is not None and artifact.manifest["dtype"] == "fp32" for artifact in manifests)


def test_commands_say_it_once_and_exit_1(tmp_path: Path, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.yaml").write_text(SPEC)
    for command in ("build", "package"):
        result = CliRunner().invoke(group, [command, str(tmp_path / "mine.yaml"), "-j", "1"])
        assert result.exit_code == 1
        assert result.stderr.count("does not work") == 1
        assert "Traceback" not in result.output
    doctor = CliRunner().invoke(group, ["doctor"])
    assert doctor.exit_code == 1
    assert "! NVRTC: NVRTC 12.9.99 (nvidia-cuda-nvrtc-cu12) does not work" in doctor.stdout


def test_every_compile_stops_when_nvrtc_does_not_work(tmp_path: Path, broken: Path) -> None:
    """attngen.jit, verify, bench and tune compile by this function, which keeps nothing of a broken compiler."""
    kernel = kernel_spec("causal", backend="cuda")
    plan = planned("causal", backend="cuda")
    store = Store(tmp_path / "cache")
    with pytest.raises(ToolchainError, match="does not work"):
        compile_kernels([Prepared(kernel, plan, render(plan))], store=store)
    assert not (tmp_path / "cache" / "refusals").exists()


@pytest.mark.parametrize(
    ("code", "kind"), [(6, ChoiceError), (11, ChoiceError), (7, ToolchainError), (5, ToolchainError)]
)
def test_errors_of_sources_and_of_nvrtc_differ(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """COMPILATION and INTERNAL_ERROR are of a source; BUILTIN_OPERATION_FAILURE and INVALID_OPTION are not."""

    def fails(self: Library, program: object, options: object) -> None:
        raise NVRTCError("NVRTC_ERROR", code)

    monkeypatch.setattr(Library, "compileProgram", fails)
    with pytest.raises(kind, match="NVRTC_ERROR") as caught:
        compile_text("probe", "", {}, "sm90a")
    assert type(caught.value) is kind


def test_a_compiler_that_refuses_everything_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Library, program: object, options: object) -> None:
        raise NVRTCError("NVRTC_ERROR_COMPILATION", 6)

    monkeypatch.setattr(Library, "compileProgram", refuses)
    probe.require_working.cache_clear()
    plan = planned("causal", backend="cuda")
    with pytest.raises(ToolchainError, match=r"NVRTC .* does not work: it cannot compile a kernel of one line for"):
        compile_source(plan, render(plan))


def crash(plan: object, source: object) -> None:
    """In place of ``compile_source``."""
    os.kill(os.getpid(), signal.SIGSEGV)


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
