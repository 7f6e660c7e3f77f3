"""The spec that is written for a model serves it on the GPU: built as it is, generating falls back nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngen.build.pipeline import build
from attngen.runtime.registry.lookup import registry
from tests.commands.test_build import attngen
from tests.integrations.transformers import families


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_model_generates_on_the_kernels_of_its_spec(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))  # holds nothing but what the spec builds
    config = families.MAKERS[family](64)[1]
    config.save_pretrained(tmp_path)
    spec = tmp_path / "model.yaml"
    attngen("spec", "--model", str(tmp_path), "--dtype", "bf16", "--backward", "-o", str(spec))
    assert build(spec).failures == ()
    registry.clear()
    try:
        model = families.make(family, 64, "attngen", "cuda", torch.bfloat16, all_experts=True)
        for padding in ("none", "left", "right"):  # a call that no kernel takes raises
            outputs = families.logits(model, families.batch(family, padding, "cuda"))
            assert outputs.isfinite().all()
            gradients = families.gradients(model, outputs)
            assert all(gradient.isfinite().all() for gradient in gradients.values())
        for options in ({}, {"cache_implementation": "static"}):
            tokens, logits = families.generate(model, families.batch(family, "left", "cuda"), **options)
            assert tokens.shape[1] > families.LENGTH
            assert logits.isfinite().all()
    finally:
        registry.clear()
