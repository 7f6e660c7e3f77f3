"""A built kernel as the runtime sees it: its manifest, its cubin, and the handle on each device that has run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import DType
from attngen.dtypes import dtype as dtype_row
from attngen.errors import LoadError
from attngen.files import read_regular
from attngen.formats import VERSION
from attngen.lang.variant import Variant
from attngen.runtime.device.driver import COOPERATIVE, DEPENDENT, PLAIN, REMEDY, Driver
from attngen.runtime.kernels.manifest import SHARES, check_manifest, read_manifest
from attngen.runtime.kernels.packing import Layout, lay_out


class Entry:
    """One launchable function of a cubin: its symbol, its parameter block, and its handle on each device.

    ``how`` it is launched, as the driver counts: DEPENDENT where it waits by itself for the work ahead of it.
    """

    def __init__(
        self,
        symbol: str,
        rows: list[Mapping[str, Any]],
        threads: int,
        shared_memory: int,
        image: Callable[[], bytes],
        how: int = PLAIN,
    ) -> None:
        self.symbol = symbol
        self.threads = threads
        self.shared_memory = shared_memory
        self.how = how
        self._rows = rows
        self._image = image
        self._functions: dict[tuple[int, int], Any] = {}

    @cached_property
    def layout(self) -> Layout:
        """The parameter block; LoadError for a list that this version does not understand."""
        return lay_out(self._rows)

    def launch_on(self, driver: Driver, device: int, blocks: int, cluster: int = 1) -> tuple[Any, int, int, int, int]:
        """A launch as the driver takes it, without its parameters. Raises LoadError for a bad cubin."""
        return self.function(driver, device, cluster), blocks, self.threads, self.shared_memory, self.how

    def function(self, driver: Driver, device: int, cluster: int = 1) -> Any:
        """Return the handle on a device, for clusters of a size that the cubin leaves open; the cubin is read and
        loaded at the first use there."""
        function = self._functions.get((device, cluster))
        if function is None:
            function = self._functions[device, cluster] = driver.load(
                self._image(), self.symbol, device, self.shared_memory, self.layout.sizes, cluster
            )
        return function


class Launch:
    """One of the launches of a kernel, which a call makes one after the other; each has tiles and a grid of its own."""

    def __init__(self, kernel: Kernel, row: Mapping[str, Any], image: Callable[[], bytes]) -> None:
        self.name: str = row["name"]
        self.grid: str = row["grid"]
        self.tile_m: int = row["tile_m"]
        self.tile_n: int = row["tile_n"]
        self.full_name = f"{kernel.full_name} ({self.name})"
        self.dtype_of = kernel.dtype_of
        self.section_keys, self.section_heads = kernel.section_keys, kernel.section_heads
        self.pack_gqa = kernel.pack_gqa
        self.persistent = bool(row.get("persistent"))
        self.cluster: int = row.get("cluster", 1)
        self.split, self.split_size = bool(row.get("split")), kernel.split_size
        self.shares: int = self.cluster if self.grid == SHARES else 1  # the most blocks that share the keys of a tile
        self.row_warps: int = row.get("row_warps", 1)
        self.counted = any(one.get("of") == "tile_counter" for one in row["parameters"])  # tiles are taken from it
        self.cuts = any(one.get("of") == "parts" for one in row["parameters"])  # the last tiles, into parts
        self.visible, self.uneven = kernel.visible, kernel.uneven
        shared = (row.get("resources") or {}).get("shared_memory", 0)
        how = COOPERATIVE if row.get("cooperative") else DEPENDENT if row.get("pdl") else PLAIN
        self.entry = Entry(row["symbol"], row["parameters"], row["threads"], shared, image, how)
        self._map: Mapping[str, Any] = row.get("tile_map") or {}

    @property
    def by_keys(self) -> bool:
        """Whether a block keeps a tile of keys and goes along the queries."""
        return self.grid in ("keys", "key_words")

    @property
    def classifies(self) -> bool:
        """Whether it computes a tile map, which a call may bring instead."""
        return self.grid.endswith("_words")

    @property
    def needs_tile_map(self) -> bool:
        """Whether it reads or writes a tile map."""
        return bool(self._map)

    @property
    def map_owner(self) -> str:
        """The launch that reads the tile map."""
        return str(self._map["owner"])

    @property
    def map_axes(self) -> tuple[bool, bool]:
        """Whether its tile map differs between batch entries, and between heads."""
        return self._map["batch"], self._map["heads"]

    @property
    def map_slots(self) -> bool:
        """Whether its tile map has a slot for each tile."""
        return bool(self._map.get("slots"))

    @property
    def map_bits(self) -> int:
        """Words of visible pairs that a lane reads of a partial tile; 0: it reads none."""
        return int(self._map.get("bits", 0))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that the launches of one call share: as many elements of 4 bytes as ``terms`` say."""

    name: str
    terms: tuple[tuple[int | str, ...], ...]
    multiple: int

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Workspace:
        """Read a row of a manifest."""
        return cls(row["name"], tuple(tuple(term) for term in row["terms"]), row.get("multiple", 1))

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Number of elements in a call of such sizes; LoadError for a size that is not known."""
        total = 0
        for term in self.terms:
            try:
                total += math.prod(sizes[factor] if isinstance(factor, str) else factor for factor in term)
            except KeyError as error:
                raise LoadError(f"workspace '{self.name}': no size is called {error}") from None
        return -(-total // self.multiple) * self.multiple


class Kernel:
    """One kernel of a package. Cheap to make: the cubin is read when the kernel is first launched."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        cubin: Callable[[], bytes],
        others: Mapping[str, Callable[[], bytes]] | None = None,
        origin: str = "",
    ) -> None:
        """``cubin`` returns the image of the main launch and of all that ``others`` lacks; ``origin`` says in messages
        where the kernel is from.

        Raises LoadError for a manifest of another format, one without a required entry, or of wrong types.
        """
        check_manifest(manifest, origin)
        self.manifest = manifest
        self.origin = origin
        self._cubin = cubin
        self._others = others or {}
        self.name: str = manifest["name"]
        self.package: str = manifest["package"]
        self.variant_name: str = manifest["variant"]["name"]
        self.arch = _arch(manifest["arch"], origin)
        self.dtype: str = manifest["dtype"]
        self.head_dim_qk: int = manifest["head_dim_qk"]
        self.head_dim_v: int = manifest["head_dim_v"]
        self.layout: str = manifest["layout"]
        self.direction: str = manifest["direction"]
        self.section_keys: int = manifest["section_keys"]
        self.section_heads: int = manifest.get("section_heads", 1)
        self.split_size: int = manifest.get("split_size", 0)  # keys that a block takes of a sequence; 0: all
        self.backend: str = manifest["backend"]
        self.loads: str = manifest["loads"]
        self.pack_gqa = bool(manifest.get("pack_gqa"))
        self.scale_block: int = manifest.get("scale_block", 0)  # tokens that share a scale; 0: all of a head
        self.transposed_v = bool(manifest.get("transposed_v"))  # keys lie side by side in v
        self.split_kv = bool(manifest.get("split_kv"))  # blocks share the keys of a sequence
        #: Nanoseconds of a launch, of a tile of work and of a tile of keys, and which keys rows see: ``prediction``; or
        #: which queries see keys: ``cuts``.
        self.times: Sequence[float] = manifest.get("times", ())
        #: The same on cards on which this kernel was measured to be faster than the plan's own choice.
        self.tuned: Mapping[str, Sequence[float]] = {row["gpu"]: row["times"] for row in manifest.get("tuned", ())}
        self.visible: Sequence[Sequence[Any]] = manifest.get("visible", ())
        structure = manifest.get("structure", {})
        #: Whether rows of a tile see different keys: consumers leave out what theirs do not see, or multiply in vain.
        self.skips = bool(structure.get("skips") or structure.get("anchor"))
        self.from_first = bool(structure.get("from_first"))  # the first rows of a sequence see the most keys
        self.uneven = bool(structure.get("uneven"))  # data decide how long a tile takes
        self.tile_m: int = manifest["tile_m"]
        self.tile_n: int = manifest["tile_n"]
        self.sum_columns: int = manifest.get("sum_columns", 0)  # of the dQ accumulator; 0: there is none
        self.ordered = bool(manifest.get("ordered"))  # tiles of keys add to dQ in a fixed order
        self.reproducible = self.ordered or not self.sum_columns  # dQ, dK and dV have the same bits on every run
        self._operands: Mapping[str, str] = manifest.get("operands", {})
        for name in (self.dtype, *self._operands.values()):
            _check_dtype(name, origin)
        self.workspaces = tuple(Workspace.from_dict(row) for row in manifest.get("workspaces", ()))
        self.launches = tuple(Launch(self, row, self._image_of(row)) for row in manifest["launches"])
        self.main = self.launch(manifest["main"])

    def launch(self, name: str) -> Launch:
        """Return one of the launches. Raises LoadError if there is none of that name."""
        for launch in self.launches:
            if launch.name == name:
                return launch
        raise LoadError(f"{self.origin or self.full_name}: the manifest has no launch '{name[:40]}'; {REMEDY}")

    def __repr__(self) -> str:
        return f"Kernel({self.full_name})"

    @property
    def full_name(self) -> str:
        """``package/kernel``, as messages name it."""
        return f"{self.package}/{self.name}"

    @cached_property
    def variant(self) -> Variant:
        """The variant that the kernel computes; LoadError if the manifest is damaged."""
        from attngen.lang.check import restore_variant

        try:
            return restore_variant(self.manifest["variant"])
        except Exception as error:  # whatever its expressions do to the parser
            raise LoadError(f"{self.origin}: the manifest's variant cannot be read: {error}") from error

    @cached_property
    def const_scalars(self) -> dict[str, bool | int | float]:
        """Scalars whose value the build fixed."""
        rows = self.manifest["variant"].get("scalars", ())
        return {row["name"]: _number(row["const"]) for row in rows if row.get("const") is not None}

    def dtype_of(self, operand: str) -> DType:
        """Return the dtype of q, k, v, out or a gradient; of one that the manifest does not list, the kernel's."""
        return dtype_row(self._operands.get(operand, self.dtype))

    def _image_of(self, row: Mapping[str, Any]) -> Callable[[], bytes]:
        read = self._others.get(row["name"])
        if read is None:
            return lambda: self._image_bytes
        return lambda: _verified(read, row.get("sha256"), f"{self.full_name} ({row['name']})")

    @property
    def needs_tile_map(self) -> bool:
        """Whether a call must bring, or first compute, a tile map."""
        return self.main.needs_tile_map

    @property
    def shared_memory(self) -> int:
        """Shared memory of a block of the main launch, in bytes."""
        return self.main.entry.shared_memory

    @cached_property
    def _image_bytes(self) -> bytes:
        return _verified(self._cubin, self.manifest.get("sha256"), self.full_name)


