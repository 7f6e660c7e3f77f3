"""Facts that calls trust, checked on request."""

from __future__ import annotations

import math
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
        with pytest.raises(CallError, match=r"docs: tensor 'doc' holds 5 at \[1, 3\], outside its declared"):
            call([[0, 0, 1, 1], [0, 1, 2, 5]])
        with pytest.raises(CallError, match=r"tensor 'doc' holds -1 at \[0, 0\], outside its declared range 0 .. 4"):
            call([[-1, 0, 1, 1], [0, 1, 2, 3]])
        with attngen.debug():
            pass
        assert debug.active()
    assert not debug.active()
    call(falling)


LOOKED_UP = variant(
    "looked_up", "q_pos >= kv", score="s + table[id[b, kv]] + (gain if q_pos > 0 else 0.0)",
    tensors=[
        Declared("id", "int32", ("b", "seqlen_k"), None, (0, 15)), Declared("table", "fp32", (16,)),
        Declared("gain", "fp32", (), None, (0.0, None)),
    ],
)  # fmt: skip


def look_up(ids: list[int], queries: int = 4, gain: float = 0.5) -> Any:
    q, k = torch.zeros(1, queries, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    own = {"id": torch.tensor([ids], dtype=torch.int32), "table": torch.zeros(16), "gain": torch.tensor(gain)}
    return attngen.attention(q, k, k, variant=LOOKED_UP, **own)


@pytest.mark.parametrize(
    ("ids", "gain", "message"),
    [
        ([0, 3, 99, 15], 0.5, r"tensor 'id' holds 99 at \[0, 2\], outside its declared range 0 .. 15"),
        ([0, -7, 1, 2], 0.5, r"tensor 'id' holds -7 at \[0, 1\], outside its declared range 0 .. 15"),
        ([0, 1, 2, 3], -1.0, r"tensor 'gain' holds -1.0 at \[\], outside its declared range 0.0 .. inf"),
        ([0, 1, 2, 3], math.nan, r"tensor 'gain' holds nan at \[\], outside its declared range 0.0 .. inf"),
    ],
)
def test_the_reference_and_debug_name_an_element_beyond_its_range(ids: list[int], gain: float, message: str) -> None:
    """A kernel whose index has such a range reads without a check."""
    with pytest.raises(CallError, match=message):
        look_up(ids, gain=gain)
    with attngen.debug(), pytest.raises(CallError, match="looked_up: " + message):
        look_up(ids, gain=gain)


def test_elements_that_are_not_read_may_be_anything() -> None:
    look_up([0, 1, 2, 15])
    q, k = torch.zeros(5, 1, 64, dtype=torch.bfloat16), torch.zeros(6, 1, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
    ids = torch.tensor([[3, 4, -1, 99], [0, 1, 2, 3]], dtype=torch.int32)  # those beyond a sequence pad
    own = {"id": ids, "table": torch.zeros(16), "gain": torch.tensor(0.0)}
    attngen.attention_varlen(q, k, k, *cu, 3, 4, variant=LOOKED_UP, **own)
    ids[1, 3] = 16
    with pytest.raises(CallError, match=r"tensor 'id' holds 16 at \[1, 3\]"):
        attngen.attention_varlen(q, k, k, *cu, 3, 4, variant=LOOKED_UP, **own)


def test_a_gpu_call_is_checked_before_it_is_launched(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(DOC), kernel(variant("full", None), layout="varlen")], "memory"))
    with attngen.debug():
        call([[0, 0, 1, 1], [0, 1, 2, 4]])
        assert len(gpu.launches) == 1
        with pytest.raises(CallError, match="nondecreasing"):
            call([[0, 0, 1, 0], [0, 1, 2, 4]])
        with pytest.raises(CallError, match=r"'doc' holds 9 at \[0, 3\], outside its declared range 0 .. 4"):
            call([[0, 0, 1, 9], [0, 1, 2, 4]])
        q = torch.zeros(8, 1, 64, dtype=torch.bfloat16)
        cu = torch.tensor([0, 5, 3], dtype=torch.int32)
        with pytest.raises(CallError, match="must not decrease"):
            attngen.attention_varlen(q, q, q, cu, cu, 5, 5, variant="full")
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_single_scale_is_checked(bad: float) -> None:
    """Seen: a wrong element of a tensor without axes was not found."""
    debug.check_scale("k_scale", torch.tensor(0.5))
    with pytest.raises(CallError, match=r"k_scale\[\] is .*; a scale is finite and positive"):
        debug.check_scale("k_scale", torch.tensor(bad))
