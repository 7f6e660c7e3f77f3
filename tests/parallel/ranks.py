"""Calls by plans, as one of several processes on the CPU, beside the same calls of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.errors import CallError
from attngen.integrations.flash_attn.v2 import flash_attn_func
from attngen.integrations.torch_sdpa.context_parallel import context_parallel
from attngen.parallel import Cost, overlap, rank_attention
from tests.parallel.cases import BATCH, HEAD_DIM, HEADS, KV_HEADS, SLOW, Case, cases

#: Numbers of tokens: one that all ranks share evenly, and one that leaves a ragged tile.
EVEN, RAGGED = 192, 203

TILE = 16


def run(rank: int, world: int, meeting: str, part: str) -> None:
    """Make the checks of a ``part`` as process ``rank`` of ``world``. Raises AssertionError."""
    torch.set_num_threads(1)
    if world == 2:
        rank_attention._LONG = 8  # rows of segments that are calls of their own
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        if part == "exhaustive":
            for case in cases():
                for seqlen in (EVEN, RAGGED):
                    for n, method in enumerate(("gather", "exchange", "exchange")):
                        check(case, seqlen, method, (None, 2)[n % 2], slow=n == 1)
            if world == 2:
                _models(rank, world)
            return
        for n, case in enumerate(cases()):
            if n % (8 if part == "few" else 2) == world // 2 % 2:  # the others run with another number of processes
                method = ("exchange", "exchange", "gather")[(n // 2) % 3]
                overlap._GROUP = 1e9 if n // 6 % 2 else 0.0  # so that only forward passes overlap by heads
                check(case, (EVEN, RAGGED)[n // 2 % 2], method, (None, 1, 3)[n // 4 % 3], slow=n // 3 % 2 == 0)
        overlap._GROUP = 0.0
        for other in (_few_tokens, _own_tokens, _dropped, _decode, _refused_together, _refused_alone):
            other(rank, world)
        of_two, of_four = (_whole_again, _several, _in_many_groups), (_in_context, _sharded_parameters)
        for other in of_two if world == 2 else of_four:
            other(rank, world)
        if world == 2 and part == "some":
            _compiled(rank, world)  # which takes twice as long as all else of the few
        _lost(rank, world)
    finally:
        dist.destroy_process_group()


def methods(world: int) -> tuple[str, ...]:
    """Those that the heads of the cases allow."""
    return ("gather", "exchange", "heads") if KV_HEADS % world == 0 else ("gather", "exchange")


def _few_tokens(rank: int, world: int) -> None:
    """Ranks without a token take part: forward, backward, and shapes."""
    for case in cases():
        if case.name in ("causal", "window_sink", "varlen_one_document", "documents"):
            check(case, 12, "exchange", None)
            check(case, 18, methods(world)[-1], None)
    plan, whole = attngen.parallel.plan("causal", 12), torch.arange(36.0).view(1, 12, 3)
    assert torch.equal(plan.unshard(plan.shard(whole)), whole)


def _whole_again(rank: int, world: int) -> None:
    """Sharded tensors become whole again, along any axis, and gradients of all ranks are added up."""
    plan = attngen.parallel.plan("causal", RAGGED, tile=TILE)
    whole = torch.arange(RAGGED * 6.0).view(2, RAGGED, 3).requires_grad_()
    again = plan.unshard(plan.shard(whole))
    assert torch.equal(again, whole)
    (again * (rank + 1)).sum().backward()
    assert whole.grad is not None
    mine = whole.grad.index_select(1, plan.rows())
    assert torch.equal(mine, torch.full_like(mine, world * (world + 1) / 2))
    flat = torch.arange(RAGGED, dtype=torch.int32)
    assert torch.equal(plan.unshard(plan.shard(flat, 0), 0), flat)


def _own_tokens(rank: int, world: int) -> None:
    """Tensors by token may hold those of a rank alone: rows are there, and what is read by key is exchanged."""
    case = next(case for case in cases() if case.name == "biases")
    for method in methods(world):
        plan = attngen.parallel.plan(case.variant, RAGGED, tile=TILE, method=method)
        q, k, v = (plan.shard(x) for x in tensors(case, RAGGED)[:3])
        passed = case.passed(RAGGED)
        wanted = plan.attention(q, k, v, **passed)
        by_row, by_key = passed["by_row"], passed["by_key"].clone().requires_grad_()
        whole = torch.autograd.grad(plan.attention(q, k, v, **{**passed, "by_key": by_key}).sum(), by_key)[0]
        dist.all_reduce(whole)
        own = plan.shard(by_key.detach(), 1).requires_grad_()
        ours = plan.attention(q, k, v, by_row=plan.shard(by_row, 1), by_key=own, table=passed["table"])
        compare(ours, wanted, f"own tokens, {method}")
        (gradient,) = torch.autograd.grad(ours.sum(), own)
        compare(gradient, plan.shard(whole, 1), f"gradient of own tokens, {method}")
    plan = attngen.parallel.plan(case.variant, 12, tile=16, method="exchange")  # one rank holds all
    q, k, v = (plan.shard(x) for x in tensors(case, 12)[:3])
    passed = case.passed(12)
    wanted = plan.attention(q, k, v, **passed)
    own = {name: plan.shard(passed[name], 1) for name in ("by_row", "by_key")}
    compare(plan.attention(q, k, v, **{**passed, **own}), wanted, "tokens of one rank")


def _dropped(rank: int, world: int) -> None:
    """Ranks drop what one process drops, with the same state of random numbers."""
    variant = attngen.variant("q_pos >= kv", dropout=True, name="dropped")
    case = Case("dropped", variant)
    plan = attngen.parallel.plan(variant, 640, tile=128)
    options = {"dropout_p": 0.4, "rng_state": torch.tensor([-(2**61) + 3, 5])}
    *whole, weight = tensors(case, 640)
    leaves = [x.requires_grad_() for x in whole]
    out = attngen.attention(leaves[0], leaves[1], leaves[2], variant=variant, **options)
    wanted = torch.autograd.grad(out, leaves, weight)
    parts = [plan.shard(x.detach()).requires_grad_() for x in whole]
    ours = plan.attention(parts[0], parts[1], parts[2], **options)
    compare(ours, plan.shard(out), "dropout")
    for name, one, other in zip("qkv", torch.autograd.grad(ours, parts, plan.shard(weight)), wanted, strict=True):
        compare(one, plan.shard(other), f"dropout: d{name}")


def _several(rank: int, world: int) -> None:
    """One plan serves the variants of one model."""
    plan = attngen.parallel.plan({"causal": 2, "sliding_window": 6}, EVEN, tile=TILE, window=20)
    case = next(case for case in cases() if case.name == "causal")
    whole = tensors(case, EVEN)[:3]
    for name, values in (("causal", {}), ("sliding_window", {"window": 20})):
        out = plan.attention(*map(plan.shard, whole), variant=name)
        compare(out, plan.shard(attngen.attention(*whole, variant=name, **values)), name)
    assert plan is attngen.parallel.plan({"causal": 2, "sliding_window": 6}, EVEN, tile=TILE, window=20)


def _in_many_groups(rank: int, world: int) -> None:
    """Keys of a forward pass travel in more than two groups of heads where the first of them hide too little."""
    plan = attngen.parallel.plan(
        "causal", EVEN, tile=TILE, chunks=2, cost=replace(SLOW, heads=8, kv_heads=8, gigabytes=1e-8)
    )
    assert plan.layers[0].forward_groups == 4
    generator = torch.Generator().manual_seed(3)
    *whole, weight = (torch.randn(1, EVEN, 8, HEAD_DIM, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in whole]
    out = attngen.attention(leaves[0], leaves[1], leaves[2], variant="causal")
    parts = [plan.shard(x.detach()).requires_grad_() for x in whole]
    ours = plan.attention(parts[0], parts[1], parts[2])
    compare(ours, plan.shard(out), "in many groups of heads")
    wanted = torch.autograd.grad(out, leaves, weight)
    for name, one, other in zip("qkv", torch.autograd.grad(ours, parts, plan.shard(weight)), wanted, strict=True):
        compare(one, plan.shard(other), f"in many groups of heads: d{name}")


def _refused_together(rank: int, world: int) -> None:
    """An error of one rank on the first call is an error of all ranks, and none waits."""
    q = torch.zeros(1, EVEN // world, HEADS, HEAD_DIM)

    def refused(match: str, plan: Any, *given: Any, **values: Any) -> None:
        with pytest.raises(CallError, match=match):
            plan.attention(*given, **values)

    plan = attngen.parallel.plan("causal", EVEN, tile=TILE, chunks=1 if rank == 0 else 2)
    refused("ranks disagree about the plan: ranks 0 have", plan, q, q, q)
    plan = attngen.parallel.plan("sliding_window", EVEN, tile=TILE, window=9 + rank)
    refused("ranks disagree about the plan", plan, q, q, q)
    plan = attngen.parallel.plan("full", EVEN, tile=TILE)
    refused(r"rank 1: q has shape \(1, 7, ", plan, q[:, :7] if rank == 1 else q, q, q)
    refused("rank 0: full: unknown argument 'windw'", plan, q, q, q, **({"windw": 3} if rank == 0 else {}))
    refused("ranks disagree about the call", plan, q.double(), q.double(), q.double()) if rank == 1 else refused(
        "ranks disagree about the call", plan, q, q, q
    )
    assert plan.attention(q, q, q).shape == q.shape
    three = torch.zeros(1, EVEN // world, 3, HEAD_DIM)
    plan = attngen.parallel.plan("full", EVEN, tile=TILE, method="heads")
    refused("method heads: 3 heads and 3 KV heads are not multiples of", plan, three, three, three)


def _refused_alone(rank: int, world: int) -> None:
    """Errors that are the same on all ranks."""
    q = torch.zeros(1, EVEN // world, HEADS, HEAD_DIM)
    plan = attngen.parallel.plan("sliding_window", EVEN, tile=TILE, window=20)
    with pytest.raises(CallError, match="'window' is read by the mask of sliding_window, so the plan fixes it"):
        plan.attention(q, q, q, window=21)
    with pytest.raises(CallError, match="layout must be bshd or bhsd, got 'thd'"):
        plan.attention(q, q, q, layout="thd")
    with pytest.raises(CallError, match="plans do not take seqused_k; allowed: a mask that reads lengths"):
        plan.attention(q, q, q, seqused_k=torch.ones(1, dtype=torch.int32))
    with pytest.raises(CallError, match="plans do not take torch.float8_e4m3fn; allowed: torch.bfloat16"):
        plan.attention(*[q.to(torch.float8_e4m3fn)] * 3)
    with pytest.raises(CallError, match=rf"allowed along axis 1: the {EVEN // world} tokens of rank {rank}"):
        plan.unshard(q[:, 1:])
    sinks = attngen.parallel.plan("causal_sink", EVEN, tile=TILE)
    with pytest.raises(CallError, match="causal_sink takes sinks, which neither the plan nor the call got"):
        sinks.attention(q, q, q)


def _compiled(rank: int, world: int) -> None:
    """torch.compile keeps a call in one graph, and checkpointing makes it twice, with the same results."""
    for name, method in (("window_sink", "exchange"), ("varlen_causal", methods(world)[-1])):
        _check_compiled(next(case for case in cases() if case.name == name), method)


def _check_compiled(case: Case, method: str) -> None:
    passed = {name: value.requires_grad_() for name, value in case.passed(EVEN).items()}
    plan = attngen.parallel.plan(
        case.variant, EVEN, tile=TILE, method=method, cu_seqlens=case.cu_seqlens(EVEN), **case.fixed(EVEN)
    )
    leaves = [plan.shard(x, 0 if case.documents else 1).requires_grad_() for x in tensors(case, EVEN)[:3]]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.attention(2 * q, k, v, **passed).square()

    def gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out.sum(), [*leaves, *passed.values()])]

    wanted = gradients(block(*leaves))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for one in (compiled(*leaves), checkpoint(block, *leaves, use_reentrant=False)):
        for ours, other in zip(gradients(one), wanted, strict=True):
            compare(ours, other, f"{case.name}, compiled or checkpointed")


def _in_context(rank: int, world: int) -> None:
    """Functions of other libraries attend to the keys of all ranks inside ``context_parallel``."""
    plan = attngen.parallel.plan("causal", EVEN, tile=TILE)
    x = torch.randn(1, EVEN, HEADS, HEAD_DIM)
    dist.broadcast(x, 0)
    y = x.transpose(1, 2).clone()
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2),
        lambda x, y: functional.scaled_dot_product_attention(y, y, y).transpose(1, 2),
        lambda x, y: attngen.attention(x, x, x, variant="sink_window", window=20, sinks=3),
        lambda x, y: flash_attn_func(x, x, x, causal=True),
        lambda x, y: flash_attn_func(x, x, x, causal=True, window_size=(9, 0)),
    ]
    wanted = [call(x, y) for call in calls]
    whole = x.clone()
    with context_parallel(plan, buffers=[x, y], buffer_seq_dims=[1, 2]):
        assert x.shape[1] == plan.tokens()
        for call, other in zip(calls, wanted, strict=True):
            compare(call(x, y), plan.shard(other), "in context_parallel")
        for wrong, message in (
            (lambda: functional.scaled_dot_product_attention(y, y, y, attn_mask=y), "attn_mask inside"),
            (lambda: attngen.attention(whole, whole, whole), "the .* tokens of this rank along axis 1"),
            (lambda: attngen.attention_varlen(x[0], x[0], x[0], None, None, 1, 1), "belong to its plan"),
        ):
            with pytest.raises(CallError, match=message):
                wrong()
    assert torch.equal(x, whole)
    assert functional.scaled_dot_product_attention(y, y, y).shape == y.shape


def _decode(rank: int, world: int) -> None:
    """Queries attend to a cache that is spread over the ranks, one of which has no keys, and a sink counts once."""
    known = {case.name: case for case in cases()}
    ends = [0, 50, 50, 111, EVEN] if world == 4 else [0, 70, EVEN]
    for name in ("causal", "window", "causal_sink", "prefix_lm", "alibi", "biases", "nothing_for_some"):
        case = known[name]
        values = {**case.fixed(EVEN), **case.passed(EVEN)}
        q, k, v = tensors(case, EVEN)[:3]
        wanted = attngen.attention(q, k, v, variant=case.variant, return_lse=True, **values)
        for count in (1, 5):
            here = slice(ends[rank], ends[rank + 1])
            ours = attngen.parallel.decode(
                q[:, -count:], k[:, here], v[:, here], position=EVEN - count, begin=ends[rank], variant=case.variant,
                return_lse=True, **values,
            )  # fmt: skip
            compare(ours[0], wanted[0][:, -count:], f"decode {name}")
            compare(ours[1], wanted[1][..., -count:], f"decode {name}: lse")
    with pytest.raises(CallError, match=f"rank {world - 1}: keys end at 1000, after the last query, which is at 9"):
        begin = 999 if rank == world - 1 else 0
        attngen.parallel.decode(q[:1, :1], k[:1, :1], v[:1, :1], position=9, begin=begin)


def _models(rank: int, world: int) -> None:
    """Models of transformers compute the same logits inside ``context_parallel``, with windows and soft caps, too."""
    import transformers

    from attngen.integrations.transformers.implementation import register

    register()
    sizes = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "attngen",
    }  # fmt: skip
    for name, more in (("Llama", {}), ("Mistral", {"sliding_window": 20}), ("Gemma2", {"sliding_window": 20})):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        tokens = torch.randint(0, 50, (1, EVEN), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = model(tokens, use_cache=False).logits
            plan = attngen.parallel.plan("causal", EVEN, tile=TILE)
            positions = torch.arange(EVEN)[None].clone()
            with context_parallel(plan, buffers=[tokens, positions]):
                ours = model(tokens, position_ids=positions, use_cache=False).logits
        compare(ours, plan.shard(wanted), name)


class _Layer(torch.nn.Module):
    """Attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.first, self.last = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.first(x).unflatten(2, (3 * HEADS, HEAD_DIM)).chunk(3, dim=2)
        return self.last(attend(q, k, v).flatten(2))


