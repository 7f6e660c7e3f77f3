"""Kernels whose tiles hold all query heads of a KV head: which calls they take, and the numbers that they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import attngen
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.sizes import Geometry
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.runtime.registry.order import preferred
from attngen.runtime.registry.select import MAX_ROWS
from tests.runtime.support import FakeDriver, kernel_of, manifest_of, variant


def made(name: str, tile_m: int, pack_gqa: bool, **fields: Any) -> Kernel:
    """Return a kernel as CUDA builds write it."""
    manifest = manifest_of(variant(), name=name, tiles=(tile_m, 128), **fields)
    return kernel_of(
        {
            **manifest,
            "backend": "cuda",
            "pack_gqa": pack_gqa,
            "times": (0.0, 0.0, {64: 1.0, 128: 1.25, 192: 1.75}[tile_m]),
        }
    )


def tensors(
    seqlen_q: int, heads: int, kv_heads: int = 2, batch: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, 1, heads, 64).bfloat16().expand(-1, seqlen_q, -1, -1)
    k, v = (torch.randn(batch, 9, kv_heads, 64).bfloat16() for _ in "kv")
    return q, k, v


def call_of(*sizes: int) -> Call:
    q, k, v = tensors(*sizes)
    options: dict[str, Any] = {"softmax_scale": None, "seqused_k": None, "return_lse": False, "arguments": {}}
    return bind(variant(), q, k, v, None, layout="bshd", **options)


WIDE, PACKED, PACKED_WIDE = made("wide", 128, False), made("pack", 64, True), made("pack_wide", 128, True)
ALL = (WIDE, PACKED, PACKED_WIDE)


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "order"),
    [
        (1, 8, ("pack", "pack_wide", "wide")),  # 4 rows of a KV head: the small tile
        (32, 8, ("pack_wide", "pack", "wide")),  # 128 rows fill the wide one
        (128, 8, ("wide", "pack_wide", "pack")),  # nothing to save
        (1024, 8, ("wide", "pack_wide", "pack")),
        (1, 2, ("pack", "wide", "pack_wide")),  # one head in each group: the small tile wastes least
        (150, 16, ("pack_wide", "pack", "wide")),  # 1,200 rows: 10 wide tiles, and 16 if each head has its own
        (1000, 4, ("wide", "pack_wide", "pack")),  # 16 tiles either way
    ],
)
def test_the_least_time_comes_first(seqlen_q: int, heads: int, order: Sequence[str]) -> None:
    for given in (ALL, ALL[::-1]):
        assert preferred(given, call_of(seqlen_q, heads))[0].name == order[0]
    names = [kernel.name for kernel in preferred(ALL, call_of(seqlen_q, heads))]
    assert tuple(names) == tuple(order)
    assert preferred(ALL)[0] is WIDE


@pytest.mark.parametrize("heads", [6, 10, 256])
def test_a_group_that_does_not_fill_the_rows_is_refused(gpu: FakeDriver, heads: int) -> None:
    registry.add(package_of_kernels(ALL, "memory"))
    q, k, v = tensors(2, heads)
    explanation = attngen.explain(q.contiguous(), k, v, variant="causal")
    assert explanation.kernel is WIDE
    reasons = dict(explanation.rejected)
    wanted = (
        f"it packs the query heads of a KV head into 64 rows, which {heads // 2} heads do not fill; it takes 1, 2, 4, "
    )
    assert reasons["mine/pack"].startswith(wanted)
    assert reasons["mine/pack"].endswith(" 64")
    assert explanation.to_dict()["pack_gqa"] is False


def test_more_rows_than_32_bits_count_are_refused(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([PACKED], "memory"))
    q, k, v = tensors(MAX_ROWS // 64 + 1, 64, kv_heads=1)
    explanation = attngen.explain(q, k, v, variant="causal")
    assert explanation.kernel is None
    assert f"queries of 64 heads, and counts at most {MAX_ROWS} rows" in explanation.reason


def test_explain_tells_what_packing_saves(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels(ALL, "memory"))
    q, k, v = tensors(5, 16)
    explanation = attngen.explain(q.contiguous(), k, v, variant="causal")
    assert explanation.kernel is PACKED
    facts = explanation.to_dict()
    assert (facts["pack_gqa"], facts["grid"]) == (True, 6)
    assert "the 8 query heads of a KV head share tiles: 6 work tiles, else 48" in str(explanation)


@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, 2), (1, 8), (17, 16), (129, 128)])
def test_the_numbers_of_a_launch(seqlen_q: int, heads: int) -> None:
    call = call_of(seqlen_q, heads)
    group = heads // 2
    geometry = Geometry(PACKED.main, call)
    assert geometry.sizes["group"] == 1 << geometry.sizes["group_bits"] == group
    assert geometry.sizes["q_tiles"] == -(-seqlen_q * group // 64)
    assert geometry.tiles == geometry.sizes["q_tiles"] * 3 * 2
    # heads that run side by side are KV heads: with as many keys to keep, as many of them
    apart = Geometry(WIDE.main, call)
    assert apart.sizes["heads_in_l2"] == min(geometry.sizes["heads_in_l2"] * group, 3 * heads)
    assert apart.tiles == -(-seqlen_q // 128) * 3 * heads
