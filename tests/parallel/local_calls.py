"""Calls over the rows of each of several ranks and all keys, one after the other in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.lang.check import with_dropout
from attngen.lang.runs import TILE
from attngen.lang.variant import Variant
from attngen.parallel import local as names
from attngen.parallel.called import called
from attngen.parallel.local import Local, local_variant, own_values
from attngen.parallel.one_row import as_one_row, documents
from attngen.parallel.values import Cutter, passed
from attngen.runtime.registry.binding import find
from attngen.variants import PythonVariant
from tests.parallel.cases import Case


@dataclass(frozen=True)
class LocalCalls:
    """The calls of ``ranks``, among which tiles of rows are dealt in turn."""

    case: Case
    seqlen: int
    ranks: int
    dropout: bool = False

    @cached_property
    def whole(self) -> Variant:
        """The variant of one dense sequence."""
        stated = find(self.case.variant, None).variant
        return as_one_row(stated) if self.case.documents else stated

    @cached_property
    def local(self) -> Local:
        """The variant of rows that lie where a tensor says, and where its tensors come from."""
        return local_variant(with_dropout(self.whole) if self.dropout else self.whole, "tiles", "all")

    @cached_property
    def variant(self) -> PythonVariant:
        """The variant that is called."""
        return called(self.local.variant)

    def rows(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions of the rows of a rank."""
        place = torch.arange(self.seqlen, device=device)
        return place[place // TILE % self.ranks == rank]

    def arguments(self, rank: int, q: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        """The scalars and tensors of a rank's call."""
        offsets = self.case.cu_seqlens(self.seqlen)
        given = {**values, **({} if offsets is None else documents(offsets))}
        given = {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in given.items()}
        rows, nowhere = self.rows(rank, q.device), torch.empty(0, dtype=torch.int64)
        cutter = Cutter(self.seqlen, rows, nowhere, lambda x, axis: x, lambda x, axis: x)
        here = {
            names.ROW_POSITION: rows.to(torch.int32), names.TOKENS: self.seqlen, names.TOTAL: q.shape[0] * self.seqlen
        }  # fmt: skip
        tensors = cutter.values(self.local.cuts, given, self.case.name)
        own = {**given, **tensors, **own_values(self.whole, here)}
        return {name: own[name] for name in passed(self.local.variant) if name in own}

    def gradients(
        self, whole: list[Tensor], weight: Tensor, values: dict[str, Any], **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output and gradients of q, k and v of all ranks: rows in their places, and sums over the ranks of keys."""
        q, k, v = whole
        out, dq = torch.empty_like(weight), torch.empty_like(q)
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for rank in range(self.ranks):
            rows = self.rows(rank, q.device)
            leaves = [x.detach().clone().requires_grad_() for x in (q[:, rows], k, v)]
            arguments = {**self.arguments(rank, leaves[0], values), **options}
            ours = attngen.attention(leaves[0], leaves[1], leaves[2], variant=self.variant, **arguments)
            grads = torch.autograd.grad(ours, leaves, weight[:, rows])
            out[:, rows], dq[:, rows] = ours.detach(), grads[0]
            dk += grads[1]
            dv += grads[2]
        return out, dq, dk, dv
