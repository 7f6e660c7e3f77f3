"""Calls whose tensors are like those of an earlier call: recognized in one step, and never taken for others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments import seen as seen_module
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.operations.attention import kernel_call, recall
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.pages import cache, starts_of
from tests.runtime.support import FakeDriver, kernel, variant, window_variant
from tests.sampling import sampled

needs_guards = pytest.mark.skipif(seen_module._TensorGuards is None, reason="torch has no such check")
SLOPED = variant("sloped", score="s + slope[h] * kv", tensors=[Declared("slope", "fp32", ("h",))])


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forms of the calls on kernels whose keys were built."""
    forms: list[str] = []
    kind_of, note_others = kernel_call.kind_of, kernel_call.note_others

    def of_kind(given: Any, *others: Any) -> Any:
        forms.append(given.form)
        return kind_of(given, *others)

    def of_dense(key: Any, addresses: Any, given: Any) -> None:
        if given.form == "dense":
            forms.append(given.form)
        note_others(key, addresses, given)

    monkeypatch.setattr(kernel_call, "kind_of", of_kind)
    monkeypatch.setattr(kernel_call, "note_others", of_dense)
    return forms


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    recall.SEEN.clear()
    yield
    recall.SEEN.clear()


def install(*variants: Any, **fields: Any) -> None:
    registry.add(package_of_kernels([kernel(one, **fields) for one in variants], "memory"))


def pages() -> dict[str, Any]:
    c = cache([40, 7, 9], 16, head_dim=64, dtype=torch.bfloat16)
    return {
        "q": torch.randn(6, 4, 64).bfloat16(), "k_pages": c.k_pages, "v_pages": c.v_pages, "page_table": c.page_table,
        "seqused_k": c.seqused_k, "cu_seqlens_q": starts_of([3, 2, 1]), "max_seqlen_q": 3,
    }  # fmt: skip


