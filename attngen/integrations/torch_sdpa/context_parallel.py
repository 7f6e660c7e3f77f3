"""Attention of programs that know nothing of plans, within ``attngen.parallel``: SDPA, flash-attn, transformers.

    with attngen.integrations.context_parallel.context_parallel(plan, buffers=[x, labels], buffer_seq_dims=[1, 1]):
        loss = model(x, ...)

Inside, calls of ``scaled_dot_product_attention``, of attngen's own functions, and of what ``attngen.integrations``
offers, attend to the keys of all ranks. Each rank passes its tokens: buffers are cut to them in place, as torch's
``context_parallel`` does, and are whole again afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import attngen
from attngen.errors import CallError
from attngen.runtime.operations.attention import entry

_Plan = Any  # of attngen.parallel, which imports more than integrations may

#: Arguments of ``attngen.attention`` that calls within a plan have too.
_OPTIONS = ("softmax_scale", "return_lse", "layout", "backend", "package", "deterministic")

#: Those that they do not have.
_WITHOUT = ("seqused_k", "q_descale", "k_descale", "v_descale", "out_dtype")


@contextmanager
def context_parallel(
    plan: _Plan, *, buffers: Sequence[Tensor] = (), buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Attend by ``plan`` inside: its tokens are those of each rank, whatever the variants of the calls.

    ``buffers`` hold all tokens along ``buffer_seq_dims`` (1 by default), and inside those of this rank; those of
    ``no_restore_buffers`` stay so. Positions that a model adds or rotates by are ``plan.positions()``: pass them to it,
    or a buffer of them. What a call's mask reads is the same on all ranks and holds all tokens. Raises CallError for a
    call of other tokens, and for what plans do not take, such as dropout and attention masks as tensors of SDPA.
    """
    if not hasattr(plan, "also"):
        raise CallError(f"context_parallel takes a plan of attngen.parallel.plan, got {type(plan).__name__}")
    dims = [1] * len(buffers) if buffer_seq_dims is None else list(buffer_seq_dims)
    if len(dims) != len(buffers):
        raise CallError(f"there are {len(buffers)} buffers, but {len(dims)} buffer_seq_dims")
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    whole = [None if id(buffer) in kept else buffer.detach().clone() for buffer in buffers]
    parts = [plan.shard(buffer.detach(), dim) for buffer, dim in zip(buffers, dims, strict=True)]
    with ExitStack() as stack:
        stack.callback(_set, buffers, whole)
        _set(buffers, parts)
        routed, packed = _attention(plan), _refused
        for module in (attngen, entry):
            for name, function in (("attention", routed), ("attention_varlen", packed)):
                _replace(stack, module, name, function)
        _replace(stack, functional, "scaled_dot_product_attention", _sdpa(plan))
        if "transformers" in sys.modules:
            _replace_in_transformers(stack, plan)
        yield


def _set(buffers: Sequence[Tensor], contents: Sequence[Tensor | None]) -> None:
    """Give buffers other contents, in place."""
    with torch.no_grad():
        for buffer, content in zip(buffers, contents, strict=True):
            if content is not None:
                buffer.resize_(content.shape)
                buffer.copy_(content)


def _replace(stack: ExitStack, module: Any, name: str, function: Callable[..., Any]) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, function)


def _attention(plan: _Plan) -> Callable[..., Any]:
    """``attngen.attention`` for the tokens of a rank."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, variant: Any = "full", **given: Any) -> Any:
        for name in _WITHOUT:
            if given.pop(name, None) is not None:
                raise CallError(f"{name} is not for calls inside context_parallel")
        given.pop("tile_map", None)  # which would be that of all tokens
        options = {name: given.pop(name) for name in _OPTIONS if name in given}
        fixed = {name: given.pop(name) for name in plan.fixes(variant, options.get("package")) if name in given}
        return attend(plan.also(variant, **fixed), q, k, v, given, options)

    return attention


def attend(plan: _Plan, q: Tensor, k: Tensor, v: Tensor, values: dict[str, Any], options: dict[str, Any]) -> Any:
    """Attention of (batch, tokens, heads, head_dim), of packed documents with a batch of 1."""
    axis = 2 if options.get("layout") == "bhsd" else 1
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[axis] != plan.tokens():
            raise CallError(
                f"{name} has shape {tuple(x.shape)}; allowed inside context_parallel: the {plan.tokens()} tokens of "
                f"this rank along axis {axis}"
            )
    if plan.cu_seqlens is None:
        return plan.attention(q, k, v, **options, **values)
    if q.shape[0] != 1:
        raise CallError(f"documents are packed into a batch of 1, got {q.shape[0]}")
    q, k, v = (x.transpose(1, 2)[0] if axis == 2 else x[0] for x in (q, k, v))
    result = plan.attention(q, k, v, **{**options, "layout": "bshd"}, **values)
    out, lse = result if options.get("return_lse") else (result, None)
    out = out[None].transpose(1, 2) if axis == 2 else out[None]
    return out if lse is None else (out, lse[None])


def _refused(*_: Any, **__: Any) -> Any:
    raise CallError(
        "packed sequences inside context_parallel belong to its plan: make it with cu_seqlens=, and call functions of "
        "dense tensors with a batch of 1"
    )


def _sdpa(plan: _Plan) -> Callable[..., Tensor]:
    """torch's function for the tokens of a rank."""

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None:
            raise CallError("attn_mask inside context_parallel: pass a variant to attngen.attention instead")
        if dropout_p:
            raise CallError("dropout_p inside context_parallel must be 0")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise CallError(f"query has {query.shape[1]} heads and key {key.shape[1]}; allowed: enable_gqa=True")
        options = {"layout": "bhsd", "softmax_scale": scale}
        out: Tensor = attend(plan.also("causal" if is_causal else "full"), query, key, value, {}, options)
        return out

    return scaled_dot_product_attention


def _replace_in_transformers(stack: ExitStack, plan: _Plan) -> None:
    """Have models with ``attn_implementation="attngen"`` attend by a plan, without masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from attngen.integrations.transformers.implementation import NAME

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
        softcap: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None or (dropout and module.training):
            raise CallError("models inside context_parallel take neither attention masks nor dropout")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        name, fixed, values = "causal", {}, {}
        if not causal:
            name = "full"
        elif sliding_window is not None:
            name, fixed = "sliding_window", {"window": sliding_window}
        if softcap is not None:
            name, values = {"causal": "softcap", "sliding_window": "softcap_window"}.get(name, name), {"cap": softcap}
        if s_aux is not None:
            name, values = f"{name}_sink", {**values, "sinks": s_aux.float()}
        out: Tensor = attend(
            plan.also(name, **fixed), query, key, value, values, {"layout": "bhsd", "softmax_scale": scaling}
        )
        return out.transpose(1, 2).contiguous(), None

    for interface, function in ((AttentionInterface, attention), (AttentionMaskInterface, lambda *_, **__: None)):
        before = interface._global_mapping.get(NAME)
        interface.register(NAME, function)
        if before is not None:
            stack.callback(interface.register, NAME, before)
        else:
            stack.callback(interface._global_mapping.pop, NAME, None)
