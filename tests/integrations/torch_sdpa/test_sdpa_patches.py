"""``sdpa`` beside other functions in place of torch's: patches below and over it, and ends that cross."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attngen.integrations import sdpa
from attngen.resources import root
from tests import forked

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is TORCHS


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 7, 8) for _ in range(3)]


class Logged:
    """A patch that takes note of calls and of an option of its own, and leaves the rest to what was there."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        below = F.scaled_dot_product_attention

        @wraps(below)
        def logged(*arguments: Any, note: str = "", **options: Any) -> Tensor:
            self.seen.append(note)
            return below(*arguments, **options)

        self.function: Callable[..., Tensor] = logged
        code = logged.__code__
        self.name = f"{__name__}.{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"
        self.patch = mock.patch.object(F, "scaled_dot_product_attention", logged)

    def __enter__(self) -> Logged:
        self.patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.stop()


def test_a_patch_that_was_there_before_sees_calls_and_its_own_are_routed() -> None:
    q, k, v = qkv()
    with Logged() as log, sdpa(backend="reference", explain=True) as routed:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, note="mine")  # type: ignore[call-arg]
        F.scaled_dot_product_attention(q, k, value=v, dropout_p=1.0)
    assert log.seen == ["mine", ""]
    torch.testing.assert_close(out, TORCHS(q, k, v, is_causal=True))
    assert routed.report().splitlines() == [
        "1 calls on attngen: causal_top_left 1",
        "1 calls on torch:",
        "  1 since dropout_p is 1.0, and kernels take 0 to below 1",
        f"scaled_dot_product_attention was {log.name} when the block began: calls go through it, and those that it "
        "makes of torch's function are routed",
        "1. q 2x4x7x8, k 2x4x7x8, v 2x4x7x8: causal_top_left",
        "2. q 2x4x7x8, k 2x4x7x8, v 2x4x7x8: torch, since dropout_p is 1.0, and kernels take 0 to below 1",
    ]


def test_a_patch_that_computes_something_else_keeps_its_result() -> None:
    q, k, v = qkv()
    with (
        mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v: v + 1),
        sdpa(backend="reference") as routed,
    ):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), v + 1)
    assert (routed.routed, routed.fell_back) == (0, 0)
    assert re.search(rf"1 calls on {__name__}\..*<lambda>, which did not call torch's", routed.report())


def test_gradients_and_recomputed_forwards_go_the_same_way() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = (t.requires_grad_() for t in qkv())
    with Logged() as log, sdpa(backend="reference") as routed:
        out = checkpoint(lambda q: F.scaled_dot_product_attention(q, k, v).sin(), q, use_reentrant=False)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert len(log.seen) == routed.routed == 2
    for one, other in zip(gradients, torch.autograd.grad(TORCHS(q, k, v).sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_compiled_program_is_that_of_the_patch() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    with mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v: v + 1), sdpa(backend="reference"):
        program = torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v), backend="eager", fullgraph=True)
        assert torch.equal(program(q), v + 1)


def test_a_patch_below_that_ends_first() -> None:
    q, k, v = qkv()
    log, block = Logged(), sdpa(backend="reference")
    with log:
        routed = block.__enter__()
    assert F.scaled_dot_product_attention is TORCHS
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), TORCHS(q, k, v))
    block.__exit__()
    assert (routed.routed, log.seen) == (0, [])
    assert "torch's function was put back inside the block: later calls were not routed" in routed.report()


def test_a_patch_over_a_block_that_ends_later() -> None:
    q, k, v = qkv()
    block = sdpa(backend="reference")
    routed = block.__enter__()
    with Logged() as log:
        F.scaled_dot_product_attention(q, k, v)
        block.__exit__()
        F.scaled_dot_product_attention(q, k, v)
        with sdpa(backend="reference") as again:
            F.scaled_dot_product_attention(q, k, v)
        assert F.scaled_dot_product_attention is log.function
    assert (len(log.seen), routed.routed, again.routed, again.fell_back) == (3, 1, 1, 0)
    assert F.scaled_dot_product_attention is not TORCHS  # the patch has put back what a block had left
    with sdpa(backend="reference") as last:
        F.scaled_dot_product_attention(q, k, v)
    assert last.routed == 1
    assert not last.notes


def test_what_a_block_left_behind_goes_at_the_next_call() -> None:
    q, k, v = qkv()
    block = sdpa(backend="reference")
    block.__enter__()
    with Logged():
        block.__exit__()
    left = F.scaled_dot_product_attention
    assert left is not TORCHS
    torch.testing.assert_close(left(q, k, v), TORCHS(q, k, v))
    assert F.scaled_dot_product_attention is TORCHS


def test_blocks_that_end_in_another_order() -> None:
    first, second = sdpa(backend="reference"), sdpa(backend="reference")
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__()
    F.scaled_dot_product_attention(*qkv())
    second.__exit__()
    together = threading.Barrier(2)

    def beside() -> None:
        with sdpa(backend="reference"):
            together.wait()
            together.wait()

    worker = threading.Thread(target=beside)
    worker.start()
    together.wait()
    F.scaled_dot_product_attention(*qkv())  # in no block, while another thread is in one
    together.wait()
    worker.join()
    assert (outer.routed, inner.routed) == (0, 1)
    with sdpa(backend="reference") as last:
        F.scaled_dot_product_attention(*qkv())
    assert last.routed == 1


def test_a_block_inside_of_a_patch_inside_of_a_block() -> None:
    with sdpa(backend="reference") as outer, Logged() as log, sdpa(backend="reference") as inner:
        F.scaled_dot_product_attention(*qkv())
    assert (len(log.seen), outer.routed, inner.routed) == (1, 0, 1)


@pytest.mark.exhaustive
def test_context_parallel_of_two_processes(tmp_path: Path) -> None:
    program = (
        "import torch._dynamo, torch.multiprocessing\nfrom tests.integrations.torch_sdpa import context_parallel\n"
        f"arguments = (2, {str(tmp_path / 'meeting')!r})\n"
        "torch.multiprocessing.start_processes(context_parallel.run, arguments, nprocs=2, start_method='fork')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = forked.preload().run([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
