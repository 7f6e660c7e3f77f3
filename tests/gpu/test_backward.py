"""The backward: its contract, bits that do not change, autograd, torch.compile, CUDA graphs and checkpointing."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.errors import CallError
from attngen.inspect.cases import Case
from attngen.inspect.gradient_contract import expected_gradients
from attngen.lab.bench.memory import workspace, workspace_bound
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.poison import poisoned_gradients
from attngen.lab.verify.trial import Trial
from attngen.runtime.launch.map_cache import KEPT, kept_maps
from attngen.runtime.launch.pinned import PinnedGradients, prepared_shapes
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import Kernels, in_graph, known, label, mentioned, rare, rendered, same, some_of
from tests.gpu.gradient_runs import gradient_run

SPEC = Path(__file__).with_name("backward.yaml")
PACKAGE = "attngen_gpu_backward"
PLANNED = {f"{plan.direction} {label(plan)}": (spec, plan) for spec, plan in plans(load_spec(SPEC))}
ALL = [name for name in PLANNED if name.startswith("backward")]
#: Backward kernels that only ``-m exhaustive`` compiles and runs.
LEFT_OUT = rare({name: PLANNED[name][1] for name in ALL}, mentioned)


def to_build() -> list[Prepared]:
    return list(rendered(some_of(PLANNED, LEFT_OUT)).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return forward and backward kernels by their labels, and make the package known."""
    by_label = Kernels(rendered(some_of(PLANNED, LEFT_OUT)))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@cache
def trial(name: str) -> Trial:
    kernel = kernels()[name]

    return try_pinned(kernel, torch.device("cuda"), 30_000, small=False)


@pytest.mark.parametrize("name", ALL)
def test_gradients_keep_the_contract(name: str) -> None:
    """Errors within those of plain PyTorch; rows that see nothing give 0 and take nothing, though their dO is 1e4."""
    attempt = trial(name)
    assert attempt.problems == ()
    assert not [result.skipped for result in attempt.results if result.skipped]
    assert attempt.tally.dead_rows > 0


def gradients(name: str, case: Case, *, fill: int = 0xFF, seed: int = 0) -> tuple[Tensor, ...]:
    """Return the gradients of one backward into memory whose bytes were ``fill``."""
    kernel = kernels()[name]
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
    inputs = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", seed)
    call = inputs.bind(kernel.variant)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(seed))
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}
    buffers, memory = poisoned_gradients(kernel, call, given, wanted.dlse.contiguous())
    shared = (*buffers.workspaces.values(), *buffers.words.values())
    for tensor in (buffers.dq, buffers.dk, buffers.dv, *shared):
        tensor.view(torch.uint8).fill_(fill)
    PinnedGradients(kernel, call, buffers)()
    assert memory.overrun() == ()
    return buffers.dq, buffers.dk, buffers.dv


@pytest.mark.parametrize("name", ALL)
def test_the_same_bits_whatever_memory_held(name: str) -> None:
    case = Case("ragged", (270,) * 2, (333,) * 2, heads=4, kv_heads=2, used=(333, 201))
    first, *others = (gradients(name, case, fill=fill) for fill in (0xFF, 0xAA, 0x00, 0xFF))
    if _in_no_order(name):
        close([first[0]] * 3, [other[0] for other in others], 4e-3)
        first, others = first[1:], [other[1:] for other in others]
    assert all(same(first, other) for other in others)


@pytest.mark.parametrize(
    "name", ["backward causal-bf16-d64-dense-descriptor", "backward allowed-bf16-d128-dense-descriptor"]
)
def test_the_same_bits_under_load(name: str) -> None:
    case = Case("load", (239,) * 3, (239,) * 3, heads=4, kv_heads=2)
    first = gradients(name, case)
    for _ in range(20):
        assert same(first, gradients(name, case))


def _in_no_order(name: str) -> bool:
    """Whether a kernel accumulates dQ in no fixed order."""
    return kernels()[name].backend == "cuda" and not kernels()[name].ordered


