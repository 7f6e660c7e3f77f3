"""Calls with DTensors, as one of several processes on the CPU, beside the same calls with whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Tensor as Declared
from tests.runtime.support import variant

GRADED = variant(
    "graded", "q_pos >= kv", score="s + slope[h] * (kv - q_pos) + shift[b] * of_kv[hk] + table[kv]",
    tensors=[
        Declared("slope", "fp32", ("h",), grad=True), Declared("shift", "fp32", ("b",), grad=True),
        Declared("of_kv", "fp32", ("hk",), grad=True), Declared("table", "fp32", ("seqlen_k",), grad=True),
    ],
)  # fmt: skip
BY_NUMBER = variant("by_number", "q_pos >= kv", score="s * (h + 1)")
BY_SEQUENCE = variant("by_sequence", "q_pos >= kv + b")
DROPPED = variant("dropped", "q_pos >= kv", dropout=True)


def run(rank: int, world: int, meeting: str, compiled: bool) -> None:
    """Make all checks as process ``rank`` of ``world``, or that of a compiled program. Raises AssertionError."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        if compiled:
            _compiled(mesh)
            return
        for check in (_dense, _own_tensors, _varlen, _paged, _refused, _refused_elsewhere):
            check(mesh)
        _two_axes(world)
    finally:
        dist.destroy_process_group()


def tensors(batch: int = 2, heads: int = 4, kv_heads: int = 2, layout: str = "bshd") -> list[Tensor]:
    torch.manual_seed(5)
    made = [torch.randn(batch, rows, h, 8) for rows, h in ((6, heads), (9, kv_heads), (9, kv_heads))]
    return [t.transpose(1, 2).contiguous() for t in made] if layout == "bhsd" else made


Call = Callable[..., Any]


def compare(
    call: Call, given: Sequence[Tensor], mesh: DeviceMesh, placements: Sequence[Any], *, silent: bool = True
) -> tuple[list[Any], list[Any]]:
    """Check results and gradients of a call with distributed arguments; return their placements. A call is ``silent``
    that communicates nothing."""
    whole = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    lie = [each if isinstance(each, tuple) else (each,) for each in placements]
    parts = [
        distribute_tensor(t, mesh, each).requires_grad_(t.is_floating_point())
        for t, each in zip(given, lie, strict=True)
    ]
    communication = CommDebugMode()
    with communication if silent else nullcontext():
        results = call(*parts)
    assert not silent or not communication.get_total_counts()
    wanted = call(*whole)
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    leaves = [t for t in whole if t.requires_grad]
    own = [t for t in parts if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in wanted]
    ours = torch.autograd.grad(
        [(a * distribute_tensor(w, mesh, a.placements)).sum() for a, w in zip(results, weights, strict=True)], own
    )
    theirs = torch.autograd.grad([(a * w).sum() for a, w in zip(wanted, weights, strict=True)], leaves)
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)
    return [list(t.placements) for t in results], [list(t.placements) for t in ours]


def _dense(mesh: DeviceMesh) -> None:
    for layout, heads in (("bshd", 2), ("bhsd", 1)):

        def call(q: Tensor, k: Tensor, v: Tensor, layout: str = layout) -> Any:
            return attngen.attention(q, k, v, variant="causal", layout=layout, return_lse=True)

        by_heads = Shard(heads)
        placements, gradients = compare(call, tensors(layout=layout), mesh, [by_heads] * 3)
        assert placements == [[by_heads], [Shard(1)]]
        assert gradients == [[by_heads]] * 3
        placements, gradients = compare(call, tensors(layout=layout), mesh, [Shard(0)] * 3)
        assert placements == [[Shard(0)]] * 2
        assert gradients == [[Shard(0)]] * 3
        placements, _ = compare(call, tensors(layout=layout), mesh, [Replicate()] * 3)
        assert placements == [[Replicate()]] * 2
        # one KV head, which all ranks have
        placements, gradients = compare(
            call, tensors(kv_heads=1, layout=layout), mesh, [by_heads, Replicate(), Replicate()]
        )
        assert placements[0] == [by_heads]
        assert gradients == [[by_heads], [Partial()], [Partial()]]
        compare(call, tensors(batch=3, layout=layout), mesh, [Shard(0)] * 3)  # which the ranks do not divide
        compare(call, tensors(layout=layout), mesh, [by_heads, Replicate(), Replicate()])
        compare(call, tensors(layout=layout), mesh, [Shard(0), by_heads, Replicate()], silent=False)


