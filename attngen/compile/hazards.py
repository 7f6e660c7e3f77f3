"""Checks of machine code for what ptxas was seen to compile wrongly, without a warning, from PTX that was right.

A matrix product must not find its operand overwritten by an earlier turn of its loop.
``wgmma`` may take its first operand from registers. ptxas 12.8 and 12.9 were seen to compile a loop wrongly in which
two products do: Q, loaded before the loop, and P, made in each turn, got the same registers, as if nothing read Q
after the first turn. So every Hopper cubin with such products is checked.

The descriptor of an operand in shared memory must begin with its address. ptxas 12.8 was seen to add a step to it in
place (``UIADD3 UR42, UP1, UR42, 0x40``), in registers that held something else, where it should have begun with the
address; 12.9 did not. The upper half shows it: that of an address is 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attngen.compile.inspect import disassemble
from attngen.compile.machine import Instruction, adds_in_place, decode, instructions, parse

#: A constant added to 64 bits in uniform registers, in place, in two halves that a carry joins.
_LOWER_SUM = re.compile(r"UIADD3 UR(\d+), (UP\d), UR\1, 0x")
_UPPER_SUM = re.compile(r"UIADD3\.X UR(\d+), UR\1, -?0x\w+, URZ, (UP\d), ")
_CLEAR = re.compile(r"UMOV UR(\d+), URZ$")
_UNIFORM_RESULT = re.compile(r"(?:@!?U?P\w+ )?\w+(?:\.(?!64|WIDE)\w+)*(\.64|\.WIDE)?[\w.]* (?:UP\d, )?UR(\d+),")


def overwritten_operands(cubin: bytes) -> list[str]:
    """Return a line for each product of a cubin that finds its operand overwritten; empty for correct code.

    The bytes of the cubin show that most code is right. What they leave open is disassembled, and decided by that.
    """
    code = decode(cubin)
    if any(instruction.product for instruction in code) and not overwritten(code):
        return []
    return overwritten(parse(disassemble(cubin)))


def overwritten(code: Sequence[Instruction]) -> list[str]:
    """Return a line for each product in a loop that reads registers which the loop writes only after it.

    Such a product reads in the second turn what the first turn left there. Loops are the innermost ones, found by
    their backward branches.
    """
    found: dict[str, None] = {}
    for start, end in _loops(code):
        written: set[int] = set()
        reads: list[tuple[str, frozenset[int]]] = []
        for instruction in code[start:end]:
            if instruction.product:
                reads.append((instruction.text, instruction.reads - written))
            written |= instruction.writes
        for text, before in reads:
            if lost := sorted(before & written):
                found[f"{text} reads {', '.join(f'R{register}' for register in lost)}"] = None
    return list(found)


def lost_addresses(cubin: bytes) -> list[str]:
    """Return a line for each descriptor of a cubin that does not begin with an address; empty for correct code."""
    return lost(disassemble(cubin)) if adds_in_place(cubin) else []


def lost(sass: str) -> list[str]:
    """Return the instructions in a text of nvdisasm that finish a sum in place of which the upper half was not 0."""
    found = []
    zero: set[int] = set()  # uniform registers that hold 0 for certain
    begun: dict[int, str] = {}  # sums of which the lower half is done, by the register of the upper
    for text in instructions(sass):
        if low := _LOWER_SUM.match(text):
            begun[int(low[1]) + 1] = low[2]
        high = _UPPER_SUM.match(text)
        if high and begun.get(int(high[1])) == high[2] and int(high[1]) not in zero:
            found.append(text)
        if cleared := _CLEAR.match(text):
            zero.add(int(cleared[1]))
        elif written := _UNIFORM_RESULT.match(text):
            zero -= {int(written[2]), int(written[2]) + (written[1] is not None)}
    return found


def _loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Return start and end of the innermost loops that hold matrix products.

    Waits are moved out of a loop, to the end of the kernel, and branch back into its middle: these are no loops.
    """
    loops = []
    for place, instruction in enumerate(code):
        start = place if instruction.target is None else instruction.target
        if start < place and any(other.product for other in code[start:place]):
            loops.append((start, place + 1))
    loops = [a for a in loops if not any(b[0] < a[0] < b[1] < a[1] for b in loops)]
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
