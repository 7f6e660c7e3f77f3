"""Prepared backward passes are found again, fit the call that finds them, and keep nothing else alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import attngen
from attngen.errors import NoKernelError
from attngen.runtime.autograd import training
from attngen.runtime.device.interface import Launch
from attngen.runtime.registry.binding import bind_call
from tests.runtime.gradient_driver import GradientDriver, build, close, leaves, taken_for_a_gpu
from tests.runtime.support import decode, launch_of

SINKS = (
    'variants:\n  sunk:\n    mask: "q_pos >= kv"\n    sink: "sinks[h]"\n'
    "    tensors: {sinks: {dtype: float32, shape: [h], grad: true}}\n"
)

SEEN = (
    'variants:\n  seen:\n    mask: "allowed[q_pos, kv]"\n'
    "    tensors: {allowed: {dtype: bool, shape: [seqlen_q, seqlen_k]}}\n"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


def gradients(inputs: list[Tensor], above: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a call by its inputs, for the gradient ``above`` of its output."""
    out = attngen.attention(*inputs, variant="causal", **options)
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if above is None else above)


def check(inputs: list[Tensor], above: Tensor | None = None, **options: Any) -> None:
    close(gradients(inputs, above, **options), gradients(inputs, above, backend="reference", **options))


def test_a_backward_is_prepared_once(gpu: GradientDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    bound: list[Any] = []

    def counted(*given: Any) -> Any:
        bound.append(given)
        return bind_call(*given)

    monkeypatch.setattr(training, "bind_call", counted)
    kept = [leaves() for _ in range(3)]  # other memory each time
    for number, inputs in enumerate(kept):
        check(inputs, torch.randn(2, 40, 4, 64).to(torch.bfloat16), softmax_scale=(None, 0.3, 0.1)[number])
    check(kept[0])
    assert len(bound) == len(training._PREPARED) == 1


def test_calls_without_a_graph_do_not_hide_one_that_needs_it(gpu: GradientDriver) -> None:
    """A call that is recognized by its tensors was made without gradients; the same tensors with them are another."""
    build()
    inputs = leaves()
    for _ in range(3):
        with torch.no_grad():
            for _ in range(4):
                assert not attngen.attention(*inputs, variant="causal").requires_grad
            with torch.enable_grad():
                assert attngen.attention(*inputs, variant="causal").requires_grad
        check(inputs)


@pytest.mark.parametrize("variant", ["causal", "sunk"])
def test_a_backward_is_recognized_by_its_tensors(
    gpu: GradientDriver, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """As long as nothing but their places in memory differs, no key is made of them."""
    build(variant, SINKS)
    keyed: list[Any] = []

    def counted(*given: Any, **options: Any) -> Any:
        keyed.append(given)
        return differentiate(*given, **options)

    differentiate = training.differentiate
    monkeypatch.setattr(training, "differentiate", counted)
    kept = []  # other memory each time

    def keys_of_step(*, turned: bool = False, with_lse: bool = False, graded: bool = True) -> int:
        inputs, above = leaves(), torch.randn(2, 4, 40, 64).to(torch.bfloat16).transpose(1, 2)
        own = {"sinks": torch.randn(4).requires_grad_(graded)} if variant == "sunk" else {}
        above = above if turned else above.contiguous()
        by = [*inputs, *own.values()] if graded else inputs
        options: dict[str, Any] = {
            "variant": variant,
            "softmax_scale": 0.1 + 0.01 * len(kept),
            "return_lse": True,
            **own,
        }
        before, grads = len(keyed), []
        for backend in (None, "reference"):
            out, lse = attngen.attention(*inputs, backend=backend, **options)
            results, gradients = ([out, lse], [above, torch.ones_like(lse)]) if with_lse else ([out], [above])
            grads.append(torch.autograd.grad(results, by, gradients))
        kept.append((inputs, own, above, grads))
        close(*grads)
        return len(keyed) - before

    for form in ({}, {"turned": True}, {"with_lse": True}, {"graded": False}):
        if variant == "sunk" or "graded" not in form:
            assert [keys_of_step(**form) for _ in range(3)] == [1, 0, 0], form
    assert keys_of_step() == keys_of_step(turned=True) == 0


def test_other_strides_and_shapes_are_prepared_again(gpu: GradientDriver) -> None:
    build()
    q, k, v = leaves()
    turned = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    dense, expanded = torch.randn_like(q), torch.randn(()).to(q.dtype).expand(q.shape)
    across = torch.randn(2, 4, 40, 64).to(q.dtype).transpose(1, 2)
    odd = torch.randn(q.numel() + 1).to(q.dtype)[1:].view(q.shape)
    calls = [([q, k, v], above) for above in (dense, expanded, across, odd)]
    calls += [([turned, k, v], dense), ([q[:, :30], k[:, 3:], v[:, 3:]], dense[:, :30])]
    for _ in range(2):
        for inputs, above in calls:
            check(inputs, above)
        assert len(training._PREPARED) == len(calls)


def test_saved_tensors_may_come_back_elsewhere(gpu: GradientDriver) -> None:
    """Saved tensors may come from the host, or from a compressed form, with other strides."""
    build()
    inputs = leaves()
    check(inputs)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() == 4 else tensor.clone()

    with saved_tensors_hooks(turned, lambda tensor: tensor):
        check(inputs)
    assert len(training._PREPARED) == 2


def test_a_gradient_of_the_log_sum_exp_is_told_apart(gpu: GradientDriver) -> None:
    build()
    inputs = leaves(seqlen_k=70)
    for parts in (slice(0, 1), slice(1, 2), slice(0, 2), slice(0, 1)):

        def grads_of(backend: str | None, parts: slice = parts) -> tuple[Tensor, ...]:
            results = attngen.attention(*inputs, variant="causal", return_lse=True, backend=backend)
            loss = sum(part.float().sin().sum() for part in results[parts])
            return torch.autograd.grad(loss, inputs[:2])

        ours, theirs = grads_of(None), grads_of("reference")
        close(ours, theirs)
    assert len(training._PREPARED) == 2


def test_determinism_may_change_between_calls(gpu: GradientDriver) -> None:
    build(sum_columns=64)
    inputs = leaves()
    check(inputs)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NoKernelError, match=r"(?s)accumulates dQ in no fixed order.*\n      deterministic: true\n"):
            gradients(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    check(inputs)
    assert len(training._PREPARED) == 1


def test_sinks_of_each_call(gpu: GradientDriver) -> None:
    build("sunk", SINKS)
    q, k, v = leaves()
    for seed in range(3):
        torch.manual_seed(seed)
        sinks = torch.randn(4, requires_grad=True)
        ours, theirs = (
            torch.autograd.grad(
                attngen.attention(q, k, v, variant="sunk", sinks=sinks, backend=backend).float().square().sum(),
                (q, k, v, sinks),
            )
            for backend in (None, "reference")
        )
        close(ours, theirs)
    assert len(training._PREPARED) == 1


def test_threads(gpu: GradientDriver) -> None:
    build()
    sets = [leaves(seqlen_k=40 + 10 * (number % 2)) for number in range(4)]
    wanted = [gradients(inputs, backend="reference") for inputs in sets]
    together, done = threading.Barrier(len(sets)), []

    def work(number: int) -> None:
        together.wait()
        for _ in range(4):
            close(gradients(sets[number]), wanted[number])
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(len(sets)))


def test_nothing_is_kept_alive(gpu: GradientDriver) -> None:
    """Inputs and results go with the last reference to them, without the collector of cycles."""
    build()
    check(leaves())
    inputs = leaves()
    out = attngen.attention(*inputs, variant="causal")
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    alive = [weakref.ref(tensor) for tensor in (*inputs, out, *grads)]
    gc.disable()
    try:
        del inputs, out, grads
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


def test_inputs_overwritten_before_the_backward_are_refused(gpu: GradientDriver) -> None:
    build()
    inputs = leaves()
    scaled = [tensor * 2 for tensor in inputs]
    out = attngen.attention(*scaled, variant="causal")
    scaled[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_each_kernel_gets_its_own_tile_map(gpu: GradientDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    build("seen", SEEN)
    seen: dict[str, int] = {}

    def noted(kernel: Launch, device: int) -> None:
        (symbol, manifest, rows), *_, parameters = kernel
        name = launch_of(manifest, symbol)["name"]
        seen[name] = decode(rows, parameters).get("tile_map_ptr", 0)

    monkeypatch.setattr(gpu, "launch_one", noted)
    inputs = leaves()
    out = attngen.attention(*inputs, variant="seen", allowed=torch.rand(40, 70) < 0.5)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    maps = {"dkdv": seen["dkdv"], "dq": seen["dq"]}
    assert {name: seen[f"classify_{name}"] for name in maps} == maps
    assert len({0, *maps.values()}) == 3
    assert seen["preprocess"] == 0
