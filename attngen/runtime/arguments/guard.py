"""The guard of the stores that hold earlier calls."""

from __future__ import annotations

from torch import Tensor, compiler
from torch.autograd import forward_ad

from attngen.runtime.arguments import debug
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.arguments.torch_state import is_tracing, transforms_active, watching

#: Looked up once: every call asks.
_is_dynamo_compiling = compiler.is_dynamo_compiling


def may_repeat(tensor: Tensor) -> bool:
    """Whether a call with a tensor may run as an earlier one did.

    Not if the call is traced, if a transform or forward-mode differentiation may want more of it than a launch, if a
    dispatch mode watches it, or if debug checks read its tensors. Everything else on which a call depends, such as
    whether gradients are recorded, belongs to the key of a store, or to the tensors that it compares (``SeenTensors``).
    """
    return not (
        _is_dynamo_compiling()  # first: torch's compiler reads no further
        or compiler._is_compiling_flag  # both are ``is_compiling``, in half the time
        or type(tensor) not in PLAIN
        or tensor.is_meta
        or watching()
        or is_tracing()
        or transforms_active()
        or forward_ad._current_level >= 0
        or debug.depth
    )
