"""The check that machine code multiplies what its PTX says: both are emulated, and their products are compared.

The addresses of operands in shared memory are in descriptors, which both compute as integers. Each product must be
issued in the same order, with the same descriptors, and each product of the program must be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attngen.compile.emulate.launch import LAUNCHES, MORE_LAUNCHES, Launch
from attngen.compile.emulate.program import CannotDecide, Product, Program
from attngen.compile.emulate.ptx_program import ptx_program
from attngen.compile.emulate.sass_program import sass_program

_WARPS_OF_A_WARPGROUP = 4


def wrong_products(ptx: str, sass: str, parameters: Sequence[Mapping[str, Any]], num_warps: int) -> list[str]:
    """Return a line for each launch in which a product is wrong in the machine code; empty for correct code.

    ``sass`` is a text of nvdisasm; ``parameters`` are those of the manifest. Raises CannotDecide where an emulation
    does not tell what a program does, or no launch reaches one of its products.
    """
    source, code = ptx_program(ptx), sass_program(sass)
    reached: tuple[set[int], set[int]] = set(), set()
    found = []
    for n, launch in enumerate((*LAUNCHES, *MORE_LAUNCHES)):
        if n >= len(LAUNCHES) and (found or _all_reached(source, code, reached)):
            break
        for warpgroup in range(max(1, num_warps // _WARPS_OF_A_WARPGROUP)):
            wanted = _products(source, "PTX", launch, parameters, warpgroup)
            issued = _products(code, "machine code", launch, parameters, warpgroup)
            for places, products in zip(reached, (wanted, issued), strict=True):
                places.update(product.place for product in products)
            if difference := _difference(wanted, issued, code):
                found.append(f"{difference} (warpgroup {warpgroup}, {launch})")
    if not found and not _all_reached(source, code, reached):
        left = min(set(code.products) - reached[1], default=None)
        text = "a wgmma of the PTX" if left is None else code.texts[left]
        raise CannotDecide(f"no launch that is emulated reaches {text}")
    return found


def _all_reached(source: Program, code: Program, reached: tuple[set[int], set[int]]) -> bool:
    return reached == (set(source.products), set(code.products))


def _products(
    program: Program, name: str, launch: Launch, parameters: Sequence[Mapping[str, Any]], warpgroup: int
) -> list[Product]:
    machine = launch.machine(parameters, warpgroup)
    try:
        program.run(machine)
    except CannotDecide as reason:
        raise CannotDecide(f"{name}: {reason}") from None
    return machine.products


def _difference(wanted: Sequence[Product], issued: Sequence[Product], code: Program) -> str:
    """Return the first product that is not as wanted; nothing if all are."""
    for n, (want, have) in enumerate(zip(wanted, issued, strict=False)):
        if want.said != have.said:
            return f"product {n}, {code.texts[have.place]}: {have}; the PTX says {want}"
    if len(wanted) != len(issued):
        return f"{len(issued)} products; the PTX has {len(wanted)}"
    return ""
