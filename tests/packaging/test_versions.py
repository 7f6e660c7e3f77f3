"""Runtimes and packages of other versions, architectures and drivers: what does not fit says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import LoadError
from attngen.formats import VERSION
from tests.packaging.support import on_path
from tests.runtime.support import FakeDriver
from tests.sampling import few


def change(site: Path, **entries: Any) -> Path:
    """Change entries of the index of the package, and return its folder."""
    path = site / "attngen_small/package.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return path.parent


@contextmanager
def on_fake_gpu(site: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> Iterator[ModuleType]:
    """The package by its own name, with its own runtime taking CPU tensors for those of a fake GPU."""
    with on_path(site, "attngen_small", "attngen_small._runtime.runtime.arguments.torch_state") as (
        module,
        torch_state,
    ):
        from attngen_small._runtime.runtime.device import driver as drivers  # type: ignore[import-not-found]

        monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
        with drivers.use(driver):
            yield module


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, 40, 4, 64).to(dtype)
    return q, k, v


@pytest.mark.exhaustive
def test_a_package_of_another_version_computes_the_same_as_the_reference(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeDriver()
    allowed = torch.rand(2, 40, 40) < 0.5
    with on_fake_gpu(site, monkeypatch, gpu) as package:
        for arguments in ({"variant": "causal"}, {"variant": "sliding_window", "window": 7},
                          {"variant": "allowed", "allowed": allowed}, {}):  # fmt: skip
            given = tensors()
            ours = package.attention(*given, **arguments)
            wanted = package.attention(*given, backend="reference", **arguments)
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    assert [launch.symbol.split("_d64_")[1].split("_m")[0] for launch in gpu.launches] == [
        "causal", "sliding_window", "allowed", "allowed", "full",
    ]  # fmt: skip
    assert all("sm90a" in symbol for symbol, _ in gpu.loads)


@pytest.mark.exhaustive
def test_another_architecture_is_named_with_the_one_that_is_needed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_fake_gpu(site, monkeypatch, FakeDriver(compute_capability=120)) as package:
        with pytest.raises(package.errors.NoKernelError) as caught:
            package.attention(*tensors(), variant="sliding_window", window=3)
        assert "is built for sm90a only, device 0 is sm120" in str(caught.value)
        assert "they need sm90a and a driver for CUDA 13.0 (r580) or later; this is sm120, with a" in str(caught.value)
        explained = package.explain(*tensors(), variant="sliding_window", window=3)
        assert explained.runs == "no kernel"
    with on_fake_gpu(site, monkeypatch, FakeDriver(compute_capability=86)) as package:
        assert package.explain(*tensors(), variant="causal").kernel.arch.name == "sm80"


@pytest.mark.exhaustive
def test_an_old_driver_is_named_with_the_one_that_is_needed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        on_fake_gpu(site, monkeypatch, FakeDriver(cuda_version=12040)) as package,
        pytest.raises(
            package.errors.NoKernelError,
            match=r"CUDA 13.0 \(r580\) or later, this one is for CUDA 12.4",
        ),
    ):
        package.attention(*tensors(), variant="causal")


@few(
    ("entry", "value", "message"),
    [
        ("format", 2, "has package format 2; this runtime, .*reads package format 1: update attngen, or call it by"),
        ("manifest", 4, r"has manifest format 4; .* \('import attngen_small'\), with the runtime that it carries"),
        ("schema", 2, "has spec schema 2; this runtime, of attngen .*, reads spec schema 1: update attngen"),
        ("schema", 0, "has spec schema 0; .*: build the package again, or call it by its own name"),
        ("format", None, "has package format None"),
    ],
    always=range(0, 999, 3),
)
def test_an_attngen_that_cannot_read_a_package_says_why(site: Path, entry: str, value: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        attngen.load(change(site, attngen="9.9.9", **{entry: value}))


def test_an_attngen_of_another_version_reads_what_has_its_forms(site: Path) -> None:
    assert attngen.load(change(site, attngen="9.9.9")).variants == (
        "full", "sliding_window", "allowed", "causal", "own",
    )  # fmt: skip


def test_an_architecture_of_the_future_is_named(site: Path) -> None:
    manifest = next((site / "attngen_small/kernels").glob("*full*/manifest.json"))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "arch": "sm300a"}))
    package = attngen.load(site / "attngen_small")
    with pytest.warns(UserWarning, match=f"built for sm300a, which attngen {VERSION} does not know; it knows sm80"):
        assert package.kernels("full") == ()


@pytest.mark.exhaustive
def test_files_of_two_versions_in_one_package_are_refused(site: Path) -> None:
    change(site, attngen="0.0.1")
    wanted = "packaged by attngen 0.0.1, but the runtime beside them is of attngen"
    with pytest.raises(Exception, match=wanted), on_path(site, "attngen_small"):
        pass


@few("text", ["", "[]", "{", '{"format": 1, "manifest": 3, "schema": 1}'], always=range(0, 999, 2))
def test_a_damaged_index_is_a_load_error(site: Path, text: str) -> None:
    (site / "attngen_small/package.json").write_text(text)
    with pytest.raises(LoadError, match="reinstall"):
        attngen.load(site / "attngen_small")


def test_a_damaged_cubin_is_never_launched(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = next((site / "attngen_small/kernels").glob("*sm90a*full*/kernel.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    gpu = FakeDriver()
    with (
        on_fake_gpu(site, monkeypatch, gpu) as package,
        pytest.raises(package.errors.LoadError, match="the cubin is damaged"),
    ):
        package.attention(*tensors())
    assert not gpu.launches


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    from attngen.runtime.registry.lookup import registry

    registry.clear()
    yield
    registry.clear()
