"""Random typed expressions over one fixed set of declarations, and the data that they are evaluated on."""

from __future__ import annotations

import random
from typing import Any

import torch

from attngen.errors import SpecError
from attngen.lang.check import compile_variant
from attngen.lang.ir import Expr
from attngen.lang.variant import Scalar, Tensor, Variant

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 13, 29

SCALARS = (
    Scalar("window", "int32", min=1),
    Scalar("shift", "int32"),
    Scalar("big", "int64", min=-(2**40), max=2**40),
    Scalar("gain", "fp32"),
    Scalar("cap", "fp32", min=0.5),
    Scalar("flag", "bool"),
    Scalar("stride", "int32", const=3),
)
TENSORS = (
    Tensor("doc", "int32", ("b", "seqlen_k")),
    Tensor("ids", "int64", ("b", "seqlen_q"), range=(-(2**40), 2**40)),
    Tensor("table", "fp32", (16,)),
    Tensor("half", "fp16", ("h",)),
    Tensor("wide", "bf16", ("h", "seqlen_k")),
    Tensor("pad", "bool", ("b", "seqlen_k")),
    Tensor("tiny", "int8", (4, "n")),
    Tensor("byte", "uint8", ("total_q",)),
    Tensor("bias", "fp32"),
    Tensor("offset", "int32", range=(-8, 8)),
)
LET = {"gap": "q_pos - kv", "f(x, y)": "x - y if x > y else y - x"}


class Generator:
    """Writes random expressions as text; ``logit`` allows ``s``."""

    def __init__(self, seed: int, *, logit: bool = False, floats: bool = True) -> None:
        self.random = random.Random(seed)
        self.logit = logit
        self.floats = floats

    def _pick(self, choices: list[str]) -> str:
        return self.random.choice(choices)

    def boolean(self, depth: int) -> str:
        if depth <= 0:
            return self._pick(["flag", "True", "pad[b, kv]", "q_pos >= kv", "kv < window"])
        d = depth - 1
        number = self.number if self.floats else self.integer
        compare = self._pick(["<", "<=", ">", ">=", "==", "!="])
        return self._pick(
            [
                f"({self.boolean(d)}) and ({self.boolean(d)})",
                f"({self.boolean(d)}) or ({self.boolean(d)})",
                f"not ({self.boolean(d)})",
                f"({self.boolean(d)}) ^ ({self.boolean(d)})",
                f"({self.boolean(d)}) == ({self.boolean(d)})",
                f"({number(d)}) {compare} ({number(d)})",
                f"({self.integer(d)}) {compare} ({self.integer(d)})",
                f"({self.integer(d)}) <= ({self.integer(d)}) < ({self.integer(d)})",
                f"({self.boolean(d)}) if ({self.boolean(d)}) else ({self.boolean(d)})",
            ]
        )

    def integer(self, depth: int) -> str:
        if depth <= 0:
            names = [
                "q",
                "kv",
                "b",
                "h",
                "hk",
                "q_pos",
                "q_global",
                "kv_global",
                "seqlen_q",
                "seqlen_k",
                "heads",
            ]
            more = [
                "window",
                "shift",
                "big",
                "stride",
                "gap",
                "doc[b, kv]",
                "ids[b, q]",
                "offset",
                "byte[q_global]",
            ]
            return self._pick([*names, *more, str(self.random.randint(-9, 9)), "kv", "q"])
        d = depth - 1
        x, y = self.integer(d), self.integer(d)
        if self.floats and self.random.random() < 0.08:
            return f"int({self.floating(d)})"
        return self._pick(
            [
                f"({x}) + ({y})",
                f"({x}) - ({y})",
                f"(({x}) % 1000) * (({y}) % 1000)",
                f"-({x})",
                f"({x}) // {self.divisor(d)}",
                f"({x}) % {self.divisor(d)}",
                f"(({x}) % 64) ** {self.random.randint(0, 5)}",
                f"({x}) & ({y})",
                f"({x}) | ({y})",
                f"({x}) ^ ({y})",
                f"~({x})",
                f"(({x}) & 255) << (({y}) & 7)",
                f"({x}) >> (({y}) & 31)",
                f"min({x}, {y})",
                f"max({x}, {y}, {self.integer(0)})",
                f"clamp({x}, -20, 20)",
                f"abs({x})",
                f"f({x}, {y})",
                f"int({self.boolean(d)})",
                f"({x}) if ({self.boolean(d)}) else ({y})",
                f"doc[b, clamp({x}, 0, seqlen_k - 1)]",
                f"tiny[({x}) & 3, ({y}) % 5]",
                f"(doc[b, {x}] if 0 <= ({x}) and ({x}) < seqlen_k else 7)",
            ]
        )

    def divisor(self, depth: int) -> str:
        x = self.integer(depth)
        computed = [f"max({x}, 2)", f"min({x}, -2)", f"((({x}) & 7) + 1)"]
        return self._pick(["3", "8", "-5", "-4", "window", "stride", "seqlen_k", *computed])

    def floating(self, depth: int) -> str:
        if depth <= 0:
            leaves = [
                "gain",
                "cap",
                "bias",
                "half[h]",
                "wide[h, kv]",
                "table[kv & 15]",
                "0.5",
                "-2.0",
                "1.25",
            ]
            return self._pick([*leaves, "s", "s", "s"] if self.logit else leaves)
        d = depth - 1
        x, y = self.floating(d), self.floating(d)
        unary = self._pick([
            "floor", "ceil", "sigmoid", "silu", "tanh", "sin", "cos", "abs", "-", "round", "trunc", "sign", "erf",
            "atan",
        ])  # fmt: skip
        return self._pick(
            [
                f"({x}) + ({y})",
                f"({x}) - ({self.number(d)})",
                f"({self.number(d)}) * ({y})",
                f"({x}) / ({self._pick(['cap', '4.0', '-0.5'])})",
                f"({x}) / (abs({y}) + 1.0)",
                f"({self.integer(d)}) / window",
                f"{unary}({x})",
                f"exp(clamp({x}, -4, 4))",
                f"exp2(min({x}, 5))",
                f"log(abs({x}) + 0.5)",
                f"log2(abs({x}) + 0.5)",
                f"sqrt(abs({x}))",
                f"rsqrt(abs({x}) + 0.25)",
                f"tan(clamp({x}, -1, 1))",
                f"expm1(clamp({x}, -4, 4))",
                f"log1p(abs({x}))",
                f"atan2({x}, {y})",
                f"({x} if isnan({y}) else {y})",
                f"(abs({x}) + 0.5) ** clamp({y}, -3, 3)",
                f"clamp({x}, -3.0, 3.0) ** round(clamp({y}, 0, 3))",
                f"min({x}, {y})",
                f"max({x}, {self.number(d)})",
                f"clamp({x}, -3.0, {y})",
                f"clamp({x}, -3.0, 3.0) ** {self._pick(['2', '3', '5', '0', '1'])}",
                f"(abs({x}) + 0.5) ** {self._pick(['-1', '0.5', '-0.5', '1.5', '-2', '-0.75'])}",
                f"({x}) if ({self.boolean(d)}) else ({self.number(d)})",
                f"(sqrt({x}) if ({x}) > 0.125 else ({y}))",
                f"table[clamp({self.integer(d)}, 0, 15)]",
                f"f({x}, {y})",
            ]
        )

    def number(self, depth: int) -> str:
        return self.integer(depth) if self.random.random() < 0.3 else self.floating(depth)


