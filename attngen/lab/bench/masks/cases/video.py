"""Masks of video models."""

from __future__ import annotations

from typing import Any

import torch

from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, bools, ints

case = Register()


@case("sliding tiles", seqlen=69376)
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


@case("natten 3-D", seqlen=24576)
def _(size: Size) -> Forms:
    return _neighbourhood(size, (4, 9, 13), (1, 1, 1))


@case("natten 3-D dilated", seqlen=24576)
def _(size: Size) -> Forms:
    return _neighbourhood(size, (4, 9, 13), (1, 2, 3))


@case("frames, window of frames")
def _(size: Size) -> Forms:
    """A video model that writes frame after frame: a frame sees itself and the last three."""
    frame, last = size.fraction(21), 4
    return Forms(
        lambda b, h, q, kv: (q // frame >= kv // frame) & (q // frame - kv // frame < last),
        mask="q // frame >= kv // frame and q // frame - kv // frame < last",
        sizes={"frame": frame, "last": last},
    )


@case("radial")
def _(size: Size) -> Forms:
    """Radial attention: the window in space halves with each frame of distance."""
    frame = size.fraction(16)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = (q // frame - kv // frame).abs().clamp(max=12)
        return ((q % frame - kv % frame).abs() << apart) <= frame

    return Forms(
        mask_mod,
        mask="abs(q % frame - kv % frame) << min(abs(q // frame - kv // frame), 12) <= frame",
        sizes={"frame": frame},
    )


@case("frames, clean and noised")
def _(size: Size) -> Forms:
    """Self-Forcing: clean frames see those up to their own, a noised one the clean ones before it, and itself."""
    half, frame = size.seqlen // 2, size.fraction(24)
    at = size.positions()
    noised, number = at >= half, at % half // frame
    past = torch.where(noised, number * frame, ((number + 1) * frame).clamp(max=half)).int()
    first = torch.where(noised, half + number * frame, 0).int()
    end = torch.where(noised, (half + (number + 1) * frame).clamp(max=size.seqlen), 0).int()
    return Forms(
        lambda b, h, q, kv: (kv < past[q]) | ((kv >= first[q]) & (kv < end[q])),
        mask="kv < past[q] or kv >= first[q] and kv < end[q]",
        declared={"past": ints("seqlen_q"), "first": ints("seqlen_q"), "end": ints("seqlen_q")},
        tensors={"past": past, "first": first, "end": end},
    )


@case("spatial and temporal heads")
def _(size: Size) -> Forms:
    """Sparse VideoGen: heads that see near frames, and heads that see near places; all see the first frame."""
    frame, reach = size.fraction(16), size.fraction(256)
    temporal = torch.arange(size.heads, device=size.device) % 2 == 1

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        places = (q % frame - kv % frame).abs() <= reach
        return torch.where(temporal[h], places, (q // frame - kv // frame).abs() <= 1) | (kv < frame)

    return Forms(
        mask_mod,
        mask="kv < frame or (abs(q % frame - kv % frame) <= reach if temporal[h] "
             "else abs(q // frame - kv // frame) <= 1)",
        sizes={"frame": frame, "reach": reach},
        declared={"temporal": bools("h")},
        tensors={"temporal": temporal},
    )  # fmt: skip


@case("blocks of 64 by lists", seqlen=32768)
def _(size: Size) -> Forms:
    """Video sparse attention: an eighth of the blocks, chosen for each head and block of queries."""
    return _chosen_blocks(size, 64)


@case("blocks of 128 by lists", seqlen=32768)
def _(size: Size) -> Forms:
    return _chosen_blocks(size, 128)


def _chosen_blocks(size: Size, most: int) -> Forms:
    block = min(most, size.fraction(2))
    blocks = -(-size.seqlen // block)
    best = size.uniform(size.heads, blocks, blocks).topk(max(blocks // 8, 1)).indices
    chosen = torch.zeros(size.heads, blocks, blocks, dtype=torch.bool, device=size.device).scatter_(2, best, True)
    return Forms(
        lambda b, h, q, kv: chosen[h, q // block, kv // block],
        mask="chosen[h, q // block, kv // block]",
        sizes={"block": block},
        declared={"chosen": bools("h", "rows", "columns")},
        tensors={"chosen": chosen},
        blocks="chosen",
    )
