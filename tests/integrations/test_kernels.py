"""Integrations where there are kernels: which one serves a call, what errors say, when calls fall back.

The GPU is the one of the runtime's tests: a driver that decodes each launch and computes it with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations import sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.shared import choice
from attngen.integrations.shared.catalogue import variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import kernel_call, kernel_choice
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from tests.docs.blocks import DOCUMENTS, blocks
from tests.integrations import oracles
from tests.integrations.drops import factors
from tests.runtime.support import FakeDriver, kernel, kernel_of, manifest_of, write_build
from tests.runtime.support import variant as another_variant


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    registry.clear()
    kernel_call.PREPARED.clear()
    fake = FakeDriver()
    with drivers.use(fake):
        yield fake
    registry.clear()


def install(*names: str, package: str = "mine", **fields: Any) -> None:
    registry.add(package_of_kernels([kernel(variant(name), package=package, **fields) for name in names], "memory"))


def qkv(dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(dim)
    return [torch.randn(2, 40, 2, dim).to(dtype) for _ in range(3)]


def launched(gpu: FakeDriver) -> list[str]:
    """The variants of the launches so far, which are then forgotten."""
    names = [launch.symbol.split("d64_")[1].removesuffix("_dense") for launch in gpu.launches]
    gpu.launches.clear()
    return names


def test_the_special_variant_is_preferred(gpu: FakeDriver) -> None:
    q, k, v = qkv()
    wanted = oracles.flash_attention(q, k, v, causal=True)[0]
    install("window")
    for _ in range(2):
        out = flash_attn.flash_attn_func(q, k, v, causal=True)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    assert launched(gpu) == ["window", "window"]
    install("causal", package="presets")  # built later
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, causal=True), out)
    assert launched(gpu) == ["causal"]


@pytest.mark.parametrize("dim", [8, 40, 72, 200])
def test_head_dims_of_flash_attn_are_neither_copied_nor_read_beyond(gpu: FakeDriver, dim: int) -> None:
    """Kernels pad multiples of 8 themselves: the launch gets the caller's memory, though NaN follows each row in it."""
    install("causal", head_dim=dim)
    wide = [torch.cat([t, torch.full_like(t[..., :8], torch.nan)], -1) for t in qkv(dim)]
    q, k, v = (t[..., :dim] for t in wide)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    (launch,) = gpu.launches
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert launch.values[f"{name}_ptr"] == tensor.data_ptr()
        assert launch.values[f"stride_{name}_h"] == dim + 8
    assert launch.values["softmax_scale"] == pytest.approx(dim**-0.5)
    wanted = oracles.flash_attention(*qkv(dim), causal=True)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


def test_a_wide_v_takes_one_launch_for_each_part(gpu: FakeDriver) -> None:
    install("causal", head_dim=(64, 256))
    q, k, _ = qkv()
    wide = torch.randn(2, 40, 2, 512).bfloat16()
    out, lse = flash_attn_3.flash_attn_func(q, k, wide, causal=True, return_attn_probs=True)
    wanted, wanted_lse = oracles.flash_attention(q, k, wide, causal=True)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=1e-3)
    assert [launch.values["v_ptr"] - wide.data_ptr() for launch in gpu.launches] == [0, 256 * wide.element_size()]


def test_another_variant_of_the_same_name_is_not_taken(gpu: FakeDriver) -> None:
    own = another_variant("causal", "q_pos > kv")
    registry.add(package_of_kernels([kernel(own)], "memory"))
    with pytest.raises(NoKernelError, match="no built kernel takes this call"):
        flash_attn.flash_attn_func(*qkv(), causal=True)
    install("causal", package="second")
    out = flash_attn.flash_attn_func(*qkv(), causal=True)
    wanted = oracles.flash_attention(*qkv(), causal=True)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


def test_two_packages_with_the_same_variant_are_not_ambiguous(gpu: FakeDriver) -> None:
    install("full", package="one", dtype="fp16")
    install("full", package="two")
    flash_attn.flash_attn_func(*qkv())
    flash_attn.flash_attn_func(*qkv(dtype=torch.float16))
    assert launched(gpu) == ["full", "full"]


