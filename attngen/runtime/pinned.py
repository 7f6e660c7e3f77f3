"""One kernel launched as told, past the dispatcher's choice, into memory that the caller allocated.

Verification and measurement need it: the kernel under test must run, not the one that a call would prefer, and what
the outputs held before must be known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attngen.errors import NoKernelError
from attngen.runtime import counters
from attngen.runtime import driver as drivers
from attngen.runtime.arguments import Call, view
from attngen.runtime.gradients import (
    GradientBuffers,
    PreparedGradients,
    finish,
    geometries,
    map_shapes,
    view_of,
)
from attngen.runtime.launch import Geometry, PreparedLaunch
from attngen.runtime.module import Kernel
from attngen.runtime.select import Request, reason_against


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of one call: inputs, results, and the words of the tile map where the kernel needs one.

    ``out`` may have any strides with a contiguous last dimension; ``lse`` is contiguous, or None if the call does not
    ask for it. ``words`` is int32 of the shape that ``map_shape`` tells, and need not be initialized.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None = None
    words: Tensor | None = None


def geometry_of(kernel: Kernel, call: Call, out: Tensor) -> Geometry:
    """Return the numbers of a call on a kernel, with the strides of this very output."""
    geometry = Geometry(kernel, call)
    geometry.views["out"] = view(out.shape, out.stride(), call.order)
    return geometry


def map_shape(kernel: Kernel, call: Call) -> tuple[int, ...] | None:
    """Return the shape of the tile map of a call, or None for a kernel that needs none."""
    geometry = Geometry(kernel, call)
    return None if geometry.map is None else geometry.map.tensor_shape()


def gradient_map_shapes(kernel: Kernel, call: Call) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tile maps of a backward, by the kernel that reads each."""
    return map_shapes(geometries(kernel, call, {}, dlse=False))


def reason_to_refuse(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the one reason why a kernel does not take a call on this GPU, or None if it does."""
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
        driver, device = drivers.current(), call.device.index or 0
        geometry = geometry_of(kernel, call, buffers.out)
        names = list(call.tensors)
        self._classify: PreparedLaunch | None = None
        if geometry.map is not None:
            assert kernel.classifier is not None, f"{kernel.full_name} needs a tile map and has no classifier"
            blocks = geometry.classifier_blocks
            self._classify = PreparedLaunch.of(kernel.classifier, blocks, geometry, names, driver, device)
        blocks = geometry.blocks(driver, device)
        self._launch = PreparedLaunch.of(kernel.entry, blocks, geometry, names, driver, device)
        given = (
            buffers.q, buffers.k, buffers.v, buffers.out, buffers.lse, call.cu_seqlens_q, call.cu_seqlens_k,
            call.seqused_k, buffers.words, None, *(call.tensors[name] for name in names),
        )  # fmt: skip
        self._kept = (call, buffers)  # the addresses below stay valid as long as these live
        self._addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        self._counted, self._driver, self._device = kernel.persistent, driver, device
        self._scale = call.scale
        self._scalars = [call.scalars[rule.name] for rule in call.rules]

    def __call__(self) -> None:
        """Enqueue the classifier, if there is one, and the kernel, on the current stream."""
        if self._classify is not None:
            self._classify(self._addresses, self._scale, self._scalars)
        if self._counted:
            self._addresses[9] = counters.address(self._driver.stream(self._device), self._device)
        self._launch(self._addresses, self._scale, self._scalars)


class PinnedGradients:
    """A backward bound to one set of kernels and buffers; calling it enqueues them, as often as wanted."""

    def __init__(self, kernel: Kernel, call: Call, buffers: GradientBuffers) -> None:
        """Raises as ``Pinned``. Gradients of the variant's own tensors are added to what their buffers hold."""
        reason = reason_to_refuse(kernel, call, buffers.q, buffers.k, buffers.v)
        if reason is not None:
            raise NoKernelError(f"{kernel.full_name} does not take this call: {reason}")
        views = {name: view_of(getattr(buffers, name), call) for name in ("out", "dout", "dq", "dk", "dv")}
        self._call, self._buffers = call, buffers
        self._launch = PreparedGradients(
            kernel, call, views, call.tensors, drivers.current(), call.device.index or 0, dlse=buffers.dlse is not None
        )
        self._scalars = [call.scalars[rule.name] for rule in call.rules]
        named = buffers.named(call) | {f"tensor:{name}": tensor for name, tensor in call.tensors.items()}
        given = [named.get(name) for name in self._launch.names]
        self._addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]

    def __call__(self) -> None:
        """Enqueue all kernels of the backward, and what comes behind them, on the current stream."""
        self._launch(self._addresses, self._call.scale, self._scalars)
        finish(self._call, self._buffers)
