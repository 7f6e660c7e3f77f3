"""Functions written for FlexAttention: attngen's kernels beside torch's compiled ``flex_attention``.

    python -m attngen.lab.bench.flex [--variant NAME ...] [--rounds N] [--json FILE]
    python -m attngen.lab.bench.flex --first-calls [--variant NAME ...]

One sequence of 16,384, 32 query heads, 8 KV heads, head dim 128, bf16. Each function is called by both libraries as its
author would: by the import alone. Timed are the forward and the backward pass, the first call with its gradient,
tracing and compiling included, the making of the mask, at first and again over other tensors, and the host time of a
small call. ``--first-calls`` times these alone, each in a process of its own that has imported torch and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from attngen.lab.bench.caches import fresh_caches
from attngen.lab.bench.timing import Batches, Contender, CudaClock, UncheckedOutputs, interleaved

SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 16384, 32, 8, 128
WINDOW, PREFIX, CAP, DOCUMENT = 1024, 4096, 30.0, 1300

#: Goals of the ratios: their geometric mean, and the least.
GOAL_MEAN, GOAL_LEAST = 1.5, 1.2

#: Calls of which one figure of host time is made, and their shape (batch, heads, seqlen, head_dim).
HOST_CALLS, HOST_SHAPE = 200, (1, 8, 128, 128)

#: The module of each library.
LIBRARIES = {"torch": "torch.nn.attention.flex_attention", "attngen": "attngen.integrations.flex_attention"}

#: Masks of which the median is taken of the time to make one again.
MASKS = 5

#: Sets of gradients differ by rounding alone: largest difference, relative to the largest element.
AGREEMENT = 3e-2

Mod = Callable[..., Tensor]


def causal_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Causal mask in FlexAttention's form."""
    return q >= kv


