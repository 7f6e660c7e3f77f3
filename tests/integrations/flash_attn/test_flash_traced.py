"""flash-attn's functions, of all versions, compiled and without data on the CPU, where nothing is built."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_attn import v4 as flash_attn_4
from attngen.resources import root
from attngen.runtime.registry.lookup import registry
from tests.integrations.flash_attn.test_flash_attn import near, qkv
from tests.sampling import few

PASSES = (0.0, None, True, -1, -1, 0.0, None)


@pytest.fixture(autouse=True)
def _nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))
    registry.clear()


def given() -> dict[str, Tensor]:
    q, k, v = qkv(9, 9)
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    flat = {f"flat_{name}": t.flatten(0, 1) for name, t in (("q", q), ("k", k), ("v", v))}
    pages = {name: torch.randn(4, 16, 2, 8) for name in ("pages_k", "pages_v")}
    return {
        "q": q, "k": k, "v": v, **flat, **pages, "starts": torch.tensor([0, 9, 18], dtype=torch.int32),
        "lengths": lengths, "table": torch.arange(4, dtype=torch.int32).view(2, 2), "slopes": torch.rand(4),
        "sinks": torch.randn(4), "dout": torch.randn_like(q),
    }  # fmt: skip


def backward_by_itself(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
    out, lse, *_ = flash_attn._flash_attn_forward(q, k, v, *PASSES, False)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    sums = flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *gradients, *PASSES, False)
    return (*gradients, sums)


CALLS: dict[str, Callable[..., Any]] = {
    "2": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True),
    "2 alibi": lambda q, k, v, slopes: flash_attn.flash_attn_func(q, k, v, softcap=2.0, alibi_slopes=slopes),
    "2 packed": lambda flat_q, flat_k, flat_v, starts: flash_attn.flash_attn_varlen_func(
        flat_q, flat_k, flat_v, starts, starts, 9, 9, window_size=(3, 1), return_attn_probs=True
    ),
    "2 cache": lambda q, pages_k, pages_v, lengths, table: flash_attn.flash_attn_with_kvcache(
        q, pages_k, pages_v, cache_seqlens=lengths, block_table=table, causal=True
    ),
    "3": lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, causal=True, attention_chunk=4),
    "3 used": lambda flat_q, flat_k, flat_v, starts, lengths: flash_attn_3.flash_attn_varlen_func(
        flat_q, flat_k, flat_v, starts, starts, 9, 9, lengths, lengths, causal=True
    ),
    "3 cache": lambda q, pages_k, pages_v, lengths, table: flash_attn_3.flash_attn_with_kvcache(
        q, pages_k, pages_v, cache_seqlens=lengths, page_table=table, causal=True
    ),
    "4": lambda q, k, v, sinks: flash_attn_4.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks),
    "4 packed": lambda flat_q, flat_k, flat_v, starts: flash_attn_4.flash_attn_varlen_func(
        flat_q, flat_k, flat_v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, return_lse=True
    ),
}


def arguments(call: Callable[..., Any]) -> list[Tensor]:
    values = given()
    return [values[name].clone() for name in call.__code__.co_varnames[: call.__code__.co_argcount]]


def tensors(result: Any) -> tuple[Tensor, ...]:
    every = result if isinstance(result, tuple) else (result,)
    return tuple(t for t in every if t is not None)


@pytest.mark.exhaustive
@few("name", CALLS, always=(3,), often=range(0, 99, 2))
def test_a_compiled_call(name: str) -> None:
    call = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = arguments(call)
    near(tensors(compiled(*inputs)), tensors(call(*inputs)))
    if "cache" not in name:
        leaves = [t.requires_grad_() for t in inputs[:3]]
        ours, theirs = (torch.autograd.grad(tensors(f(*inputs))[0].square().sum(), leaves) for f in (compiled, call))
        near(ours, theirs)


@pytest.mark.parametrize("name", [*CALLS, "backward"])
def test_a_call_without_data(name: str) -> None:
    call = CALLS.get(name, backward_by_itself)
    wanted = tensors(call(*arguments(call)))
    with FakeTensorMode() as mode:
        actual = tensors(call(*(mode.from_tensor(t) for t in arguments(call))))
    for one, other in zip(actual, wanted, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape, other.stride(), other.dtype, other.device
        )  # fmt: skip


@pytest.mark.exhaustive
def test_a_saved_program_runs_in_another_process(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attn.flash_attn_func(q, k, v, 0.0, window_size=(3, 1)), flash_attn.flash_attn_func(q, k, v)

    inputs = qkv(9, 9)
    torch.export.save(torch.export.export(Model(), inputs), tmp_path / "program.pt2")
    torch.save((inputs, Model()(*inputs)), tmp_path / "tensors.pt")
    program = (
        "import torch, attngen\n"
        f"given, wanted = torch.load({str(tmp_path / 'tensors.pt')!r})\n"
        f"outs = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()(*given)\n"
        "assert all(map(torch.equal, outs, wanted))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
