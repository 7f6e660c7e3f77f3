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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.ir import identity_of, names, tensors
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Number
from attngen.runtime.geometry.map_shape import MapShape
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.launches import Launches
from attngen.runtime.launch.map_cache import KEPT, KeptMap, Last, MapEntry, base_of, in_graph_pool, kept_maps

#: Bytes of the visible pairs of one map, at most: beyond it kernels evaluate the mask of partial tiles. Not measured.
MAX_BITS = 512 * 2**20
#: A row is long if it has more than this many times the tiles of the mean row. Not measured.
_LONG = 2
#: Steps that a work tile takes beside its own; and by how much a long one, of queries or of keys, has to outlast the
#: others to be cut (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together").
_TILE_STEPS, _OUTLASTS, _OUTLASTS_BY_KEYS = 2.6, 1.1, 2.0
#: Rows of keys are cut if those that stay whole are shorter than this share of the longest one. Where few are long, at
#: most so many of the heads that run side by side for each block, they are cut if they outlast the others by less
#: (docs/notebook/hopper_backward.md, "Long rows of keys that stay whole").
_SHORTER, _FEW_LONG, _FEW_OUTLAST = 0.75, 0.1, 1.25
#: Rows of all heads up to which they are taken by length: eight for each block of an H100
#: (docs/notebook/softmax_and_masks.md, "Rows of a map by their length").
_FEW_ROWS = 8 * 132
#: Tiles of a map up to which they are looked for: each takes a hash of 8 bytes meanwhile. Not measured.
_MAX_SLOTS = 2**26


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


def require_map(given: object) -> None:
    """Raise CallError unless an argument is a ``TileMap``."""
    if not isinstance(given, TileMap):
        raise CallError(f"tile_map must be what this runtime's tile_map returned, got {type(given).__name__}")


class MapMaker:
    """Makes the tile maps of one prepared call, and keeps them while the mask's tensors and scalars stay the same."""

    __slots__ = ("_device", "_last", "_launches", "_of", "_reads_floats", "_scalars", "_tensors")

    def __init__(self, launches: Launches, kernel: Kernel, call: Call, device: torch.device) -> None:
        self._launches, self._device = launches, device
        self._of = _served(kernel, call)
        self._tensors = _tensors_of(call)
        self._scalars = tuple(place for place, rule in enumerate(call.rules) if rule.name in names(call.variant.mask))
        self._reads_floats = any(call.rules[place].dtype == "fp32" for place in self._scalars)
        self._last: Last | None = None

    def append(self, given: Given, addresses: list[int], scale: float, scalars: Sequence[Number]) -> list[Tensor]:
        """Append the addresses of all maps, and return these; they must live until the launches are enqueued."""
        launches = self._launches
        addresses += [0] * (len(launches.names) - len(addresses))
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        last, stream = self._last, launches.stream()
        numbers = [scalars[place] for place in self._scalars]
        if self._reads_floats:
            numbers = [identity_of(number) for number in numbers]
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
                words = KEPT.lasting(sizes, stream, capturing) if not decide else None
                if words is None and fresh:
                    key = (sizes, stream, *_places(decide))
                    words = KEPT.get(key, decide, make, partial(MapEntry, launches, shape, self._of, self._device))
            if words is None:
                words = make(False)
            addresses[place] = words.data_ptr()
            appended.append(words)
        if fresh and decide is not None and len(decide) == len(self._tensors) and len(appended) == 1:
            self._last = KEPT.last(appended[0], stream, numbers, decide)
        return appended

    def made(self, addresses: list[int], scale: float, scalars: Sequence[Number]) -> Tensor:
        """Return the one map of a forward, made now, with visible pairs."""
        launches = self._launches
        addresses += [0] * (len(launches.names) - len(addresses))
        ((owner, shape),) = launches.maps.items()
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
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


def _long_rows_first(words: Tensor, shape: MapShape) -> Tensor:
    """Return the row indices of each batch entry: those of long rows first, the longest ahead, then the others, tiles
    of queries from the last to the first; and after all of them the most long rows that an entry has. That is 0 where
    rows that are taken first end before the others, so that nothing is cut. If there are few rows, all go by
    length, so that blocks end together; of many, neighbors run at a time, which read the same. All are long if half of
    the blocks would have none."""
    rows = words[: shape.row_words].view(shape.batch, shape.heads, shape.rows, 2 * shape.words)
    tiles = _set_bits(rows).sum((1, 3), dtype=torch.int32)
    long = tiles > 0 if shape.few else tiles * shape.rows > _LONG * tiles.sum(1, keepdim=True)
    lengths = tiles if shape.work <= _FEW_ROWS else torch.where(long, tiles, 0)
    if shape.by_keys:
        order = lengths.sort(dim=1, descending=True, stable=True).indices
    else:
        order = shape.rows - 1 - lengths.flip(1).sort(dim=1, descending=True, stable=True).indices
    count = long.sum(1).max()
    if shape.heads_of_block:
        steps = tiles / shape.heads + _TILE_STEPS
        others = shape.heads_of_block * steps.sum(1).mean()
        if not shape.by_keys:
            count *= steps.max() > _OUTLASTS * others
        else:
            longest = steps.max(0).values.sort(descending=True).values
            few = (count * shape.heads_of_block < _FEW_LONG) & (longest[0] > _FEW_OUTLAST * others)
            count *= few | (longest[0] > _OUTLASTS_BY_KEYS * others)
            if shape.cut_rows < shape.rows and not shape.few:
                count *= longest[shape.cut_rows] < _SHORTER * longest[0]
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


def _served(kernel: Kernel, call: Call) -> tuple[object, ...]:
    """The kernel that a map is for, and the sizes that decide it."""
    return kernel.full_name, call.batch, call.heads, call.seqlen_q, call.seqlen_k


def _decisive(given: Given, own: Sequence[str]) -> list[Tensor] | None:
    """Return the tensors that decide the map: those of the mask (``own``) and lengths.

    None if torch does not count the writes to one of them, as in inference mode, or often cannot: the lengths of caches
    in pages are written by kernels of servers.
    """
    if given.form == "paged":
        return None
    decide: list[Tensor] = [given.arguments[name] for name in own]
    decide += [one for one in (given.seqused_k, given.cu_seqlens_q, given.cu_seqlens_k) if one is not None]
    return None if any(one.is_inference() for one in decide) else decide


def _places(decide: Sequence[Tensor]) -> tuple[object, ...]:
    """The part of a map's key that identifies the memory of these tensors."""
    return tuple((id(base_of(one)), one.data_ptr(), one.shape, one.stride()) for one in decide)


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
        first = key[0]
        same = (
            isinstance(first, tuple)
            and first[2:] == numbers
            and key[2:] == places
            and entry.of == _served(kernel, call)
        )
        if same and entry.is_of(decide, versions):
            return entry.summary()
    return None
