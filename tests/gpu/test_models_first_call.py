"""Models of transformers whose head dims and dtypes no package has: every kernel is compiled on the first call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.integrations.transformers.versions import cache_name
from attngen.runtime.registry.lookup import registry

families = pytest.importorskip("tests.integrations.transformers.families")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, a registry that knows no package, and no call on the reference, which warns."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="attention runs on the slow reference")
        yield
    registry.clear()


def _models(family: str, dim: int, dtype: torch.dtype) -> list[Any]:
    """Return the model on attngen, on plain torch, and on plain torch in float32 with the same weights."""
    models = [
        families.make(family, dim, name, "cuda", kind, all_experts=True)
        for name, kind in (("attngen", dtype), ("eager", dtype), ("eager", torch.float32))
    ]
    with torch.no_grad():
        for parameter in models[2].parameters():
            parameter.copy_(parameter.to(dtype))
    return models


@pytest.mark.parametrize(
    ("family", "dim", "dtype", "padding"),
    [
        ("llama", 72, torch.bfloat16, "left"),
        ("mistral", 40, torch.float16, "none"),
        ("gemma2", 88, torch.bfloat16, "right"),
        ("gpt_oss", 104, torch.bfloat16, "none"),
    ],
)
def test_a_model_that_nobody_built_for(
    family: str, dim: int, dtype: torch.dtype, padding: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prefill, steps against a cache, and gradients."""
    made = _models(family, dim, dtype)
    given = families.batch(family, padding, "cuda", times=8)
    outs = [families.logits(model, given) for model in made]
    gradients = [
        torch.cat([t.flatten().float() for t in families.gradients(model, out).values()])
        for model, out in zip(made, outs, strict=True)
    ]
    compared = [[out.detach().float() for out in outs], gradients]
    if padding != "right":
        with torch.no_grad():
            compared.append([families.step_by_step(model, given, prefill=100).float() for model in made])
    for actual, plain, wanted in compared:
        error, least = ((t - wanted).square().mean().sqrt().item() for t in (actual, plain))
        assert error <= 1.5 * least, f"{error} against {least}"
    assert "attngen.jit: compiled bwd" in capfd.readouterr().err


@torch.no_grad()
def test_a_compiled_step_of_ones_own_reads_no_mask(capfd: pytest.CaptureFixture[str]) -> None:
    """A prompt, and steps over a static cache that a CUDA graph of the whole forward pass computes."""
    from transformers import StaticCache

    ids = torch.randint(3, families.VOCABULARY, (2, 104), device="cuda")
    outputs = []
    for model in _models("llama", 64, torch.bfloat16):
        cache, logits, step = StaticCache(model.config, max_cache_len=256), [], model
        if not outputs:
            torch._dynamo.reset()
            step = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for start, stop in ((0, 100), *((place, place + 1) for place in range(100, 104))):
            run = model if start == 0 else step
            torch.compiler.cudagraph_mark_step_begin()
            logits.append(
                run(input_ids=ids[:, start:stop], **{cache_name(model.forward): cache}).logits[:, -1].float().clone()
            )
        outputs.append(torch.stack(logits))
    error, least = ((t - outputs[2]).square().mean().sqrt().item() for t in outputs[:2])
    assert error <= 1.5 * least, f"{error} against {least}"
    assert "allowed" not in capfd.readouterr().err
