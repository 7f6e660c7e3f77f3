"""Calls over pages: the reference against dense calls of each sequence, launches, errors, compiled programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Scalar
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.paging import FEW_ROWS
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.operations.attention.operators import operators_of
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.runtime.registry.order import BUSY_UNITS, SPLIT_ROWS, splits_keys
from tests.runtime.pages import Cache, cache, starts_of
from tests.runtime.support import FakeDriver, bias_variant, kernel, kernel_of, manifest_of, variant, window_variant
from tests.sampling import sampled

CAUSAL = variant()
SINK = variant(
    "own", "0 <= q_pos - kv and q_pos - kv < window or kv < 2",
    score="10 * tanh(s / 10) + slope[h] * (kv - q_pos)", sink="sinks[h]",
    scalars=[Scalar("window", "int32", min=1)],
    tensors=[Declared("slope", "fp32", ("h",)), Declared("sinks", "fp32", ("h",))],
)  # fmt: skip
TREE = variant(
    "tree", "kv < seqlen_k - seqlen_q or tree[b, q, clamp(kv - seqlen_k + seqlen_q, 0, 63)]",
    tensors=[Declared("tree", "bool", ("b", "seqlen_q", "width"))],
)  # fmt: skip
PADDED = variant("padded", "keep[b, kv]", tensors=[Declared("keep", "bool", ("b", "seqlen_k"))])


def install(*variants: Any, package: str = "pages", **fields: Any) -> None:
    made = [kernel(v, package=package, layout="paged", **fields) for v in variants]
    registry.add(package_of_kernels(made, "memory"))


def own_of(chosen: Any, c: Cache, rows: int, heads: int) -> dict[str, Any]:
    """Return arguments of a variant's own for a cache and the longest queries."""
    batch = c.page_table.shape[0]
    capacity = c.page_table.shape[1] * (c.k_pages.shape[1])
    torch.manual_seed(5)
    return {
        "causal": {},
        "own": {"window": 6, "slope": torch.rand(heads), "sinks": torch.randn(heads)},
        "tree": {"tree": (torch.rand(batch, rows, 64) > 0.4).tril()},
        "padded": {"keep": torch.rand(batch, capacity) > 0.3},
    }[chosen.name]


def of_sequence(chosen: Any, own: dict[str, Any], b: int, rows: int, keys: int) -> dict[str, Any]:
    """Return the arguments for one sequence alone."""
    if chosen.name == "tree":
        return {"tree": own["tree"][b : b + 1, :rows]}
    return {"keep": own["keep"][b : b + 1, :keys]} if chosen.name == "padded" else own


@sampled(
    page_layout=["NHD", "HND"],
    chosen={chosen.name: chosen for chosen in (CAUSAL, SINK, TREE, PADDED)},
    page_size=[1, 3, 16],
    rows=[[1, 1, 1, 1], [3, 3, 3, 3], [5, 0, 1, 17]],
)
def test_pages_give_what_their_sequences_give(chosen: Any, page_layout: str, page_size: int, rows: list[int]) -> None:
    """Any order of pages; NaN after each length, and wrong numbers after each row of the table, change nothing."""
    lengths = [17, 4, 0, 40]
    c = cache(lengths, page_size, page_layout=page_layout, head_dim_v=16)
    if page_layout == "HND":
        c_rows = replace(c, k_pages=c.k_pages.transpose(1, 2))
        own = own_of(chosen, c_rows, max(rows), 4)
    else:
        own = own_of(chosen, c, max(rows), 4)
    packed, starts = torch.randn(sum(rows), 4, 8), starts_of(rows)
    given: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": max(rows)}
    q = packed
    if len(set(rows)) == 1:
        q, given = packed.unflatten(0, (4, rows[0])), {}
    out, lse = attngen.attention_paged(
        q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, variant=chosen, page_layout=page_layout, return_lse=True,
        **given, **own,
    )  # fmt: skip
    assert out.shape == (*q.shape[:-1], 16)
    assert lse.shape == ((4, sum(rows)) if given else (4, 4, rows[0]))
    flat_out = out if given else out.flatten(0, 1)
    flat_lse = lse if given else lse.transpose(0, 1).flatten(1)
    for b, length in enumerate(lengths):
        place = slice(int(starts[b]), int(starts[b + 1]))
        theirs = attngen.attention(
            packed[None, place], c.keys[b][None], c.values[b][None], variant=chosen, return_lse=True,
            **of_sequence(chosen, own, b, rows[b], length),
        )  # fmt: skip
        torch.testing.assert_close(flat_out[place], theirs[0][0], rtol=0, atol=0)
        torch.testing.assert_close(flat_lse[:, place], theirs[1][0], rtol=0, atol=0)


