"""Calls as users make them: offsets, strides, empty work, graphs, streams, devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Inputs
from attngen.runtime.arguments.checked import Packing
from attngen.runtime.launch.pinned import Buffers
from tests.gpu.family import PACKAGE, Run, bits, kernels, labels, left_out, same

ALL = labels()
LEFT_OUT = left_out()
DENSE = [name for name in ALL if "dense" in name]


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels()


def qkv(
    seqlen_q: int = 100, seqlen_k: int = 170, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    torch.manual_seed(seqlen_q * 7 + seqlen_k)
    q = torch.randn(batch, seqlen_q, heads, head_dim, device=device).to(dtype)
    k, v = (torch.randn(batch, seqlen_k, kv_heads, head_dim, device=device).to(dtype) for _ in "kv")
    return q, k, v


def attention(*tensors: Tensor, variant: str = "causal", **options: Any) -> tuple[Tensor, Tensor]:
    results = attngen.attention(*tensors, variant=variant, package=PACKAGE, return_lse=True, **options)
    assert isinstance(results, tuple)
    return results


def test_a_backward_that_does_not_exist_is_refused() -> None:
    q, k, v = qkv()
    out, _ = attention(q.requires_grad_(), k, v)
    with pytest.raises(NoKernelError, match="no backward kernel of this variant is built"):
        out.sum().backward()


@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_alone_gives_the_bits_of_the_batch(name: str) -> None:
    """A sequence alone gives the bits that it gives in a batch, for the same kernel."""
    run = Run.of(name, Case("batch", (130,) * 3, (421,) * 3, heads=4, kv_heads=2, used=(421, 77, 305)))
    out, lse = run.results()
    inputs = run.inputs
    for b in range(3):
        part = slice(b, b + 1)
        arguments = {
            key: value[part] if isinstance(value, Tensor) and value.dim() and value.shape[0] == 3 else value
            for key, value in inputs.arguments.items()
        }
        assert inputs.seqused_k is not None
        alone = Run.with_inputs(
            run.kernel, inputs.q[part], inputs.k[part], inputs.v[part], None, inputs.seqused_k[part], arguments
        )
        assert same(alone.results(), (out[part], lse[part]))


@pytest.mark.parametrize(
    "name", [name for name in DENSE if name.split("-")[0] in ("causal", "sliding_window", "alibi")]
)
def test_decode_equals_prefill(name: str) -> None:
    run = Run.of(name, Case("prefill", (150,), (300,), heads=4, kv_heads=2))
    out, lse = run.results()
    inputs = run.inputs
    last = Inputs(inputs.q[:, -1:], inputs.k, inputs.v, None, None, inputs.arguments)
    alone = Run(run.kernel, last, last.bind(run.kernel.variant)).results()
    limit = 4 * torch.finfo(out.dtype).eps * float(out.abs().max())
    assert float((alone[0].float() - out[:, -1:].float()).abs().max()) <= limit
    torch.testing.assert_close(alone[1], lse[:, :, -1:], rtol=1e-5, atol=1e-5)


def far(shape: tuple[int, ...], stride: int, memory: Tensor, offset: int) -> Tensor:
    """Return a view of large memory whose batch entries lie ``stride`` elements apart."""
    b, s, h, d = shape
    return memory.as_strided((b, s, h, d), (stride, h * d, d, 1), offset)


@pytest.fixture
def large_memory() -> Iterator[Tensor]:
    free, _ = torch.cuda.mem_get_info()
    elements = 2 * 2**32 + 2**24
    if free < 3 * elements:
        pytest.skip(f"needs {3 * elements / 1e9:.0f} GB of free GPU memory, {free / 1e9:.0f} GB are")
    yield torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.alone
@pytest.mark.parametrize("power", [31, 32])
@pytest.mark.parametrize(
    "name", ["causal-bf16-d64-dense-descriptor", "causal-bf16-d64-dense-pointer", "causal-bf16-d64-dense-wgmma"]
)
def test_offsets_beyond_int32(name: str, power: int, large_memory: Tensor) -> None:
    kernel = kernels()[name]
    q, k, v = qkv(batch=2)
    stride = 2**power + 64
    parts, offset = [], 0
    for tensor in (q, k, v, torch.zeros_like(q)):
        view = far(tuple(tensor.shape), stride, large_memory, offset)
        view.copy_(tensor)
        parts.append(view)
        offset += tensor[0].numel()
    wanted = Run.with_inputs(kernel, q, k, v).results()
    run = Run.with_inputs(kernel, *parts[:3])
    lse = torch.empty_like(wanted[1])
    run.launch(Buffers(*parts, lse))
    assert same((parts[3], lse), wanted)


@pytest.mark.alone
def test_packed_rows_beyond_int32(large_memory: Tensor) -> None:
    """The last sequence starts beyond 2**32 elements, in q, k, v and out."""
    heads, head_dim, far_rows, rows = 128, 64, 2**19 + 32, 96
    kernel = kernels()["causal-bf16-d64-varlen-descriptor"]
    total = far_rows + rows
    packed = large_memory[: total * heads * head_dim].view(total, heads, head_dim)
    packed[far_rows:] = torch.randn(rows, heads, head_dim, device="cuda").to(packed.dtype)
    small = packed[far_rows:].clone()

    def packing(*lengths: int) -> Tensor:
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")

    wanted = Run.with_inputs(kernel, small, small, small, Packing(packing(rows), packing(rows), rows, rows)).results()
    # The far keys belong to a sequence without queries, the far queries to one without keys.
    both = Packing(packing(far_rows, 0, rows), packing(0, far_rows, rows), far_rows, far_rows)
    out, lse = Run.with_inputs(kernel, packed, packed, packed, both).results()
    assert same((out[far_rows:], lse[:, far_rows:].contiguous()), wanted)
    assert not out[:far_rows].any()
    assert (lse[:, :far_rows] == -math.inf).all()


def strided(kind: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], str]:
    """Return the same numbers in tensors with other strides, and the layout that they have."""
    if kind == "bhsd":
        return [t.transpose(1, 2).contiguous() for t in (q, k, v)], "bhsd"
    if kind == "transposed view":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)], "bshd"
    if kind == "slices of packed qkv":
        packed = torch.stack([q, k, v], dim=2)
        return list(packed.unbind(2)), "bshd"
    if kind == "padded":
        return [torch.nn.functional.pad(t, (0, 8))[..., : t.shape[-1]] for t in (q, k, v)], "bshd"
    if kind == "seq first":
        return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)], "bshd"
    if kind == "odd offset":
        moved = []
        for t in (q, k, v):
            flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
            moved.append(flat[1:].view(t.shape).copy_(t))
        return moved, "bshd"
    assert kind == "odd stride"
    return [torch.nn.functional.pad(t, (0, 1))[..., : t.shape[-1]] for t in (q, k, v)], "bshd"


@pytest.mark.parametrize("kind", ["bhsd", "transposed view", "slices of packed qkv", "padded", "seq first"])
@pytest.mark.parametrize("variant", ["causal", "full", "alibi"])
def test_strides_change_nothing(variant: str, kind: str) -> None:
    q, k, v = qkv(150, 150, kv_heads=4)
    options = {"slope": torch.rand(4, device="cuda")} if variant == "alibi" else {}
    wanted = attention(q, k, v, variant=variant, **options)
    tensors, layout = strided(kind, q, k, v)
    out, lse = attention(*tensors, variant=variant, layout=layout, **options)
    assert same((out.transpose(1, 2) if layout == "bhsd" else out, lse), wanted)


@pytest.mark.parametrize("kind", ["odd offset", "odd stride"])
def test_strides_that_only_a_pointer_kernel_takes(kind: str) -> None:
    q, k, v = qkv(150, 150, kv_heads=4)
    pointer = kernels()["causal-bf16-d64-dense-pointer"]
    wanted = Run.with_inputs(pointer, q, k, v).results()
    tensors, _ = strided(kind, q, k, v)
    assert same(attention(*tensors), wanted)
    with pytest.raises(NoKernelError, match="multiple of"):
        attention(*tensors, variant="alibi", slope=torch.rand(4, device="cuda"))


def test_expanded_keys_and_values() -> None:
    q, k, v = qkv(150, 150, kv_heads=4)
    one_k, one_v = (t[:1, :, :1].expand(2, 150, 4, 64) for t in (k, v))
    # a kernel that steps along axes of stride 0 reads the one KV head where it is
    chosen = attngen.explain(q, one_k, one_v, variant="causal", package=PACKAGE).selection
    assert chosen is not None
    assert chosen.kernel is not None
    assert chosen.kernel.loads != "descriptor"
    wanted = Run.with_inputs(chosen.kernel, q, *(t[:, :, :1].contiguous() for t in (one_k, one_v))).results()
    assert same(attention(q, one_k, one_v), wanted)
    # no kernel of this head dim steps along axes of stride 0: one KV head of each sequence is copied
    q, k, v = qkv(150, 150, kv_heads=4, head_dim=32)
    one_k, one_v = (t[:1, :, :1].expand(2, 150, 4, 32) for t in (k, v))
    results = attention(q, one_k, one_v)
    assert same(results, attention(q, *(t[:, :, :1].contiguous() for t in (one_k, one_v))))
    for ours, theirs in zip(results, attention(q, one_k.contiguous(), one_v.contiguous()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_a_last_dimension_that_is_not_contiguous_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(CallError, match="must be contiguous"):
        attention(torch.stack([q, q], dim=-1)[..., 0], k, v)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 0, 0)])
def test_calls_without_queries_or_keys_give_zeros(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = qkv(seqlen_q, seqlen_k, batch=batch)
    out, lse = attention(q, k, v)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_sequences_of_length_zero() -> None:
    q, k, v = (t[0] for t in qkv(40, 50, batch=1))
    offsets = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 0, 30, 40, 40], [0, 20, 20, 50, 50])]
    out, lse = attngen.attention_varlen(
        q, k, v, *offsets, 30, 30, variant="causal", package=PACKAGE, return_lse=True
    )  # fmt: skip
    assert not out[:30].any()  # the sequence without keys
    assert (lse[:, :30] == -math.inf).all()
    assert torch.isfinite(lse[:, 30:]).all()
    used = torch.tensor([0, 7], dtype=torch.int32, device="cuda")
    out, lse = attention(*qkv(), seqused_k=used)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()


@pytest.mark.parametrize(
    ("starts_q", "starts_k", "message"),
    [
        ([0, 30, 20, 40], [0, 20, 40, 50], "must not decrease"),
        ([1, 20, 30, 40], [0, 20, 40, 50], "must start with 0"),
        ([0, 20, 30, 41], [0, 20, 40, 50], "beyond the 40 rows"),
        ([0, 20, 30, 40], [0, 20, 40, 51], "beyond the 50 rows"),
        ([0, 35, 36, 40], [0, 20, 40, 50], "max_seqlen_q"),
    ],
)
def test_malformed_offsets_are_refused(starts_q: list[int], starts_k: list[int], message: str) -> None:
    q, k, v = (t[0] for t in qkv(40, 50, batch=1))
    offsets = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts_q, starts_k)]
    with attngen.debug(), pytest.raises(ValueError, match=message):
        attngen.attention_varlen(q, k, v, *offsets, 30, 30, variant="causal", package=PACKAGE)


def test_mixed_dtypes_devices_and_shapes_are_refused() -> None:
    q, k, v = qkv()
    slope = torch.rand(4, device="cuda")
    for tensors, options, message in (
        ((q, k.half(), v), {}, "one dtype"),
        ((q, k, v.cpu()), {}, "one device"),
        ((q, k[:1], v), {}, "batch"),
        ((q, k[..., :32], v), {}, "head_dim"),
        ((q, k, v[:, :5]), {}, "keys"),
        ((q[:, :, :3], k, v), {}, "multiple"),
        ((q, k, v), {"seqused_k": torch.tensor([1, 2])}, "seqused_k"),
        ((q, k, v), {"variant": "alibi", "slope": slope.cpu()}, "slope"),
        ((q, k, v), {"variant": "alibi", "slope": slope.double()}, "slope"),
        ((q, k, v), {"variant": "alibi"}, "slope"),
        ((q, k, v), {"variant": "sliding_window", "window": 0}, "window"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*tensors, **options)


def test_declared_facts_are_checked_under_debug() -> None:
    q, k, v = qkv(100, 100)
    doc = torch.arange(100, device="cuda", dtype=torch.int32).repeat(2, 1)
    doc[1, 50] = 3
    with attngen.debug(), pytest.raises(ValueError, match="nondecreasing"):
        attention(q, k, v, variant="packed_documents", doc=doc)


class Captured:
    """A call in a CUDA graph."""

    def __init__(self, call: Any) -> None:
        call()  # loads what is loaded once
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = call()

    def replay(self) -> tuple[Tensor, ...]:
        self._graph.replay()
        return tuple(result.clone() for result in self.results)


@pytest.mark.parametrize("variant", ["causal", "packed_documents", "dilated", "allowed", "softcap"])
def test_calls_in_cuda_graphs(variant: str) -> None:
    q, k, v = qkv(200, 260)
    used = torch.tensor([260, 100], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {
        "packed_documents": {"doc": (torch.arange(260, device="cuda") // 50).int().repeat(2, 1)},
        "dilated": {"window": 30, "dilation": 3},
        "allowed": {"allowed": torch.rand(2, 200, 260, device="cuda") < 0.2},
        "softcap": {"cap": 20.0},
    }.get(variant, {})

    def call() -> tuple[Tensor, Tensor]:
        return attention(q, k, v, variant=variant, seqused_k=used, **options)

    captured = Captured(call)
    for length in (57, 0):
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        used.copy_(torch.tensor([length, 260]))
        if variant == "allowed":
            options["allowed"].copy_(torch.rand(2, 200, 260, device="cuda") < 0.5)
        assert same(captured.replay(), call())
        assert same(captured.replay(), call())


def test_calls_of_packed_sequences_in_cuda_graphs() -> None:
    q, k, v = (t[0] for t in qkv(300, 400, batch=1))
    starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 300], [0, 150, 400])]

    def call() -> tuple[Tensor, Tensor]:
        results = attngen.attention_varlen(
            q, k, v, *starts, 300, 400, variant="causal", package=PACKAGE, return_lse=True
        )  # fmt: skip
        assert isinstance(results, tuple)
        return results

    captured = Captured(call)
    for offsets in (([0, 7, 300], [0, 400, 400]), ([0, 299, 300], [0, 1, 400])):
        for tensor, values in zip(starts, offsets, strict=True):
            tensor.copy_(torch.tensor(values))
        assert same(captured.replay(), call())
        assert same(captured.replay(), call())


def test_a_call_never_waits() -> None:
    q, k, v = qkv()
    attention(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v)
        attention(*qkv_like(q, k, v, 33))  # other shapes: selected and prepared again
    finally:
        torch.cuda.set_sync_debug_mode("default")


def qkv_like(q: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, :length], k[:, :length], v[:, :length]


def test_inputs_freed_straight_after_on_a_side_stream() -> None:
    wanted = attention(*qkv(300, 300))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            q, k, v = qkv(300, 300)
            results = attention(q, k, v)
            del q, k, v
            torch.full((2, 300, 4, 64), torch.nan, device="cuda", dtype=torch.bfloat16)  # takes freed memory
        stream.synchronize()
        assert same(results, wanted)


def test_overlapping_streams() -> None:
    shapes = ((100, 333), (257, 257), (1, 900), (700, 64))
    inputs = [qkv(*shape) for shape in shapes]
    wanted = [attention(*tensors) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in shapes]
    torch.cuda.synchronize()
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in shapes]
    for _ in range(100):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[index].append(attention(*inputs[index]))
    torch.cuda.synchronize()
    for results, one in zip(outputs, wanted, strict=True):
        assert all(same(result, one) for result in results)


def test_a_call_runs_on_the_device_of_its_inputs() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        wanted = attention(*qkv())
        elsewhere = [t.to("cuda:1") for t in qkv()]
        results = attention(*elsewhere)
        assert torch.cuda.current_device() == 0
        assert results[0].device == torch.device("cuda:1")
        assert all(torch.equal(bits(a).cpu(), bits(b).cpu()) for a, b in zip(results, wanted, strict=True))