def functions(device: str) -> dict[str, tuple[Mod, Mod | None]]:
    """mask_mod and score_mod of each variant; each call makes new functions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        DOCUMENT // 2, 3 * DOCUMENT // 2, (2 * SEQLEN // DOCUMENT,), generator=generator, device="cpu"
    )
    doc = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)[:SEQLEN].int().to(device)
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=device) / HEADS)
    return {
        "causal": (lambda b, h, q, kv: q >= kv, None),
        "sliding window 1024": (lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW), None),
        "prefix-LM 4096": (lambda b, h, q, kv: (q >= kv) | (kv < PREFIX), None),
        "documents of 1300": (lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]), None),
        "softcap 30": (causal_mask, lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP)),
        "ALiBi": (causal_mask, lambda s, b, h, q, kv: s + slopes[h] * (kv - q)),
    }


@dataclass
class Side:
    """Times of one library, in milliseconds: of a call, of its backward pass, of the first step, of making the mask,
    and of making it again: a new function of the same code, over new tensors."""

    forward: float = math.nan
    backward: float = math.nan
    first: float = math.nan
    mask: float = math.nan
    again: float = math.nan


@dataclass
class FlexCell:
    """One variant: both sides, and the largest difference of their results, relative to the largest element."""

    variant: str
    torch: Side
    attngen: Side
    apart: float = math.nan
    error: str | None = None

    def ratio(self, field: str) -> float:
        """The time of torch over that of attngen."""
        ratio: float = getattr(self.torch, field) / getattr(self.attngen, field)
        return ratio


def inputs(shape: tuple[int, ...] = (1, HEADS, SEQLEN, HEAD_DIM), kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Random q, k, v, which require gradients, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (shape, (shape[0], kv_heads, *shape[2:]), (shape[0], kv_heads, *shape[2:]), shape)
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator) for s in shapes)
    return [*(tensor.requires_grad_() for tensor in (q, k, v)), dout]


def _milliseconds(function: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), result


def first_call(library: str, variant: str, *, learns: bool) -> float:
    """Time a process's first call of one library in seconds, with the making of its mask; if it ``learns``, with its
    gradients too."""
    q, k, v, dout = (tensor if learns else tensor.detach() for tensor in inputs())
    mask_mod, score_mod = functions("cuda")[variant]
    torch.cuda.synchronize()
    began = time.perf_counter()
    module = import_module(LIBRARIES[library])
    call = torch.compile(module.flex_attention, dynamic=False) if library == "torch" else module.flex_attention
    block_mask = module.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")
    out = call(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
    if learns:
        torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def first_calls(variants: Sequence[str]) -> str:
    """A table of first calls, each in a process of its own with empty caches."""
    lines = [f"{'':20s} {'forward, s':>20s} {'and backward, s':>21s}", " " * 21 + "    torch  attngen   " * 2]
    for variant in variants:
        cells = []
        for kind in ("forward", "step"):
            for library in LIBRARIES:
                command = [
                    sys.executable, "-m", "attngen.lab.bench.flex", "--variant", variant, "--first", library, kind
                ]  # fmt: skip
                with fresh_caches():
                    environment = {**os.environ, "ATTNGEN_JIT": "1"}
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                cells.append(done.stdout.strip() if not done.returncode else done.stderr.strip()[-60:])
        lines.append(f"{variant:20s} {cells[0]:>9s} {cells[1]:>8s}   {cells[2]:>9s} {cells[3]:>8s}")
        click.echo(lines[-1], err=True)
    return "\n".join(lines)


def _warm() -> None:
    """Import and start both compilers on something else, so that the first variant is as the others."""
    for module in ("plan", "render", "build.pipeline"):
        import_module(f"attngen.{module}")
    x = torch.ones(64, device="cuda", requires_grad=True, dtype=torch.float32)
    torch.compile(lambda x: x.sin().sum())(x).backward()


def measure(variant: str, rounds: int) -> FlexCell:
    """Time one variant side by side."""
    from torch._functorch import config as functorch_config
    from torch.nn.attention import flex_attention as of_torch

    from attngen.integrations.flex import attention as own
    from attngen.integrations.flex.meaning import forget

    cell = FlexCell(variant, Side(), Side())
    q, k, v, dout = inputs()
    mask_mod, score_mod = functions("cuda")[variant]
    doc = torch.zeros(SEQLEN, dtype=torch.int32, device="cuda")
    made: dict[str, Any] = {}
    for library, side in ((of_torch, cell.torch), (own, cell.attngen)):

        def make(mask_mod: Mod, library: Any = library) -> Any:
            return library.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")

        make(lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]))  # imports and loads
        forget()
        firsts = []
        for other in [*(functions("cuda")[variant][0] for _ in range(MASKS)), mask_mod]:
            forget()
            took, made[library.__name__] = _milliseconds(partial(make, other))
            firsts.append(took)
        side.mask = statistics.median(firsts)
        others = [functions("cuda")[variant][0] for _ in range(MASKS)]
        side.again = statistics.median(_milliseconds(partial(make, other))[0] for other in others)
    block_mask, mask = made[of_torch.__name__], made[own.__name__]
    torch._dynamo.reset()
    compiled = torch.compile(of_torch.flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Any]] = {
        "torch": partial(compiled, q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True),
        "attngen": partial(own.flex_attention, q, k, v, score_mod, mask, enable_gqa=True),
    }
    results: dict[str, Any] = {}
    with functorch_config.patch(donated_buffer=False):  # its graph is differentiated again and again
        for name, call in calls.items():

            def step(call: Callable[[], Any] = call) -> tuple[Tensor, ...]:
                out = call()
                return out, *torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            getattr(cell, name).first, results[name] = _milliseconds(step)
        cell.apart = max(
            float((one.float() - other.float()).abs().max() / other.float().abs().max())
            for one, other in zip(results["attngen"], results["torch"], strict=True)
        )
        for direction in ("forward", "backward"):
            for name, milliseconds in _timed(calls, direction, (q, k, v), dout, rounds).items():
                setattr(getattr(cell, name), direction, milliseconds)
    if not cell.apart <= AGREEMENT:
        cell.error = f"results are apart by {cell.apart:.1e} of the largest element"
    return cell


def _timed(
    calls: dict[str, Callable[[], Any]], direction: str, leaves: tuple[Tensor, ...], dout: Tensor, rounds: int
) -> dict[str, float]:
    """The milliseconds of a call of each library, medians of interleaved rounds."""
    if direction == "forward":
        timed = {name: torch.no_grad()(call) for name, call in calls.items()}
    else:
        timed = {
            name: partial(torch.autograd.grad, call(), leaves, dout, retain_graph=True) for name, call in calls.items()
        }
    samplers = [Batches(Contender(name, [call]), CudaClock(), UncheckedOutputs()) for name, call in timed.items()]
    timings = interleaved(samplers, rounds, random.Random(0))
    return {name: timing.milliseconds for name, timing in zip(timed, timings, strict=True)}


def host_times() -> dict[str, float]:
    """Microseconds of the host to enqueue a small call: through ``flex_attention``, and directly."""
    from attngen.integrations.flex import attention as own
    from attngen.runtime.operations.attention.entry import attention

    q, k, v, _ = (tensor.detach() for tensor in inputs(HOST_SHAPE, HOST_SHAPE[1]))
    seqlen = HOST_SHAPE[2]
    mask = own.create_block_mask(causal_mask, None, None, seqlen, seqlen, device="cuda")
    variant = own.meaning(causal_mask, None, q.device).variant
    calls: dict[str, Callable[[], Any]] = {
        "flex_attention of attngen": partial(own.flex_attention, q, k, v, None, mask),
        "attngen.attention": partial(attention, q, k, v, variant=variant, layout="bhsd"),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(16):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            if number:
                samples[name].append(1e6 * (time.perf_counter() - began) / HOST_CALLS)
    return {name: statistics.median(times) for name, times in samples.items()}


def report(cells: list[FlexCell], host: dict[str, float]) -> str:
    """The tables, with the goals of the ratios."""
    head = f"{'':20s} {'forward, ms':>21s} {'backward, ms':>21s} {'first step, s':>19s}"
    head += f"{'mask, ms':>18s} {'again, ms':>17s}   apart"
    sides = "     torch attngen" * 3
    lines = [head, f"{'':20s} " + "   ".join(["torch attngen    x"] * 2) + sides]
    for cell in cells:
        a, b = cell.torch, cell.attngen
        lines.append(
            f"{cell.variant:20s} {a.forward:7.3f} {b.forward:7.3f} {cell.ratio('forward'):4.2f} "
            f"{a.backward:8.3f} {b.backward:7.3f} {cell.ratio('backward'):4.2f} "
            f"{a.first / 1e3:10.1f} {b.first / 1e3:7.1f} {a.mask:9.1f} {b.mask:7.2f} "
            f"{a.again:9.1f} {b.again:7.2f}   {cell.apart:.0e}"
        )
        if cell.error is not None:
            lines.append(f"  {cell.error}")
    ratios = [cell.ratio(field) for cell in cells for field in ("forward", "backward")]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if known:
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in known))
        lines.append(
            f"geometric mean {mean:.3f} (goal {GOAL_MEAN}), least {min(known):.3f} (goal {GOAL_LEAST}), "
            f"of {len(known)} of {len(ratios)}"
        )
    if host:
        flex, direct = host.values()
        lines.append(f"host time of a call: {flex:.1f} us, of attngen.attention {direct:.1f} us, {flex / direct:.2f} x")
    return "\n".join(lines)


@click.command()
@click.option("--variant", "variants", multiple=True, help="Time these alone; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Samples of each library.")
@click.option("--first-calls", "firsts", is_flag=True, help="Time first calls alone, each in a process of its own.")
@click.option("--first", type=(click.Choice([*LIBRARIES]), click.Choice(["forward", "step"])), hidden=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures there.")
def main(
    variants: tuple[str, ...], rounds: int, firsts: bool, first: tuple[str, str] | None, json_path: Path | None
) -> None:
    """Time functions that were written for FlexAttention. Needs a GPU."""
    from attngen import jit

    if first is not None:
        click.echo(f"{first_call(first[0], variants[0], learns=first[1] == 'step'):.2f}")
        return
    if firsts:
        click.echo(first_calls(variants or tuple(functions("cpu"))))
        return
    from attngen.lab.bench.report import reason_of

    cells, host = [], {}
    with fresh_caches(), jit():
        _warm()
        for name in variants or functions("cpu"):
            try:
                cells.append(measure(name, rounds))
            except Exception as error:  # whatever a library raises for what it does not support
                cells.append(FlexCell(name, Side(), Side(), error=reason_of(error)))
            click.echo(report(cells[-1:], {}).splitlines()[2], err=True)
        host = host_times()
    click.echo(report(cells, host))
    if json_path is not None:
        figures = {"cells": [asdict(cell) for cell in cells], "host": host}
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        json_path.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
