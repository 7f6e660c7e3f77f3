"""Launches to emulate a kernel with: its parameters, the block, the thread, and what memory holds.

Values are small and consistent, like those of a call, since they decide how often loops run. Data is left out, except
for integers, which may be lengths, bounds or tile maps.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from attngen.compile.emulate.memory import Memory
from attngen.compile.emulate.program import Machine
from attngen.compile.emulate.values import UNKNOWN, WORD
from attngen.lang.divisors import division

#: The rank of a block in its cluster, which machine code puts above the addresses of its shared memory. It is not 0, so
#: that the bits of an address that a descriptor must leave out are not 0.
_CLUSTER_RANK = 1

#: Where a block's shared memory begins: after the first KiB, which the system keeps on sm90.
SHARED_BASE = _CLUSTER_RANK << 24 | 0x400

#: Each pointer of a launch has a region of 2 ** this many bytes to itself.
_REGION_BITS = 36

_WARPGROUP = 128

#: Bytes of the elements of integer arrays, by the type of the pointer.
_INTEGERS = {"*i1": 1, "*i8": 1, "*u8": 1, "*i16": 2, "*i32": 4, "*u32": 4, "*i64": 8, "*u64": 8}

#: A word of data, whose value does not matter: 1.0 in bfloat16, twice.
_DATA = 0x3F80_3F80

_FLOAT = struct.pack("<f", 0.125)


@dataclass(frozen=True)
class Launch:
    """One launch: lengths, the block, and the values of scalars and integers in memory that nothing else determines."""

    seqlen_q: int
    seqlen_k: int
    block: int
    present: bool  # whether optional arguments are passed
    integer: int
    tile_rows: int = 64  # rows of a tile of queries or of keys, where tiles are counted
    spread: tuple[int, ...] = (1,)  # factors of ``integer``, which arrays and scalars take in turn
    map_word: int = 0b0110_1101
    kv_heads: int = 1

    def machine(self, parameters: Sequence[Mapping[str, Any]], warpgroup: int) -> Machine:
        """Return what the first thread of a warpgroup starts with. ``parameters`` are the manifest's, in order."""
        block = bytearray()
        arrays: list[Callable[[int], Any]] = []
        turns = 0
        for parameter in parameters:
            integer = self.integer * self.spread[turns % len(self.spread)]
            turns += str(parameter.get("of")).startswith("tensor:") or parameter["kind"] == "scalar"
            value = self._bytes(parameter, len(arrays) + 1, integer)
            if parameter["type"].startswith("*"):
                arrays.append(partial(self._array, parameter, integer))
            block += bytes(parameter["offset"] - len(block)) + value
        special = {f"%{name}.{axis}": 0 for name in ("tid", "ctaid") for axis in "xyz"}
        special |= {"%laneid": 0, "%warpid": 4 * warpgroup, "%cluster_ctarank": _CLUSTER_RANK}
        special |= {"%tid.x": _WARPGROUP * warpgroup, "%ctaid.x": self.block}
        return Machine(
            special,
            bytes(block),
            shared=Memory(lambda address: _DATA),
            world=Memory(partial(_world, arrays)),
            local=Memory(lambda address: UNKNOWN),
        )

    def _bytes(self, parameter: Mapping[str, Any], region: int, integer: int) -> bytes:
        kind, type_ = parameter["kind"], parameter["type"]
        if kind == "descriptor":
            return bytes(128)
        if kind == "divisor":
            return struct.pack("<3i", *division(max(integer, 1)))
        if type_.startswith("*"):
            return struct.pack("<Q", region << _REGION_BITS)
        if type_ == "fp32":
            return _FLOAT
        if type_ == "fp64":
            return struct.pack("<d", 0.125)
        size = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}[type_]
        value = self._integer(kind, parameter.get("of"), integer)
        return (value & (1 << 8 * size) - 1).to_bytes(size, "little")

    def _integer(self, kind: str, of: str | None, integer: int) -> int:
        if kind == "present":
            return int(self.present)
        if kind in ("stride", "descriptor_stride"):
            return 4096
        if kind == "size":
            group, q_tiles = 2, -(-self.seqlen_q // self.tile_rows)
            sizes = {
                "batch": 1,
                "heads": group * self.kv_heads,
                "kv_heads": self.kv_heads,
                "group": group,
                "section": group,
                "seqlen_q": self.seqlen_q,
                "seqlen_k": self.seqlen_k,
                "total_q": self.seqlen_q,
                "total_k": self.seqlen_k,
                "q_tiles": q_tiles,
                "kv_tiles": -(-self.seqlen_k // self.tile_rows),
                "words": 1,
                "map_heads": 1,
            }
            return self.seqlen_k if of is None else sizes.get(of, 4)
        return self.seqlen_k if kind == "extent" else integer

    def _array(self, parameter: Mapping[str, Any], integer: int, offset: int) -> Any:
        """Return the word at an offset of an array: integers as the launch has them, arbitrary bits of other data."""
        size = _INTEGERS.get(parameter["type"])
        if size is None:
            return _DATA
        if size == 8:
            element = self._element(parameter["of"], integer, offset // 8)
            return (element >> 32 if offset & 4 else element) & WORD
        words = 0
        for i in range(4 // size):
            words |= (self._element(parameter["of"], integer, offset // size + i) & (1 << 8 * size) - 1) << 8 * size * i
        return words

    def _element(self, of: str | None, integer: int, index: int) -> int:
        if of in ("cu_seqlens_q", "cu_seqlens_k"):
            return index * (self.seqlen_q if of.endswith("q") else self.seqlen_k)
        if of == "seqused_k":
            return self.seqlen_k
        return self.map_word if of == "tile_map" else integer


def _world(arrays: Sequence[Callable[[int], Any]], address: int) -> Any:
    region = address >> _REGION_BITS
    if not 0 < region <= len(arrays):
        return UNKNOWN
    return arrays[region - 1](address & (1 << _REGION_BITS) - 1 & ~3)


#: Few tiles and many, whole ones and ragged ones, from the first block and from later ones.
LAUNCHES = (
    Launch(200, 333, block=0, present=True, integer=100),
    Launch(333, 200, block=3, present=False, integer=17, tile_rows=128),
    Launch(700, 700, block=4, present=True, integer=300, tile_rows=128),
)

#: More of them, for kernels some of whose products these do not reach.
MORE_LAUNCHES = (
    Launch(256, 512, block=2, present=False, integer=0, map_word=0xFFFF),
    Launch(200, 333, block=0, present=False, integer=150, spread=(0, 2)),
    Launch(200, 333, block=0, present=False, integer=150, spread=(2, 0)),
    Launch(700, 700, block=4, present=True, integer=1000, tile_rows=128, spread=(0, 0, 1)),
    Launch(700, 700, block=4, present=True, integer=1000, tile_rows=128, spread=(1, 1, 0)),
    Launch(700, 900, block=0, present=False, integer=600, tile_rows=128, spread=(1, -1)),
    Launch(900, 700, block=0, present=False, integer=600, tile_rows=128, spread=(-1, 1)),
    Launch(130, 130, block=0, present=False, integer=1, map_word=0x0000_0001),
    Launch(40, 1000, block=0, present=False, integer=500, tile_rows=16),
    Launch(1000, 1000, block=6, present=False, integer=700, tile_rows=128),
    Launch(64, 64, block=0, present=False, integer=64),
    Launch(700, 200, block=0, present=True, integer=100, spread=(-1, 1)),
    Launch(200, 333, block=0, present=False, integer=17, kv_heads=8),  # expressions may read numbers of heads, too
    Launch(60, 333, block=0, present=True, integer=17, kv_heads=40),
)


def drawn(count: int) -> Iterator[Launch]:
    """Yield launches drawn at random, always the same ones."""
    chance = random.Random(0)
    for _ in range(count):
        seqlen_q, tile_rows = chance.choice((64, 200, 333, 700)), chance.choice((16, 64, 128))
        blocks = 2 * -(-seqlen_q // tile_rows)
        yield Launch(
            seqlen_q,
            seqlen_k=chance.choice((64, 200, 333, 700)),
            block=chance.randrange(min(blocks, 8)),
            present=chance.random() < 0.5,
            integer=chance.choice((0, 1, 17, 64, 100, 300, 1000)),
            tile_rows=tile_rows,
            spread=chance.choice(((1,), (0, 1), (1, 0), (1, -1), (-1, 1), (0, 0, 1), (1, 1, 0))),
            map_word=chance.choice((0, 1, 0b0110_1101, 0xFFFF)),
        )
