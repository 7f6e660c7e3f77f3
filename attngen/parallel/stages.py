"""Stages of a rank's attention: some of its rows and the keys that these see, in one call and one backward.

A stage is dense, or packed: segments of rows, each with its own keys. Packed sequences may be without rows, or without
keys: so the rows and keys of all segments may stay where they lie in larger tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.gathers import Gather, Rows, copy
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.lengths import note_lengths
from attngen.runtime.autograd.derivatives import reference_gradients
from attngen.runtime.autograd.training import differentiate, usable
from attngen.runtime.launch.prepared_backward import NOWHERE, Places
from attngen.runtime.operations.attention import largest
from attngen.runtime.operations.attention.dispatch import run


class CallOptions(NamedTuple):
    """Options of a call: all that it says beside its tensors."""

    softmax_scale: float | None = None
    backend: str | None = None
    package: str | None = None
    deterministic: bool = False
    #: (heads,) float32 that takes the largest logit of each head of what this rank computes; None: not asked for.
    max_logits: Tensor | None = None


def attended(
    given: Given, options: CallOptions, heads: tuple[int, int]
) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
    """Output and log-sum-exp of a call, and what notes its largest logits; ``heads`` are the first and the number of
    those that it computes."""
    if options.max_logits is None:
        result: Any = run(given)
        out, lse = result if given.return_lse else (result, None)
        return out, lse, lambda: None
    out, lse, rows = largest.attend_rows(run, given)
    own, place = largest.of_heads(rows, given.cu_seqlens_q), options.max_logits.narrow(0, *heads)

    def note() -> None:
        torch.maximum(place, own, out=place)

    return out, lse if given.return_lse else None, note


class HeadGroup(NamedTuple):
    """The query heads and the KV heads of a call: of each, the first and the number."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    def of(self, q: Tensor) -> Tensor:
        """The query heads of (batch, rows, heads, …)."""
        return q if q.shape[2] == self.heads[1] else q.narrow(2, *self.heads)

    def of_keys(self, k: Tensor) -> Tensor:
        """The KV heads of (batch, keys, heads, …)."""
        return k if k.shape[2] == self.kv_heads[1] else k.narrow(2, *self.kv_heads)

    def among(self, k: Tensor, group: HeadGroup) -> Tensor:
        """The KV heads of k, (batch, keys, heads, …), which has only the heads of ``group``."""
        return (
            k
            if group.kv_heads == self.kv_heads
            else k.narrow(2, self.kv_heads[0] - group.kv_heads[0], self.kv_heads[1])
        )

    def arguments(self, variant: Variant, values: Mapping[str, Any], heads: int) -> dict[str, Any]:
        """The values of a call with what tensors have for these heads."""
        own = dict(values)
        if self.heads[1] != heads:
            for name, axis, extent in of_heads(variant):
                if name in own:
                    own[name] = own[name].narrow(axis, *(self.heads if extent == "h" else self.kv_heads))
        return own

    def add(self, variant: Variant, total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of tensors that have something for each head to those of all heads."""
        axes: dict[str, list[tuple[int, str]]] = {}
        for name, axis, extent in of_heads(variant):
            axes.setdefault(name, []).append((axis, extent))
        for name, gradient in gradients.items():
            place = total[name]
            for axis, extent in axes.get(name, ()):
                start, count = self.heads if extent == "h" else self.kv_heads
                place = place.narrow(axis, start, count)
            place.add_(gradient)


def of_heads(variant: Variant) -> list[tuple[str, int, str]]:
    """Name, axis and extent of what tensors have for each head."""
    return [
        (tensor.name, axis, str(extent))
        for tensor in variant.tensors
        for axis, extent in enumerate(tensor.shape)
        if extent in ("h", "hk")
    ]


#: Offsets of the rows and keys of packed sequences, and the longest lengths.
Packing = tuple[Tensor, Tensor, int, int]


def given_of(
    qkv: Sequence[Tensor], values: Mapping[str, Any], source: Any, options: CallOptions, packing: Packing | None,
    out: Tensor | None = None,
) -> Given:  # fmt: skip
    """A dense call, or one over packed sequences."""
    q, k, v = qkv
    cu_q, cu_k, longest_q, longest_k = packing if packing is not None else (None, None, None, None)
    form, layout = ("dense", "bshd") if packing is None else ("varlen", "varlen")
    return Given(
        q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=out, arguments=values, variant=source,
        softmax_scale=options.softmax_scale, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
        deterministic=options.deterministic, form=form, layout=layout, backend=options.backend, package=options.package,
    )  # fmt: skip


def local_gradients(
    given: Given, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, asked: Sequence[str],
    into: Places = NOWHERE,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Gradients of q, k, v and of the tensors ``asked``, by a kernel, which stores the former ``into`` the tensors that
    are given, or by the reference."""
    if torch_state.on_gpu(given.q) and given.backend != "reference":
        *of_operands, every = differentiate(given, out, lse, dout, dlse, tuple(asked), into)
        return *of_operands, {name: every[name] for name in asked}
    dq, dk, dv, *own = reference_gradients(run, given, dout, dlse, asked)
    return dq, dk, dv, dict(zip(asked, own, strict=True))


class RowSelection:
    """Some rows of a rank, ascending: as a view where they follow one another, else as a copy."""

    def __init__(self, rows: np.ndarray, held: int) -> None:
        self.count, self.whole = len(rows), len(rows) == held
        self.is_run = not len(rows) or int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        self._rows, self._start = rows, int(rows[0]) if len(rows) else 0
        self._indices: dict[torch.device, Tensor] = {}

    @property
    def indices(self) -> Tensor:
        """Indices of the rows among those of the rank."""
        return torch.from_numpy(self._rows)

    def view(self, x: Tensor, dim: int) -> Tensor | None:
        """The rows as a view, if they follow one another."""
        if self.whole:
            return x
        return x.narrow(dim, self._start, self.count) if self.is_run else None

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The rows of (batch, rows, heads, head_dim), or of (batch, heads, rows) along axis 2."""
        view = self.view(x, dim)
        if view is not None:
            return view
        if dim == 2:
            return x.index_select(2, self._index(x.device))
        rows = x.new_empty((len(x), self.count, *x.shape[2:]))
        self._taken([Rows.placed(rows)], [Rows.of(x)])
        return rows

    def put(self, x: Tensor, rows: Tensor, dim: int) -> None:
        """Copy rows to where they belong, if they are not there already."""
        view = self.view(x, dim)
        if view is not None:
            if view.data_ptr() != rows.data_ptr():
                copy(view, rows)
        elif dim == 2:
            x.index_copy_(2, self._index(x.device), rows)
        else:
            self._placed([Rows.placed(x)], [Rows.of(rows)])

    @cached_property
    def _taken(self) -> Gather:
        return Gather(self.count, np.arange(self.count), self._rows)

    @cached_property
    def _placed(self) -> Gather:
        return Gather(self.count, np.arange(self.count), np.arange(self.count), self._rows)

    def _index(self, device: torch.device) -> Tensor:
        if device not in self._indices:
            self._indices[device] = torch.from_numpy(self._rows).to(device)
        return self._indices[device]


@dataclass(frozen=True, eq=False)
class Stage:
    """Some rows of a rank and their keys, in one call.

    ``lengths`` of rows and keys of each packed sequence are None for a dense call.
    """

    rows: RowSelection
    source: Any  # what calls take as their variant
    variant: Variant
    lengths: tuple[np.ndarray, np.ndarray] | None = None
    work: float = 1.0  # of a head, beside other stages
    _offsets: dict[Any, Packing] = field(default_factory=dict)

    @cached_property
    def covers_others(self) -> bool:
        """Whether a forward also writes zeros between its own rows: they are packed as sequences without keys."""
        return self.lengths is not None and bool(((self.lengths[0] > 0) & (self.lengths[1] == 0)).any())

    @cached_property
    def _gaps(self) -> Tensor:
        """The rank's rows in sequences without keys."""
        assert self.lengths is not None
        rows, keys = self.lengths
        return self.rows.indices[torch.from_numpy(np.repeat(keys == 0, rows))]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, group: HeadGroup,
        values: Mapping[str, Any], options: CallOptions,
    ) -> Callable[[], None]:  # fmt: skip
        """Compute the rows of ``out``, (batch, rows, heads, head_dim), and of ``lse``, (batch, heads, rows).

        The kernel writes ``out`` itself if the rows are one run. Everything else is copied when the result is called.
        """
        place = self.rows.view(out, 1)
        rows = None if place is None else self._packed(group.of(place))
        if (
            rows is not None
            and self.lengths is not None
            and len(q) > 1
            and rows.data_ptr() != group.of(place).data_ptr()
        ):
            rows = None  # a copy: rows of several sequences do not lie together
        given = self._given(self._packed(group.of(self.rows.of(q, 1))), self._packed(k), self._packed(v), group, values,
                            options, q.shape[0], q.shape[2], rows)  # fmt: skip
        given = given._replace(return_lse=lse is not None)
        computed, sums, note_largest = attended(given, options, group.heads)

        def copy_rows() -> None:
            note_largest()
            if rows is None:
                whole = out if out.shape[2] == group.heads[1] else out.narrow(2, *group.heads)
                self.rows.put(whole, self._dense(computed, q.shape[0]), 1)
            if lse is not None and sums is not None:
                by_batch = sums if self.lengths is None else sums.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
                self.rows.put(lse.narrow(1, *group.heads), by_batch, 2)

        return copy_rows

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        group: HeadGroup, values: Mapping[str, Any], asked: Sequence[str], options: CallOptions, into: Places = NOWHERE,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of the rows of q, of k and of v, all (batch, …, heads, head_dim), and of the tensors ``asked``.

        They are views of ``into``, where a kernel can store them there: of q this is a tensor of all rows and heads, of
        which the rows have to be one run, and of k and v one of these keys.
        """
        batch = q.shape[0]
        given = self._given(self._packed(group.of(self.rows.of(q, 1))), self._packed(k), self._packed(v), group, values,
                            options, batch, q.shape[2], None)._replace(return_lse=True)  # fmt: skip
        if asked and self.covers_others:  # a row has a sink also without keys, and would count twice
            dout = None if dout is None else dout.index_fill(1, self._gaps.to(q.device), 0)
            dlse = None if dlse is None else dlse.index_fill(2, self._gaps.to(q.device), 0)
        o, do = (None if x is None else self._packed(group.of(self.rows.of(x, 1))) for x in (out, dout))
        sums, dsums = (None if x is None else self._sums(x.narrow(1, *group.heads)) for x in (lse, dlse))
        assert o is not None
        assert sums is not None
        of_q = None if into[0] is None else self.rows.view(group.of(into[0]), 1)
        places = self._place(of_q), self._place(into[1]), self._place(into[2])
        dq, dk, dv, own = local_gradients(given, o, sums, do, dsums, asked, places)
        dq, dk, dv = (self._dense(x, batch) for x in (dq, dk, dv))
        return dq, dk, dv, own

    def _given(
        self, q: Tensor, k: Tensor, v: Tensor, group: HeadGroup, values: Mapping[str, Any], options: CallOptions,
        batch: int, heads: int, out: Tensor | None,
    ) -> Given:  # fmt: skip
        packing = None if self.lengths is None else self._packing(batch, q.device)
        return given_of((q, k, v), group.arguments(self.variant, values, heads), self.source, options, packing, out)

    def _packing(self, batch: int, device: torch.device) -> Packing:
        """Offsets of the rows and keys of each sequence, and the longest lengths."""
        if (batch, device) not in self._offsets:
            assert self.lengths is not None
            cu_q, cu_k = (
                torch.from_numpy(np.concatenate([[0], np.cumsum(np.tile(lengths, batch))]).astype(np.int32)).to(device)
                for lengths in self.lengths
            )
            note_lengths(cu_k, tuple(zip(*(np.tile(lengths, batch).tolist() for lengths in self.lengths), strict=True)))
            longest_q, longest_k = (max(int(lengths.max()), 1) for lengths in self.lengths)
            self._offsets[batch, device] = cu_q, cu_k, longest_q, longest_k
        return self._offsets[batch, device]

    def _packed(self, x: Tensor) -> Tensor:
        return x if self.lengths is None else x.flatten(0, 1)

    def _place(self, x: Tensor | None) -> Tensor | None:
        """Storage for a gradient, where a kernel can write it in place: rows of several packed sequences have to lie
        together."""
        if x is None:
            return None
        packed = self._packed(x)
        return packed if packed.data_ptr() == x.data_ptr() and usable(packed) else None

    def _dense(self, x: Tensor, batch: int) -> Tensor:
        return x if self.lengths is None else x.unflatten(0, (batch, -1))

    def _sums(self, lse: Tensor) -> Tensor:
        """The log-sum-exp of the rows, or its gradient, as calls have it."""
        sums = self.rows.of(lse, 2)
        return (sums if self.lengths is None else sums.transpose(0, 1).flatten(1)).contiguous()
