"""The indexer of serving engines: batches of both forms, parts of them, and caches of bytes, against float64."""

from __future__ import annotations

import pytest
import torch

from attngen import resources
from attngen.build.pipeline import prepare_unrendered
from attngen.errors import NoKernelError
from attngen.integrations.engines.indexer import (
    VARIABLE,
    Requests,
    index_keys,
    require_kernels,
    rows_of,
    select_keys,
)
from attngen.integrations.engines.layers import asked_for
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec
from tests.integrations.engines.index_batches import PAGE, index_batch
from tests.runtime.host_kernels import as_kernels


def test_packed_requests_and_pages_that_lie_apart() -> None:
    made = index_batch(extra_tokens=2)
    for batch in (made, made.spread(64)):
        requests = Requests(batch.table, batch.used, 200, batch.starts)
        keys = index_keys(batch.pages, PAGE)
        chosen = select_keys(batch.q, batch.weights, keys, requests, batch.seen, 24, out=batch.out)
        assert chosen is batch.out
        made.check(chosen)
        slots = select_keys(batch.q, batch.weights, keys, requests, batch.seen, 24, slots=True)
        assert torch.equal(slots[:-2], made.slots(chosen[:-2]))


def test_requests_of_as_many_tokens() -> None:
    made = index_batch((2, 2, 2), (2, 70, 129), width=9)
    q, weights = made.q.unflatten(0, (3, 2)), made.weights.unflatten(0, (3, 2))
    requests, lengths = Requests(made.table, made.used, 500), made.seen.view(3, 2)
    keys = index_keys(made.pages.flatten(1), PAGE)
    chosen = select_keys(q, weights, keys, requests, lengths, 24).flatten(0, 1)
    made.check(chosen)
    slots = select_keys(q, weights, keys, requests, lengths, 24, slots=True)
    assert torch.equal(slots.flatten(0, 1), made.slots(chosen))


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_parts_of_a_step(size: int) -> None:
    made = index_batch()
    whole = Requests(made.table, made.used, 200, made.starts)
    for first in range(0, len(made.q), size):
        rows = slice(first, min(first + size, len(made.q)))
        part = rows_of(whole, rows.start, rows.stop)
        select_keys(
            made.q[rows], made.weights[rows], index_keys(made.pages, PAGE), part, made.seen[rows], 24,
            out=made.out[rows],
        )  # fmt: skip
    made.check(made.out)


def test_kernels_must_be_built() -> None:
    require_kernels("cpu")
    registry.clear()
    with pytest.raises(NoKernelError, match="run 'attngen build specs/integrations/engines_sparse.yaml'"):
        require_kernels("cuda")
    spec = load_spec(resources.specs_dir() / "integrations/engines_sparse.yaml")
    registry.add(package_of_kernels(as_kernels([one.plan for one in prepare_unrendered(spec)]), "here"))
    require_kernels("cuda")
    registry.clear()


def test_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("ATTNGEN_INDEXER", value)
        assert asked_for(VARIABLE) is wanted
    monkeypatch.delenv("ATTNGEN_INDEXER")
    assert not asked_for(VARIABLE)
