"""Interface of a target language: rules that write a literal, an operator, a load, a declaration.

``languages.py`` names the languages; each has a module that writes all of ``ir.OPERATORS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from attngen.lang.ir import Const, Expr, Op, Type
from attngen.lang.statements import Code, Statement


class EmissionScope(Protocol):
    """The part of the emission that a rule of an operator sees."""

    approximate: bool  # whether functions may be the hardware's approximations

    def bounds(self, node: Expr) -> tuple[float, float]:
        """Return the inclusive range of a node; infinite where nothing is known."""

    def is_number(self, node: Expr) -> bool:
        """Whether a float is never NaN."""

    def exact(self, node: Expr) -> bool:
        """Whether a quotient or a root must be the nearest float32: without ``fast_math``, and where it decides."""

    def signed(self, node: Expr) -> bool:
        """Whether the sign of a float matters where it is 0."""

    def axes(self, node: Expr) -> frozenset[str]:
        """Return the axes of a tile along which a node varies."""

    def wide(self, node: Expr) -> bool:
        """Whether an integer is an int64 where the language promotes."""

    def named(self, node: Expr) -> Code:
        """Return a node as a leaf, so that it may be repeated: a name, unless it is one already."""

    def temporary(self, node: Expr, role: str, value: Code) -> Code:
        """Store an intermediate result of ``node`` under a name built from ``role``."""


class Dialect(ABC):
    """One target language."""

    #: Strength of a name, a literal, a call.
    atom: int

    @abstractmethod
    def constant(self, node: Const) -> Code:
        """Write a literal."""

    @abstractmethod
    def operator(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        """Write an operator whose arguments are written already."""

    @abstractmethod
    def declare(self, name: str, type: Type, wide: bool, value: Code) -> Statement:
        """Write the statement that gives a name to a value."""

    @abstractmethod
    def offset(self, index: Code, stride: Code, *, natural: bool = False) -> Code:
        """Write one summand of an element offset, computed in 64 bits. ``natural``: the index is an int32, and not
        negative."""

    @abstractmethod
    def within(self, index: Code, extent: Code, *, low: bool, high: bool) -> Code:
        """Write the test that an index is not negative (``low``) and below its extent (``high``)."""

    @abstractmethod
    def conjunction(self, parts: list[Code]) -> Code:
        """Join conditions into one."""

    def lifted(self, condition: Code) -> Code:
        """Write a scalar condition so that it can be combined with one that varies over a tile."""
        return condition

    @abstractmethod
    def pointer(self, name: str, base: Code, offsets: list[Code], *, kept: bool = False) -> Statement:
        """Write the statement that names an address within a tensor. ``kept``: it stays in registers, and is not
        computed again at each use."""

    @abstractmethod
    def load(self, name: str, dtype: str, base: Code, offsets: list[Code], guard: Code | None) -> Statement:
        """Write the statement that loads one element per lane; lanes outside the guard read 0."""

    @abstractmethod
    def search(self, pointer: Code, stride: Code, length: Code, value: Code, strict: bool) -> Code:
        """Write the call of the search over a monotone tensor; it reads ``first_at_least``, a helper of templates."""


def power_of_two(node: Expr) -> int | None:
    """Return the exponent of a literal that is a power of two, else None."""
    if isinstance(node, Const) and node.type is Type.INT and node.value > 0:
        value = int(node.value)
        return value.bit_length() - 1 if value & (value - 1) == 0 else None
    return None


def power_factors(base: Code, exponent: int, square: Callable[[Code], Code]) -> list[Code]:
    """Return factors whose product is a positive power of ``base``; ``square`` stores the square of its argument."""
    if exponent <= 3:
        return [base] * exponent
    factors = []
    while True:
        if exponent & 1:
            factors.append(base)
        exponent >>= 1
        if not exponent:
            return factors
        base = square(base)
