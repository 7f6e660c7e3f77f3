"""The numbers of a call that depend on shapes and strides only: sizes, grids, tile maps and workspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import groupby
from math import gcd

from attngen.dtypes import CHUNK_COLUMNS, CHUNK_KEY_TILES, CHUNK_ROW_TILES, CHUNK_TILE
from attngen.errors import LoadError
from attngen.lang.divisors import reciprocal
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.listed import EXTRA_K
from attngen.manifest import CHUNK_KEYS, CHUNK_ROWS, GRID, LISTS, MERGED, SHARES, Argument
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.device.interface import Driver
from attngen.runtime.device.tensormap import usable_strides, windowed
from attngen.runtime.geometry.cuts import (
    NONE,
    Cut,
    alike,
    best_cut,
    best_cut_of_each,
    best_first_cut,
    best_query_cut,
    long_rows_cut,
    may_pay,
    sequences_of,
    steps_of,
)
from attngen.runtime.geometry.heads_in_l2 import group_of, heads_in_l2, tiles_of
from attngen.runtime.geometry.map_shape import MapShape
from attngen.runtime.geometry.orders import Order, order_of, steps_of_queries
from attngen.runtime.geometry.splits import Capacity, split_sizes
from attngen.runtime.kernels.module import Kernel, KernelLaunch


def cut_of(launch: KernelLaunch, call: Call, heads_in_l2: int, capacity: Capacity) -> Cut:
    """KV tiles that a backward cuts into parts, or query tiles of a forward, where blocks of the call then end more
    evenly.

    None where packed sequences differ in length and the host does not know by how much.
    """
    units = call.batch * call.kv_heads
    if capacity.blocks < 2:
        return NONE
    if not alike(call):
        sequences = sequences_of(call) if launch.by_keys and not launch.cuts_first and launch.tile_map is None else ()
        if not sequences:
            return NONE
        each = tuple(steps_of(launch, one) for one in sequences)
        return best_cut_of_each(each, group_of(call), call.kv_heads, heads_in_l2, capacity.blocks)
    if not launch.by_keys and launch.tile_map is not None:
        tiles = -(-call.seqlen_q // launch.tile_m), -(-call.seqlen_k // launch.tile_n)
        return long_rows_cut(*tiles, call.batch * call.heads, capacity.blocks)
    if not launch.by_keys:
        if not launch.times:
            return NONE
        _, tile, step = launch.times
        steps = steps_of_queries(launch, call)[::-1]
        return best_query_cut(steps, call.batch * call.heads, heads_in_l2, capacity.blocks, round(tile / step, 2))
    if launch.tile_map is not None and launch.cuts_first:
        return long_rows_cut(
            -(-call.seqlen_k // launch.tile_n), -(-call.seqlen_q // launch.tile_m), units, capacity.blocks
        )
    if launch.cuts_first:
        return best_first_cut(steps_of(launch, call), group_of(call), units, heads_in_l2, capacity.blocks)
    if not may_pay(-(-call.seqlen_k // launch.tile_n) * units, capacity.blocks):
        return NONE
    return best_cut(steps_of(launch, call), group_of(call), units, heads_in_l2, capacity.blocks)


#: The capacity of launches whose blocks share no keys.
_ALONE = Capacity()


class Geometry:
    """All numbers of a call that depend on shapes and strides only, by their names in a manifest."""

    def __init__(
        self, launch: KernelLaunch, call: Call, views: Mapping[str, View] | None = None, *, capacity: Capacity = _ALONE
    ) -> None:
        """``views`` has what differs from q, k, v and a contiguous output, or comes on top of these. ``capacity``: what
        runs at once, where blocks share keys."""
        self.launch = launch
        self.call = call
        self.capacity = capacity
        self.map = MapShape(launch, launch.tile_map, call) if launch.tile_map else None
        self._views = views or {}
        q_tiles, self.units = tiles_of(call, launch.tile_m, pack_gqa=launch.pack_gqa)
        #: By name; what few launches read is computed when it is asked for.
        self.sizes = _LaunchSizes(
            batch=call.batch, heads=call.heads, kv_heads=call.kv_heads, group=group_of(call),
            seqlen_q=call.seqlen_q, seqlen_k=call.seqlen_k, max_seqlen_q=call.seqlen_q, max_seqlen_k=call.seqlen_k,
            total_q=call.total_q, total_k=call.total_k, least_queries=call.least_queries,
            most_queries=call.most_queries or MAX_SEQLEN, beside=call.beside, q_tiles=q_tiles,
            kv_tiles=-(-call.seqlen_k // launch.tile_n),
        )  # fmt: skip
        self.sizes.geometry = self
        if launch.grid in (GRID, MERGED):
            self.sizes |= split_sizes(launch, call, capacity)
        elif launch.grid == SHARES:
            self.sizes["split_cluster"] = capacity.shares
        self.absent: dict[str, bool] = {}  # whether something that a call may leave out is left out
        self.workspaces: Mapping[str, int] = {}  # elements of 4 bytes of each workspace of the call
        if launch.cuts and not launch.by_keys:  # a counter for the rows of each consumer
            self.sizes["split_counters"] = self.cut.tiles * (launch.tile_m // 64)
        if launch.cuts and self.map is not None:
            self.map.heads_of_block = self.sizes["heads_in_l2"] / capacity.blocks
            self.map.few = 2 * self.map.work <= capacity.blocks
            self.map.cut_rows = self.cut.tiles // max(call.batch * call.kv_heads, 1)

    @cached_property
    def views(self) -> dict[str, View]:
        """Shape and stride of each tensor by name."""
        call = self.call
        return {"q": call.q, "k": call.k, "v": call.v, "out": call.out_view(), **self._views}

    @cached_property
    def cut(self) -> Cut:
        """Tiles of keys, or of queries, that are cut into parts."""
        return cut_of(self.launch, self.call, self.sizes["heads_in_l2"], self.capacity) if self.launch.cuts else NONE

    @cached_property
    def order(self) -> Order:
        """The order in which blocks take tiles of queries."""
        return order_of(self.launch, self.call, self.units, self.sizes["heads_in_l2"], self.capacity.blocks)

    def of_chunk(self, first_part: int) -> Geometry:
        """The same numbers for a chunk of query rows."""
        own = copy(self)
        own.sizes = _LaunchSizes(self.sizes, first_part=first_part)
        own.sizes.geometry = own
        return own

    @property
    def tiles(self) -> int:
        """Work tiles, whatever they are, each for a split of the keys if there are splits. LoadError for a grid that
        this version does not know."""
        if self.launch.grid not in _TILES:
            raise LoadError(
                f"grid '{self.launch.grid}' is not known to this version of attngen; known: {', '.join(_TILES)}"
            )
        return _TILES[self.launch.grid](self) * (self.sizes["num_splits"] if self.launch.split else 1)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster if the call decides, and 1 if the cubin fixes the size."""
        return 1 if self.launch.grid == MERGED else self.sizes.get("split_cluster", 1)

    def blocks(self, driver: Driver, device: int) -> int:
        """Blocks of the launch: one for each tile, or a cluster, or as many as run at once where each takes tile after
        tile. In a backward these round dQ of tiles of queries, too."""
        if self.launch.grid in (GRID, SHARES):
            return self.tiles
        if not self.launch.persistent:
            return self.tiles * self.launch.cluster
        most = self.call.blocks or driver.multiprocessors(device)
        return min(max(self.tiles, self.sizes["q_tiles"] * self.units), most)

    def number(self, parameter: Argument) -> int:
        """Return the value of a stride, extent, size or presence; LoadError for one that is not known."""
        match parameter.kind:
            case "stride":
                return self._stride(parameter)
            case "extent":
                return int(self.call.tensors[self._tensor(parameter)].shape[int(parameter.axis or 0)])
            case "size":
                name = parameter.of or parameter.name
                try:
                    return self.sizes[name]
                except KeyError:
                    raise LoadError(f"parameter '{parameter.name}': no size is called '{name}'") from None
            case "present":
                return int(self._present(parameter))
            case "descriptor_shape":
                return self._described_form(parameter)[0][self._axis(parameter)]
            case "descriptor_stride":
                return usable_strides(*self._described_form(parameter), self._bytes(parameter))[self._axis(parameter)]
            case _:
                raise LoadError(f"parameter '{parameter.name}': kind '{parameter.kind}' is not a number")

    def _stride(self, parameter: Argument) -> int:
        of, axis = parameter.of, parameter.axis
        if of == "page_table" and self.call.page_table is not None:
            return self.call.page_table.stride(0)
        if of == "tile_map" and self.map is not None:
            return self.map.stride(str(axis))
        if of in self.views:
            seen = self.views[of]
            name = str(axis) if isinstance(axis, str) else seen.axes[int(axis or 0)]
            # Along an axis of extent 1 nothing steps, and torch's stride there is arbitrary.
            one = name in seen.axes and seen.shape[seen.axes.index(name)] == 1
            return 0 if one else seen.stride(name)
        if of in self.call.descales:
            return self.call.descales[of].stride({"b": 0, "page": 0, "h": 1, "s": 2}[str(axis)])
        tensor = self.call.tensors[self._tensor(parameter)]
        index = int(axis or 0)
        return 0 if tensor.shape[index] == 1 else tensor.stride(index)

    def _tensor(self, parameter: Argument) -> str:
        name = parameter.tensor
        if name is None or name not in self.call.tensors:
            raise LoadError(f"parameter '{parameter.name}': the variant has no tensor for '{parameter.of}'")
        return name

    def _present(self, parameter: Argument) -> bool:
        if parameter.of == "lse":
            return self.call.return_lse
        if parameter.of == "seqused_k":
            return self.call.seqused_k is not None
        if parameter.of == "cu_seqlens_q":
            return self.call.cu_seqlens_q is not None
        if (parameter.of or "").startswith(("stored:", "cleared:")) and parameter.of not in self.absent:
            return False
        if parameter.of in self.absent:
            return not self.absent[parameter.of]
        raise LoadError(f"parameter '{parameter.name}': presence of '{parameter.of}' is not known")

    def _described(self, parameter: Argument) -> View:
        if parameter.of not in self.views:
            raise LoadError(f"parameter '{parameter.name}': '{parameter.of}' has no descriptor")
        return self.views[parameter.of]

    def _described_form(self, parameter: Argument) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a TMA descriptor, as the kernel expects them."""
        described = self._described(parameter)
        if parameter.window is None:
            return described.shape, described.strides
        strides = usable_strides(described.shape, described.strides, self._bytes(parameter))
        return windowed(described.shape, strides, parameter.window)

    def _bytes(self, parameter: Argument) -> int:
        return self.launch.dtype_of(parameter.of or "").bytes

    def _axis(self, parameter: Argument) -> int:
        axis = parameter.axis
        return self._described(parameter).axes.index(axis) if isinstance(axis, str) else int(axis or 0)


class _LaunchSizes(dict[str, int]):
    """The sizes of a launch by name, of which those of ``_LATER``, and chunks of 16 bytes of workspaces, are computed
    when they are first asked for."""

    __slots__ = ("geometry",)

    geometry: Geometry

    def __missing__(self, name: str) -> int:
        """Compute a size. KeyError for an unknown name."""
        workspace = name.removesuffix("_chunks")
        if workspace in self.geometry.workspaces and workspace != name:
            number = self.geometry.workspaces[workspace] // 4
        else:
            number = _LATER[name](self.geometry)
        self[name] = number
        return number


def _rows(geometry: Geometry) -> int:
    """Rows of queries: of all sequences where they are packed."""
    return geometry.call.total_q if geometry.call.ragged else geometry.call.seqlen_q


def _sum_tiles(geometry: Geometry) -> int:
    """Tiles of query rows of all heads, where those of each sequence begin on a tile."""
    call, rows = geometry.call, geometry.sizes["rows"]
    tiles = rows // geometry.launch.tile_m + call.batch if call.ragged else call.batch * geometry.sizes["row_tiles"]
    return call.heads * tiles


def _of_map(geometry: Geometry) -> MapShape:
    if geometry.map is None:
        raise KeyError("map_words")
    return geometry.map


def _key_tiles(geometry: Geometry) -> int:
    """Tiles of keys of all sequences and KV heads."""
    return geometry.sizes["kv_tiles"] * geometry.call.kv_heads * geometry.call.batch


#: Bytes that a chunk of query rows should take at most, as long as it keeps a GPU busy. Not measured.
CHUNK_BYTES = 1 << 30
#: Parts of a chunk at least: with fewer, multiprocessors of a Hopper GPU have no rows. Not measured: follows from 132.
_CHUNK_PARTS = 3


def _row_parts(geometry: Geometry) -> int:
    """Parts of the query rows of all KV heads, where those of each sequence begin with a part."""
    call, rows = geometry.call, CHUNK_TILE * CHUNK_ROW_TILES
    if call.ragged:
        return call.kv_heads * (call.total_q * group_of(call) // rows + call.batch)
    return call.kv_heads * call.batch * -(-call.seqlen_q * group_of(call) // rows)


def _chunk_parts(geometry: Geometry) -> int:
    """Parts of a chunk, of which P and dS, Q and dO lie in memory in 16 bits."""
    call = geometry.call
    tile = 2 * CHUNK_TILE * (2 * CHUNK_TILE * geometry.sizes["chunk_key_tiles"] + call.head_dim_qk + call.head_dim_v)
    parts = max(CHUNK_BYTES // (tile * CHUNK_ROW_TILES) // _CHUNK_PARTS, 1) * _CHUNK_PARTS
    return min(parts, geometry.sizes["row_parts"])


def _parts_of_chunk(geometry: Geometry) -> int:
    """Parts of the launch's own chunk; the last one may have fewer than others."""
    sizes = geometry.sizes
    return max(min(sizes["chunk_parts"], sizes["row_parts"] - sizes["first_part"]), 0)


