"""Autograd through packing and launch of the backward, on a driver that computes each of its kernels in torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.plan import plan
from attngen.runtime import dispatch, training
from attngen.runtime import driver as drivers
from attngen.runtime.module import Kernel
from attngen.runtime.registry import package_of_kernels, registry
from attngen.spec import expand, load_spec_text
from tests.runtime.support import FakeDriver, at, decode, run_forward

_RESOURCES = {"registers": 0, "spills": 0, "shared_memory": 1024, "cubin_bytes": 0, "compile_seconds": 0.0}
LEARNED = (
    'variants:\n  own:\n    mask: "q_pos >= kv"\n    score: "s + slope[h] * gain"\n'
    "    scalars: {gain: {type: float32, grad: true}}\n"
    "    tensors: {slope: {dtype: float32, shape: [h], grad: true}, shift: {dtype: float32, shape: [h]}}\n"
)


@dataclass
class GradientDriver(FakeDriver):
    """As its base, for kernels of the backward too: each does what its name says with what its parameters hold."""

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int]) -> Any:
        manifest = json.loads(image)
        rows = next((p["parameters"] for p in manifest.get("parts", ()) if p["symbol"] == symbol), None)
        return symbol, manifest, manifest["parameters"] if rows is None else rows

    def launch(self, function: Any, grid: int, threads: int, shared: int, device: int, parameters: int) -> None:
        symbol, manifest, rows = function
        values = decode(rows, parameters)
        part = next((p["name"] for p in manifest.get("parts", ()) if p["symbol"] == symbol), "forward")
        self.launches.append(part)  # type: ignore[arg-type]
        {"forward": run_forward, "preprocess": preprocess, "dkdv": gradients, "dq": gradients}[part](manifest, values)


def tensor(values: Mapping[str, Any], name: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor (b, s, h, d) of bf16 at the address and with the strides of a launch."""
    strides = (*(values[f"stride_{name}_{axis}"] for axis in "bsh"), 1)
    found = at(values[f"{name}_ptr"], shape, strides, "bf16")
    assert found is not None
    return found


