"""Block masks out of lists: the kernel against a loop, in graphs, on changing streams, and in attention."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.errors import CallError
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.block_mask.arguments import BlockLists, check
from attngen.runtime.operations.block_mask.in_torch import block_mask
from attngen.runtime.operations.block_mask.kernel import BLOCK_MASKS, PreparedBlockMask
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from tests.gpu.family import compiled_kernels, for_this_gpu
from tests.runtime.operations.block_mask.test_block_mask import by_hand

SPEC = """
schema: 1
package: block_masks
arch: [sm90a]
variants:
  blockwise: {blocks: 64, mask: "q_pos >= kv"}
kernels:
  - {variant: blockwise, head_dim: 64}
"""

Lists = tuple[Tensor, Tensor | None, int]


def to_build() -> list[Prepared]:
    return [for_this_gpu(one) for one in prepare(load_spec_text(SPEC))]


@cache
def kernels() -> list[Kernel]:
    return compiled_kernels(to_build())


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_block_mask"))
    BLOCK_MASKS.prepared.clear()
    yield
    registry.clear()


def random_lists(draw: random.Random) -> Lists:
    """Lists on the CPU: empty rows, single blocks, duplicates, in any order; what does not count, and some that does,
    is no block of keys; counts below 0 and beyond the capacity; any strides, or a batch or heads of 1."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    key_blocks = draw.choice((1, 2, 15, 16, 17, 64, 100, 333, 512, 2047, 2048, 2049, 5000))
    capacity = draw.choice((0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 500))
    rows = draw.choice((1, 2, 3)), draw.choice((1, 2, 5)), draw.choice((1, 3, 8, 21))
    indices = torch.randint(0, key_blocks, (*rows, capacity), generator=generator, dtype=torch.int32)
    kind = draw.choice(("plain", "one block", "wrong", "few blocks"))
    if kind == "one block":
        indices[:] = draw.randrange(key_blocks)
    elif kind == "few blocks":
        indices %= 3
    elif kind == "wrong":
        indices += torch.randint(-3, 4, indices.shape, generator=generator, dtype=torch.int32)
        if capacity:
            indices[0, 0, 0, 0], indices[-1, -1, -1, -1] = -(2**31), 2**31 - 1
    counts: Tensor | None = None
    if draw.random() < 0.8:
        counts = torch.randint(-2, capacity + 3, rows, generator=generator, dtype=torch.int32)
        counts[0, 0, 0], counts[-1, -1, -1] = draw.choice((0, 1, -(2**31))), draw.choice((capacity, 2**31 - 1))
        beyond = torch.arange(capacity) >= counts[..., None]
        indices = indices.masked_fill(beyond, draw.choice((-1, 2**31 - 1, 7)))
    axes = draw.sample(range(4), 4)
    back = [axes.index(axis) for axis in range(4)]
    indices = indices.permute(axes).contiguous().permute(back)
    if draw.random() < 0.3:
        indices = indices[:1] if draw.random() < 0.5 else indices[:, :1]
    elif counts is not None and draw.random() < 0.3:
        counts = counts[:1] if draw.random() < 0.5 else counts[:, :1]
    if draw.random() < 0.2:
        indices = indices.repeat_interleave(3, -1)[..., 1::3]
    return indices, counts, key_blocks


def on_gpu(lists: Lists) -> Lists:
    """The same lists on the GPU, with the same strides."""
    indices, counts, key_blocks = lists
    strided = torch.empty_strided(indices.shape, indices.stride(), dtype=torch.int32, device="cuda").copy_(indices)
    return strided, None if counts is None else counts.cuda(), key_blocks


def made(lists: Lists) -> Tensor:
    """A mask that a kernel made over poisoned memory."""
    indices, counts, key_blocks = lists
    poison = torch.full((2**20,), 0x5A, dtype=torch.uint8, device="cuda")
    del poison
    mask = attngen.block_mask(indices, counts, key_blocks=key_blocks)
    assert all(isinstance(one, PreparedBlockMask) for one in BLOCK_MASKS.prepared.values())
    return mask


def expected(lists: Lists) -> Tensor:
    """The mask by a loop."""
    return torch.tensor(by_hand(*lists), dtype=torch.bool)


def test_300_random_lists() -> None:
    draw = random.Random(5)
    for case in range(300):
        lists = random_lists(draw)
        mask = made(on_gpu(lists))
        assert mask.is_contiguous()
        assert torch.equal(mask.view(torch.uint8).cpu(), expected(lists).view(torch.uint8)), case


def test_large_masks_equal_torchs() -> None:
    """As of long prompts: 24 heads, lists of 64 of 512 blocks; and rows of several passes."""
    for shape, key_blocks in (((1, 24, 512, 64), 512), ((2, 3, 700, 200), 5001), ((1, 1, 5, 20000), 20000)):
        indices = torch.randint(-2, key_blocks + 2, shape, dtype=torch.int32, device="cuda")
        counts = torch.randint(-2, shape[-1] + 2, shape[:-1], dtype=torch.int32, device="cuda")
        call = BlockLists(indices, counts, key_blocks)
        assert torch.equal(made((indices, counts, key_blocks)), block_mask(call, check(call)))


