"""The ptxas that assembles Triton's kernels, and the error where none may assemble those for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attngen.arch import ARCHES
from attngen.compile import assembler, toolchain
from attngen.compile.inspect import tool_release
from attngen.compile.triton import compile_function
from attngen.errors import ToolchainError

HOPPER, BLACKWELL = ARCHES["sm90a"], ARCHES["sm100a"]

#: Wheels by the releases of their ``ptxas`` and ``ptxas-blackwell``, and which of the two assembles for Hopper.
_WHEELS = [
    pytest.param((12, 8, 93), (12, 9, 86), "ptxas-blackwell", id="3.6"),
    pytest.param((12, 8, 93), (13, 1, 80), None, id="3.7"),
    pytest.param((12, 9, 86), (13, 4, 59), "ptxas", id="3.9"),
    pytest.param((12, 9, 86), None, "ptxas", id="one"),
    pytest.param((13, 1, 80), (13, 4, 59), None, id="of-cuda-13"),
    pytest.param((), (12, 9, 86), "ptxas-blackwell", id="unreadable"),
]


@pytest.fixture
def of_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the two assemblers of Triton's wheel by others of these releases, and hide NVIDIA's wheel."""

    def replace(older: tuple[int, ...], newer: tuple[int, ...] | None) -> None:
        releases = {Path("ptxas"): older} | ({} if newer is None else {Path("ptxas-blackwell"): newer})
        monkeypatch.setattr(assembler, "_of_triton", lambda: releases)
        for module in (assembler, toolchain):
            monkeypatch.setattr(module, "ptxas_of_wheel", lambda: None)

    return replace


@pytest.mark.parametrize(("older", "newer", "picked"), _WHEELS)
def test_ptxas_of_triton_for_hopper(
    of_triton: Callable[..., None], older: tuple[int, ...], newer: tuple[int, ...] | None, picked: str | None
) -> None:
    of_triton(older, newer)
    assert (assembler.unfit_assembler(HOPPER) is None) == (picked is not None)
    if picked:
        assert assembler.assembler(HOPPER) == Path(picked)


def test_hopper_without_ptxas_12_9_is_refused(of_triton: Callable[..., None]) -> None:
    """As with Triton 3.7, whose ptxas assembles kernels for other arches."""
    of_triton((12, 8, 93), (13, 1, 80))
    message = toolchain.missing("triton", "sm90a")
    assert message is not None
    assert message.startswith("Triton kernels for sm90a need ptxas 12.9, and the Triton wheel has 12.8.93 and 13.1.80")
    assert "pip install 'nvidia-cuda-nvcc-cu12>=12.9,<13'" in message
    assert assembler.assembler(ARCHES["sm80"]) == Path("ptxas")
    assert [toolchain.missing("triton", arch) for arch in ("sm80", "sm100a")] == [None, None]
    with pytest.raises(ToolchainError, match=r"sm90a need ptxas 12\.9"):
        compile_function("", "kernel", (), HOPPER, {})


def test_the_installed_triton_serves_hopper() -> None:
    path = assembler.assembler(HOPPER)
    assert path is not None
    assert (12, 9) <= tool_release(path) < (13,)


def test_triton_chooses_for_blackwell() -> None:
    assert assembler.assembler(BLACKWELL) is None


# --- NVIDIA's wheel -------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Install a version of NVIDIA's wheel, whose ptxas is a stub, ahead of a real one."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        assembler.ptxas_of_wheel.cache_clear()
        toolchain.toolchain.cache_clear()

    def add(version: str) -> Path:
        ptxas = tmp_path / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
        ptxas.parent.mkdir(parents=True)
        ptxas.write_bytes(b"no ELF")
        about = tmp_path / f"nvidia_cuda_nvcc_cu12-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cuda-nvcc-cu12\nVersion: {version}\n")
        (about / "RECORD").write_text("nvidia/cuda_nvcc/bin/ptxas,sha256=0,9\nnvidia/cuda_nvcc/nvvm/lib,sha256=0,9\n")
        forget()
        return ptxas

    yield add
    forget()


def test_ptxas_of_nvidia_goes_before_those_of_triton(install: Callable[[str], Path]) -> None:
    plain = toolchain.toolchain("triton", "sm90a")
    ptxas = install("12.9.86")
    assert [assembler.assembler(ARCHES[arch]) for arch in ("sm80", "sm90a", "sm100a")] == [ptxas, ptxas, None]
    assert assembler.unfit_assembler(HOPPER) is None
    # and a kernel's key and manifest name it
    assert toolchain.toolchain("triton", "sm90a") == {**plain, "nvidia-cuda-nvcc-cu12": "12.9.86"}
    assert "nvidia-cuda-nvcc-cu12" not in toolchain.toolchain("triton", "sm100a")


def test_an_older_ptxas_of_nvidia_is_left_out(install: Callable[[str], Path]) -> None:
    ptxas = install("12.6.85")
    assert assembler.ptxas_of_wheel() is None
    assert assembler.assembler(HOPPER) != ptxas
    assert "nvidia-cuda-nvcc-cu12" not in toolchain.toolchain("triton", "sm90a")
