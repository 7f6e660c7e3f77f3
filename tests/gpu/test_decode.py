"""Split-KV kernels against float64: ragged lengths, pages of any size, groups and rows, splits, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "decode_tests"
LENGTHS = [0, 1, 15, 16, 17, 100, 1000, 8200]
VARIANTS = [
    "full", "causal", "sliding_window", "softcap", "causal_sink", "alibi", "chunked", "sink_window", "prefix_lm",
    "tree", "heads_windows",
]  # fmt: skip


def to_build() -> list[Prepared]:
    spec = load_spec(Path(__file__).with_name("decode.yaml"))
    return [one for one in prepare_each(spec)[0] if one.plan.split_kv]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the split-KV kernels of the spec, which alone are known as the package: no other takes a call."""
    wanted = to_build()
    assert {one.plan.schedule for one in wanted} == {"hopper_decode"}
    built = compiled_kernels(wanted)
    assert all(one.split_kv for one in built)
    return built, package_of_kernels(built, "tests/gpu/test_decode")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("split-KV kernels are for Hopper")
    kernels()


def own_of(variant: str, batch: int, rows: int, heads: int) -> dict[str, Any]:
    """Return arguments of a variant's own, on the CPU."""
    torch.manual_seed(3)
    return {
        "sliding_window": {"window": 70},
        "softcap": {"cap": 20.0},
        "causal_sink": {"sinks": torch.randn(heads)},
        "alibi": {"slope": torch.rand(heads) * 0.1},
        "chunked": {"chunk": 48},
        "sink_window": {"window": 70, "sinks": 5},
        "prefix_lm": {"prefix": torch.randint(1, 90, (batch,), dtype=torch.int32)},
        "tree": {"tree": (torch.rand(batch, rows, 64) > 0.4).tril()},
    }.get(variant, {})


def on_gpu(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in own.items()}


def close(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Assert that output and log-sum-exp are those of float64, up to the rounding of results and probabilities."""
    out, lse = actual[0].cpu().double(), actual[1].cpu().double()
    torch.testing.assert_close(out, wanted[0].double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted[1].double(), rtol=1e-3, atol=2e-3)
    assert not out.isnan().any()


def paged(
    variant: str, lengths: list[int], *, page_size: int = 16, page_layout: str = "NHD", rows: int | list[int] = 1,
    heads: int = 8, kv_heads: int = 2, dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one call over pages, compare it with the reference in float64 on the CPU, and return its results."""
    batch = len(lengths)
    c = pages_of(
        lengths,
        page_size,
        kv_heads=kv_heads,
        head_dim=dims[0],
        head_dim_v=dims[1],
        page_layout=page_layout,
        dtype=dtype,
    )
    each = [rows] * batch if isinstance(rows, int) else rows
    torch.manual_seed(1)
    q = torch.randn(sum(each), heads, dims[0]).to(dtype)
    given: dict[str, Any] = {"cu_seqlens_q": starts_of(each), "max_seqlen_q": max(each)}
    if isinstance(rows, int):
        q, given = q.unflatten(0, (batch, rows)), {}
    own = own_of(variant, batch, max(each), heads)
    everything = {"page_layout": page_layout, "return_lse": True, "package": PACKAGE}
    wanted = attngen.attention_paged(
        q.double(), c.k_pages.double(), c.v_pages.double(), c.page_table, c.seqused_k, variant=variant, **everything,
        **given, **own,
    )  # fmt: skip
    tensors = [t.cuda() for t in (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)]
    results = attngen.attention_paged(
        *tensors, variant=variant, **everything, **options, **on_gpu(given), **on_gpu(own)
    )
    close(results, wanted)
    return results


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 256])
def test_pages_of_any_size(page_size: int, page_layout: str) -> None:
    """NaN after each length, no page at all after each row of the table."""
    paged("causal", LENGTHS, page_size=page_size, page_layout=page_layout)


@pytest.mark.parametrize("rows", [1, 3, [3, 0, 1, 8, 2, 5, 1, 8]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_and_scores(variant: str, rows: int | list[int]) -> None:
    paged(variant, LENGTHS, rows=rows)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 15, 16, 17, 32, 48, 128])
def test_groups(group: int) -> None:
    kv_heads = 2 if group < 16 else 1
    paged("causal", [1, 17, 900], heads=group * kv_heads, kv_heads=kv_heads)
    paged("heads_windows", [1, 17, 900], heads=group * kv_heads, kv_heads=kv_heads)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 15, 16, 17, 33, 64])
def test_tokens(rows: int) -> None:
    paged("causal", [64, 70, 2000, 30], rows=rows)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (256, 256), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    paged("causal", LENGTHS, dims=dims, dtype=torch.float16, rows=2)
    dense("causal", [LENGTHS[i] for i in (1, 3, 4, 6)], dims=dims, dtype=torch.float16)


