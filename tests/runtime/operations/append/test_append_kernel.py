"""The kernel that appends to caches, run on the host through the runtime that launches it, beside plain torch.

Its source is compiled by the host's compiler: each thread of each block runs, on the addresses, strides and sizes that
the runtime packed. Both must agree bit for bit, in everything that they may write and in everything that they may not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append import path as append_helper
from attngen.runtime.operations.append.arguments import Append, check
from attngen.runtime.registry.lookup import registry
from tests.runtime.host_kernels import HostDriver, kernels, on_host
from tests.runtime.operations.append.appended import (
    BATCH,
    DTYPES,
    PAGE_SIZE,
    PAGES,
    PLACES,
    POSITIONS,
    UNSUITED,
    a_call,
    both,
    some,
)
from tests.sampling import sampled


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's. What tensors hold is not checked, as on a GPU."""
    with on_host(monkeypatch, kernels(), append_helper.APPEND.prepared, unchecked=append_torch) as driver:
        yield driver


@sampled(always=1, page_layout=["NHD", "HND"], packed=[False, True], where=[*PLACES], dtype=[*DTYPES])
def test_every_place(host: HostDriver, dtype: torch.dtype, where: str, packed: bool, page_layout: str) -> None:
    """Tokens with a place are written, and those without write nothing."""
    chance = random.Random(f"{dtype}{where}{packed}{page_layout}")
    torch.manual_seed(chance.randrange(2**31))
    for half, lost in ((0, True), (32, False), (16, True)):
        both(a_call(chance, where, dtype, packed=packed, page_layout=page_layout, half=half, lost=lost))
    assert len(host.launches) == 3


@pytest.mark.exhaustive
@sampled(always=1, where=[*PLACES], dtype=DTYPES[:2])
def test_a_cache_in_8_bits(host: HostDriver, dtype: torch.dtype, where: str) -> None:
    """Scales of all, of heads and of pages; numbers that saturate, and NaN."""
    chance = random.Random(f"{dtype}{where}")
    torch.manual_seed(chance.randrange(2**31))
    granularities = ["tensor", "head", *(["page"] if where not in ("dense", "index") else [])]
    for half, scales in enumerate(granularities):
        given = a_call(chance, where, dtype, half=16 * half, scales=scales, packed=half == 1)
        given["k"].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.nan]).to(dtype)
        both(given)
    assert len(host.launches) == len(granularities)


SCALED = ("k_cache", "v_cache", "q_out", "k_descale", "v_descale")


