"""Results that CUDA kernels compute less exactly than those in Triton."""

from __future__ import annotations

from attngen.plan.choices import refuse
from attngen.schema.kernel_spec import KernelSpec


def keep_promises(spec: KernelSpec) -> None:
    """Refuse what this backend computes less exactly than another; a spec must name the backend to accept that."""
    if not spec.fast_math:
        raise refuse(
            spec, "fast_math", "CUDA kernels fuse the argument of exp2 all the same; say 'backend: cuda' to accept that"
        )
