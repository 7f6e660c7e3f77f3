"""Checks of calls on arrays of JAX, on the CPU: ``python -m tests.runtime.jax_arrays`` prints the error of each."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, h, 16).to(dtype) for n, h in ((3, 4), (5, 2), (5, 2)))


def arrays_of(*tensors: Tensor) -> list[Any]:
    """Arrays of JAX that hold the same."""
    import jax.numpy as jnp

    return [jnp.array(jnp.from_dlpack(tensor.contiguous()), copy=True) for tensor in tensors]


def same(result: Any, wanted: Tensor) -> None:
    import jax

    assert isinstance(result, jax.Array), type(result)
    assert torch.equal(torch.from_dlpack(result).view(torch.uint8), wanted.contiguous().view(torch.uint8))


def refused(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(CallError, match=told):
        call()


@check
def dense() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = qkv(dtype)
        out, lse = attngen.attention(*arrays_of(*tensors), variant="causal", return_lse=True)
        wanted, wanted_lse = attngen.attention(*tensors, variant="causal", return_lse=True)
        same(out, wanted)
        same(lse, wanted_lse)


@check
def eight_bits() -> None:
    """``quantize`` returns float8, and attention takes it with its scales."""
    tensors = qkv(torch.bfloat16)
    ours, wanted = attngen.quantize(*arrays_of(*tensors)), attngen.quantize(*tensors)
    for one, other in zip(ours, wanted, strict=True):
        same(one, other)
    same(
        attngen.attention(ours.q, ours.k, ours.v, **ours.descales),
        attngen.attention(wanted.q, wanted.k, wanted.v, **wanted.descales),
    )


@check
def packed_pages_and_merge() -> None:
    q, k, v = (torch.randn(n, h, 16) for n, h in ((6, 4), (9, 2), (9, 2)))
    starts_q, starts_k = (torch.tensor(rows, dtype=torch.int32) for rows in ([0, 1, 6], [0, 3, 9]))
    packed = (*arrays_of(q, k, v, starts_q, starts_k), 5, 6)
    out, lse = attngen.attention_varlen(*packed, return_lse=True)
    wanted, wanted_lse = attngen.attention_varlen(q, k, v, starts_q, starts_k, 5, 6, return_lse=True)
    same(out, wanted)
    same(lse, wanted_lse)
    for one, other in zip(
        attngen.merge([out, out], [lse, lse]), attngen.merge([wanted] * 2, [wanted_lse] * 2), strict=True
    ):
        same(one, other)
    pages = torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)
    table, used = torch.tensor([[0, 2, 1], [3, 5, 4]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
    tensors = q[:2, None], *pages, table, used
    same(attngen.attention_paged(*arrays_of(*tensors)), attngen.attention_paged(*tensors))


@check
def what_is_computed_later_is_waited_for() -> None:
    import jax.numpy as jnp

    product = jnp.ones((1500, 1500))
    for _ in range(4):
        product = product @ product / 1500
    q = product[:4, :16].reshape(1, 1, 4, 16)
    assert bool((attngen.attention(q, q, q) == 1).all())


@check
def nothing_is_copied() -> None:
    from attngen.runtime.arguments import arrays

    (q,) = arrays_of(qkv()[0])
    result = arrays.serve(lambda q: [q, q.data_ptr(), torch.ones(64)], {"q": q})
    assert result[0] is q
    assert result[1] == q.unsafe_buffer_pointer()


@check
def arrays_are_not_written() -> None:
    q, k, v = arrays_of(*qkv())
    pages, table, used = (
        torch.zeros(6, 4, 2, 16),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    k_pages, v_pages, page_table, lengths = arrays_of(pages, pages, table, used)
    refused(
        lambda: attngen.append_kv(k, v, k_pages, v_pages, lengths, page_table=page_table),
        "k_cache is written, and is an array of jax.numpy; allowed: arrays of CuPy and numpy",
    )
    refused(
        lambda: attngen.attention_paged(q, k_pages, v_pages, page_table, lengths, out=q),
        "out is written, and is an array of jax.numpy",
    )


@check
def gradients_and_traces_are_refused() -> None:
    import jax

    q, k, v = arrays_of(*qkv())
    told = r"{} is traced by JAX \({}\), as in jax.grad, jax.jit and jax.vmap: .* no gradient"
    refused(lambda: jax.grad(lambda x: attngen.attention(x, k, v).sum())(q), told.format("q", r"\w*Tracer"))
    refused(lambda: jax.grad(lambda x: attngen.attention(q, k, x).sum())(v), told.format("v", r"\w*Tracer"))
    refused(lambda: jax.jit(lambda x: attngen.attention(q, x, v))(k), told.format("k", "DynamicJaxprTracer"))
    refused(lambda: jax.vmap(lambda x: attngen.attention(x, x, x))(k[None]), told.format("q", "BatchTracer"))
    tensor = qkv()[0]
    refused(lambda: jax.jit(lambda x: attngen.attention(tensor, x, x))(k), told.format("k", "DynamicJaxprTracer"))


@check
def a_callback_serves_compiled_programs() -> None:
    import jax
    import numpy as np

    (k,), wanted = arrays_of(qkv()[1]), qkv()[1]

    def program(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda one: np.asarray(attngen.attention(one, one, one)), shape, x)

    same(jax.jit(program)(k), attngen.attention(wanted, wanted, wanted))


@check
def kinds_are_not_mixed() -> None:
    tensors = qkv()
    q, k, v = arrays_of(*tensors)
    refused(
        lambda: attngen.attention(q, tensors[1].numpy(), v), "q is an array of jax.numpy, but k is an array of numpy"
    )
    refused(lambda: attngen.attention(q, k, tensors[2]), "q is an array of jax.numpy, but v is a torch.Tensor")
    k.delete()
    refused(lambda: attngen.attention(q, k, v), "k: torch takes no such array of jax.numpy, dtype float32")


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    outcomes = {}
    for name, function in CHECKS.items():
        try:
            function()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
