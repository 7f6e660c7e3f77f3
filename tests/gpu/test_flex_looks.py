"""Captured tensors on a GPU: masks are made without waiting, and mean what the tensors say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.integrations.flex import attention as ours

SIZE = 300


def _documents(doc: Tensor) -> Any:
    return ours.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]), None, None, SIZE, SIZE, "cuda"
    )  # fmt: skip


def _wanted(q: Tensor, doc: Tensor) -> Tensor:
    allowed = (doc[:, None] == doc).tril()
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=allowed)


def test_new_tensors_captures_and_programs() -> None:
    q = torch.randn(1, 2, SIZE, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(SIZE, device="cuda")
    docs = [rows // 70, rows // 40, (rows * 7) % 3]  # the last is in no order, so that its kernel is another one
    with attngen.jit():
        for doc in docs:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(20_000_000)
                doc = doc.clone()
                mask = _documents(doc)
                out = ours.flex_attention(q, q, q, None, mask)
            torch.cuda.synchronize()
            torch.testing.assert_close(out, _wanted(q, doc), atol=2e-2, rtol=2e-2)
            doc.copy_(docs[0])  # the same mask, over other numbers
            torch.testing.assert_close(ours.flex_attention(q, q, q, None, mask), _wanted(q, doc), atol=2e-2, rtol=2e-2)

        doc, graph = docs[1].clone(), torch.cuda.CUDAGraph()
        mask = _documents(doc)
        with torch.cuda.graph(graph):  # its first call is the one that is captured
            captured = ours.flex_attention(q, q, q, None, mask)
        graph.replay()
        torch.testing.assert_close(captured, _wanted(q, docs[1]), atol=2e-2, rtol=2e-2)
        unseen, graph = docs[1].clone(), torch.cuda.CUDAGraph()
        refused = pytest.raises(CallError, match="cannot be read while a CUDA graph is captured")
        with refused, torch.cuda.graph(graph):
            _documents(unseen)

        program = torch.compile(lambda mask: ours.flex_attention(q, q, q, None, mask) * 1, fullgraph=True)
        for doc in docs:
            torch.testing.assert_close(program(_documents(doc)), _wanted(q, doc), atol=2e-2, rtol=2e-2)
