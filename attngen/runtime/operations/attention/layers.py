"""The layers of a model over a paged cache, which an engine calls step after step.

All layers of a step share one page table and one set of lengths, and most layers of a model are alike: they differ in
where their caches, queries and outputs lie, and in nothing else that a launch depends on. So the first layer of a step
makes its call as any program would, and layers like it repeat its launches with addresses of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.lang.ir import identity_of
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.checked import FOLLOWS, LEADS, Results
from attngen.runtime.arguments.given import Given, changer
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.keys import note
from attngen.runtime.arguments.seen import NONE_FREE, Free, check_of
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.counters import in_graph
from attngen.runtime.launch.chain import Chain, Moves, Sized
from attngen.runtime.launch.prepared import PreparedCall, Repeats
from attngen.runtime.launch.ragged import RaggedCalls
from attngen.runtime.launch.repeatable import Repeatable
from attngen.runtime.operations.append.arguments import FIELDS, Append
from attngen.runtime.operations.append.call import append
from attngen.runtime.operations.append.kernel import PreparedAppend
from attngen.runtime.operations.append.path import APPEND
from attngen.runtime.operations.attention import mixed
from attngen.runtime.operations.attention.beside import (
    PAIRED,
    Division,
    SideStream,
    left_to_prompts,
    streams_beside,
)
from attngen.runtime.operations.attention.entry import run_or_trace
from attngen.runtime.registry.lookup import registry

if TYPE_CHECKING:
    from attngen.runtime.operations.shared.launches import Resized

_Q, _K, _V, _K_DESCALE, _V_DESCALE, _USED, _STARTS, _TABLE, _OUT = map(
    FORWARD.index, ("q", "k", "v", "k_descale", "v_descale", "seqused_k", "cu_seqlens_q", "page_table", "out")
)

_of_batch = changer("q k_descale v_descale seqused_k cu_seqlens_q page_table out max_seqlen_q return_lse")

#: Places of addresses in the list of a launch, with what a layer has there.
Places = Sequence[tuple[int, int]]

#: How a batch runs: whether sequences that decode have a launch of their own, whether they are the last ones, and how
#: many multiprocessors that leaves to the others.
_How = tuple[bool, bool, int]


class _AlikeLayers:
    """Layers that differ in addresses only. ``kept`` is what their key refers to by identity."""

    __slots__ = ("kept", "last", "like", "renewals", "writes")

    def __init__(self, kept: object) -> None:
        self.kept = kept
        #: The launches of the last batch, and what they depend on: the next one often has the same sizes, in the same
        #: memory.
        self.last: tuple[_BatchSizes, _Launches] | None = None
        #: Launches for other sizes, by how a batch runs (``_how``).
        self.renewals: dict[_How, _Renewal] = {}
        #: Whether a query and an output are like those of an earlier call, but for their rows.
        self.like: Callable[[Tensor, Tensor], bool] | None = None
        #: Launch that wrote tokens last; False if it cannot be repeated.
        self.writes: _Writes | bool = True


#: By all that the calls of a layer depend on beside addresses and the batch.
_ALIKE: RecentCache[_AlikeLayers] = RecentCache(1024)


class PagedBatch:
    """The requests of a step, as ``attention_paged`` takes them; of queries and outputs, the first ``tokens`` rows.

    The tensors stay where they are, and keep their shapes, as long as this is in use.
    """

    __slots__ = ("cu_seqlens_q", "max_seqlen_q", "num_decodes", "page_table", "repeats", "seqused_k", "sizes", "tokens")

    def __init__(
        self, page_table: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, tokens: int,
        num_decodes: int | None = None,
    ) -> None:  # fmt: skip
        self.page_table, self.seqused_k, self.cu_seqlens_q = page_table, seqused_k, cu_seqlens_q
        self.max_seqlen_q, self.tokens, self.num_decodes = max_seqlen_q, tokens, num_decodes
        #: Launches that layers alike repeat, once one of them has run; None where they cannot.
        self.repeats: dict[_AlikeLayers, _Launches | None] = {}
        self.sizes = _BatchSizes((max_seqlen_q, tokens, num_decodes), (page_table, seqused_k, cu_seqlens_q))


class _BatchSizes:
    """All that the launches of a layer depend on of a batch. Tensors are looked at where the numbers are the same."""

    __slots__ = ("_key", "_numbers", "_vectors")

    def __init__(self, numbers: tuple[object, ...], vectors: tuple[Tensor, ...]) -> None:
        self._numbers, self._vectors = numbers, vectors
        self._key: list[object] = []

    def are(self, other: _BatchSizes) -> bool:
        """Whether another batch has the same sizes, in the same memory."""
        return self is other or (self._numbers == other._numbers and self._noted() == other._noted())

    def _noted(self) -> list[object]:
        if not self._key:
            for vector in self._vectors:
                self._key.append(note(self._key, vector))
        return self._key


class PagedLayer:
    """The attention of one layer over its pages: what its calls have in common, as ``attention_paged`` takes it.

    ``k_descale`` and ``v_descale`` have shape (), or (kv_heads,) with a scale for each KV head, or that of the pages
    without head_dim, with a scale for each row of a page.
    """

    __slots__ = ("_alike", "_given", "_places", "_with_lse", "moves")

    def __init__(
        self, k_pages: Tensor, v_pages: Tensor, *, variant: str | Variant, softmax_scale: float,
        page_layout: str = "NHD", split_size: int | None = None, k_descale: Tensor | None = None,
        v_descale: Tensor | None = None, arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._given = Given(
            q=None, k=k_pages, v=v_pages, k_descale=k_descale, v_descale=v_descale, arguments=arguments,
            variant=variant, softmax_scale=softmax_scale, form="paged", layout=page_layout, split_size=split_size,
        )  # fmt: skip
        named = isinstance(variant, str)
        key: list[object] = ["attention", variant if named else id(variant), softmax_scale, page_layout, split_size]
        own = [value for value in arguments.values() if isinstance(value, Tensor)]
        for name, value in arguments.items():
            key += (name, type(value), None if isinstance(value, Tensor) else identity_of(value))
        tensors = {_K: k_pages, _V: v_pages, _K_DESCALE: k_descale, _V_DESCALE: v_descale}
        self._places = _noted(key, tensors | dict(enumerate(own, len(FORWARD))))
        #: The changes that bring another layer's launches to this one's tensors, by what is launched.
        self.moves: dict[Chain, Moves] = {}
        kept = None if named else variant
        self._alike, self._with_lse = _of_key(key, kept), _of_key([*key, "lse"], kept)

    def __call__(self, q: Tensor, out: Tensor, batch: PagedBatch, *, return_lse: bool = False) -> Tensor | None:
        """Write the attention of a batch to ``out``; returns the log-sum-exp (heads, tokens), if asked for, in memory
        that the next layer alike writes again."""
        alike, repeats = self._with_lse if return_lse else self._alike, batch.repeats
        known = repeats.get(alike)
        if known is None and alike not in repeats and alike.last is not None and alike.last[0].are(batch.sizes):
            known = repeats[alike] = alike.last[1]
        if known is not None and known(q, out, self):
            return known.lse
        noted = alike in repeats or not torch_state.on_gpu(q) or _watched(q)
        how = None if noted else self._how(q, batch)
        if how is not None and (renewal := alike.renewals.get(how)) is not None:
            known = renewal(q, out, batch, self._places, alike)
            if known is not None:
                repeats[alike], alike.last = known, None if known.holds_memory else (batch.sizes, known)
                return known.lse
        given = self._of_batch(q, out, batch, return_lse=return_lse)
        parts: Repeats | None = None if noted else []

        def run(part: Given) -> Results:
            before = 0 if parts is None else len(parts)
            result = run_or_trace(part, parts)
            if parts is not None and len(parts) == before:  # what ran cannot be repeated
                parts.append(None)
            return result

        result = run(given) if batch.num_decodes is None else mixed.attend(run, batch.num_decodes, given)
        if parts is not None:
            launches = repeats[alike] = _launches(alike, parts, given.q, given.out)
            alike.last = None if launches is None or launches.holds_memory else (batch.sizes, launches)
            if launches is not None and how is not None:
                _note_renewal(alike, how, launches, given)
        return result[1] if return_lse else None

    def _how(self, q: Tensor, batch: PagedBatch) -> _How | None:
        """Form in which a batch runs; None if that takes a look at the whole call."""
        decodes, requests, k = batch.num_decodes, batch.page_table.shape[0], self._given.k
        if not decodes:
            return None if decodes is False else (False, False, 0)
        if type(decodes) is not int or not 0 < abs(decodes) < requests != k.shape[0]:
            return None
        margin = left_to_prompts(q, batch.tokens, k, self._given.layout, abs(decodes)) if q.is_cuda else 0
        return True, decodes < 0, margin

    def _of_batch(self, q: Tensor, out: Tensor, batch: PagedBatch, *, return_lse: bool) -> Given:
        """The call of a batch. Slices are made where there are more rows: they cost as much as all the rest."""
        given, rows = self._given, batch.tokens
        q = q if q.shape[0] == rows else q[:rows]
        out = out if out.shape[0] == rows else out[:rows]
        k_descale, v_descale = _of_requests(given.k_descale, batch), _of_requests(given.v_descale, batch)
        return _of_batch(
            given, q, k_descale, v_descale, batch.seqused_k, batch.cu_seqlens_q, batch.page_table, out,
            batch.max_seqlen_q, return_lse,
        )  # fmt: skip

    def moved(self, chain: Chain) -> Moves:
        """The entry of ``moves`` for some launches, made now."""
        moves = self.moves[chain] = chain.moves(dict(self._places))
        return moves


class PagedCache:
    """The cache of one layer, to which new keys and values are written, as ``append_kv`` takes it.

    ``k_descale`` and ``v_descale`` have shape (), or (kv_heads,) with a scale for each KV head, or that of the pages
    without head_dim, with a scale for each row of a page.
    """

    __slots__ = ("_alike", "_call", "_places")

    def __init__(
        self, k_pages: Tensor, v_pages: Tensor, *, page_layout: str = "NHD", k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> None:  # fmt: skip
        scales = [one if one is None or one.dim() != 1 else one.reshape(1, -1) for one in (k_descale, v_descale)]
        self._call = Append(
            None, None, k_pages, v_pages, None, None, None, None, None, page_layout, None, None, None, None, False,
            None, *scales,
        )  # fmt: skip
        key: list[object] = ["append", page_layout]
        names = ("k_cache", "v_cache", "k_descale", "v_descale")
        tensors = zip(map(FIELDS.tensors.index, names), (k_pages, v_pages, *scales), strict=True)
        self._places = _noted(key, dict(tensors))
        self._alike = _of_key(key, None)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the first rows of k and v (tokens, kv_heads, head_dim), one for each slot."""
        known = self._alike.writes
        if isinstance(known, _Writes) and known(k, v, slots, self._places):
            return
        tokens = slots.shape[0]
        call = self._call._replace(k=k[:tokens], v=v[:tokens], slots=slots)
        append(call)
        if known is not False and torch_state.on_gpu(slots) and not _watched(k):
            self._alike.writes = _writes(call)


