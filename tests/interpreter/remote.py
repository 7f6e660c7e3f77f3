"""Functions that run in the interpreter's process. Arguments and results are plain values, so that they can be sent."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attngen.inspect.cases import Case
from attngen.inspect.gradient_contract import expected_gradients
from attngen.lab.verify import interpreter
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lab.verify.interpreter import Interpreted, prepare_process
from attngen.lab.verify.poison import poisoned, poisoned_gradients
from attngen.lab.verify.trial import try_backward, try_jvp, try_kernel
from attngen.lang.variant import Variant
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.launch.pinned import Buffers, prepared_shapes
from attngen.schema import expand, load_spec_text
from tests.map_oracle import bits_of, tiled, visible
from tests.runtime.eager_map import eager_tile_map

prepare_process()
gc.freeze()  # as in tests/conftest.py: garbage is looked for seldom, and never among modules
gc.set_threshold(50_000, 20, 20)

HEADER = "schema: 1\npackage: tested\narch: [sm90a]\n"

Spoil = Callable[["Ready"], None]


@cache
def kernel(text: str) -> Interpreted:
    """Return the one kernel of a spec, rendered and ready to run. ``text`` lacks the header."""
    (spec,) = expand(load_spec_text(HEADER + text))
    planned = plan(spec)
    return Interpreted(planned, render(planned).text)


def planned(text: str) -> Plan:
    """Return the plan of the one kernel of a spec."""
    (spec,) = expand(load_spec_text(HEADER + text))
    return plan(spec)


def part(third: int | None) -> slice:
    """Cases that are run: all, or every third one from one of the first three."""
    return slice(None) if third is None else slice(third, None, 3)


def problems(text: str, seed: int, third: int | None = None) -> tuple[str, ...]:
    """Problems of a kernel on all of its cases, or on a third of them."""
    run = kernel(text)
    return try_kernel(run.kernel, run, "cpu", seed, small=True, part=part(third)).problems


def gradient_problems(text: str, seed: int, third: int | None = None) -> tuple[str, ...]:
    """Problems of a backward on all of its cases, or on a third of them."""
    run = kernel(text)
    return try_backward(run.kernel, run.differentiate, "cpu", seed, small=True, part=part(third)).problems


def tangent_problems(text: str, tile: tuple[int, int] | None, seed: int, third: int | None = None) -> tuple[str, ...]:
    """Problems of a forward-mode derivative on all of its cases or a third, with a tile in place of those of the plan,
    unless it is None."""
    (spec,) = expand(load_spec_text(HEADER + text))
    planned = plan(replace(spec, tile_m=tile[0], tile_n=tile[1]) if tile else spec)
    run = Interpreted(planned, render(planned).text)
    return try_jvp(run.kernel, run.derive, "cpu", seed, small=True, part=part(third)).problems


def gradients_with(
    text: str, case: Case, changes: list[tuple[str, int, int, float]], arguments: Mapping[str, Any]
) -> Any:
    """Return (dq, dk, dv) as numpy, after keys ``lo`` to ``hi`` of k or v of every sequence were set to a value.

    The forward's results are those of the unchanged inputs.
    """
    one = ready(text, case, **arguments)
    q, k, v = one.inputs.q, one.inputs.k, one.inputs.v
    wanted = expected_gradients(one.call, q, k, v, torch.Generator().manual_seed(0))
    for name, lo, hi, value in changes:
        getattr(one.inputs, name)[:, lo:hi] = value
    given = {"q": q, "k": k, "v": v, "out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}
    buffers, memory = poisoned_gradients(one.run.kernel, one.call, given, wanted.dlse.contiguous())
    one.run.differentiate(one.call, buffers)
    assert memory.overrun() == ()
    return tuple(gradient.float().numpy() for gradient in (buffers.dq, buffers.dk, buffers.dv))


def trained(forward: str, backward: str, case: Case, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs, results and gradients of a forward, and of a backward that takes its results: float64, by name."""
    one = ready(forward, case, **arguments)
    one.launch()
    q, k, v = one.inputs.q, one.inputs.k, one.inputs.v
    dout = torch.randn(one.out.shape, generator=torch.Generator().manual_seed(1)).to(one.out.dtype)
    run = kernel(backward)
    given = {"q": q, "k": k, "v": v, "out": one.out, "lse": one.lse, "dout": dout}
    buffers, memory = poisoned_gradients(run.kernel, one.call, given, torch.zeros_like(one.lse))
    run.differentiate(one.call, buffers)
    assert memory.overrun() == ()
    given |= {"dq": buffers.dq, "dk": buffers.dk, "dv": buffers.dv}
    return {name: tensor.double() for name, tensor in given.items()}


