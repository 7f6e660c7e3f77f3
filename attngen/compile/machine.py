"""Hopper's machine code, as far as checks need it: registers that HGMMA reads, registers that are written, branches.

``parse`` reads it exactly, from what nvdisasm prints. ``decode`` reads the bytes of the cubin, a hundred times faster,
since nvdisasm takes a quarter of a second to start; where it cannot tell, it names more registers as written than are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from attngen.errors import CompileError

#: Registers that HGMMA reads of its A operand: 64 x 16 elements of 16 bits over 128 threads.
_A_REGISTERS = 4

# --- the text of nvdisasm -----------------------------------------------------------------------------------

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_BRANCH = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")

#: Operations whose first operand is read, not written.
_NO_RESULT = ("ST", "BRA", "BAR", "SYNCS", "WARPGROUP", "UTMA", "R2UR", "EXIT", "RED", "MEMBAR", "HGMMA")

#: Suffixes of operations that write several registers from the first on.
_WIDE = {"128": 4, "64": 2, "WIDE": 2}

# --- the bytes of an instruction: two words of 64 bits -------------------------------------------------------

#: Bits 0 to 8 are the operation, 9 to 11 the form of its operands, 16 to 23 the register that it writes, 24 to 31
#: the first that it reads.
_OPERATION, _OPERATION_AND_FORM = 0x1FF, 0xFFF
_BRA, _HGMMA, _QGMMA, _HGMMA_OF_SHARED_MEMORY, _VIMNMX = 0x147, 0x1F0, 0x1F3, 0x9F0, 0x048
_NO_REGISTER = 255

#: In the second word of VIMNMX: the bit of .RELU, and, from bit 17 on, two predicates to write; all ones mean none.
_RELU, _PREDICATES = 1 << 12, 0x3F
_INSTRUCTION_BYTES = 16

#: Operations on uniform registers, which are not those of threads.
_UNIFORM = range(0x080, 0x0C0)

#: Operations that write one register; what is not among them may write up to four.
_ONE_RESULT = frozenset(
    {
        0x002,  # MOV
        0x007,  # SEL
        0x008,  # FSEL
        0x009,  # FMNMX
        0x010,  # IADD3
        0x011,  # LEA
        0x012,  # LOP3
        0x013,  # IABS
        0x016,  # PRMT
        0x019,  # SHF
        0x020,  # FMUL
        0x021,  # FADD
        0x023,  # FFMA
        0x024,  # IMAD
        0x027,  # IMAD.HI
        0x036,  # VIADD
        0x03E,  # F2FP
        0x045,  # I2FP
        0x046,  # VIADDMNMX
        0x048,  # VIMNMX
        0x108,  # MUFU
        0x189,  # SHFL
    }
)
_MOST_RESULTS = 4

_NONE: frozenset[int] = frozenset()


class Instruction(NamedTuple):
    """One instruction: the registers of a matrix product's A operand, those written, and where a branch goes.

    The accumulators of a product count as neither.
    """

    text: str
    product: bool = False
    reads: frozenset[int] = _NONE
    writes: frozenset[int] = _NONE
    target: int | None = None  # position in the code


def parse(sass: str) -> list[Instruction]:
    """The instructions of a text of nvdisasm."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append((instruction[1], instruction[2]))
    code = []
    for name, operands in lines:
        branch = _BRANCH.search(operands) if name.startswith("BRA") else None
        product = name.startswith("HGMMA")
        code.append(
            Instruction(
                f"{name} {operands}",
                product,
                _first_operand(operands) if product else _NONE,
                _written(name, operands),
                labels.get(branch[1]) if branch else None,
            )
        )
    return code


def _first_operand(operands: str) -> frozenset[int]:
    """The registers of a product's A operand; none if that is in shared memory."""
    parts = operands.split(",")
    register = _REGISTER.search(parts[1]) if len(parts) > 1 and "gdesc" not in parts[1] else None
    return _registers(int(register[1]), _A_REGISTERS) if register else _NONE


def _written(name: str, operands: str) -> frozenset[int]:
    places = [part.strip() for part in operands.split(",")]
    if len(places) > 1 and re.fullmatch(r"P[\dT]", places[0]):  # SHFL and LOP3 may write a predicate, too
        places = places[1:]
    register = re.fullmatch(r"R(\d+)", places[0])
    if name.startswith(_NO_RESULT) or not register:
        return _NONE
    parts = name.split(".")
    if parts[0] == "LDSM":
        count = int(parts[-1]) if parts[-1] in ("2", "4") else 1
    else:
        count = max(_WIDE.get(part, 1) for part in parts)
        if parts[0] == "CS2R" and "32" not in parts:
            count = 2
    return _registers(int(register[1]), count)


def _registers(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))


def decode(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin, without text.

    Products and branches are exact; ``writes`` may hold more registers than are written, never fewer. Raises
    CompileError for anything but a cubin.
    """
    return [_decode(place, low, high) for place, (low, high) in enumerate(_words(cubin))]


def count_products(cubin: bytes) -> int:
    """Count the wgmma instructions of a cubin: HGMMA has operands of 16 bits, QGMMA operands of 8."""
    return sum(low & _OPERATION in (_HGMMA, _QGMMA) for low, _ in _words(cubin))


def count_judged_clamps(cubin: bytes) -> int:
    """Count the VIMNMX.RELU, each a ``max(min(x, y), 0)``, that also write a predicate."""
    return sum(
        low & _OPERATION == _VIMNMX and high & _RELU > 0 and high >> 17 & _PREDICATES != _PREDICATES
        for low, high in _words(cubin)
    )


def _words(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yield the two words of each instruction of a cubin; CompileError for anything but a cubin."""
    try:
        code = b"".join(data for name, data in sections(cubin) if name.startswith(b".text."))
    except (struct.error, ValueError) as error:
        raise CompileError(f"the cubin is not an ELF file: {error}") from error
    yield from struct.iter_unpack("<QQ", code)


def sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        yield elf[start : elf.index(b"\0", start)], elf[offset : offset + size]


def extent(elf: bytes) -> int:
    """The size in bytes of a 64-bit ELF file: where the later of its two tables of headers ends.

    Raises ValueError or struct.error for anything else.
    """
    if not elf.startswith(b"\x7fELF\x02"):
        raise ValueError("no magic number of a 64-bit ELF file")
    segments, table = struct.unpack_from("<QQ", elf, 0x20)
    segment_size, segment_count, header_size, count = struct.unpack_from("<4H", elf, 0x36)
    return int(max(segments + segment_size * segment_count, table + header_size * count))


def _decode(place: int, low: int, high: int) -> Instruction:
    operation = low & _OPERATION
    result, operand = low >> 16 & 0xFF, low >> 24 & 0xFF
    if operation == _HGMMA:
        in_registers = low & _OPERATION_AND_FORM != _HGMMA_OF_SHARED_MEMORY
        return Instruction("", product=True, reads=_registers(operand, _A_REGISTERS) if in_registers else _NONE)
    if operation == _BRA:
        # The distance from the next instruction in units of 4 bytes, signed: bits 16 to 23 and 34 to 81.
        distance = result | ((low >> 34 | high << 30) & (1 << 48) - 1) << 8
        if distance >> 55:
            distance -= 1 << 56
        return Instruction("", target=place + 1 + 4 * distance // _INSTRUCTION_BYTES)
    if operation in _UNIFORM or result == _NO_REGISTER:
        return _NOTHING
    return Instruction("", writes=_registers(result, 1 if operation in _ONE_RESULT else _MOST_RESULTS))


_NOTHING = Instruction("")
