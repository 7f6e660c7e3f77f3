"""The size of a wheel, and which kernels make it up: bytes in the archive, by variant, head dimension and arch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from attngen.build.kernel_filter import head_dim_text
from attngen.errors import PackageError
from attngen.operations import APPEND, BLOCK_SCORES, INDEX_SCORES, JVP
from attngen.runtime.registry.shipped import INDEX, KERNELS
from attngen.schema.helper_kernels import appends
from attngen.schema.kernel_spec import KernelSpec

#: Rows that a refusal shows.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Share:
    """The kernels of one variant, head dimension and arch: how many, and their bytes on disk and in the wheel.

    ``cubin_bytes`` are machine code as it lies on disk; ``wheel_bytes`` are all files of the kernels, compressed.
    """

    module: str
    variant: str
    head_dim: str
    arch: str
    kernels: int
    cubin_bytes: int
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class WheelSizes:
    """A wheel's bytes: its shares, the largest first, and the rest (runtime, stubs, metadata, archive)."""

    total: int
    shares: tuple[Share, ...]

    @property
    def rest(self) -> int:
        """Bytes of the wheel that belong to no kernel."""
        return self.total - sum(share.wheel_bytes for share in self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {"bytes": self.total, "rest_bytes": self.rest, "shares": [asdict(share) for share in self.shares]}

    def require(self, most: int, name: str) -> None:
        """Raise PackageError, which lists the largest shares, if the wheel is larger than ``most`` bytes."""
        if self.total <= most:
            return
        lines = [f"{name} would take {_show(self.total)}, more than the {_show(most)} that max-size allows:"]
        for share in self.shares[:_SHOWN]:
            count = f"{share.kernels} kernel{'' if share.kernels == 1 else 's'}"
            lines.append(
                f"  {_show(share.wheel_bytes)}  {share.variant}, head_dim {share.head_dim}, {share.arch}: {count}"
            )
        others = sum(share.wheel_bytes for share in self.shares[_SHOWN:])
        if others:
            lines.append(f"  {_show(others)}  {len(self.shares) - _SHOWN} more rows")
        lines.append(f"  {_show(self.rest)}  runtime, stubs and metadata")
        lines.append(
            "Leave out variants, head dimensions or dtypes in the spec, or choose with --arch, --dtype and --head-dim."
        )
        raise PackageError("\n".join(lines))


def _show(size: int) -> str:
    return f"{size:,} B"


def sizes_of(wheel: Path) -> WheelSizes:
    """Return the sizes of a wheel."""
    with ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        rows = [
            (name.partition("/")[0], row)
            for name in entries
            if name.endswith(f"/{INDEX}") and name.count("/") == 1
            for row in json.loads(archive.read(name))["kernels"]
        ]
    figures: dict[tuple[str, str, str, str], list[int]] = {}
    for module, row in rows:
        prefix = f"{module}/{KERNELS}/{row['name']}/"
        files = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
        code = sum(entry.file_size for name, entry in files.items() if name.endswith(".cubin"))
        share = figures.setdefault((module, row["variant"], head_dim_of(row), row["arch"]), [0, 0, 0])
        for i, value in enumerate((1, code, sum(entry.compress_size for entry in files.values()))):
            share[i] += value
    shares = [Share(*key, *values) for key, values in figures.items()]
    shares.sort(key=lambda share: (-share.wheel_bytes, share.module, share.variant, share.head_dim, share.arch))
    return WheelSizes(wheel.stat().st_size, tuple(shares))


#: Bytes in a wheel, as measured on wheels of kernels in CUDA (forwards and backwards in Triton are smaller): of a
#: kernel with its row in the index, by what it computes, and of the rest of a wheel.
_BYTES = {
    "forward": 28_000, "split": 40_000, "backward": 42_000, JVP: 47_000, APPEND: 15_000, INDEX_SCORES: 50_000,
    BLOCK_SCORES: 50_000,
}  # fmt: skip
_REST = 210_000


def estimated(kernels: Sequence[KernelSpec]) -> WheelSizes:
    """Return an estimate of a wheel of these kernels before any is compiled; bytes on disk are not estimated."""
    shares: dict[tuple[str, str, str, str], list[int]] = {}
    for kernel in (*kernels, *appends(kernels)):
        row = {"head_dim_qk": kernel.head_dim_qk, "head_dim_v": kernel.head_dim_v}
        share = shares.setdefault((kernel.package, kernel.variant.name, head_dim_of(row), kernel.arch), [0, 0])
        share[0] += 1
        share[1] += _BYTES["split" if kernel.split_kv else kernel.direction]
    rows = [Share(*key, count, 0, size) for key, (count, size) in shares.items()]
    rows.sort(key=lambda share: (-share.wheel_bytes, share.variant, share.head_dim, share.arch))
    return WheelSizes(_REST + sum(share.wheel_bytes for share in rows), tuple(rows))


def head_dim_of(row: Mapping[str, Any]) -> str:
    """A kernel's head dimension as text."""
    return head_dim_text(row["head_dim_qk"], row["head_dim_v"])
