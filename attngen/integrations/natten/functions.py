"""NATTEN's functions on kernels of attngen: ``na1d``, ``na2d`` and ``na3d``, argument for argument.

Tokens are brought into the order of boxes, and results back. Keys that all queries see follow the tokens of the grid,
so that one call serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.integrations.natten.boxes import Axes, Axis, Boxes, chosen
from attngen.integrations.natten.order import BoxOrder
from attngen.integrations.shared.arguments import contiguous_last, tensor
from attngen.integrations.shared.choice import VariantCandidate, attend
from attngen.runtime.arguments.torch_state import is_compiling

__all__ = ["na1d", "na2d", "na3d"]

#: The shipped spec that builds what these functions ask for.
_SPEC = "natten"

#: Kernels of NATTEN, and their schedules: accepted without effect.
_BACKENDS = ("cutlass-fna", "hopper-fna", "blackwell-fna", "flex-fna")
_SCHEDULES = ("non", "coop", "pp")

#: Arguments of ``natten.attention`` that tune its kernels: accepted without effect.
_ATTENTION_KWARGS = frozenset((
    "backend", "q_tile_size", "kv_tile_size", "backward_q_tile_size", "backward_kv_tile_size", "backward_kv_splits",
    "backward_use_pt_reduction", "run_persistent_kernel", "kernel_schedule", "torch_compile",
))  # fmt: skip

_GRIDS = {1: "(batch, tokens, heads, head_dim)", 2: "(batch, X, Y, heads, head_dim)",
          3: "(batch, X, Y, Z, heads, head_dim)"}  # fmt: skip


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighbourhood attention along one axis.

    Args:
        query: (batch, tokens, heads, head_dim), bfloat16 or float16 on a GPU.
        key: The same with key heads, of which heads is a multiple.
        value: As ``key``, with a head dimension of its own.
        kernel_size: Keys of a window, at most ``tokens // dilation``. Windows at the ends of the axis are shifted, so
            that each query sees as many keys.
        stride: Queries that share the window of the middle one of them, or with ``is_causal`` of the last one; at most
            ``kernel_size``.
        dilation: Distance of the keys of a window.
        is_causal: A window ends with its query instead, and is not shifted.
        scale: Factor of query · key; 1/√head_dim by default.
        additional_keys: (batch, keys, key heads, head_dim), further keys that all queries see.
        additional_values: Their values.
        attention_kwargs: Accepted without effect, as ``backend``, tile shapes and all further arguments that choose or
            tune NATTEN's kernels.
        return_lse: Also return the log-sum-exp.

    Returns:
        The output, with the shape of ``query`` and the head dimension of ``value``, and with ``return_lse`` the natural
        log-sum-exp (batch, tokens, heads), float32.

    Raises:
        CallError: Arguments are wrong or contradict each other; it is a ValueError.
        NoKernelError: No kernel takes the call; it names the spec to build.
    """
    _check_tuning(backend, kernel_schedule, attention_kwargs)
    more = additional_keys, additional_values
    return _neighbourhood(1, query, key, value, kernel_size, stride, dilation, is_causal, scale, more, return_lse)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighbourhood attention on a grid (batch, X, Y, heads, head_dim): as ``na1d`` along each axis.

    ``kernel_size``, ``stride``, ``dilation`` and ``is_causal`` have a value for each axis, or one for both. A query
    sees the keys that are in its window along both axes.
    """
    _check_tuning(backend, kernel_schedule, attention_kwargs)
    more = additional_keys, additional_values
    return _neighbourhood(2, query, key, value, kernel_size, stride, dilation, is_causal, scale, more, return_lse)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighbourhood attention on a grid (batch, X, Y, Z, heads, head_dim): as ``na2d`` along three axes."""
    _check_tuning(backend, kernel_schedule, attention_kwargs)
    more = additional_keys, additional_values
    return _neighbourhood(3, query, key, value, kernel_size, stride, dilation, is_causal, scale, more, return_lse)


class Neighbourhoods(NamedTuple):
    """The orders of queries and of keys, the scalars of the variant ``natten``, and the boxes that were chosen."""

    queries: BoxOrder
    keys: BoxOrder
    scalars: Mapping[str, int]
    boxes: Boxes


