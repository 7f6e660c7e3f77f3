"""Appending to caches on the GPU: the kernel beside plain torch, bit for bit, in caches whose other rows are NaN.

A rotation is float32, rounded once: plain torch computes it so, one operation after the other.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import attngen
from attngen.build.pipeline import Prepared
from attngen.errors import CallError
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append import path as append_helper
from attngen.runtime.operations.append.arguments import Append, check
from attngen.runtime.operations.append.kernel import PreparedAppend
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.gpu.family import arch_here, compiled_kernels
from tests.runtime.host_kernels import APPENDED, prepared
from tests.runtime.operations.append.appended import BATCH, DTYPES, PLACES, UNSUITED, a_call, bits, both, on_gpu

TRIALS = 300


def to_build() -> list[Prepared]:
    return prepared(*APPENDED, arch=arch_here().name)


@cache
def kernels() -> dict[str, Kernel]:
    """Compile the kernels of all dtypes for the GPU that is here."""
    wanted = to_build()
    names = [one.plan.name.removeprefix(f"append_{one.plan.arch.name}_") for one in wanted]
    return dict(zip(names, compiled_kernels(wanted), strict=True))


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(list(kernels().values()), "tests/gpu/test_append"))
    append_helper.APPEND.prepared.clear()
    yield
    registry.clear()


def launched() -> bool:
    """Whether a kernel took every call so far, and there was one."""
    kept_calls = list(append_helper.APPEND.prepared.values())
    return bool(kept_calls) and all(isinstance(one, PreparedAppend) for one in kept_calls)


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_place(dtype: torch.dtype, where: str, packed: bool, page_layout: str) -> None:
    chance = random.Random(f"{dtype}{where}{packed}{page_layout}")
    torch.manual_seed(chance.randrange(2**31))
    for half, lost in ((0, True), (32, False), (16, True)):
        both(on_gpu(a_call(chance, where, dtype, packed=packed, page_layout=page_layout, half=half, lost=lost)))
    assert launched()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_cache_in_8_bits(dtype: torch.dtype, where: str) -> None:
    chance = random.Random(f"{dtype}{where}")
    torch.manual_seed(chance.randrange(2**31))
    granularities = ["tensor", "head", *(["page"] if where not in ("dense", "index") else [])]
    for half, scales in enumerate(granularities):
        for packed in (False, True):
            given = a_call(chance, where, dtype, half=16 * half, scales=scales, packed=packed)
            given["k"].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.nan]).to(dtype)
            both(on_gpu(given))
    assert launched()


@pytest.mark.parametrize("dims", [(64, 32), (80, 48), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_scales_of_rows_are_written(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    torch.manual_seed(7)
    for where, page_layout in (("pages", "NHD"), ("slots", "HND")):
        given = a_call(
            random.Random(3), where, dtype, dims=dims, page_layout=page_layout, half=8, kv_heads=5, scales="row"
        )
        for h, value in enumerate((0.0, 2.0**-133, torch.inf, torch.nan)):
            given["v"][..., h, :] *= value
        both(on_gpu(given), ("k_cache", "v_cache", "q_out", "k_descale", "v_descale"))
    assert launched()


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rotation(dtype: torch.dtype, interleaved: bool, table_dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    chance = random.Random(7)
    for half in (1, 2, 3, 4, 8, 10, 12, 16, 20, 32):
        given = a_call(chance, "pages", dtype, half=half, table_dtype=table_dtype, offsets=half % 3 == 1)
        both(on_gpu({**given, "rotary_interleaved": interleaved}))
    assert launched()


@pytest.mark.parametrize("dims", [(8, 8), (16, 128), (80, 40), (96, 96), (128, 128), (192, 128), (256, 256), (8, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    torch.manual_seed(5)
    for where in ("slots", "dense"):
        both(on_gpu(a_call(random.Random(2), where, dtype, dims=dims, half=dims[0] // 2, heads=5, kv_heads=1)))
    assert launched()


def test_fresh_calls_of_all_kinds() -> None:
    seed = secrets.randbelow(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(TRIALS):
        dims = tuple(8 * chance.randrange(1, 33) for _ in "kv")
        given = a_call(
            chance, chance.choice(PLACES), chance.choice(DTYPES), dims=dims,  # type: ignore[arg-type]
            packed=chance.random() < 0.5, page_layout=chance.choice(["NHD", "HND"]),
            half=chance.choice([0, chance.randrange(1, dims[0] // 2 + 1), dims[0] // 2]),
            table_dtype=chance.choice(DTYPES), heads=chance.randrange(1, 40), kv_heads=chance.randrange(1, 9),
            queries=chance.random() < 0.8, offsets=chance.random() < 0.5, lost=chance.random() < 0.5,
        )  # fmt: skip
        given["rotary_interleaved"] = chance.random() < 0.5
        if "q" in given and chance.random() < 0.5:
            given["q_out"] = given["q"]
        both(on_gpu(given))
    assert launched()


@pytest.mark.parametrize("dtype", APPENDED)
def test_verify_finds_nothing(dtype: str) -> None:
    trial = try_pinned(kernels()[dtype], torch.device("cuda"), secrets.randbelow(2**31), small=False)
    assert not trial.problems, "\n".join(trial.problems)


@pytest.mark.parametrize("how", UNSUITED)
def test_calls_that_no_kernel_takes_run_in_torch(how: str) -> None:
    given = a_call(random.Random(1), "pages", torch.bfloat16, half=32)
    both(on_gpu({**given, **UNSUITED[how](given)}))
    assert not launched()


def operations(given: dict[str, Any]) -> list[str]:
    """Return the names of torch's operations in a call, as its profiler sees them: a dispatch mode changes the call."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        attngen.append_kv(**given)
    return [event.name for event in seen.events() if event.name.startswith(("aten::", "attngen::"))]