def dense(
    variant: str, lengths: list[int], *, rows: int = 1, heads: int = 8, kv_heads: int = 2,
    dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16, layout: str = "bshd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of a dense call, whose keys after the used lengths are NaN."""
    batch, longest = len(lengths), max(*lengths, 1)
    torch.manual_seed(2)
    q, k, v = (
        torch.randn(batch, n, h, d).to(dtype)
        for n, h, d in ((rows, heads, dims[0]), (longest, kv_heads, dims[0]), (longest, kv_heads, dims[1]))
    )
    used = torch.tensor(lengths, dtype=torch.int32)
    own = own_of(variant, batch, rows, heads)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    everything = {"variant": variant, "return_lse": True, "package": PACKAGE, "layout": layout}
    wanted = attngen.attention(q.double(), k.double(), v.double(), seqused_k=used, **everything, **own)
    for b, length in enumerate(lengths):
        for t in (k, v):
            (t if layout == "bshd" else t.transpose(1, 2))[b, length:] = torch.nan
    results = attngen.attention(q.cuda(), k.cuda(), v.cuda(), seqused_k=used.cuda(), **everything, **on_gpu(own))
    close(results, wanted)
    return results


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense(variant: str, layout: str) -> None:
    dense(variant, LENGTHS, rows=2, layout=layout)


@pytest.mark.parametrize("rows", [1, [3, 0, 1, 8, 2, 5, 1, 8]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_varlen(variant: str, rows: int | list[int]) -> None:
    each = [rows] * len(LENGTHS) if isinstance(rows, int) else rows
    torch.manual_seed(4)
    q = torch.randn(sum(each), 8, 128).bfloat16()
    k, v = (torch.randn(sum(LENGTHS), 2, 128).bfloat16() for _ in "kv")
    starts = starts_of(each), starts_of(LENGTHS)
    own = own_of(variant, len(each), max(each), 8)
    options: dict[str, Any] = {"variant": variant, "return_lse": True, "package": PACKAGE}
    longest = max(each), max(LENGTHS)
    wanted = attngen.attention_varlen(q.double(), k.double(), v.double(), *starts, *longest, **options, **own)
    results = attngen.attention_varlen(
        q.cuda(), k.cuda(), v.cuda(), *(t.cuda() for t in starts), *longest, **options, **on_gpu(own)
    )
    close(results, wanted)


@pytest.mark.parametrize(
    "options", [{}, {"num_splits": 2}, {"num_splits": 5}, {"split_size": 64}, {"split_size": 1000}], ids=str
)
def test_splits_change_no_result_and_launches_repeat(options: dict[str, int]) -> None:
    first = paged("causal", LENGTHS, rows=3, **options)
    second = paged("causal", LENGTHS, rows=3, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_a_fixed_split_makes_rows_independent_of_the_batch(size: int) -> None:
    """Bit by bit: alone, among others, and in another order."""
    lengths = [300, 8200, 17, 2048, 5000]
    c = pages_of(lengths, 16, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    q = torch.randn(len(lengths), 1, 8, 128).bfloat16().cuda()
    k, v, table, used = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table, c.seqused_k))

    def call(chosen: list[int]) -> Tensor:
        out = attngen.attention_paged(
            q[chosen], k, v, table[chosen], used[chosen], variant="causal", split_size=size, package=PACKAGE
        )
        assert isinstance(out, Tensor)
        return out

    together = call(list(range(len(lengths))))
    backwards = call(list(reversed(range(len(lengths)))))
    for b in range(len(lengths)):
        assert torch.equal(call([b])[0], together[b])
        assert torch.equal(backwards[len(lengths) - 1 - b], together[b])
        assert torch.equal(call([b] * 40)[17], together[b])


def test_a_fixed_split_makes_rows_independent_of_the_longest_queries_of_the_batch() -> None:
    rows, lengths = [1, 300, 2, 1, 40], [8200, 900, 3000, 40, 5000]
    c = pages_of(lengths, 16, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    q, starts = torch.randn(sum(rows), 8, 128).bfloat16().cuda(), starts_of(rows)
    k, v, table, used = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table, c.seqused_k))

    def call(first: int, last: int) -> Tensor:
        own = starts[first : last + 1]
        here = slice(int(own[0]), int(own[-1]))
        out = attngen.attention_paged(
            q[here], k, v, table[first:last], used[first:last], cu_seqlens_q=(own - own[0]).cuda(),
            max_seqlen_q=max(rows[first:last]), variant="causal", split_size=256, package=PACKAGE,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    together = call(0, len(rows))
    for b in range(len(rows)):
        assert torch.equal(call(b, b + 1), together[starts[b] : starts[b + 1]]), f"sequence {b}"


def test_a_graph_stays_right_while_lengths_grow() -> None:
    """Captured once; lengths and the table change in place, from 1 key to 8192."""
    c = pages_of([8192, 8192, 8192], 64, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    q = torch.randn(3, 1, 8, 128).bfloat16().cuda()
    k, v, table = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table))
    used = torch.ones(3, dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        out_and_lse = attngen.attention_paged(q, k, v, table, used, variant="causal", return_lse=True, package=PACKAGE)
        assert isinstance(out_and_lse, tuple)
        return out_and_lse

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 500, 1024, 4095, 8192):
        used.copy_(torch.tensor([length, max(length // 2, 1), max(length // 7, 1)]))
        graph.replay()
        eager = call()
        assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))
        wanted = attngen.attention_paged(
            q.double().cpu(), c.k_pages.double(), c.v_pages.double(), c.page_table, used.cpu(), variant="causal",
            return_lse=True, package=PACKAGE,
        )  # fmt: skip
        close(results, wanted)


def test_many_ragged_batches() -> None:
    """Batches of all sizes, on one stream one after the other: counters are 0 again after each launch."""
    generator = torch.Generator().manual_seed(7)
    for number in range(60):
        batch = int(torch.randint(1, 40, (), generator=generator))
        longest = int(torch.randint(1, 1500, (), generator=generator))
        lengths = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
        kv_heads = (1, 2, 8)[number % 3]
        paged("causal", lengths, page_size=(16, 64)[number % 2], heads=4 * kv_heads, kv_heads=kv_heads)
