"""The scripts of docs/examples on a GPU, where the drop-ins find the kernels of their specs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.packages import indexed

ROOT = Path(__file__).parents[2]
#: Scripts, and the spec that the documentation says to build for each.
SCRIPTS = {
    "route_sdpa": "sdpa", "ship_a_package": None, "train_gpt": None, "transformers_model": "transformers",
    "port_flex_attention": None, "use_flash_attn": "flash_attn", "serve_llama": "flash_attn_kvcache",
    "add_a_schedule": None, "train_on_answers": None,
}  # fmt: skip
ARGUMENTS = {
    "port_flex_attention": ["--steps", "60"],
    "train_gpt": ["--tiny", "--steps", "3"],
    "train_on_answers": ["--steps", "2"],
    "serve_llama": ["--layers", "2", "--heads", "8", "--requests", "8", "--prompt", "200", "--new-tokens", "8"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    spec = SCRIPTS[name]
    if spec is not None:
        indexed(spec)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/examples" / f"{name}.py"), *ARGUMENTS.get(name, [])],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if name == "route_sdpa":
        assert done.stdout.startswith("3 calls on attngen"), done.stdout
