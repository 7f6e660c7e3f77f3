"""Logits, mask and probabilities of chosen rows of a call, exact in what the language means."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attngen.dtypes import DESCALES
from attngen.errors import CallError, suggest
from attngen.inspect.heat_map import HeatMap
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.dropout import with_state
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.reference.eager import OneSequence, probabilities_of, scores_of, sequence_at
from attngen.runtime.registry.binding import bind_call, check_form, find

#: Keywords of calls beside q, k, v and the variant's own; those that say nothing about what is computed are taken, too.
KEYWORDS = (
    "softmax_scale", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "page_table",
    "page_layout", "layout", "backend", "package", "deterministic", "num_splits", "split_size", "return_lse",
    "tile_map", "out_dtype", *DESCALES,
)  # fmt: skip

#: Most logits that are returned at a time.
MOST = 2**28

Chosen: TypeAlias = "int | slice | Iterable[int] | Tensor | None"


@dataclass(frozen=True)
class Scores:
    """Inputs and outputs of the softmax of some rows: each (heads, rows, keys), on the device of q.

    ``logits`` are those after the score expression, −inf where nothing is seen; ``mask`` is true where something is;
    ``probabilities`` are what the values are multiplied by, after dropout, so that they add up to 1 unless a sink or
    dropout takes its share. ``lse`` is (heads, rows). ``heads`` and ``rows`` number what was chosen, of sequence ``b``.
    """

    name: str
    b: int
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    logits: Tensor
    mask: Tensor
    probabilities: Tensor
    lse: Tensor

    def plot(self, what: str = "probabilities", *, h: int | None = None) -> HeatMap:
        """Return the heat map of one head, the first unless ``h`` says which, of probabilities, logits or mask.

        Raises CallError.
        """
        choices = ("probabilities", "logits", "mask")
        if what not in choices:
            raise CallError(f"what must be one of {', '.join(choices)}, got {what!r}{suggest(str(what), choices)}")
        h = self.heads[0] if h is None else h
        if h not in self.heads:
            raise CallError(f"h must be one of {', '.join(map(str, self.heads))}, the chosen heads, got {h!r}")
        values = getattr(self, what)[self.heads.index(h)].double().cpu()
        title = f"{self.name}, {what} of head {h} of sequence {self.b}"
        return HeatMap(title, values, "queries", "keys", tuple(map(str, self.rows)))

    def __repr__(self) -> str:
        heads, rows, keys = self.mask.shape
        return f"Scores({self.name}, sequence {self.b}: {heads} heads x {rows} rows x {keys} keys)"


def scores(
    q: Tensor, k: Tensor, v: Tensor, *, variant: str | Variant = "full", rows: Chosen = None, heads: Chosen = None,
    b: int = 0, dtype: torch.dtype = torch.float64, **options: Any,
) -> Scores:  # fmt: skip
    """Return logits, mask and probabilities of some rows and heads of sequence ``b``.

    Takes the arguments of a call; ``rows`` and ``heads`` are a number, a slice, several, or all if left out. Negative
    ones count from the end. Only what was chosen is computed, in ``dtype``, float64 or float32. Raises CallError.
    """
    if dtype not in (torch.float64, torch.float32):
        raise CallError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    call, given = bound(q, k, v, variant, options)
    with torch.no_grad():
        sequence = sequence_of(call, given, b, dtype)
        queries, keys = sequence.q.shape[0], sequence.k.shape[0]
        some_rows, some_heads = numbers("rows", rows, queries), numbers("heads", heads, call.heads)
        if len(some_rows) * len(some_heads) * keys > MOST:
            raise CallError(
                f"{len(some_heads)} heads x {len(some_rows)} rows x {keys} keys are more than {MOST} logits; choose "
                "fewer rows, or heads"
            )
        where, which = (torch.tensor(each, device=call.device, dtype=torch.int64) for each in (some_rows, some_heads))
        if not keys or not some_rows or not some_heads:
            shape = len(some_heads), len(some_rows), keys
            nothing = torch.zeros(shape, dtype=dtype, device=call.device)
            lse = torch.full(shape[:2], float("-inf"), dtype=dtype, device=call.device)
            return Scores(call.variant.name, b, some_heads, some_rows, nothing, nothing.bool(), nothing, lse)
        visible, logits = scores_of(call, sequence, where, dtype, heads=which)
        weights, divisor, lse = probabilities_of(call, sequence, where, visible, logits, dtype, heads=which)
    return Scores(call.variant.name, b, some_heads, some_rows, logits, visible, weights / divisor, lse)


def bound(q: Any, k: Any, v: Any, variant: Any, options: dict[str, Any]) -> tuple[Call, Given]:
    """Return the checked call that the arguments of any call of attngen make, and the call as it was given.

    Raises CallError, and NoKernelError for a variant that is not known.
    """
    own = {name: value for name, value in options.items() if name not in KEYWORDS}
    keywords = {name: value for name, value in options.items() if name in KEYWORDS}
    for name in ("tile_map", "return_lse"):
        keywords.pop(name, None)
    form = "dense"
    if keywords.get("page_table") is not None:
        form = "paged"
    elif keywords.get("cu_seqlens_q") is not None:
        form = "varlen"
    check_form(form, keywords)
    page_layout, layout = keywords.pop("page_layout", "NHD"), keywords.pop("layout", "bshd")
    package = keywords.get("package")
    if DROPOUT_P.name in own:
        known = variant if isinstance(variant, Variant) else find(variant, package).variant
        own = dict(with_state(known, own, q.device))
    given = Given(
        q=q, k=k, v=v, **keywords, arguments=own, variant=variant, form=form,
        layout={"dense": layout, "varlen": "varlen", "paged": page_layout}[form],
    )  # fmt: skip
    given = in_rows(given)
    return bind_call(given)[0], given


def sequence_of(call: Call, given: Given, b: int, dtype: torch.dtype) -> OneSequence:
    """Return one sequence of a call, cut to its used keys. Raises CallError for a number that no sequence has."""
    if isinstance(b, bool) or not isinstance(b, int) or not 0 <= b < call.batch:
        raise CallError(f"b must be 0 to {call.batch - 1}, the number of a sequence, got {b!r}")
    return sequence_at(call, given.q, given.k, given.v, b, dtype)


def numbers(name: str, chosen: Chosen, count: int) -> tuple[int, ...]:
    """The chosen numbers of ``count`` rows or heads, in order. Raises CallError."""
    if chosen is None:
        return tuple(range(count))
    if isinstance(chosen, slice):
        return tuple(range(count)[chosen])
    listed: Sequence[Any]
    if isinstance(chosen, Tensor):
        listed = chosen.flatten().tolist()
    else:
        listed = list(chosen) if isinstance(chosen, Iterable) else [chosen]
    chosen_numbers = []
    for one in listed:
        try:
            number = operator.index(one)
        except TypeError:
            raise CallError(f"{name} must be numbers, got {one!r}") from None
        if not -count <= number < count:
            raise CallError(f"{name} must lie within 0 .. {count - 1}, got {number}")
        chosen_numbers.append(number % count)
    return tuple(chosen_numbers)
