"""A check of TTGIR for operands of products that Triton lays out wrongly, without a warning.

The four lanes of a row of a ``mma`` operand hold ``kWidth`` neighbouring elements each. Triton widens ``kWidth`` where
an operand was made from narrower loads, such as a mask from bytes. Up to 3.8 it did so beyond the operand's own depth:
elements are then multiplied twice, and others not at all (repaired by Triton's pull request 11691).
"""

from __future__ import annotations

import re

_LANES = 4

_OPERAND = re.compile(
    r"tensor<(?P<rows>\d+)x(?P<columns>\d+)x\w+, #ttg\.dot_op<\{opIdx = (?P<place>[01]), [^}>]*?kWidth = (?P<width>\d+)"
)


def repeated_operands(ttgir: str) -> list[str]:
    """A line for each kind of operand that is narrower than what its lanes hold; empty for correct layouts."""
    lines: dict[str, None] = {}
    for operand in _OPERAND.finditer(ttgir):
        depth = int(operand["columns"] if operand["place"] == "0" else operand["rows"])
        width = int(operand["width"])
        if depth < _LANES * width:
            shape = f"{operand['rows']}x{operand['columns']}"
            line = f"operand {operand['place']} of {shape}: {_LANES} lanes of {width} elements for a depth of {depth}"
            lines[line] = None
    return list(lines)
