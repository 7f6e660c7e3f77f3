"""The runtime can launch every plan: every parameter of real plans, for all presets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import attngen
from attngen.plan import plan
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text, preset_names
from tests.runtime.hand_masks import arguments
from tests.runtime.manifests import with_parameters
from tests.runtime.support import FakeDriver
from tests.sampling import sampled


def planned(text: str) -> list[Kernel]:
    """Return the kernels of a spec as if they had been compiled; the cubin of each is its manifest."""
    kernels = []
    for spec in expand(load_spec_text("schema: 1\npackage: planned\narch: [sm90a]\n" + text)):
        made = plan(spec)
        manifest = made.to_dict()
        with_parameters(manifest, made)
        manifest["resources"] = {"shared_memory": 65536}
        image = json.dumps(manifest).encode()
        kernels.append(Kernel(manifest, lambda image=image: image, origin="planned"))
    return kernels


@sampled(always=7, loads=["descriptor", "pointer"], name=preset_names())
def test_each_preset_launches_what_the_reference_computes(gpu: FakeDriver, name: str, loads: str) -> None:
    dim = 80 if loads == "descriptor" else 64  # 80 columns come in two blocks, each with a descriptor
    layouts = "layout: [dense, varlen], backend: triton"
    kernels = planned(f"kernels:\n  - {{variant: {name}, head_dim: {dim}, loads: {loads}, {layouts}}}\n")
    registry.add(package_of_kernels(kernels, "plans"))
    given = arguments(name, 2, 4, 40, 70)
    q = torch.randn(2, 40, 4, dim).bfloat16()
    k, v = (torch.randn(2, 70, 2, dim).bfloat16() for _ in range(2))
    used = torch.tensor([70, 31], dtype=torch.int32)
    for options in ({}, {"seqused_k": used}):
        _same(attngen.attention, (q, k, v), variant=name, **options, **given)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 70], [0, 70, 103]))
    packed = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 40, 70)
    _same(attngen.attention_varlen, packed, variant=name, **given)
    assert len(gpu.launches) in (3, 6)


@pytest.mark.parametrize("loads", ["descriptor", "pointer"])
@pytest.mark.parametrize(("qk", "v"), [(8, 8), (72, 72), (40, 24), (72, 136)])
def test_rows_end_with_the_head_dim(gpu: FakeDriver, qk: int, v: int, loads: str) -> None:
    """Descriptors have its columns, though kernels are made of more; so has a scale that nobody gives."""
    fields = f"head_dim: {{qk: {qk}, v: {v}}}, loads: {loads}, backend: triton"
    registry.add(package_of_kernels(planned(f"kernels:\n  - {{variant: causal, {fields}}}\n"), "plans"))
    shapes = {"q": (2, 40, 4, qk), "k": (2, 70, 2, qk), "v": (2, 70, 2, v)}
    wide = [torch.full((*shape[:-1], shape[-1] + 8), torch.nan).bfloat16() for shape in shapes.values()]
    tensors = [tensor[..., : shape[-1]] for tensor, shape in zip(wide, shapes.values(), strict=True)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    _same(attngen.attention, tensors, variant="causal")
    (launch,) = gpu.launches
    assert launch.values["softmax_scale"] == pytest.approx(qk**-0.5)
    for name, tensor in zip(shapes, tensors, strict=True):
        if f"{name}_desc" in launch.values:
            assert [launch.values[f"descriptor_shape_{name}_{axis}"] for axis in range(4)] == list(tensor.shape)
            assert launch.values[f"descriptor_stride_{name}_2"] == tensor.stride(2)
        else:
            assert launch.values[f"stride_{name}_h"] == tensor.stride(2)


def _same(function: Any, tensors: Any, **options: Any) -> None:
    ours, lse = function(*tensors, return_lse=True, **options)
    theirs, wanted = function(*tensors, return_lse=True, backend="reference", **options)
    rows = 70 if function is attngen.attention_varlen else ours.shape[0]  # after the last sequence: unspecified
    torch.testing.assert_close(ours[:rows], theirs[:rows], rtol=0, atol=0)
    lse, wanted = (x[:, :rows] if rows == 70 else x for x in (lse, wanted))
    torch.testing.assert_close(lse, wanted, rtol=1e-6, atol=1e-6)
