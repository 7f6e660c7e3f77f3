"""A built kernel as the runtime sees it: its manifest, its cubin, and the handle on each device that has run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import dtype as dtype_row
from attngen.errors import LoadError
from attngen.files import read_regular
from attngen.formats import VERSION
from attngen.lang.variant import Variant
from attngen.runtime.driver import REMEDY, Driver
from attngen.runtime.manifest import check_manifest, read_manifest
from attngen.runtime.packing import Layout, lay_out


class Entry:
    """One launchable function of a cubin: its symbol, its parameter block, and its handle on each device."""

    def __init__(
        self,
        symbol: str,
        rows: list[Mapping[str, Any]],
        threads: int,
        shared_memory: int,
        image: Callable[[], bytes],
    ) -> None:
        self.symbol = symbol
        self.threads = threads
        self.shared_memory = shared_memory
        self._rows = rows
        self._image = image
        self._functions: dict[int, Any] = {}

    @cached_property
    def layout(self) -> Layout:
        """The parameter block; LoadError for a list that this version does not understand."""
        return lay_out(self._rows)

    def function(self, driver: Driver, device: int) -> Any:
        """Return the handle on a device; the cubin is read and loaded at the first use there."""
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = driver.load(
                self._image(), self.symbol, device, self.shared_memory, self.layout.sizes
            )
        return function


class Part:
    """One of the kernels that a backward launches, one after the other; each has tiles and a grid of its own."""

    def __init__(self, kernel: Kernel, row: Mapping[str, Any], image: Callable[[], bytes]) -> None:
        self.name: str = row["name"]
        self.grid: str = row["grid"]
        self.tile_m: int = row["tile_m"]
        self.tile_n: int = row["tile_n"]
        self.full_name = f"{kernel.full_name} ({self.name})"
        self.dtype, self.element_bytes = kernel.dtype, kernel.element_bytes
        self.section_keys, self.section_heads, self.pack_gqa = kernel.section_keys, kernel.section_heads, False
        self.persistent = bool(row.get("persistent"))
        self.cluster: int = row.get("cluster", 1)
        self.counted = any(one.get("of") == "tile_counter" for one in row["parameters"])  # tiles are taken from it
        shared = (row.get("resources") or {}).get("shared_memory", 0)
        self.entry = Entry(row["symbol"], row["parameters"], row["threads"], shared, image)
        self._map: Mapping[str, bool] = row.get("tile_map") or {}

    @property
    def by_keys(self) -> bool:
        """Whether a block keeps a tile of keys and goes along the queries."""
        return self.grid in ("keys", "key_words")

    @property
    def needs_tile_map(self) -> bool:
        """Whether it reads or writes a tile map."""
        return bool(self._map)

    @property
    def map_axes(self) -> tuple[bool, bool]:
        """Whether its tile map differs between batch entries, and between heads."""
        return self._map["batch"], self._map["heads"]


class Kernel:
    """One kernel of a package. Cheap to make: the cubin is read when the kernel is first launched."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        cubin: Callable[[], bytes],
        classifier: Callable[[], bytes] | None = None,
        origin: str = "",
        parts: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        """``cubin``, ``classifier`` and ``parts`` return the images; ``origin`` says in messages where it is from.

        Raises LoadError for a manifest of another format, one without a required entry, or of wrong types.
        """
        check_manifest(manifest, origin)
        self.manifest = manifest
        self.origin = origin
        self._cubin = cubin
        self._classifier = classifier
        self._part_images = parts or {}
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
        self.backend: str = manifest["backend"]
        self.loads: str = manifest["loads"]
        self.persistent = bool(manifest.get("persistent"))
        self.pack_gqa = bool(manifest.get("pack_gqa"))
        self.tile_m: int = manifest["tile_m"]
        self.tile_n: int = manifest["tile_n"]
        self.sum_columns: int = manifest.get("sum_columns", 0)  # of dQ, if it is added up in global memory
        self.ordered = bool(manifest.get("ordered"))  # which it is in a fixed order
        self.reproducible = self.ordered or not self.sum_columns  # dQ, dK and dV have the same bits on every run
        self.shared_memory: int = manifest["resources"]["shared_memory"]
        self.entry = Entry(
            manifest["symbol"], manifest["parameters"], manifest["threads"], self.shared_memory, self._image
        )
        self.element_bytes = _element_bytes(self.dtype, origin)

    def __repr__(self) -> str:
        return f"Kernel({self.full_name})"

    @property
    def full_name(self) -> str:
        """``package/kernel``, as messages name it."""
        return f"{self.package}/{self.name}"

    @cached_property
    def variant(self) -> Variant:
        """The variant that the kernel computes; LoadError if the manifest is damaged."""
        try:
            return Variant.from_dict(self.manifest["variant"])
        except Exception as error:  # whatever its expressions do to the parser
            raise LoadError(f"{self.origin}: the manifest's variant cannot be read: {error}") from error

    @cached_property
    def const_scalars(self) -> dict[str, bool | int | float]:
        """Scalars whose value the build fixed."""
        rows = self.manifest["variant"].get("scalars", ())
        return {row["name"]: _number(row["const"]) for row in rows if row.get("const") is not None}

    @cached_property
    def classifier(self) -> Entry | None:
        """The kernel that computes the tile map, or None."""
        row = self.manifest.get("classifier")
        if not row:
            return None
        shared = (row.get("resources") or {}).get("shared_memory", 0)
        image = self._classifier_image if self._classifier is not None else self._image
        return Entry(row["symbol"], row["parameters"], row["threads"], shared, image)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What a backward launches, in order; none of a forward."""
        return tuple(Part(self, row, self._image_of(row)) for row in self.manifest.get("parts", ()))

    def _image_of(self, row: Mapping[str, Any]) -> Callable[[], bytes]:
        read = self._part_images.get(row["name"])
        if read is None:
            return self._image
        return lambda: _verified(read, row.get("sha256"), f"{self.full_name} ({row['name']})")

    @property
    def needs_tile_map(self) -> bool:
        """Whether a call must bring, or first compute, a tile map."""
        return bool(self.manifest.get("tile_map"))

    @property
    def map_axes(self) -> tuple[bool, bool]:
        """Whether the tile map differs between batch entries, and between heads."""
        axes = self.manifest.get("tile_map") or {}
        return bool(axes.get("batch", True)), bool(axes.get("heads", True))

    def _image(self) -> bytes:
        return self._image_bytes

    def _classifier_image(self) -> bytes:
        return self._classifier_bytes

    @cached_property
    def _image_bytes(self) -> bytes:
        return _verified(self._cubin, self.manifest.get("sha256"), self.full_name)

    @cached_property
    def _classifier_bytes(self) -> bytes:
        assert self._classifier is not None
        return _verified(self._classifier, self.manifest["classifier"].get("sha256"), f"{self.full_name} (classifier)")


def _arch(name: str, origin: str) -> Arch:
    if name not in ARCHES:
        raise LoadError(
            f"{origin}: it is built for {name}, which attngen {VERSION} does not know; it knows {', '.join(ARCHES)}"
        )
    return ARCHES[name]


def _element_bytes(name: str, origin: str) -> int:
    try:
        return dtype_row(name).bytes
    except KeyError:
        raise LoadError(f"{origin}: the manifest's dtype '{name}' is not known to attngen {VERSION}") from None


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
    """Return the kernel of a folder that holds ``manifest.json``, ``kernel.cubin`` and maybe ``classifier.cubin``.

    ``sealed`` demands checksums of all of them in ``SHA256SUMS``, as entries of the cache have. Raises LoadError for a
    folder without a sound manifest.
    """
    images = {path.stem: _reader(path) for path in sorted(folder.glob("*.cubin"))}
    return Kernel(
        read_manifest(folder, sealed=sealed),
        images.pop("kernel", _reader(folder / "kernel.cubin")),
        images.pop("classifier", None),
        origin=str(folder),
        parts=images,
    )


def _reader(path: Path) -> Callable[[], bytes]:
    return lambda: read_regular(path)
