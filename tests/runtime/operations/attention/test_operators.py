"""The typed operators: schemas, compiled programs without a graph break, opcheck, gradients through a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.operations.attention.operators import operators_of, schema_of
from attngen.runtime.operations.shared.library import namespace_of
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.runtime.support import FakeDriver, bias_variant, kernel, variant, window_variant
from tests.sampling import sampled


def install(*variants: Any, package: str = "ops") -> None:
    registry.add(package_of_kernels([kernel(v, package=package) for v in variants], "memory"))


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 12, 4, 8, dtype=dtype), *(torch.randn(2, 20, 2, 8, dtype=dtype) for _ in range(2))]


def graded_variant() -> Any:
    return variant(
        "graded", "q_pos >= kv", score="s + slope[h] * (kv - q_pos) + 0 * shift[kv]",
        tensors=[Declared("slope", "fp32", ("h",), grad=True), Declared("shift", "int32", ("seqlen_k",))],
    )  # fmt: skip


def test_schemas_are_typed() -> None:
    assert schema_of(bias_variant(), packed=False) == (
        "(Tensor q, Tensor k, Tensor v, Tensor table, SymInt limit, bool loud, float gain, SymInt radius, "
        "float? softmax_scale, Tensor? seqused_k, Tensor? tile_map, str layout, str? backend, "
        "bool deterministic=False, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
        "ScalarType? out_dtype=None) -> (Tensor out, Tensor lse)"
    )
    assert "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q" in schema_of(variant(), packed=True)
    assert namespace_of("aten") == "attngen_aten"
    assert namespace_of("attngen_hopper") == "attngen_hopper"


def test_operators_are_defined_once_and_anew_for_other_arguments() -> None:
    install(window_variant("again"))
    namespace, name, _ = operators_of("again")
    assert (namespace, name) == ("attngen_ops", "again")
    assert operators_of("ops/again")[1] == "again"
    registry.clear()
    install(variant("again"))
    assert operators_of("again")[1] == "again__2"


def test_operators_can_be_defined_before_any_call() -> None:
    install(variant("first"), window_variant("second"), package="early")
    assert attngen.define_operators("second") == ("attngen_early::second",)
    assert "first" not in vars(torch.ops.attngen_early)
    assert attngen.define_operators() == ("attngen_early::first", "attngen_early::second")
    q, k, v = tensors()
    out, _ = torch.ops.attngen_early.first(q, k, v, None, None, None, "bshd", None)
    assert torch.equal(out, attngen.attention(q, k, v, variant="first"))
    with pytest.raises(NoKernelError, match="'secnd' is built; did you mean 'second'"):
        attngen.define_operators("secnd")


@pytest.mark.exhaustive
@sampled(always=1, backend=["eager", "aot_eager"], dynamic=[False, True])
def test_a_program_compiles_without_a_graph_break(backend: str, dynamic: bool) -> None:
    install(bias_variant())
    q, k, v = tensors()
    table = torch.randn(4, 11)

    def program(q: Any, k: Any, v: Any, table: Any, radius: int) -> Any:
        out, lse = attngen.attention(
            q * 2, k, v, variant="bias", table=table, limit=k.shape[1] - 1, radius=radius, return_lse=True
        )
        return out + 1, lse.exp()

    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (12, 7):
        ours, theirs = (f(q[:, :length], k, v, table, 5) for f in (compiled, program))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.exhaustive
def test_a_varlen_program_compiles() -> None:
    install(window_variant())
    q, k, v = (t.flatten(0, 1) for t in tensors())
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 24], [0, 20, 40]))
    used = torch.tensor([9, 20], dtype=torch.int32)

    def program(q: Any, k: Any, v: Any) -> Any:
        return attngen.attention_varlen(
            q, k, v, cu_q, cu_k, 19, 20, variant="window", window=4, seqused_k=used, package="ops"
        )

    torch.testing.assert_close(torch.compile(program, fullgraph=True, backend="aot_eager")(q, k, v), program(q, k, v))


@pytest.mark.exhaustive
@sampled(always=1, learns=[False, True], packed=[False, True])
def test_lengths_and_batches_that_change_are_compiled_once(packed: bool, learns: bool) -> None:
    install(window_variant())

    def program(q: Any, k: Any, v: Any, starts: Any, longest: int) -> Any:
        options: dict[str, Any] = {"variant": "window", "window": 4}
        if packed:
            return attngen.attention_varlen(q, k, v, starts, starts, longest, longest, **options) * 2
        return attngen.attention(q, k, v, **options) * 2

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for turn, (batch, length) in enumerate(((6, 12), (3, 30), (9, 5), (5, 21))):
        inputs = [torch.randn(batch, length, heads, 8, requires_grad=learns) for heads in (4, 2, 2)]
        starts = length * torch.arange(batch + 1, dtype=torch.int32)
        given = [t.flatten(0, 1) for t in inputs] if packed else inputs
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            ours = compiled(*given, starts, length)
        theirs = program(*given, starts, length)
        torch.testing.assert_close(ours, theirs)
        if learns:
            for one, other in zip(*(torch.autograd.grad(t.sum(), inputs) for t in (ours, theirs)), strict=True):
                torch.testing.assert_close(one, other)


def test_gradients_flow_through_a_program() -> None:
    install(graded_variant())
    slope, shift = torch.rand(4, requires_grad=True), torch.zeros(20, dtype=torch.int32)
    inputs = [t.requires_grad_() for t in tensors()]

    def program(q: Any, k: Any, v: Any, slope: Any) -> Any:
        out, lse = attngen.attention(q, k, v, variant="graded", slope=slope, shift=shift, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs, slope), (*inputs, slope))
    theirs = torch.autograd.grad(program(*inputs, slope), (*inputs, slope))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.exhaustive
def test_opcheck() -> None:
    install(graded_variant(), window_variant())
    inputs = [t.requires_grad_() for t in tensors()]
    slope, shift = torch.rand(4, requires_grad=True), torch.zeros(20, dtype=torch.int32)
    namespace, name, _ = operators_of("graded")
    operator = getattr(getattr(torch.ops, namespace), name).default
    torch.library.opcheck(operator, (*inputs, slope, shift, 0.5, None, None, "bshd", None))
    turned = [t.detach().transpose(1, 2) for t in inputs]
    torch.library.opcheck(operator, (*turned, slope.detach(), shift, None, None, None, "bhsd", "reference"))
    namespace, name, _ = operators_of("window")
    operator = getattr(getattr(torch.ops, namespace), f"{name}__varlen").default
    cu = torch.tensor([0, 3, 24], dtype=torch.int32)
    packed = [t.detach().flatten(0, 1)[:24].requires_grad_() for t in inputs]
    torch.library.opcheck(operator, (*packed, cu, cu, 21, 21, 4, None, None, None, "varlen", None))


@pytest.mark.exhaustive
def test_opcheck_of_the_backward() -> None:
    install(graded_variant())
    inputs = tensors()
    own = torch.rand(4), torch.zeros(20, dtype=torch.int32), 0.5
    namespace, name, _ = operators_of("graded")
    forward, backward = (getattr(getattr(torch.ops, namespace), n).default for n in (name, f"{name}__backward"))
    out, lse = forward(*inputs, *own, None, None, "bshd", None)
    above = torch.randn_like(out), torch.randn_like(lse)
    torch.library.opcheck(backward, (*above, out, lse, *inputs, *own, None, None, "bshd", None))


@pytest.mark.exhaustive
def test_a_step_that_is_traced_whole_has_its_gradients() -> None:
    """The step's graph runs with autograd left out of dispatch, so that the reference must record for itself."""
    install(variant("whole"))
    inputs = tensors()

    def step(q: Any, k: Any, v: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attngen.attention(*leaves, variant="whole").square().sum(), leaves)

    traced = make_fx(step, tracing_mode="fake")(*inputs)
    for a, b in zip(torch.compile(traced, backend="aot_eager")(*inputs), step(*inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_results_that_a_program_does_not_use_have_no_gradient(used: str) -> None:
    """A program would fill zeros for it, and a kernel read them."""
    install(variant("part"))
    given = [t.requires_grad_() for t in tensors()]
    namespace, name, _ = operators_of("part")
    above: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith(f"{namespace}.{name}__backward"):
                above.extend(args[:2])
            return func(*args, **(kwargs or {}))

    out, lse = getattr(getattr(torch.ops, namespace), name)(*given, None, None, None, "bshd", None)
    result = {"out": out, "lse": lse}[used].square().sum()
    with Watch():
        gradients = torch.autograd.grad(result, given, allow_unused=True)
    assert [one is None for one in above] == [used != "out", used != "lse"]
    out, lse = attngen.attention(*given, variant="part", return_lse=True)  # type: ignore[misc]
    wanted = torch.autograd.grad({"out": out, "lse": lse}[used].square().sum(), given, allow_unused=True)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives_of_an_operator(*, packed: bool) -> None:
    install(graded_variant())
    namespace, name, _ = operators_of("graded")
    operator = getattr(getattr(torch.ops, namespace), f"{name}__varlen" if packed else name)
    shift = torch.zeros(7 if packed else 20, dtype=torch.int32)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    results = []
    for traced in (True, False):
        q, k, v = (t.flatten(0, 1)[:12] if packed else t for t in tensors())
        slope = torch.linspace(0.1, 0.9, 4)
        given = [t.requires_grad_() for t in (q, k, v, slope)]
        packing = (starts, starts, 7, 7) if packed else ()
        if traced:
            layout = "varlen" if packed else "bshd"
            out, lse = operator(q, k, v, *packing, slope, shift, 0.5, None, None, layout, None)
        else:
            call = attngen.attention_varlen if packed else attngen.attention
            options: dict[str, Any] = {"slope": slope, "shift": shift, "softmax_scale": 0.5, "return_lse": True}
            out, lse = call(q, k, v, *packing, variant="graded", **options)  # type: ignore[operator]
        above = torch.linspace(-1, 1, out.numel()).view(out.shape).requires_grad_()
        first = torch.autograd.grad((out, lse.sum()), given, (above, torch.ones(())), create_graph=True)
        results.append((*first, *torch.autograd.grad([t.square().sum() for t in first], (*given, above))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_fake_tensors_and_meta_tensors_take_the_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    install(window_variant())
    with FakeTensorMode():
        q, k, v = tensors()
        out, lse = attngen.attention(q, k, v, variant="window", window=3, return_lse=True)
        assert out.shape == (2, 12, 4, 8)
        assert lse.shape == (2, 4, 12)
    q, k, v = (t.to("meta") for t in tensors())
    assert attngen.attention(q, k, v, variant="window", window=3).is_meta


def test_wrong_arguments_are_refused_while_tracing() -> None:
    install(window_variant())
    q, k, v = tensors()
    for arguments, message in (({"windw": 3}, "did you mean 'window'"), ({}, "missing 'window'")):
        with pytest.raises(Exception, match=message):
            torch.compile(
                lambda q, k, v, a=arguments: attngen.attention(q, k, v, variant="window", **a),
                fullgraph=True, backend="eager",
            )(q, k, v)  # fmt: skip


def test_an_undeclared_gradient_is_refused() -> None:
    install(bias_variant())
    q, k, v = tensors()
    table = torch.randn(4, 11, requires_grad=True)

    def program(table: Any) -> Any:
        return attngen.attention(q, k, v, variant="bias", table=table, limit=20, radius=5).sum()

    with pytest.raises(CallError, match="tensor 'table' requires a gradient that its spec does not declare"):
        namespace, name, _ = operators_of("bias")
        operator = getattr(getattr(torch.ops, namespace), name)
        operator(q, k, v, table, 20, False, 1.0, 5, None, None, None, "bshd", None)
    assert torch.autograd.grad(program(table), table)[0].shape == table.shape


def test_a_compiled_program_launches_the_kernel(gpu: FakeDriver) -> None:
    install(window_variant("launched"))
    q, k, v = (torch.randn(1, 40, 2, 64).to(torch.bfloat16) for _ in range(3))

    def program(q: Any, k: Any, v: Any) -> Any:
        return attngen.attention(q, k, v, variant="launched", window=9)

    out = torch.compile(program, fullgraph=True, backend="aot_eager")(q, k, v)
    assert len(gpu.launches) == 1
    torch.testing.assert_close(out, attngen.attention(q, k, v, variant="launched", window=9, backend="reference"))


def test_no_kernel_for_a_compiled_program(gpu: FakeDriver) -> None:
    install(window_variant("unfit"))
    q, k, v = tensors(torch.bfloat16)
    program = torch.compile(
        lambda q, k, v: attngen.attention(q, k, v, variant="unfit", window=9), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(NoKernelError, match="head_dim of q and k is 64, the call has 8"):
        program(q, k, v)


@pytest.mark.exhaustive
def test_parts_of_a_batch_of_unbacked_size() -> None:
    """One program for all batches, of which nothing is known when it is compiled."""

    def program(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        first, rest = (attngen.attention(t, t, t, variant="causal") for t in (x[:half], x[half:]))
        return first.sum() + rest.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for turn, batch in enumerate((4, 3, 7)):
        x = torch.randn(batch, 9, 2, 8, requires_grad=True)
        mark_unbacked(x, 0)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            ours, theirs = (torch.autograd.grad(run(x), x)[0] for run in (compiled, program))
        torch.testing.assert_close(ours, theirs)
