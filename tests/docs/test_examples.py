"""The scripts of docs/examples run, each in a process of its own, on the eager reference.

tests/gpu/test_examples.py runs them on a GPU, with the kernels that they need.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))

#: Arguments of those that would take long.
TINY = ["--tiny", "--layers", "2", "--heads", "4", "--requests", "4", "--prompt", "70", "--new-tokens", "6"]
ARGUMENTS = {
    "mixture_of_block_attention": ["--steps", "2"],
    "native_sparse_attention": ["--steps", "2"],
    "port_flex_attention": ["--steps", "2"],
    "train_gpt": ["--tiny", "--steps", "2"],
    "train_on_ranks": ["--steps", "2"],
    "train_on_answers": ["--steps", "2"],
    "serve_llama": TINY,
}


#: Starts the ranks of an example as forks, which need not import torch again.
FORKED = """
import runpy, sys
from functools import partial
from torch import multiprocessing

multiprocessing.spawn = partial(multiprocessing.start_processes, start_method="fork")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

#: Those that tests/integrations/test_examples.py runs in its own process, which holds what they import already.
ELSEWHERE = ("route_sdpa", "serve_llama", "train_on_answers", "transformers_model", "use_flash_attn")

#: Those that take seconds: a package that is built, ranks that are started, kernels that are compiled, and training.
LONG = (
    "ship_a_package", "add_a_schedule", "train_gpt", "train_on_ranks", "port_flex_attention", "native_sparse_attention",
    "mixture_of_block_attention",
)  # fmt: skip

MARKS = {
    **dict.fromkeys(LONG, (pytest.mark.exhaustive,)),
    "native_sparse_attention": (pytest.mark.exhaustive, pytest.mark.long),  # as the one with mixtures of blocks
    **dict.fromkeys(ELSEWHERE, (pytest.mark.exhaustive, pytest.mark.long)),
}
CASES = [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, ())) for path in EXAMPLES]


@pytest.mark.parametrize("path", CASES)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "ATTNGEN_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip
    forks = ["-c", FORKED] if path.stem == "train_on_ranks" else []
    command = [sys.executable, *forks, str(path), *ARGUMENTS.get(path.stem, [])]
    done = forked.preload().run(command, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_mixture_of_blocks_is_that_of_a_mask_in_torch() -> None:
    """Outputs and gradients are those of SDPA under the mask of the paper, which is made here pair by pair."""
    torch = pytest.importorskip("torch")
    example = runpy.run_path(str(ROOT / "docs/examples/mixture_of_block_attention.py"))
    size, count, seqlen, heads = example["BLOCK"], 2, 3 * example["BLOCK"], 2
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, seqlen, heads, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    visible = torch.zeros(2, heads, seqlen, seqlen, dtype=torch.bool)
    chosen = {}
    for b, h, query in product(range(2), range(heads), range(seqlen)):
        own = query // size
        row, keys = q.detach()[b, query, h], k.detach()[b, :, h]
        likes = [float(row @ keys[i * size : (i + 1) * size].mean(0)) for i in range(own)]
        best = sorted(range(own), key=likes.__getitem__, reverse=True)[: count - 1]
        for i in (*best, own):
            visible[b, h, query, i * size : min((i + 1) * size, query + 1)] = True
        chosen[b, h, query] = best
    last = range(seqlen - size, seqlen)
    assert any(chosen[0, 0, i] != chosen[0, 0, last[0]] for i in last), "queries of a block choose alike"
    assert any(chosen[0, 0, i] != chosen[0, 1, i] for i in last), "heads choose alike"

    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=visible
    ).transpose(1, 2)
    actual = example["mixture_of_blocks"](q, k, v, count)
    torch.testing.assert_close(actual, wanted)
    dout = torch.randn_like(wanted)
    for mine, exact in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (actual, wanted)), strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.long
@pytest.mark.exhaustive
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATTNGEN_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    program = str(ROOT / "docs/examples/train_on_ranks.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, "--steps", "1"]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 0: ")
