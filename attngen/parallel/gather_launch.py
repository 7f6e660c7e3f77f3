"""Launches of the kernel of ``gathers``: a cubin that Triton compiles when it is first needed, without a C compiler,
launched by attngen's own driver calls, which take a tenth of the host time of Triton's."""

from __future__ import annotations

from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch

from attngen.errors import LoadError
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Frame

#: Most sources that the kernel reads.
SOURCES = 3

#: Elements of a block, and most columns of one; its warps. Not measured.
_ELEMENTS, _COLUMNS = 4096, 512
_WARPS = 4

#: Dtypes that the kernel adds up, by the names of Triton.
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

#: Tensors, strides and sizes of the kernel, in the order of its parameters.
_POINTERS, _STRIDES, _SIZES = 10, 8, 7
_VALUES = Struct(f"{_POINTERS}Q{_STRIDES}q{_SIZES}i4x")


class GatherForm(NamedTuple):
    """Compile-time parameters of a gather kernel."""

    dtype: torch.dtype
    sources: int
    pairs: bool
    one: bool  # whether a row of the result is one row, or none
    placed: bool  # whether rows have places of their own
    columns: int  # of a block
    aligned: bool  # whether rows begin at multiples of 16 bytes, and take as many elements


def columns_of(width: int) -> int:
    """Columns of a block, for rows of this width."""
    return min(1 << (width - 1).bit_length(), _COLUMNS)


def rows_of(columns: int) -> int:
    """Rows of a block with so many columns."""
    return _ELEMENTS // columns


@cache
def available() -> bool:
    """Whether Triton is installed."""
    try:
        from attngen.parallel import gather_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def takes(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for a dtype."""
    return dtype in _DTYPES and available()


class Launcher:
    """One compiled form on one GPU. Calling it enqueues a launch on the current stream."""

    __slots__ = ("_device", "_driver", "_free", "_function", "_how")

    def __init__(self, form: GatherForm, device: int) -> None:
        """Raises LoadError if the cubin does not load."""
        self._driver, self._device = drivers.current(), device
        cubin, symbol, shared, scratch = compiled(form, self._driver.capability(device))
        sizes = [8] * (_POINTERS + _STRIDES) + [4] * _SIZES + [8] * scratch
        self._function = self._driver.load(cubin, symbol, device, shared, sizes)
        self._how = 32 * _WARPS, shared, scratch
        #: Parameters that no launch is using. Threads take and return them atomically.
        self._free: list[tuple[Frame, int]] = []

    def __call__(self, blocks: int, values: tuple[int, ...]) -> None:
        """``values``: addresses, strides and sizes in the order of the kernel's parameters."""
        threads, shared, scratch = self._how
        try:
            frame, pointers = self._free.pop()
        except IndexError:
            frame, pointers = _frame(scratch)
        _VALUES.pack_into(frame.bytes, 0, *values)
        self._driver.launch([(self._function, blocks, threads, shared, 0, pointers)], self._device)
        self._free.append((frame, pointers))


def _frame(scratch: int) -> tuple[Frame, int]:
    """Memory for the parameters, and the address of pointers to them; those of scratch memory stay null."""
    frame, wide = Frame(_VALUES.size + 8 * scratch), 8 * (_POINTERS + _STRIDES)
    offsets = [*range(0, wide, 8), *range(wide, wide + 4 * _SIZES, 4), *range(_VALUES.size, len(frame.bytes), 8)]
    return frame, frame.pointers(offsets[: _POINTERS + _STRIDES + _SIZES + scratch])


@cache
def launcher_of(form: GatherForm, device: int) -> Launcher:
    """The launcher of a form, compiled when it is first needed."""
    return Launcher(form, device)


def compiled(form: GatherForm, capability: int) -> tuple[bytes, str, int, int]:
    """The cubin of a form, its symbol and shared memory, and how many pointers to scratch memory end its parameters."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attngen.compile.ptx import ptx_parameters
    from attngen.parallel.gather_kernel import gather

    constants: dict[str, Any] = {
        "sources": form.sources, "pairs": form.pairs, "one": form.one, "placed": form.placed,
        "block_rows": rows_of(form.columns), "block_columns": form.columns,
    }  # fmt: skip
    names = [name for name in gather.arg_names if name not in constants]
    element = f"*{_DTYPES[form.dtype]}"
    types = [element] * (_POINTERS - 2) + ["*i32"] * 2 + ["i64"] * _STRIDES + ["i32"] * _SIZES
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    multiples = [*names[: _POINTERS + _STRIDES], "width"] if form.aligned else []
    attributes = {(gather.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    signature = {name: signature[name] for name in gather.arg_names}
    kernel = triton.compile(
        ASTSource(gather, signature, constants, attributes), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": _WARPS},
    )  # fmt: skip
    sizes = [parameter.size for parameter in ptx_parameters(kernel.asm["ptx"])]
    planned = [8] * (_POINTERS + _STRIDES) + [4] * _SIZES
    scratch = len(sizes) - len(planned)
    if scratch < 0 or sizes != planned + [8] * scratch:
        raise LoadError(f"the kernel that copies rows has parameters of {sizes} B, planned were {planned} B")
    return kernel.asm["cubin"], kernel.metadata.name, kernel.metadata.shared, scratch
