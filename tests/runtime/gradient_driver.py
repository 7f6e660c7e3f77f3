"""A driver that computes each kernel of a backward in torch, and the kernels of specs as if they had been compiled."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.plan import plan
from attngen.runtime.arguments import torch_state
from attngen.runtime.autograd import tangents as by_kernels
from attngen.runtime.autograd import training
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Launch
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from tests.runtime.support import FakeDriver, at, decode, launch_of, run_forward

_RESOURCES = {"registers": 0, "spills": 0, "shared_memory": 1024, "cubin_bytes": 0, "compile_seconds": 0.0}


@dataclass
class GradientDriver(FakeDriver):
    """As its base, for kernels of the backward too: each does what its name says with what its parameters hold."""

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1) -> Any:
        manifest = json.loads(image)
        return symbol, manifest, launch_of(manifest, symbol)["parameters"]

    def launch_one(self, kernel: Launch, device: int) -> None:
        (symbol, manifest, rows), *_, parameters = kernel
        values = decode(rows, parameters)
        part = launch_of(manifest, symbol)["name"]
        self.launches.append(part)  # type: ignore[arg-type]
        run = {"forward": run_forward, "preprocess": preprocess, "dkdv": gradients, "dq": gradients}
        run |= {"jvp": tangents, "jvp_q": tangents}
        run[part](manifest, values)


def tensor(values: Mapping[str, Any], name: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor (b, s, h, d) of bf16 at the address and with the strides of a launch."""
    strides = (*(values[f"stride_{name}_{axis}"] for axis in "bsh"), 1)
    view = at(values[f"{name}_ptr"], shape, strides, "bf16")
    assert view is not None
    return view


def rows_of(values: Mapping[str, Any], name: str, b: int, s: int) -> Tensor:
    """Return a float32 number of each row (b, h, s)."""
    h = values["heads"]
    view = at(values[f"{name}_ptr"], (b, h, s), (h * s, s, 1), "fp32")
    assert view is not None
    return view


def preprocess(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    b, s, d = 2, values["rows"], manifest["head_dim_v"]
    out, dout = (tensor(values, name, (b, s, values["heads"], d)).float() for name in ("out", "dout"))
    delta = (out * dout).sum(-1).transpose(1, 2)
    if values["has_dlse"]:
        delta = delta - rows_of(values, "dlse", b, s)
    lse = rows_of(values, "lse", b, s)
    dead = lse == -math.inf
    rows_of(values, "lse_log2", b, s).copy_(torch.where(dead, math.inf, lse / math.log(2)))
    rows_of(values, "delta", b, s).copy_(torch.where(dead, 0.0, delta))


def gradients(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Causal attention: what both kernels write, from what each is given."""
    b, sq, sk = values["batch"], values["seqlen_q"], values["seqlen_k"]
    h, hk, d = values["heads"], values["kv_heads"], manifest["head_dim_qk"]
    q, dout = (tensor(values, name, (b, sq, h, d)).float() for name in ("q", "dout"))
    k, v = (tensor(values, name, (b, sk, hk, d)).float().repeat_interleave(h // hk, 2) for name in ("k", "v"))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * values["softmax_scale"] / math.log(2)
    own = values.get("slope_ptr")
    if own:
        slope, gain = at(own, (h,), (1,), "fp32"), at(values["gain_ptr"], (), (), "fp32")
        assert slope is not None
        assert gain is not None
        logits = logits + (slope * gain)[:, None, None] / math.log(2)
    visible = (torch.arange(sq)[:, None] + sk - sq) >= torch.arange(sk)
    lse, delta = (rows_of(values, name, b, sq)[..., None] for name in ("lse_log2", "delta"))
    p = torch.where(visible, torch.exp2(logits - lse), 0.0)
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta)
    if "dq_ptr" in values:
        target = tensor(values, "dq", (b, sq, h, d))
        target.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k) * values["softmax_scale"])
        if own:
            for name, shape, gradient in (
                ("slope", (h,), ds.sum((0, 2, 3)) * gain),
                ("gain", (), (ds.sum((0, 2, 3)) * slope).sum()),
            ):
                place = at(values[f"gradient:{name}_ptr"], shape, (1,) * len(shape), "fp32")
                assert place is not None
                place.add_(gradient)
        return
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q) * values["softmax_scale"], torch.einsum("bhqk,bqhd->bkhd", p, dout)
    for name, gradient in (("dk", dk), ("dv", dv)):
        tensor(values, name, (b, sk, hk, d)).copy_(gradient.unflatten(2, (hk, h // hk)).sum(3))


def tangents(manifest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Causal attention and its tangent, from the tangents of q, k and v, or of q alone."""
    b, sq, sk = values["batch"], values["seqlen_q"], values["seqlen_k"]
    h, hk, d = values["heads"], values["kv_heads"], manifest["head_dim_qk"]

    def of(name: str) -> Tensor:
        rows, heads = (sq, h) if name.endswith("q") else (sk, hk)
        if f"{name}_ptr" not in values:
            return torch.zeros(b, rows, h, d)
        return tensor(values, name, (b, rows, heads, d)).float().repeat_interleave(h // heads, 2)

    q, k, v, dq, dk, dv = (of(name) for name in ("q", "k", "v", "dq", "dk", "dv"))
    product, mix = "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"
    visible = (torch.arange(sq)[:, None] + sk - sq) >= torch.arange(sk)
    logits = (torch.einsum(product, q, k) * values["softmax_scale"]).masked_fill(~visible, -1e30)
    moved = (torch.einsum(product, dq, k) + torch.einsum(product, q, dk)) * values["softmax_scale"]
    p, lse = logits.softmax(-1), logits.logsumexp(-1)
    dlse = (p * moved).sum(-1)
    out = torch.einsum(mix, p, v)
    dout = torch.einsum(mix, p, dv) + torch.einsum(mix, p * (moved - dlse[..., None]), v)
    for name, result in (("out", out), ("dout", dout)):
        tensor(values, name, result.shape).copy_(result)
    for name, result in (("lse", lse), ("dlse", dlse)):
        rows_of(values, name, b, sq).copy_(result)


@contextmanager
def taken_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    """Put the driver in place, with nothing prepared, and have dispatch take CPU tensors for GPU ones."""
    fake = GradientDriver()
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    training._PREPARED.clear()
    by_kernels._PREPARED.clear()
    with drivers.use(fake):
        yield fake


def build(
    variant: str = "causal", declared: str = "", passes: str = "[forward, backward]", more: str = "", **changed: Any
) -> None:
    """Make the kernels of a spec known, as if they had been compiled; ``more`` is a field of its entry, and ``changed``
    replaces entries of manifests."""
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\n{declared}kernels:\n"
        f"  - {{variant: {variant}, head_dim: 64, loads: pointer, passes: {passes}{more and ', ' + more}}}\n"
    )
    kernels = []
    for spec in expand(load_spec_text(text)):
        manifest = {**plan(spec).to_dict(), "resources": _RESOURCES, **changed}
        image = json.dumps(manifest).encode()
        kernels.append(Kernel(manifest, lambda image=image: image, origin="test"))
    registry.add(package_of_kernels(kernels, "memory"))


def leaves(order: str = "bshd", seqlen_k: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 40, 4, 64), (2, seqlen_k, 2, 64), (2, seqlen_k, 2, 64))
    made = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    if order == "bhsd":
        made = [t.transpose(1, 2).contiguous() for t in made]
    return [t.requires_grad_() for t in made]


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0.02 * float(b.float().abs().max()))