def rows_of(values: Mapping[str, Any], name: str, b: int, s: int) -> Tensor:
    """Return a float32 number of each row (b, h, s)."""
    h = values["heads"]
    found = at(values[f"{name}_ptr"], (b, h, s), (h * s, s, 1), "fp32")
    assert found is not None
    return found


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
            for name, shape, found in (
                ("slope", (h,), ds.sum((0, 2, 3)) * gain),
                ("gain", (), (ds.sum((0, 2, 3)) * slope).sum()),
            ):
                place = at(values[f"gradient:{name}_ptr"], shape, (1,) * len(shape), "fp32")
                assert place is not None
                place.add_(found)
        return
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q) * values["softmax_scale"], torch.einsum("bhqk,bqhd->bkhd", p, dout)
    for name, found in (("dk", dk), ("dv", dv)):
        tensor(values, name, (b, sk, hk, d)).copy_(found.unflatten(2, (hk, h // hk)).sum(3))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = GradientDriver()
    monkeypatch.setattr(dispatch, "_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    training._PREPARED.clear()
    with drivers.use(fake):
        yield fake


def build(variant: str = "causal", declared: str = "", passes: str = "[forward, backward]") -> None:
    """Make the kernels of a spec known, as if they had been compiled."""
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\n{declared}kernels:\n"
        f"  - {{variant: {variant}, head_dim: 64, loads: pointer, passes: {passes}}}\n"
    )
    kernels = []
    for spec in expand(load_spec_text(text)):
        manifest = {**plan(spec).to_dict(), "resources": _RESOURCES}
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


@pytest.mark.parametrize("seqlen_k", [70, 25])
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_gradients_of_outputs_and_log_sum_exps(gpu: GradientDriver, order: str, seqlen_k: int) -> None:
    build()
    inputs = leaves(order, seqlen_k)
    above = torch.randn(2, 40, 4, 64).transpose(1, 2) if order == "bhsd" else torch.randn(2, 40, 4, 64)

    def loss(backend: str | None, lse_too: bool) -> Tensor:
        out, lse = attngen.attention(*inputs, variant="causal", return_lse=True, layout=order, backend=backend)
        return (out.float() * above).sum() + (torch.where(lse.isinf(), 0.0, lse).sin().sum() if lse_too else 0)

    for lse_too in (False, True):
        ours = torch.autograd.grad(loss(None, lse_too), inputs)
        close(ours, torch.autograd.grad(loss("reference", lse_too), inputs))
        assert gpu.launches[-4:] == ["forward", "preprocess", "dkdv", "dq"]


def test_only_what_is_asked_for_is_returned(gpu: GradientDriver) -> None:
    build()
    q, k, v = leaves()
    out = attngen.attention(q, k.detach(), v, variant="causal")
    out.sum().backward()  # a gradient that autograd expands from one element
    wanted = torch.autograd.grad(attngen.attention(q, k, v, variant="causal", backend="reference").sum(), (q, v))
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None
    close((q.grad, v.grad), wanted)
    with torch.no_grad():
        assert not attngen.attention(q, k, v, variant="causal").requires_grad


def test_gradients_of_the_variants_own_tensors(gpu: GradientDriver) -> None:
    build("own", LEARNED)
    q, k, v = leaves()
    slope, gain = torch.rand(4, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    own = {"slope": slope, "gain": gain, "shift": torch.zeros(4)}

    def loss(backend: str | None = None, **more: Any) -> Tensor:
        return attngen.attention(q, k, v, variant="own", backend=backend, **{**own, **more}).float().square().sum()

    inputs = (q, k, v, slope, gain)
    ours, theirs = torch.autograd.grad(loss(), inputs), torch.autograd.grad(loss("reference"), inputs)
    close(ours[:3], theirs[:3])
    # a constant for a row changes nothing but rounding
    assert all(a.shape == b.shape and float(a.abs().max()) < 0.5 for a, b in zip(ours[3:], theirs[3:], strict=True))
    with pytest.raises(CallError, match="tensor 'shift' asks for a gradient that its spec does not declare"):
        loss(shift=torch.zeros(4, requires_grad=True)).backward()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CallError, match="tensor 'slope' is added up in no fixed order"):
            loss().backward()
        torch.autograd.grad(loss(slope=slope.detach(), gain=gain.detach()), (q, k, v))
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="no fixed order"):
            torch.autograd.grad(loss(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast(gpu: GradientDriver) -> None:
    build()
    q, k, v = (t.detach().float().requires_grad_() for t in leaves())
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast does where there is a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        out = attngen.attention(q, k.to(torch.bfloat16), v, variant="causal")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert {gradient.dtype for gradient in found} == {torch.float32}
    assert gpu.launches == ["forward", "preprocess", "dkdv", "dq"]


def test_a_forward_alone_is_told_apart(gpu: GradientDriver) -> None:
    build(passes="[forward]")
    inputs = leaves()
    out = attngen.attention(*inputs, variant="causal")
    with pytest.raises(NoKernelError, match=r"(?s)causal, backward, dense.*passes: \[forward, backward\]"):
        out.sum().backward()


def test_a_second_derivative_is_refused(gpu: GradientDriver) -> None:
    build()
    q, k, v = leaves()
    (first,) = torch.autograd.grad(attngen.attention(q, k, v, variant="causal").square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_compiled_program_differentiates(gpu: GradientDriver) -> None:
    build()
    inputs = leaves()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attngen.attention(q * 2, k, v, variant="causal", return_lse=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs), inputs)
    assert gpu.launches == ["forward", "preprocess", "dkdv", "dq"]
    close(ours, torch.autograd.grad(loss(*inputs), inputs))