class _Launches:
    """The launches of a layer, which others alike repeat in the same step."""

    __slots__ = ("_beside", "_check", "_device", "_driver", "_rows", "holds_memory", "parts")

    def __init__(self, alike: _AlikeLayers, parts: Sequence[Repeatable], q: Tensor, out: Tensor, rows: int) -> None:
        """``parts``: one, or two that run side by side; ``rows``: those of a batch. Raises TypeError where tensors
        cannot be recognized."""
        self.parts, self._rows = parts, rows
        if alike.like is None or not alike.like(q, out):
            alike.like = check_of((q, out), (_ROWS, _ROWS))
        self._check = alike.like
        self._driver, self._device = drivers.current(), q.get_device()
        self._beside = streams_beside(self._device) if parts[0].stream != parts[-1].stream else None
        #: Whether it has workspaces that belong to torch, which are not kept for longer than a step.
        self.holds_memory = any(part.kept is not None for part in parts)

    @property
    def lse(self) -> Tensor | None:
        """The log-sum-exp, of layers that return it, which run as one part."""
        return self.parts[0].lse

    def __call__(self, q: Tensor, out: Tensor, layer: PagedLayer) -> bool:
        """Launch with these tensors and those of a layer; False, and no launch, if a tensor is not like the first
        layer's, or something else is not as it was."""
        driver, device, rows = self._driver, self._device, self._rows
        if not self._check(q, out) or q.shape[0] < rows or out.shape[0] < rows or not driver.ready(device):
            return False
        begin, into, stream = q.data_ptr(), out.data_ptr(), driver.stream(device)
        parts, streams = self.parts, self._beside
        first = parts[0]
        if (begin | into) % CHUNK_BYTES or stream != first.stream or not may_repeat(q) or in_graph(stream):
            return False
        moves = layer.moves
        if len(parts) == 1:
            first.launch(begin, into, moves.get(first.chain) or layer.moved(first.chain))
            return True
        moved = [moves.get(part.chain) or layer.moved(part.chain) for part in parts]
        if streams is None:
            with PAIRED:
                first.launch(begin, into, moved[0])
                parts[1].launch(begin, into, moved[1])
        else:
            streams.begin()
            first.launch(begin, into, moved[0])
            streams.fork()
            parts[1].launch(begin, into, moved[1])
            streams.join()
        return True