ORDERED = [name for name in ALL if name.endswith("-ordered")]
LARGE = {
    "many short sequences": ((700,) * 24, (900,) * 24, 8, 2),
    "few long ones": ((6000,) * 2, (5000,) * 2, 4, 4),
    "one": ((9000,), (9000,), 3, 1),
}


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("name", ORDERED)
def test_a_fixed_order_gives_the_same_bits_on_every_run(name: str, size: str) -> None:
    """Many more tiles of keys than blocks, which a GPU takes differently on every run."""
    q_lengths, k_lengths, heads, kv_heads = LARGE[size]
    if name.split()[1].startswith("allowed"):  # the mask is a tensor
        q_lengths, k_lengths = (tuple(min(n, 2000) for n in each) for each in (q_lengths, k_lengths))
    launch = gradient_run(kernels()[name], Case(size, q_lengths, k_lengths, heads=heads, kv_heads=kv_heads), 3)
    first, *others = (launch() for _ in range(20))
    assert all(same(first, other) for other in others)
    assert float(first[0].abs().max()) > 0


# --- through the library ------------------------------------------------------------------------------------


def leaves(dtype: torch.dtype = torch.bfloat16, *, s: int = 150, heads: int = 4, kv_heads: int = 2, d: int = 64) -> Any:
    kernels()
    torch.manual_seed(1)
    shapes = ((2, s, heads, d), (2, s + 30, kv_heads, d), (2, s + 30, kv_heads, d))
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def attention(*tensors: Tensor, variant: str = "causal", **options: Any) -> Any:
    return attngen.attention(*tensors, variant=variant, package=PACKAGE, **options)


def close(ours: Any, theirs: Any, tolerance: float = 2e-2) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b.double()).abs().max()) <= tolerance * float(b.double().abs().max() + 1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_autograd_with_a_gradient_of_the_log_sum_exp(layout: str) -> None:
    inputs = leaves()
    if layout == "bhsd":
        inputs = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs]

    def loss(**options: Any) -> Tensor:
        out, lse = attention(*inputs, return_lse=True, layout=layout, **options)
        return out.float().square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()

    close(torch.autograd.grad(loss(), inputs), torch.autograd.grad(loss(backend="reference"), inputs))


def test_a_backward_in_a_fixed_order_where_torch_asks_for_one() -> None:
    inputs = leaves(s=700)
    out = attention(*inputs)
    above = torch.randn_like(out)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (torch.autograd.grad(out, inputs, above, retain_graph=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(first, second)
    close(torch.autograd.grad(out, inputs, above), first)
    compiled = torch.compile(partial(attention, deterministic=True), fullgraph=True)
    for call in (partial(attention, deterministic=True), compiled):
        assert same(torch.autograd.grad(call(*inputs), inputs, above), first)


def test_a_varlen_call() -> None:
    kernels()
    q, k, v = (
        torch.randn(n, h, 64, device="cuda").bfloat16().requires_grad_() for n, h in ((300, 4), (400, 2), (400, 2))
    )
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 100, 290], [0, 50, 70, 380]))

    def loss(**options: Any) -> Tensor:
        out = attngen.attention_varlen(q, k, v, cu_q, cu_k, 190, 310, variant="causal", package=PACKAGE, **options)
        return (out[:290].float() ** 2).sum()

    ours, theirs = (torch.autograd.grad(loss(**o), (q, k, v)) for o in ({}, {"backend": "reference"}))
    close(ours, theirs)
    assert not ours[0][290:].any()
    assert not ours[1][380:].any()
    assert not ours[2][380:].any()


def test_gradients_of_the_variants_own_tensors() -> None:
    q, k, v = leaves()
    own = {
        "gain": torch.tensor(1.2, device="cuda"), "slope": torch.rand(4, device="cuda") / 50,
        "table": torch.randn(16, device="cuda"), "bias": torch.randn(2, 180, device="cuda").bfloat16(),
    }  # fmt: skip
    inputs = [q, k, v, *(t.requires_grad_() for t in own.values())]

    def loss(**options: Any) -> Tensor:
        return attention(q, k, v, variant="learned", **own, **options).float().square().sum()

    ours, theirs = (torch.autograd.grad(loss(**o), inputs) for o in ({}, {"backend": "reference"}))
    close(ours, theirs)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CallError, match="no fixed order"):
            torch.autograd.grad(loss(), inputs)
        again = [torch.autograd.grad(attention(q, k, v).float().square().sum(), inputs[:3]) for _ in "ab"]
        assert same(*again)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("s", [150, 154])
