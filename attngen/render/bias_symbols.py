"""Symbols for the elements of biases that a loader brings as tiles, and their ranges."""

from __future__ import annotations

from attngen.lang.biases import biases
from attngen.lang.ir import Load, Type, Var, own
from attngen.lang.ranges import INT32, Range
from attngen.plan.model import Plan


def bias_symbols(plan: Plan) -> dict[Load, Var]:
    """The biases whose tiles a plan has room for, in order, each with the symbol for an element of a lane."""
    count = plan.structure.biases
    loads = biases(plan.variant, plan.structure.bias_bytes)
    assert len(loads) == count, f"{plan.name}: other biases than planned"
    return {load: own(f"bias_{number}" if count > 1 else "bias", load.type) for number, load in enumerate(loads)}


def bias_ranges(plan: Plan) -> dict[str, Range]:
    """The ranges of the integer biases, by the symbols that stand for them."""
    ranges = plan.variant.ranges
    return {
        symbol.name: ranges.get(load.tensor, INT32)
        for load, symbol in bias_symbols(plan).items()
        if symbol.type is Type.INT
    }
