"""Functions written for FlexAttention: attngen's kernels beside torch's compiled ``flex_attention``.

    python -m attngen.tools.bench.flex [--variant NAME ...] [--rounds N] [--json FILE]
    python -m attngen.tools.bench.flex --first-calls [--variant NAME ...]

One sequence of 16,384, 32 query heads, 8 KV heads, head dim 128, bf16. Each function is called by both libraries as its
author would: by the import alone. Raced are the forward and the backward; measured besides are the first call with its
gradient, tracing and compiling included, the making of the mask, at first and again over other tensors, and what a
small call costs the host. ``--first-calls`` times these alone, each in a process of its own that has imported torch and
nothing else.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 16384, 32, 8, 128
WINDOW, PREFIX, CAP, DOCUMENT = 1024, 4096, 30.0, 1300

#: What is asked of the ratios: their geometric mean, and the least.
ASKED_MEAN, ASKED_LEAST = 1.5, 1.2

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
    """Return whether a query stands at a key or after it."""
    return q >= kv


def functions(device: str) -> dict[str, tuple[Mod, Mod | None]]:
    """Return mask_mod and score_mod of each variant; each call makes new functions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(DOCUMENT // 2, 3 * DOCUMENT // 2, (2 * SEQLEN // DOCUMENT,), generator=generator)
    doc = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:SEQLEN].int().to(device)
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
    """What one library took: milliseconds of a call, of its backward, of the first step, of making the mask, and of
    making it again: a new function of the same code, over new tensors."""

    forward: float = math.nan
    backward: float = math.nan
    first: float = math.nan
    mask: float = math.nan
    again: float = math.nan


@dataclass
class Cell:
    """One variant: both sides, and how far their results are apart, relative to the largest element."""

    variant: str
    torch: Side
    attngen: Side
    apart: float = math.nan
    error: str | None = None

    def ratio(self, field: str) -> float:
        """Return how many times as long torch took."""
        theirs: float = getattr(self.torch, field)
        ours: float = getattr(self.attngen, field)
        return theirs / ours


class Unwatched:
    """Outputs that nobody looks at: the results are compared before the race."""

    def poison(self) -> None:
        """Leave them."""

    def intact(self, out: Any) -> bool:
        """Take them as they are."""
        return True


@contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Both libraries compile from the beginning meanwhile. Returns the variables of the environment that say so."""
    with tempfile.TemporaryDirectory(prefix="attngen-flex-") as folder:
        changed = {
            "ATTNGEN_CACHE": f"{folder}/attngen", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }  # fmt: skip
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield changed
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def inputs(shape: tuple[int, ...] = (1, HEADS, SEQLEN, HEAD_DIM), kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Return q, k, v, which require gradients, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = (shape, (shape[0], kv_heads, *shape[2:]), (shape[0], kv_heads, *shape[2:]), shape)
    made = [torch.randn(s, device="cuda", dtype=torch.bfloat16, generator=generator) for s in shapes]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def _milliseconds(function: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = function()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), found


def first_call(library: str, variant: str, *, learns: bool) -> float:
    """Return the seconds of a process's first call of one library, with the making of its mask; if it ``learns``, with
    its gradients too."""
    q, k, v, dout = (tensor if learns else tensor.detach() for tensor in inputs())
    mask_mod, score_mod = functions("cuda")[variant]
    torch.cuda.synchronize()
    began = time.perf_counter()
    used = import_module(LIBRARIES[library])
    call = torch.compile(used.flex_attention, dynamic=False) if library == "torch" else used.flex_attention
    block_mask = used.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")
    out = call(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
    if learns:
        torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def first_calls(variants: Sequence[str]) -> str:
    """Return a table of first calls, each in a process of its own with empty caches."""
    lines = [f"{'':20s} {'forward, s':>20s} {'and backward, s':>21s}", " " * 21 + "    torch  attngen   " * 2]
    for variant in variants:
        cells = []
        for kind in ("forward", "step"):
            for library in LIBRARIES:
                command = [
                    sys.executable, "-m", "attngen.tools.bench.flex", "--variant", variant, "--first", library, kind
                ]  # fmt: skip
                with fresh_caches():
                    environment = {**os.environ, "ATTNGEN_JIT": "1"}
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                cells.append(done.stdout.strip() if not done.returncode else done.stderr.strip()[-60:])
        lines.append(f"{variant:20s} {cells[0]:>9s} {cells[1]:>8s}   {cells[2]:>9s} {cells[3]:>8s}")
        click.echo(lines[-1], err=True)
    return "\n".join(lines)


def _warm() -> None:
    """Import and start what either compiles with, on something else, so that the first variant is as the others."""
    for module in ("plan", "render", "tools.build.pipeline"):
        import_module(f"attngen.{module}")
    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.compile(lambda x: x.sin().sum())(x).backward()


def measure(variant: str, rounds: int) -> Cell:
    """Race one variant; what raises is the cell's error."""
    from torch._functorch import config as functorch_config
    from torch.nn.attention import flex_attention as theirs

    from attngen.integrations import flex_attention as ours
    from attngen.integrations.flex_meaning import forget

    cell = Cell(variant, Side(), Side())
    q, k, v, dout = inputs()
    mask_mod, score_mod = functions("cuda")[variant]
    doc = torch.zeros(SEQLEN, dtype=torch.int32, device="cuda")
    made: dict[str, Any] = {}
    for library, side in ((theirs, cell.torch), (ours, cell.attngen)):

        def make(mask_mod: Mod, library: Any = library) -> Any:
            return library.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")

        make(lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]))  # what it imports and loads
        forget()
        firsts = []
        for other in [*(functions("cuda")[variant][0] for _ in range(MASKS)), mask_mod]:
            forget()
            taken, made[library.__name__] = _milliseconds(partial(make, other))
            firsts.append(taken)
        side.mask = statistics.median(firsts)
        others = [functions("cuda")[variant][0] for _ in range(MASKS)]
        side.again = statistics.median(_milliseconds(partial(make, other))[0] for other in others)
    block_mask, mask = made[theirs.__name__], made[ours.__name__]
    torch._dynamo.reset()
    compiled = torch.compile(theirs.flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Any]] = {
        "torch": partial(compiled, q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True),
        "attngen": partial(ours.flex_attention, q, k, v, score_mod, mask, enable_gqa=True),
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
            times = _race(calls, direction, (q, k, v), dout, rounds)
            for name, found in times.items():
                setattr(getattr(cell, name), direction, found)
    if not cell.apart <= AGREEMENT:
        cell.error = f"results are apart by {cell.apart:.1e} of the largest element"
    return cell


def _race(
    calls: dict[str, Callable[[], Any]], direction: str, leaves: tuple[Tensor, ...], dout: Tensor, rounds: int
) -> dict[str, float]:
    """Return the milliseconds of a call of each library, the median of interleaved rounds."""
    from attngen.tools.bench.timing import Contestant, CudaClock, race

    if direction == "forward":
        entered = {name: torch.no_grad()(call) for name, call in calls.items()}
    else:
        outs = {name: call() for name, call in calls.items()}
        entered = {
            name: partial(torch.autograd.grad, out, leaves, dout, retain_graph=True) for name, out in outs.items()
        }
    contestants = [Contestant(name, [call]) for name, call in entered.items()]
    timings = race(contestants, CudaClock(), Unwatched(), rounds)
    return {one.name: timing.milliseconds for one, timing in zip(contestants, timings, strict=True)}


def host_times() -> dict[str, float]:
    """Return the microseconds that enqueuing a small call takes the host: through the door, directly, and torch's."""
    from attngen.integrations import flex_attention as ours
    from attngen.runtime.calls.entry import attention

    q, k, v, _ = (tensor.detach() for tensor in inputs(HOST_SHAPE, HOST_SHAPE[1]))
    seqlen = HOST_SHAPE[2]
    mask = ours.create_block_mask(causal_mask, None, None, seqlen, seqlen, device="cuda")
    named = ours.meaning(causal_mask, None, q.device).variant
    calls: dict[str, Callable[[], Any]] = {
        "flex_attention of attngen": partial(ours.flex_attention, q, k, v, None, mask),
        "attngen.attention": partial(attention, q, k, v, variant=named, layout="bhsd"),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(16):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            taken = 1e6 * (time.perf_counter() - began) / HOST_CALLS
            if turn:
                samples[name].append(taken)
    return {name: statistics.median(found) for name, found in samples.items()}


def report(cells: list[Cell], host: dict[str, float]) -> str:
    """Return the tables, and what is asked for beside what was found."""
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
            f"geometric mean {mean:.3f} (asked {ASKED_MEAN}), least {min(known):.3f} (asked {ASKED_LEAST}), "
            f"of {len(known)} of {len(ratios)}"
        )
    if host:
        ours, direct = host.values()
        lines.append(f"host time of a call: {ours:.1f} us, of attngen.attention {direct:.1f} us, {ours / direct:.2f} x")
    return "\n".join(lines)


@click.command()
@click.option("--variant", "variants", multiple=True, help="Race these alone; may be repeated.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Samples of each contestant.")
@click.option("--first-calls", "firsts", is_flag=True, help="Time first calls alone, each in a process of its own.")
@click.option("--first", type=(click.Choice([*LIBRARIES]), click.Choice(["forward", "step"])), hidden=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures there.")
def main(
    variants: tuple[str, ...], rounds: int, firsts: bool, first: tuple[str, str] | None, json_path: Path | None
) -> None:
    """Race functions that were written for FlexAttention. Needs a GPU."""
    from attngen import jit

    if first is not None:
        click.echo(f"{first_call(first[0], variants[0], learns=first[1] == 'step'):.2f}")
        return
    if firsts:
        click.echo(first_calls(variants or tuple(functions("cpu"))))
        return
    cells, host = [], {}
    with fresh_caches(), jit():
        _warm()
        for name in variants or functions("cpu"):
            try:
                cells.append(measure(name, rounds))
            except Exception as error:  # whatever a library raises for what it does not support
                told = str(error).strip().splitlines()[:1]
                cells.append(Cell(name, Side(), Side(), error=f"{type(error).__name__}: {' '.join(told)}"))
            click.echo(report(cells[-1:], {}).splitlines()[2], err=True)
        host = host_times()
    click.echo(report(cells, host))
    if json_path is not None:
        found = {"cells": [asdict(cell) for cell in cells], "host": host}
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        json_path.write_text(json.dumps({**facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