def _own_tensors(mesh: DeviceMesh) -> None:
    own = [torch.rand(4), torch.rand(2), torch.rand(2), torch.rand(9)]

    def call(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, shift: Tensor, of_kv: Tensor, table: Tensor) -> Any:
        named = {"slope": slope, "shift": shift, "of_kv": of_kv, "table": table}
        return attngen.attention(q, k, v, variant=GRADED, return_lse=True, **named)

    everywhere = [Replicate()] * 4
    _, gradients = compare(call, [*tensors(), *own], mesh, [*[Shard(2)] * 3, *everywhere])
    assert gradients[3:] == [[Shard(0)], [Partial()], [Shard(0)], [Partial()]]
    _, gradients = compare(call, [*tensors(), *own], mesh, [*[Shard(0)] * 3, *everywhere])
    assert gradients[3:] == [[Partial()], [Shard(0)], [Partial()], [Partial()]]


def _varlen(mesh: DeviceMesh) -> None:
    q, k, v = (t.flatten(0, 1) for t in tensors())
    starts_q, starts_k = (torch.tensor(each, dtype=torch.int32) for each in ([0, 5, 12], [0, 9, 18]))

    def call(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> Any:
        return attngen.attention_varlen(q, k, v, starts_q, starts_k, 7, 9, variant="causal", return_lse=True)

    placements, gradients = compare(
        call, [q, k, v, starts_q, starts_k], mesh, [*[Shard(1)] * 3, Replicate(), Replicate()]
    )
    assert placements == [[Shard(1)], [Shard(0)]]
    assert gradients == [[Shard(1)]] * 3


def _paged(mesh: DeviceMesh) -> None:
    q, k, v = tensors(batch=3)
    table = torch.tensor([[0], [2], [1]], dtype=torch.int32)[:2]
    used = torch.tensor([9, 7], dtype=torch.int32)
    for order, axis in (("NHD", 2), ("HND", 1)):
        pages = [t if order == "NHD" else t.transpose(1, 2).contiguous() for t in (k, v)]

        def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor, order: str = order) -> Any:
            with torch.no_grad():
                return attngen.attention_paged(q, k, v, table, used, page_layout=order, return_lse=True)

        given = [q[:2], *pages, table, used]
        for lie, results in (
            ([Shard(0), Replicate(), Replicate(), Shard(0), Shard(0)], [Shard(0), Shard(0)]),
            ([Shard(2), Shard(axis), Shard(axis), Replicate(), Replicate()], [Shard(2), Shard(1)]),
        ):
            parts = [distribute_tensor(t, mesh, [each]) for t, each in zip(given, lie, strict=True)]
            wanted = call(*given)
            actual = call(*parts)
            out = distribute_tensor(torch.zeros(wanted[0].shape), mesh, [lie[0]])
            with torch.no_grad():
                into = attngen.attention_paged(*parts, page_layout=order, out=out)
            assert into is out
            for one, other, placement in zip(actual, wanted, results, strict=True):
                assert list(one.placements) == [placement]
                torch.testing.assert_close(one.full_tensor(), other)
            torch.testing.assert_close(out.full_tensor(), wanted[0])
        elsewhere = distribute_tensor(torch.zeros(wanted[0].shape), mesh, [Shard(1)])
        with torch.no_grad(), pytest.raises(CallError, match=r"out lies as \[Shard\(dim=1\)\], and would have to be"):
            attngen.attention_paged(*parts, page_layout=order, out=elsewhere)


