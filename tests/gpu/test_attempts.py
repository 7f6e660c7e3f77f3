"""What the plan tries where its first choice does not compile cleanly: each choice is a kernel that keeps its contract.

All attempts are compiled and run here, though most of them are never needed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.compile.triton import UNCHECKED_CODE, WRONG_CODE
from attngen.plan.attempts import attempts
from attngen.render import render
from attngen.runtime.module import read_kernel
from attngen.schema import expand, load_spec
from attngen.store.store import Store
from attngen.tools.build.pipeline import BuiltKernel, Prepared, compile_kernels
from attngen.tools.verify.gpu import try_pinned

SPEC = Path(__file__).with_name("attempts.yaml")


def planned() -> dict[str, Prepared]:
    """Return every attempt at each kernel by the name of its plan."""
    kernels = expand(load_spec(SPEC))
    return {plan.name: Prepared(kernel, plan, render(plan)) for kernel in kernels for plan in attempts(kernel)}


@cache
def compiled() -> dict[str, BuiltKernel | str]:
    """Compile all attempts at once; one that could not be compiled is there by its error."""
    built, failures = compile_kernels(list(planned().values()), store=Store())
    return built | {failure.name: str(failure.error) for failure in failures}


@pytest.mark.parametrize("name", planned())
def test_every_attempt_keeps_its_contract(name: str) -> None:
    kernel = compiled()[name]
    assert not isinstance(kernel, str), kernel
    if kernel.refused:
        known = (WRONG_CODE, UNCHECKED_CODE, "shared memory")
        assert all(any(why in row["reason"] for why in known) for row in kernel.refused)
        pytest.skip(f"refused: {kernel.refused[0]['reason']}")
    trial = try_pinned(read_kernel(Store().path(kernel.key)), torch.device("cuda", 0), 30_000, small=True)
    assert trial.problems == ()
