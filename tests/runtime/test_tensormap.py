"""Tensors that a TMA descriptor can describe, and the cache of encoded ones."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch

from attngen.runtime.device.tensormap import (
    TensorMap,
    packed,
    paged,
    reason_against,
    smem_box,
    usable_strides,
    windowed,
)
from tests.runtime.support import FakeDriver


@pytest.mark.parametrize(
    ("shape", "strides", "reason"),
    [
        ((2, 8, 4, 64), (2048, 256, 64, 1), None),
        ((2, 8, 4, 64), (2048, 64, 512, 1), None),
        ((1, 8, 4, 64), (3, 256, 64, 1), None),
        ((2, 8, 4, 64), (2048, 0, 64, 1), "q is expanded along axis 1"),
        ((2, 8, 4, 64), (2048, 260, 65, 1), "q's stride along axis 1 is 520 B, which is not a multiple of 16 B"),
        ((2, 8, 4, 64), (2**40, 256, 64, 1), "takes less than 2**40 B"),
        ((2, 8, 4, 64), (2048, 256, 64, 2), "not contiguous"),
    ],
)
def test_reasons(shape: tuple[int, ...], strides: tuple[int, ...], reason: str | None) -> None:
    error = reason_against("q", shape, strides, 2)
    assert (error is None) == (reason is None)
    assert reason is None or reason in str(error)


def test_an_axis_of_one_gets_a_legal_stride() -> None:
    assert usable_strides((1, 8, 1, 20), (3, 256, 5, 1), 2) == (24, 256, 24, 1)
    assert usable_strides((2, 8, 4, 64), (2048, 256, 64, 1), 2) == (2048, 256, 64, 1)


def test_the_box_is_cut_to_the_swizzle() -> None:
    assert smem_box((1, 64, 1, 128), 128, 2) == ((1, 64, 1, 64), 128)
    assert smem_box((1, 64, 1, 128), None, 2) == ((1, 64, 1, 64), 128)
    assert smem_box((1, 64, 1, 32), None, 2) == ((1, 64, 1, 32), 64)
    assert smem_box((64, 1, 8), None, 2) == ((64, 1, 8), 0)
    assert smem_box((1, 512, 1, 16), 32, 2) == ((1, 256, 1, 16), 32)


def test_descriptors_are_encoded_once_per_address() -> None:
    driver = FakeDriver()
    first = TensorMap(driver, 0, "bf16", (2, 8, 4, 64), (2048, 256, 64, 1), (1, 64, 1, 64), 128)
    other = TensorMap(driver, 0, "bf16", (2, 8, 2, 64), (2048, 256, 64, 1), (1, 64, 1, 64), 128)
    assert first.at(4096) == first.at(4096)
    assert driver.encoded == 1
    assert first.at(8192) != first.at(4096)
    assert other.at(4096) != first.at(4096)
    assert driver.encoded == 3


# --- windows --------------------------------------------------------------------------------------------------


def box(memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], base: int, at: tuple[int, ...],
        extent: tuple[int, ...]) -> torch.Tensor:  # fmt: skip
    """Result of a copy of a box: the values at its coordinates, and zeros where one is out of bounds."""
    values = torch.zeros(extent, dtype=memory.dtype)
    for place in itertools.product(*map(range, extent)):
        index = [start + step for start, step in zip(at, place, strict=True)]
        if all(0 <= i < n for i, n in zip(index, shape, strict=True)):
            values[place] = memory[base + sum(i * s for i, s in zip(index, strides, strict=True))]
    return values


@pytest.mark.parametrize("batched", [True, False])
def test_a_window_ends_where_a_sequence_ends(batched: bool) -> None:
    """A box at (row + n, window - n) brings the rows from ``row`` on, and zeros from the n-th row on."""
    rows, heads, width, window, pad = 7, 2, 4, 3, 100
    shape = (2, rows, heads, width) if batched else (rows, heads, width)
    count = math.prod(shape)
    memory = torch.full((pad + count + pad,), -1, dtype=torch.int64)  # what lies around the tensor must never be seen
    memory[pad : pad + count] = torch.arange(1, count + 1)
    values = memory[pad : pad + count].view(shape)
    strides = values.stride()
    seen, steps = windowed(shape, strides, window)
    assert len(seen) == len(shape) + 1
    base = pad - window * strides[-3]
    for row, n, head in itertools.product(range(rows), range(window + 1), range(heads)):
        if row + n > rows:
            continue  # a sequence ends inside the tensor
        outer, extent = ((1,), (1,)) if batched else ((), ())
        at = (*outer, row + n, window - n, head, 0)
        copied = box(memory, seen, steps, base, at, (*extent, 1, window, 1, width)).reshape(window, width)
        wanted = torch.zeros(window, width, dtype=torch.int64)
        wanted[:n] = (values[1] if batched else values)[row : row + n, head]
        assert torch.equal(copied, wanted), (row, n, head)


def test_a_window_with_too_many_rows_would_be_seen() -> None:
    """The same box without the window shows the neighbour's rows, so the test above can fail."""
    memory = torch.arange(1, 29)
    copied = box(memory, (7, 1, 4), (4, 4, 1), 0, (5, 0, 0), (3, 1, 4))
    assert copied[:2].all()
    assert box(memory, (7, 1, 4), (4, 4, 1), 0, (2, 0, 0), (3, 1, 4)).all()


