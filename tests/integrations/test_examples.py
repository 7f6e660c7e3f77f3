"""The scripts of docs/integrations.md run, and check themselves."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.sampling import few

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PRINTED = {
    "port_flex_attention.py": "1 forward passes, since torch's FlexAttention has no backward on a CPU; layers 1",
    "route_sdpa.py": "3 calls on attngen: bias_bf16_dropout 2, bias_bf16 1\n1 calls on torch:",
    "serve_llama.py": "attngen: ",
    "train_on_answers.py": "step 0: reward 0.",
    "transformers_model.py": "tokens (2, 56)",
    "use_flash_attn.py": "out (2, 256, 8, 64) lse (2, 8, 256)\nstep (2, 1, 8, 64)",
}

TINY = ["--tiny", "--layers", "2", "--heads", "4", "--requests", "4", "--prompt", "70", "--new-tokens", "6"]
ARGUMENTS = {
    "serve_llama.py": [*TINY, "--implementations", "attngen"], "port_flex_attention.py": ["--steps", "1"],
    "train_on_answers.py": ["--steps", "1"],
}  # fmt: skip


@pytest.mark.exhaustive
@few("name", sorted(PRINTED), always=1, often=range(0, 99, 2))
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.startswith(PRINTED[name])
