"""Parts of a score that depend on the key or the query alone, or on their distance, which come with tiles of K and Q:
right in whole tiles and ragged ones, with query heads that share keys, beyond the end of a tensor, with a tile map, and
in packed sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.schema import load_spec
from tests.gpu.family import only_known, package_of_spec
from tests.gpu.test_biases import inputs_of, verify
from tests.gpu.test_mask_bits import check

SPEC = Path(__file__).with_name("score_values.yaml")
DEVICE = "cuda"
VARIANTS = (
    "forgetting", "forgetting_of_any", "of_keys", "gated", "by_table", "read_by_both", "mapped", "of_steps",
    "buckets", "of_distances", "in_windows", "distances_mapped", "documents_by_distance",
)  # fmt: skip
#: Head dim, queries, keys, batch, query heads, KV heads: whole tiles, ragged ones, fewer queries than keys.
SHAPES = (
    (64, 768, 768, 2, 2, 2), (64, 1001, 1001, 1, 4, 1), (128, 960, 960, 1, 4, 2), (128, 577, 577, 2, 2, 1),
    (64, 200, 333, 1, 2, 1), (128, 70, 650, 1, 2, 2),
)  # fmt: skip


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


def totals(heads: int, keys: int) -> Tensor:
    """Sums of logarithms of gates, down to some −20."""
    return torch.nn.functional.logsigmoid(torch.randn(heads, keys, device=DEVICE) + 3).cumsum(1) / 4


def values(name: str, batch: int, heads: int, rows: int, keys: int) -> dict[str, Any]:
    """Return random arguments of a variant."""

    def integers(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, device=DEVICE, dtype=torch.int32)

    of_keys = torch.randn(keys, device=DEVICE)
    match name:
        case "of_keys":
            return {"f": of_keys[: keys - 37].half(), "n": keys - 37}
        case "gated":
            return {"gate": torch.rand(batch, keys, device=DEVICE).bfloat16(), "f": of_keys, "w": 0.7}
        case "by_table":
            table = torch.randn(heads, 16, device=DEVICE)
            return {"table": table, "id": integers(16, keys), "id_q": integers(16, rows)}
        case "read_by_both":
            return {"level": integers(max(keys // 32, 1), keys)}
        case "mapped":
            runs = integers(4, keys // 48 + 1).repeat_interleave(48)[:keys].contiguous()
            return {"doc": runs, "f": of_keys}
        case "buckets":
            return {"table": torch.randn(heads, 32, device=DEVICE)}
        case "of_distances":
            return {"bias": of_keys.bfloat16()}
        case "in_windows":
            table = torch.randn(129, device=DEVICE).half()
            return {"table": table, "gate": torch.rand(keys, device=DEVICE), "f": torch.randn(rows, device=DEVICE)}
        case "documents_by_distance":
            return {"doc": integers(4, batch, keys).sort(-1).values.int(), "t": torch.randn(heads, 64, device=DEVICE)}
        case "distances_mapped":
            runs = integers(4, keys // 48 + 1).repeat_interleave(48)[:keys].contiguous()
            return {"doc": runs, "f": of_keys, "table": torch.randn(heads, 32, device=DEVICE)}
        case "of_steps":
            return {"w": 0.5, "n": 51}
    return {"total": totals(heads, keys)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_against_float64(name: str, shape: tuple[int, int, int, int, int, int]) -> None:
    torch.manual_seed(sum(shape))
    _, rows, keys, batch, heads, _ = shape
    inputs, above = inputs_of(*shape)
    verify(inputs, above, {"variant": name, **values(name, batch, heads, rows, keys)})


def test_float16() -> None:
    torch.manual_seed(1)
    inputs, above = inputs_of(128, 520, 520, 2, 2, 1, torch.float16)
    verify(inputs, above, {"variant": "forgetting", "total": totals(2, 520)})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_known_of_a_tensor_changes_no_bit(head_dim: int) -> None:
    torch.manual_seed(2)
    (q, k, v), _ = inputs_of(head_dim, 1000, 1000, 1, 4, 2)
    total = totals(4, 1000)
    outs = [attngen.attention(q, k, v, variant=name, total=total) for name in ("forgetting", "forgetting_of_any")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["packed", "packed_distances"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim: int, name: str) -> None:
    torch.manual_seed(3)
    lengths, heads = [130, 1, 700, 257], 2
    tokens, longest = sum(lengths), max(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE, dtype=torch.int32)
    q, k, v, above = (torch.randn(tokens, heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    given_values = {"total": totals(heads, tokens)}
    if name == "packed_distances":
        given_values = {"table": torch.randn(heads, 32, device=DEVICE)}

    def results(backend: str | None, dtype: torch.dtype) -> list[Tensor]:
        given = [one.to(dtype, copy=True).requires_grad_() for one in (q, k, v)]
        out = attngen.attention_varlen(
            *given, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
            variant=name, backend=backend, **given_values,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, given, above.to(dtype))]

    wanted, plain = results("reference", torch.float64), results("reference", torch.bfloat16)
    check(results(None, torch.bfloat16), wanted, plain)