@pytest.mark.parametrize("place", PLACES)
def test_a_call_is_its_launch_and_nothing_else(place: str) -> None:
    """No operation of torch: nothing is allocated, copied or read back. Queries without a place get new memory."""
    given = on_gpu(a_call(random.Random(1), place, torch.bfloat16, half=32))
    for turn in range(2):
        assert operations(given) == ["aten::empty"], turn
    given["q_out"] = torch.empty_like(given["q"])
    attngen.append_kv(**given)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert not operations(given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert launched()


def test_a_graph_stays_right_while_lengths_grow() -> None:
    """Captured once, replayed for eight pages: each token where it belongs, and rotated by its own position."""
    torch.manual_seed(9)
    given = on_gpu(a_call(random.Random(1), "pages", torch.bfloat16, half=32, lost=False))
    given["cache_seqlens"].zero_()
    given["q_out"] = torch.empty_like(given["q"])
    wanted = {name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items()}
    attngen.append_kv(**{name: t.clone() if isinstance(t, Tensor) else t for name, t in given.items()})  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attngen.append_kv(**given)
    for _ in range(7):
        for name in ("k", "v", "q"):
            wanted[name].copy_(given[name].normal_())
        graph.replay()
        call = Append(**{name: wanted.get(name) for name in Append._fields})
        call = call._replace(page_layout="NHD", rotary_interleaved=False)
        append_torch.append(call, check(call))
        for name in ("k_cache", "v_cache", "q_out"):
            assert torch.equal(bits(given[name]), bits(wanted[name])), name
        given["cache_seqlens"] += 3
        wanted["cache_seqlens"] += 3


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_program_keeps_it_as_one_operator(in_place: bool) -> None:
    torch.manual_seed(2)

    def program(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q = given["q"] * 2
        out = attngen.append_kv(**{**given, "q": q, **({"q_out": q} if in_place else {})})
        assert out is not None
        return out + 1, given["k_cache"].nan_to_num().sum()

    compiled = torch.compile(program, fullgraph=True)
    for turn in range(2):
        first = on_gpu(a_call(random.Random(turn), "pages", torch.bfloat16, half=32))
        second = {name: t.clone() if isinstance(t, Tensor) else t for name, t in first.items()}
        for a, b in zip(compiled(first), program(second), strict=True):
            torch.testing.assert_close(a, b)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(first[name].nan_to_num(), second[name].nan_to_num())
    assert launched()


def test_the_operator_is_as_it_says() -> None:
    given = on_gpu(a_call(random.Random(1), "pages", torch.bfloat16, half=32, lost=False))
    program = torch.compile(lambda: attngen.append_kv(**given), fullgraph=True, backend="eager")
    program()  # defines the operator
    for q, q_out in ((given["q"], torch.empty_like(given["q"])), (None, given["q"])):
        arguments = (
            given["k"], given["v"], given["k_cache"].nan_to_num(), given["v_cache"].nan_to_num(),
            given["cache_seqlens"], given["page_table"], None, None, None, "NHD", q, q_out, given["rotary_cos"],
            given["rotary_sin"], False, None,
        )  # fmt: skip
        torch.library.opcheck(torch.ops.attngen.kv__append.default, arguments)


def test_contents_of_tensors_are_checked_under_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong contents raise an error; a kernel appends right ones as without the check, and the call is not kept."""
    given = on_gpu(a_call(random.Random(1), "pages", torch.bfloat16, half=32, lost=False))
    run, launches = PreparedAppend.run, []
    monkeypatch.setattr(PreparedAppend, "run", lambda *call: launches.append(call) or run(*call))
    with attngen.debug():
        both(given)
        given["page_table"][1, 1] = 10**6
        with pytest.raises(CallError, match=f"token .* of sequence 1 has no place: page {10**6}"):
            attngen.append_kv(**given)
    assert len(launches) == 1
    assert not launched()
    assert given["k"].shape[0] == BATCH