def test_equal_and_packed_queries_give_the_same() -> None:
    c = cache([9, 20], 4)
    q = torch.randn(2, 3, 4, 8)
    uniform = attngen.attention_paged(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, variant=CAUSAL)
    packed = attngen.attention_paged(
        q.flatten(0, 1), c.k_pages, c.v_pages, c.page_table, c.seqused_k, variant=CAUSAL, max_seqlen_q=3,
        cu_seqlens_q=starts_of([3, 3]),
    )  # fmt: skip
    assert torch.equal(uniform.flatten(0, 1), packed)


def test_pages_may_be_shared() -> None:
    c = cache([8, 8], 4)
    table = c.page_table.clone()
    table[1, 0] = table[0, 0]  # a common prefix
    q = torch.randn(2, 1, 4, 8)
    out = attngen.attention_paged(q, c.k_pages, c.v_pages, table, c.seqused_k, variant=CAUSAL)
    k, v = (torch.cat([one[0][:4], one[1][4:]])[None] for one in (c.keys, c.values))
    torch.testing.assert_close(out[1:], attngen.attention(q[1:], k, v, variant=CAUSAL))


def test_the_reference_has_gradients() -> None:
    c = cache([6, 3], 4, dtype=torch.float64)
    leaves = [t.clone().nan_to_num().requires_grad_() for t in (c.k_pages, c.v_pages)]
    q = torch.randn(2, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attngen.attention_paged(
            q, k, v, c.page_table, c.seqused_k, variant=CAUSAL, return_lse=True
        ),
        (q, *leaves), fast_mode=True,
    )  # fmt: skip
    out = attngen.attention_paged(q, *leaves, c.page_table, c.seqused_k, variant=CAUSAL)
    (of_k,) = torch.autograd.grad(out.sum(), leaves[0])
    used = set(c.page_table[0, :2].tolist()) | set(c.page_table[1, :1].tolist())
    assert all((of_k[page].abs().sum() > 0) == (page in used) for page in range(of_k.shape[0]))


# --- launches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_gets_what_the_call_says(gpu: FakeDriver, loads: str, page_layout: str, packed: bool) -> None:
    install(SINK, loads=loads, tiles=(64, 48), head_dim=(64, 32))
    c = cache([40, 7, 0], 16, head_dim=64, head_dim_v=32, page_layout=page_layout, dtype=torch.bfloat16)
    own = {"window": 9, "slope": torch.rand(4), "sinks": torch.randn(4)}
    q, given = torch.randn(3, 2, 4, 64).bfloat16(), {}
    if packed:
        q, given = q.flatten(0, 1), {"cu_seqlens_q": starts_of([4, 0, 2]), "max_seqlen_q": 4}
    call = {"variant": "own", "page_layout": page_layout, "return_lse": True, **given, **own}
    tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    out, lse = attngen.attention_paged(*tensors, **call)
    theirs = attngen.attention_paged(*tensors, backend="reference", **call)
    torch.testing.assert_close(out, theirs[0])
    torch.testing.assert_close(lse, theirs[1])
    assert (out.shape, lse.shape, lse.stride()) == (theirs[0].shape, theirs[1].shape, theirs[1].stride())
    (launch,) = gpu.launches
    seen = {name: launch.values[name] for name in ("page_size", "num_pages", "box_rows", "batch", "total_q")}
    assert seen == {
        "page_size": 16, "num_pages": c.k_pages.shape[0], "box_rows": 16, "batch": 3, "total_q": q.numel() // 256,
    }  # fmt: skip
    assert launch.values["seqlen_k"] == 16 * c.page_table.shape[1]
    assert launch.values["stride_page_table_b"] == c.page_table.stride(0)


