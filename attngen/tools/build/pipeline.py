"""The earlier path of ``attngen.build.pipeline``, kept for programs that import it."""

from attngen.build.pipeline import (
    BuildReport,
    Repeated,
    build,
    compile_kernels,
    each_once,
    plan_each,
    plans,
    prepare,
    prepare_each,
)

__all__ = [
    "BuildReport",
    "Repeated",
    "build",
    "each_once",
    "prepare",
    "prepare_each",
    "plans",
    "plan_each",
    "compile_kernels",
]
