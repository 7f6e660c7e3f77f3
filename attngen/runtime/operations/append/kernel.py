"""The kernel that appends to caches: the one that serves a call, its arguments, and its launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.operations import APPEND, APPEND_VARIANT
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, contiguous_view
from attngen.runtime.arguments.latent_rows import latent_name
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.append.arguments import FIELDS, Append, AppendSizes, scales_of
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, Key, LaunchOperands, Resized
from attngen.runtime.operations.shared.operands import (
    MOST,
    against_rotary,
    against_rows,
    in_whole_vectors,
    rotary_sizes,
    rotary_strides,
)
from attngen.runtime.operations.shared.path import first_that_takes, kernels_of

#: Those whose rows are read or written 16 bytes at a time, and the axes that kernels take strides of.
_ROWS = {
    **dict.fromkeys(("k", "v", "q", "q_out"), ("b", "s", "h")),
    **dict.fromkeys(("k_cache", "v_cache"), ("page", "s", "h")),
}

_Q_OUT = FIELDS.tensors.index("q_out")

#: Numbers in which calls of one kind differ.
_CHANGING: tuple[Key, ...] = ("tokens", "batch", "seqlen_new", "max_pages", ("page_table", "b"))


class PreparedAppend(HelperLaunches):
    """The launch of one kind of call that appends."""

    __slots__ = ("_rows_of_block",)

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, count: int, rows: int, driver: Driver, device: int
    ) -> None:
        """``count``: rows of all tokens, of which a block moves so many ``rows``. Raises LoadError as its base does."""
        self._rows_of_block = rows
        super().__init__(kernel, operands, [Grid(kernel.main.entry, -(-count // rows))], driver, device, _CHANGING)

    def resize(self, count: int, changes: Mapping[Key, int]) -> Resized:
        """The launch of a call with another number of rows, and with all numbers that change between calls."""
        return self.resized(changes, [-(-count // self._rows_of_block)])

    def run(self, call: Append, addresses: list[int], resized: Resized | None = None) -> Tensor | None:
        """Append, and return the rotated queries."""
        rotated, q = call.q_out, call.q
        if rotated is None and q is not None:
            rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            addresses[_Q_OUT] = rotated.data_ptr()
        self(addresses, resized)
        into: Tensor | None = rotated
        return into


def prepare(call: Append, sizes: AppendSizes, driver: Driver) -> PreparedAppend | str:
    """Launch of a checked call on the first kernel that takes it, or the reason why none does."""
    names = [str(dtype).removeprefix("torch.") for dtype in (call.k_cache.dtype, call.k.dtype)]
    missing = f"no package that is found has a kernel that appends to caches of {names[0]}"
    missing += "" if names[0] == names[1] else f" from {names[1]}"
    cached = latent_name(call.k_cache) or ATTENTION_DTYPES.get(call.k_cache.dtype)
    kernels = (one for one in kernels_of(APPEND, APPEND_VARIANT, call.k.dtype) if one.dtype_of("k").name == cached)
    return first_that_takes(
        kernels, call.k.device.index or 0, driver, lambda kernel: prepare_on(kernel, call, sizes, driver), missing
    )


def prepare_on(kernel: Kernel, call: Append, sizes: AppendSizes, driver: Driver) -> PreparedAppend | str:
    """Launch of a checked call on one kernel of its dtype and device, or the reason against it."""
    if not sizes.tokens:
        return "there is no token"
    k, v = call.k, call.v
    rows: dict[str, Tensor | None] = {name: getattr(call, name) for name in _ROWS}
    reason = against_rows(rows, k.element_size()) or _against_table(call.page_table)
    reason = reason or against_rotary(call.rotary_cos, call.rotary_sin)
    if reason is not None:
        return reason
    vectors, threads = max(k.shape[-1], v.shape[-1]) * k.element_size() // CHUNK_BYTES, kernel.main.entry.threads
    lane_bits = (max(vectors, 1) - 1).bit_length()
    if 1 << lane_bits > threads:
        return f"rows of {vectors} times {CHUNK_BYTES} B; a kernel takes at most {threads}"
    numbers = {**_sizes(call, sizes), "lane_bits": lane_bits}
    count = sizes.tokens * (2 * numbers["kv_heads"] + numbers["heads"])
    if max(count + threads, numbers["max_pages"] * sizes.rows) > MOST:
        return "more rows than 32 bits count"
    operands = LaunchOperands(FIELDS.tensors, numbers, _strides(call, sizes, rows))
    return PreparedAppend(kernel, operands, count, threads >> lane_bits, driver, k.device.index or 0)


def _against_table(page_table: Tensor | None) -> str | None:
    if page_table is not None and page_table.shape[1] > 1 and page_table.stride(1) != 1:
        return "rows of page_table are not contiguous"
    return None


def _strides(
    call: Append, sizes: AppendSizes, rows: Mapping[str, Tensor | None]
) -> dict[tuple[str, str | int | None], int]:
    """Strides in elements by tensor and axis; 0 for tensors that a call does not have."""
    strides = rotary_strides(call.rotary_cos, call.rotary_sin)
    for name, axes in _ROWS.items():
        tensor = rows[name]
        steps = (0, 0, 0) if tensor is None else tensor.stride()[:-1]
        if name == "q_out" and tensor is None and call.q is not None:  # made by each call
            steps = contiguous_view(call.q.shape, "bshd" if call.q.dim() == 4 else "thd").strides[:-1]
        if name in ("k_cache", "v_cache") and call.page_layout == "HND":
            steps = (steps[0], steps[2], steps[1])
        if len(steps) == 2:  # packed
            steps = (0, *steps)
        strides |= {(name, axis): step for axis, step in zip(axes, steps, strict=True)}
    steps = (0, 0) if call.slots is None else call.slots.stride()
    strides |= {("slots", "b"): steps[0] if len(steps) == 2 else 0, ("slots", "s"): steps[-1]}
    strides["page_table", "b"] = 0 if call.page_table is None else call.page_table.stride(0)
    for name, scale in scales_of(call, sizes).items():
        steps = scale.stride() if sizes.of_rows else (*scale.stride(), 0)
        strides |= {(name, axis): step for axis, step in zip("bhs", steps, strict=True)}
    return strides


def _sizes(call: Append, sizes: AppendSizes) -> dict[str, int]:
    """The other arguments of a launch, by name."""
    k, cos, sin, interleaved = call.k, call.rotary_cos, call.rotary_sin, call.rotary_interleaved
    return {
        **rotary_sizes(cos, interleaved),
        "tokens": sizes.tokens,
        "batch": sizes.batch,
        "seqlen_new": k.shape[-3],
        "heads": 0 if call.q is None else call.q.shape[-2],
        "kv_heads": k.shape[-2],
        "head_dim_qk": k.shape[-1],
        "head_dim_v": call.v.shape[-1],
        "pages": sizes.entries,
        "page_size": sizes.rows,
        "max_pages": 0 if call.page_table is None else call.page_table.shape[1],
        "whole_vectors": int(
            cos is None or in_whole_vectors(cos, sin, interleaved, CHUNK_BYTES // k.element_size(), together=2)
        ),
        "scales_of_pages": int(sizes.of_pages or sizes.of_rows),
        "scales_of_rows": int(sizes.of_rows),
        "long_slots": int(call.slots is not None and call.slots.dtype == torch.int64),
    }
