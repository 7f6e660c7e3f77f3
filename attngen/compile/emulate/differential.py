"""The check that machine code multiplies what its PTX says: both are emulated, and their products are compared.

The addresses of operands in shared memory are in descriptors, which both compute as integers. Each product must be
issued in the same order, with the same descriptors, and each product of the program must be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attngen.compile.emulate.launch import LAUNCHES, MORE_LAUNCHES, Launch, drawn
from attngen.compile.emulate.program import CannotDecide, Product, Program
from attngen.compile.emulate.ptx_program import ptx_program
from attngen.compile.emulate.sass_program import sass_program

_WARPS_OF_A_WARPGROUP = 4


#: How many random launches there are, for kernels some of whose products the fixed ones do not reach.
_DRAWN = 80


def wrong_products(ptx: str, sass: str, parameters: Sequence[Mapping[str, Any]], num_warps: int) -> list[str]:
    """Return a line for each launch in which a product is wrong in the machine code; empty for correct code.

    ``sass`` is a text of nvdisasm; ``parameters`` are those of the manifest. Raises CannotDecide where the emulation
    cannot tell what the machine code does, or no launch reaches one of its products. A launch for which it cannot tell
    what the PTX does, such as one with a block too many, does not count.
    """
    source, code = ptx_program(ptx), sass_program(sass)
    found: list[str] = []
    unread = None
    for n, launch in enumerate((*LAUNCHES, *MORE_LAUNCHES, *drawn(_DRAWN))):
        if n >= len(LAUNCHES) and (found or _all_reached(source, code)):
            break
        for warpgroup in range(max(1, num_warps // _WARPS_OF_A_WARPGROUP)):
            try:
                wanted = _products(source, launch, parameters, warpgroup)
            except CannotDecide as reason:
                unread = reason
                continue
            try:
                issued = _products(code, launch, parameters, warpgroup)
            except CannotDecide as reason:
                raise CannotDecide(f"the machine code cannot be emulated: {reason}") from None
            if difference := _difference(wanted, issued, code):
                found.append(f"{difference} (warpgroup {warpgroup}, {launch})")
    if not found and not _all_reached(source, code):
        raise CannotDecide(_why_unreached(source, code, unread))
    return found


def _all_reached(*programs: Program) -> bool:
    return all(program.reached.issuperset(program.products) for program in programs)


def _why_unreached(source: Program, code: Program, unread: CannotDecide | None) -> str:
    for program in (code, source):
        left = sorted(set(program.products) - program.reached)
        if left:
            why = f"; for some launches, the PTX cannot be emulated: {unread}" if unread else ""
            return f"no emulated launch reaches {program.texts[left[0]][:120]}{why}"
    return ""


def _products(
    program: Program, launch: Launch, parameters: Sequence[Mapping[str, Any]], warpgroup: int
) -> list[Product]:
    machine = launch.machine(parameters, warpgroup)
    program.run(machine)
    program.reached.update(product.place for product in machine.products)
    return machine.products


def _difference(wanted: Sequence[Product], issued: Sequence[Product], code: Program) -> str:
    """Return the first product that differs from the PTX's; empty if none does."""
    for n, (want, have) in enumerate(zip(wanted, issued, strict=False)):
        if not want.same(have):
            return f"product {n}, {code.texts[have.place]}: {have}; the PTX says {want}"
    if len(wanted) != len(issued):
        return f"{len(issued)} products; the PTX has {len(wanted)}"
    return ""