def test_nothing_is_written_beside_the_mask() -> None:
    """Rows that begin anywhere, in memory of others."""
    kernel = next(one for one in kernels() if one.direction == "block_mask")
    draw = random.Random(6)
    for first in range(1, 40):
        lists = random_lists(draw)
        if not lists[0].numel():
            continue
        indices, counts, key_blocks = on_gpu(lists)
        call = BlockLists(indices, counts, key_blocks)
        sizes = check(call)
        prepared = BLOCK_MASKS.prepare(call, sizes, drivers.current())
        assert isinstance(prepared, PreparedBlockMask)
        assert prepared.label == kernel.full_name
        wanted = expected(lists).to(torch.uint8)
        memory = torch.full((wanted.numel() + 64,), 9, dtype=torch.uint8, device="cuda")
        given = 0 if counts is None else counts.data_ptr()
        prepared([indices.data_ptr(), given, memory.data_ptr() + first])
        after = memory.cpu()
        assert torch.equal(after[first : first + wanted.numel()], wanted.flatten())
        assert (after[:first] == 9).all()
        assert (after[first + wanted.numel() :] == 9).all()


def test_lists_change_between_replays_of_a_graph() -> None:
    indices = torch.zeros((2, 3, 40, 64), dtype=torch.int32, device="cuda")
    counts = torch.zeros((2, 3, 40), dtype=torch.int32, device="cuda")
    made((indices, counts, 100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = attngen.block_mask(indices, counts, key_blocks=100)
        seen = mask.sum(-1)
    for _ in range(20):
        indices.random_(-5, 105)
        counts.random_(-5, 70)
        graph.replay()
        call = BlockLists(indices, counts, 100)
        wanted = block_mask(call, check(call))
        assert torch.equal(mask, wanted)
        assert torch.equal(seen, wanted.sum(-1))


def test_streams_change() -> None:
    """Each call sees what its stream wrote before, and its reader waits for it."""
    draw, streams = random.Random(7), [torch.cuda.Stream() for _ in range(4)]
    masks = []
    for case in range(100):
        lists = random_lists(draw)
        stream = streams[case % 4] if case % 5 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            indices, counts, key_blocks = on_gpu(lists)
            masks.append((lists, attngen.block_mask(indices, counts, key_blocks=key_blocks).clone()))
    torch.cuda.synchronize()
    for lists, mask in masks:
        assert torch.equal(mask.cpu(), expected(lists))


def test_a_call_does_not_wait_for_the_gpu() -> None:
    lists = on_gpu((torch.zeros((1, 2, 3, 4), dtype=torch.int32), torch.ones((1, 2, 3), dtype=torch.int32), 5))
    made(lists)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attngen.block_mask(lists[0], lists[1], key_blocks=5)
        registry.clear()  # without a kernel, too
        attngen.block_mask(lists[0], lists[1], key_blocks=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_empty_tensors() -> None:
    lists = on_gpu((torch.zeros((2, 1, 3, 0), dtype=torch.int32), None, 5))
    assert not made(lists).any()
    for shape, key_blocks in (((0, 2, 3, 4), 5), ((1, 2, 0, 4), 5), ((1, 2, 3, 4), 0)):  # without a launch
        mask = attngen.block_mask(torch.zeros(shape, dtype=torch.int32, device="cuda"), key_blocks=key_blocks)
        assert mask.shape == (*shape[:3], key_blocks)


def test_lists_are_checked_under_debug() -> None:
    indices = torch.tensor([[[[0, 9]]]], dtype=torch.int32, device="cuda")
    with attngen.debug(), pytest.raises(CallError, match=r"indices\[0, 0, 0, 1\] is 9, but key_blocks is 4"):
        attngen.block_mask(indices, key_blocks=4)
    counts = torch.full((1, 1, 1), 3, dtype=torch.int32, device="cuda")
    with attngen.debug(), pytest.raises(CallError, match=r"counts\[0, 0, 0\] is 3; allowed: 0 to 2"):
        attngen.block_mask(indices, counts, key_blocks=10)


def test_compiled_programs_and_verify() -> None:
    draw = random.Random(8)
    program = torch.compile(lambda a, b, n: ~attngen.block_mask(a, b, key_blocks=n), fullgraph=True, dynamic=True)
    for key_blocks in (100, 130):
        indices = torch.randint(0, key_blocks, (2, 2, 9, 30), dtype=torch.int32)
        counts = torch.randint(0, 31, (2, 2, 9), dtype=torch.int32)
        mask = program(indices.cuda(), counts.cuda(), key_blocks)
        assert torch.equal(~mask.cpu(), expected((indices, counts, key_blocks)))
    kernel = next(one for one in kernels() if one.direction == "block_mask")
    trial = try_pinned(kernel, torch.device("cuda"), draw.randrange(1000), small=False)
    assert all(result.ok for result in trial.results), [one.describe() for one in trial.results if not one.ok]


def test_attention_over_lists() -> None:
    """New lists at each call, beside the reference on the CPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the spec is for Hopper")
    q, k, v = torch.randn(3, 2, 700, 4, 64, device="cuda", dtype=torch.bfloat16)
    for seed in range(3):
        torch.manual_seed(seed)
        indices = torch.randint(0, 11, (2, 4, 11, 5), dtype=torch.int32, device="cuda")
        counts = torch.randint(0, 6, (2, 4, 11), dtype=torch.int32, device="cuda")
        out = attngen.attention(
            q, k, v, variant="blockwise", block_mask=attngen.block_mask(indices, counts, key_blocks=11)
        )
        wanted = attngen.attention(
            *(x.double().cpu() for x in (q, k, v)), variant="blockwise",
            block_mask=attngen.block_mask(indices.cpu(), counts.cpu(), key_blocks=11),
        )  # fmt: skip
        assert (out.cpu().double() - wanted).abs().max() < 2e-2
