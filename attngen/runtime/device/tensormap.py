"""TMA descriptors of q, k, v and out: which tensors can have one, and a bounded cache of encoded ones.

The driver takes 4 µs to encode one, and 50 where the host has done other work since. Where the layout of descriptors is
known, it encodes the first one of a form: others get their address and their number of rows written into a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import gcd
from struct import Struct

from attngen.dtypes import dtype as dtype_row
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.driver import with_fields
from attngen.runtime.device.interface import Driver

#: Limits of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object Management").
ADDRESS_ALIGNMENT = 16
STRIDE_ALIGNMENT = 16
MAX_STRIDE_BYTES = 2**40
MAX_BOX = 256

#: Descriptors that are kept, of 128 bytes each. Not measured: a bound of memory.
MAX_ENCODED = 4096

_ENCODED: RecentCache[bytes] = RecentCache(MAX_ENCODED)
_TOKENS = count()


def reason_against(name: str, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> str | None:
    """Reason why a tensor cannot be described by a TMA descriptor, or None if it can; the address is not looked at.

    ``strides`` in elements. An axis of extent 1 is never stepped along, so its stride does not matter.
    """
    if strides[-1] != 1 and shape[-1] != 1:
        return f"{name}'s last dimension is not contiguous (stride {strides[-1]})"
    for axis, (extent, stride) in enumerate(zip(shape[:-1], strides[:-1], strict=True)):
        if extent == 1:
            continue
        in_bytes = stride * element_bytes
        if stride == 0:
            return f"{name} is expanded along axis {axis} (stride 0), which a TMA descriptor cannot express"
        if in_bytes % STRIDE_ALIGNMENT:
            return f"{name}'s stride along axis {axis} is {in_bytes} B, which is not a multiple of {STRIDE_ALIGNMENT} B"
        if in_bytes >= MAX_STRIDE_BYTES:
            return f"{name}'s stride along axis {axis} is {in_bytes} B; a TMA descriptor takes less than 2**40 B"
    return None


def usable_strides(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    """Return the strides in elements with a legal one put where the extent is 1 and the stride is arbitrary."""
    step = STRIDE_ALIGNMENT // element_bytes
    return tuple(
        max(step, -(-shape[-1] // step) * step) if extent == 1 and axis < len(shape) - 1 else stride
        for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True))
    )


def smem_box(box: Sequence[int], swizzle: int | None, element_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return the box of one copy, slowest axis first, and its swizzle in bytes.

    A tile wider than the swizzle's span arrives in several copies, so its box is cut to the span. A manifest
    without a swizzle means the widest that the tile fills, which is what Triton chooses.
    """
    if swizzle is None:
        row = box[-1] * element_bytes
        swizzle = next((span for span in (128, 64, 32) if row >= span), 0)
    cut = [min(extent, MAX_BOX) for extent in box]
    if swizzle:
        cut[-1] = min(cut[-1], swizzle // element_bytes)
    return tuple(cut), swizzle


def windowed(
    shape: Sequence[int], strides: Sequence[int], window: int, rows: int = -3
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides in which the axis of ``rows``, the third from last, stands twice: row and place in a
    window.

    A box that starts at (row + n, window - n), ``window`` rows before the tensor, begins at ``row``; its first n rows
    lie inside, and those after them arrive as zeros, whatever memory holds there. So one descriptor serves sequences of
    any length, and the rows of a neighbour are never seen. A box that would show nothing at all, by its rows or its
    columns, must not be asked for: its copy looks up where the descriptor begins, which may be nobody's memory.
    """
    extents, steps = tuple(shape), tuple(strides)
    seen = (*extents[:rows], extents[rows] + 1, window, *extents[rows:][1:])
    return seen, (*steps[:rows], steps[rows], steps[rows], *steps[rows:][1:])


def packed(
    shape: Sequence[int], strides: Sequence[int], box: Sequence[int], group: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return shape, strides and box in which the axis of heads is split, and stands on both sides of that of rows.

    From the slowest: KV heads, rows, the heads of a group. A box of n rows of one head becomes one of n / group rows of
    all heads of a group, which arrive as n rows, heads fastest. ``group`` divides heads, and the rows of the box.
    """
    *outer, rows, heads, width = shape
    *outer_strides, step, head_step, one = strides
    *outer_box, box_rows, _, columns = box
    return (
        (*outer, heads // group, rows, group, width),
        (*outer_strides, group * head_step, step, head_step, one),
        (*outer_box, 1, box_rows // group, group, columns),
    )


def paged(
    shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return shape, strides and box of a cache with the axis of heads outside that of rows: page, KV head, row, column.

    A box has as many rows as divide a page and the rows of the kernel's box, so that none reaches into another page.
    Page number ``pages`` lies outside: its rows arrive as zeros.
    """
    pages, page_size, heads, width = shape
    page_step, step, head_step, one = strides
    *outer, box_rows, columns = box
    box = (*outer, gcd(page_size, box_rows), columns)
    return (pages, heads, page_size, width), (page_step, head_step, step, one), box


def of_own_tensor(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a variant's tensor as its descriptor has them, with three axes at least.

    An axis before those of rows and columns along which the tensor is expanded has one place, which kernels know of.
    """
    *outer, rows, columns = shape
    extents = [1 if stride == 0 else extent for extent, stride in zip(outer, strides, strict=False)] or [1]
    steps = strides[:-2] or (0,)
    return (*extents, rows, columns), (*steps, *strides[-2:])


def columns_first(axes: Sequence[int]) -> tuple[int, ...]:
    """Values for the axes of rows, heads and columns in the order of heads, columns and rows."""
    *outer, rows, heads, columns = axes
    return (*outer, heads, columns, rows)


class TensorMap:
    """Descriptors of tensors that differ in their address, and maybe in their number of rows."""

    __slots__ = (
        "_around", "_box", "_device", "_driver", "_dtype", "_extents", "_pack", "_row_axis", "_rows_more", "_shift",
        "_strides", "_swizzle", "_token",
    )  # fmt: skip

    def __init__(
        self,
        driver: Driver,
        device: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int | None,
        window: int | None = None,
        group: int | None = None,
        in_pages: bool = False,
        transposed: bool = False,
    ) -> None:
        """``shape``, ``strides`` (elements) and ``box`` slowest axis first, as torch has them; ``swizzle`` in bytes.

        ``window`` rows make the descriptor end where a sequence ends: it gets one more axis, see ``windowed``.
        ``group`` query heads share the rows of a box, one more axis: see ``packed``. ``in_pages``: the slowest axis
        is that of pages, and ``box`` has the axes of ``paged``; a window has as many rows as a box then.
        ``transposed``: the axis of rows is the fastest, and ``box`` has the axes of ``columns_first``.
        """
        element_bytes = dtype_row(dtype).bytes
        self._shift, rows = 0, -3
        if transposed:
            shape, strides = columns_first(shape), columns_first(strides)
        if in_pages:
            shape, strides, box = paged(shape, strides, box)
            window, rows = window and box[-2], -2
        if window is not None:
            step = usable_strides(shape, strides, element_bytes)[rows]
            shape, strides = windowed(shape, usable_strides(shape, strides, element_bytes), window, rows)
            self._shift = window * step * element_bytes
        if group is not None:
            shape, strides, box = packed(shape, strides, box, group)
        self._driver, self._device, self._dtype = driver, device, dtype
        cut, self._swizzle = smem_box(box, swizzle, element_bytes)
        self._box = tuple(reversed(cut))
        self._extents = tuple(reversed(shape))
        #: The axis of rows among the extents, and by how much its extent exceeds their number.
        self._row_axis, self._rows_more = (2, 0) if window is None else (3, 1)
        in_bytes = tuple(stride * element_bytes for stride in usable_strides(shape, strides, element_bytes))
        self._strides = tuple(reversed(in_bytes[:-1]))
        self._token = next(_TOKENS)
        #: Packer of a descriptor from its address and its rows less 1, and the bytes between and behind these; None
        #: before the driver has encoded one, and where the layout is not known.
        self._pack: Callable[..., bytes] | None = None
        self._around = b"", b""

    def at(self, address: int, rows: int = 0) -> bytes:
        """Return the descriptor of the tensor at an address: 128 bytes, from the cache if it was asked for before.

        ``rows``, more than 1: those of a tensor of more than one row that is neither in pages nor transposed; 0: as
        many as the shape has.
        """
        if self._pack is not None and not address % ADDRESS_ALIGNMENT:
            last = (rows or self._extents[self._row_axis] - self._rows_more) + self._rows_more - 1
            between, behind = self._around
            return self._pack(address - self._shift, between, last, behind)
        key = (address, rows, self._token)
        encoded = _ENCODED[key]
        if encoded is None:
            axis, extents = self._row_axis, self._extents
            if rows:
                extents = (*extents[:axis], rows + self._rows_more, *extents[axis + 1 :])
            encoded = self._driver.encode_tensor_map(
                self._dtype, address - self._shift, extents, self._strides, self._box, self._swizzle, self._device
            )
            _ENCODED.put(key, encoded)
            place = self._driver.extent_at(len(extents), axis, self._device)
            if place is not None and encoded == with_fields(encoded, place, address - self._shift, extents[axis] - 1):
                self._around = encoded[8:place], encoded[place + 4 :]
                self._pack = Struct(f"<Q{place - 8}sI{len(encoded) - place - 4}s").pack
        return encoded
