"""Kernels that read caches in 8 bits, against float64 on what the bytes stand for."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "cached_tests"
E4M3 = torch.float8_e4m3fn
LENGTHS = [0, 1, 15, 16, 17, 100, 1000, 8200]
OWN: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": 70},
    "softcap": {"cap": 20.0},
    "causal_sink": {"sinks": torch.linspace(-2, 3, 8)},
    "alibi": {"slope": torch.linspace(0, 0.1, 8)},
}


def to_build() -> list[Prepared]:
    prepared, wrong = prepare_each(load_spec(Path(__file__).with_name("caches_8_bits.yaml")))
    assert not wrong
    wanted = [one for one in prepared if one.plan.split_kv or one.plan.layout == "paged"]
    return [one for one in wanted if one.plan.direction == "forward"]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the split-KV kernels of the spec, which alone are known as the package."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_caches_8_bits")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("split-KV kernels are for Hopper")
    kernels()


def on_gpu(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in own.items()}


def close(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    out, lse = actual[0].cpu().double(), actual[1].cpu().double()
    torch.testing.assert_close(out, wanted[0].double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted[1].double(), rtol=1e-3, atol=2e-3)
    assert not out.isnan().any()


def scales(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return scales around 1, which differ by up to 8 times."""
    generator = torch.Generator().manual_seed(9)
    return {name: torch.exp2(3 * torch.rand(shape, generator=generator) - 2) for name, shape in shapes.items()}