@pytest.mark.parametrize(("page_size", "rows"), [(1, 1), (16, 16), (24, 8), (64, 32), (96, 32), (256, 32)])
def test_boxes_never_reach_into_another_page(gpu: FakeDriver, page_size: int, rows: int) -> None:
    """A box has as many rows as divide both the page and the tile, of 32 keys here."""
    boxes: list[tuple[int, ...]] = []
    encode = gpu.encode_tensor_map
    gpu.encode_tensor_map = lambda *given: boxes.append((*given[2], *given[4])) or encode(*given)  # type: ignore
    install(CAUSAL, loads="descriptor")
    c = cache([300, 5], page_size, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, 1, 4, 64).bfloat16()
    out = attngen.attention_paged(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    theirs = attngen.attention_paged(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, backend="reference")
    torch.testing.assert_close(out, theirs)
    of_pages = [box for box in boxes if len(box) == 8]
    assert of_pages == [(64, page_size, 2, c.k_pages.shape[0], 64, rows, 1, 1)] * 2
    assert gpu.launches[0].values["box_rows"] == rows


def test_a_later_call_prepares_nothing_and_follows_its_tensors(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, 1, 4, 64).bfloat16()
    for length in (40, 33, 1):
        c.seqused_k[0] = length
        given = (q.clone(), c.k_pages, c.v_pages, c.page_table.clone(), c.seqused_k)
        torch.testing.assert_close(
            attngen.attention_paged(*given), attngen.attention_paged(*given, backend="reference")
        )
    assert len(kernel_call.PREPARED) == 1
    assert len(gpu.launches) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_results_go_where_the_caller_says(gpu: FakeDriver, packed: bool) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q, given = torch.randn(2, 3, 4, 64).bfloat16(), {}
    if packed:
        q, given = q.flatten(0, 1), {"cu_seqlens_q": starts_of([2, 4]), "max_seqlen_q": 4}
    tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    wanted, wanted_lse = attngen.attention_paged(*tensors, backend="reference", return_lse=True, **given)
    for backend in (None, "reference"):
        for padding in (0, 64):
            memory = torch.full((*q.shape[:-1], 64 + padding), 7.0).bfloat16()
            result, lse = attngen.attention_paged(
                *tensors, out=memory[..., :64], return_lse=True, backend=backend, **given
            )
            assert result.data_ptr() == memory.data_ptr()
            torch.testing.assert_close(result, wanted)
            torch.testing.assert_close(lse, wanted_lse)
            assert (memory[..., 64:] == 7).all()
            assert attngen.attention_paged(*tensors, out=memory[..., :64], backend=backend, **given) is not memory


def test_an_output_that_kernels_cannot_write_is_refused(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40], 16, head_dim=64, dtype=torch.bfloat16)
    q, memory = torch.randn(1, 1, 4, 64).bfloat16(), torch.zeros(400).bfloat16()
    tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    with pytest.raises(NoKernelError, match="out does not start at a multiple of 16 B"):
        attngen.attention_paged(*tensors, out=memory[1:257].view(1, 1, 4, 64))
    with pytest.raises(NoKernelError, match="out's stride along h is 130 B, which is not a multiple of 16 B"):
        attngen.attention_paged(*tensors, out=memory[:260].view(1, 1, 4, 65)[..., :64])