def test_the_error_says_what_was_tried_and_what_to_build(gpu: FakeDriver) -> None:
    install("window")
    with pytest.raises(NoKernelError) as caught:
        flash_attn.flash_attn_func(*qkv(dim=32), causal=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == "no built kernel takes this call; variants that would serve it: causal, window"
    assert any("head_dim of q and k is 64, the call has 32" in line for line in lines)
    assert lines[-1].startswith("'attngen build ")
    assert lines[-1].endswith("specs/integrations/flash_attn.yaml' builds the shipped kernels of these variants")
    assert (Path(lines[-1].split("'")[1].removeprefix("attngen build "))).exists()


def test_wrong_arguments_are_not_taken_for_a_missing_kernel(gpu: FakeDriver) -> None:
    install("causal", "window")
    q, k, v = qkv()
    with pytest.raises(CallError, match="k has 40 keys, but v has 39") as caught:
        flash_attn.flash_attn_func(q, k, v[:, :39], causal=True)
    assert not isinstance(caught.value, NoKernelError)


def test_a_call_that_learns_takes_a_variant_that_has_a_backward(gpu: FakeDriver) -> None:
    install("causal", package="presets")
    pair = [kernel(variant("window"), direction=d, name=f"{d}_d64_window_dense") for d in ("forward", "backward")]
    registry.add(package_of_kernels(pair, "memory"))
    q, k, v = (t.requires_grad_() for t in qkv())
    flash_attn.flash_attn_func(q, k, v, causal=True)
    assert launched(gpu) == ["window"]
    with torch.no_grad():
        flash_attn.flash_attn_func(q, k, v, causal=True)
    assert launched(gpu) == ["causal"]
    flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(5, 0))
    assert launched(gpu) == ["window"]


# --- routing ------------------------------------------------------------------------------------------------


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def test_sdpa_routes_what_is_built(gpu: FakeDriver) -> None:
    install("causal_top_left")
    q, k, v = heads_first(*qkv())
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        other = F.scaled_dot_product_attention(q, k, v)
    assert dict(routed.variants) == {"causal_top_left": 1}
    assert launched(gpu) == ["causal_top_left"]
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=2e-2, atol=2e-2)
    assert torch.equal(other, F.scaled_dot_product_attention(q, k, v))
    assert "variants that would serve it: full" in routed.report()


def test_sdpa_asks_once_for_what_no_kernel_takes(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    install("full")
    asked = []
    first_that_fits = kernel_choice.first_that_fits
    monkeypatch.setattr(kernel_choice, "first_that_fits", lambda *asks: asked.append(0) or first_that_fits(*asks))
    q, k, v = heads_first(*qkv(dim=32))
    with sdpa() as routed:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
        assert len(asked) == 1
        install("full", head_dim=32)  # what is built meanwhile is taken
        F.scaled_dot_product_attention(q, k, v)
    assert (routed.fell_back, routed.routed) == (3, 1)


def test_sdpa_finds_what_was_built_meanwhile(gpu: FakeDriver) -> None:
    install("causal_top_left")
    q, k, v = heads_first(*qkv())
    with sdpa() as routed:
        F.scaled_dot_product_attention(q, k, v)
        write_build("later", variant("full"))
        F.scaled_dot_product_attention(q, k, v)
    assert (routed.fell_back, routed.routed) == (1, 1)


def test_sdpa_needs_a_backward_kernel_for_gradients(gpu: FakeDriver) -> None:
    install("full")
    q, k, v = (t.detach().requires_grad_() for t in heads_first(*qkv()))
    with sdpa() as routed:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        assert q.grad is not None
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v)
    assert dict(routed.reasons) == {"no backward kernel of full is built, and a gradient may be asked for": 1}
    assert dict(routed.variants) == {"full": 1}
    forward, backward = (kernel(variant("full"), direction=d, name=f"{d}_d64_full") for d in ("forward", "backward"))
    registry.add(package_of_kernels([forward, backward], "memory"))
    assert choice.has_backward("full", q, v, ordered=False)
    assert not choice.has_backward("full", q[..., :32], v[..., :32], ordered=False)
    assert not choice.has_backward("causal_top_left", q, v, ordered=False)