#: Rows may be more than a batch has.
_ROWS = (0,), ()


class _Renewal:
    """Makes the launches of batches that differ in their sizes, without the calls that made those of the first one:
    most of a call finds out what is the same in all of these."""

    __slots__ = ("_check", "_device", "_division", "_driver", "_generation", "_pages", "_parts", "_streams")

    def __init__(self, parts: Sequence[Repeatable], given: Given) -> None:
        """``parts``: one, or that of sequences which decode and that of the others. Raises TypeError where tensors
        cannot be recognized."""
        first: Free = (0,), ()
        rows = first if given.q.shape[0] > 1 else NONE_FREE
        self._check = check_of(
            (given.q, given.out, given.page_table, given.seqused_k, given.cu_seqlens_q),
            (rows, rows, ((0, 1), (0,)), first, first),
        )
        self._generation, self._driver, self._device = registry.generation, drivers.current(), given.q.get_device()
        self._parts = [(part.calls, *part.given) for part in parts if isinstance(part.calls, RaggedCalls)]
        #: Pages of a cache whose scales have a row for each request, all at one address; else 0. With as many requests
        #: as pages, they would be taken for scales of pages.
        scales = [one for one in (given.k_descale, given.v_descale) if one is not None and one.dim() == 2]
        self._pages = given.k.shape[0] if scales else 0
        self._streams = [part.stream for part in parts]
        self._division = Division(given.q, given.k, given.layout)

    def __call__(
        self, q: Tensor, out: Tensor, batch: PagedBatch, places: Places, alike: _AlikeLayers
    ) -> _Launches | None:
        """Launch a batch, and return what repeats it; None, and no launch, where a tensor or the state of torch is
        not as it was, or a call of such sizes has to be looked at."""
        table, used, starts, tokens = batch.page_table, batch.seqused_k, batch.cu_seqlens_q, batch.tokens
        driver, device, parts = self._driver, self._device, self._parts
        if self._generation != registry.generation or not self._check(q, out, table, used, starts):
            return None
        requests, decodes, longest = table.shape[0], batch.num_decodes or 0, batch.max_seqlen_q
        if q.shape[0] < tokens or out.shape[0] < tokens:
            return None
        if used.shape[0] != requests or starts.shape[0] != requests + 1:
            return None
        begin, into = q.data_ptr(), out.data_ptr()
        at, lengths, offsets = table.data_ptr(), used.data_ptr(), starts.data_ptr()
        if (begin | into) % CHUNK_BYTES or (at | lengths | offsets) % _INDEX_BYTES or type(longest) is not int:
            return None
        if not driver.ready(device) or driver.stream(device) != self._streams[0]:
            return None
        if len(parts) == 1:
            sequences = [(0, requests, longest)]
        elif decodes > 0:
            sequences = [(0, decodes, 1), (decodes, requests - decodes, longest)]
        else:
            sequences = [(requests + decodes, -decodes, 1), (0, requests + decodes, longest)]
        if self._pages in [count for _, count, _ in sequences]:
            return None
        paired, order = len(parts) == 2, (0, 1)
        if paired:
            sides = self._division.sides(tokens, abs(decodes))
            order = (1, 0) if sides.prompts_lead else order
            roles = (FOLLOWS, LEADS) if sides.prompts_lead else (LEADS, FOLLOWS)
            ready = self._ready(sequences, tokens, table, roles, sides[1:])
            paired = ready is None or all(one.runs_beside for one, _ in ready)
        if not paired:
            ready = self._ready(sequences, tokens, table)
        if ready is None:
            return None
        row, made = _INDEX_BYTES * table.stride(0), []

        def launch(part: int) -> None:
            _, addresses, scale, scalars = parts[part]
            ahead = sequences[part][0]
            given = list(addresses)
            given[_Q], given[_OUT], given[_TABLE] = begin, into, at + row * ahead
            given[_USED], given[_STARTS] = lengths + _INDEX_BYTES * ahead, offsets + _INDEX_BYTES * ahead
            for place, address in places:
                given[place] = address
            prepared, sized = ready[part]
            one = prepared.repeatable(given, scale, scalars, sized)
            one.calls = parts[part][0]
            one.launch(begin, into, ())
            made.append(one)

        if paired:
            with PAIRED:
                launch(order[0])
                launch(order[1])
        elif len(parts) == 1 or not q.is_cuda:
            for part in range(len(parts)):
                launch(part)
        else:
            with SideStream(device) as side:
                launch(0)
                side.switch()
                launch(1)
        return _Launches(alike, made, q, out, tokens)

    def _ready(
        self, sequences: Sequence[tuple[int, int, int]], tokens: int, table: Tensor, roles: Sequence[int] = (0, 0),
        blocks: Sequence[int] = (0, 0),
    ) -> list[tuple[PreparedCall, Sized]] | None:  # fmt: skip
        """The prepared call and the numbers of each part: how many sequences are before it, its own, and their most
        queries; None if those of a part need a look."""
        ready = []
        for (calls, *_), (_, count, most), role, size in zip(self._parts, sequences, roles, blocks):  # noqa: B905
            known = calls.ready_batch(count, tokens, most, table, role, size)
            if known is None:
                return None
            ready.append(known)
        return ready


