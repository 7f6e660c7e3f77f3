"""Derivatives of attention in plain torch: gradients by the reference, tangents, and derivatives of gradients.

A few query rows at a time, in float32 (float64 for float64 inputs), so that memory stays bounded. What transforms of
torch.func are given here depends on no values: it composes with any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments.checked import Call, Results
from attngen.runtime.arguments.given import TENSORS, Given, tensors_of
from attngen.runtime.arguments.torch_state import recordable, recording
from attngen.runtime.reference.eager import (
    CHUNK_ELEMENTS,
    CHUNK_ELEMENTS_ELSEWHERE,
    attend_rows,
    joined,
    lengths,
    one_sequence,
    without_keys,
)
from attngen.runtime.registry.binding import bind_call

_LEADING = ("q", "k", "v")


def reference_gradients(
    run: Callable[[Given], Results], given: Given, dout: Tensor | None, dlse: Tensor | None, asked: Sequence[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and of the variant's tensors ``asked`` by autograd of the reference.

    ``run`` gives (out, lse); ``dout`` and ``dlse`` are their gradients, None for none.
    """
    with recording():
        own: dict[str, Tensor] = {name: recordable(value) for name, value in given.arguments.items()}
        others: dict[str, Tensor] = {
            name: recordable(tensor) for name, tensor in zip(TENSORS, tensors_of(given), strict=True)
        }
        q, k, v = inputs = [others[name].detach().requires_grad_() for name in _LEADING]
        learned = {name: own[name].detach().requires_grad_() for name in asked}
        inputs += learned.values()
        if dout is None and dlse is None:
            return tuple(torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        results = run(given._replace(**{**others, "q": q, "k": k, "v": v}, arguments={**own, **learned}))
        pairs = [(result, above) for result, above in zip(results, (dout, dlse), strict=True) if above is not None]
        outputs, gradients = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, inputs, gradients, materialize_grads=True)
    return tuple(gradient.contiguous() for gradient in grads)