def _sharded_parameters(rank: int, world: int) -> None:
    """Ranks of one axis of a mesh share a sequence, those of the other the parameters: gradients as in one process."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    whole, sharded = _Layer(), _Layer()
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=mesh["dp"])
    plan = attngen.parallel.plan("causal", EVEN, mesh["cp"], tile=TILE)
    x = torch.randn(
        2, EVEN, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(3)
    )  # a sequence for each rank of dp

    whole(x, lambda q, k, v: attngen.attention(q, k, v, variant="causal")).square().sum().backward()
    own = plan.shard(x[mesh["dp"].get_local_rank()][None])
    sharded(own, plan.attention).square().sum().backward()
    for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
        total = one.grad.full_tensor() * 2  # FSDP's mean over dp, as a sum
        dist.all_reduce(total, group=mesh["cp"].get_group())
        torch.testing.assert_close(total, other.grad, rtol=1e-3, atol=1e-2)


def _lost(rank: int, world: int) -> None:
    """The others raise after a rank is lost."""
    plan = attngen.parallel.plan("causal", EVEN, tile=TILE)
    q = torch.zeros(1, plan.tokens(), HEADS, HEAD_DIM)
    plan.attention(q, q, q)
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    with pytest.raises(RuntimeError):
        for _ in range(100):
            plan.attention(q, q, q)


def tensors(case: Case, seqlen: int, head_dim: int = HEAD_DIM) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, in the shapes of the case."""
    generator = torch.Generator().manual_seed(seqlen)
    batch = () if case.documents else (BATCH,)
    made = [
        torch.randn(*batch, seqlen, heads, head_dim, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [t.transpose(1, 2).contiguous() for t in made] if case.options.get("layout") == "bhsd" else made


def alone(case: Case, q: Tensor, k: Tensor, v: Tensor, seqlen: int, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """The call of one process."""
    offsets = case.cu_seqlens(seqlen)
    options = {**case.options, **values, "variant": case.variant, "return_lse": True, "return_max_logits": True}
    if offsets is None:
        return attngen.attention(q, k, v, **options)
    cu, longest = torch.tensor(offsets, dtype=torch.int32, device=q.device), max(b - a for a, b in pairwise(offsets))
    return attngen.attention_varlen(q, k, v, cu, cu, longest, longest, **options)


def check(case: Case, seqlen: int, method: str, chunks: int | None, *, slow: bool = False) -> None:
    """Compare output, log-sum-exp and gradients of a plan's call with those of one process. With ``slow`` links plans
    overlap by heads."""
    where = f"{case.name}, {seqlen} tokens, {method}, chunks {chunks}, {'slow' if slow else 'fast'} links"
    cost = SLOW if slow else Cost(HEADS, KV_HEADS, HEAD_DIM, gigabytes=1e6)
    fixed, passed = case.fixed(seqlen), case.passed(seqlen)
    plan = attngen.parallel.plan(
        case.variant, seqlen, tile=TILE, method=method, chunks=chunks, cu_seqlens=case.cu_seqlens(seqlen),
        cost=cost, **fixed,
    )  # fmt: skip
    whole = [x.requires_grad_() for x in tensors(case, seqlen)[:3]]
    weight = tensors(case, seqlen)[3]
    graded = {name: passed[name].clone().requires_grad_() for name in case.graded}
    out, lse, largest = alone(case, *whole, seqlen, {**fixed, **passed, **graded})
    wanted = torch.autograd.grad((out * weight).sum() + lse.clamp(min=-9).sum(), [*whole, *graded.values()])
    rows = plan.rows()
    axis = 0 if case.documents else 2 if case.options.get("layout") == "bhsd" else 1
    parts = [plan.shard(x.detach(), axis).requires_grad_() for x in whole]
    own = {name: passed[name].clone().requires_grad_() for name in case.graded}
    asked: dict[str, Any] = {"return_lse": True, "return_max_logits": True}
    ours, ours_lse, ours_largest = plan.attention(*parts, **asked, **case.options, **{**passed, **own})
    compare(ours_largest, largest, f"{where}: largest logits")
    compare(ours, plan.shard(out, axis), where)
    compare(ours_lse, lse.index_select(-1, rows), f"{where}: lse")
    loss = (ours * plan.shard(weight, axis)).sum() + ours_lse.clamp(min=-9).sum()
    gradients = torch.autograd.grad(loss, [*parts, *own.values()])
    for name, one, other in zip("qkv", gradients, wanted, strict=False):
        compare(one, plan.shard(other, axis), f"{where}: d{name}")
    for name, one, other in zip(own, gradients[3:], wanted[3:], strict=True):
        total = one.clone()
        dist.all_reduce(total)
        compare(total, other, f"{where}: d{name}")


def compare(ours: Tensor, wanted: Tensor, where: str) -> None:
    """Raise AssertionError unless two results in float32 agree."""
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5, msg=lambda text: f"{where}: {text}")
