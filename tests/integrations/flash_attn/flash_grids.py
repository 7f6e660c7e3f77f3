"""The grids of flash-attention's own test file for version 3 (hopper/test_flash_attn.py), drawn and run.

Each family has the axes over which that file loops, the loops inside of its tests among them, and the same limits: the
error may be at most a multiple of that of plain torch in the dtype of the call. Every call goes through
``attngen.integrations.flash_attn_3`` alone.

Head dims 59 and 111 are left out, which flash-attention refuses, and so is its check of operator schemas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

#: Difference of sums of the same float32 products in another order. With one key, gradients are exactly 0 in plain
#: torch, and the rounding of some hundred queries in a kernel.
NOISE = 5e-5

#: Heads of q in all families that are compared with a reference.
HEADS = 6

FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8, "fp32": torch.float32}

_LENGTHS = {
    "forward": (
        (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
        (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
        (4096, 4096), (4224, 4224),
    ),
    "varlen": (
        (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217),
        (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024),
        (1024, 1023), (1024, 1024), (2048, 2048), (4096, 4096),
    ),
    "cache": (
        (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128), (256, 512),
        (2048, 3577),
    ),
    "repeated": (
        (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200), (256, 256), (257, 257),
        (384, 384), (512, 512), (768, 768), (1024, 1024), (2048, 2048),
    ),
}  # fmt: skip

_FLAGS = (False, True)
_DENSE = {
    "head_dim": (64, 96, 128, 192, 256), "causal": _FLAGS, "local": _FLAGS, "softcap": (0.0, 15.0), "qv": _FLAGS,
    "kv_heads": (6, 2, 1), "dtype": ("bf16", "fp16", "fp8"),
}  # fmt: skip

#: Axes of the cases that the file collects, by family.
GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {"lengths": _LENGTHS["forward"], **_DENSE},
    "varlen": {"lengths": _LENGTHS["varlen"], "unused": _FLAGS, **_DENSE},
    "cache": {
        "lengths": _LENGTHS["cache"], "packed": _FLAGS, "indexed": _FLAGS, "leftpad": _FLAGS,
        "page_size": (None, 1, 4, 128), "rotary": (0.0, 0.5, 1.0), "interleaved": _FLAGS, "new_as_queries": _FLAGS,
        "mask": ("full", "causal", "local"), "new_keys": _FLAGS, "kv_heads": (6, 1, 3), "dtype": ("bf16", "fp8"),
    },
    "combine": {
        "num_splits": (1, 2, 3, 5, 17, 32, 55, 97, 133), "seqlen": (1, 2, 3, 32, 64, 256, 113, 108, 640, 1024),
        "head_dim": (64, 96, 128, 192, 256, 512), "dtype": ("fp32", "fp16", "bf16"),
    },
    "repeated": {
        "lengths": _LENGTHS["repeated"], "head_dim": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
        "causal": _FLAGS,
    },
    "few_queries": {"causal": _FLAGS},
    "one_prompt": {"dtype": ("bf16",)},
}  # fmt: skip

#: Axes of the loops inside of a case; ``wide`` picks the head dim of v.
INNER: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {"wide": (0, 1, 2), "chunked": _FLAGS, "pack_gqa": _FLAGS, "num_splits": (1, 3)},
    "varlen": {"wide": (0, 1, 2), "chunked": _FLAGS, "pack_gqa": _FLAGS, "num_splits": (1, 3, 0)},
    "cache": {"chunked": _FLAGS, "num_splits": (1, 3, 0), "metadata": _FLAGS},
}

#: Shares of a sample; each case of the families that are not here is in every sample.
_SHARES = {"forward": 0.27, "varlen": 0.29, "cache": 0.4, "combine": 0.03, "repeated": 0.01}


@dataclass(frozen=True)
class Case:
    """A point of a family's grid; ``seed`` gives its tensors."""

    family: str
    seed: int
    values: Mapping[str, Any]

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        """Value along an axis, or the default for a family that has no such axis."""
        return self.values.get(axis, default)

    def kind(self) -> tuple[Any, ...]:
        """Key of the kernels that the case runs, more or less: cases of one kind share them."""
        dense = self.family == "cache" and not (self["packed"] or self["indexed"] or self["page_size"])
        layout = f"cache {dense and self['num_splits'] != 1}" if self.family == "cache" else self.family
        axes = ("dtype", "head_dim", "wide", "causal", "local", "softcap", "mask", "chunked", "leftpad", "qv")
        return (layout, *(str(self.get(axis)) for axis in axes))

    def __str__(self) -> str:
        return f"{self.family} seed={self.seed} " + " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Outcome:
    """Result of a case: ``right``, ``wrong`` or ``refused``, and why."""

    verdict: str
    reason: str = ""


def collected(family: str) -> int:
    """Number of cases that the file collects for a family."""
    return math.prod(len(values) for values in GRIDS[family].values())


def draw(count: int, seed: int = 0, *, longest: int = 2**30) -> list[Case]:
    """Draw about ``count`` distinct cases that the file does not skip, with no length beyond ``longest``."""
    chance = Random(seed)
    cases: list[Case] = []
    for family, axes in GRIDS.items():
        axes = {**axes, **INNER.get(family, {})}
        if family not in _SHARES:
            if longest >= 8192:
                name, values = next(iter(axes.items()))
                cases += [Case(family, chance.randrange(2**31), {name: value}) for value in values]
            continue
        seen: set[str] = set()
        wanted = max(round(count * _SHARES[family]), 1)
        for _ in range(1000 * wanted):  # small lengths may leave fewer cases than that
            if len(seen) == wanted:
                break
            values = {name: chance.choice(options) for name, options in axes.items()}
            if _runs(family, values, longest) and repr(values) not in seen:
                seen.add(repr(values))
                cases.append(Case(family, chance.randrange(2**31), values))
    return cases


def _runs(family: str, at: Mapping[str, Any], longest: int) -> bool:
    """Whether the file runs a combination, rather than skip it or leave the round of a loop out."""
    rows, keys = at.get("lengths", (1, 1))
    if max(rows, keys, at.get("seqlen", 1)) > longest:
        return False
    if family in ("forward", "varlen"):
        if at["qv"] and (at["head_dim"] != 64 or at["dtype"] == "fp8"):
            return False
        if at["wide"] >= len(value_dims(at)) or (at["qv"] and at["chunked"] and at["wide"] > 1):
            return False
        return not (family == "varlen" and at["chunked"] and rows > keys)
    if family == "cache":
        if at["page_size"] is not None and keys % at["page_size"]:
            return False
        if at["rotary"] and not at["new_keys"]:
            return False
        return not (at["chunked"] and at["mask"] == "full")
    return not at.get("head_dim", 8) % 8


def value_dims(at: Mapping[str, Any]) -> tuple[int, ...]:
    """Head dims of v that the file runs beside a head dim of q and k."""
    dim: int = at["head_dim"]
    if at["qv"]:
        return 256, 512
    if at["dtype"] == "fp8":
        return (dim,)
    return (128, dim) if dim == 192 else (256, 512, dim) if dim == 64 else (dim,)