def test_queries_whose_rows_have_two_strides(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    turned = torch.randn(2, 4, 3, 64).bfloat16().transpose(1, 2)
    apart = torch.randn(2, 5, 4, 64).bfloat16()[:, :3]
    fused = torch.randn(2, 3, 12, 64).bfloat16()[:, :, :4]
    for q in (turned, apart, fused, apart[:, :1], fused[:1]):
        batch = q.shape[0]
        tensors = (q, c.k_pages, c.v_pages, c.page_table[:batch], c.seqused_k[:batch])
        torch.testing.assert_close(
            attngen.attention_paged(*tensors), attngen.attention_paged(*tensors, backend="reference")
        )
    memory = torch.zeros(2, 4, 3, 64).bfloat16().transpose(1, 2)
    with pytest.raises(CallError, match="out's rows must have one stride"):
        attngen.attention_paged(turned, c.k_pages, c.v_pages, c.page_table, c.seqused_k, out=memory)


@pytest.mark.parametrize(
    ("page_table", "pages"), [(torch.zeros(2, 0, dtype=torch.int32), 3), (torch.zeros(2, 2, dtype=torch.int32), 0)]
)
@pytest.mark.parametrize("chosen", [CAUSAL, SINK], ids=["causal", "own"])
def test_nothing_to_see(gpu: FakeDriver, chosen: Any, page_table: torch.Tensor, pages: int) -> None:
    install(chosen)
    own = own_of(chosen, cache([1, 1], 1), 1, 4)
    k = torch.zeros(pages, 16, 2, 64).bfloat16()
    for q, given in (
        (torch.randn(2, 3, 4, 64).bfloat16(), {}),
        (torch.randn(6, 4, 64).bfloat16(), {"cu_seqlens_q": starts_of([4, 2]), "max_seqlen_q": 4}),
    ):
        used, memory = torch.zeros(2, dtype=torch.int32), torch.full_like(q, 3.0)
        ours = attngen.attention_paged(
            q, k, k, page_table, used, variant=chosen.name, return_lse=True, out=memory, **given, **own
        )
        theirs = attngen.attention_paged(
            q, k, k, page_table, used, variant=chosen.name, return_lse=True, backend="reference", **given, **own
        )
        assert ours[0] is memory
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    assert not gpu.launches


def test_a_gradient_is_refused_where_a_kernel_would_run(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, 1, 4, 64).bfloat16().requires_grad_()
    tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    with pytest.raises(CallError, match="no backward kernel.*backend='reference', which is differentiable"):
        attngen.attention_paged(*tensors)
    with torch.no_grad():
        attngen.attention_paged(*tensors)
    assert attngen.attention_paged(*tensors, backend="reference").requires_grad


def test_an_argument_that_has_no_hash_is_named(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(6, 4, 64).bfloat16()
    with pytest.raises(CallError, match=r"max_seqlen_q must be a Python integer, got \[4\]"):
        attngen.attention_paged(
            q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, cu_seqlens_q=starts_of([4, 2]), max_seqlen_q=[4]
        )
    with pytest.raises(CallError, match=r"max_seqlen_q must be a Python integer, got \[4\]"):
        attngen.attention_varlen(q, q, q, starts_of([4, 2]), starts_of([4, 2]), [4], 4, variant="causal")


# --- which kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "heads", "asked", "split"),
    [
        (1, 4, {}, True),
        (SPLIT_ROWS // 2, 4, {}, True),  # of two sequences with two KV heads
        (SPLIT_ROWS // 2 + 1, 4, {}, False),
        (9, 16, {}, False),
        (1, 4, {"num_splits": 1}, False),
        (1, 4, {"num_splits": 3}, True),
        (100, 4, {"num_splits": 3}, True),
        (100, 4, {"split_size": 256}, True),
    ],
)
def test_few_rows_share_keys(gpu: FakeDriver, rows: int, heads: int, asked: dict[str, int], split: bool) -> None:
    kernels = [kernel(CAUSAL, package="pages", layout="paged", split_kv=each) for each in (False, True)]
    registry.add(package_of_kernels(kernels, "memory"))
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, rows, heads, 64).bfloat16()
    attngen.attention_paged(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, **asked)
    (launch,) = gpu.launches
    assert launch.symbol.endswith("_split") == split
    assert launch.values["asked_splits"] == asked.get("num_splits", 0)
    assert launch.values["asked_split_size"] == asked.get("split_size", 0)


@pytest.mark.parametrize(
    ("batch", "rows", "split"),
    [(1, SPLIT_ROWS, True), (BUSY_UNITS // 2, FEW_ROWS + 1, False), (BUSY_UNITS // 2 - 1, SPLIT_ROWS, True),
     (1000, FEW_ROWS, True), (1, SPLIT_ROWS + 1, False)],
)  # fmt: skip
def test_rows_for_a_warpgroup_share_keys_where_units_are_few(batch: int, rows: int, split: bool) -> None:
    q, k = torch.empty(batch, rows, 2, 8, device="meta"), torch.empty(batch, 50, 2, 8, device="meta")
    call = bind(
        variant(), q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd", arguments={}
    )
    assert splits_keys(call) == split


def test_a_call_over_pages_is_explained(gpu: FakeDriver) -> None:
    kernels = [kernel(CAUSAL, package="pages", layout="paged", split_kv=each) for each in (False, True)]
    registry.add(package_of_kernels(kernels, "memory"))
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    tensors = (torch.randn(2, 1, 4, 64).bfloat16(), c.k_pages, c.v_pages)
    given: dict[str, Any] = {"variant": "causal", "page_table": c.page_table, "seqused_k": c.seqused_k}
    explanation = attngen.explain(*tensors, **given)
    assert (explanation.runs, explanation.to_dict()["call"]) == ("kernel", "forward, paged, bf16, head_dim 64")
    assert explanation.kernel is not None
    assert explanation.kernel.split_kv
    one = attngen.explain(*tensors, **given, num_splits=1)
    assert one.kernel is not None
    assert not one.kernel.split_kv
    many = attngen.explain(torch.randn(2, 50, 4, 64).bfloat16(), *tensors[1:], **given, split_size=64)
    assert many.kernel is explanation.kernel
    assert not gpu.launches
    assert "do not share keys" not in str(many)
    with pytest.raises(CallError, match="attention over pages has no backward"):
        attngen.explain(*tensors, **given, direction="backward")
    assert attngen.explain(*tensors, **given, backend="reference").runs == "reference"


def test_one_split_is_no_call_for_blocks_that_share_the_keys_of_a_tile(gpu: FakeDriver) -> None:
    manifest = manifest_of(CAUSAL, package="pages", layout="paged", name="shared")
    manifest["launches"][-1] |= {"grid": "key_shares", "cluster": 8}
    registry.add(package_of_kernels([kernel_of(manifest), kernel(CAUSAL, package="pages", layout="paged")], "memory"))
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    tensors = (torch.randn(2, 1, 4, 64).bfloat16(), c.k_pages, c.v_pages)
    given: dict[str, Any] = {"variant": "causal", "page_table": c.page_table, "seqused_k": c.seqused_k}
    kernels = [attngen.explain(*tensors, **given, num_splits=count).kernel for count in (None, 1)]
    assert [one is not None and one.name == "shared" for one in kernels] == [True, False]
    told = str(attngen.explain(*tensors, **given, num_splits=1))
    assert "pages/shared: its blocks share the keys of a tile, and the call has num_splits=1" in told


def test_a_kernel_of_the_other_kind_serves_where_it_is_the_only_one(gpu: FakeDriver) -> None:
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    tensors = (torch.randn(2, 1, 4, 64).bfloat16(), c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    attngen.attention_paged(*tensors)
    with pytest.raises(NoKernelError, match="do not share keys, and the call has num_splits=2") as caught:
        attngen.attention_paged(*tensors, num_splits=2)
    assert str(caught.value).splitlines()[-2:] == ["      layout: paged", "      split_kv: true"]


def test_kernels_of_other_layouts_take_no_pages(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(CAUSAL, layout="varlen"), kernel(CAUSAL)], "memory"))
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(NoKernelError, match="layout is varlen, the call has paged") as caught:
        attngen.attention_paged(torch.randn(2, 1, 4, 64).bfloat16(), c.k_pages, c.v_pages, c.page_table, c.seqused_k)
    assert "      layout: paged" in str(caught.value)


# --- errors -------------------------------------------------------------------------------------------------

_C = cache([10, 3], 4)
_Q, _PACKED, _STARTS = torch.randn(2, 3, 4, 8), torch.randn(6, 4, 8), starts_of([4, 2])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": _PACKED}, r"q must have 4 dimensions \(batch x seqlen_q x heads x head_dim\), got shape \(6, 4, 8\)"),
        ({"cu_seqlens_q": _STARTS}, r"q must have 3 dimensions \(total_q x heads x head_dim with cu_seqlens_q\)"),
        ({"q": _PACKED, "cu_seqlens_q": _STARTS}, "max_seqlen_q is needed with cu_seqlens_q"),
        (
            {"q": _PACKED, "cu_seqlens_q": _STARTS[:2], "max_seqlen_q": 4},
            r"cu_seqlens_q must have shape \(batch \+ 1,\) = \(3,\), as page_table has 2 rows, got \(2,\)",
        ),
        (
            {"q": _PACKED, "cu_seqlens_q": _STARTS.long(), "max_seqlen_q": 4},
            "cu_seqlens_q must be an int32 vector, got torch.int64",
        ),
        (
            {"q": _PACKED, "cu_seqlens_q": starts_of([4, 3]), "max_seqlen_q": 4},
            "cu_seqlens_q ends at 7, beyond the 6 rows of the tensor",
        ),
        (
            {"q": _PACKED, "cu_seqlens_q": _STARTS, "max_seqlen_q": 3},
            "max_seqlen_q is 3, but sequence 0 has length 4",
        ),
        ({"max_seqlen_q": 4}, "max_seqlen_q is 4, but q has 3 queries a sequence"),
        ({"q": _Q[:1]}, "q has batch 1, but page_table has 2 rows"),
        ({"k_pages": _C.k_pages.half()}, "but k_pages has torch.float16; q, k_pages and v_pages must have one dtype"),
        ({"v_pages": _C.v_pages.to("meta")}, "q is on cpu, but v_pages is on meta"),
        ({"k_pages": _C.k_pages[0]}, r"k_pages must have 4 dimensions \(pages x page_size x kv_heads x head_dim\)"),
        ({"v_pages": _C.v_pages[1:]}, "k_pages has 7 pages of 4 keys, but v_pages has 6 of 4"),
        ({"page_layout": "NDH"}, "page_layout must be one of NHD, HND, got 'NDH'; did you mean 'NHD'"),
        ({"page_layout": "HND"}, r"page_table\[0, 3\] is .*; sequence 0 uses its first 5 pages"),
        (
            {"k_pages": _C.k_pages[:, :3], "v_pages": _C.v_pages[:, :3], "page_layout": "HND"},
            r"the number of query heads \(4\) must be a multiple of the number of KV heads \(3\)",
        ),
        ({"page_table": _C.page_table.long()}, r"page_table must be int32 of shape \(batch, max_pages\), got torch.i"),
        ({"page_table": _C.page_table[0]}, r"page_table must be int32 of shape \(batch, max_pages\)"),
        ({"page_table": [[0]]}, "page_table must be a torch.Tensor, got list"),
        ({"page_table": _C.page_table.T.contiguous().T}, "page_table's rows must be contiguous"),
        ({"page_table": _C.page_table.to("meta")}, "page_table is on meta, but q is on cpu"),
        ({"seqused_k": None}, "seqused_k is needed"),
        ({"seqused_k": _C.seqused_k[:1]}, r"seqused_k must have shape \(2,\), got \(1,\)"),
        ({"seqused_k": _C.seqused_k.long()}, "seqused_k must be an int32 vector"),
        (
            {"seqused_k": torch.tensor([10, 21], dtype=torch.int32)},
            r"seqused_k\[1\] is 21; its row of page_table holds 20 keys",
        ),
        ({"seqused_k": torch.tensor([10, -1], dtype=torch.int32)}, r"seqused_k\[1\] is -1"),
        ({"seqused_k": torch.tensor([10, 5], dtype=torch.int32)}, r"page_table\[1, 1\] is .* the cache has pages 0 to"),
        ({"num_splits": 0}, "num_splits must be from 1 to"),
        ({"num_splits": 2, "split_size": 64}, "num_splits and split_size both say how keys are split"),
        ({"split_size": 1.5}, "split_size must be a Python integer"),
        ({"out": torch.empty(2, 3, 4, 9)}, r"out has shape \(2, 3, 4, 9\), but the result has \(2, 3, 4, 8\)"),
        ({"out": torch.empty(2, 3, 4, 8).half()}, "out has dtype torch.float16, but the result has torch.float32"),
        ({"out": torch.empty(2, 3, 4, 8, device="meta")}, "out has device meta"),
        ({"out": torch.empty(2, 3, 8, 4).transpose(2, 3)}, "out's last dimension must be contiguous"),
        ({"out": [1]}, "out must be a torch.Tensor, got list"),
        ({"return_lse": 1}, "return_lse must be True or False"),
        ({"backend": "cuda"}, "backend 'cuda' runs on a GPU, and q is on cpu"),
        ({"scale": 0.1}, "unknown argument 'scale'; did you mean 'softmax_scale'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(changed: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "q": _Q, "k_pages": _C.k_pages, "v_pages": _C.v_pages, "page_table": _C.page_table, "seqused_k": _C.seqused_k,
        "variant": CAUSAL,
    }  # fmt: skip
    with pytest.raises(CallError, match=message):
        attngen.attention_paged(**{**call, **changed})


def test_contents_are_checked_on_a_gpu_if_asked(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU reading them would wait: only ``debug`` does. The fake one computes on the CPU, which reads them too."""
    install(CAUSAL)
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    tensors = (torch.randn(2, 1, 4, 64).bfloat16(), c.k_pages, c.v_pages)
    table = c.page_table.clone()
    table[1, 0] = c.k_pages.shape[0]
    with attngen.debug(), pytest.raises(CallError, match=r"page_table\[1, 0\] is 7, but the cache has pages 0 to 6"):
        attngen.attention_paged(*tensors, table, c.seqused_k)
    with attngen.debug():
        attngen.attention_paged(*tensors, c.page_table, c.seqused_k)
    assert len(gpu.launches) == 1


def test_a_variant_of_packed_tensors_has_no_pages() -> None:
    of_packed = variant("doc", "d[kv_global] == 0", tensors=[Declared("d", "int32", ("total_q",))])
    with pytest.raises(CallError, match="doc: it reads 'kv_global', the place of keys in a packed tensor"):
        attngen.attention_paged(_Q, _C.k_pages, _C.v_pages, _C.page_table, _C.seqused_k, variant=of_packed)


# --- programs -----------------------------------------------------------------------------------------------


@sampled(always=1, backend=["eager", "aot_eager"], given=[False, True])
def test_a_program_compiles_without_a_graph_break(backend: str, given: bool) -> None:
    install(window_variant())

    def program(q: Any, k: Any, v: Any, table: Any, used: Any, memory: Any) -> Any:
        out, lse = attngen.attention_paged(
            q * 2, k, v, table, used, variant="window", window=5, return_lse=True, out=memory if given else None
        )
        return out + 1, lse.exp()

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=True)
    for turn, lengths in enumerate(([17, 4, 0, 20, 3], [30, 1, 9], [5, 64, 3, 2, 1, 1])):
        c = cache(lengths, 4, wider=4 + turn)
        q = torch.randn(len(lengths), 3 + 2 * turn, 4, 8)
        ours, theirs = torch.zeros_like(q), torch.zeros_like(q)
        tensors = (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            result = compiled(*tensors, ours)
        for a, b in zip((*result, ours), (*program(*tensors, theirs), theirs), strict=True):
            torch.testing.assert_close(a, b)
        assert (ours != 0).any() == given


@pytest.mark.exhaustive
def test_a_program_of_packed_queries_compiles() -> None:
    install(bias_variant())
    c = cache([17, 4], 4)
    q, starts, table = torch.randn(7, 4, 8), starts_of([2, 5]), torch.randn(4, 11)

    def program(q: Any, longest: int) -> Any:
        return attngen.attention_paged(
            q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, cu_seqlens_q=starts, max_seqlen_q=longest,
            variant="bias", table=table, limit=9, radius=5,
        )  # fmt: skip

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q, 5), program(q, 5))


@pytest.mark.exhaustive
def test_opcheck() -> None:
    install(SINK, package="checked")
    c = cache([17, 4], 4)
    namespace, name, _ = operators_of("checked/own")
    operators = getattr(torch.ops, namespace)
    plain, into = (getattr(operators, f"{name}__{kind}").default for kind in ("paged", "paged_out"))
    own = (torch.rand(4), torch.randn(4), 6)
    uniform = (torch.randn(2, 3, 4, 8), c.k_pages.nan_to_num(), c.v_pages.nan_to_num(), c.page_table, c.seqused_k)
    packed = (torch.randn(6, 4, 8), *uniform[1:])
    starts = starts_of([4, 2])
    for backend in (None, "reference"):
        for leading in ((*uniform, None, None), (*packed, starts, 4)):
            torch.library.opcheck(plain, (*leading, *own, None, "NHD", None, None, backend))
            torch.library.opcheck(into, (torch.empty_like(leading[0]), *leading, *own, 0.5, "NHD", 3, None, backend))


def test_an_operator_has_no_derivative() -> None:
    install(CAUSAL, package="derived")
    c = cache([17, 4], 4)
    q = torch.randn(2, 3, 4, 8, requires_grad=True)

    def program(q: Any) -> Any:
        return attngen.attention_paged(
            q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, variant="derived/causal"
        )  # fmt: skip

    out = torch.compile(program, fullgraph=True, backend="eager")(q)
    with pytest.raises(CallError, match="attention over pages has no backward"):
        out.sum().backward()


def test_a_compiled_program_launches_the_kernel(gpu: FakeDriver) -> None:
    install(CAUSAL, package="launched")
    c = cache([40, 7], 16, head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(2, 1, 4, 64).bfloat16()

    def program(q: Any, memory: Any) -> Any:
        return attngen.attention_paged(
            q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, variant="launched/causal", out=memory
        )

    memory = torch.zeros_like(q)
    torch.compile(program, fullgraph=True, backend="aot_eager")(q, memory)
    assert len(gpu.launches) == 1
    theirs = attngen.attention_paged(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k, backend="reference")
    torch.testing.assert_close(memory, theirs)


def test_meta_tensors_take_the_operator() -> None:
    install(CAUSAL, package="meta")
    c = cache([17, 4], 4)
    tensors = (t.to("meta") for t in (torch.randn(2, 3, 4, 8), c.k_pages, c.v_pages, c.page_table, c.seqused_k))
    out, lse = attngen.attention_paged(*tensors, variant="meta/causal", return_lse=True)
    assert (out.is_meta, out.shape, lse.shape) == (True, (2, 3, 4, 8), (2, 4, 3))
