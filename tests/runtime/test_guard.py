"""Stores of earlier calls in every state of torch: a call runs as it would with nothing stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.arguments import debug, seen, torch_state
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.append.path import APPEND
from attngen.runtime.operations.attention import kernel_call, layers, mixed, pairs, recall
from attngen.runtime.operations.attention.layers import PagedBatch, PagedCache, PagedLayer
from attngen.runtime.operations.merge.kernel import MERGES
from attngen.runtime.operations.topk.kernel import SELECTION
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import HostDriver, kernels, kernels_for_indices, merging_kernels
from tests.runtime.operations.attention.test_mixed import leaving_out
from tests.runtime.pages import cache, starts_of
from tests.runtime.states import GUARDED, OTHERS, STATES, compiled, outcome
from tests.runtime.support import FakeDriver, kernel, variant
from tests.sampling import few

pytestmark = pytest.mark.skipif(seen._TensorGuards is None, reason="torch has no check of tensors")


class Store(NamedTuple):
    """A store, by calls that it serves once it is filled."""

    #: Makes a call, with what it belongs to.
    of: Callable[[], Callable[..., Any]]
    #: Makes the tensors of the call, others each time.
    tensors: Callable[[], list[Tensor]]
    #: The function that looks at a call which no store knows.
    looks: tuple[Any, str]
    #: The place of a tensor in which debug checks refuse numbers that are too large.
    checked: int | None = None
    #: Whether a program of torch.compile can contain the call.
    compiles: bool = False


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def dense() -> list[Tensor]:
    return [random(2, 5, 4, 64), *(random(2, 5, 2, 64) for _ in "kv"), torch.tensor([3, 5], dtype=torch.int32)]


def packed() -> list[Tensor]:
    return [random(8, 4, 64), *(random(8, 2, 64) for _ in "kv"), starts_of([5, 3])]


def pages(rows: list[int], heads: int) -> list[Tensor]:
    c = cache([30, 8, 3], 16, head_dim=64, dtype=torch.bfloat16)
    return [random(sum(rows), heads, 64), c.k_pages, c.v_pages, c.page_table, c.seqused_k, starts_of(rows)]


def paged(longest: int) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor, starts: Tensor) -> Any:
        return attngen.attention_paged(q, k, v, table, used, cu_seqlens_q=starts, max_seqlen_q=longest)

    return call


def of_layer() -> Callable[..., Any]:
    c = cache([30, 8, 3], 16, head_dim=64, dtype=torch.bfloat16)
    layer = PagedLayer(c.k_pages, c.v_pages, variant="causal", softmax_scale=0.2)

    def call(q: Tensor, used: Tensor) -> Tensor:
        out = torch.full_like(q, 7.0)
        layer(q, out, PagedBatch(table, used, starts, 3, 6))
        return out

    table, starts = c.page_table, starts_of([3, 2, 1])
    return call


LENGTHS = torch.tensor([30, 8, 3], dtype=torch.int32)


def of_cache() -> Callable[..., Any]:
    own = [torch.zeros(6, 16, 2, 64).bfloat16() for _ in "kv"]
    ours = PagedCache(*own)

    def call(k: Tensor, v: Tensor, slots: Tensor) -> list[Tensor]:
        for one in own:
            one.zero_()
        ours.write(k, v, slots)
        return [one.clone() for one in own]

    return call


def append(k: Tensor, v: Tensor, slots: Tensor) -> list[Tensor]:
    own = [torch.zeros(6, 16, 2, 64).bfloat16() for _ in "kv"]
    attngen.append_kv(k, v, *own, slots=slots)
    return own


def tokens() -> list[Tensor]:
    return [random(5, 2, 64), random(5, 2, 64), torch.randperm(96)[:5]]


STORES = {
    "dense": Store(
        lambda: lambda q, k, v, used: attngen.attention(q, k, v, variant="causal", seqused_k=used), dense,
        (kernel_call, "run"), 3, compiles=True,
    ),
    "varlen": Store(
        lambda: lambda q, k, v, at: attngen.attention_varlen(q, k, v, at, at, 5, 5, variant="causal"), packed,
        (kernel_call, "run"), 3,
    ),
    "paged": Store(lambda: paged(3), lambda: pages([3, 2, 1], 4), (kernel_call, "run"), 4),
    "pairs": Store(lambda: paged(20), lambda: pages([20, 1, 2], 8), (mixed, "few_queries"), 4),
    "launches of a layer": Store(of_layer, lambda: [random(6, 4, 64), LENGTHS], (layers, "run_or_trace"), 1),
    "sizes of a layer": Store(of_layer, lambda: [random(6, 4, 64), LENGTHS.clone()], (layers, "run_or_trace"), 1),
    "append": Store(lambda: append, tokens, (type(APPEND), "check"), 2, compiles=True),
    "writes of a cache": Store(of_cache, tokens, (layers, "append"), 2),
    "topk": Store(lambda: lambda scores: attngen.topk(scores, 5), lambda: [torch.randn(3, 40)],
                  (type(SELECTION), "check")),
    "merge": Store(
        lambda: lambda a, b, *lses: attngen.merge([a, b], lses)[0],
        lambda: [random(2, 5, 4, 64), random(2, 5, 4, 64), torch.randn(2, 4, 5), torch.randn(2, 4, 5)],
        (type(MERGES), "check"), compiles=True,
    ),
}  # fmt: skip
#: Kernels of stores that run on the host.
ON_HOST = {"append": kernels, "writes of a cache": kernels, "topk": kernels_for_indices, "merge": merging_kernels}


@pytest.fixture
def _gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device whose tensors are the CPU's, with kernels for a store."""
    name = request.node.callspec.params["name"]
    if name in ON_HOST and COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check = debug.check_lengths  # which also runs on the CPU, where one call is of a part of the sequences
    monkeypatch.setattr(debug, "check_lengths", lambda call: check(call) if debug.active() else None)
    if name in ON_HOST:
        known = ON_HOST[name]()
    elif name == "pairs":
        few = leaving_out(variant(), "most_queries", "beside", split_kv=True)
        known = [few, leaving_out(variant(), "least_queries", "beside")]
    else:
        known = [kernel(variant(), layout=layout) for layout in ("dense", "varlen", "paged")]
    registry.add(package_of_kernels(known, "memory"))
    with drivers.use(HostDriver() if name in ON_HOST else FakeDriver()):
        yield
    forget()


