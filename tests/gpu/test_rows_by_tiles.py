"""Rows that lie in several runs of tiles: the calls of all ranks of a plan, one after the other on one GPU, together
compute what one call over the whole sequence does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec_text
from attngen.schema.writing import spec_text
from tests.gpu.family import compiled_kernels, known
from tests.parallel.cases import HEADS, KV_HEADS, Case, cases
from tests.parallel.local_calls import LocalCalls
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


def _calls(name: str) -> LocalCalls:
    if name == "dropped":
        case = Case("dropped", attngen.variant("q_pos >= kv", name="dropped"))
        return LocalCalls(case, SEQLEN, RANKS, dropout=True)
    return LocalCalls(next(case for case in cases() if case.name == name), SEQLEN, RANKS)


def _allowed(what: str, plain: Tensor, wanted: Tensor, element: torch.dtype) -> Tensor:
    """The error allowed beside that of plain PyTorch: what ranks compute of dK and dV is rounded by each of them."""
    rounded = RANKS * torch.finfo(element).eps / 2 * wanted.abs().max() if what in ("dk", "dv") else 0.0
    return (plain - wanted).abs().max() * _FACTOR + 1e-3 + rounded


def to_build() -> list[Prepared]:
    made = {name: _calls(name).variant for names in CALLS.values() for name in names}
    entries = []
    for (head_dim, dtype, deterministic), names in CALLS.items():
        entry: dict[str, Any] = {
            "variant": [made[name].name for name in names], "dtype": dtype,
            "head_dim": {"qk": head_dim[0], "v": head_dim[1]} if isinstance(head_dim, tuple) else head_dim,
        }  # fmt: skip
        entries.append({**entry, **({"deterministic": True} if deterministic else {})})
    dropped = made["dropped"] = _calls("dropped").variant
    entries.append({"variant": dropped.name, "dtype": "bf16", "head_dim": list(_DROPPED)})
    entries = [{**entry, "arch": "sm90a", "backend": "cuda", "passes": ["forward", "backward"]} for entry in entries]
    return prepare(load_spec_text(spec_text({one.name: one.fields for one in made.values()}, entries), "rows.yaml"))


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the calls, which alone are known as the package."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_rows_by_tiles")


@pytest.fixture(autouse=True)
def _known() -> None:
    kernels()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "deterministic", "name"),
    [(*key, name) for key, names in CALLS.items() for name in names],
)
def test_ranks_compute_as_one(head_dim: int | tuple[int, int], dtype: str, deterministic: bool, name: str) -> None:
    calls = _calls(name)
    case = calls.case
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
    options = {"backend": "cuda", "deterministic": deterministic}
    ours = calls.gradients(parts[:3], parts[3], values, **options)
    for what, one, wanted, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error = (one.double().reshape(wanted.shape) - wanted).abs().max()
        allowed = _allowed(what, plain, wanted, element)
        assert error <= allowed, f"{name}: {what} is off by {error:.2e} of {allowed:.2e}"
    again = calls.gradients(parts[:3], parts[3], values, **options)
    assert torch.equal(ours[0], again[0])
    if deterministic:
        assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("head_dim", _DROPPED)
def test_ranks_drop_what_one_call_drops(head_dim: int) -> None:
    calls = _calls("dropped")
    whole = [x.to("cuda", torch.bfloat16) for x in tensors(calls.case, SEQLEN, head_dim)]
    options = {"dropout_p": 0.3, "rng_state": torch.tensor([-(2**61) + 3, 5], device="cuda")}
    dropped = attngen.variant("q_pos >= kv", dropout=True, name="dropped")
    results = []
    for precision in (torch.float64, torch.bfloat16):
        *leaves, weight = (x.to(precision) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        out = attngen.attention(*leaves, variant=dropped, backend="reference", **options)
        results.append([x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, weight))])
    ours = calls.gradients(whole[:3], whole[3], {}, backend="cuda", **options)
    for what, one, wanted, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error, allowed = (one.double() - wanted).abs().max(), _allowed(what, plain, wanted, torch.bfloat16)
        assert error <= allowed, f"{what} is off by {error:.2e} of {allowed:.2e}"


def test_rows_beyond_the_end_and_few_keys() -> None:
    """Tiles that end within a run, and no more keys than rows see."""
    variant = _calls("causal").variant
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
