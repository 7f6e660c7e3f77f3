"""Rows that lie in several runs of tiles: the calls of all ranks of a plan, one after the other on one GPU, together
compute what one call over the whole sequence does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.lang.check import with_dropout
from attngen.parallel import Cost, Plan
from attngen.parallel.called import called
from attngen.parallel.local import local_variant
from attngen.runtime.registry.lookup import registry
from attngen.schema.writing import spec_text
from attngen.tools.build.pipeline import build
from attngen.variants import PythonVariant
from tests.gpu.family import arch_here
from tests.parallel.cases import HEADS, KV_HEADS, Case, cases
from tests.parallel.local_calls import by_tiles, gradients, variant_of
from tests.parallel.ranks import alone, tensors

RANKS, SEQLEN = 4, 2900

#: Cases by head dim, dtype, and whether sums have a fixed order.
CALLS: dict[tuple[int | tuple[int, int], str, bool], tuple[str, ...]] = {
    (64, "bf16", False): ("causal", "window", "alibi", "softcap", "varlen_causal", "prefix_lm"),
    (128, "bf16", False): (
        "causal", "window", "sink_window", "documents", "document_starts", "alibi", "softcap", "window_sink",
        "prefix_lm", "chunked", "head_windows", "varlen_causal", "varlen_full", "varlen_window", "sliding_tiles",
    ),
    (128, "bf16", True): ("causal", "window", "varlen_causal"),
    (128, "fp16", False): ("causal", "softcap"),
    ((192, 128), "bf16", False): ("causal", "window", "alibi", "varlen_causal"),
    (256, "bf16", False): ("causal", "softcap", "varlen_causal"),
}  # fmt: skip

#: Head dims of the calls with dropout: backward kernels of one block and of a cluster.
_DROPPED = (64, 128, 256)

#: Allowed error, in errors of plain PyTorch in the same dtype.
_FACTOR = 3.0

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="CUDA kernels are for sm90a"
)


def _plan(case: Case) -> Plan:
    plan = attngen.parallel.plan(
        case.variant, SEQLEN, RANKS, tile=128, chunks=4, method="gather", cu_seqlens=case.cu_seqlens(SEQLEN),
        cost=Cost(HEADS, KV_HEADS), **case.fixed(SEQLEN),
    )  # fmt: skip
    return by_tiles(plan)


def _of(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


def _dropped() -> PythonVariant:
    """Causal attention with dropout by position."""
    causal = _plan(_of("causal")).layers[0].variant
    return called(local_variant(with_dropout(replace(causal, name="dropped")), "tiles", "all").variant)


def _allowed(what: str, plain: Tensor, wanted: Tensor, element: torch.dtype) -> Tensor:
    """The error allowed beside that of plain PyTorch: what ranks compute of dK and dV is rounded by each of them."""
    rounded = RANKS * torch.finfo(element).eps / 2 * wanted.abs().max() if what in ("dk", "dv") else 0.0
    return (plain - wanted).abs().max() * _FACTOR + 1e-3 + rounded


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rows")
    made = {name: variant_of(_plan(_of(name))) for names in CALLS.values() for name in names}
    entries = []
    for (head_dim, dtype, deterministic), names in CALLS.items():
        entry: dict[str, Any] = {
            "variant": [made[name].name for name in names], "arch": arch_here().name, "dtype": dtype, "backend": "cuda",
            "head_dim": {"qk": head_dim[0], "v": head_dim[1]} if isinstance(head_dim, tuple) else head_dim,
            "passes": ["forward", "backward"],
        }  # fmt: skip
        entries.append({**entry, **({"deterministic": True} if deterministic else {})})
    dropped = made["dropped"] = _dropped()
    entry = {"variant": dropped.name, "arch": arch_here().name, "dtype": "bf16", "passes": ["forward", "backward"]}
    entries.append({**entry, "head_dim": list(_DROPPED), "backend": "cuda"})
    spec = folder / "rows_by_tiles.yaml"
    spec.write_text(spec_text({one.name: one.fields for one in made.values()}, entries))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(folder / "cache"))
        registry.clear()
        assert build(spec).failures == ()
        registry.clear()
        yield
    registry.clear()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "deterministic", "name"),
    [(*key, name) for key, names in CALLS.items() for name in names],
)
def test_ranks_compute_as_one(head_dim: int | tuple[int, int], dtype: str, deterministic: bool, name: str) -> None:
    case = _of(name)
    plan = _plan(case)
    element = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    qk, v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    whole = [x.to("cuda", element) for x in tensors(case, SEQLEN, qk)]
    whole[2:] = [x[..., :v].contiguous() for x in whole[2:]]
    values = {
        key: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for key, value in {**case.fixed(SEQLEN), **case.passed(SEQLEN)}.items()
    }
    results = []
    for precision in (torch.float64, element):
        *leaves, weight = (x.to(precision) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        out, _ = alone(case, leaves[0], leaves[1], leaves[2], SEQLEN, {**values, "backend": "reference"})
        grads = torch.autograd.grad(out, leaves, weight)
        results.append([x.detach().double() for x in (out, *grads)])
    parts = [x if x.dim() == 4 else x[None] for x in whole]
    passed = {key: value for key, value in values.items() if key in case.passed(SEQLEN)}
    options = {"backend": "cuda", "deterministic": deterministic}
    ours = gradients(plan, parts[:3], parts[3], passed, **options)
    for what, one, wanted, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error = (one.double().reshape(wanted.shape) - wanted).abs().max()
        allowed = _allowed(what, plain, wanted, element)
        assert error <= allowed, f"{name}: {what} is off by {error:.2e} of {allowed:.2e}"
    again = gradients(plan, parts[:3], parts[3], passed, **options)
    assert torch.equal(ours[0], again[0])
    if deterministic:
        assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("head_dim", _DROPPED)
def test_ranks_drop_what_one_call_drops(head_dim: int) -> None:
    case = Case("dropped", attngen.variant("q_pos >= kv", dropout=True, name="dropped"))
    whole = [x.to("cuda", torch.bfloat16) for x in tensors(case, SEQLEN, head_dim)]
    options = {"dropout_p": 0.3, "rng_state": torch.tensor([-(2**61) + 3, 5], device="cuda")}
    plan, variant = _plan(_of("causal")), _dropped()
    results = []
    for precision in (torch.float64, torch.bfloat16):
        *leaves, weight = (x.to(precision) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        out = attngen.attention(*leaves, variant=case.variant, backend="reference", **options)
        results.append([x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, weight))])
    ours = [torch.zeros_like(x) for x in results[0]]
    for rank in range(RANKS):
        rows = plan.rows(rank, device="cuda")
        leaves = [x.detach().clone().requires_grad_() for x in (whole[0][:, rows], whole[1], whole[2])]
        out = attngen.attention(*leaves, variant=variant, row_position=rows.int(), backend="cuda", **options)
        dq, dk, dv = torch.autograd.grad(out, leaves, whole[3][:, rows])
        ours[0][:, rows], ours[1][:, rows] = out.detach().double(), dq.double()
        ours[2] += dk
        ours[3] += dv
    for what, one, wanted, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error, allowed = (one - wanted).abs().max(), _allowed(what, plain, wanted, torch.bfloat16)
        assert error <= allowed, f"{what} is off by {error:.2e} of {allowed:.2e}"


def test_rows_beyond_the_end_and_few_keys() -> None:
    """Tiles that end within a run, and no more keys than rows see."""
    case = _of("causal")
    plan = _plan(case)
    variant = variant_of(plan)
    for rows, keys in ((1, 5), (129, 300), (200, 900), (384, 391)):
        q, k, v = (torch.randn(1, n, h, 128, device="cuda", dtype=torch.bfloat16)
                   for n, h in ((rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)))  # fmt: skip
        place = torch.arange(rows, device="cuda", dtype=torch.int32)
        position = torch.where(place < 128 * (rows // 256), place, place + (keys - rows))
        ours = attngen.attention(q, k, v, variant=variant, row_position=position, backend="cuda")
        wanted = attngen.attention(
            q.double(), k.double(), v.double(), variant=variant, row_position=position, backend="reference"
        )
        assert (ours.double() - wanted).abs().max() < 2e-2