def expression(seed: int, *, kind: str, depth: int = 3, logit: bool = False) -> Expr:
    """Return a checked random expression: kind ``mask`` (integers only inside), ``int`` or ``float``."""
    generator = Generator(seed, logit=logit, floats=kind == "float")
    while True:
        if kind == "mask":
            text = generator.boolean(depth)
        else:
            text = generator.integer(depth) if kind == "int" else generator.floating(depth)
        try:
            variant = declare(text, kind)
        except SpecError as error:
            if "beyond int64" not in error.message:  # everything else the generator avoids
                raise
            continue
        if kind == "mask":
            return variant.mask
        assert variant.score is not None or text == "s"
        score = variant.score
        if kind == "int":  # a score is converted to float; its argument is the integer
            match score:
                case None:
                    continue
                case _ if getattr(score, "op", "") == "to_float":
                    return score.args[0]  # type: ignore[union-attr]
                case _:
                    continue
        if score is not None:
            return score


def declare(text: str, kind: str) -> Variant:
    """Return the variant of one text over the fixed declarations."""
    if kind == "mask":
        return compile_variant("random", text, None, SCALARS, TENSORS, LET)
    return compile_variant("random", None, text, SCALARS, TENSORS, LET)


def scalars(seed: int) -> dict[str, Any]:
    """Return values of the scalars that a call passes; some at the ends of int32."""
    choose = random.Random(seed)
    return {
        "window": choose.choice([1, 5, 100, 2**31 - 1]),
        "shift": choose.choice([-7, 0, 3, 2**31 - 1, -(2**31)]),
        "big": choose.choice([-3, 11, 2**40, -(2**40)]),
        "gain": choose.choice([-1.5, 0.25, 2.0]),
        "cap": choose.choice([0.5, 3.0]),
        "flag": choose.choice([True, False]),
    }


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return values of the declared tensors."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    return {
        "doc": whole(-5, 40, BATCH, SEQLEN_K).int(),
        "ids": whole(-(2**40), 2**40, BATCH, SEQLEN_Q),
        "table": normal(16),
        "half": normal(HEADS).half(),
        "wide": normal(HEADS, SEQLEN_K).bfloat16(),
        "pad": whole(0, 2, BATCH, SEQLEN_K).bool(),
        "tiny": whole(-128, 128, 4, 5).to(torch.int8),
        "byte": whole(0, 256, BATCH * SEQLEN_Q).to(torch.uint8),
        "bias": normal(),
        "offset": torch.tensor(-3, dtype=torch.int32),
    }


def logits(seed: int) -> torch.Tensor:
    """Return scaled logits of every batch, head, query and key."""
    g = torch.Generator().manual_seed(seed + 1)
    return 2.0 * torch.randn(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, generator=g)


def indices() -> dict[str, Any]:
    """Return the index names as tensors that broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    b = torch.arange(BATCH)[:, None, None, None]
    h = torch.arange(HEADS)[None, :, None, None]
    q = torch.arange(SEQLEN_Q)[None, None, :, None]
    kv = torch.arange(SEQLEN_K)[None, None, None, :]
    return {
        "b": b,
        "h": h,
        "hk": h // 2,
        "q": q,
        "kv": kv,
        "q_pos": q + SEQLEN_K - SEQLEN_Q,
        "q_global": b * SEQLEN_Q + q,
        "kv_global": b * SEQLEN_K + kv,
        "seqlen_q": SEQLEN_Q,
        "seqlen_k": SEQLEN_K,
        "total_q": BATCH * SEQLEN_Q,
        "total_k": BATCH * SEQLEN_K,
        "heads": HEADS,
        "kv_heads": HEADS // 2,
    }
