"""Masks and scores of models and papers, each written for FlexAttention and in attngen's language."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Sequence lengths of tensors over (q, kv) are bounded by memory: 16k × 16k × 8 heads in bf16 are 4 GiB.
PAIRS = 16384

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """Shape of a call: one sequence of ``seqlen`` queries and keys. Tensors are random, the same for each seed."""

    seqlen: int
    heads: int
    head_dim: int
    device: torch.device
    seed: int = 0

    def uniform(self, *shape: int) -> Tensor:
        """Random float32 numbers from 0 to 1."""
        generator = torch.Generator(self.device).manual_seed(self.seed + len(shape))
        return torch.rand(*shape, generator=generator, device=self.device)

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

    def share(self, parts: int, least: int = 1) -> int:
        """``seqlen // parts``, so that small sequences have small windows."""
        return max(self.seqlen // parts, least)


@dataclass(frozen=True)
class Forms:
    """One function in both forms.

    ``mask_mod`` and ``score_mod`` are FlexAttention's. ``mask``, ``score``, ``let`` and ``declared`` (tensors) are
    fields of ``attngen.variant``, over the names in ``sizes`` and ``tensors``. ``learned`` names tensors that take
    gradients; the functions for FlexAttention capture the same tensors. ``hides`` is the mask that a score of −inf
    stands for, by which tiles are counted.
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

    @property
    def over_pairs(self) -> tuple[Tensor, ...]:
        """The tensors that have an element for each pair of a query and a key."""
        return tuple(
            self.tensors[name] for name, said in self.declared.items() if said["shape"][-2:] == ["seqlen_q", "seqlen_k"]
        )

    @property
    def by_head(self) -> bool:
        """Whether heads see different keys."""
        return re.search(r"\bh\b", self.mask or "") is not None

    def fields(self, *, constant: bool) -> dict[str, Any]:
        """Return the fields of the variant, with its sizes as constants or as scalars of the call."""
        fields: dict[str, Any] = {"mask": self.mask, "score": self.score, "let": self.let}
        fields["scalars"] = {name: _scalar(value, constant) for name, value in self.sizes.items()}
        fields["tensors"] = {
            name: {**said, "grad": True} if name in self.learned else said for name, said in self.declared.items()
        }
        return {name: value for name, value in fields.items() if value}

    def arguments(self, *, constant: bool) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {**self.tensors, **({} if constant else self.sizes)}


def _scalar(value: int | float, constant: bool) -> dict[str, Any]:
    if isinstance(value, float):
        return {"type": "float32", "const": value} if constant else {"type": "float32", "min": 0.001, "max": 1000.0}
    most = 65536 if value <= 65536 else 2**20
    return {"type": "int32", "const": value} if constant else {"type": "int32", "min": 1, "max": most}


@dataclass(frozen=True)
class MaskCase:
    """A function, and the sizes at which it is called.

    ``own`` is its length instead of those asked for, ``most`` the largest of these. ``make`` returns its forms.
    """

    name: str
    make: Callable[[Size], Forms]
    own: int | None = None
    most: int | None = None
    kv_heads: int | None = None

    @property
    def identifier(self) -> str:
        """The name as that of a variant."""
        return re.sub("[^a-z0-9]+", "_", self.name.lower())


_CASES: list[MaskCase] = []


def mask_cases() -> tuple[MaskCase, ...]:
    """Return all cases, those first whose kernels take longest to compile."""
    return tuple(_CASES)


def _case(name: str, **at: int) -> Callable[[Callable[[Size], Forms]], Callable[[Size], Forms]]:
    """Register the maker of a case."""

    def register(make: Callable[[Size], Forms]) -> Callable[[Size], Forms]:
        _CASES.append(MaskCase(name, make, **at))
        return make

    return register


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _ints(*shape: Any, **facts: Any) -> dict[str, Any]:
    return {"dtype": "int32", "shape": list(shape), **facts}


def _floats(*shape: Any, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def _bools(*shape: Any) -> dict[str, Any]:
    return {"dtype": "bool", "shape": list(shape)}


_PAIR = ("seqlen_q", "seqlen_k")


# --- video ------------------------------------------------------------------------------------------------------


@_case("sliding tiles", own=69376)
def _(size: Size) -> Forms:
    """Sliding tile attention: tokens of a video are sorted by tiles; text follows, which sees and is seen by all."""
    (nz, ny, nx), (wz, wy, wx) = (3, 6, 10), (3, 3, 3)
    per = (size.seqlen - size.seqlen // 271) // (nz * ny * nx)
    video = per * nz * ny * nx

    def near(i: Any, j: Any, n: int, w: int) -> Any:
        return (i.clamp(w // 2, n - 1 - w // 2) - j).abs() <= w // 2

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        i, j = q // per, kv // per
        x = near(i % nx, j % nx, nx, wx)
        y = near(i // nx % ny, j // nx % ny, ny, wy)
        z = near(i // (nx * ny) % nz, j // (nx * ny) % nz, nz, wz)
        return (x & y & z) | (q >= video) | (kv >= video)

    return Forms(
        mask_mod,
        mask="q >= video or kv >= video or near(tz(q), tz(kv), nz, wz) and near(ty(q), ty(kv), ny, wy) "
             "and near(tx(q), tx(kv), nx, wx)",
        let={
            "tile(i)": "i // per",
            "tx(i)": "tile(i) % nx",
            "ty(i)": "tile(i) // nx % ny",
            "tz(i)": "tile(i) // (nx * ny) % nz",
            "near(i, j, n, w)": "abs(clamp(i, w // 2, n - 1 - w // 2) - j) <= w // 2",
        },
        sizes={"per": per, "nx": nx, "ny": ny, "nz": nz, "wx": wx, "wy": wy, "wz": wz, "video": video},
    )  # fmt: skip


def _neighbourhood(size: Size, window: tuple[int, int, int], dilation: tuple[int, int, int]) -> Forms:
    """NATTEN in 3-D, causal in time; a window at an edge is moved inward, within its dilation group."""
    tall = max(round((size.seqlen // 6) ** (1 / 3)), 2)
    ny, nx = 2 * tall, 3 * tall
    (dt, dy, dx), wt = dilation, window[0]
    wy, wx = min(window[1], ny // dy), min(window[2], nx // dx)

    def axis(i: Any, j: Any, n: int, w: int, d: int) -> Any:
        group = (n - i % d + d - 1) // d
        first = torch.maximum(i // d - w // 2, torch.zeros_like(i)).minimum(group - w)
        return (i % d == j % d) & (first <= j // d) & (j // d < first + w)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        t, u = q // (nx * ny), kv // (nx * ny)
        time = (t % dt == u % dt) & (t // dt >= u // dt) & (t // dt - u // dt < wt)
        return time & axis(q // nx % ny, kv // nx % ny, ny, wy, dy) & axis(q % nx, kv % nx, nx, wx, dx)

    return Forms(
        mask_mod,
        mask="t(q) % dt == t(kv) % dt and 0 <= t(q) // dt - t(kv) // dt and t(q) // dt - t(kv) // dt < wt "
             "and axis(y(q), y(kv), ny, wy, dy) and axis(x(q), x(kv), nx, wx, dx)",
        let={
            "x(i)": "i % nx",
            "y(i)": "i // nx % ny",
            "t(i)": "i // (nx * ny)",
            "first(i, n, w, d)": "min(max(i // d - w // 2, 0), (n - i % d + d - 1) // d - w)",
            "axis(i, j, n, w, d)": "i % d == j % d and first(i, n, w, d) <= j // d "
                                   "and j // d < first(i, n, w, d) + w",
        },
        sizes={"nx": nx, "ny": ny, "wt": wt, "wy": wy, "wx": wx, "dt": dt, "dy": dy, "dx": dx},
    )  # fmt: skip


@_case("natten 3-D", own=24576)
def _(size: Size) -> Forms:
    return _neighbourhood(size, (4, 9, 13), (1, 1, 1))


@_case("natten 3-D dilated", own=24576)
def _(size: Size) -> Forms:
    return _neighbourhood(size, (4, 9, 13), (1, 2, 3))


@_case("frames, window of frames")
def _(size: Size) -> Forms:
    """A video model that writes frame after frame: a frame sees itself and the last three."""
    frame, last = size.share(21), 4
    return Forms(
        lambda b, h, q, kv: (q // frame >= kv // frame) & (q // frame - kv // frame < last),
        mask="q // frame >= kv // frame and q // frame - kv // frame < last",
        sizes={"frame": frame, "last": last},
    )


@_case("radial")
def _(size: Size) -> Forms:
    """Radial attention: the window in space halves with each frame of distance."""
    frame = size.share(16)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = (q // frame - kv // frame).abs().clamp(max=12)
        return ((q % frame - kv % frame).abs() << apart) <= frame

    return Forms(
        mask_mod,
        mask="abs(q % frame - kv % frame) << min(abs(q // frame - kv // frame), 12) <= frame",
        sizes={"frame": frame},
    )


# --- images -----------------------------------------------------------------------------------------------------


def _image(size: Size) -> tuple[int, int]:
    """Width and height of an image whose pixels are the sequence, as far as they fill it."""
    width = 2 ** (int(math.log2(size.seqlen)) // 2)
    return width, size.seqlen // width


@_case("natten 2-D")
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


@_case("natten 2-D dilated")
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


@_case("swin, shifted windows")
def _(size: Size) -> Forms:
    width, height, w, mask_mod, mask, let = _swin(size)
    return Forms(mask_mod, mask=mask, let=let, sizes={"width": width, "height": height, "w": w})


@_case("swin with its bias")
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
        declared={"table": _floats("h", "rows", "columns")}, tensors={"table": table},
    )  # fmt: skip


@_case("axial")
def _(size: Size) -> Forms:
    width, _ = _image(size)
    return Forms(
        lambda b, h, q, kv: (q // width == kv // width) | (q % width == kv % width),
        mask="q // width == kv // width or q % width == kv % width",
        sizes={"width": width},
    )


@_case("checkerboard of blocks")
def _(size: Size) -> Forms:
    block = size.share(40)
    return Forms(
        lambda b, h, q, kv: (q // block + kv // block) % 2 == 0,
        mask="(q // block + kv // block) % 2 == 0",
        sizes={"block": block},
    )


@_case("checkerboard of pairs")
def _(size: Size) -> Forms:
    return Forms(lambda b, h, q, kv: ((q ^ kv) & 1) == 0, mask="(q ^ kv) & 1 == 0")


# --- sparse patterns --------------------------------------------------------------------------------------------


@_case("dilated window")
def _(size: Size) -> Forms:
    step, window = 4, size.share(8)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window) & ((q - kv) % step == 0),
        mask="q >= kv and q - kv < window and (q - kv) % step == 0",
        sizes={"step": step, "window": window},
    )


@_case("sparse transformer, strided")
def _(size: Size) -> Forms:
    stride = size.share(16)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q - kv < stride) | ((q - kv) % stride == 0)),
        mask="q >= kv and (q - kv < stride or (q - kv) % stride == 0)",
        sizes={"stride": stride},
    )


@_case("sparse transformer, fixed")
def _(size: Size) -> Forms:
    stride, summary = size.share(32, 16), 8
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q // stride == kv // stride) | (kv % stride >= stride - summary)),
        mask="q >= kv and (q // stride == kv // stride or kv % stride >= stride - summary)",
        sizes={"stride": stride, "summary": summary},
    )


@_case("longformer")
def _(size: Size) -> Forms:
    radius, first = size.share(32), size.share(64)
    return Forms(
        lambda b, h, q, kv: ((q - kv).abs() <= radius) | (kv < first) | (q < first),
        mask="abs(q - kv) <= radius or kv < first or q < first",
        sizes={"radius": radius, "first": first},
    )


@_case("bigbird")
def _(size: Size) -> Forms:
    """A window of blocks, global blocks, and random blocks."""
    block = size.share(128)
    blocks = -(-size.seqlen // block)
    chosen = size.uniform(blocks, blocks) < 3 / 128

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        i, j = q // block, kv // block
        return ((i - j).abs() <= 1) | (i < 2) | (j < 2) | chosen[i, j]

    return Forms(
        mask_mod,
        mask="abs(i - j) <= 1 or i < 2 or j < 2 or chosen[i, j]",
        let={"i": "q // block", "j": "kv // block"},
        sizes={"block": block},
        declared={"chosen": _bools("rows", "columns")},
        tensors={"chosen": chosen},
    )


@_case("table of blocks, by head")
def _(size: Size) -> Forms:
    """Blocks that an indexer chose for each head, 128 a side."""
    block = size.share(64)
    blocks = -(-size.seqlen // block)
    chosen = size.uniform(size.heads, blocks, blocks) < 0.25
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (chosen[h, q // block, kv // block] | (q // block == kv // block)),
        mask="q >= kv and (chosen[h, q // block, kv // block] or q // block == kv // block)",
        sizes={"block": block},
        declared={"chosen": _bools("h", "rows", "columns")},
        tensors={"chosen": chosen},
    )


@_case("vertical and slash")
def _(size: Size) -> Forms:
    """MInference: keys that all see, and distances at which all see."""
    vertical, slash = size.uniform(2, size.seqlen) < 1 / 64
    slash[: size.share(64)] = True
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (vertical[kv] | slash[(q - kv).clamp(min=0)]),
        mask="q >= kv and (vertical[kv] or slash[q - kv])",
        declared={"vertical": _bools("seqlen_k"), "slash": _bools("seqlen_k")},
        tensors={"vertical": vertical, "slash": slash},
    )


@_case("powers of two")
def _(size: Size) -> Forms:
    """LogSparse: a query sees keys at distances that are powers of two."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = q - kv
        return (distance >= 0) & ((distance & (distance - 1)) == 0)

    return Forms(mask_mod, mask="q >= kv and (q - kv) & (q - kv - 1) == 0")


@_case("important keys")
def _(size: Size) -> Forms:
    """Recent keys, and those whose weight is large."""
    weight, window = size.uniform(size.seqlen), size.share(32)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((weight[kv] > 0.9) | (q - kv < window)),
        mask="q >= kv and (weight[kv] > 0.9 or q - kv < window)",
        sizes={"window": window},
        declared={"weight": _floats("seqlen_k")},
        tensors={"weight": weight},
    )


