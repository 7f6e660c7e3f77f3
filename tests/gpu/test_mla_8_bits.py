"""Caches of latents in 8 bits, of 656 and 584 bytes a token, against float64: keys by index, and appending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.integrations.flash_mla.functions import flash_mla_sparse_fwd, flash_mla_with_kvcache
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.gpu.test_decode import on_gpu
from tests.gpu.test_indexed import lists
from tests.integrations.vllm import vllm_mla_cases
from tests.runtime.latent_caches import FORMS, ROTARY, empty_cache, latent_cache

PACKAGE = "mla_8_bits_tests"
NAN_BYTE = 0x7F  # NaN in e4m3, in a float32 scale and in bf16


def to_build() -> list[Prepared]:
    return list(prepare_each(load_spec(Path(__file__).with_name("mla_8_bits.yaml")))[0])


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_mla_8_bits")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels whose values are keys are for Hopper")
    kernels()


def close(actual: Any, wanted: Any) -> None:
    """Assert that output and log-sum-exp are those of float64, up to the rounding of results, of probabilities, and of
    keys to bf16."""
    out, lse = actual[0].cpu().double(), actual[1].cpu().double()
    torch.testing.assert_close(out, wanted[0].double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted[1].double(), rtol=1e-3, atol=8e-3)
    assert not out.isnan().any()


def large_cache(name: str, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A cache of random rows, drawn by whole tensors, and its columns in float64."""
    latents, group, after = FORMS[name]
    cache = empty_cache(name, pages, page_size)
    shape = (pages, page_size, 1)
    eights = torch.randn(*shape, latents).to(torch.float8_e4m3fn)
    rotary = torch.randn(*shape, ROTARY).bfloat16()
    if after:
        exponents = torch.randint(124, 129, (*shape, 8), dtype=torch.uint8)
        scales = 2.0 ** (exponents[..., :7].double() - 127)
        step, begin = cache.stride(0), page_size * 576
        cache.as_strided((*shape, 576), (step, 576, 576, 1)).copy_(
            torch.cat((eights.view(torch.uint8), rotary.view(torch.uint8)), -1)
        )
        cache.as_strided((*shape, 8), (step, 8, 8, 1), begin).copy_(exponents)
    else:
        scales = torch.rand(*shape, 4) + 0.01
        cache.copy_(torch.cat([part.view(torch.uint8) for part in (eights, scales, rotary)], -1))
        scales = scales.double()
    return cache, torch.cat((eights.double() * scales.repeat_interleave(group, -1), rotary.double()), -1)


def own_of(variant: str, entries: Tensor, heads: int) -> dict[str, Tensor]:
    own = {"indices": entries}
    if variant == "counted_sinks":
        length = torch.randint(0, entries.shape[-1] + 2, entries.shape[:2], dtype=torch.int32)
        length[..., 0] = 0
        own |= {"topk_length": length, "sinks": torch.randn(heads)}
    return own


