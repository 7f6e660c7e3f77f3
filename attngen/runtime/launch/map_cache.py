"""Tile maps that are kept between calls: of which tensors they are, and when they are made again."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments import debug
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Number
from attngen.runtime.geometry.map_shape import SLOTS_OF_WORD, MapShape
from attngen.runtime.launch.launches import Launches

#: Maps that are kept for calls that do not bring one, and bytes of all of them, at most. Not measured: a
#: bound of memory.
_KEPT_MAPS, _KEPT_BYTES = 64, 2 * 2**30


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


class Last(NamedTuple):
    """The map of the last call of a kind, with all that has to be the same in the next one. Shapes and strides are."""

    words: Tensor
    changes: int  # of the kept maps
    stream: int
    numbers: list[Number]
    tensors: list[tuple[weakref.ref[Tensor], int, int]]  # those that decide it, their versions and addresses

    def serves(self, given: Given, names: Sequence[str], numbers: list[Number], stream: int) -> bool:
        """Whether it is the map of a call whose mask reads the tensors of these ``names``."""
        if self.changes != KEPT.changes or self.stream != stream or self.numbers != numbers or debug.active():
            return False
        if given.seqused_k is not None or given.cu_seqlens_q is not None or given.cu_seqlens_k is not None:
            return False
        for name, (tensor, version, address) in zip(names, self.tensors, strict=True):
            own: Tensor = given.arguments[name]
            one = tensor()
            if one is None or one is not own or one._version != version or one.data_ptr() != address:
                return False
        return True


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that a view is of, which counts writes for both; else the tensor itself."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def hold_for_current_stream(words: Tensor) -> None:
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


class MapEntry:
    """A kept map, with the tensors that decide it, by weak references, and their versions at the time."""

    __slots__ = (
        "captured", "complete", "device", "launches", "of", "owners", "shape", "streams", "times", "versions", "words",
    )  # fmt: skip

    def __init__(self, launches: Launches, shape: MapShape, of: tuple[object, ...], device: torch.device) -> None:
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
        same = all(owner() is base_of(one) for owner, one in zip(self.owners, decide, strict=True))
        return same and self.versions == versions

    def timed(self, make: Callable[..., Tensor], *given: object) -> Tensor:
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
        places = torch.arange(32, dtype=torch.int32, device="cpu")
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
        self._entries: OrderedDict[tuple[object, ...], MapEntry] = OrderedDict()
        self.changes = 0  # of the maps that are kept

    def last(self, words: Tensor, stream: int, numbers: list[Number], decide: Sequence[Tensor]) -> Last | None:
        """Record by which a later call knows the map that was used last, if that is ``words`` and complete; else
        None."""
        for key in reversed(self._entries):
            entry = self._entries.get(key)
            if entry is not None and entry.words is words and entry.complete:
                tensors = [(weakref.ref(one), one._version, one.data_ptr()) for one in decide]
                return Last(words, self.changes, stream, numbers, tensors)
            return None
        return None

    def lasting(self, sizes: tuple[object, ...], stream: int, capturing: bool) -> Tensor | None:
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
            hold_for_current_stream(entry.words)
        self._touch((sizes,))
        return entry.words

    def get(
        self,
        key: tuple[object, ...],
        decide: Sequence[Tensor],
        make: Callable[..., Tensor],
        new: Callable[[], MapEntry],
    ) -> Tensor:
        """Return the map of a key and its tensors. A kept map is reused unless a tensor was written, and gets the
        visible pairs of partial tiles at its second use. Otherwise ``new`` returns an entry for a new map.
        ``make(pairs, words)`` makes the map, or adds the pairs to the words of a kept one."""
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

        entry.owners = tuple(weakref.ref(base_of(one), drop) for one in decide)
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

    def _touch(self, key: tuple[object, ...]) -> None:
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


KEPT = _KeptMaps()


def kept_maps() -> Mapping[tuple[object, ...], MapEntry]:
    """Maps that are kept, for tests and for reports of memory."""
    return KEPT._entries


def same_words(words: Tensor, other: Tensor, shape: MapShape) -> bool:
    """Whether two maps are equal. The words of the order have slots, too, which nothing writes or reads."""
    if not shape.slots or words.shape != other.shape:
        return torch.equal(words, other)
    written, after = shape.map_words + SLOTS_OF_WORD * shape.row_words, shape.map_words + shape.slots
    return torch.equal(words[:written], other[:written]) and torch.equal(words[after:], other[after:])
