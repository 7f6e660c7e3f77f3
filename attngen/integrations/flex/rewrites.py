"""Rewrites of operations that attngen's language lacks; docs/flex_attention.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A class of operations that are refused: their names in aten, the reason, and what to write instead."""

    operations: frozenset[str]
    reason: str
    instead: str


def _of(operations: str, reason: str, instead: str) -> Rewrite:
    return Rewrite(frozenset(operations.split()), reason, instead)


#: What leaves a call to torch.
_FALLBACK = "pass fallback=True for torch's FlexAttention"

#: By the name of the class.
REWRITES = {
    "search": _of(
        "searchsorted bucketize isin",
        "they loop over a tensor",
        "compute it for all positions outside of the function and index the result, as in bucket = "
        f"torch.bucketize(torch.arange(length), bounds) and bucket[q_idx]; of the score, {_FALLBACK}",
    ),
    "embedding": _of(
        "embedding embedding_bag",
        "its result is a row, where each value is one number",
        "index its weight, which keeps its gradient: embedding.weight[bucket, h] in place of embedding(bucket)[h]",
    ),
    "selection": _of(
        "index_select take take_along_dim gather select slice narrow masked_select",
        "only an index for each dimension is a gather of one number",
        "index the tensor: table[q_idx, h]",
    ),
    "reduction": _of(
        "sum nansum mean nanmean prod any all amax amin aminmax max min median argmax argmin cumsum cumprod cummax "
        "cummin logcumsumexp logsumexp sort argsort topk kthvalue mode _softmax _log_softmax linalg_vector_norm norm "
        "var std histc bincount count_nonzero equal",
        "a pair sees no other pair",
        "reduce a captured tensor outside of the function and index the result, as in total[q_idx]; what depends on "
        "both positions is a tensor that both index: table[q_idx, kv_idx]",
    ),
    "product": _of(
        "dot vdot inner mv mm bmm matmul addmm addmv baddbmm linear _trilinear",
        "a product of rows is a sum, and a pair sees no other pair",
        "compute the products outside of the function and index them, as in bias[q_idx, kv_idx], or append the factors "
        "to q and k as further columns",
    ),
    "shape": _of(
        "stack cat unsqueeze squeeze permute t transpose movedim reshape _unsafe_view repeat flatten roll flip tril "
        "triu split unbind arange one_hot diag",
        "each value is one number",
        "combine numbers by &, |, torch.where, torch.maximum and torch.minimum, and return one number",
    ),
    "special function": _of(
        "lgamma digamma polygamma mvlgamma igamma igammac erfinv i0",
        "they take tens of instructions, with branches, for each pair",
        f"capture a table of their values over positions and index it; of the score, {_FALLBACK}",
    ),
    "divisor": _of(
        "gcd lcm",
        "they loop",
        f"capture a table of the results and index it, as in table[q_idx, kv_idx], or {_FALLBACK}",
    ),
    "bits": _of(
        "nextafter frexp",
        "the language has no access to the bits of a float",
        f"compute it outside of the function where it depends on positions alone, or {_FALLBACK}",
    ),
    "rounding": _of(
        "quantize_per_tensor fake_quantize_per_tensor_affine dequantize",
        "expressions compute in float32",
        f"leave the rounding out, round a captured tensor outside of the function, or {_FALLBACK}",
    ),
    "complex": _of(
        "complex polar view_as_complex view_as_real _conj imag",
        "the language has no complex numbers",
        "write the real and the imaginary part as two numbers",
    ),
    "random": _of(
        "rand rand_like randn randn_like randint randint_like randperm bernoulli rrelu native_dropout normal",
        "random numbers differ from call to call",
        "attngen.attention has dropout_p; or capture a tensor of random numbers and index it",
    ),
}

#: For any other operation.
_OTHER = f"compute it outside of the function, capture the result and index it, or {_FALLBACK}"


def instead_of(name: str) -> str:
    """Rewrite of an operation by its name, as a refusal says it."""
    known = "special function" if name.startswith("special_") else None
    rows = (row.instead for of, row in REWRITES.items() if name in row.operations or of == known)
    return next(rows, _OTHER)
