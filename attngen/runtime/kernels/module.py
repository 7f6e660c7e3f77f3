"""A built kernel as the runtime sees it: its manifest, its cubin, and the handle on each device that has run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import DType
from attngen.dtypes import dtype as dtype_row
from attngen.errors import REMEDY, LoadError
from attngen.files import read_regular
from attngen.formats import VERSION
from attngen.lang.variant import Variant
from attngen.manifest import SHARES, Argument, KernelFields, LaunchEntry, LaunchFields, WorkLimits, parse_manifest
from attngen.records import shared
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.driver import COOPERATIVE, DEPENDENT, PLAIN
from attngen.runtime.device.interface import Driver, Handle
from attngen.runtime.kernels.folder import read_manifest
from attngen.runtime.kernels.packing import Packer, ParameterLayout, lay_out

#: Variants by the text of manifests: the kernels of a package have few, and parsing a long mask takes half a second.
_VARIANTS: RecentCache[Variant] = RecentCache(512)


class Entry:
    """One launchable function of a cubin: its symbol, its parameter block, and its handle on each device.

    ``how`` it is launched, as the driver counts: DEPENDENT where it waits by itself for the work ahead of it.
    """

    def __init__(
        self,
        symbol: str,
        arguments: Sequence[Argument],
        threads: int,
        shared_memory: int,
        image: Callable[[], bytes],
        how: int = PLAIN,
    ) -> None:
        self.symbol = symbol
        self.threads = threads
        self.shared_memory = shared_memory
        self.how = how
        self._arguments = arguments
        self._image = image
        self._functions: dict[tuple[int, int], Handle] = {}
        self._clusters: dict[tuple[int, int], int] = {}

    @cached_property
    def layout(self) -> ParameterLayout:
        """The parameter block; LoadError for a list that this version does not understand."""
        return lay_out(self._arguments)

    @cached_property
    def packer(self) -> Packer:
        """Packer of the numbers of the parameter block."""
        return Packer(self.layout)

    def launch_on(
        self, driver: Driver, device: int, blocks: int, cluster: int = 1
    ) -> tuple[Handle, int, int, int, int]:
        """A launch as the driver takes it, without its parameters. Raises LoadError for a bad cubin."""
        return self.function(driver, device, cluster), blocks, self.threads, self.shared_memory, self.how

    def function(self, driver: Driver, device: int, cluster: int = 1) -> Handle:
        """Return the handle on a device, for clusters of a size that the cubin leaves open; the cubin is read and
        loaded at the first use there."""
        function = self._functions.get((device, cluster))
        if function is None:
            function = self._functions[device, cluster] = driver.load(
                self._image(), self.symbol, device, self.shared_memory, self.layout.sizes, cluster
            )
        return function

    def clusters(self, driver: Driver, device: int, size: int) -> int:
        """Number of clusters of a size that a device runs at once; the driver is asked once for each device."""
        count = self._clusters.get((device, size))
        if count is None:
            count = self._clusters[device, size] = driver.clusters(
                self.function(driver, device), size, self.threads, self.shared_memory, device
            )
        return count


#: Sizes that tell what of a batch a launch is for.
_BOUNDS = ("least_queries", "most_queries", "beside")


class KernelLaunch(LaunchFields):
    """One of the launches of a kernel, which a call makes one after the other; each has tiles and a grid of its own."""

    def __init__(self, kernel: Kernel, entry: LaunchEntry, image: Callable[[], bytes]) -> None:
        super().__init__(**shared(LaunchFields, entry))
        self.full_name = f"{kernel.full_name} ({self.name})"
        self.dtype_of = kernel.dtype_of
        self.l2_keys, self.least_heads_in_l2 = kernel.l2_keys, kernel.least_heads_in_l2
        self.pack_gqa = kernel.pack_gqa
        self.split_size = kernel.split_size
        self.shares: int = self.cluster if self.grid == SHARES else 1  # the most blocks that share the keys of a tile
        self.counted = any(one.of == "tile_counter" for one in entry.parameters)  # tiles are taken from it
        self.cuts = any(one.of == "parts" for one in entry.parameters)  # the last tiles, into parts
        self.cuts_first = any(one.of == "cut_rows" for one in entry.parameters)  # or the first ones of each KV head
        self.chunked = any(one.of == "first_part" for one in entry.parameters)  # once for each chunk of query rows
        #: Limits that it takes of the queries of sequences, of which it leaves out others.
        self.bounds = frozenset(
            one.of for one in entry.parameters if one.of in ("least_queries", "most_queries", "beside")
        )
        self.short_early = any(one.of == "short_tiles" for one in entry.parameters)  # after some of the longest
        self.times = kernel.times
        self.visible, self.uneven = kernel.visible, kernel.structure.uneven
        self.limits: WorkLimits = kernel.limits
        self.blocks_at_once = 1 if self.persistent else kernel.structure.blocks  # of a multiprocessor
        shared_memory = entry.resources.shared_memory if entry.resources else 0
        how = DEPENDENT * self.pdl | COOPERATIVE * self.cooperative
        self.entry = Entry(self.symbol, entry.parameters, entry.threads, shared_memory, image, how)

    @property
    def by_keys(self) -> bool:
        """Whether a block keeps a tile of keys and goes along the queries."""
        return self.grid in ("keys", "key_words", "key_map_rows")

    @property
    def classifies(self) -> bool:
        """Whether it computes a tile map, which a call may bring instead."""
        return self.grid.endswith(("_words", "_map_rows"))

    @property
    def needs_tile_map(self) -> bool:
        """Whether it reads or writes a tile map."""
        return self.tile_map is not None


class Kernel(KernelFields):
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
        entries = parse_manifest(manifest, origin)
        super().__init__(**shared(KernelFields, entries))
        self.manifest = manifest
        self.origin = origin
        self._cubin = cubin
        self._others = others or {}
        self._entries = entries
        self.variant_name = entries.variant.name
        self.arch = _arch(entries.arch, origin)
        self.dtype = entries.dtype
        self.l2_keys = entries.l2_keys
        self.min_driver = entries.min_driver or 0
        for name in (self.dtype, *entries.operands.values()):
            _check_dtype(name, origin)
        self.limits = entries.structure  # of its list of work, if it has one
        self.launches = tuple(KernelLaunch(self, entry, self._image_of(entry)) for entry in entries.launches)
        self.main = self.launch(entries.main)
        self.main_place = self.launches.index(self.main)

    @property
    def skips(self) -> bool:
        """Whether rows of a tile see different keys: consumers leave out what theirs do not see, or multiply in
        vain."""
        return self.structure.skips or self.structure.end_alignment > 0

    @property
    def reproducible(self) -> bool:
        """Whether dQ, dK and dV have the same bits on every run."""
        return self.ordered or not self.sum_columns

    @cached_property
    def times_on(self) -> Mapping[str, Sequence[float]]:
        """The constants of ``times`` on cards on which this kernel was measured to be faster than the plan's own."""
        return {row.gpu: row.times for row in self.tuned}

    def launch(self, name: str) -> KernelLaunch:
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

        text = repr(self._entries.variant)
        known = _VARIANTS[text]
        if known is not None:
            return known
        try:
            restored = restore_variant(self._entries.variant)
            _VARIANTS.put(text, restored)
            return restored
        except Exception as error:  # whatever its expressions do to the parser
            raise LoadError(f"{self.origin}: the manifest's variant cannot be read: {error}") from error

    @cached_property
    def const_scalars(self) -> dict[str, bool | int | float]:
        """Scalars whose value the build fixed."""
        return {row.name: row.const for row in self._entries.variant.scalars if row.const is not None}

    def dtype_of(self, operand: str) -> DType:
        """Return the dtype of q, k, v, out or a gradient; of one that the manifest does not list, the kernel's."""
        return dtype_row(self._entries.operands.get(operand, self.dtype))

    def _image_of(self, entry: LaunchEntry) -> Callable[[], bytes]:
        read = self._others.get(entry.name)
        if read is None:
            return lambda: self._image_bytes
        return lambda: _verified(read, entry.sha256, f"{self.full_name} ({entry.name})")

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
        return _verified(self._cubin, self._entries.sha256, self.full_name)


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
    manifest = read_manifest(folder, sealed=sealed)  # first: a folder that cannot be read is a LoadError there
    images = {path.stem: _reader(path) for path in sorted(folder.glob("*.cubin"))}
    main = images.pop("kernel", _reader(folder / "kernel.cubin"))
    return Kernel(manifest, main, images, origin=str(folder))


def _reader(path: Path) -> Callable[[], bytes]:
    return lambda: read_regular(path)
