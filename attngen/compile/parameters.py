"""From the arguments of a plan to the parameters of a launch, checked against what the compiler made of them.

A launch packs parameters by this list alone. If the compiler dropped, added or retyped one, every later argument would
silently get a wrong offset; the compile fails instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attngen.compile.ptx import PtxParameter, ptx_parameters
from attngen.errors import CompileError

Parameter = dict[str, Any]

#: Type of a manifest → bytes of the PTX parameter. Triton passes a bool as one byte.
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}

#: Index in Triton's ``tensordesc_meta`` → bytes of the shared-memory swizzle of a tensor map.
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}

_TENSOR_MAP = PtxParameter("b8", 128, 64)
_DIVISOR = PtxParameter("b8", 12, 4)


def triton_parameters(
    arguments: Sequence[Mapping[str, Any]], descriptors: Sequence[Mapping[str, Any]]
) -> list[Parameter]:
    """The launch parameters of a Triton kernel with these arguments.

    ``descriptors`` is the compiler's ``tensordesc_meta``, in the order of the descriptor arguments. On sm90 and
    later, Triton passes a host descriptor as a tensor map followed by rank × int32 extents and rank × int64 strides,
    and ends each list with two scratch pointers that are null for kernels that use no scratch.
    """
    metadata = iter(descriptors)
    parameters: list[Parameter] = []
    for argument in arguments:
        parameter = dict(argument)
        parameters.append(parameter)
        if parameter["kind"] != "descriptor":
            continue
        try:
            tensor_map = next(metadata)
        except StopIteration:
            raise CompileError(f"the compiler made no tensor map for '{parameter['name']}'") from None
        # The box that is copied at once; narrower than the planned block where that exceeds the swizzle.
        parameter["box"] = list(tensor_map["block_size"])
        parameter["swizzle"] = _SWIZZLES[tensor_map["swizzle"]]
        for kind, type_ in (("descriptor_shape", "i32"), ("descriptor_stride", "i64")):
            parameters.extend(
                {
                    "name": f"{parameter['name']}_{kind.removeprefix('descriptor_')}{axis}",
                    "kind": kind,
                    "of": parameter["of"],
                    "axis": axis,
                    "type": type_,
                    **({"window": parameter["window"]} if parameter.get("window") else {}),
                }
                for axis in range(len(parameter["box"]))
            )
    parameters.extend({"name": f"scratch{i}", "kind": "scratch", "type": "*i8"} for i in range(2))
    return parameters


def _expected(parameter: Parameter) -> PtxParameter:
    if parameter["kind"] == "descriptor":
        return _TENSOR_MAP
    if parameter["kind"] == "divisor":
        return _DIVISOR
    type_ = parameter["type"]
    if type_.startswith("*"):
        return PtxParameter("u64", 8, 8)
    if type_ not in _SIZES:
        raise CompileError(f"parameter '{parameter['name']}': unknown type {type_!r}; known: {', '.join(_SIZES)}")
    size = _SIZES[type_]
    return PtxParameter(f"{'f' if type_.startswith('fp') else 'u'}{8 * size}", size, size)


def check_parameters(name: str, parameters: Sequence[Parameter], ptx: str) -> None:
    """Raise CompileError unless the PTX declares exactly these: number, order, size, alignment, integer or float."""
    declared = ptx_parameters(ptx)
    for i, (parameter, have) in enumerate(zip(parameters, declared, strict=False)):
        want = _expected(parameter)
        # b32, s32 and u32 are passed alike; a float among integers is the sign of a shifted list.
        if (have.size, have.align, have.type[0] == "f") != (want.size, want.align, want.type[0] == "f"):
            raise CompileError(
                f"{name}: parameter {i} '{parameter['name']}' was planned as {want}, but compiled as {have}; "
                "a launch would pass garbage"
            )
    if len(declared) != len(parameters):
        raise CompileError(
            f"{name}: {len(parameters)} parameters were planned, but the compiled kernel has {len(declared)}; "
            "a launch would pass garbage"
        )


def place_parameters(name: str, parameters: Sequence[Parameter], places: Sequence[tuple[int, int]]) -> None:
    """Give each parameter the offset that it has in the cubin; CompileError unless the cubin has exactly these."""
    if len(places) != len(parameters):
        raise CompileError(f"{name}: {len(parameters)} parameters were planned, but the cubin has {len(places)}")
    for parameter, (offset, size) in zip(parameters, places, strict=True):
        planned = _expected(parameter).size
        if size != planned:
            raise CompileError(f"{name}: parameter '{parameter['name']}' takes {planned} B, but {size} B in the cubin")
        parameter["offset"] = offset
