"""State kept between calls is right, and bounded: memory that moves, streams, threads, several GPUs."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.autograd import training
from attngen.runtime.cache import PREPARED_CALLS
from attngen.runtime.device import counters, tensormap
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch import chain as launch
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.registry.lookup import Package
from tests.gpu.family import same
from tests.gpu.packages import only_package

#: Persistent kernels in CUDA, which take tiles from a counter, and their backward kernels; all use TMA descriptors.
PACKAGE = "attngen_flash_attn"


pytestmark = only_package("flash_attn")


@pytest.fixture(autouse=True)
def _known(only: Package) -> None:
    """Every test of this file runs on these kernels."""


Results = tuple[Tensor, ...]


def qkv(seqlen: int, device: str = "cuda", *, batch: int = 2, heads: int = 4, dim: int = 64) -> list[Tensor]:
    """Return random q, k and v; the same numbers on each device."""
    chance = torch.Generator().manual_seed(seqlen)
    shapes = ((batch, seqlen, heads, dim), *[(batch, seqlen, heads // 2, dim)] * 2)
    return [torch.randn(shape, generator=chance).to(device, torch.bfloat16) for shape in shapes]


def forward(tensors: list[Tensor], **options: Any) -> Results:
    results = attngen.attention(*tensors, variant="causal", package=PACKAGE, return_lse=True, **options)
    assert isinstance(results, tuple)
    return results


def step(tensors: list[Tensor]) -> Results:
    """Return output, log-sum-exp, and the gradients of a forward and backward, that of q first."""
    inputs = [t.detach().requires_grad_() for t in tensors]
    out, lse = forward(inputs)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out)))


def on_cpu(results: Results) -> Results:
    return tuple(result.cpu() for result in results)


def equal(one: Results, other: Results) -> bool:
    """Whether results have the same bits, but dQ of a step, which is added up in no fixed order and so close only."""
    if len(one) != 5:
        return same(one, other)
    (*ours, dk, dv), (*theirs, other_dk, other_dv) = one, other
    dq, other_dq = ours.pop().float(), theirs.pop().float()
    far = float((dq - other_dq).abs().max()) > 4e-3 * float(dq.abs().max())
    return not far and same((*ours, dk, dv), (*theirs, other_dk, other_dv))


def test_memory_that_is_taken_again_in_other_shapes() -> None:
    """Tensors of one buffer, so that addresses come back with other shapes, strides, dtypes and offsets."""
    buffer = torch.empty(3 * 2**20, dtype=torch.bfloat16, device="cuda")
    chance = random.Random(4)
    for _ in range(200):
        batch, seqlen, heads = chance.choice([1, 2]), chance.choice([1, 64, 65, 200]), 2
        dtype, dim = chance.choice([(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 64)])
        heads_first, start = chance.random() < 0.5, 8 * chance.randrange(100)
        made = []
        for index in range(3):
            shape = (batch, heads, seqlen, dim) if heads_first else (batch, seqlen, heads, dim)
            place = buffer[start + index * 2**20 :][: batch * seqlen * heads * dim].view(dtype).view(shape)
            place.copy_(torch.randn(shape, device="cuda"))
            made.append(place.transpose(1, 2) if heads_first else place)
        fresh = [tensor.contiguous().clone() for tensor in made]
        assert equal(step(made), step(fresh)), (batch, seqlen, dim, dtype, heads_first, start)


def test_memory_that_the_allocator_hands_out_again() -> None:
    wanted = {seqlen: on_cpu(step(qkv(seqlen))) for seqlen in (1, 130, 257)}
    for turn in range(60):
        seqlen = (1, 130, 257)[turn % 3]
        if turn % 20 == 19:
            torch.cuda.empty_cache()  # addresses are unmapped, and mapped again
        assert equal(on_cpu(step(qkv(seqlen))), wanted[seqlen])


def test_caches_are_bounded() -> None:
    kernel_call.PREPARED.clear()
    tensormap._ENCODED.clear()
    launch._DESCRIBED.clear()
    rows = torch.randn(1, 5000, 2, 64, device="cuda").bfloat16()
    first = forward([rows[:, :7]] * 3)
    for start in range(4200):  # other addresses: 256 B apart
        forward([rows[:, start : start + 7]] * 3)
    for seqlen in range(1, 2300):  # other shapes
        forward([rows[:, :seqlen]] * 3)
    assert len(kernel_call.PREPARED) <= PREPARED_CALLS
    assert len(tensormap._ENCODED) <= tensormap.MAX_ENCODED
    assert len(launch._DESCRIBED) <= launch.MAX_DESCRIBED
    assert same(forward([rows[:, :7]] * 3), first)
    assert len(training._PREPARED) <= PREPARED_CALLS


def word_at(address: int) -> int:
    """Return a word of the GPU's memory."""
    from cuda.bindings import driver as cuda

    host = ctypes.c_uint32()
    (error,) = cuda.cuMemcpyDtoH(ctypes.addressof(host), address, ctypes.sizeof(host))
    assert error == cuda.CUresult.CUDA_SUCCESS
    return host.value


