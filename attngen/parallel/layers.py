"""One variant of a plan, its visits and the values that the plan got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attngen.lang.variant import Variant
from attngen.parallel.overlap import Overlap
from attngen.parallel.routes import Needs
from attngen.parallel.values import passed, read_by_mask
from attngen.parallel.visits import TileRuns


@dataclass(frozen=True, eq=False)
class PlanLayer:
    """One variant of a plan: its visits and needs, how many layers have it, and the values that the plan got.

    ``stated`` is the variant itself; ``variant`` that of one dense sequence, but with ``in_segments``, where ranks call
    the variant itself over segments. ``sent`` is what the method sends, ``seen`` what rows visit.
    """

    name: str
    source: str | Variant
    stated: Variant
    variant: Variant
    layers: float
    method: str
    given: Mapping[str, Any]
    visits: TileRuns
    sent: Needs
    seen: Needs
    in_segments: bool = False
    positions: bool = True  # whether the variant reads any
    overlap: Overlap = "none"
    forward_groups: int = 1  # groups of heads in which keys of a forward pass travel
    of_documents: Callable[[], Mapping[str, Any]] = dict  # tables of tokens: made by the first call, not by the plan
    kept: dict[Any, Any] = field(default_factory=dict)  # what calls of one rank and device share

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The values that the plan got, and the tables of documents."""
        return {**self.given, **self.of_documents()}

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The names that the mask reads."""
        return frozenset(read_by_mask(self.variant))

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The names that calls of the variant itself pass."""
        return tuple(passed(self.stated))

    @cached_property
    def passed(self) -> tuple[str, ...]:
        """The names that calls of the variant pass."""
        return tuple(passed(self.variant))

    @cached_property
    def defaults(self) -> frozenset[str]:
        """The scalars that may be left out."""
        return frozenset(scalar.name for scalar in self.variant.arguments if scalar.default is not None)