def _compiled(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q, k, v, variant="sliding_window", window=3, return_lse=True)

    compare(torch.compile(call, backend="aot_eager", fullgraph=True), tensors(), mesh, [Shard(2)] * 3, silent=False)


def _refused(mesh: DeviceMesh) -> None:
    q, k, v = tensors()

    def lie(*placements: Any, given: Sequence[Tensor] = (q, k, v)) -> list[DTensor]:
        return [distribute_tensor(t, mesh, [each]) for t, each in zip(given, placements, strict=True)]

    def refused(told: str, *given: Any, **options: Any) -> None:
        with pytest.raises(CallError, match=told):
            attngen.attention(*given, **{"variant": "causal", **options})

    allowed = r"allowed: Replicate\(\), Shard\(0\) over the batch, Shard\(2\) over the heads, or {}.to_local\(\)"
    refused(r"q is Shard\(dim=1\), along its seqlen; " + allowed.format("q"), *lie(Shard(1), *[Replicate()] * 2))
    refused(
        r"k is Shard\(dim=3\), along its head_dim; " + allowed.format("k"), *lie(Replicate(), Shard(3), Replicate())
    )
    summed = DTensor.from_local(v, mesh, [Partial()])
    refused(r"v is Partial\(sum\); " + allowed.format("v"), *lie(Shard(2), Shard(2), given=(q, k)), summed)
    odd = tensors(heads=6, kv_heads=3)
    refused(r"and 2 ranks do not divide 6 heads and 3 KV heads", *lie(*[Shard(2)] * 3, given=odd))
    refused(
        r"q is Shard\(dim=2\), and by_number reads the number of a head, or of all of them; allowed: Replicate\(\), "
        r"Shard\(0\) over the batch, or q.to_local", *lie(*[Shard(2)] * 3), variant=BY_NUMBER,
    )  # fmt: skip
    refused("and by_sequence reads the number of a sequence", *lie(*[Shard(0)] * 3), variant=BY_SEQUENCE)
    heads = lie(*[Shard(2)] * 3)
    refused("k is a plain tensor, but q is a DTensor; allowed: DTensor.from_local", heads[0], k, heads[2])
    refused(r"k is a DTensor, which attention.* if q is one, too; allowed: k.to_local\(\)", q, heads[1], v)
    refused(r"q is a DTensor, and calls with dropout take local tensors", *heads, variant=DROPPED, dropout_p=0.5)
    used = distribute_tensor(torch.tensor([3, 4], dtype=torch.int32), mesh, [Replicate()])
    refused(r"seqused_k is a DTensor, which", q, k, v, seqused_k=used)


def _refused_elsewhere(mesh: DeviceMesh) -> None:
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in tensors(heads=2))
    calls: list[tuple[str, Call]] = [
        (r"q is a DTensor, .*q.to_local\(\)", lambda: attngen.explain(q, k, v, variant="causal")),
        (r"q is a DTensor, .*q.to_local\(\)", lambda: attngen.tile_map(q, k, variant="causal")),
        (r"k is a DTensor, .*k.to_local\(\)",
         lambda: attngen.append_kv(k, v, k.clone(), v.clone(),
                                   distribute_tensor(torch.zeros(2, dtype=torch.int32), mesh, [Replicate()]))),
        (r"q is a DTensor, .*q.to_local\(\)", lambda: attngen.quantize(q, k, v)),
    ]  # fmt: skip
    for told, call in calls:
        with pytest.raises(CallError, match=told):
            call()


def _two_axes(world: int) -> None:
    """A mesh of data and tensor parallelism, with each size on each axis."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q, k, v, variant="causal", return_lse=True)

    for shape in ((world, 1), (1, world)):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        placements, gradients = compare(call, tensors(), mesh, [(Shard(0), Shard(2))] * 3)
        assert placements == [[Shard(0), Shard(2)], [Shard(0), Shard(1)]]
        assert gradients == [[Shard(0), Shard(2)]] * 3
