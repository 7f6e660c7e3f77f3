"""Tensor maps of biases: the form that a descriptor has, and copies of what none can express."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.given import Given
from attngen.runtime.launch.expanded import need_copies
from attngen.runtime.registry.binding import bind_call
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import FakeDriver, kernel, kernel_of, manifest_of, variant

SHAPE = 2, 3, 16, 24  # batch, heads, queries, keys
OF_EACH = variant(
    "biased", score="s + bias[b, h, q, kv]", tensors=[Declared("bias", "bf16", ("b", "h", "seqlen_q", "seqlen_k"))]
)
OF_PAIRS = variant(
    "of_pairs", score="s + bias[q, kv]", tensors=[Declared("bias", "bf16", ("seqlen_q", "seqlen_k"))]
)  # fmt: skip


def install(*, rank: int = 4) -> None:
    """Make a kernel known that has a tensor map of its bias."""
    manifest = manifest_of(OF_EACH if rank == 4 else OF_PAIRS)
    box = [*[1] * max(rank - 2, 1), 64, 32]
    own = {"name": "map_u_bias", "kind": "descriptor", "type": "tensor_map", "of": "tensor:bias", "box": box}
    manifest["launches"][0]["parameters"].append({**own, "swizzle": 64})
    registry.add(package_of_kernels([kernel_of(manifest)], "memory"))


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def inputs(keys: int = SHAPE[3]) -> tuple[Tensor, Tensor, Tensor]:
    return random(2, 16, 3, 64), random(2, keys, 3, 64), random(2, keys, 3, 64)


def described(gpu: FakeDriver) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, extents and strides in elements of the bias of the last launch, slowest axis first."""
    packed = gpu.launches[-1].values["bias_desc"]
    address, rank = struct.unpack_from("<Qq", packed)
    numbers = struct.unpack_from(f"<{2 * rank - 1}q", packed, 16)
    return address, numbers[:rank][::-1], tuple(step // 2 for step in numbers[rank:][::-1])


def run(gpu: FakeDriver, bias: Tensor, name: str = "biased") -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Call twice, the second time prepared; compare with the reference, and return what was described."""
    given = inputs(bias.shape[-1])
    wanted = attngen.attention(*given, variant=name, bias=bias, backend="reference")
    for _ in range(2):
        out = attngen.attention(*given, variant=name, bias=bias)
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    return described(gpu)


def test_a_bias_is_described_as_it_lies(gpu: FakeDriver) -> None:
    install()
    bias = random(2, 3, 16, 40)[..., 8:32]
    assert run(gpu, bias) == (bias.data_ptr(), SHAPE, (3 * 16 * 40, 16 * 40, 40))


def test_a_descriptor_has_three_axes_at_least(gpu: FakeDriver) -> None:
    install(rank=2)
    bias = random(16, 24)
    assert run(gpu, bias, "of_pairs") == (bias.data_ptr(), (1, 16, 24), (24, 24))


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_expanded_axes_of_heads_and_batch_have_one_place(gpu: FakeDriver, axes: tuple[int, ...]) -> None:
    install()
    sizes = [1 if axis in axes else size for axis, size in enumerate(SHAPE)]
    bias = random(*sizes).expand(SHAPE)
    address, extents, _ = run(gpu, bias)
    assert (address, extents) == (bias.data_ptr(), tuple(sizes))
    assert [gpu.launches[-1].values[f"stride_bias_{axis}"] for axis in axes] == [0] * len(axes)


@pytest.mark.parametrize(
    "bias",
    [
        random(2, 3, 16, 25),  # rows of 50 bytes
        random(2, 3, 16, 32)[..., 3:27],  # which begin in the middle of 16
        random(2, 3, 1, 24).expand(SHAPE),  # no steps from row to row
        random(2, 3, 24, 16).transpose(2, 3),  # columns side by side
    ],
    ids=["odd", "shifted", "one_row", "transposed"],
)
def test_biases_that_no_descriptor_can_describe_are_copied(gpu: FakeDriver, bias: Tensor) -> None:
    install()
    address, extents, strides = run(gpu, bias)
    assert address != bias.data_ptr()
    assert extents == tuple(bias.shape)
    assert strides[-1] == -(-bias.shape[-1] // 8) * 8
    told = attngen.explain(*inputs(bias.shape[-1]), variant="biased", bias=bias)
    assert told.runs == "kernel"
    assert "is copied first" in str(told)


def test_a_copy_keeps_expanded_heads(gpu: FakeDriver) -> None:
    install()
    _, extents, strides = run(gpu, random(2, 1, 16, 25).expand(2, 3, 16, 25))
    assert extents == (2, 1, 16, 25)
    assert strides[-1] == 32


@pytest.mark.parametrize("keys", [1, 7, 24, 25])
def test_heads_side_by_side_and_one_query_are_copied(gpu: FakeDriver, keys: int) -> None:
    """T5's bias of a step of decoding: (q, kv, h), permuted and expanded over the batch."""
    install()
    bias = random(1, keys, 3).permute(2, 0, 1)[None].expand(2, 3, 1, keys)
    given = random(2, 1, 3, 64), random(2, keys, 3, 64), random(2, keys, 3, 64)
    wanted = attngen.attention(*given, variant="biased", bias=bias, backend="reference")
    out = attngen.attention(*given, variant="biased", bias=bias)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    address, extents, strides = described(gpu)
    assert address != bias.data_ptr()
    assert (extents, strides[-2]) == ((1, 3, 1, keys), -(-keys // 8) * 8)


def test_a_kernel_that_reads_elements_gets_no_copy(gpu: FakeDriver) -> None:
    registry.add(package_of_kernels([kernel(OF_EACH)], "memory"))
    bias = random(2, 3, 16, 25)
    given: tuple[Any, ...] = inputs(25)
    attngen.attention(*given, variant="biased", bias=bias)
    assert gpu.launches[-1].values["bias_ptr"] == bias.data_ptr()


def test_tensors_that_are_no_tiles_are_never_copied() -> None:
    table = variant("table", score="s + t[h, kv]", tensors=[Declared("t", "bf16", ("h", "seqlen_k"))])
    for chosen, own in ((table, {"t": random(3, 25)}), (OF_EACH, {"bias": random(2, 3, 16, 24)})):
        given = inputs(next(iter(own.values())).shape[-1])
        call, _ = bind_call(Given(*given, variant=chosen, arguments=own))
        assert not need_copies(call)
