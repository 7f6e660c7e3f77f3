"""The kernel that quantizes tiles, run on the host through the runtime that launches it, beside plain torch.

Copies land at once, products are sums in float64, and there is one block; where things lie in shared
memory, who waits for whom, and what is done twice is the kernel's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import attngen
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.quantize import in_torch as quantize_torch
from attngen.runtime.operations.quantize import path as quantize_helper
from attngen.runtime.operations.quantize import tiles as quantize_tiles
from attngen.runtime.operations.quantize.arguments import Quantize, QuantizeSizes, check
from attngen.runtime.operations.quantize.kernel import prepare_on
from attngen.runtime.operations.quantize.sizes import PreparedQuantize
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import HostDriver, on_host, quantizing_kernels
from tests.runtime.operations.quantize import quantized_by_sample as sample
from tests.runtime.operations.quantize.quantized import DEFAULTS, DTYPES, a_call, alike, in_torch, less_their_mean
from tests.sampling import few

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

#: Head dims of the kernels.
DIMS = [128, 64]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's, with kernels of tiles and in general."""
    monkeypatch.setattr(quantize_tiles, "LEAST_TURNS", dict.fromkeys(quantize_tiles.LEAST_TURNS, 0))
    both_kinds = [*quantizing_kernels(), *quantizing_kernels(tiles=True)]
    with on_host(monkeypatch, both_kinds, quantize_helper.QUANTIZE.prepared, unchecked=quantize_torch) as driver:
        yield driver


