"""One kernel launched as told, past the dispatcher's choice, into memory that the caller allocated.

Verification and measurement need it: the kernel under test must run, not the one that a call would prefer, and what
the outputs held before must be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attngen.errors import NoKernelError
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.sizes import geometries, map_shapes, workspace_sizes
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.gradients import GradientBuffers, finish, view_of
from attngen.runtime.launch.launches import Launches
from attngen.runtime.registry.select import Request, reason_against


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of one call: inputs, results, and the words of the tile map where the kernel needs one.

    ``out`` may have any strides with a contiguous last dimension; ``lse`` is contiguous, or None if the call does not
    ask for it. ``words`` is int32 of the shape that ``prepared_shapes`` tells, as are the ``workspaces``; neither needs
    to be initialized.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    words: Tensor | None = None
    workspaces: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self, call: Call) -> dict[str, Tensor | None]:
        """Tensors by name as launches take them, without the variant's own."""
        return {
            **{name: getattr(self, name) for name in ("q", "k", "v", "out", "lse")},
            **call.descales,
            **{name: getattr(call, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")},
            **self.workspaces,
            "tile_map:forward": self.words,
        }


def prepared_shapes(kernel: Kernel, call: Call) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Buffers that the launches of a kernel share in a call: 4-byte elements of each workspace by its name, and the
    shape of each tile map by the launch that reads it."""
    capacity = capacity_for(kernel, call, drivers.current, call.device.index or 0)
    launches = geometries(kernel, call, {}, capacity=capacity)
    return workspace_sizes(kernel, launches), {owner: one.tensor_shape() for owner, one in map_shapes(launches).items()}


def reason_to_refuse(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Reason why a kernel does not take a call on this GPU, or None if it does."""
    addresses = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}
    addresses |= {f"tensor:{name}": tensor.data_ptr() for name, tensor in call.tensors.items()}
    request = Request(call, call.device.index or 0, addresses, call.scalars, direction=kernel.direction)
    return reason_against(kernel, request, drivers.current())


class Pinned:
    """A call bound to one kernel and one set of buffers; calling it enqueues the kernel, as often as wanted."""

    def __init__(self, kernel: Kernel, call: Call, buffers: Buffers) -> None:
        """Raises NoKernelError, with the one reason, if the kernel does not take the call, and LoadError if the
        cubin does not load. ``call.empty`` must not hold: nothing is launched for such a call.
        """
        reason = reason_to_refuse(kernel, call, buffers.q, buffers.k, buffers.v)
        if reason is not None:
            raise NoKernelError(f"{kernel.full_name} does not take this call: {reason}")
        names = list(call.tensors)
        views = {"out": view_of(buffers.out, call)}
        self._launch = Launches(kernel, call, views, names, drivers.current(), call.device.index or 0)
        given = buffers.named(call) | {f"tensor:{name}": tensor for name, tensor in call.tensors.items()}
        self._kept = (call, buffers)  # the addresses below stay valid as long as these live
        self._addresses = _addresses(self._launch.names, given)
        self._scale = call.scale
        self._scalars = [call.scalars[rule.name] for rule in call.rules]

    def __call__(self) -> None:
        """Enqueue the launches on the current stream, that which computes a tile map first."""
        for owner in self._launch.maps:
            self._launch.classify(owner, self._addresses, self._scale, self._scalars)
        self._launch(self._addresses, self._scale, self._scalars)


def _addresses(names: Sequence[str], given: Mapping[str, Tensor | None]) -> list[int]:
    tensors = (given.get(name) for name in names)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class PinnedGradients:
    """A backward bound to one set of kernels and buffers, or the launch ``only`` of a forward-mode derivative; calling
    it enqueues them, as often as wanted."""

    def __init__(self, kernel: Kernel, call: Call, buffers: GradientBuffers, *, only: str | None = None) -> None:
        """Raises as ``Pinned``. Gradients of the variant's own tensors are added to what their buffers hold."""
        reason = reason_to_refuse(kernel, call, buffers.q, buffers.k, buffers.v)
        if reason is not None:
            raise NoKernelError(f"{kernel.full_name} does not take this call: {reason}")
        views = {name: view_of(getattr(buffers, name), call) for name in ("out", "dout", "dq", "dk", "dv")}
        self._call, self._buffers, self._backward = call, buffers, only is None
        self._launch = Launches(
            kernel, call, views, call.tensors, drivers.current(), call.device.index or 0,
            absent={"dlse": buffers.dlse is None}, only=only,
        )  # fmt: skip
        self._scalars = [call.scalars[rule.name] for rule in call.rules]
        named = buffers.named(call) | {f"tensor:{name}": tensor for name, tensor in call.tensors.items()}
        self._addresses = _addresses(self._launch.names, named)

    def __call__(self) -> None:
        """Enqueue all kernels of the backward, and what comes after them, on the current stream."""
        for owner in self._launch.maps:
            self._launch.classify(owner, self._addresses, self._call.scale, self._scalars)
        self._launch(self._addresses, self._call.scale, self._scalars)
        if self._backward:
            finish(self._call, self._buffers)