# --- documents --------------------------------------------------------------------------------------------------


def _documents(size: Size, mean: int) -> Tensor:
    """Numbers of documents whose lengths vary around ``mean``; they never decrease."""
    starts = size.uniform(size.seqlen) < 1 / mean
    return starts.cumsum(0).int()


@_case("documents, causal")
def _(size: Size) -> Forms:
    doc = _documents(size, size.share(12))
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        mask="q >= kv and doc[q] == doc[kv]",
        declared={"doc": _ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )


@_case("documents of an encoder")
def _(size: Size) -> Forms:
    doc = _documents(size, size.share(12))
    return Forms(
        lambda b, h, q, kv: doc[q] == doc[kv],
        mask="doc[q] == doc[kv]",
        declared={"doc": _ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )


@_case("documents that come back")
def _(size: Size) -> Forms:
    run = size.share(32)
    seg = size.integers(0, 6, size.seqlen // run + 1).repeat_interleave(run)[: size.seqlen].contiguous()
    return Forms(
        lambda b, h, q, kv: seg[q] == seg[kv],
        mask="seg[q] == seg[kv]",
        declared={"seg": _ints("seqlen_k")},
        tensors={"seg": seg},
    )


@_case("packed ids with padding")
def _(size: Size) -> Forms:
    """Ids of a packed batch, in any order; padding between and after them has the id 0."""
    run = size.share(24)
    ids = torch.randperm(25, generator=torch.Generator().manual_seed(size.seed)).int().to(size.device)
    ids[ids % 5 == 4] = 0
    seg = ids.repeat_interleave(run)[: size.seqlen]
    seg = torch.cat([seg, seg.new_zeros(size.seqlen - len(seg))])
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (seg[q] == seg[kv]) & (seg[kv] > 0),
        mask="q >= kv and seg[q] == seg[kv] and seg[kv] > 0",
        declared={"seg": _ints("seqlen_k")},
        tensors={"seg": seg},
    )


@_case("jagged, window in each")
def _(size: Size) -> Forms:
    """A window from the beginning of each document, by its offset."""
    doc = _documents(size, size.share(6))
    first = torch.searchsorted(doc, torch.arange(int(doc[-1]) + 1, device=size.device, dtype=torch.int32)).int()
    window = size.share(32)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = (q >= kv) & (doc[q] == doc[kv])
        return same & ((q - kv < window) | (kv - first[doc[kv]] < window))

    return Forms(
        mask_mod,
        mask="q >= kv and doc[q] == doc[kv] and (q - kv < window or kv - first[doc[kv]] < window)",
        sizes={"window": window},
        declared={"doc": _ints("seqlen_k", monotone={"axis": 0}), "first": _ints("documents")},
        tensors={"doc": doc, "first": first},
    )


@_case("padding on both sides")
def _(size: Size) -> Forms:
    ends = (size.share(9), size.seqlen - size.share(7))
    first, end = (torch.tensor([at], device=size.device, dtype=torch.int32) for at in ends)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (kv >= first[b]) & (kv < end[b]) & (q >= first[b]) & (q < end[b])

    return Forms(
        mask_mod,
        mask="q >= kv and kv >= first[b] and kv < end[b] and q >= first[b] and q < end[b]",
        declared={"first": _ints("b"), "end": _ints("b")},
        tensors={"first": first, "end": end},
    )


@_case("padding by a mask of keys")
def _(size: Size) -> Forms:
    """The attention mask of a tokenizer: a bool for each key of each sequence."""
    keep = ((size.positions() < size.seqlen - size.share(5)) & (size.positions() >= size.share(11)))[None]
    return Forms(
        lambda b, h, q, kv: keep[b, kv],
        mask="keep[b, kv]",
        declared={"keep": _bools("b", "seqlen_k")},
        tensors={"keep": keep},
    )


# --- language models --------------------------------------------------------------------------------------------


@_case("prefix LM")
def _(size: Size) -> Forms:
    prefix = size.share(4)
    return Forms(lambda b, h, q, kv: (q >= kv) | (kv < prefix), mask="q >= kv or kv < prefix", sizes={"prefix": prefix})


@_case("prefix LM of documents")
def _(size: Size) -> Forms:
    """Each document begins with a prompt that it sees whole."""
    doc = _documents(size, size.share(8))
    inner = size.positions() - torch.searchsorted(doc, doc).int()
    prompt = inner < size.share(32)
    return Forms(
        lambda b, h, q, kv: (doc[q] == doc[kv]) & ((q >= kv) | prompt[kv]),
        mask="doc[q] == doc[kv] and (q >= kv or prompt[kv])",
        declared={"doc": _ints("seqlen_k", monotone={"axis": 0}), "prompt": _bools("seqlen_k")},
        tensors={"doc": doc, "prompt": prompt},
    )


@_case("block diffusion")
def _(size: Size) -> Forms:
    """BD3-LM in training: n noised tokens, then the same n clean ones, in blocks."""
    n, block = size.seqlen // 2, size.share(256, 4)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        cq, ck = q >= n, kv >= n
        bq, bk = torch.where(cq, q - n, q) // block, torch.where(ck, kv - n, kv) // block
        return ((bq == bk) & (cq == ck)) | (ck & ((bq > bk) | (cq & (bq >= bk))))

    return Forms(
        mask_mod,
        mask="blk(q) == blk(kv) and clean(q) == clean(kv) "
             "or clean(kv) and (blk(q) > blk(kv) or clean(q) and blk(q) >= blk(kv))",
        let={"clean(x)": "x >= n", "blk(x)": "((x - n) if x >= n else x) // block"},
        sizes={"n": n, "block": block},
    )  # fmt: skip


@_case("multi-item scoring")
def _(size: Size) -> Forms:
    """A prompt, whose item is 0, and candidates that see it and themselves."""
    item = ((size.positions() - size.share(4)).clamp(min=-1) // size.share(32) + 1).int()
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((item[kv] == 0) | (item[kv] == item[q])),
        mask="q >= kv and (item[kv] == 0 or item[kv] == item[q])",
        declared={"item": _ints("seqlen_k", monotone={"axis": 0})},
        tensors={"item": item},
    )


@_case("shared prefix")
def _(size: Size) -> Forms:
    """Answers of equal lengths to one prompt, as in GRPO."""
    prefix, answer = size.share(4), size.share(20)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((kv < prefix) | ((q - prefix) // answer == (kv - prefix) // answer))

    return Forms(
        mask_mod,
        mask="q >= kv and (kv < prefix or (q - prefix) // answer == (kv - prefix) // answer)",
        sizes={"prefix": prefix, "answer": answer},
    )


@_case("tree of answers")
def _(size: Size) -> Forms:
    """A tree of answers in depth-first order: a token sees those whose interval holds its own."""
    level = [size.share(2 ** (2 * n)) for n in range(5)]
    leave = torch.zeros_like(size.positions())
    for n, span in enumerate(level):  # the last quarter of a node's interval is that of its children
        inner = size.positions() % span
        own = inner < max(span // 4, 1) if n < len(level) - 1 else torch.ones_like(inner, dtype=torch.bool)
        leave = torch.where(own & (leave == 0), size.positions() // span * span + span, leave)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q < leave[kv]),
        mask="q >= kv and q < leave[kv]",
        declared={"leave": _ints("seqlen_k")},
        tensors={"leave": leave.int()},
    )


def _ancestors(size: Size, nodes: int) -> Tensor:
    """Which node of a random tree descends from which, or is it: (node, ancestor) bools."""
    parents = (size.uniform(nodes) * torch.arange(nodes, device=size.device)).int().tolist()
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[parents[node]]
    return seen.to(size.device)


@_case("ancestors in a tree", most=PAIRS)
def _(size: Size) -> Forms:
    """Trees of 256 tokens that a root each begins, as one matrix of bools."""
    nodes = min(256, size.seqlen)
    tree = _ancestors(size, nodes)
    seen = torch.block_diag(*[tree] * -(-size.seqlen // nodes))[: size.seqlen, : size.seqlen].bool()
    seen[:, : size.share(16)] |= size.positions()[:, None] >= size.positions()[: size.share(16)]
    return Forms(
        lambda b, h, q, kv: seen[q, kv],
        mask="seen[q, kv]",
        declared={"seen": _bools(*_PAIR)},
        tensors={"seen": seen},
    )


@_case("drafts of speculation")
def _(size: Size) -> Forms:
    """A prompt, and at its end a tree of drafts that see their ancestors."""
    drafts = size.share(16)
    prompt, seen = size.seqlen - drafts, _ancestors(size, drafts)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = seen[(q - prompt).clamp(min=0), (kv - prompt).clamp(min=0)]
        return torch.where(kv < prompt, q >= kv, (q >= prompt) & inner)

    return Forms(
        mask_mod,
        mask="q >= kv if kv < prompt else q >= prompt and seen[q - prompt, kv - prompt]",
        sizes={"prompt": prompt},
        declared={"seen": _bools("drafts", "drafts")},
        tensors={"seen": seen},
    )


@_case("images in text")
def _(size: Size) -> Forms:
    """Gemma 3 and PaliGemma: text is causal, an image sees itself whole."""
    image = _images(size)
    return Forms(
        lambda b, h, q, kv: (q >= kv) | ((image[q] > 0) & (image[q] == image[kv])),
        mask="q >= kv or image[q] > 0 and image[q] == image[kv]",
        declared={"image": _ints("seqlen_k")},
        tensors={"image": image},
    )


@_case("images in text, local")
def _(size: Size) -> Forms:
    """The same in a layer with a window."""
    image, window = _images(size), size.share(16)
    return Forms(
        lambda b, h, q, kv: ((q >= kv) & (q - kv < window)) | ((image[q] > 0) & (image[q] == image[kv])),
        mask="q >= kv and q - kv < window or image[q] > 0 and image[q] == image[kv]",
        sizes={"window": window},
        declared={"image": _ints("seqlen_k")},
        tensors={"image": image},
    )


def _images(size: Size) -> Tensor:
    """0 for text, else the number of the image that a token belongs to."""
    part, at = size.positions() // size.share(12), size.positions() % size.share(12)
    return torch.where(at < size.share(32), part + 1, 0).int()


@_case("spans that end later")
def _(size: Size) -> Forms:
    """Transfusion: a token sees all before it, and its span to the end."""
    end = torch.maximum(size.positions() + 1, (size.positions() // size.share(40) + 1) * size.share(40)).int()
    return Forms(
        lambda b, h, q, kv: kv < end[q], mask="kv < end[q]", declared={"end": _ints("seqlen_q")}, tensors={"end": end}
    )


# --- masks over pairs -------------------------------------------------------------------------------------------


@_case("random bools", most=PAIRS)
def _(size: Size) -> Forms:
    seen = size.uniform(size.seqlen, size.seqlen) < 0.5
    return Forms(
        lambda b, h, q, kv: seen[q, kv],
        mask="seen[q, kv]",
        declared={"seen": _bools(*_PAIR)},
        tensors={"seen": seen},
    )


def _bools_of_heads(seen: Tensor) -> Forms:
    return Forms(
        lambda b, h, q, kv: seen[b, h, q, kv],
        mask="seen[b, h, q, kv]",
        declared={"seen": _bools("b", "h", *_PAIR)},
        tensors={"seen": seen},
    )


@_case("random bools of heads", most=PAIRS)
def _(size: Size) -> Forms:
    return _bools_of_heads(size.uniform(1, size.heads, size.seqlen, size.seqlen) < 0.5)


@_case("blocks of bools of heads", most=PAIRS)
def _(size: Size) -> Forms:
    """Empty, full and mixed blocks of 64 for each head."""
    blocks = -(-size.seqlen // 64)
    kind = size.uniform(1, size.heads, blocks, blocks).repeat_interleave(64, 2).repeat_interleave(64, 3)
    kind = kind[:, :, : size.seqlen, : size.seqlen]
    mixed = size.uniform(size.seqlen, size.seqlen) < 0.5
    return _bools_of_heads((kind < 0.2) | ((kind < 0.3) & mixed))


@_case("graph distances", most=PAIRS)
def _(size: Size) -> Forms:
    """Graphormer: pairs at most two edges apart, with a bias for each distance."""
    distance = (size.uniform(size.seqlen, size.seqlen) * 5).to(torch.int8)
    table = size.normal(size.heads, 5)
    return Forms(
        lambda b, h, q, kv: distance[q, kv] <= 2,
        lambda s, b, h, q, kv: s + table[h, distance[q, kv].int()],
        mask="distance[q, kv] <= 2",
        score="s + table[h, distance[q, kv]]",
        declared={
            "distance": {"dtype": "int8", "shape": list(_PAIR), "range": {"min": 0, "max": 4}},
            "table": _floats("h", 5),
        },
        tensors={"distance": distance, "table": table},
    )


# --- biases -----------------------------------------------------------------------------------------------------


@_case("bias of pairs", most=PAIRS)
def _(size: Size) -> Forms:
    bias = size.normal(size.seqlen, size.seqlen, dtype=torch.bfloat16)
    return Forms(
        None,
        lambda s, b, h, q, kv: s + bias[q, kv],
        score="s + bias[q, kv]",
        declared={"bias": _floats(*_PAIR, dtype="bf16")},
        tensors={"bias": bias},
    )


@_case("bias of pairs by head", most=PAIRS)
def _(size: Size) -> Forms:
    bias = size.normal(size.heads, size.seqlen, size.seqlen, dtype=torch.bfloat16)
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s + bias[h, q, kv],
        mask="q >= kv",
        score="s + bias[h, q, kv]",
        declared={"bias": _floats("h", *_PAIR, dtype="bf16")},
        tensors={"bias": bias},
    )


@_case("pair bias of folding, learned", own=2048)
def _(size: Size) -> Forms:
    """AlphaFold 3: a bias for each pair and head, and padding of keys; the bias takes a gradient."""
    bias = size.normal(size.heads, size.seqlen, size.seqlen, dtype=torch.bfloat16).requires_grad_()
    keep = size.positions() < size.seqlen - size.share(9)
    return Forms(
        lambda b, h, q, kv: keep[kv],
        lambda s, b, h, q, kv: s + bias[h, q, kv],
        mask="keep[kv]",
        score="s + bias[h, q, kv]",
        declared={"bias": _floats("h", *_PAIR, dtype="bf16"), "keep": _bools("seqlen_k")},
        tensors={"bias": bias, "keep": keep},
        learned=("bias",),
    )


@_case("ALiBi")
def _(size: Size) -> Forms:
    slope = torch.exp2(-8.0 * torch.arange(1, size.heads + 1, device=size.device) / size.heads)
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s + slope[h] * (kv - q),
        mask="q >= kv",
        score="s + slope[h] * (kv - q)",
        declared={"slope": _floats("h")},
        tensors={"slope": slope},
    )


@_case("ALiBi of documents")
def _(size: Size) -> Forms:
    """Without a direction, within documents that come back."""
    slope = torch.exp2(-8.0 * torch.arange(1, size.heads + 1, device=size.device) / size.heads)
    run = size.share(32)
    seg = size.integers(0, 6, size.seqlen // run + 1).repeat_interleave(run)[: size.seqlen].contiguous()
    return Forms(
        lambda b, h, q, kv: seg[q] == seg[kv],
        lambda s, b, h, q, kv: s - slope[h] * (q - kv).abs(),
        mask="seg[q] == seg[kv]",
        score="s - slope[h] * abs(q - kv)",
        declared={"seg": _ints("seqlen_k"), "slope": _floats("h")},
        tensors={"seg": seg, "slope": slope},
    )


@_case("T5 buckets")
def _(size: Size) -> Forms:
    """T5's bias: 8 distances, then 8 buckets that grow to a distance of 128, in each direction.

    1e-4 keeps powers of two off the ends of buckets, where rounding of a logarithm decides.
    """
    table, rate = size.normal(size.heads, 32), 8 / math.log(16)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = (q - kv).abs()
        far = (8 + (torch.log(n.clamp(min=1) / 8.0) * rate + 1e-4).int()).clamp(max=15)
        return s + table[h, torch.where(n < 8, n, far) + torch.where(kv > q, 16, 0)]

    return Forms(
        None,
        score_mod,
        score="s + table[h, (n if n < 8 else far) + (16 if kv > q else 0)]",
        let={"n": "abs(q - kv)", "far": "min(8 + int(log(max(n, 1) / 8.0) * rate + 0.0001), 15)"},
        sizes={"rate": rate},
        declared={"table": _floats("h", 32)},
        tensors={"table": table},
    )


@_case("T5 buckets in a table")
def _(size: Size) -> Forms:
    """The same by a table of clamped distances, since buckets end at a distance of 128."""
    radius = 128
    apart = torch.arange(-radius, radius + 1)
    far = 8 + (torch.log(apart.abs().clamp(min=8) / 8) / math.log(radius / 8) * 8).int().clamp(max=7)
    bucket = torch.where(apart.abs() < 8, apart.abs(), far) + 16 * (apart > 0)
    table = size.normal(32, size.heads).T[:, bucket.to(size.device)].contiguous()
    return Forms(
        None,
        lambda s, b, h, q, kv: s + table[h, (kv - q).clamp(-radius, radius) + radius],
        score="s + table[h, clamp(kv - q, -radius, radius) + radius]",
        sizes={"radius": radius},
        declared={"table": _floats("h", "distances")},
        tensors={"table": table},
    )


@_case("relative table, learned")
def _(size: Size) -> Forms:
    table = size.normal(257).requires_grad_()
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s + table[(q - kv + 128).clamp(0, 256)],
        mask="q >= kv",
        score="s + table[clamp(q - kv + 128, 0, 256)]",
        declared={"table": _floats(257)},
        tensors={"table": table},
        learned=("table",),
    )


@_case("gate of each head, learned")
def _(size: Size) -> Forms:
    gate = size.normal(size.heads).requires_grad_()
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s * torch.sigmoid(gate[h]),
        mask="q >= kv",
        score="s * sigmoid(gate[h])",
        declared={"gate": _floats("h")},
        tensors={"gate": gate},
        learned=("gate",),
    )


@_case("forgetting")
def _(size: Size) -> Forms:
    """Forgetting Transformer: logits decay by sums of logarithms of gates."""
    total = torch.nn.functional.logsigmoid(size.normal(size.heads, size.seqlen) + 5).cumsum(1)
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s + (total[h, q] - total[h, kv]),
        mask="q >= kv",
        score="s + (total[h, q] - total[h, kv])",
        declared={"total": _floats("h", "seqlen_k")},
        tensors={"total": total},
    )


# --- scores -----------------------------------------------------------------------------------------------------


@_case("softcap")
def _(size: Size) -> Forms:
    cap = 30.0
    return Forms(
        _causal,
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        mask="q >= kv",
        score="cap * tanh(s / cap)",
        sizes={"cap": cap},
    )


@_case("softcap with a window")
def _(size: Size) -> Forms:
    """Gemma 2."""
    cap, window = 50.0, size.share(2)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window),
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        mask="q >= kv and q - kv < window",
        score="cap * tanh(s / cap)",
        sizes={"cap": cap, "window": window},
    )


@_case("tanh")
def _(size: Size) -> Forms:
    return Forms(None, lambda s, b, h, q, kv: torch.tanh(s), score="tanh(s)")


@_case("sigmoid")
def _(size: Size) -> Forms:
    return Forms(None, lambda s, b, h, q, kv: torch.sigmoid(s), score="sigmoid(s)")


@_case("silu")
def _(size: Size) -> Forms:
    return Forms(_causal, lambda s, b, h, q, kv: torch.nn.functional.silu(s), mask="q >= kv", score="silu(s)")


@_case("cosine of the distance")
def _(size: Size) -> Forms:
    rate = 0.01
    return Forms(
        _causal,
        lambda s, b, h, q, kv: s * torch.cos((q - kv) * rate),
        mask="q >= kv",
        score="s * cos((q - kv) * rate)",
        sizes={"rate": rate},
    )


@_case("window in the score")
def _(size: Size) -> Forms:
    radius = size.share(16)
    return Forms(
        None,
        lambda s, b, h, q, kv: torch.where((q - kv).abs() <= radius, s, -float("inf")),
        score="s if abs(q - kv) <= radius else -inf",
        hides=lambda b, h, q, kv: (q - kv).abs() <= radius,
        sizes={"radius": radius},
    )


@_case("documents in the score")
def _(size: Size) -> Forms:
    """A mask that is added, as 0 or −inf."""
    doc = _documents(size, size.share(12))
    return Forms(
        None,
        lambda s, b, h, q, kv: s + torch.where((q >= kv) & (doc[q] == doc[kv]), 0.0, -float("inf")),
        score="s + (0.0 if q >= kv and doc[q] == doc[kv] else -inf)",
        hides=lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        declared={"doc": _ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )


# --- windows ----------------------------------------------------------------------------------------------------


@_case("causal")
def _(size: Size) -> Forms:
    return Forms(_causal, mask="q >= kv")


@_case("sliding window")
def _(size: Size) -> Forms:
    window = size.share(8)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window),
        mask="q >= kv and q - kv < window",
        sizes={"window": window},
    )


@_case("window on both sides")
def _(size: Size) -> Forms:
    radius = size.share(16)
    return Forms(lambda b, h, q, kv: (q - kv).abs() <= radius, mask="abs(q - kv) <= radius", sizes={"radius": radius})


@_case("sinks and window")
def _(size: Size) -> Forms:
    """StreamingLLM."""
    window, sinks = size.share(8), 4
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q - kv < window) | (kv < sinks)),
        mask="q >= kv and (q - kv < window or kv < sinks)",
        sizes={"window": window, "sinks": sinks},
    )


