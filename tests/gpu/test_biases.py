"""Biases and integers over (q, kv), which kernels load as tiles: right in whole tiles and ragged ones, expanded along
heads, or batch, with rows that begin anywhere, with -inf, in packed sequences, and in a graph whose inputs change.
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
from tests.gpu.test_mask_bits import check, gradients

SPEC = Path(__file__).with_name("biases.yaml")
DEVICE = "cuda"
VARIANTS = (
    "of_heads",
    "causal_of_heads",
    "in_a_window",
    "of_all",
    "of_batch",
    "of_each",
    "masked",
    "two",
    "gated",
    "of_larger",
    "floats",
    "causal_floats",
    "integers",
    "distances",
    "any_distances",
)
#: Head dim, queries, keys, batch, query heads, KV heads: whole tiles, ragged ones, few queries, a last tile of 8 keys,
#: and rows of a bias that begin anywhere.
SHAPES = (
    (64, 768, 768, 2, 2, 2), (64, 1000, 1032, 1, 4, 1), (128, 776, 776, 2, 4, 2), (128, 1152, 1152, 1, 2, 2),
    (128, 70, 648, 1, 2, 1), (64, 333, 577, 1, 2, 2), (128, 201, 395, 2, 2, 1),
)  # fmt: skip


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def values(name: str, batch: int, heads: int, rows: int, keys: int) -> dict[str, Any]:
    """Random arguments of a variant."""
    match name:
        case "of_all":
            return {"bias": random(rows, keys), "heat": 0.7}
        case "of_batch":
            return {"bias": random(batch, rows, keys)}
        case "of_each":
            return {"bias": random(batch, heads, rows, keys), "cap": 8.0}
        case "masked":
            return {"bias": random(heads, rows, keys), "allowed": torch.rand(rows, keys, device=DEVICE) < 0.6}
        case "gated":
            return {"bias": 0.25 * random(heads, rows, keys), "tilt": torch.randn(rows, device=DEVICE)}
        case "of_larger":  # what lies beyond the sequences is not read
            bias = torch.full((heads, rows + 80, keys + 136), torch.nan, device=DEVICE, dtype=torch.bfloat16)
            bias[:, :rows, :keys] = random(heads, rows, keys)
            return {"bias": bias}
        case "floats":
            return {"bias": random(heads, rows, keys, dtype=torch.float32)}
        case "causal_floats":
            return {"bias": random(rows, keys, dtype=torch.float32)}
        case "integers":
            return {"bias": (10 * random(batch, rows, keys)).to(torch.int16)}
        case "distances":
            bias = (2 * random(rows, keys).abs()).clamp(max=4).to(torch.int8)
            return {"bias": bias, "table": random(heads, 5, dtype=torch.float32)}
        case "any_distances":
            bias, far = (n * random(rows, keys, dtype=torch.float32).abs() for n in (10, 40))
            table, wide = random(heads, 20, dtype=torch.float32), random(heads, 60)
            return {
                "bias": bias.clamp(max=19).to(torch.uint8),
                "table": table,
                "far": far.clamp(max=59).int(),
                "wide": wide,
            }
        case "two":
            return {"bias": random(heads, rows, keys, dtype=torch.float16), "pairs": random(batch, rows, keys)}
    return {"bias": random(heads, rows, keys)}


def inputs_of(
    head_dim: int, rows: int, keys: int, batch: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    q, above = (random(batch, rows, heads, head_dim, dtype=dtype) for _ in range(2))
    k, v = (random(batch, keys, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    return [q, k, v], above


def verify(inputs: list[Tensor], above: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """Compare a call and its gradients with float64, and return them."""
    wanted = gradients([one.double() for one in inputs], above, backend="reference", **call)
    plain = gradients(inputs, above, backend="reference", **call)
    results = gradients(inputs, above, **call)
    check(results, wanted, plain)
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_against_float64(name: str, shape: tuple[int, int, int, int, int, int]) -> None:
    torch.manual_seed(sum(shape))
    _, rows, keys, batch, heads, _ = shape
    inputs, above = inputs_of(*shape)
    verify(inputs, above, {"variant": name, **values(name, batch, heads, rows, keys)})


@pytest.mark.parametrize("name", ["of_heads", "two"])
def test_float16(name: str) -> None:
    torch.manual_seed(1)
    inputs, above = inputs_of(128, 520, 520, 2, 2, 1, torch.float16)
    verify(inputs, above, {"variant": name, **values(name, 2, 2, 520, 520)})


@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_head_dims(head_dim: int) -> None:
    torch.manual_seed(head_dim)
    inputs, above = inputs_of(head_dim, 500, 712, 1, 2, 1)
    verify(inputs, above, {"variant": "of_heads", **values("of_heads", 1, 2, 500, 712)})


@pytest.mark.parametrize("form", ["heads", "batch", "both", "rows", "columns", "window", "shifted", "odd"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forms_in_memory(head_dim: int, form: str) -> None:
    """The same numbers, expanded or with other strides, give the same bits as a contiguous copy."""
    torch.manual_seed(2)
    batch, heads, rows, keys = 2, 4, 392, 456
    inputs, above = inputs_of(head_dim, rows, keys, batch, heads, 2)
    shape = batch, heads, rows, keys
    bias = {
        "heads": lambda: random(batch, 1, rows, keys).expand(shape),
        "batch": lambda: random(1, heads, rows, keys).expand(shape),
        "both": lambda: random(rows, keys).expand(shape),
        "rows": lambda: random(batch, heads, 1, keys).expand(shape),
        "columns": lambda: random(batch, heads, rows, keys + 40)[..., 8 : 8 + keys],
        "window": lambda: random(batch, rows, heads, keys).transpose(1, 2),
        "shifted": lambda: random(batch, heads, rows, keys + 8)[..., 3 : 3 + keys],
        "odd": lambda: random(batch, heads, rows, keys + 1)[..., :keys],
    }[form]()
    call = {"variant": "of_each", "cap": 8.0}
    results = verify(inputs, above, {**call, "bias": bias})
    with torch.no_grad():
        out = attngen.attention(*inputs, **call, bias=bias.contiguous())
    assert torch.equal(results[0], out)


@pytest.mark.parametrize("name", ["of_heads", "causal_of_heads"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_minus_infinity(head_dim: int, name: str) -> None:
    """Pairs that a bias hides; each row sees its first key."""
    torch.manual_seed(3)
    heads, rows, keys = 2, 520, 520
    bias = random(heads, rows, keys)
    bias[torch.rand(bias.shape, device=DEVICE) < 0.5] = float("-inf")
    bias[:, :, 0] = 0.0
    inputs, above = inputs_of(head_dim, rows, keys, 1, heads, 1)
    results = verify(inputs, above, {"variant": name, "bias": bias})
    assert all(bool(one.isfinite().all()) for one in results)


@pytest.mark.parametrize("name", ["of_heads", "causal_of_heads", "masked", "of_all", "floats"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_the_least_value(head_dim: int, name: str) -> None:
    """Rows that a float mask hides whole give all keys the same weight, and have gradients; others hide some keys."""
    torch.manual_seed(7)
    heads, rows, keys = 2, 392, 520
    call = {"variant": name, **values(name, 1, heads, rows, keys)}
    bias = call["bias"]
    least = torch.finfo(bias.dtype).min
    bias[..., ::3, :], bias[..., 1::6, 5:] = least, least
    bias[..., 2::12, :] = float("-inf")
    bias[..., 2::12, 3:90] = least
    inputs, above = inputs_of(head_dim, rows, keys, 1, heads, 1)
    out, *_ = verify(inputs, above, call)
    if name in ("of_heads", "floats"):
        torch.testing.assert_close(out[:, ::3].double(), inputs[2].double().mean(1, True).expand_as(out[:, ::3]),
                                   atol=4e-3, rtol=1e-2)  # fmt: skip


def test_keys_in_use() -> None:
    torch.manual_seed(4)
    inputs, above = inputs_of(128, 300, 640, 2, 2, 1)
    used = torch.tensor([640, 129], device=DEVICE, dtype=torch.int32)
    verify(inputs, above, {"variant": "of_batch", "seqused_k": used, **values("of_batch", 2, 2, 300, 640)})


@pytest.mark.parametrize("name", ["of_heads", "masked", "two"])
def test_a_graph_follows_its_inputs(name: str) -> None:
    torch.manual_seed(5)
    shape = SHAPES[3]
    inputs, _ = inputs_of(*shape)
    call: dict[str, Any] = {"variant": name, **values(name, shape[3], shape[4], shape[1], shape[2])}
    attngen.attention(*inputs, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(*inputs, **call)
    for tensor_name, value in values(name, shape[3], shape[4], shape[1], shape[2]).items():
        call[tensor_name].copy_(value)
    graph.replay()
    assert torch.equal(out, attngen.attention(*inputs, **call))


@pytest.mark.parametrize("name", ["causal_of_heads", "of_batch"])
def test_packed_sequences(name: str) -> None:
    torch.manual_seed(6)
    lengths, longest, heads = (300, 1, 129, 512), 512, 2
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    total = sum(lengths)
    q, k, v, above = (random(total, heads, 64) for _ in range(4))
    bias = random(len(lengths) if name == "of_batch" else heads, longest, longest)
    for n, length in enumerate(lengths) if name == "of_batch" else ():
        bias[n, length:], bias[n, :, length:] = torch.nan, torch.nan
    given = [one.detach().requires_grad_() for one in (q, k, v)]
    out = attngen.attention_varlen(
        *given, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest, variant=name,
        bias=bias,
    )  # fmt: skip
    grads = torch.autograd.grad(out, given, above)
    for n, length in enumerate(lengths):
        rows = slice(int(bounds[n]), int(bounds[n + 1]))
        own = bias[n : n + 1] if name == "of_batch" else bias
        call = {"variant": name, "bias": own[:, :length, :length].contiguous()}
        parts = [one[rows][None] for one in (q, k, v)]
        wanted = gradients([one.double() for one in parts], above[rows][None], backend="reference", **call)
        plain = gradients(parts, above[rows][None], backend="reference", **call)
        check([out[rows][None].detach(), *(one[rows][None] for one in grads)], wanted, plain)
