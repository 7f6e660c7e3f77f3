"""The grids of the kernels of a CUDA backward, as the manifest of a plan gives them."""

from __future__ import annotations

import pytest
import torch

from attngen.plan import plan
from attngen.runtime.arguments.checked import Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.sizes import CHUNK_BYTES, by_chunks, geometries, workspace_sizes
from attngen.runtime.kernels.module import Kernel
from attngen.schema import expand, load_spec_text
from tests.runtime.support import FakeDriver, kernel_of, variant
from tests.sampling import few

MULTIPROCESSORS = 132
_RESOURCES = {"registers": 0, "spills": 0, "shared_memory": 1024, "cubin_bytes": 0, "compile_seconds": 0.0}


def _kernel(
    head_dim: int | str, layout: str, *, ordered: bool = False, variant: str = "causal", more: str = ""
) -> Kernel:
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n  - {{variant: {variant}, passes: backward, "
        f"head_dim: {head_dim}, layout: {layout}, deterministic: {str(ordered).lower()}, "
        f"backward: {{backend: cuda}}{more}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    return kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES})


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize(("head_dim", "clusters"), [(128, False), (256, True)])
def test_a_cluster_for_each_tile_of_keys_or_as_many_blocks_as_run_at_once(
    head_dim: int, clusters: bool, layout: str, ordered: bool
) -> None:
    kernel = _kernel(head_dim, layout, ordered=ordered)
    batch, seqlen_q, seqlen_k, heads, kv_heads = 7, 300, 700, 8, 4
    packing = None
    shapes = [(batch, seqlen_q, heads), *[(batch, seqlen_k, kv_heads)] * 2]
    if layout == "varlen":
        shapes = [(b * s, h) for b, s, h in shapes]
        packing = Packing(*(torch.arange(batch + 1).int() * s for s in (seqlen_q, seqlen_k)), seqlen_q, seqlen_k)
    tensors = (torch.empty(*shape, head_dim).bfloat16() for shape in shapes)
    call = bind(
        variant(), *tensors, packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd", arguments={}
    )
    grids = {one.launch.name: one.blocks(FakeDriver(), 0) for one in geometries(kernel, call, {})}
    tiles = batch * kv_heads * -(-seqlen_k // 128)
    q_tiles = -(-seqlen_q // 64)
    rows = -(-batch * seqlen_q // 16) if layout == "varlen" else batch * -(-seqlen_q // 16)
    assert grids == {
        "preprocess": rows * heads,
        **({"dqkv": 2 * tiles, "postprocess": batch * heads * q_tiles} if clusters else {"dqkv": MULTIPROCESSORS}),
    }
    assert tiles > MULTIPROCESSORS
    in_sums = heads * (batch * seqlen_q // 64 + batch) if layout == "varlen" else batch * heads * q_tiles
    units = batch * kv_heads
    of_tiles = tiles * (2 if clusters else 1) if ordered else 0
    counters = of_tiles if clusters else of_tiles + units + 1
    alone = not clusters and not ordered  # then the first dQ is stored, by states of tiles
    sizes = workspace_sizes(kernel, geometries(kernel, call, {}))
    assert sizes["dq_sum"] == in_sums * 64 * head_dim + (0 if alone else -(-counters // 4) * 4)
    assert sizes.get("dq_state") == (-(-(counters + in_sums) // 4) * 4 if alone else None)
    assert [part.counted for part in kernel.launches] == [False, ordered or not clusters, False][: len(kernel.launches)]


def test_blocks_that_have_no_tile_of_keys_round_dq() -> None:
    """Few keys and many queries: as many blocks as there are tiles of either, and run at once."""
    kernel = _kernel(64, "dense")
    for seqlen_q, blocks in ((640, 2 * 5), (64 * 1024, MULTIPROCESSORS), (1, 2)):
        q, k = torch.empty(1, seqlen_q, 2, 64).bfloat16(), torch.empty(1, 128, 2, 64).bfloat16()
        call = bind(
            variant(), q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd", arguments={}
        )
        grids = geometries(kernel, call, {})
        assert [one.blocks(FakeDriver(), 0) for one in grids if one.launch.name == "dqkv"] == [blocks]


@few(
    ("name", "layout", "heads", "heads_in_l2"),
    [
        ("causal", "dense", (8, 2), 4),  # 24,576 queries with Q, dO and their sums take 24 MiB: those of 3 KV heads
        ("causal", "dense", (11, 1), 6),  # nothing near 6 divides 11
        ("packed_documents", "dense", (8, 2), 8),
        ("packed_documents", "dense", (3, 1), 3),
        ("packed_documents", "varlen", (8, 2), 4),
        ("relative_bias", "dense", (8, 2), 4),  # the score reads by position, not the mask
        ("allowed", "dense", (8, 2), 4),
    ],
    always=range(0, 999, 3),
)
def test_many_heads_run_side_by_side_where_data_decide_how_long_a_tile_of_keys_takes(
    name: str, layout: str, heads: tuple[int, int], heads_in_l2: int
) -> None:
    kernel, (kv_heads, group) = _kernel(128, layout, variant=name), heads
    shapes, packing = [(1, 4096, heads) for heads in (kv_heads * group, kv_heads, kv_heads)], None
    if layout == "varlen":
        shapes, packing = [shape[1:] for shape in shapes], Packing(*[torch.tensor([0, 4096]).int()] * 2, 4096, 4096)
    tensors = (torch.empty(*shape, 128).bfloat16() for shape in shapes)
    call = bind(
        variant(), *tensors, packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd", arguments={}
    )
    dqkv = geometries(kernel, call, {})[-1]
    assert (dqkv.launch.name, dqkv.sizes["heads_in_l2"]) == ("dqkv", heads_in_l2)


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 64), (3, 1000), (1, 40_000)])
def test_chunks_of_query_rows_cover_all_parts_once(layout: str, batch: int, seqlen: int) -> None:
    """Launches that take turns come once for each chunk; the last one has what is left."""
    kernel = _kernel("{qk: 576, v: 512}", layout, more=", v: key")
    heads, packing, shapes = 64, None, [(batch, seqlen, count) for count in (64, 1)]
    if layout == "varlen":
        starts = torch.arange(batch + 1).int() * seqlen
        shapes, packing = [(b * s, h) for b, s, h in shapes], Packing(starts, starts, seqlen, seqlen)
    q, k = (torch.empty(*shape, 576, dtype=torch.bfloat16) for shape in shapes)  # memory that nothing touches
    call = bind(
        variant(), q, k, k[..., :512], packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd",
        arguments={},
    )  # fmt: skip
    of_kernel = geometries(kernel, call, {})
    launched = by_chunks(of_kernel)
    first, *chunks, last = launched
    assert (first.launch.name, last.launch.name) == ("preprocess", "postprocess")
    assert [one.launch.name for one in chunks] == ["dq", "dkv"] * (len(chunks) // 2)
    rows = seqlen * heads
    parts = batch * -(-rows // (44 * 64)) if layout == "dense" else batch * rows // (44 * 64) + batch
    sizes = of_kernel[1].sizes
    assert sizes["row_parts"] == parts
    key_blocks, begin = -(-seqlen // 256), 0
    for dq, dkv in zip(chunks[::2], chunks[1::2], strict=True):
        assert dq.sizes["first_part"] == dkv.sizes["first_part"] == begin
        own = min(sizes["chunk_parts"], parts - begin)
        assert (dq.blocks(FakeDriver(), 0), dkv.blocks(FakeDriver(), 0)) == (44 * own, own * key_blocks * 3)
        begin += own
    assert begin == parts
    words = workspace_sizes(kernel, of_kernel)
    assert sizes["chunk_parts"] <= 3 or 4 * (words["products"] + words["rows"]) <= CHUNK_BYTES
