"""The kernel that takes a call, and the error where none does."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import attngen
from attngen.arch import ARCHES
from attngen.cards import KINDS
from attngen.errors import CallError, NoKernelError
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.runtime.registry.no_kernel import no_spec_adds
from attngen.runtime.registry.select import Request, select
from tests.runtime.support import (
    FakeDriver,
    bias_variant,
    kernel,
    kernel_of,
    main_of,
    manifest_of,
    variant,
    window_variant,
    write_build,
)
from tests.sampling import few


def install(*kernels: Any) -> None:
    registry.add(package_of_kernels(kernels, "memory"))


def tensors(dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(2, 40, 2, dim).to(dtype) for _ in range(3)]


def chosen(*args: Any, **options: Any) -> str:
    selected = attngen.explain(*args, variant="causal", **options).kernel
    assert selected is not None
    return selected.name


def test_descriptors_first_then_order(gpu: FakeDriver) -> None:
    install(
        kernel(variant(), name="first"), kernel(variant(), name="second"),
        kernel(variant(), name="tma", loads="descriptor"), kernel(variant(), name="old", arch="sm80"),
    )  # fmt: skip
    q, k, v = tensors()
    assert chosen(q, k, v) == "tma"
    expanded = k[:, :1].expand(-1, 40, -1, -1)
    assert chosen(q, expanded, v) == "first"
    explanation = attngen.explain(q, expanded, v, variant="causal")
    assert explanation.rejected == [
        ("mine/tma", "k is expanded along axis 1 (stride 0), which a TMA descriptor cannot express")
    ]
    assert "not mine/tma: k is expanded" in str(explanation)
    assert explanation.to_dict()["kernel"] == "mine/first"
    assert not gpu.launches


def test_the_architecture_decides(gpu: FakeDriver) -> None:
    install(kernel(variant(), name="hopper"), kernel(variant(), name="ampere", arch="sm80", shared_memory=110_000))
    assert chosen(*tensors()) == "hopper"
    gpu.compute_capability, gpu.most_shared = 80, 163 * 1024
    assert chosen(*tensors()) == "ampere"
    gpu.compute_capability, gpu.most_shared = 86, 99 * 1024
    explanation = attngen.explain(*tensors(), variant="causal")
    assert explanation.kernel is None
    assert "it is built for sm90a only, device 0 is sm86" in explanation.reason
    assert "it needs 110000 B of shared memory, a block of device 0 has 101376 B" in explanation.reason


@pytest.mark.parametrize("tile_m", [64, 128])
def test_sums_in_a_fixed_order_where_they_are_asked_for(gpu: FakeDriver, tile_m: int) -> None:
    backwards = {"direction": "backward", "loads": "descriptor"}
    fast, ordered = (
        kernel_of(
            {
                **manifest_of(variant(), name=name, backend="cuda", tiles=(rows, 128), **backwards),
                "sum_columns": 64,
                "ordered": order,
            }
        )
        for name, rows, order in (("fast", 64, False), ("ordered", tile_m, True))  # whichever has the larger tile
    )
    triton = kernel(variant(), name="triton", **backwards)
    q, k, v = (torch.empty(2, 128, 2, 64).bfloat16() for _ in range(3))
    call = bind(
        variant(), q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd", arguments={}
    )

    def first(*kernels: Kernel, deterministic: bool) -> Kernel | None:
        request = Request(call, 0, dict.fromkeys("qkv", 0), {}, direction="backward", deterministic=deterministic)
        return select(kernels, request, gpu).kernel

    assert first(triton, ordered, fast, deterministic=False) is fast
    assert first(triton, ordered, fast, deterministic=True) is ordered
    assert first(triton, fast, deterministic=True) is triton
    assert first(fast, deterministic=True) is None

    registry.add(package_of_kernels([fast], "memory"))
    explained = partial(attngen.explain, q, k, v, variant="causal", direction="backward")
    assert explained().kernel is fast
    refused = explained(deterministic=True)
    assert refused.runs == "no kernel"
    assert "deterministic: true" in str(refused)
    with pytest.raises(CallError, match="direction must be one of forward, backward, got 'back'"):
        attngen.explain(q, k, v, variant="causal", direction="back")


@pytest.mark.parametrize(
    ("dim", "dtype", "capability", "message"),
    [
        (60, torch.bfloat16, 90, "head_dim 60, only for multiples of 8 from 8 to 512; zeros after the 60 numbers "
         "make 64 (softmax_scale stays 0.129099)"),
        (320, torch.float32, 90, "head_dim 320, only for multiples of 8 from 8 to 256; the reference takes it"),
        (64, torch.float64, 90, "fp64, only for bf16, fp16, fp32, fp8_e4m3, fp8_e5m2; the reference takes it"),
        (64, torch.bfloat16, 75,
         "sm75, only for sm80, sm86, sm89, sm90a, sm100a, sm120a, ptx80; the reference runs there"),
    ],
)  # fmt: skip
def test_no_spec_is_proposed_that_would_be_refused(
    gpu: FakeDriver, dim: int, dtype: torch.dtype, capability: int, message: str
) -> None:
    install(kernel(variant()))
    gpu.compute_capability = capability
    with pytest.raises(NoKernelError) as caught:
        attngen.attention(*tensors(dim, dtype), variant="causal")
    assert str(caught.value).splitlines()[-1] == f"No kernel can be built for {message}"


@pytest.mark.parametrize(
    ("asked", "capability", "kind"),
    [
        ({"split_size": 64}, 100, "split-KV"),
        ({"split_size": 64}, 80, None),
        ({"dtype": "fp8_e4m3", "kv_dtype": "fp8_e4m3"}, 86, "forward in e4m3"),
        ({"dtype": "fp8_e4m3", "kv_dtype": "fp8_e4m3"}, 89, None),
        ({"dtype": "fp8_e4m3", "kv_dtype": "fp8_e5m2"}, 89, "forward in e5m2"),
        ({"kv_dtype": "fp8_e4m3"}, 80, "caches in e4m3"),
        ({"kv_dtype": "fp8_e4m3"}, 120, None),
        ({"layout": "paged"}, 100, "keys in pages"),
        ({"layout": "paged"}, 86, None),
        ({"dtype": "fp8_e4m3", "kv_dtype": "fp8_e4m3", "scale_blocks": (128,)}, 120, "scales of blocks or tokens"),
    ],
)
def test_no_spec_is_proposed_for_a_card_that_has_no_such_kernel(
    asked: dict[str, object], capability: int, kind: str | None
) -> None:
    call = bind(
        variant(), *tensors(), None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd", arguments={}
    )
    if "scale_blocks" in asked:
        call.descales = {"q_descale": torch.ones(1)}
    request = Request(replace(call, **asked), 0, dict.fromkeys("qkv", 0), {})  # type: ignore[arg-type]
    refused = no_spec_adds(request, capability)
    assert (refused is None) == (kind is None), refused
    if kind is not None:
        assert f"of this kind: {kind}, only for {', '.join(KINDS[kind].arches)};" in str(refused)


def test_wide_heads_need_strides_that_copies_take(gpu: FakeDriver) -> None:
    install(kernel(variant()))
    gpu.compute_capability = 90
    q, k, v = tensors(512)
    with pytest.raises(NoKernelError, match="head_dim: 512"):
        attngen.attention(q, k, v, variant="causal")
    apart = torch.randn(2, 40, 2, 515).bfloat16()[..., :512]
    with pytest.raises(NoKernelError, match=r"No kernel beyond head_dim 256 .* since it copies 16 bytes at a time"):
        attngen.attention(apart, k, v, variant="causal")


def test_an_old_driver_is_named(gpu: FakeDriver) -> None:
    install(kernel(variant()))
    gpu.cuda_version = 12080
    with pytest.raises(
        NoKernelError, match=r"needs a driver for CUDA 13\.0 \(r580\) or later, this one is for CUDA 12\.8; update"
    ):
        attngen.attention(*tensors(), variant="causal")


def test_backends(gpu: FakeDriver) -> None:
    install(kernel(variant(), name="t"), kernel(variant(), name="c", backend="cuda"))
    assert chosen(*tensors()) == "c"
    assert chosen(*tensors(), backend="triton") == "t"
    assert attngen.explain(*tensors(), variant="causal", backend="reference").runs == "reference"


def test_persistent_kernels_come_first(gpu: FakeDriver) -> None:
    once = manifest_of(variant(), name="once", backend="cuda")
    again = manifest_of(variant(), name="again", backend="cuda")
    main_of(again)["persistent"] = True
    install(kernel_of(once), kernel_of(again))
    assert chosen(*tensors()) == "again"


def test_alignment(gpu: FakeDriver) -> None:
    install(kernel(variant(), name="wide"), kernel(variant(), name="narrow", align=2))
    q, k, v = tensors()
    assert chosen(q, k, v) == "wide"
    assert chosen(torch.randn(2, 40, 2, 68).bfloat16()[..., :64], k, v) == "narrow"
    assert chosen(q, k, torch.randn(2 * 40 * 2 * 64 + 1).bfloat16()[1:].view(v.shape)) == "narrow"
    # An axis of extent 1 may have any stride.
    assert chosen(q[:1].as_strided((1, 40, 2, 64), (3, 128, 64, 1)), k[:1], v[:1]) == "wide"


def test_constants_choose(gpu: FakeDriver) -> None:
    install(
        kernel(window_variant("causal", const=128), name="w128"),
        kernel(window_variant("causal", const=256), name="w256"),
    )
    assert chosen(*tensors()) == "w128"


def test_the_error_lists_each_candidate_and_valid_yaml(gpu: FakeDriver) -> None:
    install(
        kernel(variant(), name="half", dtype="fp16"), kernel(variant(), name="packed", layout="varlen"),
        kernel(variant(), name="small", head_dim=32), kernel(variant(), name="back", direction="backward"),
        kernel(variant(), name="tma", loads="descriptor"),
    )  # fmt: skip
    q, _, v = tensors()
    with pytest.raises(NoKernelError) as caught:
        attngen.attention(q, torch.randn(2, 40, 2, 65).bfloat16()[..., :64], v, variant="causal")
    text = str(caught.value)
    for line in (
        "no kernel takes this call: causal, forward, dense, bf16, head_dim 64, on sm90",
        "  mine/half: dtype is fp16, the call has bf16",
        "  mine/packed: layout is varlen, the call has dense",
        "  mine/small: head_dim of q and k is 32, the call has 64",
        "  mine/tma: k's stride along axis 1 is 260 B, which is not a multiple of 16 B",
    ):
        assert line in text.splitlines()
    assert "mine/back" not in text  # the call asks for a forward
    lines = text.partition("run 'attngen build':\n")[2]
    added = yaml.safe_load(lines)
    assert added["arch"] == ["sm90a"]
    unaligned = {"loads": "pointer", "alignment": 2}
    assert added["kernels"] == [{"variant": "causal", "head_dim": 64, "dtype": "bf16", "layout": "dense", **unaligned}]


def test_the_yaml_builds_what_is_missing(gpu: FakeDriver) -> None:
    from attngen.schema import expand, load_spec_text

    install(kernel(variant()))
    q, _, v = tensors(dim=32)
    with pytest.raises(NoKernelError) as caught:
        attngen.attention(q, torch.randn(2, 40, 2, 33).bfloat16()[..., :32], v[..., :16], variant="causal")
    lines = str(caught.value).partition("run 'attngen build':\n")[2]
    text = "schema: 1\npackage: mine\n" + "\n".join(line.removeprefix("  ") for line in lines.splitlines())
    (added,) = expand(load_spec_text(text))
    assert (added.arch, added.dtype, added.head_dim_qk, added.head_dim_v) == ("sm90a", "bf16", 32, 16)
    assert (added.loads, added.alignment) == ("pointer", 2)


def test_a_kernel_that_was_built_since_is_found(gpu: FakeDriver) -> None:
    write_build("theirs", variant("later", None))
    with pytest.raises(NoKernelError, match="no kernel of this variant is built"):
        attngen.attention(*tensors(), variant="causal")
    generation = registry.generation
    with pytest.raises(NoKernelError, match="no kernel of this variant is built"):
        attngen.attention(*tensors(), variant="causal")
    assert registry.generation == generation  # nothing was built, so nothing was looked at again
    write_build("ours", variant(), dtype="fp16")
    with pytest.raises(NoKernelError, match="dtype is fp16, the call has bf16"):
        attngen.attention(*tensors(), variant="causal")
    write_build("ours", variant(), dtype="bf16")
    attngen.attention(*tensors(), variant="causal")
    assert len(gpu.launches) == 1


def test_tensors_of_a_variant_without_a_stride_must_be_contiguous(gpu: FakeDriver) -> None:
    manifest = manifest_of(bias_variant())
    rows = main_of(manifest)["parameters"]
    rows[:] = [row for row in rows if (row["kind"], row.get("of"), row["axis"]) != ("stride", "tensor:table", 1)]
    install(kernel_of(manifest))
    table = torch.randn(2, 9)
    options: dict[str, Any] = {"variant": "bias", "limit": 3, "radius": 4}
    attngen.attention(*tensors(), table=table, **options)
    with pytest.raises(
        NoKernelError, match=r"last dimension of 'table' is not contiguous \(stride 2\), as this kernel needs"
    ):
        attngen.attention(*tensors(), table=table.t().contiguous().t(), **options)


def test_a_grid_has_a_limit(gpu: FakeDriver) -> None:
    install(kernel(variant(), align=2))
    q, k, v = (t[:1, :1, :1].expand(2**19, 2**10, 2**8, -1) for t in tensors())
    with pytest.raises(NoKernelError, match="would need 2147483648 blocks, a grid has at most 2147483647"):
        attngen.attention(q, k, v, variant="causal")


@few("seed", range(24), always=range(0, 999, 3))
def test_the_proposed_kernel_serves_the_call(gpu: FakeDriver, seed: int) -> None:
    """The lines of the error are planned, and a kernel of that plan takes the very call."""
    from attngen.plan import plan
    from attngen.schema import expand, load_spec_text
    from tests.runtime.manifests import compile_as_manifest

    chance = random.Random(seed)
    dims = [chance.choice([16, 32, 64, 64, 80, 96, 128, 192, 256]) for _ in ("qk", "v")]
    dims[1] = dims[0] if chance.random() < 0.6 else dims[1]
    dtype = chance.choice([torch.bfloat16, torch.float16, torch.float32])
    gpu.compute_capability = chance.choice([80, 86, 89, 90, 100, 120])
    gpu.most_shared = next(arch.shared_memory for arch in ARCHES.values() if arch.capability == gpu.compute_capability)
    pad = chance.choice([0, 0, 0, 1, 4, 8])
    q, k, v = (torch.randn(2, 40, 2, dim + pad).to(dtype)[..., :dim] for dim in (dims[0], dims[0], dims[1]))
    backend = chance.choice([None, None, None, "triton", "cuda"])
    if chance.random() < 0.5:
        install(kernel(variant(), name="other", head_dim=48))
    with pytest.raises(NoKernelError) as caught:
        attngen.attention(q, k, v, variant="causal", backend=backend)
    _, proposed, lines = str(caught.value).partition("run 'attngen build':\n")
    if not proposed:
        assert backend == "cuda"
        assert "No CUDA kernel can be built" in str(caught.value)
        assert (gpu.compute_capability, dtype) != (90, torch.bfloat16) or pad in (1, 4)
        return
    added = yaml.safe_load(lines)
    known = "arch" in added
    added.setdefault("arch", [next(a.name for a in ARCHES.values() if a.capability == gpu.compute_capability)])
    (spec,) = expand(load_spec_text(yaml.safe_dump({"schema": 1, "package": "mine", **added})))
    planned = plan(spec)
    assert (planned.head_dim_qk, planned.head_dim_v) == tuple(dims)
    artifact = compile_as_manifest(planned, SimpleNamespace(text=""))
    if known:  # a variant that nothing is built of says what its tensors are, and not how they lie in memory
        registry.clear()
        install(Kernel(artifact.manifest, lambda: artifact.cubin))
        assert attngen.explain(q, k, v, variant="causal", backend=backend).kernel is not None


def test_a_backend_that_a_cpu_cannot_have_is_refused() -> None:
    install(kernel(variant()))
    for call in (attngen.attention, attngen.explain):
        with pytest.raises(CallError, match="backend 'cuda' runs on a GPU, and q is on cpu; leave 'backend' out"):
            call(*tensors(), variant="causal", backend="cuda")
    with pytest.raises(CallError, match="backend 'triton' runs on a GPU"):
        attngen.tile_map(*tensors()[:2], variant="causal", backend="triton")
