"""Keys by index on the reference, against plain torch; what is refused; the sizes of work items."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.first_call import _asked
from attngen.errors import CallError, NoKernelError, SpecError
from attngen.inspect import baseline
from attngen.lang.check import restore_variant
from attngen.lang.variant import Variant
from attngen.manifest import WorkLimits
from attngen.plan import plan
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.splits import Capacity, split_sizes
from attngen.runtime.reference.eager import reference
from attngen.runtime.registry.select import Request
from tests.runtime.pages import cache, starts_of
from tests.runtime.support import FakeDriver, variant

LISTED, COUNTED = variant("listed", None, keys="index"), variant("counted", None, keys="counted_index")
CAUSAL = variant("listed_causal", keys="index")
INDICES = torch.tensor(
    [[0, 3, -1, 8], [2, 2, 1, 100], [7, 7, 7, 7], [0, 1, 2, 3], [-5, -1, 9, -(2**31)]], dtype=torch.int32
)


def inputs(keys: int = 9, dims: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 5, 4, dims, dtype=torch.float64), torch.randn(1, keys, 2, dims, dtype=torch.float64)


def expected(q: Tensor, k: Tensor, seen: list[int], h: int, row: int) -> tuple[Tensor, Tensor]:
    rows = k[0, seen, h // 2]
    logits = rows @ q[0, row, h] * q.shape[-1] ** -0.5
    return logits.softmax(-1) @ rows, logits.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_query_sees_the_keys_of_its_list_each_as_often_as_it_stands_there(causal: bool) -> None:
    q, k = inputs()
    out, lse = attngen.attention(q, k, k, variant=CAUSAL if causal else LISTED, indices=INDICES[None], return_lse=True)
    for row, entries in enumerate(INDICES.tolist()):
        seen = [key for key in entries if 0 <= key < 9 and (not causal or key <= row + 4)]
        for h in range(4):
            if not seen:
                assert out[0, row, h].abs().max() == 0
                assert lse[0, h, row] == -torch.inf
                continue
            o, total = expected(q, k, seen, h, row)
            torch.testing.assert_close(out[0, row, h], o)
            torch.testing.assert_close(lse[0, h, row], total)


def test_entries_after_the_counted_ones_do_not_matter() -> None:
    q, k = inputs()
    length = torch.tensor([[2, 1, 0, -3, 2**31 - 1]], dtype=torch.int32)
    cut = INDICES.clone()
    for row, count in enumerate(length[0].tolist()):
        cut[row, max(min(count, 4), 0) :] = -1
    counted = attngen.attention(q, k, k, variant=COUNTED, indices=INDICES[None], topk_length=length)
    torch.testing.assert_close(counted, attngen.attention(q, k, k, variant=LISTED, indices=cut[None]))


def test_keys_that_no_list_names_may_be_nan() -> None:
    q, k = inputs()
    wanted = attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None])
    k[:, [4, 5, 6]] = torch.nan
    torch.testing.assert_close(attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None]), wanted)


def test_packed_and_paged_calls_list_places_in_a_sequence() -> None:
    lengths = [9, 4]
    c = cache(lengths, 4, kv_heads=1, head_dim=16, dtype=torch.float64)
    torch.manual_seed(1)
    q, indices = torch.randn(2, 3, 4, 16, dtype=torch.float64), torch.randint(-2, 11, (2, 3, 6), dtype=torch.int32)
    paged = attngen.attention_paged(q, c.k_pages, c.k_pages, c.page_table, c.seqused_k, variant=CAUSAL, indices=indices)
    starts_q, starts_k = starts_of([3, 3]), starts_of(lengths)
    k = torch.cat(list(c.keys))
    packed = attngen.attention_varlen(q.flatten(0, 1), k, k, starts_q, starts_k, 3, 9, variant=CAUSAL, indices=indices)
    torch.testing.assert_close(paged.flatten(0, 1), packed)
    for b, length in enumerate(lengths):
        rows = k[starts_k[b] : starts_k[b] + length][None]
        one = attngen.attention(q[b : b + 1], rows, rows, variant=CAUSAL, indices=indices[b : b + 1])
        torch.testing.assert_close(paged[b : b + 1], one)


def two_caches(layout: str) -> dict[str, Any]:
    """Keys of a call with a second cache, whose pages are padded: k and v, their rows, and the second cache's."""
    torch.manual_seed(2)
    extra = torch.randn(5, 5, 2, 16, dtype=torch.float64)[:, :3]
    lists = {
        "indices": torch.randint(-2, 11, (2, 3, 6), dtype=torch.int32),
        "topk_length": torch.tensor([[6, 2, 0], [7, 4, 1]], dtype=torch.int32),
        "extra_k": extra.view(torch.uint8),
        "extra_indices": torch.randint(-2, 17, (2, 3, 4), dtype=torch.int32),
        "extra_topk_length": torch.tensor([[0, 4, 0], [-1, 9, 3]], dtype=torch.int32),
    }
    c = cache([9, 4], 4, kv_heads=2, head_dim=16, dtype=torch.float64)
    q = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    call: dict[str, Any] = {"variant": variant("two", None, keys="counted_index_of_two_caches"), "return_lse": True}
    if layout == "paged":
        out, lse = attngen.attention_paged(q, c.k_pages, c.k_pages, c.page_table, c.seqused_k, **lists, **call)
    else:
        k = torch.cat(list(c.keys))
        starts = starts_of([3, 3]), starts_of([9, 4])
        out, lse = attngen.attention_varlen(q.flatten(0, 1), k, k, *starts, 3, 9, **lists, **call)
        out, lse = out.unflatten(0, (2, 3)), lse.unflatten(-1, (2, 3)).transpose(0, 1)
    return {"q": q, "keys": c.keys, "extra": extra.flatten(0, 1), "lists": lists, "out": out, "lse": lse}