def test_gradients_of_a_bias_of_pairs(batch: int, s: int) -> None:
    """Gradients of one sequence are stored in the bias's own dtype; those of several are added up."""
    kernels()
    torch.manual_seed(batch + s)
    q, k, v = (torch.randn(batch, n, 4, 64, device="cuda").bfloat16() for n in (s, s + 30, s + 30))
    bias = torch.randn(4, s, s + 30, device="cuda").bfloat16()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, bias)]

    def loss(**options: Any) -> Tensor:
        return attention(q, k, v, variant="learned_pairs", bias=bias, **options).float().square().sum()

    ours, theirs = (torch.autograd.grad(loss(**o), inputs) for o in ({}, {"backend": "reference"}))
    assert [one.dtype for one in ours] == [torch.bfloat16] * 4
    close(ours, theirs)


@pytest.mark.parametrize("name", [
    "learned_window_pairs-bf16-d64-dense-wgmma", "learned_window_pairs-bf16-d128-dense-wgmma",
    "learned_allowed_pairs-bf16-d64-dense-wgmma", "learned_allowed_pairs-bf16-d128-dense-wgmma",
])  # fmt: skip
@pytest.mark.parametrize("keys", [384, 388])
def test_gradients_of_a_bias_where_no_query_sees_a_tile(name: str, keys: int) -> None:
    """They are zeros, in 16 bits and in float32, whatever the memory held that the gradient takes; keys in eights are
    cleared by the kernel."""
    assert kernels()[f"backward {name}"]
    plan = PLANNED[f"backward {name}"][1]
    variant, head_dim = plan.variant.name, plan.head_dim_qk
    torch.manual_seed(keys)
    q, k, v = (torch.randn(1, n, 2, head_dim, device="cuda").bfloat16() for n in (300, keys, keys))
    batched = variant == "learned_allowed_pairs"
    bias = torch.randn(*([1] if batched else []), 2, 300, keys, device="cuda")
    bias = bias if batched else bias.bfloat16()
    blocks = torch.rand(5, 7, device="cuda") < 0.4
    allowed = blocks.repeat_interleave(64, 0)[:300].repeat_interleave(64, 1)[:, :keys]
    given = {"bias": bias.requires_grad_(), **({"allowed": allowed.contiguous()} if batched else {})}
    inputs = [*(tensor.requires_grad_() for tensor in (q, k, v)), bias]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        loss = attention(q, k, v, variant=variant, **given, **options).float().square().sum()
        torch.full_like(bias, torch.nan)  # its memory is free again, and the gradient gets it
        return torch.autograd.grad(loss, inputs)

    ours, theirs = gradients(), gradients(backend="reference")
    close(ours, theirs)


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [("learned_gate", "gate", (4,)), ("learned_decay", "total", (4, 180)), ("learned_window", "table", (4, 91))],
)
def test_gradients_of_gates_and_tables(variant: str, name: str, shape: tuple[int, ...]) -> None:
    q, k, v = leaves()
    own = torch.randn(shape, device="cuda").requires_grad_()

    def loss(**options: Any) -> Tensor:
        return attention(q, k, v, variant=variant, **{name: own}, **options).float().square().sum()

    ours, theirs = (torch.autograd.grad(loss(**o), [q, k, v, own]) for o in ({}, {"backend": "reference"}))
    close(ours, theirs)


def test_tensors_that_were_kept_on_the_host() -> None:
    """Tensors come back from the host contiguous, whatever strides they had."""
    kernels()
    packed = torch.randn(2, 150, 3, 4, 64, device="cuda").bfloat16()
    inputs = [t.detach().requires_grad_() for t in packed.unbind(2)]
    above = torch.randn(2, 150, 4, 64, device="cuda").bfloat16()
    wanted = torch.autograd.grad(attention(*inputs), inputs, above)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = attention(*inputs)
    close(torch.autograd.grad(out, inputs, above), wanted, 4e-3)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "odd"])
