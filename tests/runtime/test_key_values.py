"""Calls whose values are the first columns of their keys: which kernels take them, and how their work is shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.dtypes import MERGED_ROWS, PAGE_BLOCK
from attngen.errors import CallError, NoKernelError
from attngen.manifest import WorkLimits
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.splits import Capacity, split_sizes
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.runtime.registry.no_kernel import no_spec_adds, yaml_lines
from attngen.runtime.registry.select import Request
from tests.runtime.pages import cache
from tests.runtime.support import FakeDriver, kernel_of, manifest_of, variant

CAUSAL = variant()


def install(**fields: Any) -> None:
    """A package with one kernel of head dims 64 and 32, whose values are keys."""
    manifest = manifest_of(CAUSAL, head_dim=(64, 32), package="latent", **fields) | {"v_of_key": True}
    registry.add(package_of_kernels([kernel_of(manifest)], "memory"))


def tensors(batch: int = 2, seqlen: int = 9, dims: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(batch, 3, 4, dims).bfloat16(), torch.randn(batch, seqlen, 1, dims).bfloat16()


def test_a_view_of_k_is_taken_and_a_copy_is_not(gpu: FakeDriver) -> None:
    """Both calls have the same shapes and strides: the second is not the first, prepared."""
    install()
    q, k = tensors()
    wide = torch.zeros(2, 9, 1, 64).bfloat16()
    for _ in range(2):
        out = attngen.attention(q, k, k[..., :32], variant="causal")
        torch.testing.assert_close(out, attngen.attention(q, k, k[..., :32], variant="causal", backend="reference"))
        with pytest.raises(NoKernelError, match=r"it takes the values from k: v must be k\[..., :32\]"):
            attngen.attention(q, k, wide[..., :32], variant="causal")
    assert len(gpu.launches) == 2


def test_other_columns_are_no_values(gpu: FakeDriver) -> None:
    install()
    q, k = tensors()
    with pytest.raises(NoKernelError, match="v must be"):
        attngen.attention(q, k, k[..., 32:], variant="causal")


def test_pages(gpu: FakeDriver) -> None:
    install(layout="paged")
    c = cache([20, 7], 8, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, 1, 4, 64).bfloat16()
    given = (q, c.k_pages, c.k_pages[..., :32], c.page_table, c.seqused_k)
    out = attngen.attention_paged(*given, variant="causal")
    torch.testing.assert_close(out, attngen.attention_paged(*given, variant="causal", backend="reference"))
    assert len(gpu.launches) == 1
    values = c.k_pages.as_strided((*c.k_pages.shape[:3], 32), (*c.k_pages.stride()[:2], 32, 1))  # as of one head of 32
    torch.testing.assert_close(attngen.attention_paged(*given[:2], values, *given[3:], variant="causal"), out)
    assert len(gpu.launches) == 2


def test_the_reference_takes_them_and_is_differentiable() -> None:
    q, k = (tensor.double() for tensor in tensors(dims=576))
    k.requires_grad_()
    out = attngen.attention(q, k, k[..., :512], variant="causal")
    logits = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * 576**-0.5
    seen = torch.arange(9) <= torch.arange(3)[:, None] + 6
    wanted = (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ k[..., :512].transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(out, wanted)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.shape == k.shape
    assert grad[..., :512].abs().sum() > 0


def test_a_gradient_has_no_kernel(gpu: FakeDriver) -> None:
    install()
    q, k = tensors()
    with pytest.raises((CallError, NoKernelError), match="backward"):
        attngen.attention(q, k.requires_grad_(), k[..., :32], variant="causal").sum().backward()


@pytest.mark.parametrize(("own", "dims", "says"), [(False, 576, True), (False, 512, True), (True, 576, False)])
def test_what_a_spec_lacks_is_named(own: bool, dims: int, says: bool) -> None:
    """A view of k is asked for with ``v: key``; a v of its own has no kernel at such head dims."""
    q, k = tensors(dims=dims)
    v = k[..., :512].clone() if own else k[..., :512]
    call = bind(CAUSAL, q, k, v, None)
    request = Request(call, 0, {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}, {})
    assert (no_spec_adds(request, 90) is None) == says
    if says:
        assert "      v: key" in yaml_lines(call, 90, request)
    refused = str(no_spec_adds(request, 80))
    assert ("latent attention, only for sm90a;" if says else "head_dim 576, only for") in refused


def test_a_spec_of_rows_of_e4m3_is_named() -> None:
    q, k = tensors(dims=576)
    rows = k.to(torch.float8_e4m3fn)
    call = bind(CAUSAL, q, rows, rows[..., :512], None)
    call.descales, call.scale_blocks = {"k_descale": torch.ones(1)}, (PAGE_BLOCK,)
    request = Request(call, 0, {"q": q.data_ptr(), "k": rows.data_ptr(), "v": rows.data_ptr()}, {})
    assert no_spec_adds(request, 90) is None
    lines = [line.strip() for line in yaml_lines(call, 90, request)]
    assert {"kv_dtype: fp8_e4m3", "v: key", "descale: page"} < set(lines)
    assert "split_kv: true" not in lines


def launch(**fields: int) -> Any:
    usual = {"tile_m": 64, "tile_n": 64, "row_warps": 2, "row_blocks": 2, "cluster": 2, "merges": False}
    return SimpleNamespace(**usual | fields, limits=WorkLimits())


@pytest.mark.parametrize(
    ("heads", "queries", "bits", "units", "cluster"),
    [(16, 1, 0, 1, 1), (64, 1, 0, 1, 1), (128, 1, 1, 1, 2), (16, 7, 1, 1, 2), (128, 3, 1, 3, 2), (8, 4096, 1, 256, 2)],
)
def test_rows_beyond_a_block_are_those_of_a_cluster(
    heads: int, queries: int, bits: int, units: int, cluster: int
) -> None:
    """Blocks, places of partial results, counters and what merges them follow."""
    q, k = torch.zeros(4, queries, heads, 64), torch.zeros(4, 8192, 1, 64)
    call = bind(CAUSAL, q, k, k[..., :32], None)
    sizes = split_sizes(launch(), call, Capacity(132, 66))
    assert (sizes["row_bits"], sizes["row_units"], sizes["split_cluster"]) == (bits, units, cluster)
    assert sizes["split_blocks"] == 132
    assert sizes["split_slots"] == 2 * 132 // cluster
    assert sizes["split_counters"] == 0
    assert sizes["merge_blocks"] * MERGED_ROWS == 132 // cluster * 64 * cluster
    # Warps of the launch that merges search: it has rows for units that may be cut, as many as run at once.
    before, call.kv_dtype = call.kv_dtype, "fp8_mla_656"
    rows = min(132 // cluster, 4 * units) * 64 * cluster
    assert split_sizes(launch(), call, Capacity(132, 66))["merge_blocks"] * MERGED_ROWS == min(rows, 8 * 132)
    call.kv_dtype = before
    call.num_splits = 3
    sizes = split_sizes(launch(), call, Capacity(132, 66))
    assert sizes["split_slots"] == 4 * units * sizes["max_splits"]
    assert sizes["split_counters"] == 4 * units * cluster
    assert sizes["merge_blocks"] == 0  # the block that comes last merges
    assert split_sizes(launch(merges=True), call, Capacity(132, 66))["split_counters"] == 2 * 4 * units * cluster
    call.num_splits = None
    sizes = split_sizes(launch(merges=True), call, Capacity(132, 66))
    assert (sizes["split_slots"], sizes["merge_blocks"]) == (2 * 132 // cluster, 0)
    assert sizes["split_counters"] == 2 * 4 * units * cluster  # who is there and who has left, for each block of rows


def test_short_sequences_keep_few_blocks_busy() -> None:
    q, k = torch.zeros(1, 1, 16, 64), torch.zeros(1, 640, 1, 64)
    call = bind(CAUSAL, q, k, k[..., :32], None)
    assert split_sizes(launch(), call, Capacity(132, 66))["split_blocks"] == 5  # two tiles of keys for each
