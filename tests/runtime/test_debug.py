"""Facts that calls trust, checked on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Monotone
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments import debug
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import FakeDriver, kernel, variant

DOC = variant(
    "docs", "q_pos >= kv and doc[b, kv] == doc[b, q_pos]",
    tensors=[Declared("doc", "int32", ("b", "seqlen_k"), Monotone(1), (0, "seqlen_k"))],
)  # fmt: skip


def call(doc: Any, **options: Any) -> Any:
    q = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16)
    return attngen.attention(q, q, q, variant=DOC, doc=torch.tensor(doc, dtype=torch.int32), **options)


def test_facts_are_checked_inside_only() -> None:
    good, falling = [[0, 0, 1, 1], [0, 1, 2, 4]], [[0, 0, 1, 1], [0, 1, 3, 2]]
    call(falling)
    with attngen.debug():
        call(good)
        with pytest.raises(
            CallError, match=r"'doc' is declared nondecreasing along axis 1, but it decreases at index \[1, 3\]"
        ):
            call(falling)
        with pytest.raises(CallError, match="tensor 'doc' holds 5, above its max 4"):
            call([[0, 0, 1, 1], [0, 1, 2, 5]])
        with pytest.raises(CallError, match="tensor 'doc' holds -1, below its min 0"):
            call([[-1, 0, 1, 1], [0, 1, 2, 3]])
        with attngen.debug():
            pass
        assert debug.active()
    assert not debug.active()
    call(falling)


def test_a_gpu_call_is_checked_before_it_is_launched(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(DOC), kernel(variant("full", None), layout="varlen")], "memory"))
    with attngen.debug():
        call([[0, 0, 1, 1], [0, 1, 2, 4]])
        assert len(gpu.launches) == 1
        with pytest.raises(CallError, match="nondecreasing"):
            call([[0, 0, 1, 0], [0, 1, 2, 4]])
        q = torch.zeros(8, 1, 64, dtype=torch.bfloat16)
        cu = torch.tensor([0, 5, 3], dtype=torch.int32)
        with pytest.raises(CallError, match="must not decrease"):
            attngen.attention_varlen(q, q, q, cu, cu, 5, 5, variant="full")
    assert len(gpu.launches) == 1
