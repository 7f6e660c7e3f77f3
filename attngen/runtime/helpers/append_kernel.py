"""The kernel that appends to caches: which one serves a call, its arguments, and its launch.

What a call with some shapes, strides, dtypes and devices needs is prepared once, as for attention: later ones fill in
addresses and launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.formats import APPEND, APPEND_VARIANT
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.device.driver import Driver
from attngen.runtime.helpers.append_arguments import TENSORS, Append, Sizes, scales_of
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.plain_launch import PlainLaunch
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.select import against_device

#: Those whose rows are read or written 16 bytes at a time, and the axes that kernels take strides of.
_ROWS = {
    **dict.fromkeys(("k", "v", "q", "q_out"), ("b", "s", "h")),
    **dict.fromkeys(("k_cache", "v_cache"), ("page", "s", "h")),
}

#: How kernels name the dtypes of cosines and sines.
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_MOST = 2**31 - 1


class PreparedAppend(PlainLaunch):
    """A kernel with the numbers of one kind of call, whose addresses are given in the order of TENSORS."""

    __slots__ = ()


def prepare(call: Append, sizes: Sizes, rotated: Tensor | None, driver: Driver) -> PreparedAppend | str:
    """Return what launches a call that was checked, or the reason why no kernel takes it.

    ``rotated``: where the queries go.
    """
    kernel = _kernel_for(call.k.dtype, call.k_cache.dtype, call.k.device.index or 0, driver)
    return kernel if isinstance(kernel, str) else prepare_on(kernel, call, sizes, rotated, driver)


def prepare_on(
    kernel: Kernel, call: Append, sizes: Sizes, rotated: Tensor | None, driver: Driver
) -> PreparedAppend | str:
    """As ``prepare``, on one kernel of the call's dtype and device."""
    k, v, device = call.k, call.v, call.k.device.index or 0
    given = {name: getattr(call, name) for name in TENSORS} | {"q_out": rotated}
    reason = _against_rows(given) or _against_tables(given)
    if reason is not None:
        return reason
    vectors, threads = max(k.shape[-1], v.shape[-1]) * k.element_size() // CHUNK_BYTES, kernel.main.entry.threads
    lane_bits = (max(vectors, 1) - 1).bit_length()
    if 1 << lane_bits > threads:
        return f"rows of {vectors} times {CHUNK_BYTES} B; a kernel takes at most {threads}"
    found = {**_sizes(call, sizes), "lane_bits": lane_bits}
    rows = found["tokens"] * (2 * found["kv_heads"] + found["heads"])
    if max(rows + threads, found["max_pages"] * found["page_size"]) > _MOST:
        return "more rows than 32 bits count"
    scales = {
        (name, axis): scale.stride(place)
        for name, scale in scales_of(call, sizes).items() for place, axis in enumerate("bh")
    }  # fmt: skip
    numbers = {**_strides(given, call.page_layout), **scales, **{(name, None): value for name, value in found.items()}}
    return PreparedAppend(kernel, numbers, TENSORS, -(-rows // (threads >> lane_bits)), driver, device)


def _kernel_for(dtype: torch.dtype, cached: torch.dtype, device: int, driver: Driver) -> Kernel | str:
    """Return the first kernel that appends rows of a dtype to caches of maybe another one, or why there is none."""
    reason = f"no package that is found has a kernel that appends to caches of {str(cached).removeprefix('torch.')}"
    reason += "" if cached == dtype else f" from {str(dtype).removeprefix('torch.')}"
    for _, package in registry.packages():
        for kernel in package.kernels(APPEND_VARIANT):
            dtypes = kernel.dtype, kernel.dtype_of("k").name
            if kernel.direction == APPEND and dtypes == (ATTENTION_DTYPES.get(dtype), ATTENTION_DTYPES.get(cached)):
                against = against_device(kernel, device, driver)
                if against is None:
                    return kernel
                reason = f"{kernel.full_name}: {against}"
    return reason


def _against_rows(given: Mapping[str, Tensor | None]) -> str | None:
    """Return why rows cannot be moved 16 bytes at a time, or None."""
    element = given["k"].element_size() if given["k"] is not None else 1
    for name in _ROWS:
        tensor = given[name]
        if tensor is None:
            continue
        size = tensor.element_size()
        whole = CHUNK_BYTES * size // element  # of a cache in fewer bits, a thread writes fewer
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name}'s last dimension is not contiguous"
        if tensor.shape[-1] * size % whole:
            return f"rows of {name} are not a multiple of {whole} B"
        strides = (step for extent, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if extent > 1)
        if tensor.data_ptr() % whole or any(step * size % whole for step in strides):
            return f"{name}'s rows do not all begin at multiples of {whole} B"
    return None


def _against_tables(given: Mapping[str, Tensor | None]) -> str | None:
    """Return why tables cannot be read as they lie, or None."""
    table = given["page_table"]
    if table is not None and table.shape[1] > 1 and table.stride(1) != 1:
        return "rows of page_table are not contiguous"
    for name in ("rotary_cos", "rotary_sin"):
        angles = given[name]
        if angles is None:
            continue
        if angles.dtype not in _FORMS:
            return f"{name} is {str(angles.dtype).removeprefix('torch.')}"
        if not angles.shape[0]:
            return f"{name} has no row"
        if angles.shape[1] > 1 and angles.stride(1) != 1:
            return f"rows of {name} are not contiguous"
    cos, sin = given["rotary_cos"], given["rotary_sin"]
    if cos is not None and sin is not None and cos.dtype != sin.dtype:
        return "rotary_cos and rotary_sin have different dtypes"
    return None


def _strides(given: Mapping[str, Tensor | None], page_layout: str) -> dict[tuple[str, Any], int]:
    """Return strides in elements by tensor and axis; 0 for what a call does not have."""
    found: dict[tuple[str, Any], int] = {}
    for name, axes in _ROWS.items():
        tensor = given[name]
        steps = (0, 0, 0) if tensor is None else tensor.stride()[:-1]
        if name in ("k_cache", "v_cache") and page_layout == "HND":
            steps = (steps[0], steps[2], steps[1])
        if len(steps) == 2:  # packed
            steps = (0, *steps)
        found |= {(name, axis): step for axis, step in zip(axes, steps, strict=True)}
    slots = given["slots"]
    steps = (0, 0) if slots is None else slots.stride()
    found |= {("slots", "b"): steps[0] if len(steps) == 2 else 0, ("slots", "s"): steps[-1]}
    for name, axis in (("page_table", "b"), ("rotary_cos", "s"), ("rotary_sin", "s")):
        tensor = given[name]
        found[name, axis] = 0 if tensor is None else tensor.stride(0)
    return found


def _sizes(call: Append, sizes: Sizes) -> dict[str, int]:
    """Return the other arguments of a launch, by name."""
    k, cos = call.k, call.rotary_cos
    return {
        "tokens": k.shape[:-2].numel(),
        "batch": sizes.batch,
        "seqlen_new": k.shape[-3],
        "heads": 0 if call.q is None else call.q.shape[-2],
        "kv_heads": k.shape[-2],
        "head_dim_qk": k.shape[-1],
        "head_dim_v": call.v.shape[-1],
        "pages": sizes.entries,
        "page_size": sizes.rows,
        "max_pages": 0 if call.page_table is None else call.page_table.shape[1],
        "positions": 0 if cos is None else cos.shape[0],
        "rotary_half": 0 if cos is None else cos.shape[1],
        "rotary_form": 0 if cos is None else _FORMS[cos.dtype],
        "interleaved": int(call.rotary_interleaved),
        "whole_vectors": int(cos is None or _in_whole_vectors(call)),
        "scales_of_pages": int(sizes.of_pages),
        "long_slots": int(call.slots is not None and call.slots.dtype == torch.int64),
    }


def _in_whole_vectors(call: Append) -> bool:
    """Whether 16 bytes of a row are rotated all or not at all, by angles of which two can be read at once."""
    cos, sin, numbers = call.rotary_cos, call.rotary_sin, CHUNK_BYTES // call.k.element_size()
    if cos.shape[1] % (numbers // 2 if call.rotary_interleaved else numbers):
        return False
    pair = 2 * cos.element_size()
    return not any(
        table.data_ptr() % pair or (table.shape[0] > 1 and table.stride(0) * table.element_size() % pair)
        for table in (cos, sin)
    )
