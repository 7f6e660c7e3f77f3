"""Plans made by hand, so that these tests need neither a spec nor a template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.plan.model import Argument, Launch

TEXT = (Path(__file__).parent / "kernels" / "small.py").read_text()


@dataclass(frozen=True)
class Source:
    """A rendered source."""

    name: str
    text: str = TEXT
    backend: str = "triton"


@dataclass(frozen=True)
class Plan:
    """The part of a plan that a compile reads."""

    name: str
    arguments: tuple[Argument, ...]
    arch_name: str = "sm90a"
    num_warps: int = 4
    max_registers: int | None = None
    fast_math: bool = True
    stages: int = 2
    allow: tuple[str, ...] = ()
    main: str = "forward"
    classifier: Launch | None = None

    @property
    def launches(self) -> tuple[Launch, ...]:
        own = Launch(
            "forward", self.name, "queries", 64, 64, self.stages, self.num_warps, arguments=self.arguments,
            max_registers=self.max_registers, max_spills=32,
        )  # fmt: skip
        return (own,) if self.classifier is None else (self.classifier, own)

    @property
    def arch(self) -> Arch:
        return ARCHES[self.arch_name]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": 1,
            "name": self.name,
            "arch": self.arch_name,
            "backend": "triton",
            "num_warps": self.num_warps,
            "main": self.main,
        }


def _descriptor(name: str) -> Argument:
    return Argument(name, "descriptor", "tensordesc<bf16[1,64,1,64]>", of=name, box=(1, 64, 1, 64))


DESCRIPTOR = Plan(
    "descriptor_kernel",
    (
        _descriptor("q"),
        _descriptor("k"),
        Argument("out", "pointer", "*bf16", of="out", divisibility=16),
        Argument("lse", "pointer", "*fp32", of="lse", divisibility=4),
        Argument("stride", "stride", "i64", of="out", axis="s", divisibility=8),
        Argument("n", "size", "i32"),
        Argument("scale", "scale", "fp32"),
        Argument("flag", "scalar", "i1"),
    ),
)
POINTER = Plan(
    "pointer_kernel",
    (
        Argument("x", "pointer", "*fp32", of="q"),
        Argument("out", "pointer", "*fp32", of="out"),
        Argument("n", "size", "i32"),
        Argument("scale", "scale", "fp32"),
    ),
    arch_name="sm80",
)
SPILLING = Plan("spilling_kernel", (Argument("x", "pointer", "*fp32"), Argument("out", "pointer", "*fp32")))
CLASSIFIER = Launch(
    "classify", "classify_kernel", "query_words", 64, 64, stages=1, num_warps=1,
    arguments=(Argument("out", "pointer", "*i32", of="tile_map"), Argument("n", "size", "i32")),
)  # fmt: skip
