"""Layout of kernel parameters in the runtime's block of values: C struct rules over the manifest's list.

The driver finds the values through pointers, so this order is the runtime's own; numbers of one size are aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attngen.errors import LoadError
from attngen.manifest import KINDS, STRUCTS, TYPE_BYTES, Argument
from attngen.runtime.device.interface import MAX_PARAMETER_BYTES

#: Bytes and alignment of a TMA descriptor, passed by value.
DESCRIPTOR_BYTES, DESCRIPTOR_ALIGNMENT = STRUCTS["descriptor"]


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The parameter block of a kernel. ``size`` ends with the last parameter, without padding after it."""

    parameters: tuple[Argument, ...]
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


def lay_out(arguments: Iterable[Argument]) -> ParameterLayout:
    """Return the parameter block of a launch: natural alignment, descriptors aligned to 64.

    Raises LoadError for an argument that this version does not know: passing something else there would be silent.
    """
    parameters: list[Argument] = []
    end = 0
    for argument in arguments:
        if argument.kind not in KINDS:
            raise LoadError(
                f"parameter '{argument.name}': kind '{argument.kind}' is not known to this version of attngen; "
                f"known: {', '.join(KINDS)}"
            )
        try:
            size, alignment = argument.form
        except KeyError:
            raise LoadError(
                f"parameter '{argument.name}': type '{argument.type}' is none of {', '.join(TYPE_BYTES)}"
            ) from None
        # The cubin's own offset; its alignment holds in the constant bank, not from the start of the block.
        offset = argument.offset if argument.offset >= 0 else -(-end // alignment) * alignment
        end = offset + size
        parameters.append(argument if argument.offset == offset else replace(argument, offset=offset))
    if end > MAX_PARAMETER_BYTES:
        raise LoadError(f"parameters take {end} B; a kernel takes at most {MAX_PARAMETER_BYTES} B")
    return ParameterLayout(tuple(parameters), end)


#: Manifest type → its code in ``struct``.
_CODES = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}

#: Kinds of parameters that are numbers of a call's shapes and strides.
NUMBERS = ("stride", "extent", "size", "present", "descriptor_shape", "descriptor_stride")


class Packer:
    """Packs the numbers of a parameter block into bytes, with zeros for all other parameters."""

    __slots__ = ("_pack", "numbers", "size")

    def __init__(self, layout: ParameterLayout) -> None:
        #: The parameters in the order in which values are given, and bytes of the block, a multiple of 64.
        self.numbers = sorted((p for p in layout.parameters if p.kind in NUMBERS), key=lambda p: p.offset)
        self.size = -(-layout.size // DESCRIPTOR_ALIGNMENT) * DESCRIPTOR_ALIGNMENT
        code, end = "<", 0
        for parameter in self.numbers:
            code += f"{parameter.offset - end}x{_CODES[parameter.type]}"
            end = parameter.offset + parameter.size
        self._pack = struct.Struct(f"{code}{self.size - end}x").pack

    def __call__(self, values: Sequence[float]) -> bytes:
        """Pack values; LoadError for one that does not fit its type."""
        try:
            return self._pack(*values)
        except struct.error:
            for value, parameter in zip(values, self.numbers, strict=True):
                try:
                    struct.pack(_CODES[parameter.type], value)
                except struct.error:
                    message = f"parameter '{parameter.name}': {value} does not fit {parameter.type}"
                    raise LoadError(message) from None
            raise