def both(host: HostDriver, given: dict[str, Any], *launches: str) -> None:
    """Assert that tiles give what torch gives, in these launches."""
    host.launches.clear()
    for ours, theirs in zip(attngen.quantize(**given), in_torch(given), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        alike(ours, theirs)
    kernel = f"quantize_sm90a_bf16_d{given['q'].shape[-1]}"
    assert [name for name, _ in host.launches] == [kernel + (f"_{launch}" if launch else "") for launch in launches]


@pytest.mark.exhaustive
@few("granularity", [64, 128])
@pytest.mark.parametrize("dim", DIMS)
def test_transformed_rows(host: HostDriver, dim: int, granularity: int) -> None:
    """Odd numbers of heads, tiles that end early or have no row at all, and strides of the call."""
    given = a_call(torch.bfloat16, dims=(dim, dim), granularity=granularity, heads=3, kv_heads=1, batch=1)
    both(host, given, "")
    both(host, a_call(
        torch.bfloat16, dims=(dim, dim), granularity=granularity, heads=6, kv_heads=3, lengths=(130, 64), layout="bhsd",
        dtype=torch.float8_e5m2,
    ), "")  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounded", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_whose_sums_cancel(host: HostDriver, rounded: torch.dtype) -> None:
    """A sum is 0 in the order of products, and a tiny number below 0 where neighbours come first."""
    given = a_call(
        torch.bfloat16, dims=(128, 128), lengths=(3, 3), heads=1, kv_heads=1, batch=1, granularity=64, dtype=rounded
    )
    given["signs"] = torch.ones(128)
    given["q"].zero_()
    given["q"][0, 1, 0, :4] = torch.tensor([-(2.0**-20), 0.0, 30.0, -30.0])
    ours, theirs = attngen.quantize(**given).q, in_torch(given).q
    assert int((ours.view(torch.uint8) != theirs.view(torch.uint8)).sum()) == 64
    others = torch.zeros(640_000, dtype=torch.uint8)
    alike(*(torch.cat([t.view(torch.uint8).flatten(), others]).view(rounded) for t in (ours, theirs)))


@few("rounded", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_that_are_not_alike(rounded: torch.dtype) -> None:
    """Neighbours are, and 0 and -0; a number of another step is not, nor is NaN."""
    numbers = torch.arange(0, 0x7C, dtype=torch.uint8).view(rounded)
    theirs = numbers.repeat(100)
    for number, other in ((0, 0x80), (0x80, 0), (0x40, 0x41), (0x41, 0x40), (1, 0), (0x80, 1)):
        ours = theirs.view(torch.uint8).clone()
        wanted = ours.clone()
        ours[5], wanted[5] = number, other
        alike(ours.view(rounded), wanted.view(rounded))
    for number, other in ((0x40, 0x42), (0x42, 0x40), (0xC0, 0x40), (0x7F, 0x40), (0x40, 0x7F)):
        ours = theirs.view(torch.uint8).clone()
        wanted = ours.clone()
        ours[5], wanted[5] = number, other
        with pytest.raises(AssertionError, match="1 of 12400 differ, 1 by more than a step: "):
            alike(ours.view(rounded), wanted.view(rounded))


@pytest.mark.exhaustive
@few("granularity", ["head", "token"], often=(0,))
@pytest.mark.parametrize("dim", DIMS)
def test_sets_that_share_a_scale(host: HostDriver, dim: int, granularity: str) -> None:
    """A set of up to five tiles stays in shared memory for a turn of four groups; longer ones are read again, some
    turns later. Pairs of heads may have scales of two KV heads, of one, or of one and the next."""
    call = partial(a_call, torch.bfloat16, dims=(dim, dim), granularity=granularity)
    both(host, call(heads=3, kv_heads=3, lengths=(190, 70)), "kept")
    both(host, call(heads=3, kv_heads=1, lengths=(130, 1), layout="bhsd", dtype=torch.float8_e5m2, batch=1), "kept")
    both(host, call(heads=9, kv_heads=3, lengths=(1, 400), hadamard=False, batch=1), "kept")
    both(host, call(heads=4, kv_heads=2, lengths=(330, 600), batch=1), "kept")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", DIMS)
def test_keys_less_their_mean(host: HostDriver, dim: int) -> None:
    """In tiles that stay and in those that are read again; the last rows and heads of tiles have no key."""
    call = partial(a_call, torch.bfloat16, dims=(dim, dim), batch=1, kv_heads=3)
    for given in (call(heads=3, lengths=(70, 190), layout="bhsd"), call(heads=6, lengths=(64, 600), layout="bshd")):
        for ours, theirs in zip(*less_their_mean(given), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert {name for name, _ in host.launches} == {f"quantize_sm90a_bf16_d{dim}_kept"}


@pytest.mark.exhaustive
@few(("dim", "centered"), [(128, True), (64, False), (128, False), (64, True)], always=0, often=(0,))
def test_scales_from_a_sample(host: HostDriver, dim: int, centered: bool) -> None:
    """Numbers are what exact scales would give, but for coarser steps, and are found again if one is too large."""
    given = a_call(torch.bfloat16, dims=(dim, dim), batch=2, heads=6, kv_heads=2, lengths=(70, 330))
    given["k"] += 20 * torch.randn(2, 1, 2, dim)
    for layout in ("bshd", "bhsd"):
        tensors = [given[name] if layout == "bshd" else given[name].transpose(1, 2) for name in "qkv"]
        sample.check(*tensors, layout, centered)
        assert not sample.redone(*tensors, layout, centered)
        sample.check_groups(*tensors, layout, centered)
    given["q"][1, 64, 4, 7] = given["v"][0, 329, 1, 1] = 3e4
    for name in "qkv":
        assert sample.redone(*(given[name] for name in "qkv"), "bshd", centered)
    sample.check_groups(*(given[name] for name in "qkv"), "bshd", centered)
    given["k"][0, 5, 1, 3] = torch.nan
    assert sample.redone(*(given[name] for name in "qkv"), "bshd", centered)
    kernel = f"quantize_sm90a_bf16_d{dim}"
    assert {name for name, _ in host.launches} == {kernel + end for end in ("_sample", "_sampled", "_kept")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("granularity", ["head", "token"])
def test_values_that_are_not_finite_and_rows_of_zeros(host: HostDriver, granularity: str) -> None:
    given = a_call(torch.bfloat16, dims=(128, 128), granularity=granularity, hadamard=False)
    given["q"][0, 3, 1, 5] = torch.nan
    given["k"][1, 3, 1, 9] = -torch.inf
    given["k"][0] = 0
    given["v"][1, 2, 0, 60:64] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    given["v"][0] *= 1e-38
    both(host, given, "kept")


@pytest.mark.exhaustive
@few("granularity", [64, 128, "head", "token"], always=(1,))
@few("hadamard", [True, False])
@pytest.mark.parametrize("dim", DIMS)
def test_rotated_rows(host: HostDriver, dim: int, hadamard: bool, granularity: int | str) -> None:
    """The heads of a token share their angles. V has a launch of its own, but for scales of blocks."""
    launches = {"head": ("rotated", "rotated", "kept"), "token": ("rotated", "kept")}
    both(host, a_call(
        torch.bfloat16, dims=(dim, dim), granularity=granularity, heads=16, kv_heads=8, half=dim // 2, offsets=True,
        hadamard=hadamard, lengths=(70, 1) if granularity == 128 else (130, 64), batch=1 if hadamard else 2,
        table_dtype=torch.float32 if hadamard else torch.bfloat16,
    ), *launches.get(str(granularity), ("rotated",)))  # fmt: skip


@pytest.mark.parametrize(
    ("every", "rows", "turns"),
    [((4, 4), (256, 512), [4, 4]), ((4, 4), (8, 16), [1, 1]), ((4, 4), (64, 128), [2, 2]), ((8, 2), (64, 128), [2, 2])],
)
def test_bands_are_cut_so_that_blocks_are_even(every: tuple[int, int], rows: tuple[int, int], turns: list[int]) -> None:
    """132 blocks: 768 whole bands are six rounds, 24 bands are 96 parts, and 192 are three rounds of halves."""
    assert quantize_tiles._turns_of_bands(every, rows, 132) == turns


@pytest.mark.exhaustive
def test_short_calls_and_blocks_without_a_transform_take_the_general_kernel(
    host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of four groups has six tiles of each of these calls, and twelve of heads or of rotated rows."""
    given = a_call(torch.bfloat16, dims=(128, 128), granularity=64, batch=1, heads=2, kv_heads=2, lengths=(64, 64))
    attngen.quantize(**given, hadamard=False)
    monkeypatch.setattr(quantize_tiles, "LEAST_TURNS", {"quantize": 2, "kept": 1, "rotated": 4})
    for granularity in (64, "head", "token"):
        attngen.quantize(**{**given, "granularity": granularity})
    tables = {name: torch.ones(64, 64) for name in ("rotary_cos", "rotary_sin")}
    attngen.quantize(**given, **tables)
    general, own = "quantize_sm90a_bf16", "quantize_sm90a_bf16_d128_kept"
    assert [name for name, _ in host.launches] == [general, general, own, own, general]


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
        ({"granularity": "tensor"}, "a scale for each tensor; the kernel takes scales of blocks, heads and tokens"),
        ({"hadamard": False}, "blocks with neither transform nor rotation, for which the general kernel is as fast"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_calls_that_it_does_not_take(given: dict[str, Any], reason: str) -> None:
    kernel = next(one for one in quantizing_kernels(tiles=True) if one.head_dim_qk == 128)
    call, sizes = _checked(a_call(torch.bfloat16, **{"dims": (128, 128), "granularity": 64, **given}))
    assert prepare_on(kernel, call, sizes, HostDriver()) == reason
    general = quantizing_kernels()[0]
    assert isinstance(prepare_on(general, call, sizes, HostDriver()), PreparedQuantize)


@pytest.mark.parametrize(("own", "batch", "head_dim"), [(True, 2**29, 128), (False, (2**31 - 1) // 3, 8)])
def test_short_sequences_are_counted_by_their_tiles(own: bool, batch: int, head_dim: int) -> None:
    """A token is a tile: there are 2^31 of them or almost, with fewer rows than tiles have room for."""
    x = torch.empty(batch, 1, 1, head_dim, dtype=torch.bfloat16, device="meta")
    call, sizes = _checked({"q": x, "k": x, "v": x, "granularity": "head"})
    kernel = next(one for one in quantizing_kernels(tiles=own) if not own or one.head_dim_qk == head_dim)
    assert prepare_on(kernel, call, sizes, HostDriver()) == "more rows than 32 bits count"


def _checked(given: dict[str, Any]) -> tuple[Quantize, QuantizeSizes]:
    call = Quantize(**{name: given.get(name, DEFAULTS.get(name)) for name in Quantize._fields})
    return call, check(call)


@pytest.mark.exhaustive
@few("number", range(2 * len(DTYPES)), always=0, often=(1,))
def test_verification_finds_nothing(number: int) -> None:
    with drivers.use(HostDriver()):
        trial = try_pinned(quantizing_kernels(tiles=True)[number], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert not trial.problems, "\n".join(trial.problems)
    assert len(trial.results) == 2 * 2 * (2 + 2 * 2) + 4
