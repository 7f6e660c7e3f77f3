"""Rows and rotary tables as helper kernels read them: checks of a call, reasons against a kernel, and sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.errors import CallError
from attngen.runtime.arguments.shapes import check_rank

#: The dtypes of cosines and sines that kernels read, by the number that they have for each.
ROTARY_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: The largest number of rows that kernels count.
MOST = 2**31 - 1


def check_rotary(
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: object,
    device: torch.device,
    head_dim: int,
    dtypes: Collection[torch.dtype],
) -> None:
    """Raise CallError unless the tables of a rotation fit each other and rows of ``head_dim`` numbers."""
    if not isinstance(interleaved, bool):
        raise CallError(f"rotary_interleaved must be True or False, got {interleaved!r}")
    if (cos is None) != (sin is None):
        raise CallError("rotary_cos and rotary_sin must be passed together")
    if cos is None or sin is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_rank(name, table, 2, "positions x rotary_dim / 2")
        if table.shape != cos.shape or table.dtype not in dtypes or table.device != device:
            raise CallError(
                f"{name} must be a float tensor of shape {tuple(cos.shape)} on {device}, got {table.dtype} of shape "
                f"{tuple(table.shape)} on {table.device}"
            )
    if 2 * cos.shape[1] > head_dim:
        raise CallError(f"rotary_cos turns {2 * cos.shape[1]} numbers, but head_dim is {head_dim}")


def against_rotary(cos: Tensor | None, sin: Tensor | None) -> str | None:
    """The reason why kernels cannot read the tables of a rotation, or None."""
    if cos is None or sin is None:
        return None
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype not in ROTARY_FORMS:
            return f"{name} is {str(table.dtype).removeprefix('torch.')}"
        if not table.shape[0]:
            return f"{name} has no row"
        if table.shape[1] > 1 and table.stride(1) != 1:
            return f"rows of {name} are not contiguous"
    return None if cos.dtype == sin.dtype else "rotary_cos and rotary_sin have different dtypes"


def against_rows(rows: Mapping[str, Tensor | None], element: int) -> str | None:
    """The reason why rows cannot be moved 16 bytes at a time, or None. ``element``: bytes of a number of which a thread
    moves 16; it writes fewer bytes of rows with smaller numbers."""
    for name, tensor in rows.items():
        if tensor is None:
            continue
        size = tensor.element_size()
        whole = CHUNK_BYTES * size // element
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name}'s last dimension is not contiguous"
        if tensor.shape[-1] * size % whole:
            return f"rows of {name} are not a multiple of {whole} B"
        steps = (step for extent, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if extent > 1)
        if tensor.data_ptr() % whole or any(step * size % whole for step in steps):
            return f"{name}'s rows do not all begin at multiples of {whole} B"
    return None


def rotary_sizes(cos: Tensor | None, interleaved: bool) -> dict[str, int]:
    """Sizes of a rotation by name; 0 without one."""
    return {
        "positions": 0 if cos is None else cos.shape[0],
        "rotary_half": 0 if cos is None else cos.shape[1],
        "rotary_form": 0 if cos is None else ROTARY_FORMS[cos.dtype],
        "interleaved": int(cos is not None and interleaved),
    }


def rotary_strides(cos: Tensor | None, sin: Tensor | None) -> dict[tuple[str, str | int | None], int]:
    """Strides of the tables of a rotation; 0 without one."""
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    return {(name, "s"): 0 if table is None else table.stride(0) for name, table in tables.items()}


def in_whole_vectors(cos: Tensor, sin: Tensor, interleaved: bool, numbers: int, together: int) -> bool:
    """Whether vectors of so many numbers are rotated whole or not at all, by angles of which ``together`` are read at
    once."""
    if cos.shape[1] % (numbers // 2 if interleaved else numbers):
        return False
    size = together * cos.element_size()
    return not any(
        table.data_ptr() % size or (table.shape[0] > 1 and table.stride(0) * table.element_size() % size)
        for table in (cos, sin)
    )
