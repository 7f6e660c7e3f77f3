"""The memory of a backward: inputs, results, and buffers that its launches share.

Beside the gradients a backward takes the row statistics, two float32 numbers for each query row: its log-sum-exp in
units of log2, and D = rowsum(dO ∘ O) − dLSE. Kernels that add up dQ in global memory take the dQ accumulator, float32
and padded to tiles. A tensor of the variant that gets a gradient takes a float32 copy; tile maps take a bit or two for
each tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from attngen.runtime.arguments.checked import Call, View, view
from attngen.runtime.arguments.paging import rows_view
from attngen.runtime.geometry.heads_in_l2 import group_of
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.reference.sinks import add_gradients

#: Prefixes of the arguments that say whether the gradient of a bias is stored tile by tile, in the bias's dtype, and
#: whether the kernel clears the tiles that it does not store. It does so 8 entries at a time.
_STORED, _CLEARED = "stored:", "cleared:"
_CLEARED_AT_ONCE = 8


@dataclass(frozen=True)
class GradientBuffers:
    """The memory of one backward: what the forward took and gave, the gradients of its results, and results.

    ``out``, ``dout``, ``dq``, ``dk`` and ``dv`` may have any strides with a contiguous last dimension; ``lse`` and
    ``dlse`` are contiguous. ``workspaces`` has as many float32 elements for each name as ``workspace_sizes`` says,
    which need not be initialized. ``gradients`` holds a contiguous float32 tensor of zeros for each tensor of the
    variant that gets a gradient, ``words`` the tile map of each launch that reads one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    workspaces: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    words: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self, call: Call) -> dict[str, Tensor | None]:
        """Tensors by name as kernels of a backward pass take them, without the variant's own."""
        own = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(call, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")},
            **self.workspaces,
            **{f"gradient:{name}": tensor for name, tensor in self.gradients.items()},
            **{f"tile_map:{owner}": tensor for owner, tensor in self.words.items()},
        }


def differentiable(call: Call) -> tuple[str, ...]:
    """Return the tensors of a call's variant that get a gradient."""
    return tuple(tensor.name for tensor in call.variant.tensors if tensor.grad)


def stored_gradients(kernel: Kernel, call: Call) -> dict[str, bool]:
    """Biases whose gradients a kernel stores in their own dtype, by name, and whether it stores or clears every entry.

    No two heads of the call share an entry of these. Other gradients are summed in float32.
    """
    flags = [
        parameter
        for launch in kernel.launches
        for parameter in launch.entry.layout.parameters
        if parameter.kind == "present" and parameter.of
    ]
    cleared = {flag.of for flag in flags}
    stored = {}
    for flag in flags:
        if (of := flag.of or "").startswith(_STORED):
            name, axes = of.removeprefix(_STORED), str(flag.axis).split(",")
            by_head = "h" in axes or ("hk" in axes and group_of(call) == 1)
            if ("b" in axes or call.batch == 1) and (by_head or call.heads == 1):
                clears = _CLEARED + name in cleared
                stored[name] = _is_covered(kernel, call, call.tensors[name].shape, clears=clears)
    return stored


def present_gradients(stored: Mapping[str, bool]) -> tuple[str, ...]:
    """Names of the flags that a backward sets for the result of ``stored_gradients``."""
    return (
        *(_STORED + name for name in stored),
        *(_CLEARED + name for name, covered in stored.items() if covered),
    )


def _is_covered(kernel: Kernel, call: Call, shape: tuple[int, ...], *, clears: bool) -> bool:
    """Whether a call writes every entry of a bias that has the shape of the scores: it has no mask, or the kernel
    ``clears`` the tiles that no query sees."""
    masked = kernel.variant.masked or call.variant.masked
    if masked and not (clears and shape[-1] % _CLEARED_AT_ONCE == 0):
        return False
    if call.layout != "dense" or call.seqused_k is not None:
        return False
    return tuple(shape[-2:]) == (call.seqlen_q, call.seqlen_k) and math.prod(shape[:-2]) == call.batch * call.heads


def gradient_shapes(call: Call) -> dict[str, tuple[int, ...]]:
    """Return the shapes of dq, dk and dv, in the order of axes of the call."""
    shapes = {"dq": (call.q, call.head_dim_qk), "dk": (call.k, call.head_dim_qk), "dv": (call.v, call.head_dim_v)}
    ordered = {}
    for name, (seen, width) in shapes.items():
        shape = (*seen.shape[:-1], width)
        ordered[name] = (shape[0], shape[2], shape[1], shape[3]) if call.order == "bhsd" else shape
    return ordered


def view_of(tensor: Tensor, call: Call) -> View:
    """View of a tensor in the axis order of a call, as kernels see it."""
    if call.ragged and call.order != "thd":
        rows = rows_view(tensor.shape, tensor.stride())
        assert rows is not None, "its rows lie at two strides"
        return rows
    return view(tensor.shape, tensor.stride(), call.order)


def finish(call: Call, buffers: GradientBuffers) -> None:
    """Enqueue the last step of a backward, after its kernels: the gradients of sinks, which need no keys."""
    if call.variant.sink is not None:
        add_gradients(call, buffers.lse, buffers.workspaces["delta"].view(buffers.lse.shape), buffers.gradients)


def usable(gradient: Tensor) -> bool:
    """Whether kernels read or write a gradient as it is: what autograd hands over may be expanded or start anywhere."""
    size = gradient.element_size()
    stepped = [stride for extent, stride in zip(gradient.shape[:-1], gradient.stride()[:-1], strict=True) if extent > 1]
    aligned = all(stride and stride * size % 16 == 0 for stride in stepped) and gradient.data_ptr() % 16 == 0
    return aligned and gradient.stride(-1) == 1