def with_backwards(*orders: bool, name: str = "causal") -> None:
    """Install a forward of a variant, and backwards that add up dQ in a fixed order or in none."""
    fields: dict[str, Any] = {"direction": "backward", "backend": "cuda"}
    backwards = [
        kernel_of(
            {**manifest_of(variant(name), name=f"b{i}_d64_{name}", **fields), "sum_columns": 64, "ordered": order}
        )
        for i, order in enumerate(orders)
    ]
    forward = kernel(variant(name), direction="forward", name=f"forward_d64_{name}")
    registry.add(package_of_kernels([forward, *backwards], "memory"))


def test_a_backward_without_a_fixed_order_does_not_count_where_one_is_asked_for(gpu: FakeDriver) -> None:
    q, _, v = qkv()
    with_backwards(False)
    assert choice.has_backward("causal", q, v, ordered=False)
    assert not choice.has_backward("causal", q, v, ordered=True)
    with_backwards(False, True)
    assert choice.has_backward("causal", q, v, ordered=True)


def test_a_trace_takes_the_package_that_runs_on_its_gpu(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    install("causal", package="newer", arch="sm100a")
    install("causal", "window", package="mine")

    def chosen(*names: str) -> tuple[int, str]:
        actual: tuple[int, str] = choice._built_at_trace(
            names, "bf16", "bf16", 64, 64, "dense", 0, "flash_attn", learns=False, ordered=False
        )
        return actual

    assert chosen("causal", "window") == (0, "mine/causal")
    gpu.compute_capability = 100
    assert chosen("causal", "window") == (0, "newer/causal")
    gpu.compute_capability = 80
    assert chosen("causal") == (0, "newer/causal")  # whose call says that it needs sm100a


def test_a_dtype_that_no_kernel_has_is_refused_by_name(gpu: FakeDriver) -> None:
    install("causal")
    q, k, v = (t.to(torch.complex64).requires_grad_() for t in qkv())
    with pytest.raises(CallError, match="q has dtype torch.complex64; allowed: "):
        flash_attn.flash_attn_func(q, k, v, causal=True)
    with sdpa() as routed, pytest.raises(NotImplementedError, match="ComplexFloat"):
        F.scaled_dot_product_attention(q, k, v)
    assert list(routed.reasons) == ["q, k and v are " + ", ".join(["torch.complex64"] * 2) + " and torch.complex64"]


def test_flash_attn_asks_for_gradients_that_are_the_same_on_every_run(gpu: FakeDriver) -> None:
    with_backwards(False)
    leaves = [t.requires_grad_() for t in qkv()]
    out = flash_attn.flash_attn_func(*leaves, causal=True, deterministic=True)
    with pytest.raises(
        NoKernelError, match=r"accumulates dQ in no fixed order, and the call(.|\n)* deterministic: true"
    ):
        out.sum().backward()


def test_sdpa_leaves_to_torch_what_has_no_fixed_order_where_torch_asks_for_one(gpu: FakeDriver) -> None:
    with_backwards(False, name="full")
    q, k, v = (t.requires_grad_() for t in heads_first(*qkv()))
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa() as routed:
            F.scaled_dot_product_attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    reason = "no backward kernel of full with a fixed order of sums is built, and a gradient may be asked for"
    assert dict(routed.reasons) == {reason: 1}


def test_sdpa_leaves_a_mask_that_learns_to_torch(gpu: FakeDriver) -> None:
    install("bias_bf16")
    mask = torch.zeros(40, 40, dtype=torch.bfloat16, requires_grad=True)
    with sdpa() as routed:
        F.scaled_dot_product_attention(*heads_first(*qkv()), attn_mask=mask).sum().backward()
    assert mask.grad is not None
    assert dict(routed.reasons) == {"the mask asks for a gradient": 1}


# --- dropout ------------------------------------------------------------------------------------------------


def test_a_rate_takes_the_kernels_that_drop_and_no_rate_the_others(gpu: FakeDriver) -> None:
    install("causal", "causal_dropout", "window", "window_dropout")
    q, k, v = qkv()
    drops = factors(3, 0.25, 2, 2, 40, 40)
    out = flash_attn.flash_attn_func(q, k, v, 0.25, causal=True)
    wanted = oracles.flash_attention(q, k, v, causal=True, factors=drops)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    flash_attn.flash_attn_func(q, k, v, 0.25)
    assert launched(gpu) == ["causal_dropout", "window_dropout"]
    before = torch.get_rng_state()
    flash_attn.flash_attn_func(q, k, v, 0.0, causal=True)
    assert launched(gpu) == ["causal"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_draws_once_whichever_candidate_serves_it(gpu: FakeDriver) -> None:
    install("window_dropout")
    results = []
    for _ in range(2):  # the first call tries causal_dropout before
        torch.manual_seed(4)
        results.append(flash_attn.flash_attn_func(*qkv(), 0.5, causal=True))
    install("causal_dropout", package="later")
    torch.manual_seed(4)
    results.append(flash_attn.flash_attn_func(*qkv(), 0.5, causal=True))
    assert launched(gpu) == ["window_dropout", "window_dropout", "causal_dropout"]
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0])


