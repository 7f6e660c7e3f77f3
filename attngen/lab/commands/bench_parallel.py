"""``attngen bench --suite parallel``: one sequence on the ranks of torchrun, beside one GPU and other libraries' ways.

    torchrun --nproc-per-node 4 -m attngen bench --suite parallel --json parallel.json

Every rank runs this module. Figures are those of the slowest rank, of calls in a row, so that host time counts only
where it is not hidden. ``--dry-run`` simulates 8 to 64 ranks instead, in one process and without a GPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import attngen
from attngen.commands.output import print_json, print_table
from attngen.errors import AttngenError
from attngen.parallel import Cost, Plan
from attngen.parallel.simulation import Simulated, table
from attngen.parallel.values import passed
from attngen.runtime.registry.binding import find

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

#: Calls of a sample, which follow one another without a wait.
_ROW = 6


@dataclass(frozen=True)
class LayerMasks:
    """The variants of a model's layers, with the number of layers of each; their values; the lengths of documents."""

    name: str
    layers: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] = ()

    def values_of(self, variant: str, device: torch.device) -> dict[str, Any]:
        """The values that a variant takes."""
        own = passed(find(variant, None).variant)
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.values.items() if name in own}

    def visible(self, device: torch.device) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Whether a query sees a key, both by their positions in the sequence; None for several variants."""
        if self.documents:
            lengths = torch.tensor(self.documents, device=device)
            number = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
            return lambda q, kv: (number[q] == number[kv]) & (q >= kv)
        if len(self.layers) > 1:
            return None
        if "window" in self.values:
            return lambda q, kv: (q >= kv) & (q - kv < self.values["window"])
        if "prefix" in self.values:
            prefix = self.values["prefix"].to(device)
            return lambda q, kv: (q >= kv) | (kv < prefix[0])
        return lambda q, kv: q >= kv


@dataclass(frozen=True)
class ContenderTimes:
    """Milliseconds of one contender in one cell, forward and forward with backward, or why there are none."""

    mask: str
    seqlen: int
    contender: str
    forward: float | None = None
    both: float | None = None
    reason: str | None = None


def masks(seqlen: int) -> list[LayerMasks]:
    """The masks that the suite times."""
    window = {"window": min(4096, max(seqlen // 16, 1))}
    return [
        LayerMasks("causal", {"causal": 1}),
        LayerMasks("window", {"sliding_window": 1}, window),
        LayerMasks("documents", {"causal": 1}, documents=lengths(seqlen)),
        LayerMasks(
            "prefix", {"prefix_lm": 1}, {"prefix": torch.tensor([seqlen // 4], dtype=torch.int32, device="cpu")}
        ),
        LayerMasks("hybrid", {"causal": 1, "sliding_window": 3}, window),
    ]


def lengths(seqlen: int) -> tuple[int, ...]:
    """Lognormal lengths of documents that fill a sequence."""
    generator, drawn = torch.Generator().manual_seed(0), list[int]()
    while sum(drawn) < seqlen:
        length = torch.empty(1, dtype=torch.float32, device="cpu").log_normal_(8.0, 1.0, generator=generator)
        drawn.append(int(length.clamp(64, max(seqlen // 2, 64))))
    drawn[-1] -= sum(drawn) - seqlen
    return tuple(drawn)


def run(
    *, cells: tuple[str, ...], seqlens: tuple[int, ...], peers: tuple[str, ...], rounds: int, json_path: Path | None,
    as_json: bool, dry_run: bool,
) -> bool:  # fmt: skip
    """Measure, or simulate; whether all that attngen does was measured. ``as_json`` prints JSON instead of tables."""
    if dry_run:
        simulated = _simulated(seqlens)
        every = list(chain.from_iterable(simulated.values()))
        _write("simulated", every, json_path)
        if as_json:
            print_json({"simulated": [one.to_dict() for one in every]})
        else:
            _print_simulated(simulated)
        return True
    if "RANK" not in os.environ:
        raise click.UsageError(
            "the parallel suite runs on several ranks: torchrun --nproc-per-node N -m attngen bench --suite parallel; "
            "with --dry-run one process simulates them"
        )
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    rows: list[ContenderTimes] = []
    try:
        attngen.jit()
        for seqlen in seqlens or (16384 * ranks,):
            for mask in masks(seqlen):
                if cells and not any(part in mask.name for part in cells):
                    continue
                for name, contender in _contenders(mask, seqlen, ranks).items():
                    if peers and not any(part in name for part in peers):
                        continue
                    rows.append(_measured(mask, seqlen, name, contender, rounds, device))
                    if rank == 0:
                        _report(rows, json_path)
    finally:
        dist.destroy_process_group()
    if rank == 0 and as_json:
        print_json({"rows": [asdict(row) for row in rows]})
    elif rank == 0:
        _print(rows, ranks)
    return all(row.reason is None for row in rows if row.contender.startswith(("attngen", "one")))


#: A function that calls all layers, the tensors whose gradients are taken, and in which context calls are made.
Made = tuple[Callable[[], list[Tensor]], list[Tensor], AbstractContextManager[Any]]


def _contenders(mask: LayerMasks, seqlen: int, ranks: int) -> dict[str, Callable[[torch.device], Made]]:
    ways: dict[str, Callable[[torch.device], Made]] = {"one GPU": partial(_one, mask, seqlen)}
    for method in ("exchange", "gather", "heads"):
        if method != "heads" or KV_HEADS % ranks == 0:
            ways[f"attngen {method}"] = partial(_by_plan, mask, seqlen, method, KV_HEADS)
    if mask.name == "causal":
        ways[f"attngen exchange, {HEADS} KV heads"] = partial(_by_plan, mask, seqlen, "exchange", HEADS)
        for backend in ("cudnn", "flash"):
            ways[f"torch context_parallel, {backend}, {HEADS} KV heads"] = partial(_torchs, seqlen, backend)
        if HEADS % ranks == 0:
            ways["Ulysses with SDPA"] = partial(_ulysses, seqlen)
    if len(mask.layers) == 1:
        ways["FlexAttention, keys gathered"] = partial(_flex, mask, seqlen)
    return ways


def _measured(
    mask: LayerMasks,
    seqlen: int,
    name: str,
    contender: Callable[[torch.device], Made],
    rounds: int,
    device: torch.device,
) -> ContenderTimes:
    import torch.distributed as dist

    torch.manual_seed(0)
    reason, forward, both = None, None, None
    try:
        call, leaves, context = contender(device)
        with context:
            weights = [torch.randn_like(out) for out in call()]
            with torch.no_grad():
                forward = _timed(call, rounds)
            both = _timed(lambda: torch.autograd.grad(call(), leaves, weights), rounds)
    except (AttngenError, RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    torch.cuda.empty_cache()
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    reason = next((each for each in reasons if each is not None), None)
    if reason is not None:
        return ContenderTimes(mask.name, seqlen, name, reason=reason)
    return ContenderTimes(mask.name, seqlen, name, forward, both)


def _timed(call: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of a call on the slowest rank, the median of samples."""
    import torch.distributed as dist

    for _ in range(2):
        call()
    samples = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_ROW):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / _ROW)
    slowest = torch.tensor(sorted(samples)[rounds // 2], device=torch.cuda.current_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest) * 1e3


# --- contenders ---------------------------------------------------------------------------------------------


def _random(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _one(mask: LayerMasks, seqlen: int, device: torch.device) -> Made:
    lead = () if mask.documents else (1,)
    q, k, v = leaves = _random(device, *((*lead, seqlen, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    values = {variant: mask.values_of(variant, device) for variant in mask.layers}
    if not mask.documents:
        call = _layers(mask, lambda variant: attngen.attention(q, k, v, variant=variant, **values[variant]))
        return call, leaves, nullcontext()
    offsets = torch.tensor([0, *accumulate(mask.documents)], dtype=torch.int32, device=device)
    longest = max(mask.documents)
    call = _layers(mask, lambda variant: attngen.attention_varlen(
        q, k, v, offsets, offsets, longest, longest, variant=variant, **values[variant]
    ))  # fmt: skip
    return call, leaves, nullcontext()


def _layers(mask: LayerMasks, call: Callable[[str], Tensor]) -> Callable[[], list[Tensor]]:
    """A function that calls all layers, one after the other."""
    variants = [variant for variant, count in mask.layers.items() for _ in range(count)]
    return lambda: [call(variant) for variant in variants]


def _by_plan(mask: LayerMasks, seqlen: int, method: str, kv_heads: int, device: torch.device) -> Made:
    cost = Cost(HEADS, kv_heads, HEAD_DIM)
    offsets = [0, *accumulate(mask.documents)] if mask.documents else None
    plan: Plan = attngen.parallel.plan(
        {variant: float(count) for variant, count in mask.layers.items()},
        seqlen,
        method=method,
        cu_seqlens=offsets,
        cost=cost,
        **mask.values,
    )
    lead = () if mask.documents else (1,)
    shapes = ((*lead, plan.tokens(), heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads))
    q, k, v = leaves = _random(device, *shapes)
    return _layers(mask, lambda variant: plan.attention(q, k, v, variant=variant)), leaves, nullcontext()


def _torchs(seqlen: int, backend: str, device: torch.device) -> Made:
    """torch's own ring, which takes as many KV heads as heads."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    q, k, v = whole = [torch.randn(1, HEADS, seqlen, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]

    @contextmanager
    def inside() -> Iterator[None]:
        kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
        with sdpa_kernel(kernels), context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 3):
            for each in whole:
                each.requires_grad_()
            yield
            for each in whole:
                each.requires_grad_(False)

    # By its name in the module, which the context replaces.
    return lambda: [functional.scaled_dot_product_attention(q, k, v, is_causal=True)], whole, inside()


def _ulysses(seqlen: int, device: torch.device) -> Made:
    """Rows for heads by all-to-all, SDPA over all rows, and back."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from torch.nn.functional import scaled_dot_product_attention

    ranks = dist.get_world_size()
    leaves = _random(device, *((1, seqlen // ranks, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    group = dist.group.WORLD

    def rows(x: Tensor) -> Tensor:
        x = x.repeat_interleave(ranks // x.shape[2], dim=2) if x.shape[2] < ranks else x
        sent = x[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return all_to_all_single_autograd(sent.flatten(), None, None, group).view(1, seqlen, -1, HEAD_DIM)

    def call() -> list[Tensor]:
        q, k, v = (rows(x).transpose(1, 2) for x in leaves)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        sent = out[0].transpose(0, 1).contiguous()
        back = all_to_all_single_autograd(sent.flatten(), None, None, group)
        return [back.view(ranks, seqlen // ranks, HEADS // ranks, HEAD_DIM).transpose(0, 1).flatten(1, 2)]

    return call, leaves, nullcontext()


def _flex(mask: LayerMasks, seqlen: int, device: torch.device) -> Made:
    """FlexAttention over gathered keys, with pairs of chunks that are balanced for a causal mask."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ranks, rank = dist.get_world_size(), dist.get_rank()
    held, chunk = seqlen // ranks, seqlen // (2 * ranks)
    leaves = _random(device, *((1, heads, held, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))

    def place(index: Tensor) -> Tensor:
        """The position of a row of all ranks, rank after rank."""
        of, within = index // held, index % held
        return torch.where(within < chunk, of * chunk + within, (2 * ranks - 1 - of) * chunk + within - chunk)

    compiled, visible = torch.compile(flex_attention, dynamic=False), mask.visible(device)
    assert visible is not None
    blocks = torch.compile(create_block_mask)(
        lambda b, h, q, kv: visible(place(q + rank * held), place(kv)), None, None, held, seqlen, device=device
    )

    def call() -> list[Tensor]:
        k, v = (all_gather_tensor_autograd(x, 2, dist.group.WORLD) for x in leaves[1:])
        return [compiled(leaves[0], k, v, block_mask=blocks, enable_gqa=True)]

    return call, leaves, nullcontext()


# --- reports ------------------------------------------------------------------------------------------------


def _report(rows: list[ContenderTimes], path: Path | None) -> None:
    last = rows[-1]
    figures = last.reason if last.reason is not None else f"{last.forward:.3f} ms, {last.both:.3f} with backward"
    click.echo(f"{last.mask}, {last.seqlen} tokens, {last.contender}: {figures}", err=True)
    _write("rows", rows, path)


def _write(name: str, rows: Sequence[ContenderTimes | Simulated], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps({name: [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")


def _print(rows: list[ContenderTimes], ranks: int) -> None:
    alone = {(row.mask, row.seqlen): row for row in rows if row.contender == "one GPU"}
    lines = []
    for row in rows:
        one = alone.get((row.mask, row.seqlen))
        times = [f"{each:.3f}" if each is not None else "" for each in (row.forward, row.both)]
        ratios = ["", ""]
        if one is not None and row.forward and row.both and one.forward and one.both:
            ratios = [f"{one.forward / row.forward:.2f}", f"{one.both / row.both:.2f}"]
        lines.append([row.mask, row.seqlen, row.contender, times[0], ratios[0], times[1], ratios[1], row.reason or ""])
    print_table(["mask", "tokens", "", "forward ms", "x", "with backward ms", "x", ""], lines)
    click.echo(
        f"{ranks} ranks, {HEADS} heads, {KV_HEADS} KV heads (torch's context_parallel {HEADS}), head_dim {HEAD_DIM}, "
        f"bf16; medians, the slowest rank, of {_ROW} calls in a row; x: one GPU's time over it"
    )


def _simulated(seqlens: tuple[int, ...]) -> dict[str, list[Simulated]]:
    """Simulations of all methods, by the title of their table."""
    cost = Cost(64, KV_HEADS, HEAD_DIM)
    return {
        f"{name}, {tokens} tokens a rank, TFLOP/s of each GPU": table(variant, cost=cost, values=values, tokens=tokens)
        for tokens in seqlens or (8192,)
        for name, variant, values in (("causal", "causal", {}), ("window", "sliding_window", {"window": 4096}))
    }


def _print_simulated(simulated: Mapping[str, Sequence[Simulated]]) -> None:
    for title, rows in simulated.items():
        lines = [
            [one.method, one.ranks, f"{one.forward:.0f}", f"{one.backward:.0f}", f"{one.exposed:.0%}", one.bound]
            for one in rows
        ]
        print_table(["method", "ranks", "forward", "backward", "not hidden", "bound by"], lines, title=title)
    click.echo("simulated from the speeds of attngen.parallel.Links, 64 heads, 8 KV heads; nothing was measured")
