"""Masks of image models."""

from __future__ import annotations

import math
from typing import Any

import torch

from attngen.lab.bench.masks.cases.forms import Forms, Mod, Register, Size, floats, ints

case = Register()


def _image(size: Size) -> tuple[int, int]:
    """Width and height of an image whose pixels are the sequence, as far as they fill it."""
    width = 2 ** (int(math.log2(size.seqlen)) // 2)
    return width, size.seqlen // width


@case("natten 2-D")
def _(size: Size) -> Forms:
    width, height = _image(size)
    w = min(15, width - 1)

    def axis(i: Any, j: Any, n: int) -> Any:
        first = (i - w // 2).clamp(0, n - w)
        return (first <= j) & (j < first + w)

    return Forms(
        lambda b, h, q, kv: axis(q // width, kv // width, height) & axis(q % width, kv % width, width),
        mask="axis(q // width, kv // width, height) and axis(q % width, kv % width, width)",
        let={"first(i, n)": "clamp(i - w // 2, 0, n - w)", "axis(i, j, n)": "first(i, n) <= j and j < first(i, n) + w"},
        sizes={"width": width, "height": height, "w": w},
    )


@case("natten 2-D dilated")
def _(size: Size) -> Forms:
    width, height = _image(size)
    d, w = 4, min(7, width // 4)

    def axis(i: Any, j: Any, n: int) -> Any:
        first = (i // d - w // 2).clamp(0, n // d - w)
        return (i % d == j % d) & (first <= j // d) & (j // d < first + w)

    return Forms(
        lambda b, h, q, kv: axis(q // width, kv // width, height) & axis(q % width, kv % width, width),
        mask="axis(q // width, kv // width, height) and axis(q % width, kv % width, width)",
        let={
            "first(i, n)": "clamp(i // d - w // 2, 0, n // d - w)",
            "axis(i, j, n)": "i % d == j % d and first(i, n) <= j // d and j // d < first(i, n) + w",
        },
        sizes={"width": width, "height": height, "d": d, "w": w},
    )


def _swin(size: Size) -> tuple[int, int, int, Mod, str, dict[str, str]]:
    """Width, height and window of a Swin layer with shifted windows, and its mask in both forms.

    Windows are cut from the shifted image; pixels that the shift brought from another edge are another region.
    """
    width, height = _image(size)
    w = min(16, width // 2)

    def part(i: Any, n: int) -> Any:
        return i // w * 2 + torch.where(i < n - w // 2, 0, 1)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows = part(q // width, height) == part(kv // width, height)
        return rows & (part(q % width, width) == part(kv % width, width))

    mask = "part(q // width, height) == part(kv // width, height) and part(q % width, width) == part(kv % width, width)"
    return width, height, w, mask_mod, mask, {"part(i, n)": "i // w * 2 + (0 if i < n - w // 2 else 1)"}


@case("swin, shifted windows")
def _(size: Size) -> Forms:
    width, height, w, mask_mod, mask, let = _swin(size)
    return Forms(mask_mod, mask=mask, let=let, sizes={"width": width, "height": height, "w": w})


@case("swin with its bias")
def _(size: Size) -> Forms:
    width, height, w, mask_mod, mask, let = _swin(size)
    table = size.normal(size.heads, 2 * w, 2 * w)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        rows, columns = q // width - kv // width, q % width - kv % width
        return s + table[h, rows.clamp(-w, w - 1) + w, columns.clamp(-w, w - 1) + w]

    return Forms(
        mask_mod, score_mod, mask=mask, let={**let, "near(d)": "clamp(d, -w, w - 1) + w"},
        score="s + table[h, near(q // width - kv // width), near(q % width - kv % width)]",
        sizes={"width": width, "height": height, "w": w},
        declared={"table": floats("h", "rows", "columns")}, tensors={"table": table},
    )  # fmt: skip


@case("axial")
def _(size: Size) -> Forms:
    width, _ = _image(size)
    return Forms(
        lambda b, h, q, kv: (q // width == kv // width) | (q % width == kv % width),
        mask="q // width == kv // width or q % width == kv % width",
        sizes={"width": width},
    )


@case("checkerboard of blocks")
def _(size: Size) -> Forms:
    block = size.fraction(40)
    return Forms(
        lambda b, h, q, kv: (q // block + kv // block) % 2 == 0,
        mask="(q // block + kv // block) % 2 == 0",
        sizes={"block": block},
    )


@case("checkerboard of pairs")
def _(size: Size) -> Forms:
    return Forms(lambda b, h, q, kv: ((q ^ kv) & 1) == 0, mask="(q ^ kv) & 1 == 0")


@case("decomposed relative positions")
def _(size: Size) -> Forms:
    """SAM: a bias for each query and row of keys, and one for each query and column."""
    width, height = _image(size)
    rows, columns = size.normal(size.heads, size.seqlen, height + 1), size.normal(size.heads, size.seqlen, width)
    return Forms(
        None,
        lambda s, b, h, q, kv: s + rows[h, q, kv // width] + columns[h, q, kv % width],
        score="s + rows[h, q, kv // width] + columns[h, q, kv % width]",
        sizes={"width": width},
        declared={
            "rows": floats("h", "seqlen_q", "rows_of_keys"),
            "columns": floats("h", "seqlen_q", "columns_of_keys"),
        },
        tensors={"rows": rows, "columns": columns},
    )


@case("regions by bits")
def _(size: Size) -> Forms:
    """Regional prompts: regions that overlap, as bits of each token."""
    at = size.positions()
    bits = (1 << (at // size.fraction(8)).clamp(max=7)) | torch.where(
        at % size.fraction(16) < size.fraction(64), 256, 0
    )
    bits = bits.int()
    return Forms(
        lambda b, h, q, kv: (bits[q] & bits[kv]) != 0,
        mask="bits[q] & bits[kv] != 0",
        declared={"bits": ints("seqlen_k")},
        tensors={"bits": bits},
    )
