"""From the arguments of a plan to the parameters of a launch, checked against what the compiler made of them.

A launch packs parameters by this list alone. If the compiler dropped, added or retyped one, every later argument would
silently get a wrong offset; the compile fails instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attngen.compile.ptx import PtxParameter, ptx_parameters
from attngen.errors import CompileError
from attngen.manifest import STRUCTS, TYPE_BYTES, Argument

#: Index in Triton's ``tensordesc_meta`` → bytes of the shared-memory swizzle of a tensor map.
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


def triton_parameters(arguments: Sequence[Argument], descriptors: Sequence[Mapping[str, Any]]) -> list[Argument]:
    """The launch parameters of a Triton kernel with these arguments.

    ``descriptors`` is the compiler's ``tensordesc_meta``, in the order of the descriptor arguments. On sm90 and
    later, Triton passes a host descriptor as a tensor map followed by rank × int32 extents and rank × int64 strides,
    and ends each list with two scratch pointers that are null for kernels that use no scratch.
    """
    metadata = iter(descriptors)
    parameters: list[Argument] = []
    for argument in arguments:
        if argument.kind != "descriptor":
            parameters.append(argument)
            continue
        try:
            tensor_map = next(metadata)
        except StopIteration:
            raise CompileError(f"the compiler made no tensor map for '{argument.name}'") from None
        # The box that is copied at once; narrower than the planned block where that exceeds the swizzle.
        box, swizzle = tuple(tensor_map["block_size"]), _SWIZZLES[tensor_map["swizzle"]]
        parameters.append(replace(argument, box=box, swizzle=swizzle))
        for part, type_ in (("shape", "i32"), ("stride", "i64")):
            parameters.extend(
                Argument(
                    f"{argument.name}_{part}{axis}", f"descriptor_{part}", type_, argument.of, axis,
                    window=argument.window,
                )
                for axis in range(len(box))
            )  # fmt: skip
    parameters.extend(Argument(f"scratch{i}", "scratch", "*i8") for i in range(2))
    return parameters


def _expected(parameter: Argument) -> PtxParameter:
    try:
        size, alignment = parameter.form
    except KeyError:
        raise CompileError(
            f"parameter '{parameter.name}': unknown type {parameter.type!r}; known: {', '.join(TYPE_BYTES)}"
        ) from None
    if parameter.kind in STRUCTS:
        return PtxParameter("b8", size, alignment)
    return PtxParameter(f"{'f' if parameter.type.startswith('fp') else 'u'}{8 * size}", size, alignment)


def check_parameters(name: str, parameters: Sequence[Argument], ptx: str) -> None:
    """Raise CompileError unless the PTX declares exactly these: number, order, size, alignment, integer or float."""
    declared = ptx_parameters(ptx)
    for i, (parameter, have) in enumerate(zip(parameters, declared, strict=False)):
        want = _expected(parameter)
        # b32, s32 and u32 are passed alike; a float among integers is the sign of a shifted list.
        if (have.size, have.align, have.type[0] == "f") != (want.size, want.align, want.type[0] == "f"):
            raise CompileError(
                f"{name}: parameter {i} '{parameter.name}' was planned as {want}, but compiled as {have}; "
                "a launch would pass garbage"
            )
    if len(declared) != len(parameters):
        raise CompileError(
            f"{name}: {len(parameters)} parameters were planned, but the compiled kernel has {len(declared)}; "
            "a launch would pass garbage"
        )


def placed_parameters(
    name: str, parameters: Sequence[Argument], places: Sequence[tuple[int, int]]
) -> tuple[Argument, ...]:
    """The parameters with the offsets that they have in the cubin; CompileError unless the cubin has exactly these."""
    if len(places) != len(parameters):
        raise CompileError(f"{name}: {len(parameters)} parameters were planned, but the cubin has {len(places)}")
    for parameter, (_, size) in zip(parameters, places, strict=True):
        planned = _expected(parameter).size
        if size != planned:
            raise CompileError(f"{name}: parameter '{parameter.name}' takes {planned} B, but {size} B in the cubin")
    return tuple(replace(one, offset=offset) for one, (offset, _) in zip(parameters, places, strict=True))