#: Bytes of a number of index vectors.
_INDEX_BYTES = 4


def _note_renewal(alike: _AlikeLayers, how: _How, launches: _Launches, given: Given) -> None:
    """Keep what makes the launches of other sizes, if a batch of these ran as expected, on kernels for all sizes."""
    parts = launches.parts
    if len(parts) != 1 + how[0] or any(part.calls is None for part in parts):
        return
    if given.q.shape[0] > 1:  # the stride of a single row is arbitrary
        alike.renewals[how] = _Renewal(parts, given)


def _launches(alike: _AlikeLayers, parts: Sequence[Repeatable | None], q: Tensor, out: Tensor) -> _Launches | None:
    """Launches that repeat those of a call on q and out, or None."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known or (q.data_ptr() | out.data_ptr()) % CHUNK_BYTES:
        return None
    try:
        return _Launches(alike, known, q, out, q.shape[0])
    except TypeError:
        return None


class _Writes:
    """The launch that writes as many tokens of a layer, which others alike repeat."""

    __slots__ = ("_addresses", "_check", "_prepared", "_resized", "_rows")

    def __init__(self, call: Append, prepared: PreparedAppend, addresses: list[int], resized: Resized) -> None:
        """Store the result of ``APPEND.repeatable``. Raises TypeError where tensors cannot be recognized."""
        self._prepared, self._addresses, self._resized = prepared, addresses, resized
        slots: Tensor = call.slots
        self._rows = slots.shape[0]
        self._check = check_of((call.k, call.v, slots), (_ROWS, _ROWS, NONE_FREE))

    def __call__(self, k: Tensor, v: Tensor, slots: Tensor, places: Places) -> bool:
        """Launch with these tensors, and what a layer has in ``places``; False, and no launch, if a tensor or the state
        of torch is not as it was."""
        rows = self._rows
        if not self._check(k, v, slots) or k.size(0) < rows or v.size(0) < rows or _watched(k):
            return False
        keys, values, to = k.data_ptr(), v.data_ptr(), slots.data_ptr()
        if (keys | values | to) % CHUNK_BYTES:
            return False
        addresses = self._addresses.copy()
        addresses[_NEW_K], addresses[_NEW_V], addresses[_SLOTS] = keys, values, to
        for place, address in places:
            addresses[place] = address
        self._prepared(addresses, self._resized)
        return True


_NEW_K, _NEW_V, _SLOTS = map(FIELDS.tensors.index, ("k", "v", "slots"))


def _writes(call: Append) -> _Writes | bool:
    """Launches that repeat a call that was made just now; True if another one may be repeated, False if none can."""
    ready = APPEND.repeatable(call)
    if ready is None:
        return False
    prepared, addresses, resized = ready
    assert isinstance(prepared, PreparedAppend)
    slots: Tensor = call.slots
    if (call.k.data_ptr() | call.v.data_ptr() | slots.data_ptr()) % CHUNK_BYTES:
        return True
    try:
        return _Writes(call, prepared, addresses, resized)
    except TypeError:
        return False


def _watched(tensor: Tensor) -> bool:
    """Whether something wants to see whole calls with a tensor, or records them."""
    return not may_repeat(tensor) or torch.cuda.is_current_stream_capturing()


def _of_requests(scale: Tensor | None, batch: PagedBatch) -> Tensor | None:
    """A scale with a row for each request, as a view, or one for all."""
    return scale if scale is None or scale.dim() != 1 else scale.expand(batch.seqused_k.shape[0], -1)


def _noted(key: list[object], tensors: Mapping[int, Tensor | None]) -> Places:
    """Add to a key what launches depend on of tensors, by their places; returns their addresses."""
    places = tuple((place, note(key, tensor)) for place, tensor in tensors.items() if tensor is not None)
    key += (len({address for _, address in places[:2]}), *(place for place, _ in places))
    return places


def _of_key(key: list[object], kept: object) -> _AlikeLayers:
    """The layers of a key. ``kept``: what it refers to by identity."""
    whole = (registry.generation, *key)
    try:
        alike = _ALIKE[whole] or _AlikeLayers(kept)
    except TypeError:  # an argument that cannot be hashed
        return _AlikeLayers(kept)
    _ALIKE.put(whole, alike)
    return alike