def test_a_windowed_descriptor_starts_a_window_before_the_tensor() -> None:
    driver = FakeDriver()
    shape, strides = (2, 8, 4, 64), (2048, 256, 64, 1)
    descriptor = TensorMap(driver, 0, "bf16", shape, strides, (1, 1, 3, 1, 64), 128, window=3).at(1 << 20)
    address, rank = struct.unpack_from("<Qq", descriptor)
    extents = struct.unpack_from(f"<{rank}q", descriptor, 16)
    steps = struct.unpack_from(f"<{rank - 1}q", descriptor, 16 + 8 * rank)
    assert address == (1 << 20) - 3 * 256 * 2
    assert extents == (64, 4, 3, 9, 2)
    assert steps == (128, 512, 512, 4096)


def test_a_windowed_descriptor_of_one_row_has_a_legal_stride() -> None:
    shape, strides, extents = (1, 1, 4, 64), (3, 5, 64, 1), (1, 1, 16, 1, 64)
    descriptor = TensorMap(FakeDriver(), 0, "bf16", shape, strides, extents, 128, window=16).at(4096)
    _, rank = struct.unpack_from("<Qq", descriptor)
    assert all(step % 16 == 0 for step in struct.unpack_from(f"<{rank - 1}q", descriptor, 16 + 8 * rank))


# --- pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(("page_size", "tile"), [(6, 4), (1, 4), (8, 4), (4, 8)])
def test_a_box_of_a_page_ends_where_a_sequence_ends(rows_first: bool, page_size: int, tile: int) -> None:
    """A copy brings rows of one page, in either order of axes, and zeros from the n-th row on."""
    pages, heads, width, pad = 3, 2, 8, 200
    count = pages * page_size * heads * width
    memory = torch.full((pad + count + pad,), -1, dtype=torch.int64)
    memory[pad : pad + count] = torch.arange(1, count + 1)
    held = memory[pad : pad + count]
    values = held.view(pages, page_size, heads, width)
    if not rows_first:
        values = held.view(pages, heads, page_size, width).transpose(1, 2)
    rows = math.gcd(page_size, tile)
    shape, strides, page_box = paged(values.shape, values.stride(), (1, 1, 1, tile, width))
    assert page_box == (1, 1, 1, rows, width)
    seen, steps = windowed(shape, strides, rows, rows=-2)
    base = pad - rows * strides[-2]
    for page, first, n, head in itertools.product(
        range(pages), range(0, page_size, rows), range(1, rows + 1), range(heads)
    ):
        at = (page, head, first + n, rows - n, 0)
        copied = box(memory, seen, steps, base, at, page_box).reshape(rows, width)
        wanted = torch.zeros(rows, width, dtype=torch.int64)
        wanted[:n] = values[page, first : first + n, head]
        assert torch.equal(copied, wanted), (page, first, n, head)


# --- packed heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_packed_box_brings_the_heads_of_a_group_then_the_next_row(group: int, batched: bool) -> None:
    """Row r of a box is query r / group and head r % group, of one KV head; after the last query come zeros."""
    rows, kv_heads, width, box_rows = 7, 3, 2, 8
    heads = kv_heads * group
    shape = (2, rows, heads, width) if batched else (rows, heads, width)
    values = torch.arange(1, math.prod(shape) + 1).view(shape)
    box_shape = (1, box_rows, 1, width) if batched else (box_rows, 1, width)
    seen, steps, extent = packed(shape, values.stride(), box_shape, group)
    assert len(seen) == len(steps) == len(extent) == len(shape) + 1
    assert math.prod(extent) == box_rows * width
    queries = values[1] if batched else values
    for start, hk in itertools.product(range(0, rows, box_rows // group), range(kv_heads)):
        at = (*((1,) if batched else ()), hk, start, 0, 0)
        copied = box(values.flatten(), seen, steps, 0, at, extent).reshape(box_rows, width)
        for r in range(box_rows):
            q, h = start + r // group, hk * group + r % group
            wanted = queries[q, h] if q < rows else torch.zeros(width, dtype=torch.int64)
            assert torch.equal(copied[r], wanted), (start, hk, r)


def test_a_packed_descriptor_has_the_group_between_columns_and_rows() -> None:
    shape, strides = (2, 40, 8, 64), (20480, 512, 64, 1)
    descriptor = TensorMap(FakeDriver(), 0, "bf16", shape, strides, (1, 128, 1, 64), 128, group=4).at(1 << 20)
    address, rank = struct.unpack_from("<Qq", descriptor)
    assert address == 1 << 20
    assert struct.unpack_from(f"<{rank}q", descriptor, 16) == (64, 4, 40, 2, 2)
    assert struct.unpack_from(f"<{rank - 1}q", descriptor, 16 + 8 * rank) == (128, 1024, 512, 40960)


@pytest.mark.parametrize(
    ("shape", "strides", "group"),
    [((1, 1, 8, 64), (3, 5, 64, 1), 8), ((1, 1, 1, 64), (3, 5, 7, 1), 1), ((2, 1, 4, 64), (256, 5, 64, 1), 1)],
)
def test_a_packed_descriptor_of_one_query_has_legal_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], group: int
) -> None:
    TensorMap(FakeDriver(), 0, "bf16", shape, strides, (1, 64, 1, 64), 128, group=group).at(4096)
