"""Kernels that are compiled on the first call give the results of the reference: forward, backward, and drop-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import NoKernelError
from attngen.runtime.registry.lookup import registry

DOCUMENTS: dict[str, Any] = {"doc": {"dtype": "int32", "shape": ["b", "seqlen_k"], "monotone": {"axis": 1}}}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and a registry that knows no package."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit():
        yield
    registry.clear()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=2e-2, atol=2e-2)


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
    for actual, wanted in zip(*results, strict=True):
        close(actual, wanted)
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
        out = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    close(out.transpose(1, 2), wanted)


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
    """Kernels are compiled while a program is traced, so that its first run may be the capture of a CUDA graph."""
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
        compiled_out = torch.compile(program, fullgraph=True, backend=watched)(q)
    assert there == [1]
    torch._dynamo.reset()
    trained = torch.compile(program, fullgraph=True, mode="reduce-overhead")
    trained(q).sum().backward()
    assert q.grad is not None
    assert len(registry._compiled) == 2
    wanted = q.detach().requires_grad_()
    out = attngen.attention(wanted * 2, wanted, wanted, variant="causal", backend="reference").square()
    out.sum().backward()
    close(compiled_out, out)
    assert wanted.grad is not None
    torch.testing.assert_close(q.grad.float(), wanted.grad.float(), rtol=5e-2, atol=5e-2)


def test_a_tile_map_of_a_program_that_is_recorded() -> None:
    """Before torch records a CUDA graph, it runs the program with the graph's memory, in which no map may stay."""
    torch._dynamo.reset()
    q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    mask: dict[str, Any] = {"variant": "dilated", "window": 200, "dilation": 3}
    wanted = attngen.attention(q * 2, q, q, backend="reference", **mask)
    program = torch.compile(lambda q: attngen.attention(q * 2, q, q, **mask), fullgraph=True, mode="reduce-overhead")
    for plain in (0, 0, 0, 2, 0):
        torch.compiler.cudagraph_mark_step_begin()
        close(program(q), wanted)
        for _ in range(plain):
            close(attngen.attention(q * 2, q, q, **mask), wanted)


def _flex_documents(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q // 100 == kv // 100)


def test_a_decoding_loop_of_flex_attention() -> None:
    """The rows of a prompt's attention, one at a time, by masks that are indexed and offset."""
    from attngen.integrations.flex import attention as flex

    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    base = flex.create_block_mask(_flex_documents, None, None, 300, 300, device="cuda", BLOCK_SIZE=64)
    whole = flex.flex_attention(q, k, v, block_mask=base)
    for position in (0, 64, 131, 299):
        place = torch.tensor([position], device="cuda")
        mask = base[:, :, place // 64]
        mask.mask_mod = lambda b, h, q, kv, place=place: _flex_documents(b, h, q + place[0], kv)
        mask.seq_lengths = (1, 300)
        close(
            flex.flex_attention(q[:, :, position : position + 1], k, v, block_mask=mask)[:, :, 0], whole[:, :, position]
        )


def test_lists_of_blocks_decide_what_is_seen() -> None:
    """Forward, backward and largest logits beside the same pairs as a mask of bools."""
    from attngen.integrations.flex import attention as flex

    made = flex.create_block_mask(_flex_documents, 1, 1, 256, 256, device="cuda", BLOCK_SIZE=64)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    mask = flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=_flex_documents, seq_lengths=(256, 256))
    leaves = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out, aux = flex.flex_attention(*leaves, block_mask=mask, return_aux=flex.AuxRequest(lse=True, max_scores=True))
    above = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, above)
    places = torch.arange(256, device="cuda")
    visible = _flex_documents(None, None, places[:, None], places)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = (exact[0] @ exact[1].transpose(-1, -2) / 8).masked_fill(~visible, -torch.inf)
    wanted = logits.softmax(-1) @ exact[2]
    close(out, wanted.to(out.dtype))
    close(aux.lse, logits.logsumexp(-1).float())
    close(aux.max_scores, logits.amax(-1).float())
    for one, other in zip(gradients, torch.autograd.grad(wanted, exact, above.double()), strict=True):
        close(one, other.to(one.dtype))
