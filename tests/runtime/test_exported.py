"""Programs of ``torch.export`` in a process that has made no call: their operators are defined when they are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.resources import root
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import kernel, variant, window_variant
from tests.sampling import few


class Model(torch.nn.Module):
    """One call of attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attngen.attention(q, k, v, **self.options)


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    return tuple(torch.randn(1, 8, 2, 16) for _ in range(3))


def install(package: str, *chosen: Any) -> None:
    registry.add(package_of_kernels([kernel(one, package=package) for one in chosen], "memory"))


def save(path: Path, **options: Any) -> torch.Tensor:
    """Export a call, and return its result."""
    model = Model(**options)
    torch.export.save(torch.export.export(model, tensors()), path)
    return model(*tensors())


@few("modules", ["attngen, torch", "torch, attngen"], always=0, often=(0,))
def test_a_fresh_process_loads_a_program(modules: str, tmp_path: Path) -> None:
    wanted = save(tmp_path / "program.pt2", variant="sliding_window", window=3)
    torch.save((tensors(), wanted), tmp_path / "tensors.pt")
    program = (
        f"import {modules}\n"
        f"given, wanted = torch.load({str(tmp_path / 'tensors.pt')!r})\n"
        f"out = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()(*given)\n"
        "assert torch.equal(out, wanted)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_operators_of_a_package_are_defined_when_they_are_named() -> None:
    install("lazy", window_variant("narrow"), variant("plain"))
    q, k, v = tensors()
    assert "narrow" not in torch.ops.attngen_lazy.__dict__
    out, _ = torch.ops.attngen_lazy.narrow(q, k, v, 3, None, None, None, "bshd", None)
    assert torch.equal(out, attngen.attention(q, k, v, variant="narrow", window=3))
    for name in ("plain__backward", "plain__paged_out", "plain__paged", "plain__varlen", "plain"):
        assert hasattr(torch.ops.attngen_lazy, name)
    assert attngen.define_operators("lazy/plain") == ("attngen_lazy::plain",)
    assert hasattr(torch.ops.attngen, "kv__append")
    assert hasattr(torch.ops.attngen, "qkv__quantize")
    assert hasattr(torch.ops.attngen, "dropout__state")


def test_a_preset_has_an_operator_beside_that_of_a_package() -> None:
    """A program that was exported where the package is not built."""
    install("has_preset", variant("prefix_lm", "q_pos >= kv"))
    assert hasattr(torch.ops.attngen_variants, "prefix_lm")
    assert hasattr(torch.ops.attngen_has_preset, "prefix_lm")


def test_missing_packages_and_variants_are_named_with_advice(tmp_path: Path) -> None:
    install("gone", variant("lost"))
    save(tmp_path / "program.pt2", variant="lost")
    registry.clear()
    install("here", variant("kept"))
    renamed = (tmp_path / "program.pt2").read_bytes()
    assert b"torch.ops.attngen_gone.lost" in renamed
    (tmp_path / "other.pt2").write_bytes(renamed.replace(b"attngen_gone.lost", b"attngen_gone.lust"))
    advice = (
        r"no operator attngen_gone::lust: no variant 'lust' is known; build the spec of package 'gone', or "
        r"attngen.load it, or call define_operators\(\) of its wheel. Built: here/kept"
    )
    with pytest.warns(RuntimeWarning, match=advice), pytest.raises(RuntimeError):
        torch.export.load(tmp_path / "other.pt2")
    with pytest.warns(RuntimeWarning, match="by attngen.variant"), pytest.raises(AttributeError, match="mine__0123"):
        _ = torch.ops.attngen_variants.mine__0123
    with pytest.raises(AttributeError):
        _ = torch.ops.attngen_gone.__wrapped__
    assert not hasattr(torch.ops.no_such_namespace, "anything")