def paged(
    variant: str = "causal", lengths: list[int] = LENGTHS, *, page_size: int = 16, page_layout: str = "NHD",
    rows: int | list[int] = 1, heads: int = 8, kv_heads: int = 2, dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16, granularity: str = "head", large: float = 1.0, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one call over pages, compare it with the reference in float64 on the CPU, and return its results."""
    batch = len(lengths)
    c = pages_of(
        lengths, page_size, kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], page_layout=page_layout, dtype=E4M3
    )
    each = [rows] * batch if isinstance(rows, int) else rows
    torch.manual_seed(1)
    q = (torch.randn(sum(each), heads, dims[0]) * large).to(dtype)
    given: dict[str, Any] = {"cu_seqlens_q": starts_of(each), "max_seqlen_q": max(each)}
    if isinstance(rows, int):
        q, given = q.unflatten(0, (batch, rows)), {}
    of_heads, of_pages = (batch, kv_heads), (c.k_pages.shape[0], kv_heads)
    shape: tuple[int, ...] = {
        "head": of_heads, "page": of_pages, "tensor": (), "row": tuple(c.k_pages.shape[:3])
    }[granularity]  # fmt: skip
    given |= scales({"k_descale": shape, "v_descale": shape} | ({"q_descale": of_heads} if dtype == E4M3 else {}))
    given |= OWN.get(variant, {}) | {"variant": variant, "page_layout": page_layout, "return_lse": True}
    if large != 1:
        given["softmax_scale"] = dims[0] ** -0.5 / large
    everything = (c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    own, units = dict(given), q.double()
    if "q_descale" in own:
        units *= own.pop("q_descale").double().repeat_interleave(heads // kv_heads, dim=1)[:, None, :, None]
    wanted = attngen.attention_paged(units, *everything, package=PACKAGE, **own)
    results = attngen.attention_paged(
        q.cuda(), *(t.cuda() for t in everything), package=PACKAGE, **options, **on_gpu(given)
    )
    close(results, wanted)
    return results


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("granularity", ["head", "page", "row"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 256])
def test_pages_of_any_size(page_size: int, granularity: str, page_layout: str) -> None:
    """NaN after each length, no page at all after each row of the table."""
    paged(page_size=page_size, page_layout=page_layout, granularity=granularity)


@pytest.mark.parametrize("rows", [1, 3, [3, 0, 1, 8, 2, 5, 1, 8]], ids=str)
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "softcap", "causal_sink", "alibi"])
def test_masks_and_scores(variant: str, rows: int | list[int]) -> None:
    paged(variant, rows=rows)
    if variant in ("causal", "softcap", "causal_sink"):
        paged(variant, rows=rows, granularity="page")
        paged(variant, rows=rows, granularity="row")


@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_head_dims_with_scales_of_rows(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    for rows in (1, 9):
        paged(dims=dims, dtype=dtype, rows=rows, granularity="row")


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
def test_rows_that_are_appended_with_their_scales(page_layout: str) -> None:
    """The cache of an engine: scales beside rows, which appending writes."""
    pages, page_size, kv_heads, dim = 40, 16, 2, 128
    whole = torch.full((pages, kv_heads, page_size * (2 * dim + 8)), 0x7F, dtype=torch.uint8, device="cuda")
    rows = whole[..., : page_size * 2 * dim].unflatten(-1, (page_size, 2 * dim)).view(E4M3)
    of_rows = whole[..., page_size * 2 * dim :].view(torch.float32).unflatten(-1, (page_size, 2))
    cache = [rows[..., :dim], rows[..., dim:], of_rows[..., 0], of_rows[..., 1]]
    if page_layout == "NHD":
        cache = [one.transpose(1, 2) for one in cache]
    torch.manual_seed(3)
    k, v = (torch.randn(500, kv_heads, dim, device="cuda").bfloat16() for _ in "kv")
    table = torch.randperm(pages, device="cuda").int()[None]
    place = torch.arange(500, device="cuda")
    slots = table[0, place // page_size].long() * page_size + place % page_size
    scaled = {"k_descale": cache[2], "v_descale": cache[3]}
    attngen.append_kv(k, v, cache[0], cache[1], slots=slots, page_layout=page_layout, **scaled)
    q = torch.randn(1, 3, 8, dim, device="cuda").bfloat16()
    used = torch.tensor([500], dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"variant": "causal", "page_layout": page_layout, "return_lse": True, "package": PACKAGE}
    results = attngen.attention_paged(q, cache[0], cache[1], table, used, **given, **scaled)
    plain = [one.cpu() for one in (cache[0], cache[1], table, used)]
    on_cpu = {name: scale.cpu() for name, scale in scaled.items()}
    close(results, attngen.attention_paged(q.double().cpu(), *plain, **given, **on_cpu))
    exact = (x.double().cpu()[None] for x in (k, v))
    wanted = attngen.attention(q.double().cpu(), *exact, variant="causal", backend="reference")
    torch.testing.assert_close(results[0].double().cpu(), wanted, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("group", [1, 3, 8, 16, 17, 48])
def test_groups(group: int) -> None:
    kv_heads = 2 if group < 16 else 1
    paged(lengths=[1, 17, 900], heads=group * kv_heads, kv_heads=kv_heads)


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 64, 300])
def test_tokens(rows: int) -> None:
    """As many tokens as a prompt has: rows beyond those of a unit are more units."""
    paged(lengths=[rows, rows + 6, 2000, rows], rows=rows)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (256, 256), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    paged(dims=dims, dtype=torch.float16, rows=2)
    if dims in ((64, 64), (256, 256)):
        paged(dims=dims, rows=2, granularity="page")
    dense("causal", [0, 1, 16, 100, 1000], dims=dims, dtype=torch.float16)


WIDE = (512, 512)


@pytest.mark.parametrize("rows", [1, 4, 40, [3, 0, 1, 8, 2, 5, 1, 8]], ids=str)
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "softcap", "causal_sink"])
def test_head_dim_512(variant: str, rows: int | list[int]) -> None:
    """Up to 16 rows of a KV head, up to 32, and more."""
    lengths = LENGTHS if rows != 40 else [40, 47, 1000]
    paged(variant, lengths, rows=rows, dims=WIDE)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
def test_pages_of_head_dim_512(page_size: int, page_layout: str) -> None:
    paged(page_size=page_size, page_layout=page_layout, dims=WIDE, granularity="page", heads=16)
    paged(page_size=page_size, page_layout=page_layout, dims=WIDE, granularity="tensor", heads=8, kv_heads=1)


@pytest.mark.parametrize("dims", [(272, 272), (512, 64)], ids=str)
def test_head_dims_that_are_padded_to_512(dims: tuple[int, int]) -> None:
    paged(dims=dims, dtype=torch.float16, rows=2)
    dense("causal", [0, 1, 16, 100, 1000], dims=dims, dtype=torch.float16)


def test_queries_in_8_bits_of_head_dim_512() -> None:
    paged(dims=WIDE, dtype=E4M3, rows=2, granularity="page")


@pytest.mark.parametrize("options", [{"num_splits": 5}, {"split_size": 64}, {"num_splits": 1}], ids=str)
def test_splits_of_head_dim_512_and_launches_repeat(options: dict[str, int]) -> None:
    first, second = (paged(rows=3, dims=WIDE, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("granularity", ["tensor", "head", "page"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_queries_in_8_bits(dims: tuple[int, int], granularity: str) -> None:
    paged(dims=dims, dtype=E4M3, rows=2, granularity=granularity)


@pytest.mark.parametrize("large", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_beyond_what_half_precision_holds(large: float) -> None:
    """Rows are brought to its range by powers of two."""
    paged(rows=2, large=large)


def dense(
    variant: str, lengths: list[int], *, rows: int = 1, dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16, layout: str = "bshd",
) -> None:  # fmt: skip
    """The same of a dense call, whose keys after the used lengths are NaN."""
    batch, longest = len(lengths), max(lengths)
    torch.manual_seed(2)
    q = torch.randn(batch, rows, 8, dims[0]).to(dtype)
    k, v = (torch.randn(batch, longest, 2, d).to(E4M3) for d in dims)
    for b, length in enumerate(lengths):
        for t in (k, v):
            t[b, length:] = torch.nan
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    given = {**OWN.get(variant, {}), **scales({"k_descale": (batch, 2), "v_descale": ()})}
    given |= {"seqused_k": torch.tensor(lengths, dtype=torch.int32)}
    everything: dict[str, Any] = {"variant": variant, "return_lse": True, "package": PACKAGE, "layout": layout}
    wanted = attngen.attention(q.double(), k, v, **everything, **given)
    results = attngen.attention(q.cuda(), k.cuda(), v.cuda(), **everything, **on_gpu(given))
    close(results, wanted)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "softcap", "causal_sink", "alibi"])
def test_dense(variant: str, layout: str) -> None:
    dense(variant, LENGTHS, rows=2, layout=layout)


@pytest.mark.parametrize("rows", [1, [3, 0, 1, 8, 2, 5, 1, 8]], ids=str)
def test_varlen(rows: int | list[int]) -> None:
    each = [rows] * len(LENGTHS) if isinstance(rows, int) else rows
    torch.manual_seed(4)
    q = torch.randn(sum(each), 8, 128).bfloat16()
    k, v = (torch.randn(sum(LENGTHS), 2, 128).to(E4M3) for _ in "kv")
    starts = starts_of(each), starts_of(LENGTHS)
    given = scales({"k_descale": (len(each), 2), "v_descale": (len(each), 2)})
    options: dict[str, Any] = {"variant": "causal", "return_lse": True, "package": PACKAGE}
    longest = max(each), max(LENGTHS)
    wanted = attngen.attention_varlen(q.double(), k, v, *starts, *longest, **options, **given)
    tensors = (t.cuda() for t in (q, k, v, *starts))
    close(attngen.attention_varlen(*tensors, *longest, **options, **on_gpu(given)), wanted)


@pytest.mark.parametrize("options", [{"num_splits": 5}, {"split_size": 64}, {"num_splits": 1}], ids=str)
def test_splits_change_no_result_and_launches_repeat(options: dict[str, int]) -> None:
    first, second = (paged(rows=3, granularity="page", **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_fixed_split_makes_rows_independent_of_the_batch() -> None:
    """Bit by bit: alone, among others, and in another order."""
    lengths = [300, 8200, 17, 2048, 5000]
    c = pages_of(lengths, 16, kv_heads=2, head_dim=128, dtype=E4M3)
    large = torch.tensor([1, 1e-9, 1e9, 1, 1e20])[:, None, None, None]
    q = (torch.randn(len(lengths), 1, 8, 128) * large).bfloat16().cuda()
    k, v, table, used = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table, c.seqused_k))
    of_pages = on_gpu(scales({"k_descale": (k.shape[0], 2), "v_descale": (k.shape[0], 2)}))

    def call(chosen: list[int]) -> Tensor:
        return attngen.attention_paged(  # type: ignore[return-value]
            q[chosen], k, v, table[chosen], used[chosen], variant="causal", split_size=256, package=PACKAGE, **of_pages
        )

    together = call(list(range(len(lengths))))
    backwards = call(list(reversed(range(len(lengths)))))
    for b in range(len(lengths)):
        assert torch.equal(call([b])[0], together[b])
        assert torch.equal(backwards[len(lengths) - 1 - b], together[b])


def test_a_graph_stays_right_while_lengths_grow() -> None:
    """Captured once; lengths change in place, from 1 key to 8192."""
    c = pages_of([8192, 8192, 8192], 64, kv_heads=2, head_dim=128, dtype=E4M3)
    q = torch.randn(3, 1, 8, 128).bfloat16().cuda()
    k, v, table = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table))
    used = torch.ones(3, dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    options: dict[str, Any] = {"variant": "causal", "return_lse": True, "package": PACKAGE}

    def call() -> tuple[Tensor, Tensor]:
        return attngen.attention_paged(q, k, v, table, used, k_descale=one, v_descale=one, **options)  # type: ignore[return-value]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    one.fill_(0.5)  # scales are read on the device, too
    for length in (1, 17, 64, 500, 4095, 8192):
        used.copy_(torch.tensor([length, max(length // 2, 1), max(length // 7, 1)]))
        graph.replay()
        wanted = attngen.attention_paged(
            q.double().cpu(), c.k_pages, c.v_pages, c.page_table, used.cpu(), k_descale=one.cpu(), v_descale=one.cpu(),
            **options,
        )  # fmt: skip
        close(results, wanted)


def test_many_ragged_batches() -> None:
    """Batches of all sizes, on one stream one after the other: counters are 0 again after each launch."""
    generator = torch.Generator().manual_seed(7)
    for number in range(30):
        batch = int(torch.randint(1, 40, (), generator=generator))
        longest = int(torch.randint(1, 1500, (), generator=generator))
        lengths = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
        kv_heads = (1, 2, 8)[number % 3]
        paged(
            lengths=lengths, page_size=(16, 64)[number % 2], heads=4 * kv_heads, kv_heads=kv_heads,
            granularity=("head", "page")[number // 2 % 2],
        )  # fmt: skip


def test_copies_may_land_in_any_order() -> None:
    """Long sequences of narrow rows: warps that took stages of each other in turn ended these launches with a fault."""
    c = pages_of([16384] * 4, 64, kv_heads=8, head_dim=64, dtype=E4M3)
    q = torch.randn(4, 1, 32, 64).half().cuda()
    k, v, table, used = (t.cuda() for t in (c.k_pages, c.v_pages, c.page_table, c.seqused_k))
    one = torch.ones((), device="cuda")

    def call() -> Tensor:
        return attngen.attention_paged(  # type: ignore[return-value]
            q, k, v, table, used, variant="causal", package=PACKAGE, k_descale=one, v_descale=one
        )

    first, differ = call(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        differ += (call() != first).any()
    assert int(differ) == 0


def test_the_ordinary_forward_over_pages_is_right() -> None:
    """Queries in 8 bits, prompts of any length: by wgmma, whose boxes of pages two warps transpose."""
    ordinary = [kernel for kernel in kernels() if not kernel.split_kv]
    assert ordinary
    for kernel in ordinary:
        trial = try_pinned(kernel, torch.device("cuda"), secrets.randbelow(2**31), small=False)
        assert not trial.problems, f"{kernel.name}: " + "\n".join(trial.problems)


@pytest.mark.parametrize("part", range(4))
def test_verify_finds_nothing(part: int) -> None:
    for kernel in [one for one in kernels() if one.split_kv][part::4]:
        trial = try_pinned(kernel, torch.device("cuda"), secrets.randbelow(2**31), small=False)
        assert not trial.problems, f"{kernel.name}: " + "\n".join(trial.problems)