def test_descriptors_that_are_copied_are_those_of_the_driver() -> None:
    """Whole rows, rows that end where a sequence does, heads that share rows, and pages; at other addresses, and with
    other numbers of rows."""
    driver, chance = drivers.current(), random.Random(2)
    copied = 0
    for kind in ("rows", "window", "packed", "pages", "pages with a window") * 20:
        heads, dim = chance.choice([1, 2, 4, 8]), chance.choice([64, 128])
        row = heads * dim * chance.choice([1, 3])
        window = 128 if "window" in kind else None
        box: tuple[int, ...] = (128, 1, 64)
        shape, strides = (300, heads, dim), (row, dim, 1)
        if kind.startswith("pages"):
            shape, strides, box = (300, 16, heads, dim), (16 * row, row, dim, 1), (1, 1, 128, 64)
        if window is not None:
            box = (1, *box)

        def described(
            rows: int, shape: Any = shape, strides: Any = strides, box: Any = box, window: Any = window,
            group: Any = heads if kind == "packed" else None, in_pages: bool = kind.startswith("pages"),
        ) -> tensormap.TensorMap:  # fmt: skip
            of = (rows, *shape[1:])
            return tensormap.TensorMap(driver, 0, "bf16", of, strides, box, 128, window, group, in_pages)

        one = described(300)
        one.at(2**30)
        copied += one._pack is not None
        for _ in range(20):
            address, rows = chance.randrange(2**16, 2**43) << 4, chance.choice([2, 64, 127, 4097, 2**24])
            if kind.startswith("pages"):
                rows = 300
            tensormap._ENCODED.clear()
            assert one.at(address, 0 if rows == 300 else rows) == described(rows).at(address), (kind, address, rows)
    assert copied == 100 or torch.cuda.get_device_capability()[0] != 9


def test_many_streams() -> None:
    shapes = (1, 63, 130, 257, 900)
    inputs = [qkv(seqlen) for seqlen in shapes]
    wanted = [on_cpu(step(tensors)) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in range(48)]
    torch.cuda.synchronize()
    launched: list[tuple[int, Results]] = []
    for turn in range(3):
        for number, stream in enumerate(streams):
            index = (turn + number) % len(shapes)
            with torch.cuda.stream(stream):
                launched.append((index, step(inputs[index])))
    torch.cuda.synchronize()
    assert all(equal(on_cpu(results), wanted[index]) for index, results in launched)
    assert [word_at(address) for address in counters._COUNTERS.values()] == [0] * len(counters._COUNTERS)


def in_threads(work: Any, count: int) -> None:
    """Run ``work(number)`` in so many threads at once; raises what one of them raised."""
    together, errors = threading.Barrier(count), []

    def one(number: int) -> None:
        try:
            together.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("own_streams", [False, True])
def test_many_threads(own_streams: bool) -> None:
    """Each thread calls with tensors, lengths and scalars of its own; all begin with nothing prepared."""
    inputs = [qkv(100 + 31 * number) for number in range(16)]
    wanted = [on_cpu(step(tensors)) for tensors in inputs]
    windows = [
        on_cpu((attngen.attention(*tensors, variant="window", package=PACKAGE, left=number, right=0),))
        for number, tensors in enumerate(inputs)
    ]
    torch.cuda.synchronize()
    kernel_call.PREPARED.clear()
    training._PREPARED.clear()
    tensormap._ENCODED.clear()
    launch._DESCRIBED.clear()

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                results = step(inputs[number])
                out = attngen.attention(*inputs[number], variant="window", package=PACKAGE, left=number, right=0)
                stream.synchronize()
                assert equal(on_cpu(results), wanted[number])
                assert equal(on_cpu((out,)), windows[number])

    in_threads(work, len(inputs))


def test_two_gpus_by_turns() -> None:
    """Whichever is current; the numbers and the shapes are the same, addresses and descriptors are each GPU's own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for seqlen in (1, 130, 257):
        sets = [qkv(seqlen, f"cuda:{device}") for device in (0, 1)]
        wanted = on_cpu(step(sets[0]))
        for turn in range(12):
            current, device = turn // 2 % 2, turn % 2
            with torch.cuda.device(current):
                results = step(sets[device])
                assert torch.cuda.current_device() == current
            assert {result.device.index for result in results} == {device}
            assert equal(on_cpu(results), wanted)


def test_a_thread_for_each_of_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = {seqlen: on_cpu(step(qkv(seqlen))) for seqlen in (65, 130, 300)}
    torch.cuda.synchronize()
    kernel_call.PREPARED.clear()

    def work(number: int) -> None:
        device = number % 2
        if number >= 2:  # two of the four threads never make their GPU the current one
            torch.cuda.set_device(device)
        for _ in range(10):
            for seqlen, results in wanted.items():
                assert equal(on_cpu(step(qkv(seqlen, f"cuda:{device}"))), results)

    in_threads(work, 4)


def test_a_graph_on_the_second_of_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = qkv(257, "cuda:1")
    wanted = on_cpu(forward(tensors))
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            results = forward(tensors)
    graph.replay()
    torch.cuda.synchronize(1)
    assert equal(on_cpu(results), wanted)
