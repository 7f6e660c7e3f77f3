"""FLOPs of operators, as ``torch.utils.flop_counter`` counts them: all pairs of queries and keys, whatever the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.latent_rows import value_columns

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Columns of the products of a pair: S and O, or S again, dP, dV, dQ and dK.
_FORWARD = (1, 1)
_BACKWARD = (3, 2)


GivenOf = Callable[[tuple[object, ...]], Given]


def count_forward(operator: OpOverload, given_of: GivenOf, first: int = 0) -> None:
    """Register the FLOPs of a forward operator; ``given_of`` makes a call of its arguments from ``first`` on."""
    _register(operator, given_of, first, _FORWARD)


def count_backward(operator: OpOverload, given_of: GivenOf, first: int) -> None:
    """Register the FLOPs of a backward operator."""
    _register(operator, given_of, first, _BACKWARD)


def _register(operator: OpOverload, given_of: GivenOf, first: int, products: tuple[int, int]) -> None:
    def flops(*arguments: object, out_val: object = None, **_: object) -> int:
        given = given_of(arguments[first:])
        of_qk, of_v = products
        return 2 * _pairs(given) * (of_qk * given.q.shape[-1] + of_v * value_columns(given.v))

    register_flop_formula(operator, get_raw=True)(flops)


def _pairs(given: Given) -> int:
    """Pairs of queries and keys of all heads. Reads lengths that only tensors hold, which waits for a GPU."""
    q, k = given.q, given.k
    heads = q.shape[1 if given.layout == "bhsd" or q.dim() == 3 else 2]
    if given.form == "dense":
        rows, keys = (2, 2) if given.layout == "bhsd" else (1, 1)
        return int(q.shape[0] * heads * q.shape[rows] * k.shape[keys])
    queries = q.shape[1] if given.cu_seqlens_q is None else given.cu_seqlens_q.diff()
    lengths: Tensor = given.seqused_k if given.cu_seqlens_k is None else given.cu_seqlens_k.diff()
    if lengths.is_meta:
        table: Tensor = given.page_table
        most = given.max_seqlen_k or table.shape[1] * k.shape[1 if given.layout == "NHD" else 2]
        return int(heads * len(lengths) * (given.max_seqlen_q or q.shape[1]) * most)
    return int(heads * (queries * lengths.long()).sum())
