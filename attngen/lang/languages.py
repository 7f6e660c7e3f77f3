"""The languages that expressions are emitted in, each with its dialect."""

from __future__ import annotations

import enum

from attngen.lang.cuda_target import CudaDialect
from attngen.lang.targets import Dialect
from attngen.lang.triton_target import TritonDialect


class Target(enum.Enum):
    """A language that expressions are emitted in."""

    TRITON = "triton"
    CUDA = "cuda"

    @property
    def dialect(self) -> Dialect:
        """Rules that write each node in this language."""
        return TritonDialect() if self is Target.TRITON else CudaDialect()
