"""The shipped presets are known without a build, and to the reference alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.inspect.cases import Case
from attngen.inspect.values import arguments_of
from attngen.runtime.registry.presets import preset, preset_names
from attngen.schema import preset as of_spec
from attngen.schema import preset_names as names_of_specs
from tests.runtime.support import FakeDriver
from tests.sampling import few


def test_presets_are_those_of_the_specs() -> None:
    assert preset_names() == names_of_specs()
    for name in preset_names():
        assert preset(name) == of_spec(name)
    assert preset("span") is None  # of an integration
    assert preset("nothing") is None


@few("name", names_of_specs(), always=range(0, 999, 3))
def test_each_runs_on_the_cpu(name: str) -> None:
    """Dense, packed and, where the variant may, in pages; with the values that the same variant as a value gets."""
    variant = preset(name)
    assert variant is not None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16, 2, 16) for _ in range(3))
    own = arguments_of(variant, Case("one", (16,), (16,), kv_heads=2), "dense", torch.Generator().manual_seed(0))
    wanted = attngen.attention(q, k, v, variant=variant, **own)
    assert wanted.isfinite().all()
    assert torch.equal(attngen.attention(q, k, v, variant=name, **own), wanted)
    starts = torch.tensor([0, 16], dtype=torch.int32)
    packed = attngen.attention_varlen(q[0], k[0], v[0], starts, starts, 16, 16, variant=name, **own)
    torch.testing.assert_close(packed[None], wanted)
    if variant.packed_keys() is None:
        table, used = torch.tensor([[0]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
        torch.testing.assert_close(attngen.attention_paged(q, k, v, table, used, variant=name, **own), wanted)


@pytest.mark.exhaustive
def test_a_fresh_installation_needs_no_part_of_the_build(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('yaml', 'pydantic', 'jinja2', 'cupy'):\n"
        "    sys.modules[name] = None  # an import of it fails\n"
        "import torch, attngen\n"
        "q = torch.randn(1, 8, 2, 16)\n"
        "call = lambda q: attngen.attention(q, q, q, variant='causal')\n"
        "traced = torch.compile(call, backend='eager', fullgraph=True)\n"
        "assert torch.equal(traced(q), attngen.attention(q, q, q, variant='causal'))\n"
        "try:\n    attngen.variant('q_pos >= kv')\n"
        "except attngen.errors.SpecError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "ATTNGEN_CACHE": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "which is not installed: pip install 'attngen[build]'" in done.stdout


def test_an_unknown_preset_is_refused_with_the_nearest_one() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NoKernelError, match="no kernel of variant 'casual' is built; did you mean 'causal'"):
        attngen.attention(q, q, q, variant="casual")
    with pytest.raises(CallError, match="missing 'window'"):
        attngen.attention(q, q, q, variant="sliding_window")


def test_on_a_gpu_a_preset_without_kernels_says_what_to_build(gpu: FakeDriver) -> None:
    q = torch.randn(1, 8, 2, 64).bfloat16()
    with pytest.raises(NoKernelError, match="(?s)no kernel of this variant is built.*variant: causal"):
        attngen.attention(q, q, q, variant="causal")