def orders_of(axes: Axes) -> Neighbourhoods:
    """Return the orders of tokens for neighbourhoods along three axes, kept outside of traces."""
    return _orders(axes, _traced_boxes(axes)) if is_compiling() else _kept_orders(axes)


@lru_cache(maxsize=256)
def _kept_orders(axes: Axes) -> Neighbourhoods:
    return _orders(axes, chosen(axes))


@torch.compiler.assume_constant_result
def _traced_boxes(axes: Axes) -> Boxes:
    return _kept_orders(axes).boxes


def _orders(axes: Axes, boxes: Boxes) -> Neighbourhoods:
    first, second, third = (axis.extent(*lengths) for axis, *lengths in zip(axes, boxes.q, boxes.k, strict=True))
    tokens = axes[0].tokens, axes[1].tokens, axes[2].tokens
    dilations = axes[0].dilation, axes[1].dilation, axes[2].dilation
    extents = first, second, third
    queries, keys = (BoxOrder(tokens, dilations, extents, lengths) for lengths in (boxes.q, boxes.k))
    scalars: dict[str, int] = {}
    for name, order in (("q", queries), ("k", keys)):
        scalars |= {f"{name}_boxes{axis}": order.boxes[axis] for axis in (1, 2)}
        scalars |= {f"{name}_bits{axis}": order.lengths[axis].bit_length() - 1 for axis in range(3)}
    for number, (axis, extent) in enumerate(zip(axes, extents, strict=True)):
        own = {
            "extent": extent,
            "tokens": axis.tokens // axis.dilation,
            "longer": axis.tokens % axis.dilation * extent,
            "size": axis.size,
            "step": axis.step,
            "leader": axis.leader,
            "before": axis.before,
            "beyond": 1 if axis.causal else extent,
        }
        scalars |= {f"{name}{number}": value for name, value in own.items()}
    return Neighbourhoods(queries, keys, scalars, boxes)


