"""Kernels whose blocks take tile after tile: their grid, and the counter that a launch hands to them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import attngen
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.device import counters
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.pinned import Buffers, Pinned
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import FakeDriver, kernel_of, main_of, manifest_of, variant

MULTIPROCESSORS = 132


def persistent_kernel(**fields: Any) -> Kernel:
    """Return a kernel as CUDA builds write it, with a counter among its parameters."""
    manifest = manifest_of(variant(), **fields)
    row = {"name": "tile_counter", "kind": "pointer", "type": "*u32", "of": "tile_counter", "axis": None}
    main_of(manifest)["parameters"].insert(0, row | {"divisibility": 4})
    main_of(manifest)["persistent"] = True
    return kernel_of({**manifest, "backend": "cuda"})


def tensors(batch: int = 1, seqlen: int = 64, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, seqlen, heads, 64).to(torch.bfloat16) for _ in range(3))
    return q, k, v


@pytest.fixture(autouse=True)
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counters yet, and nothing recorded."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_COUNTERS", {})
    monkeypatch.setattr(counters, "_SPARE", {})


def counter_of(gpu: FakeDriver, launch: int = -1) -> int:
    address = gpu.launches[launch].values["tile_counter_ptr"]
    assert isinstance(address, int)
    return address


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen"), [(1, 2, 64), (3, 4, 100), (11, 12, 64), (19, 7, 64), (4, 40, 70)]
)
def test_no_more_blocks_than_run_at_once(gpu: FakeDriver, batch: int, heads: int, seqlen: int) -> None:
    registry.add(package_of_kernels([persistent_kernel()], "memory"))
    attngen.attention(*tensors(batch, seqlen, heads), variant="causal")
    tiles = batch * heads * -(-seqlen // 64)
    assert gpu.launches[-1].grid == min(tiles, MULTIPROCESSORS)


def test_other_kernels_have_a_block_for_each_tile_and_no_counter(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel_of(manifest_of(variant()))], "memory"))
    attngen.attention(*tensors(16, 64, 16), variant="causal")
    assert gpu.launches[-1].grid == 256 > MULTIPROCESSORS
    assert "tile_counter_ptr" not in gpu.launches[-1].values
    assert not gpu.cleared


def test_the_counter_of_the_stream_reaches_the_kernel(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([persistent_kernel()], "memory"))
    for _ in range(3):
        attngen.attention(*tensors(), variant="causal")
    ((device, counter),) = gpu.cleared  # one allocation, in the memory of the device of the call
    assert device == 0
    assert {counter_of(gpu, i) for i in range(3)} == {ctypes.addressof(counter)}
    assert counter.raw == bytes(4)


def test_each_stream_has_a_counter_of_its_own(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.add(package_of_kernels([persistent_kernel()], "memory"))
    addresses = []
    for stream in (0, 7, 0, 9, 7):
        monkeypatch.setattr(gpu, "stream", lambda device, stream=stream: stream)
        attngen.attention(*tensors(), variant="causal")
        addresses.append(counter_of(gpu))
    assert addresses[0] == addresses[2]
    assert addresses[1] == addresses[4]
    assert len(set(addresses)) == 3


def test_each_device_has_counters_of_its_own(gpu: FakeDriver) -> None:
    assert counters.address(7, 0) == counters.address(7, 0) != counters.address(7, 1)


def test_each_captured_launch_has_a_counter_that_no_replay_clears(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(package_of_kernels([persistent_kernel()], "memory"))
    monkeypatch.setattr(gpu, "stream", lambda device: 7)  # the default stream cannot record
    attngen.attention(*tensors(), variant="causal")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kept = counters._COUNTERS.copy()
    for _ in range(3):
        attngen.attention(*tensors(), variant="causal")
    assert len({counter_of(gpu, i) for i in range(4)}) == 4
    assert len(gpu.launches) == 4  # no launch more, as one that clears would be
    assert kept == counters._COUNTERS


def test_a_pinned_launch_takes_the_counter_of_its_stream(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = persistent_kernel()
    q, k, v = tensors(16, 64, 16)
    call = bind(
        kernel.variant, q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd", arguments={}
    )
    pinned = Pinned(kernel, call, Buffers(q, k, v, torch.empty_like(q)))
    addresses = []
    for stream in (5, 6, 5):
        monkeypatch.setattr(gpu, "stream", lambda device, stream=stream: stream)
        pinned()
        addresses.append(counter_of(gpu))
    assert gpu.launches[-1].grid == MULTIPROCESSORS
    assert addresses[0] == addresses[2] == counters.address(5, 0)
    assert addresses[1] == counters.address(6, 0) != addresses[0]
