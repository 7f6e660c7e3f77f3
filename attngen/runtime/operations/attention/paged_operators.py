"""The operators of ``torch.library`` of calls whose keys lie in pages, two for each variant.

``<variant>__paged`` returns (out, lse); ``<variant>__paged_out`` writes an output that the caller allocated, and
returns lse. Neither has a derivative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import lse_dtype_of, out_dtype_of
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.latent_rows import value_columns
from attngen.runtime.operations.attention import at_trace, dispatch, flops
from attngen.runtime.operations.attention.signature import Signature, parameters_of
from attngen.runtime.operations.shared.sharding import Sharded, register
from attngen.runtime.operations.shared.tags import TAGS

if TYPE_CHECKING:
    from attngen.runtime.autograd.context import Context

#: Suffixes of both names: of the operator that allocates its output, and of the other.
SUFFIX = "__paged"
INTO = "__paged_out"


def schema_of(variant: Variant, *, given: bool) -> str:
    """Return the arguments and results of an operator in torch's schema language; ``given``: it is told its output."""
    parameters = parameters_of(variant, "paged")
    return f"(Tensor(a!) out, {parameters}) -> Tensor" if given else f"({parameters}) -> (Tensor out, Tensor lse)"


def define(library: torch.library.Library, name: str, full_name: str, variant: Variant, signature: Signature) -> None:
    """Define both operators of a variant, whose kernels are those of ``full_name``."""
    calls = _PagedCalls(full_name, signature)
    plain, given = name + SUFFIX, name + INTO
    library.define(plain + schema_of(variant, given=False), tags=TAGS)
    library.define(given + schema_of(variant, given=True), tags=TAGS)
    for key in ("CPU", "CUDA"):
        library.impl(plain, calls.forward, key)
        library.impl(given, calls.forward_into, key)
    torch.library.register_fake(f"{library.ns}::{plain}", calls.fake_forward, lib=library)
    torch.library.register_fake(f"{library.ns}::{given}", calls.fake_forward_into, lib=library)
    for packet, first in ((plain, 0), (given, 1)):
        operator = getattr(getattr(torch.ops, library.ns), packet)
        flops.count_forward(operator, calls.given, first)
        register(operator.default, Sharded(operator.default, variant, "paged").strategy)
    torch.library.register_autograd(
        f"{library.ns}::{plain}", calls.refuse, setup_context=calls.setup_context, lib=library
    )


class _PagedCalls:
    """The implementations of both operators."""

    def __init__(self, full_name: str, signature: Signature) -> None:
        self.full_name = full_name
        self.signature = signature

    def given(self, arguments: tuple[object, ...]) -> Given:
        """Return the call that an operator is asked for."""
        return self.signature.given(self.full_name, "paged", arguments)

    def forward(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """Run the call."""
        out, lse = dispatch.run(self.given(arguments))
        return out, lse

    def forward_into(self, out: Tensor, *arguments: object) -> Tensor:
        """Run the call into a given output, and return the log-sum-exp."""
        lse: Tensor = dispatch.run(self.given(arguments)._replace(out=out))[1]
        return lse

    def fake_forward(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """Return results of the right shapes and strides, for tracing."""
        given = self.given(arguments)
        at_trace.prepare(given, torch_state.on_gpu)
        q = given.q
        out = q.new_empty((*q.shape[:-1], value_columns(given.v)), dtype=out_dtype_of(q.dtype))
        return out, self._fake_lse(q)

    def fake_forward_into(self, out: Tensor, *arguments: object) -> Tensor:
        """Return a log-sum-exp of the right shape and strides, for tracing."""
        given = self.given(arguments)
        at_trace.prepare(given._replace(out=out), torch_state.on_gpu)
        return self._fake_lse(given.q)

    def _fake_lse(self, q: Tensor) -> Tensor:
        if q.dim() == 3:
            return q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype_of(q.dtype))
        return q.new_empty((q.shape[2], q.shape[0], q.shape[1]), dtype=lse_dtype_of(q.dtype)).transpose(0, 1)

    def setup_context(self, ctx: Context, inputs: tuple[object, ...], output: object) -> None:
        """Keep nothing: there is no backward."""

    def refuse(self, ctx: Context, *gradients: Tensor | None) -> NoReturn:
        """Refuse a derivative."""
        raise CallError(f"{self.full_name}: attention over pages has no backward; call it under torch.no_grad()")
