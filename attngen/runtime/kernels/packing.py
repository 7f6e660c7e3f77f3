"""Where each parameter of a kernel stands in the runtime's block of values: C struct rules over the manifest's list.

The driver finds the values through pointers, so this order is the runtime's own; numbers of one size are aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.errors import LoadError
from attngen.runtime.device.driver import MAX_PARAMETER_BYTES

#: Manifest type → bytes; alignment is the same. Triton passes a bool as one byte.
TYPE_BYTES: dict[str, int] = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}

#: Bytes and alignment of a TMA descriptor (CUtensorMap), passed by value.
DESCRIPTOR_BYTES, DESCRIPTOR_ALIGNMENT = 128, 64

#: Bytes and alignment of a divisor, its reciprocal and the shift after it (divisor.cuh).
DIVISOR_BYTES, DIVISOR_ALIGNMENT = 12, 4

POINTER_KINDS = ("pointer", "scratch")
KINDS = (
    *POINTER_KINDS, "stride", "extent", "size", "scalar", "scale", "present", "descriptor", "descriptor_shape",
    "descriptor_stride", "divisor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of a manifest's parameter list, with its place in the block (bytes).

    ``divisibility`` is what the compiler was promised: an address or a value that is a multiple of it.
    """

    name: str
    kind: str
    of: str | None
    axis: str | int | None
    type: str
    offset: int
    size: int
    divisibility: int = 0
    box: tuple[int, ...] = ()
    swizzle: int | None = None
    window: int | None = None
    packed: bool = False
    paged: bool = False
    transposed: bool = False

    @property
    def tensor(self) -> str | None:
        """Name of the variant's tensor that this parameter describes, or None."""
        return self.of.removeprefix("tensor:") if self.of and self.of.startswith("tensor:") else None


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameter block of a kernel. ``size`` ends with the last parameter, without padding after it."""

    parameters: tuple[Parameter, ...]
    size: int

    @property
    def strided(self) -> frozenset[tuple[str, str | int | None]]:
        """Tensor and axis of every stride that is a parameter; along other axes the kernel steps by one element."""
        return frozenset((p.of or "", p.axis) for p in self.parameters if p.kind == "stride")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each parameter in the block, in order."""
        return tuple(p.offset for p in self.parameters)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter, in order."""
        return tuple(p.size for p in self.parameters)


def _form(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return size and alignment of a parameter in bytes."""
    if row["kind"] == "descriptor":
        return DESCRIPTOR_BYTES, DESCRIPTOR_ALIGNMENT
    if row["kind"] == "divisor":
        return DIVISOR_BYTES, DIVISOR_ALIGNMENT
    if row["kind"] in POINTER_KINDS:
        return 8, 8
    size = TYPE_BYTES[row["type"]]
    return size, size


def lay_out(rows: Iterable[Mapping[str, Any]]) -> Layout:
    """Return the parameter block of a manifest's parameter list: natural alignment, descriptors aligned to 64.

    Raises LoadError for an entry that this version does not know: passing something else there would be silent.
    """
    parameters: list[Parameter] = []
    end = 0
    for row in rows:
        if row.get("kind") not in KINDS:
            raise LoadError(
                f"parameter '{row.get('name')}': kind '{row.get('kind')}' is not known to this version of attngen; "
                f"known: {', '.join(KINDS)}"
            )
        try:
            size, alignment = _form(row)
        except KeyError:
            raise LoadError(
                f"parameter '{row.get('name')}': type '{row.get('type')}' is none of {', '.join(TYPE_BYTES)}"
            ) from None
        # Where the cubin has it; its alignment holds in the constant bank, not from the start of the block.
        offset = row["offset"] if "offset" in row else -(-end // alignment) * alignment
        end = offset + size
        parameters.append(
            Parameter(
                name=row["name"],
                kind=row["kind"],
                of=row.get("of"),
                axis=row.get("axis"),
                type=row.get("type", "i64"),
                offset=offset,
                size=size,
                divisibility=row.get("divisibility") or 0,
                box=tuple(row.get("box") or ()),
                swizzle=row.get("swizzle"),
                window=row.get("window"),
                packed=bool(row.get("packed")),
                paged=bool(row.get("paged")),
                transposed=bool(row.get("transposed")),
            )
        )
    if end > MAX_PARAMETER_BYTES:
        raise LoadError(f"parameters take {end} B; a kernel takes at most {MAX_PARAMETER_BYTES} B")
    return Layout(tuple(parameters), end)