def test_gradients_of_any_strides(kind: str) -> None:
    inputs = leaves()
    out = attention(*inputs)
    above = {
        "expanded": lambda: torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape),
        "transposed": lambda: torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
        "odd": lambda: torch.randn(out.numel() + 1, device="cuda").to(out.dtype)[1:].view(out.shape),
    }[kind]()
    theirs = torch.autograd.grad(attention(*inputs, backend="reference"), inputs, above)
    close(torch.autograd.grad(out, inputs, above), theirs)


def test_calls_without_queries_or_keys_have_zero_gradients() -> None:
    kernels()
    for s, keys in ((0, 5), (5, 0)):
        inputs = [torch.randn(2, n, 2, 64, device="cuda").bfloat16().requires_grad_() for n in (s, keys, keys)]
        for tensor, gradient in zip(inputs, torch.autograd.grad(attention(*inputs).sum(), inputs), strict=True):
            assert gradient.shape == tensor.shape
            assert not gradient.any()


def test_a_program_is_compiled_whole() -> None:
    inputs = leaves()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    close(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), 1e-2)


def test_activation_checkpointing() -> None:
    inputs = leaves()
    plain = torch.autograd.grad(attention(*inputs).float().square().sum(), inputs)
    kept = checkpoint(lambda q, k, v: attention(q, k, v), *inputs, use_reentrant=False)
    assert same(plain, torch.autograd.grad(kept.float().square().sum(), inputs))


def test_a_step_is_captured() -> None:
    inputs = leaves()
    above = torch.randn(2, 150, 4, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs), inputs, above)

    graph, captured = in_graph(step)
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, step())


def _has_forward(name: str) -> bool:
    what = name.removeprefix("backward ").removesuffix("-ordered").rpartition("-")[0]
    return any(other.startswith(f"forward {what}-") for other in PLANNED)


def _taken(name: str) -> bool:
    """Whether a call takes this kernel: one in CUDA goes before one in Triton."""
    twins = {f"{name.rpartition('-')[0]}-{schedule}" for schedule in ("wgmma", "cluster")}
    return PLANNED[name][1].backend == "cuda" or twins.isdisjoint(ALL)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "name",
    [name for name in ALL if "-dense-" in name and "learned" not in name and _has_forward(name) and _taken(name)],
)
def test_memory_beside_inputs_and_gradients(name: str, kv_heads: int) -> None:
    """Within the bound of all backward passes; in Triton, two numbers for each row, and tile maps."""
    kernel, plan = kernels()[name], PLANNED[name][1]
    rows, keys = 1500, 1090
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
    case = Case("memory", (rows,) * 2, (keys,) * 2, heads=4, kv_heads=kv_heads)
    given = make_inputs(kernel.variant, case, "dense", element, "cuda", 0)
    call = given.bind(kernel.variant)
    maps = 4 * sum(math.prod(shape) for shape in prepared_shapes(kernel, call)[1].values())
    KEPT.clear()
    leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
    out = attention(*leaves, variant=kernel.variant_name, **given.arguments)
    above = torch.randn_like(out)
    step = partial(torch.autograd.grad, out, leaves, above, retain_graph=True)
    torch.use_deterministic_algorithms(name in ORDERED)
    try:
        for _ in range(2):  # the second use of a map completes it with visible pairs; then it is kept
            step()
        held = workspace(out.device, step)
    finally:
        torch.use_deterministic_algorithms(False)
    assert held > 0
    assert held <= maps + workspace_bound(
        plan, batch=2, seqlen_q=rows, seqlen_k=keys, heads=4, kv_heads=kv_heads
    )  # fmt: skip
    for ((_, owner, *_), *_), entry in kept_maps().items():
        shape = entry.launches.maps[owner]
        assert entry.words is not None
        assert entry.words.numel() <= math.prod(shape.tensor_shape()) + shape.slots * shape.tile_words
    if kernel.backend == "triton":
        assert held <= maps + 2 * 4 * 2 * 4 * rows