def forget() -> None:
    """Empty all stores."""
    for one in (recall.SEEN, kernel_call.PREPARED, pairs._PAIRS, layers._ALIKE):
        one.clear()
    for helper in (APPEND, SELECTION, MERGES):
        for kept in (helper.prepared, helper._kinds, helper._seen):
            kept.clear()


def looked(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[Any]:
    """Calls that are looked at from now on."""
    calls: list[Any] = []
    owner, name = store.looks
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **options: (calls.append(given), real(*given, **options))[1])
    return calls


@contextmanager
def too_large(tensor: Tensor | None) -> Iterator[None]:
    """Numbers that debug checks refuse, in the same memory."""
    if tensor is None:
        yield
        return
    tensor.add_(100_000)
    try:
        yield
    finally:
        tensor.sub_(100_000)


CASES = [*product(STORES, STATES)]
#: Of each store, the state in which it shows that it asks the guard, whose own test has all states; and those whose
#: branches no other shows.
ALWAYS = [
    *((name, "dispatch mode" if store.checked is None else "debug checks") for name, store in STORES.items()),
    ("dense", "vmap"), ("varlen", "autocast"), ("pairs", "a gradient"), ("paged", "a tangent"),
]  # fmt: skip


@pytest.mark.usefixtures("_gpu")
@few(("name", "state"), CASES, always=[*map(CASES.index, ALWAYS)], often=range(0, 999, 3))
def test_a_store_changes_no_call(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a state, nor after one in which the store was still empty."""
    store = STORES[name]
    torch.manual_seed(5)
    tensors, others = store.tensors(), store.tensors()
    checked = others[store.checked] if state == "debug checks" and store.checked is not None else None
    forget()
    call = store.of()
    with too_large(checked):
        wanted = outcome(state, call, others)
    after = outcome("none", call, tensors)
    forget()
    call, calls = store.of(), looked(monkeypatch, store)
    for _ in range(4):
        calls.clear()
        assert outcome("none", call, tensors) == after
        if not calls:
            break
    assert not calls, "the store does not know the call"
    with too_large(checked):
        assert outcome(state, call, others) == wanted


@pytest.mark.usefixtures("_gpu")
@few("name", [name for name, store in STORES.items() if store.compiles], always=range(0, 999, 2))
def test_a_store_changes_no_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = STORES[name]
    call, tensors = store.of(), store.tensors()
    calls = looked(monkeypatch, store)
    for _ in range(4):
        calls.clear()
        plain = outcome("none", call, tensors)
    assert not calls
    result, operators = compiled(call, tensors)
    assert outcome("none", lambda *_: result, tensors) == plain
    assert len(operators) == 1


@pytest.mark.parametrize("state", STATES)
def test_the_guard(state: str) -> None:
    answers: list[bool] = []

    def call(one: Tensor) -> Tensor:
        answers.append(may_repeat(one))
        return one * 1

    outcome(state, call, [torch.randn(3)])
    assert answers
    assert set(answers) == {state not in GUARDED}


@pytest.mark.parametrize("state", OTHERS)
def test_a_state_ends(state: str) -> None:
    outcome(state, lambda one: one * 1, [torch.randn(3)])
    assert may_repeat(torch.randn(3))


def test_tensors_that_torch_looks_at_itself() -> None:
    class Own(Tensor):
        pass

    assert not may_repeat(torch.randn(3, device="meta"))
    assert not may_repeat(torch.randn(3).as_subclass(Own))
    assert not may_repeat(None)
    assert may_repeat(torch.nn.Parameter(torch.randn(3)))
