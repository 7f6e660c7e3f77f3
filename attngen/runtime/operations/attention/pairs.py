"""Paged batches that run as two launches, recognized as a whole: the tensors of both are the same, and checked once."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attngen.runtime.arguments.addresses import FORWARD, OUT
from attngen.runtime.arguments.checked import FOLLOWS, LEADS
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.arguments.kinds import INDEX_VECTORS, free_of
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.counters import in_graph
from attngen.runtime.geometry.heads_in_l2 import prompts_of
from attngen.runtime.launch.chain import Sized
from attngen.runtime.launch.prepared import PreparedCall
from attngen.runtime.launch.ragged import KEPT_SIZES, RaggedCalls
from attngen.runtime.operations.attention.beside import PAIRED, Division
from attngen.runtime.operations.attention.recall import calls_of_kind, seen_key

#: The two launches of a batch of some sizes: calls that are prepared for all sizes, and the numbers of these.
_Ready = tuple[PreparedCall, Sized, PreparedCall, Sized]

#: By ``seen_key`` and whether an output is given: the tensors of an earlier batch of a kind, and its launches; False if
#: batches cannot be recognized.
_PAIRS: RecentCache[tuple[SeenTensors, Pair] | Literal[False]] = RecentCache(PREPARED_CALLS)


class Pair:
    """The launches of all batches of a kind that have sequences of few queries, and others."""

    __slots__ = ("_decodes", "_device", "_division", "_few", "_kept", "_pages", "_prompts")

    def __init__(self, given: Given, few: int, decodes: RaggedCalls, prompts: RaggedCalls) -> None:
        """``few``: most queries of a sequence that decodes. Both parts of a batch, as they ran alone."""
        self._few, self._decodes, self._prompts = few, decodes, prompts
        self._pages, self._device = given.k.shape[0], given.q.get_device()
        self._division = Division(given.q, given.k, given.layout)
        self._kept: RecentCache[_Ready] = RecentCache(KEPT_SIZES)

    def ready(self, given: Given, batch: int, rows: int, longest: int | None) -> _Ready | None:
        """The launches of a batch whose tensors are like those of an earlier one, but for their extents; None where
        its sizes need a look."""
        table: Tensor = given.page_table
        lengths: Tensor = given.seqused_k
        cu_q: Tensor = given.cu_seqlens_q
        out, width, used, starts = given.out, table.shape[1], lengths.shape[0], cu_q.shape[0]
        sizes = batch, rows, longest, width, table.stride(0), used, starts, rows if out is None else out.shape[0]
        known = self._kept[sizes]
        if known is None and used == batch == starts - 1 and sizes[-1] == rows and batch != self._pages:
            assert longest is not None, "such a batch names its most queries"
            known = self._resized(table, batch, rows, longest)
            if known is not None:
                self._kept.put(sizes, known)
        return known

    def _resized(self, table: Tensor, batch: int, rows: int, longest: int) -> _Ready | None:
        sides = self._division.sides(rows, batch - prompts_of(rows, batch, longest))
        lead, follow = (FOLLOWS, LEADS) if sides.prompts_lead else (LEADS, FOLLOWS)
        decodes = self._decodes.sized_batch(batch, rows, self._few, table, lead, sides.decode_blocks)
        prompts = self._prompts.sized_batch(batch, rows, longest, table, follow, sides.prompt_blocks)
        if decodes is None or prompts is None or not (decodes[0].runs_beside and prompts[0].runs_beside):
            return None
        return (*prompts, *decodes) if sides.prompts_lead else (*decodes, *prompts)

    def attend(self, given: Given, addresses: list[int], ready: _Ready) -> Tensor:
        """Enqueue both launches, of which the second does not wait for the first, and return the output."""
        first, of_first, second, of_second = ready
        scale, scalars, out = first.scale_of(given.softmax_scale), first.scalars(given.arguments), given.out
        if out is None:
            out = first.new_output(given.q, of_first)
            addresses[OUT] = out.data_ptr()
        others = addresses.copy()
        with PAIRED:
            kept = first.enqueue(addresses, scale, scalars, of_first)
            more = second.enqueue(others, scale, scalars, of_second)
        del kept, more
        return out


def recognized(given: Given) -> tuple[Pair, list[int]] | None:
    """The launches of batches like this one, and the addresses of its tensors; None where it needs a look, though it
    ``may_repeat``."""
    lookup = seen_key(given)
    if lookup is None:
        return None
    try:
        alike = _PAIRS[lookup[0], given.out is None]
    except TypeError:  # something that cannot be hashed stands where a number or a name belongs
        return None
    if not alike:
        return None
    addresses = alike[0].addresses(given, lookup[1])
    if addresses is None:
        return None
    driver, pair = drivers.current(), alike[1]
    if not driver.ready(pair._device) or in_graph(driver.stream(pair._device)):
        return None
    return pair, addresses


def note(given: Given, few: int, decodes: Given, prompts: Given) -> None:
    """Remember a batch that ran as two calls, so that the next one like it is recognized as a whole. Batches with a
    scale for each sequence are not, since its rows are looked at in each call."""
    lookup = seen_key(given)
    first, second = calls_of_kind(decodes), calls_of_kind(prompts)
    if lookup is None or first is None or second is None:
        return
    key, own = (lookup[0], given.out is None), lookup[1]
    known = _PAIRS[key]
    if known is None or (known and known[0].addresses(given, own) is None):
        scales = given.q_descale, given.k_descale, given.v_descale
        tensors = None
        if all(one is None or one.dim() == 0 for one in scales) and given.q.shape[0] > 1:
            tensors = seen(given, own, range(len(TENSORS)), len(FORWARD), INDEX_VECTORS, free_of(given))
        _PAIRS.put(key, tensors is not None and (tensors, Pair(given, few, first, second)))