def dense(rows: int = 40) -> dict[str, Tensor]:
    return {name: torch.randn(2, rows, heads, 64).bfloat16() for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def agree(function: Any, **given: Any) -> Tensor:
    out = function(**given)
    assert torch.equal(out, function(**given, backend="reference"))
    return out


@needs_guards
def test_repeated_calls_are_recognized(gpu: FakeDriver, keyed: list[str]) -> None:
    registry.add(package_of_kernels([kernel(variant()), kernel(variant(), layout="paged")], "memory"))
    for _ in range(5):
        agree(attngen.attention_paged, **pages())
        agree(attngen.attention, **dense(), variant="causal")
    assert sorted(keyed) == ["dense"] * 2 + ["paged"] * 2
    for batch in (1, 2, 5):  # of a kind that is known
        rows = [2] * batch
        c = pages()
        given = {
            "page_table": c["page_table"][:1].expand(batch, -1).contiguous(), "cu_seqlens_q": starts_of(rows),
            "seqused_k": torch.full((batch,), 30, dtype=torch.int32), "max_seqlen_q": 3,
            "q": torch.randn(2 * batch, 4, 64).bfloat16(),
        }  # fmt: skip
        agree(attngen.attention_paged, **{**c, **given})
    assert sorted(keyed) == ["dense"] * 2 + ["paged"] * 2


def changes(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing from an earlier one."""
    q, used, table = given["q"], given["seqused_k"], given["page_table"]
    flat = torch.empty(q.numel() + 8).bfloat16()
    return {
        "another type": {"q": torch.nn.Parameter(q, requires_grad=False)},
        "other strides": {"q": q.transpose(0, 1).contiguous().transpose(0, 1)},
        "another address": {"q": flat[8:].view(q.shape).copy_(q)},
        "out": {"out": torch.empty_like(q)},
        "a wider table": {"page_table": torch.nn.functional.pad(table, (0, 1))},
        "a part of a wider table": {"page_table": torch.nn.functional.pad(table, (0, 1))[:, :-1]},
        "fewer keys": {"seqused_k": used - 1},
        "vectors that begin at multiples of 4": {"seqused_k": torch.cat([used[:1], used])[1:]},
        "a longer bound": {"max_seqlen_q": 5},
        "another scale": {"softmax_scale": 0.5},
        "splits": {"num_splits": 1},
    }


@sampled(always=5, name=list(changes(pages())), known=[True, False])
def test_other_tensors_are_not_taken_for_those_before(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(seen_module, "_TensorGuards", None)
    install(variant(), layout="paged")
    given = pages()
    for changed in ({}, {}, {}, changes(given)[name], changes(given)[name], changes(given)[name], {}):
        agree(attngen.attention_paged, **{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seqused_k": torch.ones(3)}, "seqused_k must be an int32 vector"),
        ({"seqused_k": torch.ones(2, dtype=torch.int32)}, r"seqused_k must have shape \(3,\)"),
        ({"page_table": [1]}, "page_table must be a torch.Tensor, got list"),
        ({"q": torch.randn(6, 4, 64)}, "q has dtype"),
        ({"q": torch.randn(6, 4, 64).bfloat16().requires_grad_()}, "attention over pages has no backward"),
        ({"q": torch._neg_view(torch.randn(6, 4, 64).bfloat16())}, "q has the negative bit"),
        ({"variant": ["causal"]}, "variant must be a name or a Variant"),
        ({"tile_map": 3}, "unknown argument 'tile_map'"),
        ({"page_layout": ["NHD"]}, "page_layout must be one of"),
    ],
)
def test_wrong_calls_are_refused_after_right_ones(gpu: FakeDriver, changed: dict[str, Any], message: str) -> None:
    install(variant(), layout="paged")
    given = pages()
    for _ in range(3):
        attngen.attention_paged(**given)
    with pytest.raises(CallError, match=message):
        attngen.attention_paged(**{**given, **changed})


def test_own_tensors_and_scalars(gpu: FakeDriver) -> None:
    install(SLOPED, window_variant())
    slope = torch.randn(4)
    for changed in (slope, slope + 1, slope - 1, torch.randn(8)[::2], torch.randn(8)[::2], torch.randn(5)[1:], slope):
        agree(attngen.attention, **dense(), variant="sloped", slope=changed)
    for window in (3, 4, 5, 6, 3):
        agree(attngen.attention, **dense(), variant="window", window=window)
    with pytest.raises(CallError, match="must lie within"):
        attngen.attention(**dense(), variant="window", window=0)
    with pytest.raises(CallError, match="must be an integer, got True"):
        attngen.attention(**dense(), variant="window", window=True)


def test_modes_are_looked_at(gpu: FakeDriver) -> None:
    install(variant())
    given = dense()
    for _ in range(3):
        agree(attngen.attention, **given, variant="causal")
    with attngen.debug():
        agree(attngen.attention, **given, variant="causal")
    with torch.inference_mode():
        for _ in range(3):
            agree(attngen.attention, **dense(), variant="causal")
            agree(attngen.attention, **given, variant="causal")
    with pytest.raises(CallError, match=r"torch\.jit\.trace cannot record"):
        torch.jit.trace(lambda q: attngen.attention(q, given["k"], given["v"], variant="causal"), given["q"])
    batched = torch.func.vmap(lambda q: attngen.attention(q, given["k"], given["v"], variant="causal"))
    assert torch.equal(batched(given["q"][None])[0], attngen.attention(**given, variant="causal"))


@needs_guards
def test_what_is_noted_keeps_no_tensor_alive() -> None:
    gc.freeze()  # a collection would look at all that lives for longer
    record = (*(torch.randn(3, 4) for _ in range(3)), None)
    noted = seen(record, (torch.randn(5),), range(4), 5, frozenset(), {})
    assert isinstance(noted, SeenTensors)
    alive = [weakref.ref(tensor) for tensor in record[:3]]
    del record
    gc.collect()
    assert not any(one() is not None for one in alive)


@needs_guards
def test_addresses_lie_where_launches_expect_them() -> None:
    tensors = [torch.randn(8) for _ in range(4)]
    record = (tensors[0], "text", tensors[1], tensors[2], None)
    noted = seen(record, (tensors[3],), (0, 2, 3, 4), 6, frozenset(), {})
    assert noted is not None
    at = [tensor.data_ptr() for tensor in tensors]
    assert noted.addresses(record, (tensors[3],)) == [*at[:3], 0, 0, 0, at[3]]
    assert noted.addresses((*record[:4], tensors[0]), (tensors[3],)) is None
    assert noted.addresses((tensors[0], "text", tensors[1], tensors[1], None), (tensors[3],)) is None
    assert noted.addresses(record, (torch.randn(9)[1:],)) is None


@needs_guards
def test_a_tensor_that_is_passed_twice() -> None:
    """As k and v of a cache that holds both. torch's check takes a tensor once."""
    q, both = torch.randn(3, 4), torch.randn(8)
    record = (q, both, both, None)
    noted = seen(record, (), range(4), 4, frozenset(), {})
    assert noted is not None
    assert noted.addresses(record) == [q.data_ptr(), both.data_ptr(), both.data_ptr(), 0]
    other = torch.randn(8)
    assert noted.addresses((q, other, other, None)) == [q.data_ptr(), other.data_ptr(), other.data_ptr(), 0]
    for changed in ((q, both, other, None), (q, other, both, None), (q, both, both.view(8), None), (q, q, q, None)):
        assert noted.addresses(changed) is None
    assert seen(record, (), range(4), 4, frozenset(), {1: ((0,), ())}) is None  # k may have other rows than v
    assert seen((q, q, q, None), (), range(4), 4, frozenset(), {}) is not None


@needs_guards
def test_calls_with_lists_of_keys_are_recognized_by_their_sizes(gpu: FakeDriver, keyed: list[str]) -> None:
    """They have no kind, so that their sizes are in the key; lists of two lengths do not push each other out."""
    listed = variant("listed", None, keys="index")
    install(listed, layout="paged")
    c = cache([40], 16, head_dim=64, dtype=torch.bfloat16)

    def call(entries: int, queries: int = 5) -> None:
        attngen.attention_paged(
            torch.randn(1, queries, 4, 64).bfloat16(), c.k_pages, c.v_pages, c.page_table, c.seqused_k,
            variant="listed", indices=torch.zeros(1, queries, entries, dtype=torch.int32),
        )  # fmt: skip

    for _ in range(4):
        call(8)
        call(24)
    assert keyed == ["paged"] * 4
    for _ in range(3):
        call(8, 6)
        call(8)
    assert keyed == ["paged"] * 6
