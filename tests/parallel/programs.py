"""Plans in programs on GPUs, as one of several processes: compiled, checkpointed, in CUDA graphs, with dropout, in
``context_parallel``, and decode over a cache that is spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.integrations.flash_attn.v2 import flash_attn_func
from attngen.integrations.torch_sdpa.context_parallel import context_parallel
from attngen.parallel import Plan, decoding
from attngen.runtime.registry.binding import find
from attngen.schema.writing import spec_text
from attngen.variants import PythonVariant

HEADS, KV_HEADS, HEAD_DIM, SEQLEN = 4, 2, 64, 2048
_HEADS = (HEADS, KV_HEADS, KV_HEADS)

_DROPPED = attngen.variant("q_pos >= kv", dropout=True, name="dropped")
_WINDOW = {"window": 300}
_SINKS = {"window": 300, "sinks": 5}


def variants(ranks: int) -> Iterator[PythonVariant]:
    """Variants that the ranks call beside the original ones."""
    calls: list[Any] = [
        _DROPPED,
        attngen.parallel.plan(_DROPPED, SEQLEN, ranks, tile=128).called(),
        attngen.parallel.plan("causal", SEQLEN, ranks).also("sink_window", **_SINKS).called(),
        *(decoding._source(find(name, None).variant, True)[1] for name in ("causal", "sliding_window")),
    ]
    yield from (one for one in calls if isinstance(one, PythonVariant))


def spec(ranks: int, arch: str) -> str:
    """The kernels of all of them."""
    made = {one.name: one for one in variants(ranks)}
    entry = {"arch": arch, "head_dim": HEAD_DIM, "dtype": "bf16", "passes": ["forward", "backward"]}
    plain = ["causal", "sliding_window", "sink_window"]
    kernels = [{"variant": list(made), **entry}, {"variant": plain, "layout": ["dense", "varlen"], **entry}]
    return spec_text({name: one.fields for name, one in made.items()}, kernels, package="parallel_programs")


def check(device: torch.device, rank: int, world: int) -> None:
    """Compare all of them with one GPU. Raises AssertionError."""
    attngen.jit()  # kernels that the spec of the test has not
    x = torch.randn(3, 1, SEQLEN, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    q, k, v = (each.to(device, torch.bfloat16)[:, :, :heads] for each, heads in zip(x, _HEADS, strict=True))
    for program in (_compiled, _captured, _dropped, _in_context):
        program(q.contiguous(), k.contiguous(), v.contiguous())
    _decoded(q, k.contiguous(), v.contiguous(), rank, world)


def _compiled(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, values in (("causal", {}), ("sliding_window", _WINDOW)):
        plan: Plan = attngen.parallel.plan(name, SEQLEN, **values)
        leaves = [plan.shard(x).requires_grad_() for x in (q, k, v)]

        def block(q: Tensor, k: Tensor, v: Tensor, plan: Plan = plan) -> Tensor:
            out: Tensor = plan.attention(2 * q, k, v)
            return out.square()

        wanted = _gradients(block(*leaves), leaves)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        _compare(f"{name}, compiled", _gradients(compiled(*leaves), leaves), wanted)
        _compare(f"{name}, checkpointed", _gradients(checkpoint(block, *leaves, use_reentrant=False), leaves), wanted)


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.float().sum(), leaves)]


def _captured(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A call and its backward in a CUDA graph, with other inputs at its replay."""
    for name, values in (("causal", {}), ("sliding_window", _WINDOW)):
        plan: Plan = attngen.parallel.plan(name, SEQLEN, **values)
        leaves = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                _gradients(plan.attention(leaves[0], leaves[1], leaves[2]), leaves)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _gradients(plan.attention(leaves[0], leaves[1], leaves[2]), leaves)
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(0.5)
        graph.replay()
        _compare(f"{name}, captured", captured, _gradients(plan.attention(leaves[0], leaves[1], leaves[2]), leaves))
        del graph


def _dropped(q: Tensor, k: Tensor, v: Tensor) -> None:
    plan = attngen.parallel.plan(_DROPPED, SEQLEN, tile=128)
    options = {"dropout_p": 0.4, "rng_state": torch.tensor([-(2**61) + 3, 5], device=q.device)}
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    wanted = _gradients(attngen.attention(whole[0], whole[1], whole[2], variant=_DROPPED, **options), whole)
    parts = [plan.shard(x.detach()).requires_grad_() for x in (q, k, v)]
    ours = _gradients(plan.attention(parts[0], parts[1], parts[2], **options), parts)
    _compare("dropout", ours, [plan.shard(x.detach()) for x in wanted])


def _in_context(q: Tensor, k: Tensor, v: Tensor) -> None:
    plan = attngen.parallel.plan("causal", SEQLEN)
    x, y = q.clone(), q.transpose(1, 2).clone()
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2),
        lambda x, y: attngen.attention(x, x, x, variant="sink_window", **_SINKS),
        lambda x, y: flash_attn_func(x, x, x, causal=True, window_size=(_WINDOW["window"] - 1, 0)),
    ]
    wanted = [plan.shard(call(x, y)) for call in calls]
    with context_parallel(plan, buffers=[x, y], buffer_seq_dims=[1, 2]):
        ours = [call(x, y) for call in calls]
    _compare("in context_parallel", ours, wanted)
    assert torch.equal(x, q)


def _decoded(q: Tensor, k: Tensor, v: Tensor, rank: int, world: int) -> None:
    """One rank has no keys."""
    ends = [0, *(SEQLEN * n // (2 * world) for n in range(1, world - 1)), SEQLEN, SEQLEN]
    here = slice(ends[rank], ends[rank + 1])
    for name, values in (("causal", {}), ("sliding_window", _WINDOW)):
        wanted = attngen.attention(q, k, v, variant=name, **values)
        for count in (1, 5):
            ours = attngen.parallel.decode(
                q[:, -count:], k[:, here], v[:, here], position=SEQLEN - count, begin=ends[rank], variant=name, **values
            )
            _compare(f"decode, {name}", [ours], [wanted[:, -count:]])
    dist.barrier()


def _compare(what: str, ours: list[Tensor], wanted: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(ours, wanted, strict=True)):
        assert one.shape == other.shape, f"{what}: {number} has shape {tuple(one.shape)}, not {tuple(other.shape)}"
        error, allowed = (one.double() - other.double()).abs().max(), 0.02 * other.double().abs().max() + 0.002
        assert error <= allowed, f"{what}: {number} is off by {error:.1e} of {allowed:.1e}"
