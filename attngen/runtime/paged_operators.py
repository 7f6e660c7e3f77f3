"""The operators of ``torch.library`` of calls whose keys lie in pages, two for each variant.

``<variant>__paged`` returns (out, lse); ``<variant>__paged_out`` writes an output that the caller allocated, and
returns lse. Neither has a derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime import paged
from attngen.runtime.operators import SCALAR_SCHEMAS, TAGS, Signature, resolved

#: Arguments before the variant's own, and after them.
_LEADING = (
    "Tensor q", "Tensor k_pages", "Tensor v_pages", "Tensor page_table", "Tensor seqused_k", "Tensor? cu_seqlens_q",
    "SymInt? max_seqlen_q",
)  # fmt: skip
_TRAILING = (
    "float? softmax_scale", "str page_layout", "SymInt? num_splits", "SymInt? split_size", "str? backend",
)  # fmt: skip


def schema_of(variant: Variant, *, given: bool) -> str:
    """Return the arguments and results of an operator in torch's schema language; ``given``: it is told its output."""
    own = [f"Tensor {t.name}" for t in variant.tensors]
    own += [f"{SCALAR_SCHEMAS[s.dtype]} {s.name}" for s in variant.arguments]
    parts = ["Tensor(a!) out"] * given + [*_LEADING, *own, *_TRAILING]
    return f"({', '.join(parts)}) -> {'Tensor' if given else '(Tensor out, Tensor lse)'}"


def define(library: torch.library.Library, name: str, full_name: str, variant: Variant, signature: Signature) -> None:
    """Define both operators of a variant, whose kernels are those of ``full_name``."""
    calls = _Calls(full_name, signature)
    plain, given = f"{name}__paged", f"{name}__paged_out"
    library.define(plain + schema_of(variant, given=False), tags=TAGS)
    library.define(given + schema_of(variant, given=True), tags=TAGS)
    for key in ("CPU", "CUDA"):
        library.impl(plain, calls.forward, key)
        library.impl(given, calls.forward_into, key)
    torch.library.register_fake(f"{library.ns}::{plain}", calls.fake_forward, lib=library)
    torch.library.register_fake(f"{library.ns}::{given}", calls.fake_forward_into, lib=library)
    torch.library.register_autograd(
        f"{library.ns}::{plain}", calls.refuse, setup_context=calls.setup_context, lib=library
    )


class _Calls:
    """The implementations of both operators."""

    def __init__(self, full_name: str, signature: Signature) -> None:
        self.full_name = full_name
        self._names = (*signature.tensors, *signature.scalars)

    def _run(self, out: Tensor | None, arguments: tuple[Any, ...]) -> Any:
        start, end = len(_LEADING), len(_LEADING) + len(self._names)
        own = dict(zip(self._names, arguments[start:end], strict=True))
        scale, page_layout, num_splits, split_size, backend = arguments[end:]
        q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q = arguments[:start]
        return paged.run(
            q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, self.full_name, scale, page_layout,
            num_splits, split_size, out, True, backend, None, own,
        )  # fmt: skip

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the call."""
        out, lse = self._run(None, arguments)
        return out, lse.to(torch.float32)

    def forward_into(self, out: Tensor, *arguments: Any) -> Tensor:
        """Run the call into a given output, and return the log-sum-exp."""
        lse: Tensor = self._run(out, arguments)[1]
        return lse.to(torch.float32)

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return results of the right shapes and strides, for tracing."""
        q, v_pages = arguments[0], arguments[2]
        return q.new_empty((*q.shape[:-1], v_pages.shape[-1])), self._fake_lse(q)

    def fake_forward_into(self, out: Tensor, *arguments: Any) -> Tensor:
        """Return a log-sum-exp of the right shape and strides, for tracing."""
        return self._fake_lse(arguments[0])

    def _fake_lse(self, q: Tensor) -> Tensor:
        if q.dim() == 3:
            return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return q.new_empty((q.shape[2], q.shape[0], q.shape[1]), dtype=torch.float32).transpose(0, 1)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing: there is no backward."""

    def refuse(self, ctx: Any, *gradients: Tensor | None) -> Any:
        """Refuse a derivative."""
        raise CallError(f"{self.full_name}: keys in pages have no backward; torch.no_grad() tells that none is wanted")


def call(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: Any,
    variant: str | Variant,
    softmax_scale: Any,
    page_layout: str,
    num_splits: Any,
    split_size: Any,
    out: Tensor | None,
    return_lse: bool,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
) -> Any:
    """Call the operator of a variant; what is traced is this function and nothing below it. Raises CallError."""
    operators, name, own = resolved(variant, package, arguments, q)
    given = (
        q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, *own, softmax_scale, page_layout,
        num_splits, split_size, backend,
    )  # fmt: skip
    if out is None:
        result, lse = getattr(operators, name + "__paged")(*given)
    else:
        result, lse = out, getattr(operators, name + "__paged_out")(out, *given)
    return (result, lse) if return_lse else result
