"""The operators of ``torch.library`` that score keys, ``keys__index_scores``, and blocks of them,
``keys__block_scores``, in the namespace of this runtime.

No variant can have their names. They take the variant by name, and its arguments as names, tensors and numbers. Scores
are a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.operations.index_scores.arguments import IndexScores
from attngen.runtime.operations.index_scores.kernel import SCORES
from attngen.runtime.operations.shared.library import define_once
from attngen.runtime.registry.lookup import registry

NAME = "keys__index_scores"
BLOCKS = "keys__block_scores"
NAMES = (NAME, BLOCKS)

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor weights, Tensor? k_scale, Tensor? seqused_k, Tensor? page_table, str variant, "
    "str? package, str[] tensor_names, Tensor[] tensors, str[] scalar_names, Scalar[] scalars, "
    "Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None) -> Tensor"
)

_SCHEMA_OF_BLOCKS = (
    "(Tensor q, Tensor k, int block, Tensor? seqused_k, Tensor? page_table, str variant, str? package, "
    "str[] tensor_names, Tensor[] tensors, str[] scalar_names, Scalar[] scalars, Tensor? cu_seqlens_q, "
    "SymInt? max_seqlen_q) -> Tensor"
)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operators at the first use, and return their namespace."""
    define_once(BLOCKS, _SCHEMA_OF_BLOCKS, _score_blocks, fake=_like_blocks)
    return define_once(NAME, _SCHEMA, _score, fake=_like)


def _call_of(arguments: tuple[Any, ...]) -> IndexScores:
    q, k, weights, k_scale, used, table, variant, package, *own = arguments
    tensor_names, tensors, scalar_names, scalars, starts, longest = (*own, None, None)[:6]
    passed = (*zip(tensor_names, tensors, strict=True), *zip(scalar_names, scalars, strict=True))
    return IndexScores(q, k, weights, k_scale, used, starts, table, None, longest, variant, package, passed)


def _score(*arguments: Any) -> Tensor:
    return SCORES.run(_call_of(arguments))


def _score_blocks(*arguments: Any) -> Tensor:
    q, k, block, used, table, variant, package, tensor_names, tensors, scalar_names, scalars, starts, longest = (
        arguments
    )
    passed = (*zip(tensor_names, tensors, strict=True), *zip(scalar_names, scalars, strict=True))
    call = IndexScores(q, k, None, None, used, starts, table, None, longest, variant, package, passed, block)
    return SCORES.run(call)


def _like_blocks(*arguments: Any) -> Tensor:
    """Scores of blocks of the right shape, for tracing."""
    q, k, block, _, page_table, *_ = arguments
    keys = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    shape = (*q.shape[:-1], (keys + block - 1) // block)
    return q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _like(*arguments: Any) -> Tensor:
    """Scores of the right shape, for tracing."""
    q, k, _, _, _, page_table, *_ = arguments
    keys = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    return q.new_empty((*q.shape[:-2], keys), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.compiler.assume_constant_result
def _name_of(variant: str | Variant) -> str:
    return variant if isinstance(variant, str) else registry.declare(variant)


def call(given: IndexScores) -> Tensor:
    """Call the operator."""
    tensors = [(name, value) for name, value in given.arguments if isinstance(value, Tensor)]
    scalars = [(name, value) for name, value in given.arguments if not isinstance(value, Tensor)]
    if any(not isinstance(value, int | float | bool) for _, value in scalars):
        raise CallError("arguments of a variant are tensors and numbers")
    own = (
        [name for name, _ in tensors], [value for _, value in tensors], [name for name, _ in scalars],
        [value for _, value in scalars], given.cu_seqlens_q, given.max_seqlen_q,
    )  # fmt: skip
    described = (given.page_table, _name_of(given.variant), given.package, *own)
    operators = getattr(torch.ops, defined())
    if given.block is None:
        scores: Tensor = getattr(operators, NAME)(*given[:5], *described)
    else:
        scores = getattr(operators, BLOCKS)(given.q, given.k, given.block, given.seqused_k, *described)
    return scores
