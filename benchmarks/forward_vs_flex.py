"""Race attngen's Triton forward kernels against FlexAttention, side by side in one process.

    attngen build specs/hopper.yaml && python benchmarks/forward_vs_flex.py [--json results.json]

Prints TFLOP/s on visible pairs and ratios: medians over interleaved rounds, inputs larger than L2. FlexAttention's
block masks are made outside the timed region, and so are our tile maps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngen

TOKENS, HIDDEN = 16384, 2048
WINDOW, PREFIX, DOCUMENT, SOFTCAP = 1024, 4096, 1300, 30.0


@dataclass(frozen=True)
class Cell:
    """One row of the race: a call of ours, one of FlexAttention, and the floating-point operations of both."""

    name: str
    variant: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    arguments: dict[str, Any] = field(default_factory=dict)
    mask_mod: Callable[..., torch.Tensor] | None = None
    score_mod: Callable[..., torch.Tensor] | None = None


def grid() -> list[Cell]:
    """Return the cells of full and causal attention."""
    cells = []
    for head_dim in (64, 128, 256):
        for variant, mask in (("full", None), ("causal", _causal)):
            for seqlen in (1024, 4096, 16384):
                heads = HIDDEN // head_dim
                name = f"d{head_dim} {variant} {seqlen // 1024}k"
                cells.append(Cell(name, variant, TOKENS // seqlen, seqlen, heads, heads, head_dim, mask_mod=mask))
    return cells


def variants(device: torch.device) -> list[Cell]:
    """Return the cells of the variants: d 128, GQA 32/8, one sequence."""
    n, heads = TOKENS, 32
    doc = (torch.arange(n, device=device, dtype=torch.int32) // DOCUMENT).view(1, n).contiguous()
    slope = torch.exp2(-8.0 * (torch.arange(heads, device=device) + 1) / heads).float()

    def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < WINDOW)

    def prefix(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) | (kv < PREFIX)

    def packed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (doc[b, q] == doc[b, kv])

    def softcap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return SOFTCAP * torch.tanh(s / SOFTCAP)

    def alibi(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + slope[h] * (kv - q)

    def cell(name: str, variant: str, mask: Any, score: Any = None, **arguments: Any) -> Cell:
        return Cell(name, variant, 1, n, heads, 8, 128, arguments, mask, score)

    return [
        cell("causal gqa", "causal", _causal),
        cell(f"sliding window {WINDOW}", "sliding_window", window, window=WINDOW),
        cell(
            f"prefix-LM {PREFIX}",
            "prefix_lm",
            prefix,
            prefix=torch.full((1,), PREFIX, device=device, dtype=torch.int32),
        ),
        cell(f"packed documents {DOCUMENT}", "packed_documents", packed, doc=doc),
        cell(f"softcap {SOFTCAP:.0f}", "softcap", _causal, softcap, cap=SOFTCAP),
        cell("ALiBi", "alibi", _causal, alibi, slope=slope),
    ]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def visible_pairs(cell: Cell, device: torch.device) -> int:
    """Count the pairs that the mask shows, of one head and batch."""
    if cell.mask_mod is None:
        return cell.seqlen**2
    kv = torch.arange(cell.seqlen, device=device)[None, :]
    total = 0
    for start in range(0, cell.seqlen, 1024):
        q = torch.arange(start, start + 1024, device=device)[:, None]
        total += int(cell.mask_mod(0, 0, q, kv).expand(1024, cell.seqlen).sum())
    return total


def time_interleaved(calls: list[Callable[[], Any]], rounds: int, milliseconds: float) -> list[float]:
    """Return the median milliseconds of each call over interleaved rounds, timed by events."""
    repeats = []
    for call in calls:
        call()
        once = _elapsed(call, 2)
        repeats.append(max(2, math.ceil(milliseconds / once)))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for index, call in enumerate(calls):
            call()
            times[index].append(_elapsed(call, repeats[index]))
    return [statistics.median(t) for t in times]


def _elapsed(call: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def race(cell: Cell, device: torch.device, rounds: int) -> dict[str, Any]:
    """Run one cell and return its figures; the two outputs must agree."""
    torch.manual_seed(0)
    shape = (cell.batch, cell.seqlen)
    q = torch.randn(*shape, cell.heads, cell.head_dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(*shape, cell.kv_heads, cell.head_dim, device=device, dtype=torch.bfloat16) for _ in "kv")
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    flex = torch.compile(flex_attention, dynamic=False)
    n = cell.seqlen
    block_mask = create_block_mask(cell.mask_mod, None, None, n, n, device=device) if cell.mask_mod else None
    gqa = cell.heads != cell.kv_heads

    def ours() -> torch.Tensor:
        return attngen.attention(q, k, v, variant=cell.variant, **cell.arguments)

    def theirs() -> torch.Tensor:
        return flex(*heads_first, score_mod=cell.score_mod, block_mask=block_mask, enable_gqa=gqa)

    apart = (ours().float() - theirs().transpose(1, 2).float()).abs().max().item()
    ours_ms, theirs_ms = time_interleaved([ours, theirs], rounds, 20.0)
    flops = 4 * cell.batch * cell.heads * visible_pairs(cell, device) * cell.head_dim
    return {
        "cell": cell.name,
        "attngen": flops / ours_ms / 1e9,
        "flex": flops / theirs_ms / 1e9,
        "ratio": theirs_ms / ours_ms,
        "apart": apart,
    }


def main() -> None:
    """Run the race and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run the cells whose name contains this")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for cell in [*grid(), *variants(device)]:
        if options.only not in cell.name:
            continue
        torch._dynamo.reset()
        row = race(cell, device, options.rounds)
        rows.append(row)
        print(
            f"{row['cell']:24s} attngen {row['attngen']:6.0f}  flex {row['flex']:6.0f}  "
            f"ratio {row['ratio']:5.2f}  apart {row['apart']:.1e}",
            flush=True,
        )
    on_grid = [row["ratio"] for row in rows if row["cell"].startswith("d")]
    if on_grid:
        print(f"grid: geometric mean {statistics.geometric_mean(on_grid):.3f}, least {min(on_grid):.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
