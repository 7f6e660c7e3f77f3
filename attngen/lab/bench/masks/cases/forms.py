"""A mask or score in two forms: FlexAttention's functions, and a variant in attngen's language."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Longest sequence of tensors over (q, kv), by memory: 16k × 16k × 8 heads in bf16 are 4 GiB.
MAX_PAIR_SEQLEN = 16384

#: Last two axes of a tensor over pairs.
PAIR = ("seqlen_q", "seqlen_k")

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """Shape of a call: sequences of ``seqlen`` queries and keys. Tensors are random, the same for each seed."""

    seqlen: int
    heads: int
    head_dim: int
    device: torch.device
    seed: int = 0
    batch: int = 1

    def uniform(self, *shape: int) -> Tensor:
        """Random float32 numbers from 0 to 1."""
        generator = torch.Generator(self.device).manual_seed(self.seed + len(shape))
        return torch.rand(*shape, generator=generator, device=self.device, dtype=torch.float32)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random int32 numbers from ``low`` to ``high - 1``."""
        generator = torch.Generator(self.device).manual_seed(self.seed + len(shape))
        return torch.randint(low, high, shape, generator=generator, device=self.device, dtype=torch.int32)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Random normal numbers."""
        generator = torch.Generator(self.device).manual_seed(self.seed + len(shape))
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype).mul_(scale)

    def positions(self) -> Tensor:
        """Positions of tokens, int32."""
        return torch.arange(self.seqlen, device=self.device, dtype=torch.int32)

    def fraction(self, parts: int, least: int = 1) -> int:
        """``seqlen // parts``, so that small sequences have small windows."""
        return max(self.seqlen // parts, least)


@dataclass(frozen=True)
class Forms:
    """One function in both forms.

    ``mask_mod`` and ``score_mod`` are FlexAttention's. ``mask``, ``score``, ``let`` and ``declared`` (tensors) are
    fields of ``attngen.variant``, over the names in ``sizes`` and ``tensors``. ``learned`` names tensors that take
    gradients; the functions for FlexAttention capture the same tensors. ``hides`` is the mask that a score of −inf
    stands for, by which tiles are counted.

    Of libraries that take less than a function: ``blocks`` names a tensor of bools over (heads, query blocks, key
    blocks) of ``sizes["block"]`` tokens each, which alone is the mask; ``pair_bias`` names a bias over (heads, queries,
    keys) that sequences share, and bools of keys, or of sequences and keys, which alone are score and mask.
    """

    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    mask: str | None = None
    score: str | None = None
    let: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    hides: Mod | None = None
    blocks: str | None = None
    pair_bias: tuple[str, str] | None = None

    @property
    def over_pairs(self) -> tuple[Tensor, ...]:
        """The tensors that have an element for each pair of a query and a key."""
        return tuple(
            self.tensors[name] for name, declaration in self.declared.items() if declaration["shape"][-2:] == [*PAIR]
        )

    @property
    def by_head(self) -> bool:
        """Whether heads see different keys."""
        return re.search(r"\bh\b", self.mask or "") is not None

    def fields(self, *, constant: bool) -> dict[str, Any]:
        """Fields of the variant, with its sizes as constants or as scalars of the call."""
        fields: dict[str, Any] = {"mask": self.mask, "score": self.score, "let": self.let}
        fields["scalars"] = {name: _scalar(value, constant) for name, value in self.sizes.items()}
        fields["tensors"] = {
            name: {**declaration, "grad": True} if name in self.learned else declaration
            for name, declaration in self.declared.items()
        }
        return {name: value for name, value in fields.items() if value}

    def arguments(self, *, constant: bool) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {**self.tensors, **({} if constant else self.sizes)}


def _scalar(value: int | float, constant: bool) -> dict[str, Any]:
    if isinstance(value, float):
        return {"type": "float32", "const": value} if constant else {"type": "float32", "min": 0.001, "max": 1000.0}
    largest = 65536 if value <= 65536 else 2**20
    return {"type": "int32", "const": value} if constant else {"type": "int32", "min": 1, "max": largest}


#: Makes the tensors and both forms of a function.
Maker = Callable[[Size], Forms]


@dataclass(frozen=True)
class MaskCase:
    """A function, and the sizes at which it is called.

    A case with a ``seqlen`` of its own has no other; ``max_seqlen`` bounds the requested ones. With ``rows_of_pairs``
    it has as many sequences as tokens in each, at most so many; else one.
    """

    name: str
    make: Maker
    seqlen: int | None = None
    max_seqlen: int | None = None
    kv_heads: int | None = None
    rows_of_pairs: int | None = None

    @property
    def identifier(self) -> str:
        """The name as that of a variant."""
        return re.sub("[^a-z0-9]+", "_", self.name.lower())


class Register(list[MaskCase]):
    """The cases of one kind; decorates the function that makes a case."""

    def __call__(self, name: str, **sizes: int) -> Callable[[Maker], Maker]:
        """Append a case of this name."""

        def register(make: Maker) -> Maker:
            self.append(MaskCase(name, make, **sizes))
            return make

        return register


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """FlexAttention's causal mask."""
    return q >= kv


def ints(*shape: Any, **facts: Any) -> dict[str, Any]:
    """Declaration of an int32 tensor."""
    return {"dtype": "int32", "shape": list(shape), **facts}


def floats(*shape: Any, dtype: str = "float32") -> dict[str, Any]:
    """Declaration of a tensor of floating-point numbers."""
    return {"dtype": dtype, "shape": list(shape)}


def bools(*shape: Any) -> dict[str, Any]:
    """Declaration of a tensor of bools."""
    return {"dtype": "bool", "shape": list(shape)}
