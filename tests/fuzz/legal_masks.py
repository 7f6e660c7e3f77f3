"""Random masks as a user writes them: bands of every shape, joined, cut and turned round.

Every index lies within its extent, or is guarded, so that each call of a trial is a legal one.
"""

from __future__ import annotations

import random

from tests.fuzz.declared import Declared


class Masks:
    """Writes masks over the declarations of one variant, which it extends."""

    def __init__(self, declared: Declared, layout: str) -> None:
        self.declared = declared
        self.chance: random.Random = declared.chance
        self.layout = layout

    def mask(self) -> str | bool | None:
        """Return a mask; True or None show every key."""
        kind = self.chance.random()
        if kind < 0.08:
            return self.chance.choice((True, None))
        if kind < 0.55:
            return self.band()
        if kind < 0.75:
            return self.joined()
        return self.condition()

    def joined(self) -> str:
        """Return several conditions as one."""
        parts = [f"({self.condition()})" for _ in range(self.chance.choice((2, 2, 3, 4)))]
        kind = self.chance.random()
        if kind < 0.35:
            return " or ".join(parts)
        if kind < 0.7:
            return " and ".join(parts)
        if kind < 0.8:
            return f"not {parts[0]} and {self.band()}"
        if kind < 0.9:
            return f"{parts[0]} ^ {parts[1]}"
        return f"{parts[0]} if {self.uniform()} else {parts[1]}"

    def condition(self) -> str:
        """Return one condition of any family."""
        family = self.chance.choice(
            (
                self.band, self.band, self.band, self.ranges, self.modular, self.modular, self.documents,
                self.documents, self.grid, self.table, self.by_key, self.uniform_or_band,
            )
        )  # fmt: skip
        return family()

    # --- bands ----------------------------------------------------------------------------------------------

    def band(self) -> str:
        """Return an interval of keys: one-sided, two-sided, around the query, or visible without being full."""
        kind = self.chance.random()
        if kind < 0.3:
            return self.side()
        if kind < 0.6:
            return f"{self.side()} and {self.side()}"
        if kind < 0.7:
            return f"abs({self.row()} - kv) {self.chance.choice(('<', '<='))} {self.declared.reach()}"
        if kind < 0.8:
            return f"0 <= {self.row()} - kv < {self.reach_of_row()}"
        if kind < 0.9:
            row = self.row()
            return f"kv <= {row} and {row} - kv <= {self.reach_of_row()}"
        return f"({self.side()}) and {self.modular()}"

    def side(self) -> str:
        """Return a comparison of the key with a bound."""
        sign = self.chance.choice(("<=", "<=", "<", ">=", ">"))
        if self.chance.random() < 0.2:
            return f"{self.bound()} {sign} kv"
        return f"kv {sign} {self.bound()}"

    def bound(self) -> str:
        """Start or end of an interval of keys."""
        kind = self.chance.random()
        row = self.row()
        if kind < 0.2:
            return row
        if kind < 0.35:
            return f"{row} {self.chance.choice('+-')} {self.declared.reach()}"
        if kind < 0.45:
            return f"{row} {self.chance.choice('+-')} {self.reach_of_row()}"
        if kind < 0.6:
            return self.position_of_row()
        if kind < 0.7:
            period = self.declared.divisor()
            return f"{row} // {period} * {period}"
        if kind < 0.78:
            return f"{self.chance.choice(('min', 'max'))}({row}, {self.position_of_row()})"
        if kind < 0.84:
            return f"{self.chance.choice(('2 * ', '3 * ', '-'))}{row} + {self.declared.reach()}"
        if kind < 0.9:
            return f"{row} // {self.chance.choice((2, 3, 4))}"
        if kind < 0.95:
            return self.chance.choice(("seqlen_k // 2", "seqlen_k - 16", "seqlen_k - seqlen_q", "kv_heads * 16"))
        return self.declared.reach()

    def row(self) -> str:
        """Return the place of the query."""
        return self.chance.choice(("q", "q_pos", "q_pos", "q_pos", "(q + 3)", "(q_pos - 1)"))

    def position_of_row(self) -> str:
        """Return an element of a tensor of positions, by query, head, batch entry or alone."""
        declared, dtype = self.declared, self.declared.integers()
        in_keys = {"range": {"min": 0, "max": "seqlen_k"}} if self.chance.random() < 0.4 and dtype != "int16" else {}
        kind = self.chance.choice(("row", "row", "batch_row", "head_row", "head", "kv_head", "batch", "global", "one"))
        if kind == "row":
            length = declared.length("seqlen_q")
            return f"{declared.tensor('start', dtype, [length], **declared.monotone(0), **in_keys)}[q]"
        if kind == "batch_row":
            name = declared.tensor(
                "start", dtype, ["b", declared.length("seqlen_q")], **declared.monotone(1), **in_keys
            )
            return f"{name}[b, q]"
        if kind == "head_row":
            name = declared.tensor("start", dtype, ["h", "seqlen_q"], **declared.monotone(1), **in_keys)
            return f"{name}[h, q]"
        if kind == "global":
            name = declared.tensor("start", dtype, ["total_q"], **in_keys)
            return f"{name}[q_global]"
        if kind == "one":
            return declared.tensor("start", dtype, [], **in_keys)
        axis = {"head": "h", "kv_head": "hk", "batch": "b"}[kind]
        return f"{declared.tensor('start', dtype, [axis], **in_keys)}[{axis}]"

    def reach_of_row(self) -> str:
        """Return an element of a tensor of distances, or a distance for all."""
        declared = self.declared
        positive = {"range": {"min": self.chance.choice((0, 1)), "max": 300}} if self.chance.random() < 0.7 else {}
        kind = self.chance.choice(("row", "batch_row", "head", "head", "kv_head", "batch", "none"))
        if kind == "none":
            return declared.reach()
        shape = {"row": ["seqlen_q"], "batch_row": ["b", "seqlen_q"], "head": ["h"], "kv_head": ["hk"], "batch": ["b"]}
        index = {"row": "q", "batch_row": "b, q", "head": "h", "kv_head": "hk", "batch": "b"}[kind]
        return f"{declared.tensor('reach', 'int32', [*shape[kind]], **positive)}[{index}]"

    # --- others ---------------------------------------------------------------------------------------------

    def ranges(self) -> str:
        """Return several intervals, as sink tokens, global tokens and windows make them."""
        count = self.chance.choice((2, 2, 3, 4, 6))
        return " or ".join(
            f"({self.band()})" if self.chance.random() < 0.7 else f"kv < {self.declared.reach()}" for _ in range(count)
        )

    def modular(self) -> str:
        """Pattern that repeats along the keys, the queries or their difference."""
        period = self.declared.divisor()
        row = self.row()
        return self.chance.choice(
            (
                f"({row} - kv) % {period} == 0",
                f"kv % {period} != {self.chance.choice((0, 1, 2))}",
                f"{row} // {period} == kv // {period}",
                f"{row} // {period} >= kv // {period}",
                f"({row} + kv) % {self.chance.choice((3, 5))} != 1",
                f"({row} * 7 + kv * 3) % 5 != 0",
                f"({row} ^ kv) & 3 != 2",
                "(kv >> 4) & 1 == (q >> 4) & 1",
                f"(kv + h) % {self.chance.choice((2, 3, 4))} == 0 or kv == {row}",
            )
        )

    def documents(self) -> str:
        """Keys of the query's document, or of an earlier one."""
        declared, dtype = self.declared, self.declared.integers()
        kind = self.chance.choice(("batch", "all", "own", "global", "starts", "flag"))
        sign = self.chance.choice(("==", "==", "==", ">=", "<="))
        if kind == "batch":
            doc = declared.tensor("doc", dtype, ["b", declared.length("seqlen_k")], **declared.monotone(1))
            return f"q_pos >= 0 and {doc}[b, q_pos] {sign} {doc}[b, kv]"
        if kind == "all":
            doc = declared.tensor("doc", dtype, [declared.length("seqlen_k")], **declared.monotone(0))
            return f"q_pos >= 0 and {doc}[q_pos] {sign} {doc}[kv]"
        if kind == "own":
            of_q = declared.tensor("doc_q", dtype, ["b", "seqlen_q"], **declared.monotone(1))
            of_k = declared.tensor("doc_k", dtype, ["b", "seqlen_k"], **declared.monotone(1))
            return f"{of_q}[b, q] {sign} {of_k}[b, kv]"
        if kind == "global":
            doc = declared.tensor("doc", dtype, ["total_k"], **(declared.monotone(0) if self.layout == "dense" else {}))
            return f"q_pos >= 0 and {doc}[kv_global - kv + q_pos] {sign} {doc}[kv_global]"
        if kind == "starts":
            first = declared.tensor("first_key", dtype, ["b", "seqlen_q"], **declared.monotone(1))
            last = declared.tensor("last_key", dtype, ["b", "seqlen_q"], **declared.monotone(1))
            return f"{first}[b, q] <= kv < {last}[b, q]"
        doc = declared.tensor("doc", dtype, ["b", "seqlen_k"], **declared.monotone(1))
        return f"q_pos >= 0 and ({doc}[b, q_pos] {sign} {doc}[b, kv] or {doc}[b, kv] == 0)"

    def grid(self) -> str:
        """Return neighbours in an image, whose rows follow each other."""
        width, reach = self.declared.divisor(), self.declared.reach()
        rows = f"abs(q // {width} - kv // {width}) <= {reach}"
        return rows if self.chance.random() < 0.3 else f"{rows} and abs(q % {width} - kv % {width}) <= {reach}"

    def table(self) -> str:
        """Return a look-up of pairs or of blocks of pairs."""
        declared = self.declared
        kind = self.chance.choice(("pairs", "head_pairs", "blocks", "keys", "words", "numbers"))
        if kind == "pairs":
            return f"{declared.tensor('allowed', 'bool', ['b', 'seqlen_q', 'seqlen_k'])}[b, q, kv]"
        if kind == "head_pairs":
            return f"{declared.tensor('allowed', 'bool', ['h', 'seqlen_q', 'seqlen_k'])}[h, q, kv]"
        if kind == "blocks":
            blocks = declared.tensor("blocks", "bool", ["h", "q_blocks", "k_blocks"])
            return f"{blocks}[h, q // 16, kv // 16]"
        if kind == "keys":
            return f"{declared.tensor('padding', 'bool', ['b', 'seqlen_k'])}[b, kv]"
        if kind == "words":
            words = declared.tensor("words", "int32", ["b", "seqlen_q", "words_of_row"])
            return f"({words}[b, q, kv // 32] >> kv % 32) & 1 == 1"
        return f"{declared.tensor('kind', 'uint8', ['b', 'seqlen_k'])}[b, kv] != 1"

    def by_key(self) -> str:
        """Return a bound of the queries that each key has of its own."""
        declared = self.declared
        name = declared.tensor("until", declared.integers(), [declared.length("seqlen_k")], **declared.monotone(0))
        row = self.chance.choice(("q", "q_pos"))
        return self.chance.choice((f"{row} >= {name}[kv]", f"{row} < {name}[kv]", f"abs({row} - kv) <= {name}[kv]"))

    def uniform(self) -> str:
        """Return a condition that is the same for all pairs of a head."""
        return self.chance.choice(
            (
                "h % 2 == 0",
                "h < heads // 2",
                "b == 0",
                "seqlen_k > 64",
                "hk == 0",
                self.declared.scalar("flag", {"type": "bool"}),
            )
        )

    def uniform_or_band(self) -> str:
        """Return a band for some heads or entries, and everything for the others."""
        return f"{self.uniform()} or ({self.band()})"
