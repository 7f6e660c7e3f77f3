"""One call that appends to caches, run now: by a kernel where one takes it, else in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.keys import note
from attngen.runtime.autograd.transforms import refuse
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.helpers import append_torch
from attngen.runtime.helpers.append_arguments import TENSORS, Append, check
from attngen.runtime.helpers.append_kernel import PreparedAppend, prepare
from attngen.runtime.registry.lookup import registry

#: Kinds of calls that are kept prepared; a text says why no kernel takes one.
_PREPARED: RecentCache[PreparedAppend | str] = RecentCache(1024)


def run(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None, page_table: Tensor | None,
    slots: Tensor | None, batch_index: Tensor | None, cu_seqlens: Tensor | None, page_layout: str, q: Tensor | None,
    q_out: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None, rotary_interleaved: bool,
    rotary_offsets: Tensor | None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Append now, whether the call comes from a program or from an operator."""
    if torch_state.transforms_active() or forward_ad._current_level >= 0:
        tensors = k, v, k_cache, v_cache, q, q_out, rotary_cos, rotary_sin, k_descale, v_descale
        refuse("append_kv", (*tensors, cache_seqlens, page_table, slots, batch_index, cu_seqlens, rotary_offsets))
    rotated, addresses = q_out, []
    key: list[Any] = [page_layout, rotary_interleaved, registry.generation]
    on_gpu, checked = torch_state.on_gpu(k), debugging.active()
    if on_gpu:
        if q_out is None and isinstance(q, Tensor):
            rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        addresses = [
            note(key, tensor)
            for tensor in (
                k, v, q, rotated, k_cache, v_cache, cache_seqlens, page_table, batch_index, cu_seqlens, rotary_offsets,
                slots, rotary_cos, rotary_sin, k_descale, v_descale,
            )
        ]  # fmt: skip
        prepared = None if checked else _kept(tuple(key))
        if isinstance(prepared, PreparedAppend):
            prepared(addresses)
            return rotated
    call = Append(
        k, v, k_cache, v_cache, cache_seqlens, page_table, slots, batch_index, cu_seqlens, page_layout, q, q_out,
        rotary_cos, rotary_sin, rotary_interleaved, rotary_offsets, k_descale, v_descale,
    )  # fmt: skip
    sizes = check(call)
    if not sizes.batch or not k.shape[:-2].numel():
        return q if q is None or q_out is None else q_out.copy_(q)
    if checked or k.device.type == "cpu":
        append_torch.check_contents(call, sizes)
    if on_gpu:
        prepared = _PREPARED[tuple(key)]
        if prepared is None:
            prepared = prepare(call, sizes, rotated, drivers.current())
            _PREPARED.put(tuple(key), prepared)
        if isinstance(prepared, PreparedAppend):
            prepared(addresses)
            return rotated
    return append_torch.append(call, sizes)


def addresses_of(call: Append, rotated: Tensor | None) -> list[int]:
    """Return the addresses that a launch takes; ``rotated``: where the queries go."""
    given = ((rotated if name == "q_out" else getattr(call, name)) for name in TENSORS)
    return [0 if tensor is None else tensor.data_ptr() for tensor in given]


def _kept(identity: tuple[Any, ...]) -> PreparedAppend | str | None:
    """Return what was prepared for a key; None for an unknown one, and for one of arguments that are refused."""
    try:
        return _PREPARED[identity]
    except TypeError:  # something that cannot be hashed stands where a name belongs
        return None