def _neighbourhood(
    rank: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Any,
    stride: Any,
    dilation: Any,
    is_causal: Any,
    scale: float | None,
    more: tuple[Tensor | None, Tensor | None],
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    more_keys, more_values = more
    grid = _check_tensors(rank, query, key, value, more_keys, more_values)
    axes = _axes(grid, kernel_size, stride, dilation, is_causal)
    whole = all(axis.size == axis.tokens and not axis.causal for axis in axes)
    causal = rank == 1 and axes[2].size == axes[2].tokens and more_keys is None
    arguments: Mapping[str, int] = {}
    if whole or causal:
        variant = "full" if whole else "causal"
        q, k, v = (given.flatten(1, rank) for given in (query, key, value))
        if more_keys is not None and more_values is not None:
            k, v = torch.cat([k, more_keys], dim=1), torch.cat([v, more_values], dim=1)
    else:
        variant = "natten" if more_keys is None else "natten_and_more"
        ones = (1,) * (3 - rank)
        q, k, v = (given.reshape(given.shape[0], *ones, *given.shape[1:]) for given in (query, key, value))
        queries, keys, arguments, _ = orders_of(axes)
        if more_keys is not None:
            arguments = {**arguments, "own": keys.rows}
        q, k, v = queries.to_rows(q), keys.to_rows(k, more_keys), keys.to_rows(v, more_values)
    q, k, v = (contiguous_last(given) for given in (q, k, v))
    result = attend(
        [VariantCandidate(variant, arguments)], q, k, v, spec=_SPEC, softmax_scale=scale or None, return_lse=return_lse
    )
    out, lse = result if return_lse else (result, None)
    if lse is not None:
        lse = lse.transpose(1, 2)
    if not (whole or causal):
        out, lse = queries.to_grid(out), None if lse is None else queries.to_grid(lse)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return out if lse is None else (out, lse.reshape(query.shape[:-1]))


def _check_tensors(
    rank: int, query: Tensor, key: Tensor, value: Tensor, more_keys: Tensor | None, more_values: Tensor | None
) -> tuple[int, ...]:
    """Check shapes against each other, and return the tokens along each axis of the grid."""
    for name, given in (("query", query), ("key", key), ("value", value)):
        if tensor(name, given).dim() != rank + 3:
            raise CallError(f"{name} must be {_GRIDS[rank]}, got shape {tuple(given.shape)}")
    for name, given in (("key", key), ("value", value)):
        if given.shape[: rank + 1] != query.shape[: rank + 1]:
            wanted, got = tuple(query.shape[: rank + 1]), tuple(given.shape[: rank + 1])
            raise CallError(f"{name} must have the batch and the tokens of query, {wanted}, got {got}")
    if (more_keys is None) != (more_values is None):
        missing = "additional_keys" if more_keys is None else "additional_values"
        raise CallError(f"{missing} is missing: additional_keys and additional_values come together")
    if more_keys is not None:
        for name, given, like in (("additional_keys", more_keys, key), ("additional_values", more_values, value)):
            shape, wanted = tuple(tensor(name, given).shape), (key.shape[0], *like.shape[-2:])
            if len(shape) != 4 or (shape[0], *shape[2:]) != wanted or shape[1] != more_keys.shape[1]:
                batch, heads, columns = wanted
                count = more_keys.shape[1] if more_keys.dim() == 4 and name == "additional_values" else "keys"
                raise CallError(f"{name} must have shape ({batch}, {count}, {heads}, {columns}), got {shape}")
    return tuple(_number(tokens) for tokens in query.shape[1 : rank + 1])


def _axes(grid: tuple[int, ...], kernel_size: Any, stride: Any, dilation: Any, is_causal: Any) -> Axes:
    """Check the neighbourhood against the grid, and return it along three axes; one token along those that lack."""
    rank = len(grid)
    sizes, steps, dilations = (
        _integers(name, 1 if given is None and name != "kernel_size" else given, rank)
        for name, given in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
    )
    causal = _by_axis("is_causal", False if is_causal is None else is_causal, rank)
    if not all(isinstance(one, bool) for one in causal):
        raise CallError(f"is_causal must be a bool, or {rank} of them, got {is_causal!r}")
    axes = [Axis(1, 1, 1, 1, causal=False)] * (3 - rank)
    for axis, given in enumerate(zip(grid, sizes, steps, dilations, causal, strict=True)):
        tokens, size, step, gap, _ = given
        if size * gap > tokens:
            raise CallError(
                f"kernel_size {size} with dilation {gap} does not fit into the {tokens} tokens of axis {axis}; "
                f"allowed: at most {tokens // gap}"
            )
        if step > size:
            raise CallError(f"stride {step} of axis {axis} exceeds its kernel_size; allowed: at most {size}")
        axes.append(Axis(*given))
    first, second, third = axes
    return first, second, third


def _integers(name: str, given: Any, rank: int) -> Sequence[int]:
    values = _by_axis(name, given, rank)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in values):
        raise CallError(f"{name} must be a positive integer, or {rank} of them, got {given!r}")
    return tuple(_number(one) for one in values)


def _number(value: int) -> int:
    """The value itself, and never a symbol of a compiled program: boxes depend on it."""
    return len(range(value))


def _by_axis(name: str, given: Any, rank: int) -> Sequence[Any]:
    """One value for each axis, from a sequence of them or a single value."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return (given,) * rank
    if len(given) != rank:
        raise CallError(f"{name} must have one value, or one for each of {rank} axes, got {len(given)}: {given!r}")
    return tuple(given)


def _check_tuning(backend: Any, kernel_schedule: Any, attention_kwargs: Mapping[str, Any] | None) -> None:
    """Refuse names that NATTEN lacks; those that it has choose among its own kernels."""
    for name, given, allowed in (("backend", backend, _BACKENDS), ("kernel_schedule", kernel_schedule, _SCHEDULES)):
        if isinstance(given, str) and given not in allowed:
            names = ", ".join(allowed)
            raise CallError(f"{name} must be None or one of {names}, got {given!r}{suggest(given, allowed)}")
    for name in attention_kwargs or {}:
        if name not in _ATTENTION_KWARGS:
            raise CallError(f"attention_kwargs: '{name}' is not supported{suggest(str(name), _ATTENTION_KWARGS)}")
