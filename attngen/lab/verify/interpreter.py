"""Kernels in Triton's interpreter: the rendered source itself, on the CPU, through the runtime's own arguments.

Triton decides at import whether it interprets, so this runs in processes of its own: call ``prepare_process`` before
anything there imports Triton. Products of bf16 are wrong in the interpreter (Triton 3.6 to 3.9 multiply the bit
patterns), which is why ``reason_against`` refuses them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from attngen.errors import CompileError
from attngen.lab.verify.quick_interpreter import quicken
from attngen.manifest import Argument
from attngen.operations import JVP
from attngen.plan.model import Plan
from attngen.runtime.arguments.checked import DIRECTIONS, Call, View
from attngen.runtime.device.tensormap import windowed
from attngen.runtime.geometry.sizes import Geometry, geometries
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.launch.gradients import GradientBuffers, finish, view_of
from attngen.runtime.launch.pinned import Buffers
from attngen.store.temporary import TemporaryFolder


def prepare_process() -> None:
    """Make this process interpret. Raises CompileError if Triton was imported before and compiles."""
    loaded = sys.modules.get("triton")
    if loaded is not None and os.environ.get("TRITON_INTERPRET") != "1":
        raise CompileError("this process has imported Triton's compiler; interpret in another process")
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # many such processes run side by side


#: Dtypes that Triton's interpreter multiplies correctly.
INTERPRETED_DTYPES = ("fp16", "fp32")


def reason_against(plan: Plan) -> str | None:
    """The reason why a kernel cannot be interpreted, and the kernel that can be in its place; None if it can."""
    if plan.backend != "triton":
        reason = f"{plan.backend} kernels run only on a GPU"
    elif plan.dtype_name == "bf16":
        reason = "bf16 products are wrong in Triton's interpreter"
    elif plan.direction not in (*DIRECTIONS, JVP):
        reason = f"the interpreter runs attention, no {plan.direction}"
    else:
        return None
    if plan.direction not in (*DIRECTIONS, JVP):  # appends, quantizes or widens, without a mask
        return reason
    changes = ["backend: triton"] if plan.backend != "triton" else []
    changes += ["dtype: fp16"] if plan.dtype_name not in INTERPRETED_DTYPES else []
    changes += ["layout: dense"] if plan.layout == "paged" else []
    return f"{reason}; a copy of the spec with {_listed(changes)} verifies the same mask and score without a GPU"


def _listed(changes: Sequence[str]) -> str:
    *first, last = (f"'{each}'" for each in changes)
    return f"{', '.join(first)} and {last}" if first else last


def kernel_of(plan: Plan) -> Kernel:
    """A planned kernel as the runtime sees it, without a cubin."""
    none = {"registers": 0, "spills": 0, "shared_memory": 0, "cubin_bytes": 0, "compile_seconds": 0.0}
    return Kernel({**plan.to_dict(), "resources": none}, bytes, origin=plan.name)


class Interpreted:
    """A rendered kernel, ready to be called on CPU tensors."""

    def __init__(self, plan: Plan, text: str) -> None:
        """Import the source; ``prepare_process`` must have been called."""
        quicken()
        _allow_products_of_parts()
        self.kernel = kernel_of(plan)
        self._module = _import(plan.name, text)

    def __call__(self, call: Call, buffers: Buffers) -> None:
        """Run the launches of a forward, one program after the other."""
        self._run_all(call, buffers, {"out": view_of(buffers.out, call)}, {})

    def differentiate(self, call: Call, buffers: GradientBuffers) -> None:
        """Run a backward: its launches, and what follows them."""
        views = {name: view_of(getattr(buffers, name), call) for name in ("out", "dout", "dq", "dk", "dv")}
        self._run_all(call, buffers, views, {"dlse": buffers.dlse is None})
        finish(call, buffers)

    def derive(self, call: Call, buffers: GradientBuffers, only: str) -> None:
        """Run one launch of a forward-mode derivative, after the one that computes its tile map."""
        views = {name: view_of(getattr(buffers, name), call) for name in ("out", "dout", "dq", "dk", "dv")}
        self._run_all(call, buffers, views, {}, only)

    def _run_all(
        self, call: Call, buffers: Buffers | GradientBuffers, views: Mapping[str, View], absent: Mapping[str, bool],
        only: str | None = None,
    ) -> None:  # fmt: skip
        geometries_of_launches = geometries(self.kernel, call, views, absent=absent)
        for launch, geometry in zip(self.kernel.launches, geometries_of_launches, strict=True):
            if (blocks := geometry.tiles) and (only in (None, launch.name) or launch.classifies):
                self._run(launch.entry, blocks, geometry, buffers)

    def _run(self, entry: Entry, blocks: int, geometry: Geometry, buffers: Buffers | GradientBuffers) -> None:
        function: Any = getattr(self._module, entry.symbol)
        values = [_value(parameter, geometry, buffers) for parameter in entry.layout.parameters]
        function[(blocks,)](*values)


def _allow_products_of_parts() -> None:
    """Let ``tl.dot`` accept "bf16x6", which Triton's compiler knows and its interpreter rejects. The interpreter
    multiplies in float32 for any precision."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if "bf16x6" not in options.allowed_dot_input_precisions:
        allowed = (*options.allowed_dot_input_precisions, "bf16x6")
        interpreter_builder.options = replace(options, allowed_dot_input_precisions=allowed)


