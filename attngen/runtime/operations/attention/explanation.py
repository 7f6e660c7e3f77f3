"""Explanation of a call: the kernel that would run and why, as a value that prints well."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from attngen.glyphs import printable
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.heads_in_l2 import group_of, tiles_of
from attngen.runtime.geometry.prediction import Prediction
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.map_cache import KeptMap
from attngen.runtime.registry.lookup import Resolved
from attngen.runtime.registry.no_kernel import describe
from attngen.runtime.registry.select import Selection


@dataclass(frozen=True)
class Explanation:
    """The outcome of ``attngen.explain``. ``runs`` is kernel, reference, nothing, or no kernel."""

    call: Call
    resolved: Resolved
    runs: str
    reason: str
    selection: Selection | None = None
    direction: str = "forward"  # or backward
    foreseen: tuple[tuple[Kernel, Prediction], ...] = ()  # of all kernels that take the call, by preference
    widened: Kernel | None = None  # what writes a cache in 8 bits in 16 first, for a kernel that reads these
    expanded: str = ""  # what is done to q, k and v that are expanded
    kept_map: KeptMap | None = None  # the tile map that the call would take
    tile_map: str = ""  # if none is kept: whose it is, or when it is made

    @property
    def kernel(self) -> Kernel | None:
        """The kernel that would run, if one would."""
        return self.selection.kernel if self.selection else None

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """Name of each kernel that was tried before, and the one reason against it."""
        return [(r.kernel.full_name, r.reason) for r in self.selection.rejected] if self.selection else []

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON."""
        return {
            "variant": self.call.variant.name,
            "call": describe(self.call, self.direction),
            "runs": self.runs,
            "reason": self.reason,
            "kernel": self.kernel.full_name if self.kernel else None,
            **({"widened_by": self.widened.full_name} if self.widened else {}),
            **({"expanded": self.expanded} if self.expanded else {}),
            "grid": self._blocks(),
            "pack_gqa": bool(self.kernel and self.kernel.pack_gqa),
            "rejected": [{"kernel": name, "reason": reason} for name, reason in self.rejected],
            **({"tile_map": {**asdict(self.kept_map), "kept": True}} if self.kept_map else {}),
            "predicted": [
                {"kernel": kernel.full_name, "microseconds": round(times.microseconds, 2), "tiles": times.tiles}
                for kernel, times in self.foreseen
            ],
        }

    def _blocks(self) -> int | None:
        kernel = self.kernel
        if kernel is None or kernel.direction == "backward":
            return None
        tiles = prod(tiles_of(self.call, kernel.tile_m, pack_gqa=kernel.pack_gqa))
        device = self.call.device.index or 0
        if kernel.main.persistent:
            return min(tiles, drivers.current().multiprocessors(device))
        return tiles * capacity_for(kernel, self.call, drivers.current, device).shares

    def _packing(self, kernel: Kernel) -> str:
        """Say what it saves that the heads of a group share tiles."""
        with_it, without = (prod(tiles_of(self.call, kernel.tile_m, pack_gqa=each)) for each in (True, False))
        return f"the {group_of(self.call)} query heads of a KV head share tiles: {with_it} work tiles, else {without}"

    def __str__(self) -> str:
        if self.runs == "no kernel":
            return self.reason
        what = f"{self.call.variant.name} ({describe(self.call, self.direction)})"
        lines = [f"{what}: runs {self.runs}, since {self.reason}"]
        kernel = self.kernel
        if kernel is not None:
            lines[0] = f"{what}: runs {kernel.full_name}"
            tile = f"tile {kernel.tile_m} x {kernel.tile_n}, iteration {kernel.iteration}"
            if kernel.direction == "backward":
                order = "a fixed order" if kernel.reproducible else "no fixed order"
                summed = " and ".join(f"d{name[1:].upper()}" for name in kernel.summed or ("dq",))
                launch = f"{', '.join(launch.name for launch in kernel.launches)}, {summed} added up in {order}"
            else:
                threads = kernel.main.entry.threads
                launch = f"{self._blocks()} blocks of {threads} threads, {kernel.shared_memory} B shared memory"
            lines.append(f"  {kernel.backend}, {kernel.arch.name}, {kernel.loads} loads, {tile}, {launch}")
            if self.expanded:
                lines.append(f"  {self.expanded}")
            if self.widened is not None:
                lines.append(f"  k and v are widened to {self.call.dtype} first, by {self.widened.full_name}")
            if kernel.pack_gqa:
                lines.append(f"  {self._packing(kernel)}")
            if self.kept_map is not None:
                lines.append(f"  {self.kept_map}")
            elif self.tile_map:
                lines.append(f"  visits the tiles of {self.tile_map}")
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        lines += [
            f"  {'' if each is kernel else f'{each.full_name}: '}predicted {times.microseconds:.1f} µs, {times}"
            for each, times in self.foreseen
        ]
        return printable("\n".join(lines))
