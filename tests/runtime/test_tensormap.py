"""Which tensors a TMA descriptor can describe, and the cache of encoded ones."""

from __future__ import annotations

import pytest

from attngen.runtime.tensormap import TensorMap, reason_against, smem_box, usable_strides
from tests.runtime.support import FakeDriver


@pytest.mark.parametrize(
    ("shape", "strides", "reason"),
    [
        ((2, 8, 4, 64), (2048, 256, 64, 1), None),
        ((2, 8, 4, 64), (2048, 64, 512, 1), None),
        ((1, 8, 4, 64), (3, 256, 64, 1), None),
        ((2, 8, 4, 64), (2048, 0, 64, 1), "q is expanded along axis 1"),
        ((2, 8, 4, 64), (2048, 260, 65, 1), "q's stride along axis 1 is 520 B, which is no multiple of 16 B"),
        ((2, 8, 4, 64), (2**40, 256, 64, 1), "takes less than 2**40 B"),
        ((2, 8, 4, 64), (2048, 256, 64, 2), "not contiguous"),
    ],
)
def test_reasons(shape: tuple[int, ...], strides: tuple[int, ...], reason: str | None) -> None:
    found = reason_against("q", shape, strides, 2)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


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
