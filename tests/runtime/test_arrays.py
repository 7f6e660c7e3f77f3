"""Calls on arrays of numpy and JAX: the bits of the same call on tensors, no copy, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.runtime.arguments import arrays
from tests.runtime import jax_arrays
from tests.sampling import few

torch.manual_seed(0)
Q, K, V = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (5, 2), (5, 2)))
PACKED_Q, PACKED_K, PACKED_V = (torch.randn(n, h, 16) for n, h in ((6, 4), (9, 2), (9, 2)))
STARTS_Q, STARTS_K = (torch.tensor(rows, dtype=torch.int32) for rows in ([0, 1, 6], [0, 3, 9]))
PAGES_K, PAGES_V = torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)
TABLE, LENGTHS = torch.tensor([[0, 2, 1], [3, 5, 4]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
BEFORE = torch.tensor([2, 0], dtype=torch.int32)
COS, SIN = torch.randn(12, 4), torch.randn(12, 4)
OUTS, LSES = [torch.randn(2, 3, 4, 16) for _ in range(3)], [torch.randn(2, 4, 3) for _ in range(3)]
STACKED_OUTS, STACKED_LSES = torch.stack(OUTS), torch.stack(LSES)
WINDOW = attngen.variant(
    "q_pos >= kv and q_pos - kv < window[h]", tensors={"window": {"dtype": "int32", "shape": ["h"]}}, name="windows"
)
WINDOWS, ALLOWED = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.rand(2, 3, 5) > 0.3
HALF = [tensor.half() for tensor in (Q, K, V)]

#: Calls by name: the function, its positional arguments, and its keywords.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "dense": (attngen.attention, (Q, K, V), {"variant": "causal", "return_lse": True}),
    "float16": (attngen.attention, tuple(HALF), {"variant": "sliding_window", "window": 2}),
    "heads first": (attngen.attention, tuple(t.transpose(1, 2) for t in (Q, K, V)), {"layout": "bhsd"}),
    "a tensor of the variant": (attngen.attention, (Q, K, V), {"variant": WINDOW, "window": WINDOWS}),
    "bools": (attngen.attention, (Q, K, V), {"variant": "allowed", "allowed": ALLOWED}),
    "used keys": (attngen.attention, (Q, K, V), {"seqused_k": LENGTHS.clamp(max=4)}),
    "one tensor twice": (attngen.attention, (K, K, K), {}),
    "quantized": (attngen.attention, tuple(HALF), {"quantize": "fp8", "return_lse": True}),
    "a tile map": (attngen.attention, (Q, K, V), {"tile_map": attngen.tile_map(Q, K, variant="full")}),
    "packed": (
        attngen.attention_varlen, (PACKED_Q, PACKED_K, PACKED_V, STARTS_Q, STARTS_K, 5, 6), {"return_lse": True}
    ),
    "pages": (attngen.attention_paged, (Q, PAGES_K, PAGES_V, TABLE, LENGTHS), {"return_lse": True}),
    "packed beside pages": (
        attngen.attention_paged, (PACKED_Q, PAGES_K, PAGES_V, TABLE, LENGTHS),
        {"cu_seqlens_q": STARTS_Q, "max_seqlen_q": 5, "num_decodes": 1},
    ),
    "merge": (attngen.merge, (OUTS, LSES), {}),
    "merge of one array": (attngen.merge, (STACKED_OUTS, STACKED_LSES), {}),
    "topk": (attngen.topk, (torch.randn(3, 9), 2), {"lengths": torch.tensor([9, 4, 1], dtype=torch.int32)}),
    "block_mask": (
        attngen.block_mask, (torch.tensor([[[[0, 2], [1, 1]]]], dtype=torch.int32),),
        {"counts": torch.tensor([[[1, 2]]], dtype=torch.int32), "key_blocks": 3},
    ),
    "index_scores": (attngen.index_scores, (Q, K[:, :, 0], torch.randn(2, 3, 4)), {"variant": "causal"}),
    "index_scores with arguments": (
        attngen.index_scores, (Q, K[:, :, 0], torch.randn(2, 3, 4)), {"variant": "allowed", "allowed": ALLOWED}
    ),
}  # fmt: skip


def numpy_of(value: Any) -> Any:
    """The same with arrays of numpy over the memory of tensors."""
    if isinstance(value, dict):
        return {name: numpy_of(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(numpy_of, value))
    return value.numpy() if isinstance(value, Tensor) else value


def parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", CALLS)
def test_numpy_gives_the_bits_of_tensors(name: str) -> None:
    function, tensors, keywords = CALLS[name]
    results, wanted = parts(function(*numpy_of(tensors), **numpy_of(keywords))), parts(function(*tensors, **keywords))
    assert len(results) == len(wanted)
    for one, other in zip(results, wanted, strict=True):
        assert type(one) is np.ndarray
        assert one.flags.writeable
        assert one.shape == tuple(other.shape)
        assert one.tobytes() == other.contiguous().numpy().tobytes()


def test_explain_and_tile_map() -> None:
    assert str(attngen.explain(*numpy_of((Q, K, V)))) == str(attngen.explain(Q, K, V))
    assert attngen.tile_map(*numpy_of((Q, K)), variant=WINDOW, window=WINDOWS.numpy()).variant == "windows"


def test_nothing_is_copied() -> None:
    q, bias = Q.numpy(), WINDOWS.numpy()
    seen: dict[str, Tensor] = {}

    def run(**fields: Any) -> Any:
        seen.update(q=fields["q"], bias=fields["arguments"]["bias"], again=fields["again"])
        return [torch.ones(3), fields["q"], 7, None]

    made, same, *others = arrays.serve(run, {"q": q, "arguments": {"bias": bias}, "again": q, "number": 3})
    assert (seen["q"].data_ptr(), seen["bias"].data_ptr()) == (q.ctypes.data, bias.ctypes.data)
    assert seen["again"] is seen["q"], "one array is one tensor"
    assert same is q
    assert type(made) is np.ndarray
    assert others == [7, None]


def test_results_are_views_of_what_torch_made() -> None:
    made = torch.randn(3, 4)
    result = arrays.serve(lambda q: made.t(), {"q": Q.numpy()})
    assert result.ctypes.data == made.data_ptr()
    assert np.array_equal(result, made.numpy().T)


def test_out_is_written_and_returned() -> None:
    out = np.full(tuple(Q.shape), np.nan, np.float32)
    pages = numpy_of((Q, PAGES_K, PAGES_V, TABLE, LENGTHS))
    assert attngen.attention_paged(*pages, out=out) is out
    assert torch.equal(torch.from_numpy(out), attngen.attention_paged(Q, PAGES_K, PAGES_V, TABLE, LENGTHS))


@pytest.mark.parametrize("own", [False, True])
def test_append(own: bool) -> None:
    """In place, and with rotated queries in an array of the caller's or in a new one."""
    q, k, v = (torch.randn(2, 3, h, 16) for h in (4, 2, 2))
    rotation = {"q": q, "rotary_cos": COS, "rotary_sin": SIN, "page_table": TABLE}
    caches = torch.zeros_like(PAGES_K), torch.zeros_like(PAGES_V)
    wanted = attngen.append_kv(k, v, *caches, BEFORE, **rotation)
    ours = np.zeros(tuple(PAGES_K.shape), np.float32), np.zeros(tuple(PAGES_V.shape), np.float32)
    q_out = np.zeros(tuple(q.shape), np.float32)
    given = numpy_of(rotation) | ({"q_out": q_out} if own else {})
    rotated = attngen.append_kv(k.numpy(), v.numpy(), *ours, BEFORE.numpy(), **given)
    assert (rotated is q_out) is own
    for one, other in zip((*ours, rotated), (*caches, wanted), strict=True):
        assert one.any()
        assert np.array_equal(one, other.numpy())
    assert attngen.append_kv(k.numpy(), v.numpy(), *ours, BEFORE.numpy(), page_table=TABLE.numpy()) is None


