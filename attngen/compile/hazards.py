"""A check of machine code: a matrix product must not find its operand overwritten by an earlier turn of its loop.

``wgmma`` may take its first operand from registers. ptxas 12.8 and 12.9 were seen to compile a loop wrongly in which
two products do: Q, loaded before the loop, and P, made in each turn, got the same registers, as if nothing read Q
after the first turn. The PTX was right, and no warning was given. So every Hopper cubin is checked.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_BRANCH = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")

#: Registers that HGMMA reads of its first operand: 64 x 16 elements of 16 bits over 128 threads.
_A_REGISTERS = 4

#: Operations whose first operand is read, not written.
_NO_RESULT = ("ST", "BRA", "BAR", "SYNCS", "WARPGROUP", "UTMA", "R2UR", "EXIT", "RED", "MEMBAR", "HGMMA")

#: Suffixes of operations that write several registers from the first on.
_WIDE = {"128": 4, "64": 2, "WIDE": 2}

Instruction = tuple[str, str]


def overwritten_operands(sass: str) -> list[str]:
    """Return a line for each product in a loop that reads registers which the loop writes only after it.

    Such a product reads in the second turn what the first turn left there. Loops are the innermost ones, found by
    their backward branches. Empty for correct code.
    """
    code, labels = _parse(sass)
    found: dict[str, None] = {}
    for start, end in _loops(code, labels):
        written: set[int] = set()
        reads: list[tuple[str, set[int]]] = []
        for name, operands in code[start:end]:
            if name.startswith("HGMMA"):
                operand = _first_operand(operands)
                reads.append((f"{name} {operands}", operand - written))
            written |= _written(name, operands)
        for text, before in reads:
            if before & written:
                found[f"{text} reads {', '.join(f'R{r}' for r in sorted(before & written))}"] = None
    return list(found)


def _first_operand(operands: str) -> set[int]:
    """Return the registers of a product's first operand; none if that lies in shared memory."""
    parts = operands.split(",")
    register = _REGISTER.search(parts[1]) if len(parts) > 1 and "gdesc" not in parts[1] else None
    return set(range(int(register[1]), int(register[1]) + _A_REGISTERS)) if register else set()


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append((instruction[1], instruction[2]))
    return code, labels


def _loops(code: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return start and end of the innermost loops that hold matrix products.

    Waits are moved out of a loop, to the end of the kernel, and branch back into its middle: these are no loops.
    """
    loops = []
    for place, (name, operands) in enumerate(code):
        target = _BRANCH.search(operands) if name.startswith("BRA") else None
        start = labels.get(target[1], place) if target else place
        if start < place and any(n.startswith("HGMMA") for n, _ in code[start:place]):
            loops.append((start, place + 1))
    loops = [a for a in loops if not any(b[0] < a[0] < b[1] < a[1] for b in loops)]
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def _written(name: str, operands: str) -> set[int]:
    """Return the registers that an instruction writes."""
    register = re.fullmatch(r"R(\d+)", operands.split(",")[0].strip())
    if name.startswith(_NO_RESULT) or not register:
        return set()
    parts = name.split(".")
    if parts[0] == "LDSM":
        count = int(parts[-1]) if parts[-1] in ("2", "4") else 1
    else:
        count = max((_WIDE.get(part, 1) for part in parts), default=1)
    return set(range(int(register[1]), int(register[1]) + count))
