"""The kernel of ``gathers``: sums of listed rows of up to three tensors, or of as many pairs, such as K and V."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def gather(
    out, out_2, first, first_2, second, second_2, third, third_2, table, places,
    out_row, first_row, second_row, third_row, out_batch, first_batch, second_batch, third_batch,
    rows, depth, width, second_at, third_at, row_blocks, column_blocks,
    sources: tl.constexpr, pairs: tl.constexpr, one: tl.constexpr, placed: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """A block computes ``block_rows`` rows and ``block_columns`` columns of one sequence, of ``out`` or of ``out_2``.

    ``table`` has ``depth`` rows of the sources for each row of the result, -1 for none; rows of the second source count
    from ``second_at``, those of the third from ``third_at``. Both tensors of a pair have the same strides. A sequence
    has ``row_blocks * column_blocks`` blocks of each tensor.
    """
    number = tl.program_id(0)
    row = (number % row_blocks) * block_rows + tl.arange(0, block_rows)
    number = number // row_blocks
    block = number % column_blocks
    number = number // column_blocks
    if pairs:
        side = number % 2
        number = number // 2
        if side == 1:
            out = out_2
            first = first_2
            second = second_2
            third = third_2
    column = (block * block_columns + tl.arange(0, block_columns))[None, :]
    batch = number.to(tl.int64)
    first += batch * first_batch
    second += batch * second_batch
    third += batch * third_batch
    if one:
        result = _listed(
            tl.load(table + row, mask=row < rows, other=-1), column, width, first, second, third, second_at, third_at,
            first_row, second_row, third_row, sources,
        )  # fmt: skip
    else:
        total = tl.zeros([block_rows, block_columns], dtype=tl.float32)
        for step in range(depth):
            total += _listed(
                tl.load(table + step * rows + row, mask=row < rows, other=-1), column, width, first, second, third,
                second_at, third_at, first_row, second_row, third_row, sources,
            ).to(tl.float32)  # fmt: skip
        result = total.to(out.dtype.element_ty)
    place = tl.load(places + row, mask=row < rows, other=0) if placed else row
    to = (out + batch * out_batch) + place.to(tl.int64)[:, None] * out_row
    tl.store(to + column, result, mask=(row < rows)[:, None] & (column < width))


@triton.jit
def _listed(
    listed, column, width, first, second, third, second_at, third_at, first_row, second_row, third_row,
    sources: tl.constexpr,
):  # fmt: skip
    """The rows that are listed, 0 for none. Each source is loaded from with a mask of its own: 16 bytes at a time,
    which a pointer that may be either's would not allow."""
    at = listed.to(tl.int64)[:, None]
    there = (at >= 0) & (column < width)
    if sources == 1:
        return tl.load(first + at * first_row + column, mask=there, other=0.0)
    result = tl.load(first + at * first_row + column, mask=there & (at < second_at), other=0.0)
    if sources == 2:
        own = at >= second_at
        return tl.where(own, tl.load(second + (at - second_at) * second_row + column, mask=there & own, other=0.0),
                        result)  # fmt: skip
    own = (at >= second_at) & (at < third_at)
    result = tl.where(own, tl.load(second + (at - second_at) * second_row + column, mask=there & own, other=0.0),
                      result)  # fmt: skip
    own = at >= third_at
    return tl.where(own, tl.load(third + (at - third_at) * third_row + column, mask=there & own, other=0.0), result)
