"""Source → Artifact: a cubin, its manifest, and the texts between.

Importing this package imports no compiler; ``compile_source`` does, when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.compile.artifact import Artifact
from attngen.errors import ChoiceError, CompileError

if TYPE_CHECKING:
    from attngen.plan.model import Plan
    from attngen.render import Source

__all__ = ["Artifact", "compile_source"]


def compile_source(plan: Plan, source: Source) -> Artifact:
    """Compile a rendered kernel for the architecture of its plan; needs no GPU and no torch.

    Raises ChoiceError if the compiler rejects the source, or if its result breaks a rule of the plan: too much shared
    memory, or a spill or a serialized wgmma in a Hopper kernel whose spec does not allow it. Another plan may compile.
    Raises ToolchainError if the compiler is missing or does not work, and CompileError for other faults.
    """
    try:
        return _compile(plan, source)
    except ChoiceError:
        from attngen.compile.probe import require_working

        require_working(source.backend, plan.arch.name)  # a broken compiler is no reason to refuse a plan
        raise


def _compile(plan: Plan, source: Source) -> Artifact:
    if source.backend == "triton":
        from attngen.compile.triton import compile_triton

        return compile_triton(plan, source)
    if source.backend == "cuda":
        from attngen.compile.cuda import compile_cuda

        return compile_cuda(plan, source)
    raise CompileError(f"{plan.name}: no compiler for backend '{source.backend}'; there are those for triton and cuda")