def dense(
    variant: str, *, batch: int = 2, queries: int = 3, keys: int = 700, topk: int = 200, heads: int = 16,
    wrong: float = 0.2, scale: float = 1.0,
) -> None:  # fmt: skip
    """Compare a dense call over 656 bytes a token. Rows that no list names are NaN. Scales are multiplied by ``scale``,
    a power of two, and Q divided, so that logits stay; then outputs are."""
    torch.manual_seed(heads + topk)
    cache, columns = large_cache("fp8_mla_656", batch, keys)
    q = torch.randn(batch, queries, heads, 576).bfloat16()
    if scale != 1.0:
        scales = cache[..., 512:528].contiguous().view(torch.float32) * scale
        cache[..., 512:528] = scales.view(torch.uint8)
        columns[..., :512] *= scale
        q[..., :512] /= scale
    block = 16 if variant == "blocks" else 1
    own = own_of(variant, lists(batch, queries, topk, -(-keys // block), wrong=wrong), heads)
    named = torch.zeros(batch, keys + block, dtype=torch.bool)
    for b in range(batch):
        entries = own["indices"][b].flatten().long()
        first = entries[(entries >= 0) & (entries <= keys // block)] * block
        named[b, (first[:, None] + torch.arange(block)).flatten()] = True
    named = named[:, :keys]
    cache[~named] = NAN_BYTE
    call = {"variant": variant, "return_lse": True}
    exact = torch.where(named[..., None, None], columns, 0.0)
    wanted = attngen.attention(q.double(), exact, exact[..., :512], backend="reference", **call, **own)
    on_card = cache.cuda()
    out, lse = attngen.attention(q.cuda(), on_card, on_card, package=PACKAGE, **call, **on_gpu(own))
    close((out / scale, lse), (wanted[0] / scale, wanted[1]))


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-17, 2.0**-8, 2.0**7, 2.0**30])
@pytest.mark.parametrize(("queries", "heads"), [(3, 16), (70, 128)])
def test_scales_that_need_another_exponent(queries: int, heads: int, scale: float) -> None:
    dense("listed", batch=1, queries=queries, heads=heads, keys=500, topk=200, scale=scale)


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128, 200])
@pytest.mark.parametrize("variant", ["listed", "counted_sinks"])
def test_heads(variant: str, heads: int) -> None:
    dense(variant, heads=heads, queries=5)


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("heads", [16, 128])
def test_lengths_of_lists(topk: int, heads: int) -> None:
    dense("listed", topk=topk, heads=heads)


@pytest.mark.parametrize("heads", [16, 128])
def test_lists_of_blocks(heads: int) -> None:
    dense("blocks", topk=30, heads=heads)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_lists_without_wrong_entries_and_of_nothing_else(wrong: float) -> None:
    dense("listed", wrong=wrong, topk=192, heads=128)


@pytest.mark.parametrize(("queries", "heads"), [(1, 32), (1, 128), (70, 128), (300, 32)])
def test_more_items_than_blocks_and_fewer(queries: int, heads: int) -> None:
    dense("listed", batch=1, queries=queries, keys=1000, topk=700, heads=heads)


def paged(
    name: str, variant: str, lengths: list[int], *, heads: int, page_size: int = 64, queries: int = 3, topk: int = 150,
    **given: Any,
) -> None:  # fmt: skip
    """Compare a call over pages with float64. Other rows are NaN, and entries of the table beyond lengths are wrong."""
    torch.manual_seed(page_size + heads)
    of_sequence = [-(-keys // page_size) for keys in lengths]
    pages = sum(of_sequence) + 3
    cache, columns = large_cache(name, pages, page_size)
    order = torch.randperm(pages).int()
    table = torch.full((len(lengths), max(of_sequence) + 1), 2**30, dtype=torch.int32)
    used = torch.zeros(pages, page_size, dtype=torch.bool)
    for b, (count, keys) in enumerate(zip(of_sequence, lengths, strict=True)):
        table[b, :count] = order[sum(of_sequence[:b]) :][:count]
        for key in range(keys):
            used[table[b, key // page_size], key % page_size] = True
    columns = torch.where(used[..., None, None], columns, 0.0)
    if name == "fp8_mla_656":
        cache[~used] = NAN_BYTE
    q = torch.randn(len(lengths), queries, heads, columns.shape[-1]).bfloat16()
    own = {"indices": torch.cat([lists(1, queries, topk, keys) for keys in lengths])} if variant == "listed" else {}
    counts = torch.tensor(lengths, dtype=torch.int32)
    call: dict[str, Any] = {"variant": variant, "return_lse": True}
    wanted = attngen.attention_paged(
        q.double(), columns, columns[..., :512], table, counts, backend="reference", **call, **own
    )
    on_card = cache.as_strided((pages * cache.stride(0),), (1,)).cuda().as_strided(cache.shape, cache.stride())
    for splits in ({}, {"num_splits": 2}, {"split_size": 64}):
        actual = attngen.attention_paged(
            q.cuda(), on_card, on_card, table.cuda(), counts.cuda(), package=PACKAGE, **call, **on_gpu(own), **splits
        )
        close(actual, wanted)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
def test_listed_keys_in_pages(name: str, heads: int, page_size: int) -> None:
    paged(name, "listed", [0, 5, 100, 900], heads=heads, page_size=page_size)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("heads", "queries", "page_size"), [(16, 1, 64), (128, 1, 64), (128, 3, 16), (64, 2, 1), (8, 70, 48), (200, 1, 64)]
)
def test_whole_sequences(name: str, heads: int, queries: int, page_size: int) -> None:
    paged(name, "causal", [0, 5, 100, 63, 64, 65, 900], heads=heads, queries=queries, page_size=page_size)


@pytest.mark.parametrize("heads", [16, 128])
def test_many_sequences(heads: int) -> None:
    """Ranges of blocks end inside of sequences."""
    lengths = [100 * i % (1111 if heads < 64 else 333) for i in range(90)]
    paged("fp8_mla_656", "causal", lengths, heads=heads, queries=1)


def test_whole_dense_sequences() -> None:
    torch.manual_seed(3)
    cache, columns = large_cache("fp8_mla_656", 3, 333)
    q = torch.randn(3, 5, 128, 576).bfloat16()
    used = torch.tensor([333, 7, 200], dtype=torch.int32)
    call = {"variant": "causal", "return_lse": True}
    wanted = attngen.attention(q.double(), columns, columns[..., :512], seqused_k=used, backend="reference", **call)
    on_card = cache.cuda()
    close(attngen.attention(q.cuda(), on_card, on_card, seqused_k=used.cuda(), package=PACKAGE, **call), wanted)


@pytest.mark.parametrize("variant", ["listed", "causal"])
@pytest.mark.parametrize("heads", [8, 128])
def test_packed_sequences(heads: int, variant: str) -> None:
    of_q, of_k = [70, 1, 0, 12], [70, 300, 5, 4]
    torch.manual_seed(9)
    starts = [torch.tensor([0, *torch.tensor(of).cumsum(0).tolist()], dtype=torch.int32) for of in (of_q, of_k)]
    cache, columns = large_cache("fp8_mla_656", 1, sum(of_k))
    q = torch.randn(sum(of_q), heads, 576).bfloat16()
    entries = torch.cat([lists(1, 70, 100, keys + 20) for keys in of_k])
    own = {"indices": entries} if variant == "listed" else {}
    call = {"max_seqlen_q": 70, "max_seqlen_k": 300, "variant": variant, "return_lse": True}
    wanted = attngen.attention_varlen(
        q.double(), columns[0], columns[0, ..., :512], *starts, backend="reference", **own, **call
    )
    on_card = cache[0].cuda()
    actual = attngen.attention_varlen(
        q.cuda(), on_card, on_card, *(start.cuda() for start in starts), package=PACKAGE, **on_gpu(own), **call
    )
    close(actual, wanted)


def scaled_rows(
    variant: str, of: str, lengths: list[int], *, heads: int, page_size: int = 64, queries: int = 3, width: int = 576
) -> None:
    """Compare rows of e4m3, with scales of pages, of sequences, or one for all, with float64. Other rows are NaN, and
    so are the scales of other pages."""
    torch.manual_seed(page_size + heads)
    counts = [-(-keys // page_size) for keys in lengths]
    pages = sum(counts) + 3
    cache = torch.full((pages, page_size, 1, width), NAN_BYTE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    shape = {"page": (pages, 1, 1), "sequence": (len(lengths), 1), "one": ()}[of]
    scales = 0.004 + 0.02 * torch.rand(shape)
    columns = torch.zeros(pages, page_size, 1, width, dtype=torch.float64)
    order = torch.randperm(pages).int()
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    listed = torch.zeros(pages, dtype=torch.bool)
    for b, (count, keys) in enumerate(zip(counts, lengths, strict=True)):
        table[b, :count] = order[sum(counts[:b]) :][:count]
        for page, first in zip(table[b, :count].tolist(), range(0, keys, page_size), strict=True):
            rows = (30 * torch.randn(min(page_size, keys - first), 1, width)).to(torch.float8_e4m3fn)
            cache[page, : rows.shape[0]] = rows
            scale = scales[page] if of == "page" else scales[b] if of == "sequence" else scales
            columns[page, : rows.shape[0]] = rows.double() * scale.double()
            listed[page] = True
    if of == "page":
        scales[~listed] = torch.nan
    q = torch.randn(len(lengths), queries, heads, width).bfloat16()
    own = {"indices": torch.cat([lists(1, queries, 150, keys) for keys in lengths])} if variant == "listed" else {}
    used = torch.tensor(lengths, dtype=torch.int32)
    call: dict[str, Any] = {"variant": variant, "return_lse": True}
    wanted = attngen.attention_paged(
        q.double(), columns, columns[..., :512], table, used, backend="reference", **call, **own
    )
    on_card = cache.cuda()
    for splits in ({}, {"num_splits": 2}, {"split_size": 64}):
        actual = attngen.attention_paged(
            q.cuda(), on_card, on_card[..., :512], table.cuda(), used.cuda(), package=PACKAGE, k_descale=scales.cuda(),
            **call, **on_gpu(own), **splits,
        )  # fmt: skip
        close(actual, wanted)


@pytest.mark.parametrize(
    ("of", "heads", "queries", "page_size"),
    [("page", 16, 1, 64), ("page", 128, 3, 16), ("page", 8, 70, 1), ("sequence", 128, 1, 64), ("sequence", 8, 70, 48),
     ("one", 16, 2, 16)],
)  # fmt: skip
def test_rows_of_e4m3(of: str, heads: int, queries: int, page_size: int) -> None:
    scaled_rows("causal", of, [0, 5, 100, 63, 64, 65, 900], heads=heads, queries=queries, page_size=page_size)


def test_rows_of_e4m3_without_further_columns() -> None:
    scaled_rows("causal", "sequence", [1, 700, 64], heads=128, width=512)


@pytest.mark.parametrize(("heads", "page_size"), [(16, 1), (128, 48)])
def test_listed_rows_of_e4m3(heads: int, page_size: int) -> None:
    scaled_rows("listed", "page", [0, 5, 100, 900], heads=heads, page_size=page_size)


@pytest.mark.parametrize("heads", [16, 128])
def test_dense_rows_of_e4m3_and_a_scale_for_each_sequence(heads: int) -> None:
    torch.manual_seed(heads)
    rows, scales = (30 * torch.randn(2, 700, 1, 576)).to(torch.float8_e4m3fn), 0.004 + 0.02 * torch.rand(2, 1)
    q = torch.randn(2, 5, heads, 576).bfloat16()
    own = {"indices": lists(2, 5, 300, 700), "topk_length": torch.randint(0, 301, (2, 5), dtype=torch.int32)}
    call = {"variant": "listed_keys", "return_lse": True}
    columns = rows.double() * scales.double()[:, :, None, None]
    wanted = attngen.attention(q.double(), columns, columns[..., :512], backend="reference", **call, **own)
    on_card = rows.cuda()
    actual = attngen.attention(
        q.cuda(), on_card, on_card[..., :512], package=PACKAGE, k_descale=scales.cuda(), **call, **on_gpu(own)
    )
    close(actual, wanted)


def test_rows_of_e4m3_in_flash_mla() -> None:
    torch.manual_seed(8)
    cache = (30 * torch.randn(40, 64, 1, 576)).to(torch.float8_e4m3fn)
    table, used = torch.randperm(40).int().view(4, 10), torch.tensor([640, 1, 77, 300], dtype=torch.int32)
    q = torch.randn(4, 2, 128, 576).to(torch.float8_e4m3fn)
    scales = {"descale_q": torch.tensor([0.7]), "descale_k": torch.tensor([0.013])}

    def call(device: str) -> Any:
        given = (each.to(device) for each in (q, cache, table, used))
        return flash_mla_with_kvcache(
            *given, 512, causal=True, **{name: scale.to(device) for name, scale in scales.items()}
        )

    close(call("cuda"), call("cpu"))


def test_new_rows_of_e4m3_have_the_bits_of_torch() -> None:
    caches = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(7)
        latents, rotary = torch.randn(3, 7, 1, 512).bfloat16(), torch.randn(3, 7, 1, ROTARY).bfloat16()
        angles, scales = torch.randn(200, ROTARY // 2), (0.003 + 0.01 * torch.rand(24, 1, 1)).to(device)
        cache = torch.full((24, 16, 1, 576), 9, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        table = torch.arange(24, dtype=torch.int32).flip(0).view(3, 8)
        attngen.append_kv(
            rotary.to(device), latents.to(device), cache[..., 512:], cache[..., :512],
            torch.tensor([0, 30, 61], dtype=torch.int32, device=device), page_table=table.to(device),
            rotary_cos=angles.cos().to(device), rotary_sin=angles.sin().to(device), rotary_interleaved=True,
            k_descale=scales, v_descale=scales,
        )  # fmt: skip
        caches.append(cache.view(torch.uint8).cpu())
    assert torch.equal(*caches)
    assert (caches[0] != 9).any(-1).sum() == 21


def test_every_byte() -> None:
    """One key a query: O is its first 512 columns, from the smallest scale to large ones. In fp16 a number keeps its
    bits down to 2⁻¹⁷ of the largest scale of its part, which is that of its row here."""
    torch.manual_seed(2)
    keys = 256
    cache, _ = large_cache("fp8_mla_656", 1, keys)
    eights = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].expand(256, 512).clone()
    eights[(eights & 0x7F) == NAN_BYTE] = 0x7E
    scales = torch.tensor([2.0**-100, 3e-30, 0.0123, 1.0, 7.7, 127.9, 255.0]).repeat(147)[: 4 * 256].view(256, 4)
    cache[0, :, 0, :512] = eights
    cache[0, :, 0, 512:528] = scales.contiguous().view(torch.uint8)
    q = torch.randn(1, keys, 16, 576).bfloat16()
    entries = torch.arange(keys, dtype=torch.int32).view(1, keys, 1)
    on_card = cache.cuda()
    out = attngen.attention(
        (q * 1e-30).cuda(), on_card, on_card, variant="listed", package=PACKAGE, indices=entries.cuda()
    )
    assert isinstance(out, Tensor)
    numbers = eights.view(torch.float8_e4m3fn).double() * scales.double().repeat_interleave(128, -1)
    got, largest = out[0, :, 0].cpu(), scales.amax(1, keepdim=True)
    assert ((got.double() - numbers).abs() <= 2**-7 * numbers.abs() + 2**-17 * largest.double()).all()
    near = (32 * scales >= largest).repeat_interleave(128, -1)
    torch.testing.assert_close(got[near].double(), numbers[near], rtol=2**-7, atol=0.0)
    assert (got == numbers.bfloat16())[near].double().mean() > 0.9


def appended(name: str, device: str, **given: Any) -> Tensor:
    """A cache after new tokens: with NaN, infinity and zeros among them."""
    torch.manual_seed(4)
    latents, rotary = torch.randn(3, 7, 1, FORMS[name][0]).bfloat16(), torch.randn(3, 7, 1, ROTARY).bfloat16()
    latents[0, 0, 0, 64:192] = 0.0
    latents[1, 2, 0, 130], latents[2, 3, 0, 5] = torch.nan, torch.inf
    latents *= torch.logspace(-30, 4, 21).view(3, 7, 1, 1)
    angles = torch.randn(200, ROTARY // 2)
    table = torch.arange(24, dtype=torch.int32).flip(0).view(3, 8)
    lengths = torch.tensor([0, 30, 61], dtype=torch.int32)
    cache = empty_cache(name, 24, 16, fill=9, device=device)
    attngen.append_kv(
        rotary.to(device), latents.to(device), cache, cache, lengths.to(device), page_table=table.to(device),
        rotary_cos=angles.cos().to(device), rotary_sin=angles.sin().to(device), **given,
    )  # fmt: skip
    return cache.as_strided((24 * cache.stride(0),), (1,)).cpu()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_appended_bits_are_those_of_torch(name: str, interleaved: bool) -> None:
    on_card, on_host = (appended(name, device, rotary_interleaved=interleaved) for device in ("cuda", "cpu"))
    assert torch.equal(on_card, on_host)


@pytest.mark.parametrize("name", FORMS)
def test_small_caches_by_hand(name: str) -> None:
    """The decoding of other tests is that of bytes, one by one."""
    cache, columns = latent_cache(name, 3, 16)
    q = torch.randn(1, 2, 16, columns.shape[-1]).bfloat16()
    table, counts = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([45], dtype=torch.int32)
    call = {"variant": "listed", "return_lse": True, "indices": lists(1, 2, 30, 45)}
    wanted = attngen.attention_paged(
        q.double(), columns[:, :, None], columns[:, :, None, :512], table, counts, backend="reference", **call
    )
    on_card = cache.as_strided((3 * cache.stride(0),), (1,)).cuda().as_strided(cache.shape, cache.stride())
    call["indices"] = call["indices"].cuda()
    close(
        attngen.attention_paged(q.cuda(), on_card, on_card, table.cuda(), counts.cuda(), package=PACKAGE, **call),
        wanted,
    )


def two_caches(name: str, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Two caches on the GPU, of 20 pages of 64 rows and 30 of two; lists of three sequences with two queries, on the
    CPU; and the columns of all rows in float64. Rows that no list names are NaN."""
    torch.manual_seed(seed)
    caches, indices, exact = [], [], []
    for pages, page_size, topk in ((20, 64, 700), (30, 2, 40)):
        if name == "bf16":
            cache = torch.randn(pages, page_size, 1, 576).bfloat16()
            columns = cache.double()
        else:
            cache, columns = large_cache(name, pages, page_size)
        entries = lists(3, 2, topk, pages * page_size)
        named = torch.zeros(pages, page_size, dtype=torch.bool)
        named.view(-1)[entries[(entries >= 0) & (entries < pages * page_size)].long()] = True
        if name == "bf16":
            cache[~named] = torch.nan
        elif name == "fp8_mla_656":  # scales of others lie elsewhere
            cache[~named] = NAN_BYTE
        columns[~named] = torch.nan
        caches.append(moved(cache))
        indices.append(entries)
        exact.append(columns)
    return caches, indices, exact


def moved(cache: Tensor) -> Tensor:
    """A cache on the GPU, with the padding of its pages."""
    return cache.as_strided((cache.shape[0] * cache.stride(0),), (1,)).cuda().as_strided(cache.shape, cache.stride())


@pytest.mark.parametrize("name", ["bf16", *FORMS])
@pytest.mark.parametrize("heads", [5, 16, 64, 128, 200])
def test_two_caches(name: str, heads: int) -> None:
    """Lists of both, and of either alone, however blocks share the tiles; bits repeat, and graphs take other lists."""
    caches, indices, exact = two_caches(name, heads)
    counts = [torch.randint(0, each.shape[-1] + 1, (3, 2), dtype=torch.int32) for each in indices]
    counts[0][0] = counts[1][0, 0] = counts[1][1] = 0
    counts[0][2, 1] = 700
    q = torch.randn(3, 2, heads, exact[0].shape[-1]).bfloat16()
    own = {"indices": indices[0], "topk_length": counts[0], "extra_indices": indices[1], "extra_topk_length": counts[1]}
    places = torch.arange(20, dtype=torch.int32).repeat(3, 1), torch.full((3,), 1280, dtype=torch.int32)
    call: dict[str, Any] = {"variant": "listed_keys_of_two_caches", "return_lse": True}
    wanted = attngen.attention_paged(
        q.double(), exact[0], exact[0][..., :512], *places, backend="reference", extra_k=exact[1].view(torch.uint8),
        **own, **call,
    )  # fmt: skip
    lists_of_both = on_gpu(own)
    given = {**lists_of_both, "extra_k": caches[1].view(torch.uint8), "package": PACKAGE, **call}
    tensors = q.cuda(), caches[0], caches[0][..., :512] if name == "bf16" else caches[0], *(p.cuda() for p in places)
    for splits in ({}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 128}):
        close(attngen.attention_paged(*tensors, **given, **splits), wanted)
    first = attngen.attention_paged(*tensors, **given)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(attngen.attention_paged(*tensors, **given), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attngen.attention_paged(*tensors, **given)
    for each in lists_of_both.values():
        each.copy_(each.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(attngen.attention_paged(*tensors, **given), captured, strict=True))


@pytest.mark.parametrize(("sequences", "queries", "wrong"), [(3, 2, 0.2), (3, 2, 1.0), (150, 1, 0.2)])
@pytest.mark.parametrize("name", ["bf16", *FORMS])
@pytest.mark.parametrize("heads", [16, 128])
def test_two_caches_of_flash_mla(
    name: str, heads: int, sequences: int, queries: int, wrong: float
) -> None:  # fmt: skip
    """Both lists are one, and a sink counts once. The reference does the same in float32. Parts of many sequences are
    merged in place."""
    torch.manual_seed(heads)
    caches, indices, counts = [], [], []
    for pages, page_size, topk in ((20, 64, 700), (30, 2, 40)):
        if name == "bf16":
            caches.append(torch.randn(pages, page_size, 1, 576).bfloat16())
        else:
            caches.append(large_cache(name, pages, page_size)[0])
        indices.append(lists(sequences, queries, topk, pages * page_size, wrong=wrong))
        counts.append(torch.randint(0, topk + 1, (sequences,), dtype=torch.int32))
    counts[0][0] = counts[1][0] = counts[1][1] = 0
    q = torch.randn(sequences, queries, heads, 512 if name == "fp8_mla_584" else 576).bfloat16()
    sink = torch.randn(heads)

    own = {"indices": indices[0], "topk_length": counts[0], "attn_sink": sink}
    own |= {"extra_indices_in_kvcache": indices[1], "extra_topk_length": counts[1]}

    def on(device: str) -> dict[str, Any]:
        cache, extra = (moved(each) if device == "cuda" else each for each in caches)
        given = {name: each.to(device) for name, each in own.items()}
        return {"q": q.to(device), "k_cache": cache, "extra_k_cache": extra, **given}

    def call(given: dict[str, Any]) -> Any:
        return flash_mla_with_kvcache(block_table=None, cache_seqlens=None, head_dim_v=512, **given)

    wanted = call(on("cpu"))
    on_card = [on("cuda") for _ in range(4)]  # later ones are recognized
    for given in on_card:
        close(call(given), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(on_card[0])
    on_card[0]["indices"].copy_(on_card[1]["indices"].flip(0))
    on_card[0]["topk_length"].copy_(on_card[1]["topk_length"].flip(0))
    graph.replay()
    close(captured, call({**on("cpu"), "indices": indices[0].flip(0), "topk_length": counts[0].flip(0)}))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
def test_sinks_of_flash_mla(heads: int, queries: int) -> None:
    """A sink counts, and the log-sum-exp leaves it out: that of a row without a key is −inf, whatever its sink is."""
    torch.manual_seed(heads)
    cache, _ = large_cache("fp8_mla_656", 20, 64)
    q, entries = torch.randn(4, queries, heads, 576).bfloat16(), lists(4, queries, 300, 20 * 64)
    sink = torch.randn(heads)
    sink[:2] = torch.tensor([-torch.inf, torch.inf])
    entries[1], counts = -1, torch.tensor([300, 20, 0, 7], dtype=torch.int32)

    def call(device: str) -> Any:
        given = {"indices": entries, "topk_length": counts, "attn_sink": sink}
        given = {name: each.to(device) for name, each in given.items()}
        return flash_mla_with_kvcache(q.to(device), cache.to(device), None, None, 512, **given)

    wanted = call("cpu")
    for _ in range(4):  # later ones are recognized
        close(call("cuda"), wanted)


@pytest.mark.parametrize("heads", [16, 128])
def test_largest_logits_of_flash_mla(heads: int) -> None:
    torch.manual_seed(heads)
    q, kv = torch.randn(70, heads, 576).bfloat16(), torch.randn(900, 1, 576).bfloat16()
    entries = lists(1, 70, 300, 900)[0][:, None]
    entries[3] = -1
    _, largest, lse = flash_mla_sparse_fwd(q.cuda(), kv.cuda(), entries.cuda(), 0.05, return_max_logits=True)
    assert largest is not None
    listed = ((entries[:, 0] >= 0) & (entries[:, 0] < 900))[:, None]
    keys = kv.double()[entries.clamp(0, 899)[:, 0].long(), 0]
    logits = (0.05 * torch.einsum("qhd,qkd->qhk", q.double(), keys)).masked_fill(~listed, -torch.inf)
    torch.testing.assert_close(largest.cpu().double(), logits.amax(-1), rtol=1e-5, atol=2e-5)
    assert (largest <= lse + 1e-3).all()


def test_bits_repeat_and_graphs() -> None:
    torch.manual_seed(1)
    cache, _ = large_cache("fp8_mla_656", 1, 4096)
    q, k, entries = torch.randn(1, 77, 128, 576).bfloat16().cuda(), cache.cuda(), lists(1, 77, 2048, 4096).cuda()

    def call() -> tuple[Tensor, Tensor]:
        out = attngen.attention(q, k, k, variant="listed", indices=entries, return_lse=True, package=PACKAGE)
        assert isinstance(out, tuple)
        return out

    first = call()
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    entries.copy_(lists(1, 77, 2048, 4096))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(call(), captured, strict=True))


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 5, 3)])
def test_vllms_backend(queries: tuple[int, ...]) -> None:
    vllm_mla_cases.check_on_gpu(vllm_mla_cases.decode(queries, (400, 333, 7)).packed(), "fp8_ds_mla")