class Plain:
    """A call as a function of q, k, v and those of the variant's own tensors that have derivatives (``names``)."""

    def __init__(self, given: Given, names: Sequence[str]) -> None:
        self._enter(bind_call(given)[0], given.q, names)

    @classmethod
    def of_call(cls, call: Call, q: Tensor) -> Plain:
        """A call that was checked, as a function of q, k and v, of which this q has the dtype of the arithmetic."""
        plain = cls.__new__(cls)
        plain._enter(call, q, ())
        return plain

    def _enter(self, call: Call, q: Tensor, names: Sequence[str]) -> None:
        self._call, self._q = call, q
        if call.descales:
            raise CallError(f"{call.variant.name}: quantized tensors have no derivative")
        self.names = (*_LEADING, *names)
        self._dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._places = lengths(call)

    def raised(self, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors in the dtype of the arithmetic; zeros like the others where there is none."""
        pairs = zip(tensors, like, strict=True)
        return tuple(torch.zeros_like(b, dtype=self._dtype) if a is None else a.to(self._dtype) for a, b in pairs)

    def tangents(
        self, inputs: Sequence[Tensor], directions: Sequence[Tensor | None], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tangents of out, in its dtype unless another is given, and of its log-sum-exp, from those of the
        inputs."""
        leaves, moved = self.raised(inputs, inputs), self.raised(directions, inputs)
        parts = []
        for chunk in self._chunks():
            parts.append((chunk[0], pushforward(self._rows(chunk), leaves, moved)))
        return self._joined(parts, dtype)

    def gradients_of_tangents(
        self, inputs: Sequence[Tensor], directions: Sequence[Tensor | None], above: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of ``inputs``, and of the ``directions`` of the first three, from those of their
        tangents."""
        given = (*inputs, *self._directions(inputs, directions))
        results, pull = torch.func.vjp(self._tangents(len(inputs)), *self.raised(given, given))
        grads = pull(self._like(above, results))
        return tuple(a.to(b.dtype) for a, b in zip(grads, given, strict=True))

    def moved_tangents(
        self, inputs: Sequence[Tensor], directions: Sequence[Tensor | None], moved: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return the tangents of ``tangents``; ``moved`` are those of ``inputs``, and of the ``directions`` of the
        first three."""
        given = (*inputs, *self._directions(inputs, directions))
        out, lse = pushforward(self._tangents(len(inputs)), self.raised(given, given), self.raised(moved, given))
        return out, lse

    def _tangents(self, count: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function from ``count`` inputs, and directions of the first three, to tangents."""

        def moved(*given: Tensor) -> tuple[Tensor, Tensor]:
            return self.tangents(given[:count], [*given[count:], *[None] * (count - 3)])

        return moved

    @staticmethod
    def _directions(inputs: Sequence[Tensor], directions: Sequence[Tensor | None]) -> list[Tensor]:
        """Zeros where there is no direction."""
        pairs = zip(directions, inputs, strict=False)
        return [torch.zeros_like(like) if one is None else one for one, like in pairs]

    @staticmethod
    def _like(tensors: Sequence[Tensor | None], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors in the dtypes of results, zeros where there is none."""
        pairs = zip(tensors, results, strict=True)
        return tuple(torch.zeros_like(b) if a is None else a.to(b.dtype) for a, b in pairs)

    def moved_gradients(
        self, inputs: Sequence[Tensor], above: Sequence[Tensor], directions: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Return the tangents of the gradients of ``inputs``; ``directions`` are those of ``above``, which are the
        gradients of out and log-sum-exp, and of the inputs."""
        leaves, over = self.raised(inputs, inputs), self.raised(above, above)
        given, moved = (*over, *leaves), self.raised(directions, (*above, *inputs))
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for chunk in self._chunks():
            parts = [(*self._above(chunk, *both[:2]), *both[2:]) for both in (given, moved)]
            tangents = pushforward(self._gradients(chunk), *parts)
            total = [a + b for a, b in zip(total, tangents, strict=True)]
        return tuple(a.to(b.dtype) for a, b in zip(total, inputs, strict=True))

    def second(
        self, inputs: Sequence[Tensor], above: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of ``above``, which are those of out and log-sum-exp, and of ``inputs``, from those of
        the gradients of the inputs."""
        leaves, over = self.raised(inputs, inputs), self.raised(above, above)
        wanted = self.raised(cotangents, inputs)
        total, parts = [torch.zeros_like(leaf) for leaf in leaves], []
        for chunk in self._chunks():
            _, pull = torch.func.vjp(self._gradients(chunk), *self._above(chunk, *over), *leaves)
            dout, dlse, *grads = pull(wanted)
            parts.append((chunk[0], (dout, dlse)))
            total = [a + b for a, b in zip(total, grads, strict=True)]
        grads = (*self._joined(parts, above[0].dtype), *total)
        return tuple(a.to(b.dtype) for a, b in zip(grads, (*above, *inputs), strict=True))

    def _chunks(self) -> Iterator[tuple[int, slice]]:
        """Yield chunks of rows: the sequence and the rows of each."""
        most = CHUNK_ELEMENTS.get(self._call.device.type, CHUNK_ELEMENTS_ELSEWHERE)
        for b, (rows, keys, *_) in enumerate(self._places):
            step = max(1, most // max(self._call.heads * keys, 1))
            for first in range(0, max(rows, 1), step):
                yield b, slice(first, min(first + step, rows))

    def _rows(self, chunk: tuple[int, slice]) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function from leaves to out (rows, h, d) and lse (h, rows) of some rows of a sequence."""
        b, rows = chunk
        call, dtype, place = self._call, self._dtype, self._places[b]

        def attended(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
            given = dict(zip(self.names[3:], own, strict=True))
            tensors = {name: given.get(name, tensor) for name, tensor in call.tensors.items()}
            scalars = {name: given.get(name, number) for name, number in call.scalars.items()}
            with_own = call.with_tensors(tensors, scalars, call.cu_seqlens_q)
            sequence = one_sequence(call, q, k, v, b, place)
            if not place[1]:
                return without_keys(with_own, sequence, rows.stop - rows.start, dtype, smooth=True)
            return attend_rows(with_own, sequence, rows, dtype, smooth=True)

        return attended

    def _gradients(self, chunk: tuple[int, slice]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the function from the gradients of out and lse of some rows, and leaves, to those of the leaves."""
        attended = self._rows(chunk)

        def gradients(dout: Tensor, dlse: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            _, pull = torch.func.vjp(attended, *leaves)
            grads: tuple[Tensor, ...] = pull((dout, dlse))
            return grads

        return gradients

    def _above(self, chunk: tuple[int, slice], dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
        """Slice the gradients of out and log-sum-exp to some rows: (rows, h, d) and (h, rows)."""
        b, rows = chunk
        if self._call.order == "thd":
            first = self._places[b][2]
            rows = slice(first + rows.start, first + rows.stop)
            return dout[rows], dlse[:, rows]
        of_sequence = dout[b].transpose(0, 1) if self._call.order == "bhsd" else dout[b]
        return of_sequence[rows], dlse[b][:, rows]

    def _joined(
        self, parts: Sequence[tuple[int, tuple[Tensor, Tensor]]], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Results of rows in the layout of out and of its log-sum-exp; 0 where there is no row."""
        outs: list[list[Tensor]] = [[] for _ in self._places]
        lses: list[list[Tensor]] = [[] for _ in self._places]
        for b, (out, lse) in parts:
            outs[b].append(out)
            lses[b].append(lse)
        whole = [torch.cat(each) for each in outs], [torch.cat(each, dim=1) for each in lses]
        return joined(self._call, self._q, *whole, dtype or self._call.out_dtype, self._dtype, rest=0.0)


def pushforward(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tangents of a function's results, by reverse mode twice: torch nests no forward mode in one that is
    entered by ``forward_ad.dual_level``."""
    results, pull = torch.func.vjp(function, *inputs)
    _, push = torch.func.vjp(lambda *above: pull(above), *(torch.zeros_like(result) for result in results))
    tangents: tuple[Tensor, ...] = push(tuple(directions))
    return tangents