def read_only(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def test_read_only_arrays_are_read_and_not_written() -> None:
    q, k, v = (read_only(tensor.numpy()) for tensor in (Q, K, V))
    assert np.array_equal(attngen.attention(q, k, v), attngen.attention(Q, K, V).numpy())
    pages = numpy_of((Q, PAGES_K, PAGES_V, TABLE, LENGTHS))
    with pytest.raises(CallError, match="out is written, but is a read-only array of numpy; allowed: one that is"):
        attngen.attention_paged(*pages, out=q)
    cache = np.zeros(tuple(PAGES_K.shape), np.float32)
    for name, caches in (("k_cache", (read_only(cache), cache)), ("v_cache", (cache, read_only(cache)))):
        with pytest.raises(CallError, match=f"{name} is written, but is a read-only array"):
            attngen.append_kv(k, v, *caches, BEFORE.numpy(), page_table=TABLE.numpy())
    assert not cache.any()


N = numpy_of((Q, K, V))


OF_NUMPY = "is an array of numpy, but {} is a torch.Tensor: all tensors of a call are of one kind"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: attngen.attention(N[0], K, N[2]), "q " + OF_NUMPY.format("k")),
        (lambda: attngen.attention(Q, N[1], V), "k " + OF_NUMPY.format("q") + r"; allowed: torch.from_dlpack\(k\)"),
        (lambda: attngen.attention(*N, variant=WINDOW, window=WINDOWS), "q " + OF_NUMPY.format("window")),
        (
            lambda: attngen.attention(Q, K, V, variant=WINDOW, window=numpy_of(WINDOWS)),
            "window " + OF_NUMPY.format("q"),
        ),
        (lambda: attngen.attention(*N, seqused_k=LENGTHS), "q " + OF_NUMPY.format("seqused_k")),
        (lambda: attngen.attention(Q.clone().requires_grad_(), K, N[2]), "v " + OF_NUMPY.format("q")),
        (lambda: attngen.attention(N[0], K.clone().requires_grad_(), N[2]), "q " + OF_NUMPY.format("k")),
        (
            lambda: attngen.attention_paged(N[0], *numpy_of((PAGES_K,)), PAGES_V, *numpy_of((TABLE, LENGTHS))),
            "q " + OF_NUMPY.format("v_pages"),
        ),
        (
            lambda: attngen.merge([OUTS[0], numpy_of(OUTS[1])], LSES[:2]),
            r"outs\[0\] is a torch.Tensor, but outs\[1\] is an array of numpy",
        ),
        (
            lambda: attngen.merge(OUTS, numpy_of(LSES)),
            r"outs\[0\] is a torch.Tensor, but lses\[0\] is an array of numpy",
        ),
        (lambda: attngen.topk(LSES[0], 2, lengths=numpy_of(LENGTHS)), "lengths " + OF_NUMPY.format("scores")),
        (
            lambda: attngen.append_kv(K, V, PAGES_K, numpy_of(PAGES_V), BEFORE, page_table=TABLE),
            "v_cache " + OF_NUMPY.format("k"),
        ),
        (lambda: attngen.debug.scores(*N), r"q is an array of numpy; allowed: torch.from_dlpack\(q\), which"),
    ],
)
def test_arrays_beside_tensors(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(CallError, match=told):
        call()


@pytest.mark.parametrize(
    ("k", "told"),
    [
        (N[1][::-1], r"k has negative strides.*; allowed: numpy.ascontiguousarray\(k\)"),
        (np.ma.masked_array(N[1], mask=N[1] > 0), "k is a numpy.ma.MaskedArray, whose mask would be lost"),
        (
            N[1].astype(">f4"),
            "k: torch takes no such array of numpy, dtype >f4: DLPack only supports native byte order",
        ),
        (N[1].astype(str), "k: torch takes no such array of numpy, dtype <U"),
        (N[1].astype(np.float64), "q has dtype torch.float32, but k has torch.float64"),
        (N[1].tolist(), "k must be a torch.Tensor, got list"),
    ],
)
def test_arrays_that_are_refused(k: Any, told: str) -> None:
    with pytest.raises(CallError, match=told):
        attngen.attention(N[0], k, N[2])


def test_results_that_a_library_lacks() -> None:
    with pytest.raises(CallError, match="numpy takes no result of torch.float8_e4m3fn: "):
        attngen.quantize(*N)


def test_a_library_without_from_dlpack() -> None:
    class Exporter:
        __dlpack__ = __dlpack_device__ = None

    Exporter.__module__ = "nowhere.arrays"
    with pytest.raises(CallError, match="nowhere.arrays has arrays with __dlpack__, but no from_dlpack for results"):
        attngen.attention(Exporter(), K, V)


def test_numbers_of_numpy_are_no_arrays() -> None:
    out = attngen.attention(*N, variant="sliding_window", window=np.int32(2), softmax_scale=np.float64(0.5))
    assert np.array_equal(
        out, attngen.attention(Q, K, V, variant="sliding_window", window=2, softmax_scale=0.5).numpy()
    )


def test_compiled_programs_are_cut_around_such_calls() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(attngen.attention, backend="eager", fullgraph=True)(*N)


def test_tensors_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of attention on tensors ask nothing about arrays."""
    monkeypatch.setattr(arrays, "is_array", lambda value: pytest.fail(f"asked about {type(value)}"))
    attngen.attention(Q, K, V, variant=WINDOW, window=WINDOWS)
    attngen.attention_varlen(PACKED_Q, PACKED_K, PACKED_V, STARTS_Q, STARTS_K, 5, 6)
    for decodes in (None, 1):
        attngen.attention_paged(
            PACKED_Q, PAGES_K, PAGES_V, TABLE, LENGTHS, cu_seqlens_q=STARTS_Q, max_seqlen_q=5, num_decodes=decodes
        )


# --- CuPy, whose arrays need a GPU: tests/gpu/test_arrays.py ----------------------------------------------------------


def cupy_on(handle: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The context in which a call on device 1 runs, while CuPy's current stream there has this handle."""
    asked: list[int] = []

    def get_current_stream(device: int) -> Any:
        asked.append(device)
        return SimpleNamespace(ptr=handle)

    library = SimpleNamespace(__name__="cupy", cuda=SimpleNamespace(get_current_stream=get_current_stream))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    context = arrays._stream("q", SimpleNamespace(device=SimpleNamespace(id=1)), library)
    assert asked == [1]
    return context


@pytest.mark.parametrize(("handle", "stream"), [(0, ("default", 1)), (1, ("default", 1)), (4096, (4096, 1))])
def test_a_call_runs_on_the_current_stream_of_cupy(
    handle: int, stream: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cupy_on(handle, monkeypatch) == stream


def test_streams_of_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a handle, by which counters and workspaces are keyed."""
    with pytest.raises(CallError, match=r"CuPy's current stream is the default stream of each thread, .*Stream.null"):
        cupy_on(2, monkeypatch)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cupy_beside_a_torch_without_cuda() -> None:
    library = SimpleNamespace(__name__="cupy")
    with pytest.raises(CallError, match=r"q is an array of cupy, but this torch .* is built without CUDA"):
        arrays._stream("q", None, library)


# --- JAX, in a process of its own: it starts threads, and other tests fork --------------------------------------------


@cache
def of_jax() -> dict[str, str]:
    """Errors of the checks in ``jax_arrays``, by name; an empty text for one that holds."""
    command = [sys.executable, "-m", "tests.runtime.jax_arrays"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    checks: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return checks


@pytest.mark.exhaustive
@few("name", jax_arrays.CHECKS, often=range(0, 99, 2))
def test_jax(name: str) -> None:
    pytest.importorskip("jaxlib.version", reason="needs jax")
    assert of_jax()[name] == ""