@pytest.mark.parametrize("layout", ["paged", "varlen"])
def test_a_second_cache_adds_keys(layout: str) -> None:
    """Entries of its lists are slots, whatever the layout of k; rows that no list names do not matter."""
    given = two_caches(layout)
    for b in range(2):
        for row in range(3):
            seen = []
            for prefix, rows in (("", given["keys"][b]), ("extra_", given["extra"])):
                count = max(int(given["lists"][f"{prefix}topk_length"][b, row]), 0)
                entries = given["lists"][f"{prefix}indices"][b, row, :count].tolist()
                seen += [rows[entry] for entry in entries if 0 <= entry < rows.shape[0]]
            if not seen:
                assert given["out"][b, row].abs().max() == 0
                assert (given["lse"][b, :, row] == -torch.inf).all()
                continue
            keys = torch.stack(seen)[:, torch.arange(4) // 2]
            logits = torch.einsum("khd,hd->hk", keys, given["q"][b, row]) / 4
            torch.testing.assert_close(given["lse"][b, :, row], logits.logsumexp(-1))
            torch.testing.assert_close(given["out"][b, row], torch.einsum("hk,khd->hd", logits.softmax(-1), keys))


def test_second_caches_that_are_wrong() -> None:
    own = variant("two", None, keys="counted_index_of_two_caches")
    q, k = (tensor.bfloat16() for tensor in inputs())
    lists = {"indices": INDICES[None].clamp(-1, 8), "topk_length": torch.full((1, 5), 4, dtype=torch.int32)}
    lists |= {"extra_indices": torch.full((1, 5, 1), 3, dtype=torch.int32)}
    lists |= {"extra_topk_length": torch.ones(1, 5, dtype=torch.int32)}
    rows = torch.zeros(1, 3, 2, 40, dtype=torch.uint8)

    def call(extra: Tensor, keys: Tensor = k) -> None:
        attngen.attention(q, keys, keys, variant=own, extra_k=extra, **lists)

    call(rows[..., :32].contiguous())  # the slot 3 does not exist
    with pytest.raises(CallError, match="must have 32 bytes a row, as k has, got"):
        call(rows)
    with pytest.raises(CallError, match="contiguous rows at multiples of 16 bytes"):
        call(rows[..., 8:])
    with pytest.raises(CallError, match="k has no row"):
        call(rows[..., :32].contiguous(), k[:, :0])
    with (
        attngen.debug(),
        pytest.raises(CallError, match=r"extra_indices\[0, 0, 0\] is 3, but sequence 0 has 3 rows of the"),
    ):
        call(rows[..., :32].contiguous())


def test_the_reference_is_differentiable() -> None:
    q, k = inputs()
    q.requires_grad_()
    k.requires_grad_()
    attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None]).sum().backward()
    assert k.grad is not None
    assert (k.grad[0].abs().amax((1, 2)) > 0).tolist() == [key in {0, 1, 2, 3, 7, 8} for key in range(9)]


