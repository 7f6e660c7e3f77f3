"""Kernels of masks and scores that are the same everywhere compile: nothing is seen, or no product is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.build.pipeline import Prepared, compile_kernels, prepare
from attngen.schema import load_spec_text
from attngen.store.store import Store

SPEC = """
schema: 1
package: t
arch: [sm90a]
variants:
  nothing: {mask: false, score: "s * 2"}
  hidden: {mask: "q_pos >= kv", score: "-inf"}
  one_logit: {mask: "q_pos >= kv", score: "1.5"}
kernels:
  - {variant: [nothing, one_logit], head_dim: 64, backend: cuda}
  - {variant: hidden, head_dim: 64, backend: triton, passes: [forward, backward]}
  - {variant: one_logit, head_dim: 64, passes: backward, backward: {backend: triton}}
  - {variant: [nothing, hidden, one_logit], head_dim: 64, passes: backward, backward: {backend: cuda}}
  - {variant: [nothing, hidden, one_logit], head_dim: 256, passes: backward, backward: {backend: cuda}}
"""


def compiled(kernels: list[Prepared], folder: Path) -> int:
    """Compile kernels, and return how many that were."""
    artifacts, failures = compile_kernels(kernels, store=Store(folder))
    assert [str(failure.error) for failure in failures] == []
    return len(artifacts)


@pytest.mark.exhaustive
def test_all_kernels_of_constants_compile(tmp_path: Path) -> None:
    assert compiled(prepare(load_spec_text(SPEC)), tmp_path) == 11


@pytest.mark.exhaustive
def test_a_kernel_of_nothing_multiplies_nothing() -> None:
    sources = {kernel.plan.name: kernel.source.text for kernel in prepare(load_spec_text(SPEC))}
    (triton,) = (text for name, text in sources.items() if name.startswith("fwd_sm90a_tma") and "hidden" in name)
    assert "tl.dot" not in triton
    (cuda,) = (text for name, text in sources.items() if name.startswith("fwd_sm90a_wgmma") and "nothing" in name)
    assert "spans = {0, 0};" in cuda