def test_errors_of_dropout_say_what_to_build(gpu: FakeDriver) -> None:
    install("causal", "window", "window_alibi")
    with pytest.raises(NoKernelError) as caught:
        flash_attn.flash_attn_func(*qkv(), 0.1, causal=True)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("variants that would serve it: causal_dropout, window_dropout")
    assert lines[-1].endswith("specs/integrations/flash_attn.yaml' builds the shipped kernels of these variants")
    with pytest.raises(NoKernelError) as caught:
        flash_attn.flash_attn_func(*qkv(), 0.1, alibi_slopes=torch.ones(2))
    assert str(caught.value).splitlines()[-1] == (
        "no shipped spec has 'window_alibi_dropout': declare it in your own, as window_alibi with 'dropout: true'"
    )


def test_a_variant_with_dropout_of_ones_own_is_taken(gpu: FakeDriver) -> None:
    """The spec is that of docs/integrations.md."""
    (text,) = [block.text for path in DOCUMENTS for block in blocks(path, "yaml") if "softcap_dropout" in block.text]
    (declared,) = {spec.variant for spec in expand(load_spec_text(text))}
    registry.add(package_of_kernels([kernel(declared)], "memory"))
    flash_attn.flash_attn_func(*qkv(), 0.1, causal=True, softcap=2.0)
    assert launched(gpu) == ["softcap_dropout"]


def test_sdpa_with_dropout_falls_back_as_if_it_were_not_there(gpu: FakeDriver) -> None:
    """The reason is known before anything is drawn, so that torch drops what it would drop."""
    install("full")
    q, k, v = heads_first(*qkv())
    torch.manual_seed(5)
    plain = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with sdpa() as routed:
        for _ in range(2):
            torch.manual_seed(5)
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), plain)
        install("full_dropout", package="later")
        drops = factors(5, 0.5, 2, 2, 40, 40)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5)
    assert dict(routed.variants) == {"full_dropout": 1}
    assert launched(gpu) == ["full_dropout"]
    for reason, name in zip(routed.reasons, ("full_dropout", "causal_top_left_dropout"), strict=True):
        assert f"variants that would serve it: {name}\n" in reason
    wanted = oracles.flash_attention(*heads_first(q, k, v), factors=drops)[0]
    torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_sdpa_with_dropout_needs_its_backward_for_gradients(gpu: FakeDriver) -> None:
    pair = [kernel(variant("full"), direction=d, name=f"{d}_d64_full") for d in ("forward", "backward")]
    registry.add(package_of_kernels([*pair, kernel(variant("full_dropout"))], "memory"))
    q, k, v = (t.detach().requires_grad_() for t in heads_first(*qkv()))
    with sdpa() as routed:
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert dict(routed.reasons) == {"no backward kernel of full_dropout is built, and a gradient may be asked for": 1}


def test_transformers_with_dropout_warns_and_runs_the_reference(gpu: FakeDriver) -> None:
    from attngen.integrations.transformers.implementation import attention

    install("causal")
    q, k, v = heads_first(*qkv())
    module = torch.nn.Module()
    drops = factors(6, 0.5, 2, 2, 40, 40)
    with pytest.warns(RuntimeWarning, match="variants that would serve it: causal_dropout, span_dropout"):
        actual, _ = attention(module, q, k, v, None, 0.5)
    wanted = oracles.flash_attention(*qkv(), causal=True, factors=drops)[0]
    torch.testing.assert_close(actual.double(), wanted, rtol=2e-2, atol=2e-2)
    assert launched(gpu) == []
    install("span_dropout", package="later")
    attention(module, q, k, v, None, 0.5)
    attention(module.eval(), q, k, v, None, 0.5)
    assert launched(gpu) == ["span_dropout", "causal"]