@dataclass
class Ready:
    """A kernel, inputs that a test may change, and the call."""

    run: Interpreted
    inputs: Inputs
    call: Call
    out: Tensor = field(init=False)
    lse: Tensor = field(init=False)

    @property
    def variant(self) -> Variant:
        """The variant of the kernel."""
        return self.run.kernel.variant

    def launch(self) -> None:
        """Run the kernel into fresh poisoned results."""
        memory = poisoned(self.run.kernel, self.call, self.inputs.q, self.inputs.k, self.inputs.v)
        buffers = memory.buffers
        self.run(self.call, buffers)
        assert buffers.lse is not None
        assert memory.overrun() == ()
        self.out, self.lse = buffers.out, buffers.lse


def ready(text: str, case: Case, seed: int = 0, **arguments: Any) -> Ready:
    """Return a kernel with random inputs; ``arguments`` replaces scalars."""
    run = kernel(text)
    element = Element(run.kernel.dtype, run.kernel.head_dim_qk, run.kernel.head_dim_v)
    made = make_inputs(run.kernel.variant, case, run.kernel.layout, element, "cpu", seed)
    inputs = Inputs(made.q, made.k, made.v, made.packing, made.seqused_k, {**made.arguments, **arguments})
    return Ready(run, inputs, inputs.bind(run.kernel.variant))


def outputs_with(
    text: str, case: Case, changes: list[tuple[str, int, int, float]], arguments: Mapping[str, Any]
) -> Any:
    """Return (out, lse) as numpy, after keys ``lo`` to ``hi`` of k or v of every sequence were set to a value."""
    one = ready(text, case, **arguments)
    for name, lo, hi, value in changes:
        getattr(one.inputs, name)[:, lo:hi] = value
    one.launch()
    return one.out.float().numpy(), one.lse.numpy()


def unquickened(function: str, *arguments: Any) -> Any:
    """Call a function of this module with the interpreter as it is; before any other call."""
    interpreter.quicken = lambda: None  # type: ignore[assignment]
    return globals()[function](*arguments)


def padded_output(text: str, case: Case) -> tuple[bool, bool]:
    """Whether a strided output equals a contiguous one, and whether nothing around it was written."""
    one = ready(text, case)
    one.launch()
    canary = 77.0
    b, s, h, d = one.out.shape
    surrounded = torch.full((b + 2, s + 6, h + 2, d + 16), canary, dtype=one.out.dtype)
    inner = (slice(1, b + 1), slice(3, s + 3), slice(1, h + 1), slice(8, d + 8))
    lse = torch.full((one.lse.numel() + 64,), canary)
    shapes = prepared_shapes(one.run.kernel, one.call)[1]
    words = torch.zeros(shapes["forward"], dtype=torch.int32) if shapes else None
    own = lse[32:-32].view(one.lse.shape)
    one.run(one.call, Buffers(one.inputs.q, one.inputs.k, one.inputs.v, surrounded[inner], own, words))
    same = bool(torch.equal(surrounded[inner], one.out)) and bool(torch.equal(own, one.lse))
    surrounded[inner] = canary
    untouched = bool((surrounded == canary).all() and (lse[:32] == canary).all() and (lse[-32:] == canary).all())
    return same, untouched