@_case("streaming speech")
def _(size: Size) -> Forms:
    """Chunks of frames that see themselves and some chunks before."""
    chunk, left = size.share(50), 8
    return Forms(
        lambda b, h, q, kv: (kv // chunk <= q // chunk) & (kv // chunk >= q // chunk - left),
        mask="kv // chunk <= q // chunk and kv // chunk >= q // chunk - left",
        sizes={"chunk": chunk, "left": left},
    )


@_case("block causal")
def _(size: Size) -> Forms:
    chunk = size.share(16)
    return Forms(
        lambda b, h, q, kv: q // chunk >= kv // chunk, mask="q // chunk >= kv // chunk", sizes={"chunk": chunk}
    )


@_case("chunked and causal")
def _(size: Size) -> Forms:
    """Llama 4: causal within chunks."""
    chunk = size.share(4)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q // chunk == kv // chunk),
        mask="q >= kv and q // chunk == kv // chunk",
        sizes={"chunk": chunk},
    )


@_case("window of each query")
def _(size: Size) -> Forms:
    win = size.integers(size.share(128), size.share(8, 2), size.seqlen)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < win[q]),
        mask="q >= kv and q - kv < win[q]",
        declared={"win": _ints("seqlen_q")},
        tensors={"win": win},
    )


@_case("window of each head")
def _(size: Size) -> Forms:
    win = torch.tensor([size.share(2**n) for n in range(1, 9)], device=size.device, dtype=torch.int32)[: size.heads]
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < win[h]),
        mask="q >= kv and q - kv < win[h]",
        declared={"win": _ints("h")},
        tensors={"win": win},
    )


@_case("local and global heads", kv_heads=2)
def _(size: Size) -> Forms:
    window = size.share(16)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((h % 2 == 0) | (q - kv < window)),
        mask="q >= kv and (h % 2 == 0 or q - kv < window)",
        sizes={"window": window},
    )
