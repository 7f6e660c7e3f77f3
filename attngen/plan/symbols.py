"""Names in kernels of everything that a user names: a namespace of its own, the same in all target languages.

Names of scalars, tensors and ``let`` values, and of the temporaries of a user's expressions, begin with ``PREFIX``.
Nothing that a template, a header or a compiler defines does, so that no name of a spec meets another meaning: no name
of a kernel, no macro, no word of C++ or Python. What belongs to a tensor follows the rule by which kernels name what
belongs to theirs: as ``stride_q_h``, so ``stride_u_doc_0``. Dropout's rate and state, and the lists of keys, are
arguments that templates name and no spec declares: they have no prefix.
"""

from __future__ import annotations

from attngen.lang.divisors import Divisor
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.listed import EXTRA_INDICES, EXTRA_K, EXTRA_TOPK_LENGTH, INDICES, TOPK_LENGTH
from attngen.lang.variant import Tensor

#: Prefix of every user's name in a kernel.
PREFIX = "u_"

_OF_KERNELS = frozenset({
    DROPOUT_P.name, RNG_STATE.name, INDICES.name, TOPK_LENGTH.name, EXTRA_K.name, EXTRA_INDICES.name,
    EXTRA_TOPK_LENGTH.name,
})  # fmt: skip


def argument_name(name: str) -> str:
    """Return the name of a variant's scalar in the kernel."""
    return name if name in _OF_KERNELS else f"{PREFIX}{name}"


def divisor_name(divisor: Divisor) -> str:
    """Return the name of the argument by which a kernel divides: ``by_u_chunk``."""
    return f"by_{PREFIX}{divisor.name}"


def pointer_name(tensor: str) -> str:
    """Return the name of the argument that holds a tensor's address."""
    return f"{tensor}_ptr" if tensor in _OF_KERNELS else f"{PREFIX}{tensor}"


def map_name(tensor: str) -> str:
    """Return the name of the argument that holds the tensor map of a tensor."""
    return f"map_{argument_name(tensor)}"


def strides(tensor: Tensor) -> list[str]:
    """Return the stride of each axis as kernels write it: the last one is contiguous, so that loads are vectors."""
    rank = len(tensor.shape)
    return [f"stride_{argument_name(tensor.name)}_{axis}" for axis in range(rank - 1)] + ["1"] * (rank > 0)


def extent_name(tensor: Tensor, axis: int) -> str:
    """Return the name of the argument that holds a tensor's extent."""
    return f"extent_{argument_name(tensor.name)}_{axis}"


def gradient_pointer(tensor: str) -> str:
    """Return the name of the argument that holds the address of a tensor's gradient."""
    return f"gradient_{argument_name(tensor)}"


def stored_name(tensor: str) -> str:
    """Name of the flag whether a tensor's gradient is stored in the tensor's dtype, once for each entry; else it is
    added to sums in float32."""
    return f"stored_{argument_name(tensor)}"


def cleared_name(tensor: str) -> str:
    """Name of the flag whether a kernel also clears the entries of a stored gradient that no step stores."""
    return f"cleared_{argument_name(tensor)}"