@pytest.mark.parametrize("sink", [-1.0, 30.0])
def test_a_sink_may_be_left_out_of_the_log_sum_exp(sink: float) -> None:
    """Outputs have it; the log-sum-exp is that of the keys alone, each as often as the list names it."""
    q, k = inputs()
    of_keys = attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None], return_lse=True)[1]
    made = [
        variant("sunk", None, keys="index", sink=str(sink)),
        variant("sunk", None, keys="index", sink=str(sink), sink_in_lse=False),
    ]
    assert made[0].definition != made[1].definition
    assert restore_variant(made[1].to_dict()) == made[1]
    (out, with_sink), (same, lse) = (
        attngen.attention(q, k, k, variant=each, indices=INDICES[None], return_lse=True) for each in made
    )
    torch.testing.assert_close(same, out)
    torch.testing.assert_close(lse, of_keys)
    torch.testing.assert_close(with_sink, torch.logaddexp(of_keys, torch.tensor(sink, dtype=torch.float64)))
    nothing = attngen.attention(q, k[:, :0], k[:, :0], variant=made[1], indices=INDICES[None], return_lse=True)[1]
    assert (nothing == -torch.inf).all()


def test_a_variant_keeps_its_keys() -> None:
    for made in (LISTED, COUNTED, CAUSAL, variant("two", None, keys="counted_index_of_two_caches")):
        assert restore_variant(made.to_dict()) == made
    assert LISTED.definition != Variant("listed", tensors=LISTED.tensors).definition
    assert attngen.variant(keys="index", name="listed").value == LISTED


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"keys": "indx"}, "did you mean 'index'"),
        ({"keys": "index", "dropout": True}, "leave out 'dropout' or 'keys'"),
        ({"keys": "index", "tensors": {"indices": {"dtype": "int32", "shape": ["h"]}}}, "declares 'indices' itself"),
        ({"keys": "counted_index_of_two_caches", "mask": "q_pos >= kv"}, "no position that a mask could read"),
        ({"keys": "index", "sink_in_lse": False}, "there is no 'sink'"),
        ({"sink": "1.0", "sink_in_lse": False}, "there is no 'keys'"),
        ({"keys": "counted_index_of_two_caches", "score": "2 * s"}, "no position that a score could read"),
    ],
)
def test_variants_that_contradict_themselves(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        attngen.variant(**fields)


def test_calls_that_are_wrong() -> None:
    q, k = inputs()
    with pytest.raises(CallError, match="missing 'indices'"):
        attngen.attention(q, k, k, variant=LISTED)
    with pytest.raises(CallError, match="must have dtype torch.int32"):
        attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None].long())
    with pytest.raises(CallError, match="axis 1 must be seqlen_q = 5"):
        attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None, :3])