@sampled(
    always=(0, 5, 11), dims=[(64, 32), (80, 48), (256, 256), (512, 512)], page_layout=["NHD", "HND"],
    where=["pages", "slots"], dtype=DTYPES[:2],
)  # fmt: skip
def test_scales_of_rows_are_written(
    host: HostDriver, dtype: torch.dtype, where: str, page_layout: str, dims: tuple[int, int]
) -> None:
    """Rows of a part of a warp, and of two; zeros, subnormal numbers, an infinity and NaN."""
    chance = random.Random(f"{dtype}{where}{dims}")
    torch.manual_seed(chance.randrange(2**31))
    given = a_call(chance, where, dtype, dims=dims, page_layout=page_layout, half=8, kv_heads=5, scales="row")
    for h, value in enumerate((0.0, 2.0**-133, torch.inf, torch.nan)):
        given["v"][..., h, :] *= value
    both(given, SCALED)
    # scales beside the rows that they are of, as in an engine's cache
    rows, flat = given["k_cache"].shape[:3], dims[0] + dims[1] + 16
    whole = torch.full((*rows, flat), 0x7F, dtype=torch.uint8)
    words = whole.view(torch.float32)
    given["k_cache"], given["v_cache"] = (
        part.view(torch.float8_e4m3fn) for part in (whole[..., : dims[0]], whole[..., dims[0] : dims[0] + dims[1]])
    )
    given["k_descale"], given["v_descale"] = words[..., sum(dims) // 4], words[..., sum(dims) // 4 + 1]
    expected, actual = whole.clone(), whole
    both_of_one(given, expected, dims)
    assert torch.equal(expected, actual)
    assert len(host.launches) == 2


def both_of_one(given: dict[str, Any], copy: Tensor, dims: tuple[int, int]) -> None:
    """Append to a cache of one tensor with the kernel, and to a copy of it in torch."""
    words = copy.view(torch.float32)
    theirs = {
        **given, "k_cache": copy[..., : dims[0]].view(torch.float8_e4m3fn),
        "v_cache": copy[..., dims[0] : sum(dims)].view(torch.float8_e4m3fn),
        "k_descale": words[..., sum(dims) // 4], "v_descale": words[..., sum(dims) // 4 + 1],
    }  # fmt: skip
    defaults = dict.fromkeys(Append._fields) | {"page_layout": "NHD", "rotary_interleaved": False}
    call = Append(**{**defaults, **theirs})
    append_torch.append(call, check(call))
    attngen.append_kv(**given)


def test_scales_of_rows_are_both_of_rows_and_no_operator_writes_them(host: HostDriver) -> None:
    given = a_call(random.Random(1), "pages", torch.bfloat16, scales="row", queries=False)
    with pytest.raises(CallError, match="v_descale must be float32 of shape .* as the other one"):
        attngen.append_kv(**{**given, "v_descale": torch.ones(())})
    with pytest.raises(CallError, match="k_descale is written, but its rows share memory"):
        attngen.append_kv(**{**given, "k_descale": torch.ones(()).expand(given["k_descale"].shape)})
    with pytest.raises(Exception, match="call it outside of them"):
        torch.compile(lambda: attngen.append_kv(**given), backend="eager", fullgraph=True)()


@pytest.mark.exhaustive
def test_scales_of_pages_are_not_taken_for_those_of_sequences(host: HostDriver) -> None:
    """Calls that differ in nothing but the rows of their scales, after the first are recognized by their tensors."""
    torch.manual_seed(6)
    for scales in ("head", "head", "head", "page", "head"):
        both(a_call(random.Random(1), "pages", torch.bfloat16, scales=scales))
    assert len(host.launches) == 5


@pytest.mark.exhaustive
@sampled(always=(2,), table_dtype=[*DTYPES], interleaved=[False, True], dtype=[*DTYPES])
def test_every_rotation(host: HostDriver, dtype: torch.dtype, interleaved: bool, table_dtype: torch.dtype) -> None:
    """Whole rows, parts of them that end at 16 bytes or not, single pairs, and positions out of the tables."""
    torch.manual_seed(4)
    chance, halves = random.Random(7), (1, 2, 3, 4, 8, 10, 12, 16, 20, 32)
    for half in halves:
        given = a_call(chance, "pages", dtype, half=half, table_dtype=table_dtype, offsets=half % 3 == 1)
        both({**given, "rotary_interleaved": interleaved})
    assert len(host.launches) == len(halves)


@sampled(
    always=(0, 3, 6),
    dims=[(8, 8), (16, 128), (80, 40), (96, 96), (128, 128), (192, 128), (256, 256), (8, 256)],
    dtype=[*DTYPES],
)
def test_every_width(host: HostDriver, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    torch.manual_seed(5)
    chance = random.Random(2)
    for where in ("slots", "dense"):
        both(a_call(chance, where, dtype, dims=dims, half=dims[0] // 2, heads=5, kv_heads=1))
    assert len(host.launches) == 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [32, 12])
def test_queries_are_rotated_in_place_and_elsewhere(host: HostDriver, half: int, interleaved: bool) -> None:
    given = a_call(random.Random(1), "pages", torch.bfloat16, half=half, heads=6) | {"rotary_interleaved": interleaved}
    both(given)
    both({**given, "q_out": torch.full((BATCH, 3, 9, 64), torch.nan).bfloat16()[:, :, 1:7]})
    both({**given, "q_out": given["q"]})
    assert len(host.launches) == 3


def test_tensors_lie_as_they_like(host: HostDriver) -> None:
    """Parts of larger tensors, axes in another order, tables with rows further apart."""
    torch.manual_seed(8)
    chance, dtype = random.Random(3), torch.bfloat16
    given = a_call(chance, "pages", dtype, half=16, queries=False)
    whole = some((BATCH, 3, 3 + 2 + 2, 64), dtype)
    given["q"], given["k"] = whole[:, :, :3], whole[:, :, 3:5]
    given["v"] = some((2, 3, BATCH, 48), dtype).permute(2, 1, 0, 3)[..., :32]
    given["k_cache"] = torch.full((2, PAGES, PAGE_SIZE, 2, 64), torch.nan).to(dtype)[1]
    given["page_table"] = torch.cat([given["page_table"], torch.full((BATCH, 5), -9)], dim=1).int()[:, :3]
    for name in ("rotary_cos", "rotary_sin"):
        given[name] = torch.cat([given[name], torch.full((POSITIONS, 7), torch.nan)], dim=1)[:, :16]
    both(given)
    slots = torch.full((3, BATCH, 2), -1)
    slots[..., 0] = torch.randperm(PAGES * PAGE_SIZE)[:12].view(3, BATCH)
    for name in ("page_table", "cache_seqlens", "rotary_cos", "rotary_sin", "q"):
        del given[name]
    both({**given, "slots": slots[..., 0].t()})
    assert len(host.launches) == 2


@pytest.mark.parametrize("how", UNSUITED)
def test_calls_that_no_kernel_takes_run_in_torch(host: HostDriver, how: str) -> None:
    given = a_call(random.Random(1), "pages", torch.bfloat16, half=32)
    both({**given, **UNSUITED[how](given)})
    assert not host.launches


def test_dtypes_and_devices_without_a_kernel_run_in_torch(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = a_call(random.Random(1), "dense", torch.float32)
    doubles = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in given.items()}
    attngen.append_kv(**doubles)
    monkeypatch.setattr(host, "capability", lambda device: 80)
    registry.generation += 1
    both(given)
    assert not host.launches
    monkeypatch.undo()


def test_a_call_is_prepared_once(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones look at no argument again, and see what changed in memory; another stride is another kind."""
    checks: list[int] = []
    monkeypatch.setattr(append_helper, "check", lambda call: checks.append(1) or check(call))
    given = a_call(random.Random(1), "pages", torch.bfloat16, half=32, lost=False)
    both(given)
    given["cache_seqlens"] += 1
    both(given)
    both({**given, "k": some((BATCH, 3, 2, 64), torch.bfloat16)})
    assert len(checks) == 1
    both({**given, "k": some((BATCH, 3, 4, 64), torch.bfloat16)[:, :, ::2]})
    assert len(checks) == 2
    assert len(host.launches) == 4
    with pytest.raises(CallError, match="page_layout must be one of"):
        attngen.append_kv(**{**given, "page_layout": []})


def _fewer(given: dict[str, Any], sequences: int, columns: int) -> dict[str, Any]:
    """The call of some of the sequences of another one, and of some columns of its page table."""
    of_sequences = ("k", "v", "q", "slots", "cache_seqlens", "page_table", "batch_index", "rotary_offsets")
    less = {name: given[name][:sequences] for name in of_sequences if name in given}
    if "cu_seqlens" in given:
        starts = given["cu_seqlens"][: sequences + 1]
        less |= {name: given[name][: int(starts[-1]) + 1] for name in ("k", "v", "q", "slots") if name in given}
        less["cu_seqlens"] = starts
    if "page_table" in given:
        less["page_table"] = less["page_table"][:, :columns]
    for name in ("k_descale", "v_descale"):
        if name in given and given[name].dim() and given[name].shape[0] == BATCH:
            less[name] = given[name][:sequences]
    return {**given, **less}


@sampled(scales=["", "tensor", "head", "page"], packed=[False, True], where=[*PLACES])
def test_sizes_that_differ(host: HostDriver, where: str, packed: bool, scales: str) -> None:
    """Calls of one kind are prepared once."""
    if scales == "page" and where in ("dense", "index"):
        pytest.skip("no pages")
    given = a_call(random.Random(where), where, torch.bfloat16, packed=packed, half=16, lost=False, scales=scales)
    for sequences, columns in ((4, 3), (2, 2), (3, 3), (1, 1), (1, 3), (4, 2)):
        both(_fewer(given, sequences, columns))
    assert len(append_helper.APPEND.prepared) <= 3  # one sequence is another kind
    assert len(host.launches) == 6


def test_wrong_sizes_are_refused_after_right_ones(host: HostDriver) -> None:
    given = a_call(random.Random(2), "pages", torch.bfloat16, half=16, lost=False, packed=True)
    attngen.append_kv(**given)
    for name, message in (
        ("v", "both must hold the same tokens"), ("q", "both must hold the same tokens"),
        ("cache_seqlens", r"cache_seqlens must have shape \(4,\)"), ("page_table", "page_table has 3 rows"),
        ("cu_seqlens", r"cache_seqlens must have shape \(3,\)"),
    ):  # fmt: skip
        with pytest.raises(CallError, match=message):
            attngen.append_kv(**{**given, name: given[name][:-1]})
    with pytest.raises(CallError, match="q_out must be"):
        attngen.append_kv(**{**given, "q_out": given["q"][:-1].clone()})
    attngen.append_kv(**given)


def test_nothing_is_launched_for_no_token(host: HostDriver) -> None:
    cache = torch.zeros(2, 8, 1, 16)
    empty = torch.zeros(3, 0, 1, 16)
    attngen.append_kv(empty, empty, cache, cache.clone(), torch.zeros(3, dtype=torch.int32))
    assert not host.launches
