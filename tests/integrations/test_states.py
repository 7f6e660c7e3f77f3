"""Drop-ins in every state of torch: what they keep of earlier calls changes none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attngen.integrations import flex_attention, sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_mla.functions import flash_mla_with_kvcache
from attngen.integrations.natten import na2d
from attngen.integrations.shared import choice, constants, recalled
from attngen.integrations.shared.catalogue import variant
from attngen.integrations.torch_sdpa import routing
from attngen.runtime.arguments import seen, torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.operations.attention import kernel_call, recall
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.states import STATES, outcome
from tests.runtime.support import FakeDriver, kernel
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(seen._TensorGuards is None, reason="torch has no check of tensors")


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def by_rows() -> list[Tensor]:
    return [random(2, 5, 2, 64) for _ in range(3)]


def by_heads() -> list[Tensor]:
    return [random(2, 2, 5, 64) for _ in range(3)]


def on_a_grid() -> list[Tensor]:
    return [random(1, 5, 6, 2, 64) for _ in range(3)]


def listed() -> list[Tensor]:
    return [random(2, 1, 3, 576), random(4, 16, 1, 576), torch.randint(64, (2, 1, 12), dtype=torch.int32)]


def routed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[str]]:
    with sdpa() as calls:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out, list(calls.reasons)


def flash_mla(q: Tensor, cache: Tensor, indices: Tensor) -> Any:
    return flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices)


MASK = flex_attention.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 5, 5, device="cpu")
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "flash_attn": (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), by_rows),
    "sdpa": (routed, by_heads),
    "flex_attention": (lambda q, k, v: flex_attention.flex_attention(q, k, v, block_mask=MASK), by_heads),
    "flash_mla": (flash_mla, listed),
    "natten": (lambda q, k, v: na2d(q, k, v, 3, is_causal=(True, False)), on_a_grid),
}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.clear()
    kernels = [kernel(variant(name)) for name in ("causal", "causal_top_left", "natten")]
    kernels += [kernel(variant("listed_keys"), head_dim=(576, 512), layout=layout) for layout in ("dense", "paged")]
    registry.add(package_of_kernels(kernels, "memory"))
    with drivers.use(FakeDriver()):
        yield
    forget()
    registry.clear()


def forget() -> None:
    kept = recall.SEEN, kernel_call.PREPARED, recalled._KNOWN, recalled._NOTED, constants._KEPT, routing._VERDICTS
    for one in kept:
        one.clear()


@sampled(always=7, state=[*STATES], name=[*CALLS])
def test_nothing_kept_changes_a_call(name: str, state: str) -> None:
    call, make = CALLS[name]
    torch.manual_seed(5)
    tensors, others = make(), make()
    forget()
    plain = outcome("none", call, tensors)
    forget()
    wanted = outcome(state, call, others)
    for _ in range(3):
        assert outcome("none", call, tensors) == plain
    assert outcome(state, call, others) == wanted
