"""The kernel that quantizes, run on the host through the runtime that launches it, beside plain torch: the same bits.

Its source is compiled by the host's compiler: each thread of each block runs, on the addresses, strides and sizes that
the runtime packed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.quantize import in_torch as quantize_torch
from attngen.runtime.operations.quantize import path as quantize_helper
from attngen.runtime.operations.quantize.arguments import GRANULARITIES
from tests.runtime.host_kernels import HostDriver, on_host, quantizing_kernels
from tests.runtime.operations.quantize.quantized import (
    DTYPES,
    HEAD_DIMS,
    POSITIONS,
    ROUNDED,
    a_call,
    both,
    less_their_mean,
)
from tests.sampling import few, sampled


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's. What tensors hold is not checked, as on a GPU."""
    prepared = quantize_helper.QUANTIZE.prepared
    with on_host(monkeypatch, quantizing_kernels(), prepared, unchecked=quantize_torch) as driver:
        yield driver


@sampled(always=1, layout=["bshd", "bhsd"], granularity=[*GRANULARITIES], dtype=[*DTYPES])
def test_every_granularity(host: HostDriver, dtype: torch.dtype, granularity: str | int, layout: str) -> None:
    both(a_call(dtype, granularity=granularity, layout=layout, lengths=(131, 64)))
    assert len(host.launches) == (1 if isinstance(granularity, int) else 2)


@sampled(always=5, granularity=["head", 64, "token"], dims=[*HEAD_DIMS])
def test_every_width(host: HostDriver, dims: tuple[int, int], granularity: str | int) -> None:
    both(a_call(torch.bfloat16, dims=dims, granularity=granularity, batch=1, seed=5))
    both(a_call(torch.bfloat16, dims=dims, granularity=granularity, batch=1, heads=3, kv_heads=1, hadamard=False))
    assert len(host.launches) == (2 if granularity == 64 else 4)


