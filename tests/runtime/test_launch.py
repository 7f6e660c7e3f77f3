"""Whole calls through packing and launch, on a driver that decodes the parameter block by rules of its own."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError, LoadError, NoKernelError
from attngen.lang.declared import Scalar
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.cache import RecentCache
from attngen.runtime.launch import chain
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import (
    FakeDriver,
    bias_variant,
    kernel,
    kernel_of,
    main_of,
    manifest_of,
    variant,
    window_variant,
)


def install(*kernels: Any) -> None:
    registry.add(package_of_kernels(kernels, "memory"))


def tensors(
    batch: int = 2, seqlen_q: int = 40, seqlen_k: int = 70, heads: int = 4, kv_heads: int = 2, dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen_q, heads, dim).to(dtype)
    return q, *(torch.randn(batch, seqlen_k, kv_heads, dim).to(dtype) for _ in range(2))


def both(*args: Any, **options: Any) -> None:
    """Assert that the launched kernel and the reference give the same bits."""
    out, lse = attngen.attention(*args, return_lse=True, **options)
    wanted, wanted_lse = attngen.attention(*args, return_lse=True, backend="reference", **options)
    assert out.shape == wanted.shape
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_a_call_launches_the_kernel(gpu: FakeDriver, loads: str) -> None:
    install(kernel(variant(), loads=loads))
    q, k, v = tensors()
    both(q, k, v, variant="causal")
    (launch,) = gpu.launches
    assert launch.grid == 1 * 4 * 2
    assert (launch.threads, launch.shared) == (128, 65536)
    assert launch.values["softmax_scale"] == pytest.approx(1 / 8)
    assert gpu.loads == [(launch.symbol, 0)]


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_any_strides_reach_the_kernel(gpu: FakeDriver, loads: str) -> None:
    install(kernel(variant(), loads=loads))
    q, k, v = tensors()
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    both(*turned, variant="causal")
    packed = torch.randn(2, 40, 3, 4, 64).to(torch.bfloat16)
    both(*packed.unbind(2), variant="causal")
    both(*(t.transpose(1, 2) for t in (q, k, v)), variant="causal", layout="bhsd")
    both(*(t.contiguous().transpose(1, 2).contiguous() for t in (q, k, v)), variant="causal", layout="bhsd")
    padded = torch.randn(2, 50, 4, 80).to(torch.bfloat16)[:, 5:45, :, 8:72]
    both(padded, k, v, variant="causal")
    both(q[:1], k[:1], v[:1], variant="causal")
    assert len(gpu.launches) == 6


def test_scalars_tensors_and_scale(gpu: FakeDriver) -> None:
    install(kernel(bias_variant()))
    q, k, v = tensors()
    table = torch.randn(4, 20)
    both(q, k, v, variant="bias", limit=33, radius=5, table=table, softmax_scale=0.3)
    values = gpu.launches[-1].values
    assert (values["limit"], values["radius"], values["loud"], values["gain"]) == (33, 5, 0, 1.0)
    assert values["softmax_scale"] == pytest.approx(0.3)
    assert values["extent_table_1"] == 20
    both(q, k, v, variant="bias", limit=2, radius=3, table=table.t().contiguous().t(), gain=2.5, loud=True)
    values = gpu.launches[-1].values
    assert (values["limit"], values["radius"], values["loud"], values["gain"]) == (2, 3, 1, 2.5)
    both(q, k, v, table=table[:1].expand(4, -1), radius=2, limit=7, variant="bias")  # another order, a stride of 0


def test_scalars_change_without_preparing_again(gpu: FakeDriver) -> None:
    install(kernel(window_variant()))
    q, k, v = tensors()
    for window in (1, 7, 64):
        both(q, k, v, variant="window", window=window)
        assert gpu.launches[-1].values["window"] == window
    assert len(kernel_call.PREPARED) == 1
    assert len(gpu.loads) == 1
    with pytest.raises(CallError, match="'window' must lie within 1 "):
        attngen.attention(q, k, v, variant="window", window=0)
    with pytest.raises(CallError, match=r"must be an integer, got 2\.5"):
        attngen.attention(q, k, v, variant="window", window=2.5)
    with pytest.raises(CallError, match=r"must be an integer, got None"):
        attngen.attention(q, k, v, variant="window", window=None, return_lse=True)
    with pytest.raises(CallError, match="softmax_scale must be"):
        attngen.attention(q, k, v, variant="window", window=2, softmax_scale=math.nan)
    assert len(gpu.launches) == 3


def test_divisors_follow_the_scalars(gpu: FakeDriver) -> None:
    scalars = [Scalar("chunk", "int32", min=1), Scalar("rows", "int32", min=1), Scalar("far", "int32", default=3)]
    mask = "q // chunk == kv // chunk or q // (chunk * rows) < kv - far"
    install(kernel(variant("tiles", mask, scalars=scalars)))
    q, k, v = tensors()
    for chunk, rows in ((7, 3), (1, 1), (1, 1), (2**31 - 1, 2), (7, 2)):
        both(q, k, v, variant="tiles", chunk=chunk, rows=rows)
        values = gpu.launches[-1].values
        for of, divisor in (("chunk", chunk), ("chunk * rows", min(chunk * rows, 2**31 - 1))):
            held, multiplier, shift = struct.unpack("<iIi", values[f"divisor_{of}_None"])
            assert held == divisor
            for number in (0, 1, divisor - 1, divisor, 123_456_789, 2**31 - 1):
                assert ((2 * number * multiplier) % 2**64 >> 32) >> shift == number // divisor


def test_a_divisor_that_the_variant_does_not_have(gpu: FakeDriver) -> None:
    chosen = variant("tiles", "q // chunk == kv // chunk", scalars=[Scalar("chunk", "int32", min=1)])
    manifest = manifest_of(chosen)
    next(row for row in main_of(manifest)["parameters"] if row["kind"] == "divisor")["of"] = "chunk + 1"
    install(kernel_of(manifest))
    with pytest.raises(LoadError, match=r"'by_chunk': the variant does not divide by 'chunk \+ 1'"):
        attngen.attention(*tensors(), variant="tiles", chunk=5)


def test_a_call_without_a_scale_takes_its_own_default(gpu: FakeDriver) -> None:
    install(kernel(variant()))
    q, k, v = tensors()
    for scale in (0.3, None, 0.5, None):
        both(q, k, v, variant="causal", softmax_scale=scale)
    assert [launch.values["softmax_scale"] for launch in gpu.launches] == pytest.approx([0.3, 1 / 8, 0.5, 1 / 8])


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_varlen_and_used_keys(gpu: FakeDriver, loads: str) -> None:
    install(kernel(variant(), layout="varlen", loads=loads), kernel(variant(), loads=loads))
    q, k, v = (t.flatten(0, 1) for t in tensors())
    cu_q = torch.tensor([0, 11, 11, 60, 80], dtype=torch.int32)
    cu_k = torch.tensor([0, 30, 40, 40, 140], dtype=torch.int32)
    options: dict[str, Any] = {"variant": "causal", "return_lse": True}
    used = torch.tensor([13, 10, 0, 99], dtype=torch.int32)
    for seqused_k in (None, used):
        ours = attngen.attention_varlen(q, k, v, cu_q, cu_k, 49, 100, seqused_k=seqused_k, **options)
        theirs = attngen.attention_varlen(
            q, k, v, cu_q, cu_k, 49, 100, seqused_k=seqused_k, backend="reference", **options
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert gpu.launches[0].grid == 1 * 4 * 4
    both(*tensors(), variant="causal", seqused_k=torch.tensor([70, 3], dtype=torch.int32))


def test_without_lse_nothing_is_written(gpu: FakeDriver) -> None:
    install(kernel(variant()))
    out = attngen.attention(*tensors(), variant="causal")
    assert isinstance(out, torch.Tensor)
    assert gpu.launches[0].values["lse_ptr"] == 0
    assert gpu.launches[0].values["has_lse"] == 0


def test_nothing_to_compute_launches_nothing(gpu: FakeDriver) -> None:
    install(kernel(variant(), loads="descriptor"))
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "kv_heads": 0}):
        q, k, v = (t.requires_grad_() for t in tensors(**sizes))
        out, lse = attngen.attention(q, k, v, variant="causal", return_lse=True)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert not out.any()
        assert (lse == -math.inf).all()
        for tensor, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert gradient.shape == tensor.shape
            assert not gradient.any()
    assert not gpu.launches


def test_the_cache_tells_calls_apart(gpu: FakeDriver) -> None:
    install(kernel(variant()), kernel(variant(), dtype="fp16", name="half"))
    q, k, v = tensors()
    both(q, k, v, variant="causal")
    both(q.half(), k.half(), v.half(), variant="causal")
    assert gpu.launches[-1].symbol == "half"
    both(q[:, :20], k, v, variant="causal")
    both(q, k[:, :20], v[:, :20], variant="causal")
    with pytest.raises(CallError, match="one dtype"):
        attngen.attention(q, k.half(), v, variant="causal")
    shifted = torch.empty(k.numel() + 8, dtype=k.dtype)[1 : k.numel() + 1].view(k.shape)
    with pytest.raises(NoKernelError, match="k does not start at a multiple of 16 B"):
        attngen.attention(q, shifted, v, variant="causal")


def test_a_name_of_a_type_of_its_own_is_known_by_what_it_says(gpu: FakeDriver) -> None:
    class Name(str):
        pass

    install(kernel(variant()), kernel(variant("full", True)))
    q, k, v = tensors()
    for name in ["causal", "full"] * 4:  # each object is gone before the next one, which may take its address
        both(q, k, v, variant=Name(name))
    assert len(kernel_call.PREPARED) == 2


def test_a_gradient_is_refused_when_it_is_asked_for(gpu: FakeDriver) -> None:
    install(kernel(variant()))
    q, k, v = (t.requires_grad_() for t in tensors())
    out = attngen.attention(q, k, v, variant="causal")
    assert out.requires_grad
    with pytest.raises(NoKernelError, match=r"(?s)no backward kernel .*passes: .*backend='reference'"):
        out.sum().backward()
    with torch.no_grad():
        assert not attngen.attention(q, k, v, variant="causal").requires_grad
    attngen.attention(q, k, v, variant="causal", backend="reference").sum().backward()
    assert q.grad is not None


def doc_variant() -> Any:
    return variant(
        "docs", "doc[b, q_pos] == doc[b, kv] and q_pos >= 0", tensors=[Declared("doc", "int32", ("b", "seqlen_k"))]
    )


@pytest.mark.parametrize("axes", [(True, False), (True, True)])
def test_a_tile_map_is_computed_or_reused(gpu: FakeDriver, axes: tuple[bool, bool]) -> None:
    chosen = doc_variant()
    install(kernel(chosen, tile_map=axes))
    q, k, v = tensors(seqlen_q=130, seqlen_k=1100)
    doc = torch.randint(0, 50, (2, 1100)).sort(dim=1).values.int()
    both(q, k, v, variant="docs", doc=doc)
    assert [launch.symbol.startswith("classify_") for launch in gpu.launches] == [True, False]
    first, main = gpu.launches
    assert first.grid == 2 * (4 if axes[1] else 1) * 3 * 2  # batch, heads, query tiles, words of 32 tiles
    assert first.values["map_heads"] == (4 if axes[1] else 1)
    for launch in gpu.launches:
        assert launch.values["stride_tile_map_q"] == 2 * 2
        assert launch.values["stride_tile_map_h"] == (12 if axes[1] else 0)
    made = attngen.tile_map(q, k, variant="docs", doc=doc)
    assert made.words is not None
    assert made.words.shape == (2, 4 if axes[1] else 1, 3, 2, 2)
    gpu.launches.clear()
    both(q, k, v, variant="docs", doc=doc, tile_map=made)
    assert len(gpu.launches) == 1
    assert gpu.launches[0].values["tile_map_ptr"] == made.words.data_ptr()
    with pytest.raises(CallError, match=r"tile_map: its seqlen_k is 1100, but .* needs 1000 in this call"):
        attngen.attention(q, k[:, :1000], v[:, :1000], variant="docs", doc=doc[:, :1000].contiguous(), tile_map=made)
    del main


def test_a_map_is_per_batch_where_lengths_are(gpu: FakeDriver) -> None:
    chosen = variant("odd", "(q_pos ^ kv) % 7 != 3")
    install(kernel(chosen, tile_map=(False, False)), kernel(chosen, tile_map=(False, False), layout="varlen"))
    q, k, v = tensors()
    both(q, k, v, variant="odd")
    assert gpu.launches[-1].values["stride_tile_map_b"] == 0
    both(q, k, v, variant="odd", seqused_k=torch.tensor([70, 33], dtype=torch.int32))
    assert gpu.launches[-1].values["stride_tile_map_b"] == 2
    both(q[:1], k[:1], v[:1], variant="odd", seqused_k=torch.tensor([33], dtype=torch.int32))
    cu = torch.tensor([0, 30, 70, 80], dtype=torch.int32)
    ours = attngen.attention_varlen(*(t.flatten(0, 1)[:80] for t in (q, k, v)), cu, cu, 40, 40, variant="odd")
    theirs = attngen.attention_varlen(
        *(t.flatten(0, 1)[:80] for t in (q, k, v)), cu, cu, 40, 40, variant="odd", backend="reference"
    )
    assert torch.equal(ours, theirs)
    made = attngen.tile_map(
        *(t.flatten(0, 1)[:80] for t in (q, k)), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=40, max_seqlen_k=40,
        variant="odd",
    )  # fmt: skip
    assert made.words is not None
    assert made.words.shape == (3, 1, 1, 2, 1)


def test_a_map_that_nothing_needs_is_empty() -> None:
    install(kernel(variant()))
    q, k, v = tensors()
    made = attngen.tile_map(q, k, variant="causal")
    assert made.words is None
    attngen.attention(q, k, v, variant="causal", tile_map=made)


def test_head_dims_that_differ(gpu: FakeDriver) -> None:
    install(kernel(variant(), head_dim=(64, 32), loads="descriptor"))
    q, k, v = tensors()
    both(q, k, v[..., :32], variant="causal")
    assert attngen.tile_map(q, k, variant="causal").words is None


def test_a_map_alone_makes_no_workspace(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    manifest = manifest_of(variant(), tile_map=(True, False))
    workspace = {"name": "sums", "dtype": "fp32", "terms": [["lse_rows", 2]]}
    install(kernel_of({**manifest, "workspaces": [workspace]}))
    q, k, v = tensors()
    made = attngen.tile_map(q, k, variant="causal")
    assert made.words is not None
    both(q, k, v, variant="causal")
    both(q, k, v, variant="causal", tile_map=made)


def test_descriptors_have_the_dtype_of_their_operand(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(variant(), loads="descriptor")
    manifest["operands"] = {"q": "bf16", "v": "fp16"}
    install(kernel_of(manifest))
    encoded, encode = [], gpu.encode_tensor_map
    monkeypatch.setattr(gpu, "encode_tensor_map", lambda dtype, *args: (encoded.append(dtype), encode(dtype, *args))[1])
    attngen.attention(*tensors(), variant="causal")
    assert encoded == ["bf16", "bf16", "fp16"]  # k, which is not listed, has the kernel's


def test_an_operand_of_an_unknown_dtype_is_refused() -> None:
    manifest = manifest_of(variant())
    manifest["operands"] = {"v": "fp5"}
    with pytest.raises(LoadError, match="dtype 'fp5' is not known"):
        kernel_of(manifest)


def test_a_manifest_that_names_what_is_not_there(gpu: FakeDriver) -> None:
    manifest = manifest_of(variant())
    main_of(manifest)["parameters"].append({"name": "x", "kind": "size", "type": "i32", "of": "moons"})
    install(kernel_of(manifest))
    with pytest.raises(LoadError, match="parameter 'x': no size is called 'moons'"):
        attngen.attention(*tensors(), variant="causal")


def test_a_damaged_cubin_is_not_loaded(gpu: FakeDriver) -> None:
    install(kernel_of({**manifest_of(variant()), "sha256": "0" * 64}))
    with pytest.raises(LoadError, match="the cubin is damaged"):
        attngen.attention(*tensors(), variant="causal")
    assert not gpu.loads


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_tensors_that_move_between_launches_of_one_shape(gpu: FakeDriver, loads: str) -> None:
    """A block of parameters keeps what the launch before wrote: one tensor moves, then others, then all come back."""
    install(kernel(window_variant(), loads=loads))
    sets = [[t + step for t in tensors()] for step in range(3)]
    for places in ((0, 0, 0), (1, 0, 0), (1, 2, 0), (0, 2, 1), (0, 0, 0), (2, 1, 2), (2, 1, 2)):
        q, k, v = (sets[place][i] for i, place in enumerate(places))
        both(q, k, v, variant="window", window=1 + sum(places), softmax_scale=0.1 * (1 + places[0]))
    assert len(kernel_call.PREPARED) == 1
    if loads == "descriptor":
        assert gpu.encoded == 9  # one for each tensor, however often it comes back


def test_sets_of_descriptors_are_kept_up_to_a_limit(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: RecentCache[bytes] = RecentCache(4)
    monkeypatch.setattr(chain, "_DESCRIBED", kept)
    install(kernel(variant(), loads="descriptor"))
    sets = [tensors(batch=1, seqlen_q=8, seqlen_k=8) for _ in range(6)]
    for number in (*range(6), *range(6), 5, 5):
        both(*sets[number], variant="causal")
        assert 0 < len(kept) <= 4
    assert gpu.encoded == 18  # descriptors have a cache of their own


def test_threads_do_not_share_a_parameter_block(gpu: FakeDriver) -> None:
    import threading

    install(kernel(window_variant()))
    inputs = tensors(seqlen_q=5, seqlen_k=5, batch=1)
    failures = []

    def work(window: int) -> None:
        for _ in range(20):
            out = attngen.attention(*inputs, variant="window", window=window)
            if not torch.equal(out, attngen.attention(*inputs, variant="window", window=window, backend="reference")):
                failures.append(window)

    threads = [threading.Thread(target=work, args=(window,)) for window in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