def _value(parameter: Argument, geometry: Geometry, buffers: Buffers | GradientBuffers) -> Any:
    """The argument of a parameter: a tensor where the GPU gets an address, else a number."""
    call = geometry.call
    match parameter.kind:
        case "pointer":
            tensor = _tensors(geometry, buffers)[str(parameter.of)]
            # a kernel never reads from the address of an absent tensor
            return torch.zeros(1, dtype=torch.int32, device="cpu") if tensor is None else _bytes(tensor)
        case "descriptor":
            return _descriptor(parameter, geometry, buffers)
        case "scale":
            return call.scale
        case "scalar":
            value = call.scalars[parameter.of or parameter.name]
            return int(value) if parameter.type != "fp32" else float(value)
        case _:
            return geometry.number(parameter)


def _tensors(geometry: Geometry, buffers: Buffers | GradientBuffers) -> Mapping[str, torch.Tensor | None]:
    call = geometry.call
    tensors = {**buffers.named(call), **{f"tensor:{name}": tensor for name, tensor in call.tensors.items()}}
    return tensors | ({"tile_map": tensors[f"tile_map:{geometry.map.owner}"]} if geometry.map else {})


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View bools as the bytes that kernels read."""
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor


def _descriptor(parameter: Argument, geometry: Geometry, buffers: Buffers | GradientBuffers) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor: torch.Tensor = getattr(buffers, str(parameter.of))
    if geometry.call.order == "bhsd":
        tensor = tensor.transpose(1, 2)
    if parameter.window is not None:
        tensor = _windowed(tensor, parameter.window)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(parameter.box))


def _windowed(tensor: torch.Tensor, window: int) -> torch.Tensor:
    """Return the tensor that a windowed descriptor shows: it starts some rows before the first, which nothing reads."""
    rows = tensor.dim() - 3
    before = tensor.new_full((*tensor.shape[:rows], window, *tensor.shape[rows + 1 :]), torch.nan)
    longer = torch.cat([before, tensor, tensor.new_full(before.shape, torch.nan)], dim=rows).contiguous()
    shape, strides = windowed((*tensor.shape,), longer.stride(), window)
    return longer.as_strided(shape, strides)


def _import(name: str, text: str) -> ModuleType:
    """Import a source from a file, since Triton reads its functions' text back; the file is gone afterwards."""
    with TemporaryFolder() as folder:
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"_attngen_interpreted_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _parse_all(module)
    return module


def _parse_all(module: ModuleType) -> None:
    """Make the interpreter read every function's text now, while the file is there."""
    for value in list(vars(module).values()):  # reading adds names
        rewrite: Callable[[], Any] | None = getattr(value, "rewrite", None)
        if rewrite is not None:
            rewrite()
