"""Bytes of a row that one copy loads."""

from __future__ import annotations

from attngen.dtypes import SWIZZLE_BYTES, DType
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Columns
from attngen.plan.operands import Operands
from attngen.schema.kernel_spec import KernelSpec

#: Bytes of a row that one copy may load, swizzled: the most that divide the rows of all operands. Rows are padded to
#: a multiple of the fewest.
BOX_BYTES = (SWIZZLE_BYTES, 64)

#: Bytes of a row of V where a kernel transposes it, so that no copy loads it.
TRANSPOSED_BYTES = (*BOX_BYTES, 32)


def widths(head_dim: int, element: DType, parts: int = 1) -> Columns:
    """Return the columns that a head dim takes in shared memory: whole copies, of each of its ``parts``."""
    columns = parts * BOX_BYTES[-1] // element.bytes
    return Columns(0, -(-head_dim // columns) * columns, head_dim)


def is_paged(spec: KernelSpec) -> bool:
    return LAYOUTS[spec.layout].key_access == "paged"


def operand_widths(spec: KernelSpec, operands: Operands) -> tuple[Columns, Columns]:
    """Return the columns of q and k, and those of v. A copy of a page may bring a single row, of 128 bytes then: it
    begins at a multiple of these in shared memory."""
    parts = BOX_BYTES[0] // BOX_BYTES[-1] if is_paged(spec) else 1
    return widths(spec.head_dim_qk, operands.q, parts), widths(spec.head_dim_v, operands.v, parts)


def widest_box(*row_bytes: int, among: tuple[int, ...] = BOX_BYTES) -> int:
    """Return the bytes of a row of one copy: the most of which each of ``row_bytes`` is a whole number."""
    return next(box for box in among if all(size % box == 0 for size in row_bytes))
