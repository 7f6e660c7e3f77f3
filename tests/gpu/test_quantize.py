"""Quantizing on the GPU: the kernel beside plain torch, bit for bit, and as a part of programs and graphs.

Both add up in one order, but where matrix products transform rows, so that scales agree to 1e-6; a sum, a product or a
division that is rounded otherwise may turn a tie, so that numbers of 8 bits may be neighbours, rarely.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared
from attngen.errors import CallError
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize import path as quantize_helper
from attngen.runtime.operations.quantize import sampled as quantize_sampled
from attngen.runtime.operations.quantize import tiles as quantize_tiles
from attngen.runtime.operations.quantize.arguments import GRANULARITIES
from attngen.runtime.operations.quantize.call import Quantized
from attngen.runtime.operations.quantize.sizes import PreparedQuantize
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.gpu.family import arch_here, compiled_kernels
from tests.runtime.host_kernels import prepared_quantizers
from tests.runtime.operations.quantize import quantized
from tests.runtime.operations.quantize import quantized_by_sample as by_sample
from tests.runtime.operations.quantize.quantized import (
    DTYPES,
    HEAD_DIMS,
    POSITIONS,
    ROUNDED,
    a_call,
    in_torch,
    less_their_mean,
)

TRIALS = 200


def to_build() -> list[Prepared]:
    """The kernels of both dtypes, those of tiles last."""
    arch = arch_here()
    if arch.capability < 89:
        return []
    return [*prepared_quantizers(arch.name), *prepared_quantizers(arch.name, tiles=True)]


@cache
def kernels() -> list[Kernel]:
    """Compile the kernels for the GPU that is here."""
    wanted = to_build()
    if not wanted:
        pytest.skip(f"{arch_here().name} does not round to 8 bits")
    return compiled_kernels(wanted)


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_quantize"))
    quantize_helper.QUANTIZE.prepared.clear()
    quantize_sampled.SAMPLED.prepared.clear()
    torch.manual_seed(6)
    yield
    registry.clear()


def launched() -> bool:
    """Whether a kernel took every call so far, and there was one."""
    prepared = list(quantize_helper.QUANTIZE.prepared.values())
    return bool(prepared) and all(isinstance(one, PreparedQuantize) for one in prepared)


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in given.items()}


def alike(actual: Quantized, wanted: Quantized) -> None:
    """Assert that results are those of torch, as far as rounding lets them."""
    for ours, theirs in zip(actual, wanted, strict=True):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (theirs.shape, theirs.dtype, True)
        quantized.alike(ours, theirs)


def both(given: dict[str, Any]) -> Quantized:
    """Assert that a call gives with the kernel what it gives in torch on the same GPU, and changes no input."""
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    results = attngen.quantize(**given)
    alike(results, in_torch(given))
    for name, tensor in before.items():
        assert torch.equal(tensor.nan_to_num(), given[name].nan_to_num()), name
    return results


@pytest.mark.parametrize("rounded", ROUNDED, ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_granularity(dtype: torch.dtype, granularity: str | int, layout: str, rounded: torch.dtype) -> None:
    both(on_gpu(a_call(dtype, granularity=granularity, layout=layout, lengths=(1031, 577), heads=8, dtype=rounded)))
    assert launched()


@pytest.mark.parametrize("granularity", ["head", 64, 128, "token"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_every_width(dims: tuple[int, int], granularity: str | int) -> None:
    for hadamard in (True, False):
        both(on_gpu(a_call(torch.bfloat16, dims=dims, granularity=granularity, lengths=(300, 200), hadamard=hadamard)))
    assert launched()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("length", [300, 4100, 70000])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64)], ids=str)
def test_keys_less_their_mean(dims: tuple[int, int], length: int, layout: str) -> None:
    """By the general kernel, in tiles that stay in shared memory, and in those that are read again."""
    given = a_call(
        torch.bfloat16, dims=dims, lengths=(length // 2, length), heads=6, kv_heads=3, layout=layout, batch=1
    )
    for ours, theirs in zip(*less_their_mean(on_gpu(given)), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert launched()


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 64), (40, 40), (128, 16)], ids=str)
def test_every_rotation(dims: tuple[int, int], interleaved: bool, table_dtype: torch.dtype) -> None:
    for half in (1, 3, 4, 8, 12, 16, 32, 48):
        if 2 * half <= dims[0]:
            given = a_call(
                torch.bfloat16, dims=dims, half=half, table_dtype=table_dtype, offsets=half % 3 == 1, granularity=64,
                rotary_interleaved=interleaved, lengths=(POSITIONS + 20, 9),
            )  # fmt: skip
            both(on_gpu(given))
    assert launched()


def test_the_cpu_gives_the_same() -> None:
    for granularity in GRANULARITIES:
        given = a_call(torch.bfloat16, granularity=granularity, half=32, seed=11)
        results = attngen.quantize(**on_gpu(given))
        alike(Quantized(*(t.cpu() for t in results)), attngen.quantize(**given))
    assert launched()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_that_are_not_finite_stay_where_they_are(granularity: str | int) -> None:
    given = on_gpu(a_call(torch.bfloat16, granularity=granularity, lengths=(200, 130)))
    given["q"][0, 3, 1, 5] = torch.nan
    given["k"][1, 70, 1, 9] = torch.inf
    given["v"][1, 2, 0, 60:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device="cuda")
    results = both(given)
    assert all(scale.isfinite().all() for scale in results[3:])
    assert launched()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_and_tiny_numbers(granularity: str | int) -> None:
    given = on_gpu(a_call(torch.bfloat16, granularity=granularity))
    given["q"].zero_()
    given["k"] *= 1e-38
    results = both(given)
    assert (results.q_descale == 1).all()
    assert launched()


def test_fresh_calls_of_all_kinds() -> None:
    seed = secrets.randbelow(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(TRIALS):
        dims = 8 * chance.randrange(1, 33), 8 * chance.randrange(1, 33)
        kv_heads = chance.randrange(1, 5)
        both(on_gpu(a_call(
            chance.choice(DTYPES), dims=dims, lengths=(chance.randrange(1, 700), chance.randrange(1, 700)),
            batch=chance.randrange(1, 4), heads=kv_heads * chance.randrange(1, 5), kv_heads=kv_heads,
            half=chance.choice([0, chance.randrange(1, dims[0] // 2 + 1)]), offsets=chance.random() < 0.5,
            granularity=chance.choice(GRANULARITIES), hadamard=chance.random() < 0.7, seed=chance.randrange(2**40),
            rotary_interleaved=chance.random() < 0.5, layout=chance.choice(["bshd", "bhsd"]),
            dtype=chance.choice(ROUNDED),
        )))  # fmt: skip
    assert launched()


def by_tiles() -> bool:
    """Whether kernels of tiles took every call so far."""
    prepared = list(quantize_helper.QUANTIZE.prepared.values())
    return launched() and all(one.label.endswith(("_d64", "_d128")) for one in prepared)


@pytest.fixture
def tiles_take_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_tiles, "LEAST_TURNS", dict.fromkeys(quantize_tiles.LEAST_TURNS, 0))


#: Calls that kernels of tiles take.
OF_TILES = [64, 128, "head", "token"]


@pytest.mark.parametrize("granularity", OF_TILES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.usefixtures("tiles_take_short_calls")
def test_tiles(dim: int, granularity: int | str) -> None:
    """Whole rows of 64 and 128, whatever the number of heads; rotated, where groups of warps share them."""
    for layout in ("bshd", "bhsd"):
        for heads, kv_heads, lengths in ((8, 8, (1031, 577)), (6, 2, (70, 1)), (9, 3, (300, 129)), (16, 8, (129, 640))):
            call = partial(
                a_call, torch.bfloat16, dims=(dim, dim), granularity=granularity, layout=layout, heads=heads,
                kv_heads=kv_heads, lengths=lengths, dtype=ROUNDED[layout == "bhsd"],
            )  # fmt: skip
            both(on_gpu(call()))
            if isinstance(granularity, str):
                both(on_gpu(call(hadamard=False)))
            if kv_heads == 8:
                table_dtype = torch.float32 if layout == "bshd" else torch.bfloat16
                both(on_gpu(call(half=dim // 2, offsets=True, table_dtype=table_dtype, hadamard=lengths[0] > 129)))
    assert by_tiles()


@pytest.mark.usefixtures("tiles_take_short_calls")
def test_fresh_calls_of_tiles() -> None:
    seed = secrets.randbelow(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(TRIALS // 4):
        dim, kv_heads = chance.choice([64, 128]), chance.randrange(1, 13)
        both(on_gpu(a_call(
            chance.choice(DTYPES), dims=(dim, dim), lengths=(chance.randrange(1, 700), chance.randrange(1, 700)),
            batch=chance.randrange(1, 4), heads=kv_heads * chance.randrange(1, 4), kv_heads=kv_heads,
            half=chance.choice([0, dim // 2]), offsets=chance.random() < 0.5, granularity=chance.choice(OF_TILES),
            hadamard=chance.random() < 0.8, seed=chance.randrange(2**40), layout=chance.choice(["bshd", "bhsd"]),
            dtype=chance.choice(ROUNDED),
        )))  # fmt: skip
    assert launched()


def rounds_by_a_sample() -> bool:
    """Whether kernels took scales from samples in every such call so far, and there was one."""
    prepared = list(quantize_sampled.SAMPLED.prepared.values())
    return bool(prepared) and all(isinstance(one, quantize_sampled.PreparedSampled) for one in prepared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.usefixtures("tiles_take_short_calls")
def test_scales_from_a_sample(dim: int, dtype: torch.dtype) -> None:
    """Rounded once where no number is too large, else found again with the scales of the largest numbers."""
    for layout in ("bshd", "bhsd"):
        for heads, kv_heads, lengths in (
            (8, 8, (1031, 577)),
            (6, 2, (70, 1)),
            (9, 3, (300, 5129)),
            (16, 1, (129, 640)),
        ):
            given = on_gpu(
                a_call(dtype, dims=(dim, dim), heads=heads, kv_heads=kv_heads, lengths=lengths, layout=layout)
            )
            for name in "qkv":  # without far outliers
                given[name].normal_(std=8.0)
            given["k"] += 5
            call = given["q"], given["k"], given["v"], layout
            for centered in (True, False):
                if lengths[1] > 1 or not centered:
                    by_sample.check(*call, centered)
                by_sample.check_groups(*call, centered)
                if lengths[1] > 1:
                    assert not by_sample.redone(*call, centered)
                    given["v"].view(-1)[-3] = 3e4
                    assert by_sample.redone(*call, centered)
                    by_sample.check_groups(*call, centered)
                    given["v"].view(-1)[-3] = 1
    assert rounds_by_a_sample()


@pytest.mark.usefixtures("tiles_take_short_calls")
def test_samples_in_a_graph() -> None:
    """Captured once, replayed with other numbers: with some that are too large, and without."""
    q, k, v = (torch.randn(2, 1300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    by_sample.check(q, k, v, "bshd", True)  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [by_sample.quantized(q, k, v, "bshd", True) for _ in range(2)]
    for far in (0.0, 3e4, float("nan"), 0.0):
        for x in (q, k, v):
            x.normal_()
        q[1, 701, 2, 5] += far  # not in the sample
        graph.replay()
        wanted = by_sample.quantized(q, k, v, "bshd", True)
        for one in results:
            for ours, theirs in zip(one, wanted, strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert by_sample.redone(q, k, v, "bshd", True) is (far != 0)
    assert rounds_by_a_sample()


@pytest.mark.parametrize("dim", [64, 128])
def test_sets_that_are_too_long_to_stay_are_read_again(dim: int) -> None:
    """More tiles share a scale than a GPU has groups of warps; and heads share scales of which all their tiles stay."""
    for heads, kv_heads, lengths in ((2, 2, (70000, 40000)), (16, 2, (17000, 5000))):
        both(on_gpu(a_call(
            torch.bfloat16, dims=(dim, dim), granularity="head", lengths=lengths, heads=heads, kv_heads=kv_heads,
            batch=1,
        )))  # fmt: skip
    assert by_tiles()


def test_blocks_that_wait_for_each_other_need_not_wait_for_another_call() -> None:
    given = [on_gpu(a_call(torch.bfloat16, dims=(128, 128), lengths=(9000, 9000), heads=8, kv_heads=8))] * 2
    wanted = attngen.quantize(**given[0])
    assert by_tiles()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    results = []
    for _ in range(20):
        for call, stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(attngen.quantize(**call))
    torch.cuda.synchronize()
    for one in results:
        for ours, theirs in zip(one, wanted, strict=True):
            assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("granularity", OF_TILES)
@pytest.mark.usefixtures("tiles_take_short_calls")
def test_short_calls_of_tiles_in_a_graph(granularity: int | str, rotated: bool) -> None:
    """Several calls, replayed with other numbers: each finds its maxima anew."""
    given = on_gpu(a_call(
        torch.bfloat16, dims=(128, 128), granularity=granularity, lengths=(300, 200), heads=8, kv_heads=8,
        half=64 if rotated else 0,
    ))  # fmt: skip
    attngen.quantize(**given)  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attngen.quantize(**given) for _ in range(4)]
    for size in (8.0, 1.0, 0.25):
        for name in "qkv":
            given[name].normal_(std=size)
        graph.replay()
        for one in results:
            alike(one, in_torch(given))
    assert by_tiles()


def test_long_calls_have_tiles() -> None:
    shape = 2, 16384, 16, 128
    given = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in "qkv"}
    for granularity in OF_TILES:
        both({**given, "granularity": granularity, "hadamard": True})
    assert by_tiles()
    both({**given, "granularity": 64, "hadamard": False})
    assert not by_tiles()


@pytest.mark.alone
def test_more_elements_than_31_bits_count() -> None:
    q = torch.zeros(1, 2**19 + 3, 33, 128, device="cuda", dtype=torch.bfloat16)
    q[0, -1, -1, 3] = 7
    results = attngen.quantize(q, q[:, :64, :1], q[:, :64, :1], granularity=128, hadamard=False)
    assert results.q.flatten()[-128 + 3].float() == 448
    assert int((results.q.view(torch.int8) != 0).sum()) == 1
    assert float(results.q_descale[0, -1, -1]) == 7 / 448
    assert launched()


@pytest.mark.parametrize("number", range(6))  # two dtypes, in general and for two head dims
def test_verify_finds_nothing(number: int) -> None:
    trial = try_pinned(kernels()[number], torch.device("cuda"), secrets.randbelow(2**31), small=False)
    assert not trial.problems, "\n".join(trial.problems)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_graph_stays_right(granularity: str | int) -> None:
    """Captured once, replayed with other numbers: maxima begin at 0 at each replay."""
    given = on_gpu(a_call(torch.bfloat16, granularity=granularity, half=16))
    attngen.quantize(**given)  # loads it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attngen.quantize(**given)
    for size in (8.0, 1.0, 0.25):
        for name in "qkv":
            given[name].normal_(std=size)
        graph.replay()
        alike(results, in_torch(given))
    assert launched()


def test_a_first_call_may_be_captured() -> None:
    given = on_gpu(a_call(torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attngen.quantize(**given)
    graph.replay()
    alike(results, in_torch(given))


def test_same_numbers_same_bits() -> None:
    given = on_gpu(a_call(torch.bfloat16, lengths=(4096, 4096), heads=16, kv_heads=16, dims=(128, 128)))
    first = attngen.quantize(**given)
    for _ in range(20):
        for ours, wanted in zip(attngen.quantize(**given), first, strict=True):
            assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


def test_a_compiled_program_keeps_it_as_one_operator() -> None:
    given = on_gpu(a_call(torch.bfloat16, half=16, granularity=64))

    def program(given: dict[str, Any]) -> tuple[Tensor, ...]:
        results = attngen.quantize(**{**given, "q": given["q"] * 2})
        return results.q.float() + 1, results.k, results.q_descale * 2

    compiled = torch.compile(program, fullgraph=True)
    for ours, wanted in zip(compiled(given), program(given), strict=True):
        torch.testing.assert_close(ours.float(), wanted.float())
    assert launched()
    torch.library.opcheck(
        torch.ops.attngen.qkv__quantize.default,
        (given["q"], given["k"], given["v"], "head", True, None, 3, "bshd", None, None, False, None,
         torch.float8_e4m3fn),
    )  # fmt: skip


def test_contents_of_tensors_are_checked_under_debug() -> None:
    given = on_gpu(a_call(torch.bfloat16, half=16, lengths=(90, 20), offsets=True))
    attngen.quantize(**given)
    with attngen.debug():
        with pytest.raises(CallError, match="token 89 of q, sequence 0, has position 96, but rotary_cos has 96"):
            attngen.quantize(**given)
        both({**given, "rotary_offsets": given["rotary_offsets"] - 7})
    assert launched()
