"""Calls on arrays of CuPy: the bits of the same call on tensors, on CuPy's stream, without a copy and without waiting.

Arrays are made by DLPack, so that CuPy compiles nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.errors import CallError
from attngen.runtime.arguments import arrays
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from tests.gpu.family import compiled_kernels, for_this_gpu

SPEC = """
schema: 1
package: attngen_gpu_arrays
arch: [sm90a]
kernels:
  - {variant: [causal, alibi], head_dim: 64, dtype: fp16, layout: [dense, varlen], passes: forward}
  - {variant: causal, head_dim: 64, dtype: bf16, passes: forward}
  - {variant: allowed, head_dim: 64, dtype: fp16, passes: forward}
  - {variant: causal, head_dim: 64, dtype: fp16, layout: paged, passes: forward, split_kv: true}
"""


def to_build() -> list[Prepared]:
    return prepare(load_spec_text(SPEC))


@cache
def kernels() -> list[Kernel]:
    """Compile what the cache lacks, for the GPU that is here."""
    return compiled_kernels([for_this_gpu(kernel) for kernel in to_build()])


@pytest.fixture(autouse=True)
def _registered() -> None:
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_arrays"))


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def random(*shape: int, device: int = 0) -> Tensor:
    return torch.randn(*shape, device=f"cuda:{device}").half()


def qkv(rows: int = 100, keys: int = 170, device: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    return random(2, rows, 8, 64, device=device), *(random(2, keys, 2, 64, device=device) for _ in "kv")


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def arrays_of(cupy: Any, value: Any) -> Any:
    """The same with arrays over the memory of tensors."""
    if isinstance(value, dict):
        return {name: arrays_of(cupy, one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(arrays_of(cupy, one) for one in value)
    return cupy.from_dlpack(value) if isinstance(value, Tensor) else value


def same(cupy: Any, result: Any, wanted: Any) -> None:
    """Assert that results are arrays with the bits of tensors."""
    if isinstance(wanted, tuple):
        assert len(result) == len(wanted)
        for one, other in zip(result, wanted, strict=True):
            same(cupy, one, other)
        return
    assert type(result) is cupy.ndarray
    assert torch.equal(torch.from_dlpack(result), wanted)


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@cache
def calls() -> dict[str, Call]:
    """Calls by name: the function, its positional arguments, and its keywords."""
    q, k, v = qkv()
    packed = random(300, 8, 64), random(340, 2, 64), random(340, 2, 64), numbers(0, 130, 300), numbers(0, 140, 340)
    pages, table = (random(40, 16, 2, 64), random(40, 16, 2, 64)), torch.randperm(40, device="cuda").view(2, 20).int()
    cache_of = (*pages, table, numbers(300, 170))
    ragged = {"cu_seqlens_q": numbers(0, 1, 131), "max_seqlen_q": 130}
    outs, lses = [random(2, 100, 8, 64) for _ in range(3)], [torch.randn(2, 8, 100, device="cuda") for _ in range(3)]
    slope = torch.rand(8, device="cuda")
    return {
        "dense": (attngen.attention, (q, k, v), {"variant": "causal", "return_lse": True}),
        "heads first": (
            attngen.attention, tuple(one.transpose(1, 2) for one in (q, k, v)), {"variant": "causal", "layout": "bhsd"}
        ),
        "a tensor of the variant": (attngen.attention, (q, k, v), {"variant": "alibi", "slope": slope}),
        "packed": (attngen.attention_varlen, (*packed, 170, 200), {"variant": "causal", "return_lse": True}),
        "decoding": (attngen.attention_paged, (random(2, 1, 8, 64), *cache_of), {"return_lse": True}),
        "prompts over pages": (attngen.attention_paged, (random(2, 70, 8, 64), *cache_of), {}),
        "both": (attngen.attention_paged, (random(131, 8, 64), *cache_of), ragged),
        "both, told apart": (attngen.attention_paged, (random(131, 8, 64), *cache_of), {**ragged, "num_decodes": 1}),
        "merge": (attngen.merge, (outs, lses), {}),
        "topk": (attngen.topk, (torch.randn(5, 999, device="cuda"), 7), {}),
        "the reference": (attngen.attention, (q, k, v), {"variant": "causal", "backend": "reference"}),
    }  # fmt: skip


NAMES = (
    "dense", "heads first", "a tensor of the variant", "packed", "decoding", "prompts over pages", "both",
    "both, told apart", "merge", "topk", "the reference",
)  # fmt: skip


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_tensors(name: str, own_stream: bool, cupy: Any) -> None:
    """Also in later calls, which are recognized by their tensors."""
    assert set(NAMES) == set(calls())
    function, tensors, keywords = calls()[name]
    wanted = function(*tensors, **keywords)
    given, named = arrays_of(cupy, tensors), arrays_of(cupy, keywords)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    for _ in range(4):
        with stream:
            result = function(*given, **named)
        stream.synchronize()
        same(cupy, result, wanted)


def test_steps_of_decoding(cupy: Any) -> None:
    """Keys are appended in place, and results written to an array, step after step, on a stream of CuPy's."""
    pages, table = [torch.zeros(40, 16, 2, 64, device="cuda").half() for _ in "kv"], numbers(*range(40)).view(2, 20)
    ours, twins = [arrays_of(cupy, one.clone()) for one in pages], pages
    lengths, out = numbers(250, 3), torch.empty(2, 1, 8, 64, device="cuda").half()
    rotation = {"rotary_cos": torch.rand(320, 32, device="cuda"), "rotary_sin": torch.rand(320, 32, device="cuda")}
    given = arrays_of(cupy, {"table": table, "lengths": lengths, "out": out, **rotation})
    q_out = cupy.from_dlpack(torch.empty(2, 1, 8, 64, device="cuda").half())
    stream = cupy.cuda.Stream(non_blocking=True)
    for step in range(5):
        q, k, v = random(2, 1, 8, 64), random(2, 1, 2, 64), random(2, 1, 2, 64)
        turned = attngen.append_kv(k, v, *twins, lengths, page_table=table, q=q, **rotation)
        used = lengths + 1
        wanted = attngen.attention_paged(turned, *twins, table, used)
        of_step = arrays_of(cupy, (q, k, v, used))
        torch.cuda.synchronize()
        with stream:
            rotated = attngen.append_kv(
                *of_step[1:3], *ours, given["lengths"], page_table=given["table"], q=of_step[0],
                q_out=q_out if step % 2 else None, rotary_cos=given["rotary_cos"], rotary_sin=given["rotary_sin"],
            )  # fmt: skip
            result = attngen.attention_paged(rotated, *ours, given["table"], of_step[3], out=given["out"])
        stream.synchronize()
        assert result is given["out"]
        assert (rotated is q_out) is bool(step % 2)
        same(cupy, result, wanted)
        same(cupy, (rotated, *ours), (turned, *twins))
        lengths += 1


