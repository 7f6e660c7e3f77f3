"""Layers behind a shared prefix: the first of a step is looked at, others alike are launches with their addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.arguments import debug, torch_state
from attngen.runtime.arguments import seen as seen_module
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import entry, layers
from attngen.runtime.operations.shared_prefix.layer import SharedPrefixLayer
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import library, merging_kernels
from tests.runtime.pages import starts_of
from tests.runtime.support import FakeDriver, kernel, variant

pytestmark = [
    pytest.mark.skipif(seen_module._TensorGuards is None, reason="torch has no check of tensors"),
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 64
CHAINS = [[0, 1, 2, 8], [4, 5, 6, 9], [0, 1, 2, 10], [4, 5, 11, 12], [13, 14, 15, 16], [0, 1, 2, 17]]


class Device(FakeDriver):
    """It also runs the kernels that merge, on the host."""

    def load(self, image: bytes, symbol: str, *given: Any, **named: Any) -> Any:
        return symbol if symbol.startswith("merge") else super().load(image, symbol, *given, **named)

    def launch_one(self, kernel: Any, device: int) -> None:
        if not isinstance(kernel[0], str):
            super().launch_one(kernel, device)
            return
        symbol, grid, threads, *_, parameters = kernel
        self.launches.append(symbol)
        library(symbol).run_blocks(grid, threads, ctypes.c_void_p(parameters))


@pytest.mark.parametrize("prefixes", [1, 2])
def test_layers_of_a_step(prefixes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each step the first layer alone is looked at, and the next step only if its tensors lie elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)
    calls: list[Any] = []

    def run(given: Any, repeats: Any = None) -> Any:
        calls.append(given)
        return entry.run_or_trace(given, repeats)

    monkeypatch.setattr(layers, "run_or_trace", run)
    both = [kernel(variant(name, mask), layout="paged") for name, mask in (("causal", "q_pos >= kv"), ("full", None))]
    torch.manual_seed(5)
    table = torch.tensor(CHAINS, dtype=torch.int32)
    used = torch.tensor([60, 57, 50, 64, 51, 63], dtype=torch.int32)
    starts = starts_of([1] * 6)
    caches = [[torch.randn(18, PAGE, KV_HEADS, DIM).bfloat16() for _ in range(2)] for _ in range(3)]
    ours = [SharedPrefixLayer(*pages, variant="causal", softmax_scale=0.2) for pages in caches]
    q = torch.randn(6, HEADS, DIM).bfloat16()
    driver = Device()
    with drivers.use(driver), torch.no_grad():
        registry.add(package_of_kernels([*both, *merging_kernels()], "memory"))
        for step in range(2):
            prefix = attngen.shared_prefix(
                table, used, PAGE, prefixes=prefixes, cu_seqlens_q=starts, max_seqlen_q=1, total_q=6
            )
            assert prefix.length.tolist() == [48, 32][:prefixes]
            for number, (layer, pages) in enumerate(zip(ours, caches, strict=True)):
                calls.clear()
                driver.launches.clear()
                out = torch.full_like(q, torch.nan)
                layer(q, out, prefix)
                assert len(driver.launches) == 3
                assert step > 0 or len(calls) == (2 if number == 0 else 0)
                wanted = attngen.attention_paged(
                    q, *pages, table, used, cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=0.2, backend="reference"
                )
                torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
