"""The scalars and tensors that a variant declares."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attngen.lang.ir import Type, identity_of
from attngen.records import Count, Extent, Limit, Limits, Name, Number, Some

Bound = Limit | None


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A number that a variant takes. ``const`` fixes it at build time; otherwise it is an argument of the call.

    ``min`` and ``max`` are inclusive and trusted; a string names an extent (``seqlen_k``). ``default`` serves a
    call that leaves the argument out. ``grad`` asks the backward pass for its gradient (fp32 only). A ``const`` of 0.0
    and one of -0.0 make two scalars, as the literals do.
    """

    name: Name
    dtype: str  # int32 | int64 | fp32 | bool
    const: Number | None = None
    min: Bound = None
    max: Bound = None
    default: Number | None = None
    grad: bool = False

    def _identity(self) -> tuple[Any, ...]:
        return tuple([identity_of(getattr(self, field.name)) for field in fields(self)])

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Scalar) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def type(self) -> Type:
        """The type that expressions see."""
        return {"bool": Type.BOOL, "fp32": Type.FLOAT}.get(self.dtype, Type.INT)

    def summary(self) -> str:
        """The declaration in a few words, for messages."""
        parts = (("const", self.const), ("min", self.min), ("max", self.max), ("default", self.default))
        words = [f"{label} {value}" for label, value in parts if value is not None]
        return ", ".join([self.dtype, *words, *(["grad"] if self.grad else [])])


@dataclass(frozen=True, slots=True)
class Monotone:
    """A declared fact: along ``axis`` the elements never decrease.

    With ``runs``, each of so many, counted from the first one, is greater by one than the element before it; only the
    first one of a run may be greater by more.
    """

    axis: Count
    order: str = "nondecreasing"
    runs: Some | None = None

    def summary(self) -> str:
        """The fact in a few words, for messages."""
        steps = f", by one within runs of {self.runs}" if self.runs else ""
        return f"{self.order} along axis {self.axis}{steps}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a variant reads. ``shape`` holds integers, extents (``b h hk seqlen_k`` …) or free names."""

    name: Name
    dtype: str
    shape: tuple[Extent, ...] = ()
    monotone: Monotone | None = None
    range: Limits | None = None
    grad: bool = False

    @property
    def type(self) -> Type:
        """The type that expressions see."""
        if self.dtype in ("fp32", "fp16", "bf16"):
            return Type.FLOAT
        return Type.BOOL if self.dtype == "bool" else Type.INT

    def summary(self) -> str:
        """The declaration in a few words, for messages."""
        words = [f"{self.dtype} [{', '.join(map(str, self.shape))}]"]
        if self.range is not None:
            words.append(f"range {self.range[0]} .. {self.range[1]}")
        if self.monotone is not None:
            words.append(self.monotone.summary())
        return ", ".join([*words, *(["grad"] if self.grad else [])])