def test_what_kernels_there_can_be(gpu: FakeDriver) -> None:
    q, k = (tensor.half() for tensor in inputs(dims=64))
    with pytest.raises(NoKernelError, match="head_dim: 64"):
        attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None])
    q, k = (tensor.float() for tensor in inputs(dims=64))
    with pytest.raises(NoKernelError, match="No kernel can be built for keys by index"):
        attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None])


@pytest.mark.parametrize("block", [1, 16])
def test_lists_of_each_kv_head_and_of_blocks(block: int) -> None:
    """Blocks are as many keys in a row; each KV head has a list of its own."""
    q, k = inputs(keys=70)
    of_heads = torch.stack([INDICES, INDICES.flip(0)], 1)[None]
    name = "counted_head_index" if block == 1 else f"counted_head_blocks_of_{block}"
    length = torch.full((1, 5, 2), 3, dtype=torch.int32)
    length[0, 1, 1] = 0
    own = variant("of_heads", None, keys=name)
    out = attngen.attention(q, k, k, variant=own, indices=of_heads, topk_length=length)
    for row in range(5):
        for h in range(4):
            counted = of_heads[0, row, h // 2, : length[0, row, h // 2]].tolist()
            seen = [
                key for entry in counted if entry >= 0 for key in range(entry * block, (entry + 1) * block) if key < 70
            ]
            if not seen:
                assert out[0, row, h].abs().max() == 0
                continue
            torch.testing.assert_close(out[0, row, h], expected(q, k, seen, h, row)[0])


def test_blocks_of_a_list_are_tiles_of_keys() -> None:
    limits = WorkLimits(least_tiles=8)
    launch: Any = SimpleNamespace(
        tile_m=16, tile_n=16, row_warps=4, row_blocks=1, cluster=1, merges=False, limits=limits
    )
    q, k = torch.zeros(2, 7, 24, 64), torch.zeros(2, 5000, 2, 64)
    own = variant("blocks", None, keys="blocks_of_32")
    call = bind(own, q, k, k, None, arguments={"indices": torch.zeros(2, 7, 9, dtype=torch.int32)})
    sizes = split_sizes(launch, call, Capacity(132, 132))
    assert (sizes["row_bits"], sizes["row_units"], sizes["query_rows"]) == (0, 7, 16)
    assert sizes["split_blocks"] == min(132, 2 * 2 * 7 * 18 // 8)


def test_a_tile_has_keys_of_one_list() -> None:
    launch: Any = SimpleNamespace(
        tile_m=64, tile_n=64, row_warps=2, row_blocks=2, cluster=2, merges=False, limits=WorkLimits()
    )
    q, k = torch.zeros(1, 2, 128, 16), torch.zeros(1, 50, 1, 16)
    lists = {"indices": torch.zeros(1, 2, 65, dtype=torch.int32), "topk_length": torch.zeros(1, 2, dtype=torch.int32)}
    lists |= {"extra_indices": torch.zeros(1, 2, 130, dtype=torch.int32), "extra_topk_length": lists["topk_length"]}
    own = variant("two", None, keys="counted_index_of_two_caches")
    extra = torch.zeros(3, 4, 1, 64, dtype=torch.uint8)
    call = bind(own, q, k, k, None, arguments={**lists, "extra_k": extra})
    assert split_sizes(launch, call, Capacity(132, 66))["split_blocks"] == 2 * (2 * 5 // 2)


@pytest.mark.parametrize(
    ("heads", "bits", "units", "rows"),
    [(1, 0, 1, 64), (64, 0, 1, 64), (65, 1, 1, 128), (128, 1, 1, 128), (200, 1, 2, 256)],
)
def test_work_items_have_heads_of_one_query(heads: int, bits: int, units: int, rows: int) -> None:
    """And its tiles are those of the list, however many keys the sequence has."""
    launch: Any = SimpleNamespace(
        tile_m=64, tile_n=64, row_warps=2, row_blocks=2, cluster=2, merges=False, limits=WorkLimits()
    )
    q, k = torch.zeros(2, 7, heads, 16), torch.zeros(2, 5000, 1, 16)
    call = bind(LISTED, q, k, k, None, arguments={"indices": torch.zeros(2, 7, 130, dtype=torch.int32)})
    sizes = split_sizes(launch, call, Capacity(132, 66))
    assert (sizes["row_bits"], sizes["row_units"], sizes["query_rows"]) == (bits, 7 * units, rows)
    assert sizes["split_blocks"] == min(132 >> bits, 2 * 7 * units * 3 // 2) << bits


def test_debug_names_entries_that_are_wrong() -> None:
    """An entry of -1 names no key on purpose; others that name none, and counts that no row has, raise errors."""
    q, k = inputs()
    good = INDICES.clamp(-1, 8)[None]
    with attngen.debug():
        attngen.attention(q, k, k, variant=LISTED, indices=good)
        with pytest.raises(CallError, match=r"indices\[0, 1, 3\] is 100, but sequence 0 has 9 keys"):
            attngen.attention(q, k, k, variant=LISTED, indices=INDICES[None])
        short = torch.tensor([[4, 3, 4, 4, 2]], dtype=torch.int32)
        with pytest.raises(CallError, match=r"indices\[0, 4, 0\] is -5"):
            attngen.attention(q, k, k, variant=COUNTED, indices=INDICES[None], topk_length=short)
        with pytest.raises(CallError, match=r"topk_length\[0, 4\] is 5, but a row of indices has 4 entries"):
            attngen.attention(q, k, k, variant=COUNTED, indices=good, topk_length=torch.tensor([[4, 4, 4, 0, 5]]).int())
        blocks = variant("blocks", None, keys="blocks_of_16")
        with pytest.raises(CallError, match="has 1 blocks of 16 keys"):
            attngen.attention(q, k, k, variant=blocks, indices=good)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("keys", "dims"), [("head_blocks_of_16", (64, 64)), ("index", (576, 512))])
def test_a_first_call_asks_for_a_kernel_that_takes_lists(keys: str, dims: tuple[int, int], direction: str) -> None:
    q, k = (torch.zeros(1, 4, heads, dims[0], dtype=torch.bfloat16) for heads in (4, 1))
    v = k[..., : dims[1]]
    shape = (1, 4, 1, 3) if keys.startswith("head") else (1, 4, 3)
    call = bind(variant("own", keys=keys), q, k, v, None, arguments={"indices": torch.zeros(shape, dtype=torch.int32)})
    addresses = {name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v))}
    asked = _asked(Request(call, 0, addresses, {}, direction=direction), 90)
    planned = plan(asked)
    assert (planned.direction, planned.variant.keys, planned.v_of_key) == (direction, keys, dims[0] == 576)


@pytest.mark.parametrize("made", [{}, {"sink": "0.5"}, {"sink": "0.5", "sink_in_lse": False}], ids=str)
def test_the_yardstick_of_errors_lists_the_same_keys(made: dict[str, Any]) -> None:
    """In float64 it is the reference itself."""
    q, k = inputs()
    call = bind(variant("own", None, keys="index", **made), q, k, k, None, arguments={"indices": INDICES[None]})
    for mine, exact in zip(baseline.plain(call, q, k, k), reference(call, q, k, k), strict=True):
        torch.testing.assert_close(mine, exact, check_dtype=False)


def test_the_yardstick_of_errors_has_both_caches() -> None:
    given = two_caches("varlen")
    k = torch.nn.utils.rnn.pad_sequence(list(given["keys"]), batch_first=True)
    lengths = torch.tensor([len(keys) for keys in given["keys"]], dtype=torch.int32)
    own = variant("two", None, keys="counted_index_of_two_caches")
    call = bind(own, given["q"], k, k, None, arguments=given["lists"], seqused_k=lengths)
    out, lse = baseline.plain(call, given["q"], k, k)
    torch.testing.assert_close(out, given["out"])
    torch.testing.assert_close(lse, given["lse"], check_dtype=False)
