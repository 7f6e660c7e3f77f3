"""Tile maps: which KV tiles each query tile has to visit, for masks that no bound in closed form describes.

A map is a tensor of int32 words (batch or 1, heads or 1, query tiles, 2, words): for each query tile the bits of
the tiles that every row sees whole, then the bits of the tiles that some row sees in part. Bit t % 32 of word
t // 32 stands for KV tile t. A generated classifier kernel computes it; a caller may keep it and pass it again.

Maps of CUDA kernels also hold the mask of partial tiles, a bit for each pair, so that a kernel need not evaluate it.
Tiles with the same visible pairs share these bits. Finding them takes a look at the GPU's results, which waits for it;
so a plain call gets them only when it uses a map for the second time. From then on, the map of a mask that depends on
positions and scalars alone serves all streams, and captures, which may not wait.

The map of a backward also holds the order in which blocks take the tiles of keys. Once it has the visible pairs, long
rows come first, those of keys that many more queries see than others: taken last, they would run while other blocks
idle.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.ir import names, tensors
from attngen.runtime.arguments import debug
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Number
from attngen.runtime.geometry.map_shape import SLOTS_OF_WORD, MapShape
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.launches import Launches

#: Bytes of the visible pairs of one map, at most: beyond it kernels evaluate the mask of partial tiles.
MAX_BITS = 512 * 2**20
#: A row is long if it has more than this many times the tiles of the mean row.
_LONG = 2
#: Steps that a work tile takes beside its own; and by how much a long one, of queries or of keys, has to outlast the
#: others to be cut.
_TILE_STEPS, _OUTLASTS, _OUTLASTS_BY_KEYS = 2.6, 1.1, 2.0
#: Rows of all heads up to which they are taken by length: eight for each block of an H100.
_FEW_ROWS = 8 * 132
#: Tiles of a map up to which they are looked for: each takes a hash of 8 bytes meanwhile.
_MAX_SLOTS = 2**26
#: Maps that are kept for calls that do not bring one, and bytes of all of them, at most.
_KEPT_MAPS, _KEPT_BYTES = 64, 2 * 2**30


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """A computed map, and what it was computed for. Its content follows the mask's tensors and scalars of that moment.

    ``words`` is None where no map is needed: on the CPU, and for kernels that bound their loops by other means.
    """

    variant: str | None
    words: Tensor | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def of_words(cls, words: Tensor) -> TileMap:
        """Return a map of which only the words are known, as they pass through a traced program."""
        return cls(None, words)

    def check(self, kernel: Kernel, call: Call, shape: MapShape) -> Tensor:
        """Return the words if they fit a call of a kernel; CallError says what does not."""
        if self.words is None:
            raise CallError(f"tile_map: it holds no map, but {kernel.full_name} needs one; compute it on {call.device}")
        wanted = shape.tensor_shape()
        size = tuple(self.words.shape)
        for label, given, needed in (
            ("variant", self.variant, kernel.variant_name),
            ("tile_m", self.tile_m, kernel.tile_m),
            ("tile_n", self.tile_n, kernel.tile_n),
            ("seqlen_q", self.seqlen_q, call.seqlen_q),
            ("seqlen_k", self.seqlen_k, call.seqlen_k),
            # visible pairs follow
            ("shape", wanted if shape.slots and len(size) == 1 and size >= wanted else size, wanted),
            ("device", self.words.device, call.device),
        ):
            if given is not None and given != needed:
                raise CallError(f"tile_map: its {label} is {given}, but {kernel.full_name} needs {needed} in this call")
        return self.words


@dataclass(frozen=True, slots=True)
class KeptMap:
    """Counts and times of a map that is kept for a call: all tiles, full and partial ones, whether it has the visible
    pairs of partial tiles, and how long the GPU took to make it, these pairs included."""

    tiles: int
    full: int
    partial: int
    has_bits: bool
    milliseconds: float

    def __str__(self) -> str:
        pairs = "their pairs as bits" if self.has_bits else "their pairs by the mask's expression"
        return (
            f"visits {self.full + self.partial} of {self.tiles} tiles, {self.partial} of them partial, {pairs}; "
            f"by a tile map, made in {self.milliseconds:.2f} ms, kept"
        )


class _Last(NamedTuple):
    """The map of the last call of a kind, with all that has to be the same in the next one. Shapes and strides are."""

    words: Tensor
    changes: int  # of the kept maps
    stream: int
    numbers: list[Number]
    tensors: list[tuple[weakref.ref[Tensor], int, int]]  # those that decide it, their versions and addresses

    def serves(self, given: Given, names: Sequence[str], numbers: list[Number], stream: int) -> bool:
        """Whether it is the map of a call whose mask reads the tensors of these ``names``."""
        if self.changes != _KEPT.changes or self.stream != stream or self.numbers != numbers or debug.active():
            return False
        if given.seqused_k is not None or given.cu_seqlens_q is not None or given.cu_seqlens_k is not None:
            return False
        for name, (tensor, version, address) in zip(names, self.tensors, strict=True):
            one = tensor()
            if one is None or one is not given.arguments[name]:
                return False
            if one._version != version or one.data_ptr() != address:
                return False
        return True


class MapMaker:
    """Makes the tile maps of one prepared call, and keeps them while the mask's tensors and scalars stay the same."""

    __slots__ = ("_device", "_last", "_launches", "_of", "_scalars", "_tensors")

    def __init__(self, launches: Launches, kernel: Kernel, call: Call, device: torch.device) -> None:
        self._launches, self._device = launches, device
        self._of = _served(kernel, call)
        self._tensors = _tensors_of(call)
        self._scalars = tuple(place for place, rule in enumerate(call.rules) if rule.name in names(call.variant.mask))
        self._last: _Last | None = None

    def append(self, given: Given, addresses: list[int], scale: float, scalars: Sequence[Number]) -> list[Tensor]:
        """Append the addresses of all maps, and return these; they must live until the launches are enqueued."""
        launches = self._launches
        addresses += [0] * (len(launches.names) - len(addresses))
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        last, stream = self._last, launches.stream()
        numbers = [scalars[place] for place in self._scalars]
        fresh = not capturing and not in_graph_pool(self._device, stream)
        if last is not None and fresh and last.serves(given, self._tensors, numbers, stream):
            addresses[launches.first_map] = last.words.data_ptr()
            return [last.words]
        decide = self._decisive(given)
        appended = []
        for number, (owner, shape) in enumerate(launches.maps.items()):
            place = launches.first_map + number

            def make(
                bits: bool, words: Tensor | None = None, owner: str = owner, shape: MapShape = shape, place: int = place
            ) -> Tensor:
                return self._made(owner, shape, place, addresses, scale, scalars, bits, words)

            words: Tensor | None = None
            if decide is not None:
                sizes = (id(launches), owner, *numbers)
                words = _KEPT.lasting(sizes, stream, capturing) if not decide else None
                if words is None and fresh:
                    key = (sizes, stream, *_places(decide))
                    words = _KEPT.get(key, decide, make, partial(_Entry, launches, shape, self._of, self._device))
            if words is None:
                words = make(False)
            addresses[place] = words.data_ptr()
            appended.append(words)
        if fresh and decide is not None and len(decide) == len(self._tensors) and len(appended) == 1:
            self._last = _KEPT.last(appended[0], stream, numbers, decide)
        return appended

    def made(self, addresses: list[int], scale: float, scalars: Sequence[Number]) -> Tensor:
        """Return the one map of a forward, made now, with visible pairs."""
        launches = self._launches
        addresses += [0] * (len(launches.names) - len(addresses))
        ((owner, shape),) = launches.maps.items()
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        bits = shape.tile_words > 0 and not capturing
        return self._made(owner, shape, launches.first_map, addresses, scale, scalars, bits)

    def enter(self, words: Tensor, addresses: list[int]) -> None:
        """Enter the address of the one map of a forward that the caller brought."""
        launches = self._launches
        addresses += [0] * (len(launches.names) - len(addresses))
        addresses[launches.first_map] = words.data_ptr()

    @property
    def shape(self) -> MapShape:
        """The shape of the one map of a forward."""
        return next(iter(self._launches.maps.values()))

    def _decisive(self, given: Given) -> list[Tensor] | None:
        """Return the tensors that decide the map, or None; see ``_decisive``."""
        return _decisive(given, self._tensors)

    def _made(
        self, owner: str, shape: MapShape, place: int, addresses: list[int], scale: float, scalars: Sequence[Number],
        bits: bool, words: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return a map, made on the current stream, or the map ``words`` with visible pairs, for which this waits for
        the GPU."""
        launches, maps = self._launches, len(self._launches.maps)
        hashes_place, list_place = place + maps, place + 2 * maps
        if words is None:
            words = torch.empty(shape.tensor_shape(), dtype=torch.int32, device=self._device)
            addresses[place] = words.data_ptr()
            launches.classify(owner, addresses, scale, scalars)
        if not bits or not 0 < shape.slots <= _MAX_SLOTS:
            return words
        addresses[place] = words.data_ptr()
        if shape.order:
            words[shape.row_words : shape.map_words] = _long_rows_first(words, shape)
        hashes = torch.zeros(shape.slots, dtype=torch.int64, device=self._device)
        addresses[hashes_place] = hashes.data_ptr()
        launches.classify(owner, addresses, scale, scalars)
        addresses[hashes_place] = 0
        partial = hashes.nonzero().flatten()
        distinct, slots = hashes[partial].unique(return_inverse=True)
        count = len(distinct)
        if not 0 < 4 * shape.tile_words * count <= MAX_BITS:
            return words
        tiles = torch.empty(1 + count, dtype=torch.int32, device=self._device)
        tiles[0] = count
        tiles[1:].scatter_(0, slots, partial.int())  # any of the tiles that share a slot
        complete = torch.empty(len(words) + count * shape.tile_words, dtype=torch.int32, device=self._device)
        complete[: len(words)] = words
        complete[shape.map_words + partial] = slots.int()
        addresses[place], addresses[list_place] = complete.data_ptr(), tiles.data_ptr()
        launches.classify(owner, addresses, scale, scalars)
        addresses[list_place] = 0
        return complete


def same_words(words: Tensor, other: Tensor, shape: MapShape) -> bool:
    """Whether two maps are equal. The words of the order have slots, too, which nothing writes or reads."""
    if not shape.slots or words.shape != other.shape:
        return torch.equal(words, other)
    written, after = shape.map_words + SLOTS_OF_WORD * shape.row_words, shape.map_words + shape.slots
    return torch.equal(words[:written], other[:written]) and torch.equal(words[after:], other[after:])


def _long_rows_first(words: Tensor, shape: MapShape) -> Tensor:
    """Return the row indices of each batch entry: those of long rows first, the longest ahead, then the others, tiles
    of queries from the last to the first; and after all of them the most long rows that an entry has. That is 0 where
    rows that are taken first end before the others, so that nothing is cut. If there are few rows, all go by
    length, so that blocks end together; of many, neighbors run at a time, which read the same."""
    rows = words[: shape.row_words].view(shape.batch, shape.heads, shape.rows, 2 * shape.words)
    tiles = _set_bits(rows).sum((1, 3), dtype=torch.int32)
    long = tiles * shape.rows > _LONG * tiles.sum(1, keepdim=True)
    lengths = tiles if shape.work <= _FEW_ROWS else torch.where(long, tiles, 0)
    if shape.by_keys:
        order = lengths.sort(dim=1, descending=True, stable=True).indices
    else:
        order = shape.rows - 1 - lengths.flip(1).sort(dim=1, descending=True, stable=True).indices
    count = long.sum(1).max()
    if shape.heads_of_block:
        steps = tiles / shape.heads + _TILE_STEPS
        outlasts = _OUTLASTS_BY_KEYS if shape.by_keys else _OUTLASTS
        count *= steps.max() > outlasts * shape.heads_of_block * steps.sum(1).mean()
    return torch.cat((order.flatten(), count[None])).int()


def _set_bits(words: Tensor) -> Tensor:
    """The number of bits that are set in each int32 (Warren, "Hacker's Delight", 5-1)."""
    pairs = words - (words >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    bytes_ = fours + (fours >> 4) & 0x0F0F0F0F
    return bytes_ * 0x01010101 >> 24


def _tensors_of(call: Call) -> tuple[str, ...]:
    """The tensors that the mask reads, in the order of keys of maps."""
    return tuple(sorted(tensors(call.variant.mask)))


def _served(kernel: Kernel, call: Call) -> tuple[Any, ...]:
    """The kernel that a map is for, and the sizes that decide it."""
    return kernel.full_name, call.batch, call.heads, call.seqlen_q, call.seqlen_k


def _decisive(given: Given, own: Sequence[str]) -> list[Tensor] | None:
    """Return the tensors that decide the map: those of the mask (``own``) and lengths.

    None if torch does not count the writes to one of them, as in inference mode, or often cannot: the lengths of caches
    in pages are written by kernels of servers.
    """
    if given.form == "paged":
        return None
    decide = [given.arguments[name] for name in own]
    decide += [one for one in (given.seqused_k, given.cu_seqlens_q, given.cu_seqlens_k) if one is not None]
    return None if any(one.is_inference() for one in decide) else decide


def _places(decide: Sequence[Tensor]) -> tuple[Any, ...]:
    """The part of a map's key that identifies the memory of these tensors."""
    return tuple((id(_base(one)), one.data_ptr(), one.shape, one.stride()) for one in decide)


def where_from(call: Call, given: Given, direction: str) -> str:
    """The map of a call for which none is kept: whose it is, or when it is made."""
    if given.tile_map is not None and direction == "forward":
        return "the caller's tile map"
    kept = _decisive(given, _tensors_of(call)) is not None
    return f"a tile map that {'the first' if kept else 'each'} call makes"


def kept_map(kernel: Kernel, call: Call, given: Given) -> KeptMap | None:
    """Count the tiles of the map that is kept for a call, on any stream; None if none is. Waits for the GPU."""
    decide = _decisive(given, _tensors_of(call))
    if decide is None:
        return None
    read = names(call.variant.mask)
    numbers = tuple(call.scalars[rule.name] for rule in call.rules if rule.name in read)
    versions, places = tuple(one._version for one in decide), _places(decide)
    for key, entry in reversed(list(kept_maps().items())):
        same = key[0][2:] == numbers and key[2:] == places and entry.of == _served(kernel, call)
        if same and entry.is_of(decide, versions):
            return entry.summary()
    return None


def _base(tensor: Tensor) -> Tensor:
    """The tensor that a view is of, which counts writes for both; else the tensor itself."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def _hold_for_current_stream(words: Tensor) -> None:
    """Keep torch from reusing the memory of a map before the current stream has read it."""
    if words.is_cuda:
        words.record_stream(torch.cuda.current_stream(words.device))


def in_graph_pool(device: torch.device, stream: int) -> bool:
    """Whether torch's compiler is about to record a CUDA graph (``mode="reduce-overhead"``): it then runs the program
    once on a stream of its own, with allocations in the graph's pool, where nothing may outlive the program."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
        return manager is not None and manager.stream.cuda_stream == stream
    except (AssertionError, AttributeError):  # a thread without graphs, or another version of torch
        return False


class _Entry:
    """A kept map, with the tensors that decide it, by weak references, and their versions at the time."""

    __slots__ = (
        "captured", "complete", "device", "launches", "of", "owners", "shape", "streams", "times", "versions", "words",
    )  # fmt: skip

    def __init__(self, launches: Launches, shape: MapShape, of: tuple[Any, ...], device: torch.device) -> None:
        """``of``: as of ``_served``."""
        self.launches = launches  # alive, so that no other has its identity
        self.shape, self.of, self.device = shape, of, device
        self.streams = {launches.stream()}  # that may read it: torch keeps its memory until they have
        self.times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # around what made it
        self.owners: tuple[weakref.ref[Tensor], ...] = ()
        self.versions: tuple[int, ...] = ()
        self.words: Tensor | None = None
        self.complete = False  # has visible pairs, or is known to get none
        self.captured = False  # a graph reads it, whenever it is replayed

    def is_of(self, decide: Sequence[Tensor], versions: tuple[int, ...]) -> bool:
        """Whether the map is that of these tensors, with what they hold now."""
        same = all(owner() is _base(one) for owner, one in zip(self.owners, decide, strict=True))
        return same and self.versions == versions

    def timed(self, make: Callable[..., Tensor], *given: Any) -> Tensor:
        """Call ``make`` between two events, which time it on the GPU, and return its map."""
        if self.device.type != "cuda":
            return make(*given)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)  # of the tensors' device, which need not be the current one
        begin.record(stream)
        words = make(*given)
        end.record(stream)
        self.times.append((begin, end))
        return words

    def summary(self) -> KeptMap:
        """Count the tiles; waits for the GPU."""
        assert self.words is not None
        words = self.words[: self.shape.row_words] if self.shape.slots else self.words
        places = torch.arange(32, dtype=torch.int32)
        bits = words.cpu().reshape(-1, 2, self.shape.words)[..., None] >> places & 1
        full, partial = bits.sum((0, 2, 3)).tolist()
        for _, end in self.times:
            end.synchronize()
        took = sum(begin.elapsed_time(end) for begin, end in self.times)
        has_bits = self.words.numel() > self.shape.map_words + self.shape.slots
        return KeptMap(self.shape.tiles, full, partial, bool(self.shape.slots) and has_bits, took)


