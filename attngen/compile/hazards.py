"""Checks of machine code for two faults of ptxas, which compiles some correct PTX to wrong code without a warning.

Clamps that are compared: for ``max(min(x, y), 0) == y``, ptxas 12.9 takes the predicate that VIMNMX.RELU writes beside
the clamped value. On an H100 with y = 32 this predicate was wrong for x = 0, 1, 31, 33 and 100; ptxas 13 emits a
comparison. Few kernels have this expression, and no shipped one does.

Overwritten operands: ``wgmma`` may take its A operand from registers. ptxas 12.8 and 12.9 were seen to compile a loop
wrongly in which two products do: Q, loaded before the loop, and P, computed in each iteration, got the same registers,
as if nothing read Q after the first iteration. So every Hopper cubin of Triton with products is checked.

A third fault, lost descriptors of operands in shared memory, is one of ptxas 12.8, which compiles no kernel for Hopper:
see ``attngen.compile.assembler``.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngen.compile.inspect import disassemble
from attngen.compile.machine import Instruction, count_judged_clamps, decode, parse


def overwritten_operands(cubin: bytes) -> list[str]:
    """A line for each product of a cubin whose operand is overwritten before it is read; empty for correct code.

    The bytes of most cubins show that they are correct; the others are disassembled.
    """
    code = decode(cubin)
    if any(instruction.product for instruction in code) and not overwritten(code):
        return []
    return overwritten(parse(disassemble(cubin)))


def misjudged_clamps(cubin: bytes) -> str | None:
    """A line that counts the clamps whose predicate a cubin uses as a comparison; None if there are none."""
    count = count_judged_clamps(cubin)
    return f"{count} VIMNMX.RELU with predicates, for max(min(x, y), 0) == y" if count else None


def overwritten(code: Sequence[Instruction]) -> list[str]:
    """A line for each product in a loop that reads registers which the loop writes only after it.

    Such a product reads in the second iteration what the first one left there. Loops are the innermost ones; a
    branch backward ends each.
    """
    lines: dict[str, None] = {}
    for start, end in _loops(code):
        written: set[int] = set()
        reads: list[tuple[str, frozenset[int]]] = []
        for instruction in code[start:end]:
            if instruction.product:
                reads.append((instruction.text, instruction.reads - written))
            written |= instruction.writes
        for text, before in reads:
            if lost := sorted(before & written):
                lines[f"{text} reads {', '.join(f'R{register}' for register in lost)}"] = None
    return list(lines)


def _loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Start and end of the innermost loops that hold matrix products.

    ptxas moves waits out of a loop, to the end of the kernel, from where they branch back into its middle: these are no
    loops.
    """
    loops = []
    for place, instruction in enumerate(code):
        start = place if instruction.target is None else instruction.target
        if start < place and any(other.product for other in code[start:place]):
            loops.append((start, place + 1))
    loops = [a for a in loops if not any(b[0] < a[0] < b[1] < a[1] for b in loops)]
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
