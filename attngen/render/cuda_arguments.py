"""The parameter list of a CUDA kernel."""

from __future__ import annotations

from collections.abc import Collection

from attngen.dtypes import DTYPES
from attngen.plan.model import Argument, Plan
from attngen.render.header import argument_groups

#: A type as manifests name it → its name in CUDA.
_TYPES = {
    **{row.triton: row.cuda for row in DTYPES.values() if row.name not in ("bool", "int8")},
    "u32": "uint32_t", "fp32x4": "float4", "void": "void", "divisor": "const Divisor",
}  # fmt: skip


#: Outputs of a forward.
_OF_FORWARD = frozenset({"out", "lse", "tile_counter", "partials", "split_counters"})


def argument_lines(
    plan: Plan, arguments: tuple[Argument, ...], *, written: Collection[str] = _OF_FORWARD
) -> tuple[str, ...]:
    """Return the parameter list, related arguments on one line; the tensors that are ``written`` are not const."""
    own = {f"tensor:{tensor.name}": tensor.dtype for tensor in plan.variant.tensors}

    def declaration(argument: Argument) -> str:
        if argument.kind == "descriptor":
            return f"const __grid_constant__ TensorMap {argument.name},"
        if not argument.type.startswith("*"):
            return f"{_TYPES[argument.type]} {argument.name},"
        of = argument.of or ""
        element = DTYPES[own[of]].cuda if of in own else _TYPES[argument.type.removeprefix("*")]
        return f"{'' if of in written else 'const '}{element}* {argument.name},"

    lines = argument_groups(arguments, declaration, width=110)
    return (*lines[:-1], lines[-1].removesuffix(","))
