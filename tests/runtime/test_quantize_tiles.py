"""The kernel that quantizes tiles, run on the host through the runtime that launches it, beside plain torch.

Copies land at once, products are sums in float64, and blocks run one after the other; where things lie in shared
memory, who waits for whom, and what is done twice is the kernel's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime import dispatch, quantize_run, quantize_tiles, quantize_torch
from attngen.runtime import driver as drivers
from attngen.runtime.quantize_arguments import Quantize, Sizes, check
from attngen.runtime.quantize_kernel import prepare_on
from attngen.runtime.quantize_launch import PreparedQuantize
from attngen.runtime.registry import package_of_kernels, registry
from attngen.tools.verify.gpu import try_pinned
from tests.runtime.host_kernels import COMPILER, HostDriver, quantizing_kernels
from tests.runtime.quantized import DEFAULTS, DTYPES, a_call, alike, in_torch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

#: One kernel is compiled and run often.
DIMS = [128, pytest.param(64, marks=pytest.mark.exhaustive)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's, with kernels of tiles and in general."""
    driver = HostDriver()
    monkeypatch.setattr(dispatch, "_on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(quantize_torch, "check_contents", lambda call, sizes: None)
    registry.clear()
    registry.add(package_of_kernels([*quantizing_kernels(), *quantizing_kernels(tiles=True)], "here"))
    quantize_run._PREPARED.clear()
    monkeypatch.setattr(quantize_tiles, "LEAST_TURNS", 0)
    torch.manual_seed(8)
    with drivers.use(driver):
        yield driver
    quantize_run._PREPARED.clear()
    registry.clear()


def both(host: HostDriver, given: dict[str, Any]) -> None:
    """Assert that tiles give what torch gives, in one launch."""
    host.launches.clear()
    for ours, theirs in zip(attngen.quantize(**given), in_torch(given), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        alike(ours, theirs)
    assert [name.rpartition("_")[2] for name, _ in host.launches] == [f"d{given['q'].shape[-1]}"]


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("dim", DIMS)
def test_transformed_rows(host: HostDriver, dim: int, granularity: int) -> None:
    """Odd numbers of heads, tiles that end early or have no row at all, and strides of the call."""
    given = a_call(torch.bfloat16, dims=(dim, dim), granularity=granularity, heads=3, kv_heads=1, batch=1)
    both(host, given)
    both(host, a_call(
        torch.bfloat16, dims=(dim, dim), granularity=granularity, heads=6, kv_heads=3, lengths=(130, 64), layout="bhsd",
        dtype=torch.float8_e5m2,
    ))  # fmt: skip


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("hadamard", [True, False])
def test_rotated_rows(host: HostDriver, hadamard: bool, granularity: int) -> None:
    """The heads of a token share their angles."""
    both(host, a_call(
        torch.bfloat16, dims=(128, 128), granularity=granularity, heads=8, kv_heads=4, half=64, offsets=True,
        hadamard=hadamard, lengths=(70, 1) if granularity == 128 else (130, 64),
        table_dtype=torch.float32 if hadamard else torch.bfloat16,
    ))  # fmt: skip


def test_short_calls_and_those_without_a_transform_take_the_general_kernel(
    host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_call(torch.bfloat16, dims=(128, 128), granularity=64)
    attngen.quantize(**given, hadamard=False)
    monkeypatch.setattr(quantize_tiles, "LEAST_TURNS", 16)
    attngen.quantize(**given, hadamard=True)
    assert [name for name, _ in host.launches] == ["quantize_sm90a_bf16"] * 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dims": (128, 64)}, "head_dim 128 and 64; the kernel has 128"),
        ({"half": 32}, "only whole rows are rotated (rotary_dim = head_dim), and only with halves as partners"),
        (
            {"half": 64, "rotary_interleaved": True},
            "only whole rows are rotated (rotary_dim = head_dim), and only with halves as partners",
        ),
        ({"half": 64}, "4 groups of warps do not share bands of 4 and 2 tiles"),
        ({"granularity": "head"}, "a scale for each head; the kernel takes scales of blocks"),
        ({"hadamard": False}, "neither transform nor rotation, without which the general kernel is as fast"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_it_does_not_take(given: dict[str, Any], reason: str) -> None:
    kernel = next(one for one in quantizing_kernels(tiles=True) if one.head_dim_qk == 128)
    call, sizes = _checked(a_call(torch.bfloat16, **{"dims": (128, 128), "granularity": 64, **given}))
    assert prepare_on(kernel, call, sizes, HostDriver()) == reason
    general = quantizing_kernels()[0]
    assert isinstance(prepare_on(general, call, sizes, HostDriver()), PreparedQuantize)


def _checked(given: dict[str, Any]) -> tuple[Quantize, Sizes]:
    call = Quantize(**{name: given.get(name, DEFAULTS.get(name)) for name in Quantize.__dataclass_fields__})
    return call, check(call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(2 * len(DTYPES)))
def test_verification_finds_nothing(number: int) -> None:
    with drivers.use(HostDriver()):
        trial = try_pinned(quantizing_kernels(tiles=True)[number], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert not trial.problems, "\n".join(trial.problems)
    assert len(trial.results) == 8 + (number % 2)  # rows of 128 are rotated, too