@few("dims", HEAD_DIMS, ids=str, always=(0, 14))
def test_keys_less_their_mean(host: HostDriver, dims: tuple[int, int]) -> None:
    given = a_call(torch.bfloat16, dims=dims, lengths=(20, 131), layout="bshd")
    for ours, theirs in zip(*less_their_mean(given), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert len(host.launches) == 4


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
@few("dtype", DTYPES, ids=str)
def test_numbers_of_all_sizes_in_both_forms_of_8_bits(
    host: HostDriver, dtype: torch.dtype, rounded: torch.dtype
) -> None:
    """Numbers of many sizes: subnormal ones, too, and those that saturate."""
    given = a_call(dtype, granularity=128, dtype=rounded, hadamard=False)
    given["k"] *= 10.0 ** torch.randint(-7, 1, given["k"].shape)
    given["v"][0, :, 0] = 0
    both(given)
    assert host.launches


@sampled(
    table_dtype=[torch.float32, torch.bfloat16, torch.float16],
    interleaved=[False, True],
    dims=[(64, 64), (96, 64), (40, 40), (128, 16)],
)
def test_every_rotation(host: HostDriver, dims: tuple[int, int], interleaved: bool, table_dtype: torch.dtype) -> None:
    """Whole rows, parts of them that end at 16 bytes or not, single pairs, and positions out of the tables."""
    halves = [half for half in (1, 3, 4, 8, 12, 16, 32, 48) if 2 * half <= dims[0]]
    for half in halves:
        both(a_call(
            torch.bfloat16, dims=dims, half=half, table_dtype=table_dtype, offsets=half % 3 == 1, batch=1,
            granularity=64, rotary_interleaved=interleaved, lengths=(POSITIONS + 20, 9), hadamard=half != 8,
        ))  # fmt: skip
    assert len(host.launches) == len(halves)


def test_signs_may_be_given(host: HostDriver) -> None:
    for dims, dtype in (((128, 64), torch.float32), ((24, 8), torch.int8)):
        signs = (2 * torch.randint(0, 2, dims[:1]) - 1).to(dtype)
        both(a_call(torch.bfloat16, dims=dims, signs=signs))
    assert len(host.launches) == 4


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_values_that_are_not_finite_stay_where_they_are(
    host: HostDriver, hadamard: bool, granularity: str | int
) -> None:
    given = a_call(torch.bfloat16, granularity=granularity, hadamard=hadamard)
    given["q"][0, 3, 1, 5] = torch.nan
    given["q"][1, 3, 1, 5] = -torch.inf
    given["k"][0, 3, 1, 9] = torch.inf
    given["v"][1, 2, 0, 60:] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    both(given)
    assert host.launches


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_but_zeros_and_tiny_numbers(host: HostDriver, granularity: str | int) -> None:
    given = a_call(torch.bfloat16, granularity=granularity)
    given["q"].zero_()
    given["k"] *= 1e-38
    both(given)
    assert host.launches


def test_tensors_lie_as_they_like(host: HostDriver) -> None:
    """Parts of larger tensors, axes in another order, sequences that are expanded."""
    whole = torch.randn(2, 50, 3 + 1 + 1, 64).bfloat16()
    given = {"q": whole[:, :, :3], "k": whole[:, :, 3:4], "v": torch.randn(1, 50, 2, 96).bfloat16()[:, :, :1, 32:]}
    both({**given, "v": given["v"].expand(2, -1, -1, -1)})
    both({**given, "v": torch.randn(50, 1, 2, 64).bfloat16().permute(2, 0, 1, 3), "granularity": "token"})
    tables = {name: torch.randn(POSITIONS, 40)[:, :16] for name in ("rotary_cos", "rotary_sin")}
    both({**given, "v": given["k"], "granularity": 64, **tables})
    assert len(host.launches) == 5


@pytest.mark.exhaustive
def test_fresh_calls_of_all_kinds(host: HostDriver) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        dims = 8 * chance.randrange(1, 33), 8 * chance.randrange(1, 33)
        kv_heads = chance.randrange(1, 3)
        both(a_call(
            chance.choice(DTYPES), dims=dims, lengths=(chance.randrange(1, 90), chance.randrange(1, 90)),
            batch=chance.randrange(1, 3), heads=kv_heads * chance.randrange(1, 3), kv_heads=kv_heads,
            half=chance.choice([0, chance.randrange(1, dims[0] // 2 + 1)]), offsets=chance.random() < 0.5,
            granularity=chance.choice(GRANULARITIES), hadamard=chance.random() < 0.7, seed=chance.randrange(2**40),
            rotary_interleaved=chance.random() < 0.5, layout=chance.choice(["bshd", "bhsd"]),
            dtype=chance.choice(ROUNDED),
        ))  # fmt: skip
    assert len(host.launches) >= 12


UNSUITED: dict[str, Any] = {
    "q begins between": lambda given: {"q": torch.randn(2 * 70 * 4 * 64 + 1).bfloat16()[1:].view(2, 70, 4, 64)},
    "rows are 8 bytes apart": lambda given: {"k": torch.randn(2, 45, 2, 68).bfloat16()[..., :64]},
    "columns are apart": lambda given: {"v": torch.randn(2, 45, 64, 2).bfloat16().transpose(2, 3)},
    "rows of 12": lambda given: {"v": torch.randn(2, 45, 2, 12).bfloat16()},
    "rows of 264": lambda given: {"v": torch.randn(2, 45, 2, 264).bfloat16()},
    "tables differ": lambda given: {"rotary_cos": given["rotary_cos"].half()},
    "columns of tables are apart": lambda given: {"rotary_cos": given["rotary_cos"].t().contiguous().t()},
    "float32": lambda given: {name: given[name].float() for name in "qkv"},
    "no query": lambda given: {"q": given["q"][:, :0]},
    "no sequence": lambda given: {name: given[name][:0] for name in "qkv"},
}


@few("how", UNSUITED, always=range(0, 999, 3))
@pytest.mark.parametrize("granularity", ["head", 64])
def test_calls_that_no_kernel_takes_run_in_torch(host: HostDriver, granularity: str | int, how: str) -> None:
    given = a_call(torch.bfloat16, half=32, granularity=granularity)
    both({**given, **UNSUITED[how](given)})
    assert not host.launches


def test_a_call_is_prepared_once(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones look at no argument again; another stride, seed or granularity is another kind."""
    checks: list[int] = []
    check = quantize_helper.check
    monkeypatch.setattr(quantize_helper, "check", lambda call: checks.append(1) or check(call))
    given = a_call(torch.bfloat16, granularity=64)
    for more in ({}, {}, {"q": given["q"] + 1}):
        both({**given, **more})
    assert len(checks) == 1
    for more in ({"seed": 1}, {"granularity": 128}, {"q": torch.cat([given["q"]] * 2, dim=3)[..., :64]}):
        both({**given, **more})
    assert len(checks) == 4
    with pytest.raises(CallError, match="layout must be one of"):
        attngen.quantize(**{**given, "layout": []})
    with pytest.raises(CallError, match="hadamard must be True or False"):
        attngen.quantize(**{**given, "hadamard": 1})  # equal to the True of earlier calls


def test_another_device_has_no_kernel(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "capability", lambda device: 80)
    both(a_call(torch.bfloat16))
    assert not host.launches
