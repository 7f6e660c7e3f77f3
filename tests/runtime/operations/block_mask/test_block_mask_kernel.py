"""The kernel that makes block masks, run on the host through the runtime that launches it, beside a loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import attngen
from attngen.lab.verify.block_masks import try_block_mask
from attngen.runtime.operations.block_mask import kernel as block_masks
from attngen.runtime.operations.block_mask.arguments import BlockLists, check
from attngen.runtime.operations.block_mask.kernel import BLOCK_MASKS
from tests.runtime.host_kernels import HostDriver, block_masking_kernels, on_host
from tests.runtime.operations.block_mask.test_block_mask import by_hand, random_lists
from tests.sampling import sampled

#: Bytes of a pass.
PASS = 2048


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's, on which nobody looks at lists."""
    monkeypatch.setattr(BLOCK_MASKS, "check_contents", lambda call, sizes: None)
    with on_host(monkeypatch, block_masking_kernels(), BLOCK_MASKS.prepared) as driver:
        yield driver


def both(host: HostDriver, indices: Tensor, counts: Tensor | None, key_blocks: int) -> None:
    """Make a mask by the kernel and by hand."""
    launches = len(host.launches)
    mask = attngen.block_mask(indices, counts, key_blocks=key_blocks)
    assert len(host.launches) == launches + 1
    assert mask.is_contiguous()
    assert mask.view(torch.uint8).tolist() == by_hand(indices, counts, key_blocks)


@sampled(always=3, capacity=[0, 1, 33, 128, 300], key_blocks=[1, 5, 16, 64, 100, PASS - 3, PASS + 37, 3 * PASS])
def test_random_lists(host: HostDriver, capacity: int, key_blocks: int) -> None:
    indices, counts = random_lists(1, 2, 9, capacity, key_blocks=key_blocks)
    both(host, indices, counts, key_blocks)
    both(host, torch.randint(0, key_blocks, indices.shape, dtype=torch.int32), None, key_blocks)


def test_rows_begin_anywhere(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one."""
    indices, counts = random_lists(1, 1, 11, 20, key_blocks=77)
    (kernel,) = block_masking_kernels()
    call = BlockLists(indices, counts, 77)
    prepared = block_masks.prepare_on(kernel, call, check(call), host)
    assert not isinstance(prepared, str)
    for first in range(1, 17):
        memory = torch.full((11 * 77 + 32,), 7, dtype=torch.uint8)
        prepared([indices.data_ptr(), counts.data_ptr(), memory[first:].data_ptr()])
        assert memory[first:][: 11 * 77].view(1, 1, 11, 77).tolist() == by_hand(indices, counts, 77)
        assert {*memory[:first].tolist(), *memory[first + 11 * 77 :].tolist()} == {7}


def test_lists_that_are_shared_and_any_strides(host: HostDriver) -> None:
    indices, counts = random_lists(3, 2, 5, 40, key_blocks=50)
    both(host, indices, counts, 50)
    both(host, indices[:1], counts, 50)
    both(host, indices[:, 1:], counts[:1], 50)
    both(host, indices.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0), counts.mT.contiguous().mT, 50)
    both(host, indices[..., ::3], counts, 50)
    both(host, indices[:, :, :1].expand(3, 2, 5, 40), None, 50)


def test_wrong_lists_are_cut(host: HostDriver) -> None:
    indices = torch.randint(-20, 60, (2, 2, 5, 70), dtype=torch.int32)
    indices[0, 0, 0, :3] = torch.tensor([-(2**31), 2**31 - 1, 40])
    counts = torch.tensor([[[-(2**31), -1, 2**31 - 1, 71, 70]]], dtype=torch.int32).expand(2, 2, 5)
    for key_blocks in (40, PASS + 40):
        both(host, indices, None, key_blocks)
        both(host, indices, counts, key_blocks)


def test_nothing_is_launched_for_masks_without_blocks(host: HostDriver) -> None:
    indices = torch.zeros(1, 2, 3, 4, dtype=torch.int32)
    assert attngen.block_mask(indices, key_blocks=0).shape == (1, 2, 3, 0)
    assert attngen.block_mask(indices[:0], key_blocks=5).shape == (0, 2, 3, 5)
    assert not host.launches


def test_steps_of_more_than_32_bits_are_left_to_torch(host: HostDriver) -> None:
    (kernel,) = block_masking_kernels()
    far = torch.empty(2, 1, 1, 4, dtype=torch.int32, device="meta").as_strided((2, 1, 1, 4), (2**31, 4, 4, 1))
    call = BlockLists(far, None, 8)
    assert "32 bits" in str(block_masks.prepare_on(kernel, call, check(call), host))


def test_the_trial_of_the_kernel(host: HostDriver) -> None:
    (kernel,) = block_masking_kernels()
    trial = try_block_mask(kernel, "cpu", 1, small=True)
    assert all(case.ok for case in trial.results)