class _KeptMaps:
    """The maps that plain calls used last, by prepared call, scalars, stream and tensors.

    Once complete, the map of a mask that depends on positions and scalars alone has prepared call and scalars as its
    key: all streams share it.

    A map is valid as long as its tensors live and torch counts no write to them. A write that torch does not count
    (through ``.data``, DLPack or another library's kernel) goes unnoticed.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self.changes = 0  # of the maps that are kept

    def last(self, words: Tensor, stream: int, numbers: list[Number], decide: Sequence[Tensor]) -> _Last | None:
        """Record by which a later call knows the map that was used last, if that is ``words`` and complete; else
        None."""
        for key in reversed(self._entries):
            entry = self._entries.get(key)
            if entry is not None and entry.words is words and entry.complete:
                tensors = [(weakref.ref(one), one._version, one.data_ptr()) for one in decide]
                return _Last(words, self.changes, stream, numbers, tensors)
            return None
        return None

    def lasting(self, sizes: tuple[Any, ...], stream: int, capturing: bool) -> Tensor | None:
        """Return the complete map of a mask that reads no tensor, for any stream; None if there is none yet.

        A graph may be replayed at any time, so that a map which a capture takes is never dropped.
        """
        entry = self._entries.get((sizes,))
        if entry is None or entry.words is None:
            return None
        if capturing:
            entry.captured = True
        elif stream not in entry.streams:
            entry.streams.add(stream)
            _hold_for_current_stream(entry.words)
        self._touch((sizes,))
        return entry.words

    def get(self, key: Any, decide: Sequence[Tensor], make: Callable[..., Tensor], new: Callable[[], _Entry]) -> Tensor:
        """Return the map of a key and its tensors: the kept one if nothing was written since, with visible pairs from
        the second use on. ``make`` is told whether to add these, and to which map if not to a new one, which the entry
        that ``new`` returns then holds."""
        versions = tuple(one._version for one in decide)
        entry = self._entries.get(key)
        if entry is not None and entry.words is not None and entry.is_of(decide, versions):
            if not entry.complete:
                entry.words, entry.complete = entry.timed(make, True, entry.words), True
                self.changes += 1
                if not decide:
                    if entry.words.is_cuda:
                        torch.cuda.current_stream(entry.words.device).synchronize()  # for other streams
                    self._entries.pop(key, None)
                    key = key[:1]
                    self._entries.setdefault(key, entry)  # a graph may already read that of another stream
            elif debug.active() and not same_words(entry.words, make(entry.shape.keeps_pairs), entry.shape):
                raise CallError(
                    "a tensor of the mask was written without torch counting it (through .data, DLPack or another "
                    "library's kernel), so that calls take the tile map of its old values; write through torch, or "
                    "pass tile_map=attngen.tile_map(...) after such a write"
                )
            self._touch(key)
            return entry.words
        entry = new()

        def drop(_: object) -> None:
            self.changes += 1
            self._entries.pop(key, None)

        entry.owners = tuple(weakref.ref(_base(one), drop) for one in decide)
        entry.versions, entry.words, entry.complete = versions, entry.timed(make, False), not entry.shape.keeps_pairs
        self.changes += 1  # maps that are still in use are looked up again, and so stay the last ones to be dropped
        self._entries[key] = entry
        self._touch(key)
        self._shrink()
        return entry.words

    def clear(self) -> None:
        """Forget all maps."""
        self.changes += 1
        self._entries.clear()

    def _touch(self, key: Any) -> None:
        with suppress(KeyError):  # another thread dropped it
            self._entries.move_to_end(key)

    def _shrink(self) -> None:
        """Drop the maps that were used longest ago, but for those of graphs."""
        # the garbage collector may drop maps at any time: not while a loop goes through the dictionary itself
        kept = [(key, self._entries.get(key)) for key in list(self._entries)]
        entries = [(key, entry) for key, entry in kept if entry is not None and not entry.captured]
        size = sum(4 * entry.words.numel() for _, entry in entries if entry.words is not None)
        for key, entry in entries[:-1]:
            if len(entries) <= _KEPT_MAPS and size <= _KEPT_BYTES:
                return
            self._entries.pop(key, None)
            size -= 4 * entry.words.numel() if entry.words is not None else 0
            entries = entries[1:]


_KEPT = _KeptMaps()


def kept_maps() -> Mapping[Any, _Entry]:
    """Maps that are kept, for tests and for reports of memory."""
    return _KEPT._entries
