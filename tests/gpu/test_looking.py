"""``attngen.debug.compare`` on kernels: what is right is within what is allowed, what is not is told by its tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attngen
from attngen.inspect import comparison
from attngen.runtime.registry.lookup import registry


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this file, in which the kernels that calls lack are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        registry.clear()
        with attngen.jit():
            yield
    registry.clear()


def tensors(queries: int, keys: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    shapes = (1, queries, 8), (1, keys, 2), (1, keys, 2)
    return [torch.randn(*shape, 128, device="cuda", dtype=torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize(("variant", "own"), [("causal", {}), ("softcap", {"cap": 20.0})])
def test_kernels_and_their_gradients_are_close(variant: str, own: dict[str, Any]) -> None:
    report = attngen.debug.compare(*tensors(700, 900), variant=variant, gradients=True, **own)
    assert report.ok, report
    assert "fwd_sm90a" in report.ran
    assert {part.what for part in report.parts} == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.alone
def test_rows_of_16k_keys_and_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(16384, 16384)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert attngen.debug.compare(*inputs, variant="causal", heads=slice(0, 4)).ok
    assert torch.cuda.max_memory_allocated() - before < 24 * 2**30
    attend = comparison._attend

    def broken(*given: Any, **more: Any) -> Any:
        out, lse = attend(*given, **more)
        out[0, 16000:16003, 3] += 1
        return out, lse

    monkeypatch.setattr(comparison, "_attend", broken)
    report = attngen.debug.compare(*inputs, variant="causal", rows=slice(15900, 16100))
    assert [(one.what, one.head, one.count) for one in report.differences] == [("out", 3, 3)]
    assert report.differences[0].rows[0] <= 16000 <= report.differences[0].rows[1]


def test_scores_on_the_card() -> None:
    q, k, v = tensors(100, 16384)
    looked = attngen.debug.scores(q, k, v, variant="causal", rows=[0, 99], heads=[1, 7])
    out = attngen.attention(q, k, v, variant="causal")
    values = v[0].double()[:, [0, 1]].transpose(0, 1)
    torch.testing.assert_close((looked.probabilities @ values).transpose(0, 1), out[0, [0, 99]][:, [1, 7]].double(),
                               rtol=1e-2, atol=1e-2)  # fmt: skip