def without_lse(text: str, case: Case) -> bool:
    """Whether the output is the same when no log-sum-exp is asked for."""
    one = ready(text, case)
    one.launch()
    call = bind(
        one.variant, one.inputs.q, one.inputs.k, one.inputs.v, None, softmax_scale=None,
        seqused_k=one.inputs.seqused_k, return_lse=False, layout="bshd", arguments=one.inputs.arguments,
    )  # fmt: skip
    out = torch.full_like(one.out, torch.nan)
    one.run(call, Buffers(one.inputs.q, one.inputs.k, one.inputs.v, out))
    return bool(torch.equal(out, one.out))


def with_strides(text: str, kind: str) -> tuple[float, float]:
    """Return the largest difference between strided and contiguous inputs, and of an output in order bhsd."""
    run = kernel(text)
    generator = torch.Generator().manual_seed(3)
    d = run.kernel.head_dim_qk
    dtype = {"fp16": torch.float16, "fp32": torch.float32}[run.kernel.dtype]
    packed = torch.randn((2, 37, 3, 2, d), generator=generator).to(dtype)
    q, k, v = packed.unbind(2)
    order = "bshd"
    if kind == "padded":
        q, k, v = (torch.nn.functional.pad(t.contiguous(), (0, 16))[..., :d] for t in (q, k, v))
    elif kind == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        order = "bhsd"
    elif kind == "transposed view":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif kind == "expanded":
        k, v = (t[:1, :, :1].expand(2, 37, 2, d) for t in (k, v))
    elif kind == "odd offset":
        flat = torch.zeros(packed[:, :, 0].numel() + 1, dtype=dtype)
        q = flat[1:].view(2, 37, 2, d).copy_(q)
    else:
        assert kind == "slices of packed qkv"

    def run_on(q: Tensor, k: Tensor, v: Tensor, order: str) -> Tensor:
        call = bind(
            run.kernel.variant, q, k, v, None, softmax_scale=0.3, seqused_k=None, return_lse=True, layout=order,
            arguments={},
        )  # fmt: skip
        out = torch.full(call.out_shape(), torch.nan, dtype=dtype)
        run(call, Buffers(q, k, v, out, torch.full(call.lse_shape(), torch.nan)))
        return out.transpose(1, 2) if order == "bhsd" else out

    strided = run_on(q, k, v, order)
    plain = [t.transpose(1, 2) if order == "bhsd" else t for t in (q, k, v)]
    contiguous = run_on(*(t.contiguous() for t in plain), "bshd")
    return float((strided.float() - contiguous.float()).abs().max()), float(contiguous.float().abs().max())


def alone_and_in_batch(text: str, case: Case) -> bool:
    """Whether the last sequence of a batch alone gives the same bits as in the batch (dense)."""
    one = ready(text, case)
    one.launch()
    last = slice(case.batch - 1, case.batch)
    inputs = one.inputs
    arguments = {
        name: value[last] if isinstance(value, Tensor) and value.dim() and value.shape[0] == case.batch else value
        for name, value in inputs.arguments.items()
    }
    used = None if inputs.seqused_k is None else inputs.seqused_k[last]
    alone = Inputs(inputs.q[last], inputs.k[last], inputs.v[last], None, used, arguments)
    single = Ready(one.run, alone, alone.bind(one.variant))
    single.launch()
    return bool(torch.equal(single.out, one.out[last])) and bool(torch.equal(single.lse, one.lse[last]))