def test_calls_run_on_the_current_stream_of_cupy(cupy: Any) -> None:
    """After what that stream holds, without the host waiting, and without torch's own stream waiting for it."""
    tensors, later = qkv(), random(2, 100, 8, 64)
    given = arrays_of(cupy, tensors)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attngen.attention(*given, variant="causal")  # allocates what the stream keeps
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(2_000_000_000)
        tensors[0].copy_(later)
    with stream:
        result = attngen.attention(*given, variant="causal")
    assert not stream.done, "the host waited"
    assert torch.cuda.current_stream().query(), "torch's own stream waits"
    stream.synchronize()
    same(cupy, result, attngen.attention(later, *tensors[1:], variant="causal"))


def test_nothing_is_copied(cupy: Any) -> None:
    q, made = cupy.from_dlpack(random(2, 3)), random(4, 5)
    seen: list[Tensor] = []
    result, again = arrays.serve(lambda q: [seen.append(q), made, q][1:], {"q": q})
    assert seen[0].data_ptr() == q.data.ptr
    assert result.data.ptr == made.data_ptr()
    assert again is q


def test_maps_follow_what_cupy_writes(cupy: Any) -> None:
    """torch counts no write to an array: the tile map of its mask is made for each call."""
    tensors, mask = qkv(100, 170), torch.rand(2, 100, 170, device="cuda") > 0.3
    mask[:, :, 64:128] = False
    given, allowed = arrays_of(cupy, tensors), cupy.from_dlpack(mask)
    for _ in range(4):
        mask.logical_not_()
        wanted = attngen.attention(*tensors, variant="allowed", allowed=mask.clone())
        same(cupy, attngen.attention(*given, variant="allowed", allowed=allowed), wanted)
    tile_map = attngen.tile_map(*given[:2], variant="allowed", allowed=allowed)
    assert tile_map.words is not None
    same(cupy, attngen.attention(*given, variant="allowed", allowed=allowed, tile_map=tile_map), wanted)


def test_arrays_of_another_device_than_the_current_one(cupy: Any) -> None:
    device = torch.cuda.device_count() - 1
    tensors = qkv(device=device)
    wanted = attngen.attention(*tensors, variant="causal", return_lse=True)
    with cupy.cuda.Device(device):
        given = arrays_of(cupy, tensors)
    torch.cuda.synchronize(device)
    results = attngen.attention(*given, variant="causal", return_lse=True)
    torch.cuda.synchronize(device)
    assert torch.cuda.current_device() == 0
    assert [result.device.id for result in results] == [device] * 2
    same(cupy, results, wanted)


def test_bfloat16(cupy: Any) -> None:
    """CuPy has it where ml_dtypes is installed, as beside JAX."""
    pytest.importorskip("ml_dtypes")
    tensors = tuple(tensor.bfloat16() for tensor in qkv())
    same(
        cupy,
        attngen.attention(*arrays_of(cupy, tensors), variant="causal"),
        attngen.attention(*tensors, variant="causal"),
    )


def test_explain(cupy: Any) -> None:
    tensors = qkv()
    assert str(attngen.explain(*arrays_of(cupy, tensors), variant="causal")) == str(
        attngen.explain(*tensors, variant="causal")
    )


def test_what_is_refused(cupy: Any) -> None:
    q, k, v = qkv()
    arrays_q, arrays_k, arrays_v = arrays_of(cupy, (q, k, v))
    for call, told in (
        (lambda: attngen.attention(arrays_q, k, arrays_v), "q is an array of cupy, but k is a torch.Tensor"),
        (lambda: attngen.attention(q, arrays_k, v), "k is an array of cupy, but q is a torch.Tensor: .*from_dlpack"),
        (
            lambda: attngen.attention(arrays_q, k.cpu().numpy(), arrays_v),
            "q is an array of cupy, but k is an array of n",
        ),
        (lambda: attngen.attention(arrays_q[::-1], arrays_k, arrays_v), "q has negative strides, .*ascontiguousarray"),
        (lambda: attngen.attention(arrays_q, arrays_k[:1], arrays_v), "k has batch 1, but q has 2"),
    ):
        with pytest.raises(CallError, match=told):
            call()
    with cupy.cuda.Stream.ptds, pytest.raises(CallError, match="CuPy's current stream is the default stream of each"):
        attngen.attention(arrays_q, arrays_k, arrays_v, variant="causal")
