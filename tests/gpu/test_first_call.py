"""Kernels that are compiled on the first call give the results of the reference: forward, backward, and drop-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import NoKernelError
from attngen.runtime.registry import registry

DOCUMENTS: dict[str, Any] = {"doc": {"dtype": "int32", "shape": ["b", "seqlen_k"], "monotone": {"axis": 1}}}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and a registry that knows no package."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit():
        yield
    registry.clear()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_forward_and_backward_of_a_mask_of_ones_own(head_dim: int, capfd: pytest.CaptureFixture[str]) -> None:
    made = attngen.variant("q_pos >= kv and doc[b, q_pos] == doc[b, kv]", tensors=DOCUMENTS)
    doc = (torch.arange(300, device="cuda", dtype=torch.int32) // 77).expand(2, 300).contiguous()
    q, k, v = (torch.randn(2, 300, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    grad, results = torch.randn_like(q), []
    for backend in (None, "reference"):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        out = attngen.attention(*leaves, variant=made, doc=doc, backend=backend)
        out.backward(grad)
        results.append((out, *(leaf.grad for leaf in leaves)))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted)
    assert capfd.readouterr().err.count("attngen.jit: compiled") == 2


def test_a_preset_packed_in_pages_and_compiled() -> None:
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    wanted = attngen.attention(q, q, q, variant="causal", backend="reference")
    starts = torch.tensor([0, 256], device="cuda", dtype=torch.int32)
    close(attngen.attention_varlen(q[0], q[0], q[0], starts, starts, 256, 256, variant="causal")[None], wanted)
    table, used = torch.zeros((1, 1), device="cuda", dtype=torch.int32), starts[1:]
    close(attngen.attention_paged(q, q, q, table, used, variant="causal"), wanted)
    traced = torch.compile(lambda q: attngen.attention(q, q, q, variant="causal"), fullgraph=True)
    close(traced(q), wanted)
    with attngen.integrations.sdpa():
        heads_first = q.transpose(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    close(found.transpose(1, 2), wanted)


def test_nothing_is_compiled_inside_a_capture() -> None:
    q = torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NoKernelError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        attngen.attention(q, q, q, variant="causal")
    wanted = attngen.attention(q, q, q, variant="causal")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(q, q, q, variant="causal")
    graph.replay()
    assert torch.equal(out, wanted)


def test_a_compiled_program_finds_its_kernels_when_it_first_runs() -> None:
    """They are compiled while it is traced, so that its first run may be the capture of a CUDA graph."""
    from torch._inductor.compile_fx import compile_fx

    there: list[int] = []

    def watched(graph: Any, inputs: Any) -> Any:
        there.append(len(registry._compiled))
        return compile_fx(graph, inputs)

    def program(q: torch.Tensor) -> torch.Tensor:
        return attngen.attention(q * 2, q, q, variant="causal").square()

    torch._dynamo.reset()
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        found = torch.compile(program, fullgraph=True, backend=watched)(q)
    assert there == [1]
    torch._dynamo.reset()
    trained = torch.compile(program, fullgraph=True, mode="reduce-overhead")
    trained(q).sum().backward()
    assert q.grad is not None
    assert len(registry._compiled) == 2
    wanted = q.detach().requires_grad_()
    out = attngen.attention(wanted * 2, wanted, wanted, variant="causal", backend="reference").square()
    out.sum().backward()
    close(found, out)
    assert wanted.grad is not None
    torch.testing.assert_close(q.grad.float(), wanted.grad.float(), rtol=5e-2, atol=5e-2)
