"""Kernels whose blocks share the keys of a tile of queries: every mask, layout and head dim, whatever their number."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.inspect.cases import Case
from attngen.inspect.contract import deviation
from attngen.lab.verify.poison import poisoned
from attngen.lab.verify.trial import in_rows, prepare_case, try_kernel
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry import capacity
from attngen.runtime.launch.pinned import Pinned
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec
from tests.gpu.family import DEVICE, Kernels, rendered

SPEC = Path(__file__).with_name("shared.yaml")
_PLANS = plans(load_spec(SPEC))
PLANNED = {plan.name: (spec, plan) for spec, plan in _PLANS if spec.split_tiles}
#: Kernel that takes calls of many tiles.
ORDINARY = {
    plan.name: (spec, plan) for spec, plan in _PLANS if plan.name == "fwd_sm90a_wgmma_bf16_d128_causal_m128n128s2c2"
}
SEED = 50_000

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="CUDA kernels are for sm90a"
)


def to_build() -> list[Prepared]:
    return list(rendered(PLANNED | ORDINARY).values())


@cache
def kernels() -> Kernels:
    """Return the kernels whose blocks share keys by their names, compiled where the cache lacks them."""
    return Kernels(rendered(PLANNED))


@pytest.fixture
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have that many blocks share the keys of a tile, whatever should take the least time."""
    monkeypatch.setattr(capacity, "shares", lambda *given: request.param)
    return int(request.param)


@pytest.mark.parametrize("blocks", [3], indirect=True)
@pytest.mark.parametrize("name", list(PLANNED))
def test_the_contract(name: str, blocks: int) -> None:
    """All cases: fewer keys than blocks, empty sequences, rows that see nothing, more queries than keys."""
    kernel = kernels()[name]
    trial = try_kernel(
        kernel, lambda call, buffers: Pinned(kernel, call, buffers)(), DEVICE, SEED + blocks, small=False
    )
    assert trial.problems == ()


@pytest.mark.parametrize("blocks", [1, 2, 5, 8], indirect=True)
@pytest.mark.parametrize("name", [name for name in PLANNED if "_causal_" in name and "d128" in name])
def test_any_number_of_blocks(name: str, blocks: int) -> None:
    """The same results again and again, with many keys and few."""
    kernel = kernels()[name]
    for number, (rows, keys) in enumerate(((130, 4200), (40, 40 * blocks), (200, 260))):
        case = Case("some", (rows,) * 2, (keys,) * 2, heads=4, kv_heads=2, page_size=64 * (kernel.layout == "paged"))
        inputs, call, wanted = prepare_case(kernel, case, DEVICE, SEED + number)
        results = []
        for _ in range(3):
            memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
            buffers = memory.buffers
            assert buffers.lse is not None
            Pinned(kernel, call, buffers)()
            errors = deviation(call, *in_rows(call, buffers.out, buffers.lse), wanted)
            assert errors.wrong + memory.overrun() == ()
            assert errors.max_error <= errors.max_allowed
            assert errors.lse_error <= errors.lse_allowed
            results.append((buffers.out.clone(), buffers.lse.clone()))
        assert all(torch.equal(a, b) for one in results[1:] for a, b in zip(one, results[0], strict=True))


def test_a_call_of_few_tiles_shares_keys_also_in_a_graph() -> None:
    """128 queries at the end of 8,192 keys: the kernel that shares keys; 4,096 queries: another one."""
    name = "fwd_sm90a_wgmma_bf16_d128_causal_m128n128s3c2_shared"
    members = [kernels()[name], *Kernels(rendered(ORDINARY)).values()]
    registry.clear()
    registry.add(package_of_kernels(members, "tests/gpu/test_shared_tiles"))
    torch.manual_seed(1)
    q = torch.randn(1, 4096, 16, 128, device=DEVICE).bfloat16()
    k, v = (torch.randn(1, 8192, 4, 128, device=DEVICE).bfloat16() for _ in "kv")
    few = q[:, :128]
    told = attngen.explain(few, k, v, variant="causal", package="shared_tests")
    assert told.kernel is not None
    assert told.kernel.name == name
    assert "blocks share" in str(told)
    many = attngen.explain(q, k, v, variant="causal", package="shared_tests").kernel
    assert many is not None
    assert many.name in ORDINARY
    out = attngen.attention(few, k, v, variant="causal", package="shared_tests")
    exact = few.double(), k.double(), v.double()
    wanted = attngen.attention(*exact, variant="causal", package="shared_tests", backend="reference")
    assert isinstance(out, torch.Tensor)
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attngen.attention(few, k, v, variant="causal", package="shared_tests") for _ in range(4)]
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(torch.equal(result, out) for result in results)
    registry.clear()


def test_their_number_is_what_runs_at_once() -> None:
    """Four tiles of many keys have as many blocks as a cluster may have; many tiles have one each."""
    kernel = kernels()["fwd_sm90a_wgmma_bf16_d128_full_m128n128s3c2_shared"]
    for rows, wanted in ((128, 8), (128 * 64, 1)):
        _, call, _ = prepare_case(kernel, Case("few", (rows,), (4096,), heads=4, kv_heads=4), DEVICE, SEED)
        assert capacity.capacity_for(kernel, call, drivers.current, 0).shares == wanted
