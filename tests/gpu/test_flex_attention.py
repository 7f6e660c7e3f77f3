"""FlexAttention's functions on kernels in bf16, forward and backward, beside dense attention in float64."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, build, prepare
from attngen.integrations.flex import attention as ours
from attngen.runtime.registry.lookup import registry
from attngen.schema import load_spec_text
from attngen.schema.writing import spec_text
from tests.integrations.flex.flex_mods import BATCH, HEADS, LENGTH, MODS
from tests.integrations.flex.test_flex_attention import dense
from tests.sampling import some

DIM = 64
DEVICE = "cuda"
_MADE: dict[str, Any] = {}
COMPILED = ["causal", "causal_document", "alibi_slopes", "relative_bias", "softcap"]
#: Functions whose kernels are built ahead; those of the others are compiled by their calls.
SAMPLE = [name for number, name in enumerate(MODS) if number % 2 == 0 or name in COMPILED]


def spec_of(made: dict[str, Any], device: str) -> str:
    """Return the spec of functions whose tensors are on a device."""
    meanings = [ours.meaning(*functions, torch.device(device)).variant for functions in made.values()]
    variants = {variant.name: variant.fields for variant in meanings}
    kernels = [{
        "variant": sorted(variants), "head_dim": DIM, "dtype": "bf16", "arch": ["sm90a"],
        "passes": ["forward", "backward"],
    }]  # fmt: skip
    return spec_text(variants, kernels, "flex")


def to_build() -> list[Prepared]:
    made = {name: MODS[name]("cpu") for name in SAMPLE}
    return prepare(load_spec_text(spec_of(made, "cpu"), "flex.yaml"))


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> None:
    _MADE.update({name: maker(DEVICE) for name, maker in MODS.items()})
    spec = tmp_path_factory.mktemp("flex") / "flex.yaml"
    Path(spec).write_text(spec_of({name: _MADE[name] for name in SAMPLE}, DEVICE))
    assert build(spec).failures == ()
    registry.clear()


def _close(actual: Tensor, exact: Tensor, plain: Tensor) -> None:
    error, allowed = ((t.double() - exact).abs().max().item() for t in (actual, plain))
    assert error <= 3 * allowed + 1e-3, f"{error} against {allowed}"


@pytest.mark.parametrize("name", some(MODS, SAMPLE))
def test_functions_and_gradients(name: str) -> None:
    mask_mod, score_mod = _MADE[name]
    torch.manual_seed(1)
    given = [torch.randn(BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, DEVICE)

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in given[:3])
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, [q, k, v], given[3].to(out.dtype))]

    with attngen.jit() if name not in SAMPLE else nullcontext():
        results = run(lambda q, k, v: ours.flex_attention(q, k, v, score_mod, mask), torch.bfloat16)
    exact = run(lambda q, k, v: dense(q, k, v, mask_mod, score_mod)[0], torch.float64)
    plain = run(lambda q, k, v: dense(q, k, v, mask_mod, score_mod)[0], torch.bfloat16)
    for one, other, third in zip(results, exact, plain, strict=True):
        _close(one, other, third)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_program_keeps_it_in_its_graph(name: str) -> None:
    """A program takes nothing for granted of a score_mod's tensors, whose kernel may then be another one."""
    mask_mod, score_mod = _MADE[name]
    torch.manual_seed(2)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    mask = None if mask_mod is None else ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, DEVICE)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q * 2, k, v, score_mod, mask).square()

    torch._dynamo.reset()
    with attngen.jit():
        wanted, out = program(q, k, v), torch.compile(program, fullgraph=True)(q, k, v)
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        for one, other in zip(*(torch.autograd.grad(t.sum(), [q]) for t in (out, wanted)), strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
