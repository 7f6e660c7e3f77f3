"""Dropout: its random numbers, the reference by hand, gradients, and what calls refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.errors import CallError
from attngen.lang.check import compile_variant
from attngen.lang.dropout import MAX_RATE
from attngen.lang.variant import Tensor as Declared
from attngen.lang.variant import Variant
from attngen.runtime.arguments.dropout import kept, philox, rate_of
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import preset
from tests.runtime.support import kernel
from tests.sampling import few, sampled

DROPPED = compile_variant("dropped", "q_pos >= kv", dropout=True)
NAMED = attngen.variant("q_pos >= kv", dropout=True, name="dropped_in_programs")
ALL = compile_variant(
    "everything", "q_pos >= kv", "s + slope[h] * (kv - q_pos)", tensors=[
        Declared("slope", "fp32", ("h",), grad=True), Declared("sinks", "fp32", ("h",), grad=True),
    ], sink="sinks[h]", dropout=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the known answers that come with Random123
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox(key: tuple[int, int], counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    seed = key[1] << 32 | key[0]
    seed -= 2**64 * (seed >= 2**63)
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in philox(torch.tensor(seed), (c0, c1, c2, c3))) == words


def call(p: float = 0.25, heads: int = 3, state: tuple[int, int] = (-(2**62) + 12345, 7)) -> Any:
    tensors = {"rng_state": torch.tensor(state)}
    return SimpleNamespace(heads=heads, scalars={"dropout_p": p}, tensors=tensors, variant=DROPPED)


def test_numbers_depend_on_the_pair_alone() -> None:
    whole = kept(call(), 1, slice(0, 200), 333)
    assert whole.shape == (3, 200, 333)
    assert torch.equal(whole[:, 37:91, :70], kept(call(), 1, slice(37, 91), 70))
    assert torch.equal(whole[:, 15:16, :1], kept(call(), 1, slice(15, 16), 1))
    # the heads of sequence 1 are those that follow the ones of sequence 0
    assert torch.equal(whole[0], kept(call(heads=6), 0, slice(0, 200), 333)[3])


@few("p", [0.0, 0.1, 0.5, 0.9, MAX_RATE], always=(2,))
def test_as_many_are_dropped_as_asked_for_and_independently(p: float) -> None:
    threshold, scale = rate_of(call(p))
    assert abs(threshold / 65536 - p) <= 2**-16
    assert scale == pytest.approx(1 / (1 - threshold / 65536))
    stays = kept(call(p), 0, slice(0, 512), 512).double()
    share, count = 1 - threshold / 65536, stays.numel()
    deviation = math.sqrt(share * (1 - share))
    assert abs(float(stays.mean()) - share) <= 5 * deviation / math.sqrt(count)
    if p in (0.0, MAX_RATE):
        return

    def centred(sequence: int = 0, state: tuple[int, int] = (-(2**62) + 12345, 7)) -> Tensor:
        return (kept(call(p, state=state), sequence, slice(0, 512), 512).double() - share) / deviation

    one = centred()
    others = {
        "heads": one.roll(1, 0), "next query": one.roll(1, 1), "query + 8": one.roll(8, 1), "next key": one.roll(1, 2),
        "key + 8": one.roll(8, 2), "block": one.roll(16, 2), "offset": centred(state=(-(2**62) + 12345, 8)),
        "seed": centred(state=(-(2**62) + 12346, 7)), "upper half of the seed": centred(state=(12345, 7)),
        "sequence": centred(1),
    }  # fmt: skip
    for name, other in others.items():
        assert abs(float((one * other).mean())) <= 5 / math.sqrt(count), name


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in ((2, 19, 4, 8), (2, 23, 2, 8), (2, 23, 2, 6))]


def test_the_output_is_made_of_what_is_kept_and_the_log_sum_exp_of_all() -> None:
    q, k, v = inputs()
    state = torch.tensor([123456789012345, 5])
    out, lse = attngen.attention(q, k, v, variant=DROPPED, dropout_p=0.3, rng_state=state, return_lse=True)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / math.sqrt(8)
    logits = logits.masked_fill(torch.arange(23) > torch.arange(19)[:, None] + 4, -math.inf)
    one = call(0.3, heads=4, state=(123456789012345, 5))
    stays = torch.stack([kept(one, b, slice(0, 19), 23) for b in range(2)])
    threshold = round(0.3 * 65536)
    p = torch.softmax(logits, dim=-1) * stays / (1 - threshold / 65536)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, dim=2)))
    torch.testing.assert_close(lse, torch.logsumexp(logits, dim=-1))


def test_a_rate_of_zero_drops_nothing() -> None:
    q, k, v = inputs()
    plain = attngen.attention(q, k, v, variant=preset("causal"))
    assert torch.equal(attngen.attention(q, k, v, variant=DROPPED, dropout_p=0.0), plain)
    assert torch.equal(attngen.attention(q, k, v, variant=preset("causal"), dropout_p=0.0), plain)


@pytest.mark.exhaustive
def test_dropout_changes_nothing_on_average() -> None:
    q, k, v = inputs()
    torch.manual_seed(5)
    outputs = torch.stack([attngen.attention(q, k, v, variant=DROPPED, dropout_p=0.2) for _ in range(200)])
    plain = attngen.attention(q, k, v, variant=preset("causal"))
    error = (outputs.mean(0) - plain) / (outputs.std(0) / math.sqrt(len(outputs))).clamp(min=1e-12)
    assert float(error.abs().max()) < 6
    assert float(outputs.std(0).max()) > 0.1


def test_numbers_are_drawn_from_torchs_generator() -> None:
    q, k, v = inputs()
    torch.manual_seed(3)
    first, second = (attngen.attention(q, k, v, variant=DROPPED, dropout_p=0.5) for _ in "ab")
    torch.manual_seed(3)
    assert torch.equal(attngen.attention(q, k, v, variant=DROPPED, dropout_p=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("variant", [DROPPED, ALL], ids=lambda v: v.name)
def test_gradients_of_the_reference(variant: Variant) -> None:
    q, k, v = (t[:1, :6].clone().requires_grad_() for t in inputs())
    own = [torch.randn(4, dtype=torch.float64).requires_grad_() for t in variant.tensors if t.grad]
    names = [t.name for t in variant.tensors if t.grad]

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Any:
        return attngen.attention(
            q, k, v, variant=variant, dropout_p=0.4, rng_state=torch.tensor([9, 9]), return_lse=True,
            **dict(zip(names, given, strict=True)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, (q, k, v, *own), fast_mode=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"variant": preset("causal"), "dropout_p": 0.1}, "causal: dropout_p is 0.1, but the variant drops nothing: "
         "its spec lacks 'dropout: true'"),
        ({"variant": DROPPED}, "dropped: missing 'dropout_p'; 'dropped' takes dropout_p: float32, 0.0 to "),
        ({"variant": DROPPED, "dropout_p": 1.0}, "'dropout_p' must lie within 0.0 .. 0.9999999"),
        ({"variant": DROPPED, "dropout_p": -0.1}, "'dropout_p' must lie within"),
        ({"variant": DROPPED, "dropout_p": 0.1, "rng_state": torch.zeros(2)}, "'rng_state' must have dtype torch.int6"),
        ({"variant": DROPPED, "dropout_p": 0.1, "rng_state": torch.zeros(3).long()}, "axis 0 must be 2, got"),
    ],
)  # fmt: skip
def test_wrong_rates_and_states_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallError) as raised:
        attngen.attention(*inputs(), **options)
    assert reason in str(raised.value)


def test_tile_maps_and_explanations_need_no_rate_and_draw_nothing() -> None:
    q, k, v = inputs(torch.float32)
    before = torch.get_rng_state()
    assert attngen.tile_map(q, k, variant=DROPPED).words is None
    assert "runs reference" in str(attngen.explain(q, k, v, variant=DROPPED))
    assert "runs reference" in str(attngen.explain(q, k, v, variant=DROPPED, dropout_p=0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_program_draws_anew_and_differentiates() -> None:
    registry.add(package_of_kernels([kernel(DROPPED, package="drops")], "memory"))
    q, k, v = (t.requires_grad_() for t in inputs(torch.float32))

    def program(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> Any:
        return attngen.attention(q * 2, k, v, variant="dropped", dropout_p=0.5, rng_state=state)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    state = torch.tensor([3, 4])
    ours, theirs = (torch.autograd.grad(f(q, k, v, state).square().sum(), (q, k, v)) for f in (compiled, program))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    first, second = (compiled(q, k, v, None) for _ in "ab")
    assert not torch.equal(first, second)


@pytest.mark.exhaustive
@sampled(always=1, checkpointed=[False, True], budget=[1.0, 0.5, 0.01])
def test_a_program_with_a_memory_budget_keeps_its_state(budget: float, *, checkpointed: bool) -> None:
    """The output is linear in v: <g, out> = <dv, v>, if both passes drop the same pairs."""

    def layer(x: Tensor, v: Tensor) -> Any:
        return attngen.attention(x.sin(), x.cos(), v, variant=NAMED, dropout_p=0.5)

    def program(x: Tensor, v: Tensor) -> Any:
        layers = [checkpoint(layer, x, v, use_reentrant=False) if checkpointed else layer(x, v) for _ in "ab"]
        return tuple(layers)

    torch._dynamo.reset()
    x, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64).requires_grad_() for _ in "xv")
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._functorch.config.patch(activation_memory_budget=budget):
        torch.manual_seed(3)
        outs = compiled(x, v)
        again = compiled(x, v)
    torch.manual_seed(3)
    torch.testing.assert_close((*outs, *again), (*program(x, v), *program(x, v)))
    for out in (*outs, *again):
        above = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, above, retain_graph=True)
        torch.testing.assert_close((above * out).sum(), (dv * v).sum())


@pytest.mark.exhaustive
def test_a_memory_budget_of_zero_is_refused_without_a_state() -> None:
    """With it torch keeps nothing but inputs."""

    def program(x: Tensor, state: Tensor | None) -> Any:
        return attngen.attention(x.sin(), x, x, variant=NAMED, dropout_p=0.5, rng_state=state)

    torch._dynamo.reset()
    x, state = torch.randn(1, 16, 2, 8, dtype=torch.float64).requires_grad_(), torch.tensor([3, 4])
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._functorch.config.patch(activation_memory_budget=0):
        with pytest.raises(RuntimeError, match="activation_memory_budget is 0.*pass rng_state="):
            compiled(x, None)
        with torch.no_grad():
            assert compiled(x, None).shape == x.shape
        ours, theirs = (torch.autograd.grad(run(x, state).square().sum(), x)[0] for run in (compiled, program))
    torch.testing.assert_close(ours, theirs)