def _arch(name: str, origin: str) -> Arch:
    if name not in ARCHES:
        raise LoadError(
            f"{origin}: it is built for {name[:40]}, which attngen {VERSION} does not know; "
            f"it knows {', '.join(ARCHES)}"
        )
    return ARCHES[name]


def _check_dtype(name: str, origin: str) -> None:
    try:
        dtype_row(name)
    except KeyError:
        raise LoadError(f"{origin}: the manifest's dtype '{name[:40]}' is not known to attngen {VERSION}") from None


def _number(value: Any) -> bool | int | float:
    """Read a number of a manifest, in which infinities are spelled out."""
    return math.inf * value["inf"] if isinstance(value, dict) else value


def _verified(read: Callable[[], bytes], expected: str | None, name: str) -> bytes:
    """Read an image; LoadError if it is missing or is not the one that the manifest was written for."""
    try:
        image = read()
    except OSError as error:
        raise LoadError(f"{name}: its cubin cannot be read ({error}); {REMEDY}") from error
    if expected is not None and sha256(image).hexdigest() != expected:
        raise LoadError(f"{name}: the cubin is damaged (its checksum differs from the manifest's); {REMEDY}")
    return image


def read_kernel(folder: Path, *, sealed: bool = False) -> Kernel:
    """Return the kernel of a folder that holds ``manifest.json``, ``kernel.cubin``, and maybe those of other launches.

    ``sealed`` demands checksums of all of them in ``SHA256SUMS``, as entries of the cache have. Raises LoadError for a
    folder without a sound manifest.
    """
    images = {path.stem: _reader(path) for path in sorted(folder.glob("*.cubin"))}
    main = images.pop("kernel", _reader(folder / "kernel.cubin"))
    return Kernel(read_manifest(folder, sealed=sealed), main, images, origin=str(folder))


def _reader(path: Path) -> Callable[[], bytes]:
    return lambda: read_regular(path)
