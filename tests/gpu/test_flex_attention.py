"""FlexAttention's functions on kernels in bf16, forward and backward, beside dense attention in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.integrations import flex_attention as ours
from attngen.runtime.registry import registry
from attngen.schema.writing import spec_text
from attngen.tools.build.pipeline import build
from tests.integrations.flex_mods import BATCH, HEADS, LENGTH, MODS
from tests.integrations.test_flex_attention import dense

DIM = 64
DEVICE = "cuda"
_MADE: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> None:
    variants = {}
    for name, maker in MODS.items():
        _MADE[name] = maker(DEVICE)
        found = ours.meaning(*_MADE[name], torch.device(DEVICE)).variant
        variants[found.name] = found.fields
    kernels = [{
        "variant": sorted(variants), "head_dim": DIM, "dtype": "bf16", "arch": ["sm90a"],
        "passes": ["forward", "backward"],
    }]  # fmt: skip
    spec = tmp_path_factory.mktemp("flex") / "flex.yaml"
    Path(spec).write_text(spec_text(variants, kernels, "flex"))
    assert build(spec).failures == ()
    registry.clear()


def _close(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    error, allowed = ((t.double() - exact).abs().max().item() for t in (found, plain))
    assert error <= 3 * allowed + 1e-3, f"{error} against {allowed}"


@pytest.mark.parametrize("name", MODS)
def test_functions_and_gradients(name: str) -> None:
    mask_mod, score_mod = _MADE[name]
    torch.manual_seed(1)
    given = [torch.randn(BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, DEVICE)

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in given[:3])
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, [q, k, v], given[3].to(out.dtype))]

    found = run(lambda q, k, v: ours.flex_attention(q, k, v, score_mod, mask), torch.bfloat16)
    exact = run(lambda q, k, v: dense(q, k, v, mask_mod, score_mod)[0], torch.float64)
    plain = run(lambda q, k, v: dense(q, k, v, mask_mod, score_mod)[0], torch.bfloat16)
    for one, other, third in zip(found, exact, plain, strict=True):
        _close(one, other, third)


@pytest.mark.parametrize("name", ["causal", "causal_document", "alibi_slopes", "relative_bias", "softcap"])
def test_a_compiled_program_keeps_it_in_its_graph(name: str) -> None:
    """What a score_mod's tensors hold is not taken for granted in a program, whose kernel may then be another one."""
    import attngen

    mask_mod, score_mod = _MADE[name]
    torch.manual_seed(2)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, DEVICE)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q * 2, k, v, score_mod, mask).square()

    torch._dynamo.reset()
    with attngen.jit():
        wanted, found = program(q, k, v), torch.compile(program, fullgraph=True)(q, k, v)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        for one, other in zip(*(torch.autograd.grad(t.sum(), [q]) for t in (found, wanted)), strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