def map_is_right(text: str, case: Case, seed: int) -> bool:
    """Whether the classifier's map equals the one made from the mask by the reference."""
    one = ready(text, case, seed)
    kernel_ = one.run.kernel
    buffers = poisoned(kernel_, one.call, one.inputs.q, one.inputs.k, one.inputs.v).buffers
    one.run(one.call, buffers)
    assert buffers.words is not None
    batch, heads = (extent > 1 for extent in buffers.words.shape[:2])
    wanted = eager_tile_map(one.call, kernel_.tile_m, kernel_.tile_n, per_batch=batch, per_head=heads)
    return bool(torch.equal(buffers.words, wanted.expand_as(buffers.words)))


def gradient_maps_are_right(text: str, case: Case, seed: int) -> bool:
    """Whether the maps of a backward, of which rows list tiles of keys or of queries, are those of the mask."""
    one = ready(text, case, seed)
    given = {"q": one.inputs.q, "k": one.inputs.k, "v": one.inputs.v}
    wanted = expected_gradients(one.call, *given.values(), torch.Generator().manual_seed(0))
    given |= {"out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}
    buffers, _ = poisoned_gradients(one.run.kernel, one.call, given, wanted.dlse.contiguous())
    one.run.differentiate(one.call, buffers)
    assert set(buffers.words) == {"dkdv", "dq"}
    launches = {launch.name: launch for launch in planned(text).launches}
    for name, words in buffers.words.items():
        tiles = launches[name].tile_m, launches[name].tile_n
        for b, masks in enumerate(visible(one.call)[: len(words)]):
            for h, mask in enumerate(masks[: words.shape[1]]):
                kinds = tiled(mask, *tiles)[:2] if name == "dq" else tiled(mask.T, *tiles[::-1])[:2]
                for kind, bits in zip(kinds, bits_of(words[b, h]).unbind(1), strict=True):
                    if not torch.equal(bits[: kind.shape[0], : kind.shape[1]], kind) or bits.sum() != kind.sum():
                        return False
    return True


def large_logits(text: str, size: float) -> tuple[bool, bool]:
    """Whether out and lse are finite for queries and keys of this size."""
    one = ready(text, Case("large", (33,), (70,), heads=1))
    for name in ("q", "k"):
        tensor = getattr(one.inputs, name)
        tensor.copy_(torch.sign(tensor.float()).to(tensor.dtype) * size)
    one.launch()
    return bool(torch.isfinite(one.out).all()), bool(torch.isfinite(one.lse).all())


def decode_and_prefill(text: str) -> float:
    """Return the largest difference between the last row of a prefill and that query alone."""
    one = ready(text, Case("prefill", (45,), (61,), heads=2))
    one.launch()
    alone = Inputs(one.inputs.q[:, -1:], one.inputs.k, one.inputs.v)
    single = Ready(one.run, alone, alone.bind(one.variant))
    single.launch()
    return float((single.out.float() - one.out[:, -1:].float()).abs().max())


def rows_with_nan(text: str, case: Case, name: str, key: int) -> Any:
    """(b, s, h) rows that hold a NaN after one key of k or v did, and the rows that changed."""
    before = ready(text, case)
    before.launch()
    after = ready(text, case)
    getattr(after.inputs, name)[:, key] = math.nan
    after.launch()
    nan = after.out.isnan().any(-1)
    changed = (after.out != before.out).any(-1)
    return nan.numpy(), changed.numpy()


def varlen_rows_untouched(text: str) -> bool:
    """Whether rows of no sequence are left as they were."""
    run = kernel(text)
    d = run.kernel.head_dim_qk
    q, k = torch.randn(40, 2, d).half(), torch.randn(50, 1, d).half()
    packing = Packing(torch.tensor([0, 20, 33]).int(), torch.tensor([0, 30, 41]).int(), 20, 30)
    call = Inputs(q, k, k, packing).bind(run.kernel.variant)
    out, lse = torch.full((40, 2, d), 5.0).half(), torch.full((2, 40), 5.0)
    run(call, Buffers(q, k, k, out, lse))
    return bool((out[33:] == 5).all() and (lse[:, 33:] == 5).all() and not (out[:33] == 5).all())