_LATER: Mapping[str, Callable[[Geometry], int]] = {
    "group_bits": lambda g: g.sizes["group"].bit_length() - 1,
    "heads_in_l2": lambda g: heads_in_l2(g.launch, g.call, g.units, by_keys=g.launch.by_keys),
    "group_reciprocal": lambda g: reciprocal(g.sizes["group"]),
    "page_size": lambda g: g.call.page_size,
    "page_size_reciprocal": lambda g: reciprocal(g.call.page_size),
    "extra_page_size_reciprocal": lambda g: reciprocal(g.call.tensors[EXTRA_K.name].shape[1]),
    "num_pages": lambda g: g.call.num_pages,
    "box_rows": lambda g: gcd(g.call.page_size, g.launch.tile_n),
    "asked_splits": lambda g: g.call.num_splits,
    "asked_split_size": lambda g: g.call.split_size,
    "head_dim_qk": lambda g: g.call.head_dim_qk,
    "head_dim_v": lambda g: g.call.head_dim_v,
    "kv_units": lambda g: g.call.batch * g.call.kv_heads,
    "num_splits": lambda g: max(-(-g.call.seqlen_k // g.launch.split_size), 1) if g.launch.split_size else 1,
    "rows": _rows,
    "row_tiles": lambda g: -(-g.sizes["rows"] // g.launch.tile_m),
    "key_rows": lambda g: g.call.kv_heads * g.call.total_k,
    "lse_rows": lambda g: g.call.heads * g.call.total_q,
    "sum_tiles": _sum_tiles,
    "cut_tiles": lambda g: g.cut.tiles,
    "cut_rows": lambda g: g.cut.tiles // max(g.call.batch * (g.call.kv_heads if g.launch.by_keys else g.call.heads), 1),
    "parts": lambda g: g.cut.parts,
    "cut_parts": lambda g: g.cut.tiles * g.cut.parts,
    "long_tiles": lambda g: g.order.long,
    "short_tiles": lambda g: g.order.short,
    "uncut_tiles": lambda g: _key_tiles(g) - g.cut.tiles,
    "work_items": lambda g: _key_tiles(g) + g.cut.tiles * (g.cut.parts - 1),
    "row_parts": _row_parts,
    "chunk_parts": _chunk_parts,
    "chunk_tiles": lambda g: g.sizes["chunk_parts"] * CHUNK_ROW_TILES,
    "chunk_key_tiles": lambda g: -(-g.call.seqlen_k // (CHUNK_TILE * CHUNK_KEY_TILES)) * CHUNK_KEY_TILES,
    "first_part": lambda g: 0,
    "map_batch": lambda g: _of_map(g).batch,
    "map_heads": lambda g: _of_map(g).heads,
    "words": lambda g: _of_map(g).words,
    "map_words": lambda g: _of_map(g).map_words,
}

#: By the grid of a launch: its work tiles, without splits.
_TILES: Mapping[str, Callable[[Geometry], int]] = {
    "rows": lambda g: g.sizes["row_tiles"] * g.call.heads * (1 if g.call.ragged else g.call.batch),
    "queries": lambda g: g.sizes["q_tiles"] * g.units + g.cut.tiles * (g.cut.parts - 1),
    "keys": lambda g: g.sizes["work_items"],
    "key_rows": lambda g: -(-g.sizes["key_rows"] // g.launch.tile_n),
    CHUNK_ROWS: lambda g: _parts_of_chunk(g) * CHUNK_ROW_TILES,
    CHUNK_KEYS: lambda g: (
        _parts_of_chunk(g) * (g.sizes["chunk_key_tiles"] // CHUNK_KEY_TILES) * -(-g.call.head_dim_qk // CHUNK_COLUMNS)
    ),
    LISTS: lambda g: g.call.batch * g.call.kv_heads * g.call.seqlen_q * -(-group_of(g.call) // g.launch.tile_m),
    GRID: lambda g: g.sizes["split_blocks"],
    MERGED: lambda g: g.sizes["merge_blocks"],
    SHARES: lambda g: g.sizes["q_tiles"] * g.units * g.capacity.shares,
    "query_words": lambda g: _of_map(g).row_words // 2,
    "key_words": lambda g: _of_map(g).row_words // 2,
    "query_map_rows": lambda g: _of_map(g).all_rows,
    "key_map_rows": lambda g: _of_map(g).all_rows,
}


def geometries(
    kernel: Kernel,
    call: Call,
    views: Mapping[str, View],
    *,
    absent: Mapping[str, bool] | None = None,
    capacity: Capacity = _ALONE,
) -> list[Geometry]:
    """Return the numbers of a call for each launch of a kernel, in order; ``views`` and the rest as above."""
    launches = [Geometry(launch, call, views, capacity=capacity) for launch in kernel.launches]
    elements = workspace_sizes(kernel, launches)
    for geometry in launches:
        geometry.workspaces = elements
        if absent:
            geometry.absent |= absent
    return launches


def by_chunks(launches: Sequence[Geometry]) -> list[Geometry]:
    """The numbers of all launches of a call in their order, from those of the launches of a kernel: launches that take
    turns over chunks of query rows come once for each chunk."""
    ordered: list[Geometry] = []
    for chunked, group in groupby(launches, key=lambda geometry: geometry.launch.chunked):
        taken = list(group)
        sizes = taken[0].sizes
        if not chunked:
            ordered += taken
        elif sizes["row_parts"]:
            firsts = range(0, sizes["row_parts"], sizes["chunk_parts"])
            ordered += (geometry.of_chunk(first) for first in firsts for geometry in taken)
    return ordered


def workspace_sizes(kernel: Kernel, launches: Sequence[Geometry]) -> dict[str, int]:
    """Elements of 4 bytes of each workspace of a call."""
    if not kernel.workspaces:
        return {}
    sizes = launches[kernel.main_place].sizes
    return {workspace.name: workspace.elements(sizes) for workspace in kernel.workspaces}


def map_shapes(launches: Sequence[Geometry]) -> dict[str, MapShape]:
    """Return the shape of each tile map, by the launch that reads it."""
    return {one.map.owner: one.map for one in launches if one.map is not None}
