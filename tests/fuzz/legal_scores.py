"""Random scores and sinks as a user writes them, smooth enough that a comparison of numbers can judge them."""

from __future__ import annotations

import random

from tests.fuzz.declared import Declared
from tests.fuzz.legal_masks import Masks


class Scores:
    """Writes scores over the declarations of one variant, which it extends."""

    def __init__(self, declared: Declared, masks: Masks) -> None:
        self.declared = declared
        self.masks = masks
        self.chance: random.Random = declared.chance

    def score(self) -> str:
        """Return a score of one to three steps."""
        text = "s"
        steps = (self.biased, self.biased, self.scaled, self.curved, self.chosen, self.chosen, self.hidden)
        for _ in range(self.chance.choice((1, 1, 1, 2, 2, 3))):
            step = self.chance.choice(steps)
            text = step(text if text == "s" else f"({text})")
            if step == self.hidden:  # what bends minus infinity may make NaN of it, by its meaning
                steps = (self.biased,)
        return text

    def sink(self) -> str:
        """Return a sink of each head, or of all."""
        kind = self.chance.choice(("tensor", "tensor", "literal", "scalar", "table"))
        if kind == "literal":
            return "-0.5"
        if kind == "scalar":
            return self.number("sink", "float32", {"min": -2, "max": 2})
        if kind == "table":
            return f"{self.learned('sinks', [2])}[h % 2] * 0.5"
        return f"{self.learned('sinks', ['h'])}[h]"

    # --- steps ----------------------------------------------------------------------------------------------

    def biased(self, s: str) -> str:
        """Add what depends on places."""
        return f"{s} {self.chance.choice('+-')} {self.bias()}"

    def bias(self) -> str:
        """Return a bias of moderate size."""
        declared = self.declared
        row = self.chance.choice(("q", "q_pos"))
        reach = self.chance.choice((8, 64, 128))
        kind = self.chance.choice(
            ("slope", "slope", "keys", "pairs", "distance", "bucket", "row", "wave", "gather", "far", "step")
        )
        if kind == "slope":
            slopes = declared.tensor("slopes", "float32", ["h"], range={"min": 0, "max": 0.5})
            return f"{slopes}[h] * abs({row} - kv)"
        if kind == "keys":
            return f"{self.learned('bias', ['b', 'seqlen_k'])}[b, kv]"
        if kind == "pairs":
            return f"{self.learned('bias', ['h', 'seqlen_q', 'seqlen_k'])}[h, q, kv]"
        if kind == "distance":
            table = self.learned("table", ["h", 2 * reach + 1])
            return f"{table}[h, clamp({row} - kv, -{reach}, {reach}) + {reach}]"
        if kind == "bucket":
            # no distance is at the end of a bucket of logarithms, whatever a logarithm is rounded to
            bucket = self.chance.choice((f"abs({row} - kv) // 8", f"int(2.0 * log2(1.5 + abs({row} - kv)))"))
            return f"{self.learned('table', ['buckets'])}[min({bucket}, 15)]"
        if kind == "row":
            return f"{self.learned('offsets', ['b', 'seqlen_q'])}[b, q]"
        if kind == "wave":
            return self.chance.choice((
                f"cos(0.01 * ({row} - kv))", f"sin({row} * 0.1)", "exp2(-0.1 * abs(q - kv))",
                f"atan(0.05 * ({row} - kv))", f"atan2({row} - kv, 20)", f"trunc(0.3 * ({row} - kv) + 0.05)",
                f"0.1 * round(0.3 * ({row} - kv) + 0.05)", f"sign({row} - kv)",
            ))  # fmt: skip
        if kind == "gather":
            kinds = declared.tensor("kinds", "int32", ["b", "seqlen_k"], range={"min": 0, "max": 7})
            return f"{self.learned('of_kind', [8])}[{kinds}[b, kv]]"
        if kind == "far":
            return self.chance.choice((f"log(1.0 + abs({row} - kv))", f"log1p(abs({row} - kv))"))
        return f"0.5 * ({row} // 16 - kv // 16)"

    def scaled(self, s: str) -> str:
        """Multiply or divide."""
        declared = self.declared
        return self.chance.choice(
            (
                f"({s}) * 0.5",
                f"({s}) * {self.number('gain', 'float32', {'min': 0.25, 'max': 2})}",
                f"({s}) / {self.number('heat', 'float32', {'min': 0.5, 'max': 4})}",
                f"({s}) * {declared.tensor('gains', declared.floats(), ['h'], range={'min': 0.25, 'max': 1.5})}[h]",
                f"({s}) / (1.0 + 0.05 * abs(q - kv))",
                f"({s}) * log2(2.0 + q)  ** 0.5 * 0.5",
                f"({s}) * rsqrt(1.0 + kv * 0.01)",
            )
        )

    def curved(self, s: str) -> str:
        """Bend."""
        cap = self.chance.choice(("20.0", "5.0", self.number("cap", "float32", {"min": 2, "max": 60})))
        return self.chance.choice(
            (
                f"{cap} * tanh(({s}) / {cap})",
                f"{cap} * tanh(({s}) / {cap})",
                f"clamp({s}, -4.0, 4.0)",
                f"({s}) * sigmoid({s})",
                f"silu({s})",
                f"max({s}, 0.1 * ({s}))",
                f"log(1.0 + exp(clamp({s}, -30.0, 30.0)))",
                f"sqrt(1.0 + ({s}) * ({s}))",
                f"0.1 * clamp({s}, -6.0, 6.0) ** 2",
                f"0.02 * clamp({s}, -5.0, 5.0) ** 3 + ({s})",
                f"4.0 * sigmoid({s})",
                f"log1p(exp(clamp({s}, -30.0, 30.0)))",
                f"expm1(min({s}, 1.5))",
                f"0.5 * ({s}) * (1.0 + erf(0.70710678 * ({s})))",
                f"2.0 * atan({s})",
                f"(1.0 + abs({s})) ** (0.3 + 0.002 * kv)",
                f"({s}) / (1.0 + abs({s}))",
                f"sin(clamp({s}, -8.0, 8.0))",
                f"abs({s})",
            )
        )

    def chosen(self, s: str) -> str:
        """Take one of two, by a condition."""
        other = self.chance.choice((f"({s}) * 0.5", f"({s}) - 1.0", "s", f"({s}) + {self.bias()}", "0.25", f"-({s})"))
        return f"{s} if {self.condition()} else {other}"

    def hidden(self, s: str) -> str:
        """Hide pairs by a score of minus infinity."""
        if self.chance.random() < 0.5:
            return f"{s} if {self.condition()} else -inf"
        return f"-inf if {self.condition()} else {s}"

    def condition(self) -> str:
        """Return a condition, most without tensors."""
        family = self.chance.choice(
            (self.masks.modular, self.masks.modular, self.masks.band, self.masks.uniform, self.masks.condition)
        )
        return f"({family()})"

    # --- numbers --------------------------------------------------------------------------------------------

    def number(self, prefix: str, kind: str, limits: dict[str, float]) -> str:
        """Declare a float scalar, some of which take a gradient."""
        fields: dict[str, object] = {"type": kind, **limits}
        if self.chance.random() < 0.2:
            fields["grad"] = True
        elif self.chance.random() < 0.3:
            fields["const"] = limits["max"]
        return self.declared.scalar(prefix, fields)

    def learned(self, prefix: str, shape: list[int | str]) -> str:
        """Declare a float tensor, some of which take a gradient."""
        grad = {"grad": True} if self.chance.random() < 0.25 else {}
        return self.declared.tensor(prefix, self.declared.floats(), shape, **grad)
