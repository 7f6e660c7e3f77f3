"""A backward prepared for one set of shapes, strides, dtypes and devices: what is left is to allocate and launch.

What its kernels need beside the results lies in one block of memory: the dQ accumulator and the row statistics. Tile
maps are kept from call to call. The results are tensors of their own, since autograd keeps each as long as it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import DK, DOUT, DQ, DV
from attngen.runtime.arguments.checked import Call, View, contiguous_view
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Scalars
from attngen.runtime.arguments.shapes import default_scale, softmax_scale_of
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.gradients import differentiable, gradient_shapes, present_gradients, stored_gradients
from attngen.runtime.launch.launches import Launches, laid_out
from attngen.runtime.launch.tile_map import MapMaker
from attngen.runtime.reference.sinks import add_gradients, learned

#: dq, dk and dv; gradients of the variant's own tensors by name.
Gradients = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]

#: Tensors of the caller for dq, dk and dv, None for a new tensor.
Places = tuple[Tensor | None, Tensor | None, Tensor | None]
NOWHERE: Places = (None, None, None)

_FLOAT32 = 4


class PreparedBackward:
    """The kernels of one backward, with all that does not change between calls."""

    __slots__ = (
        "_call", "_contiguous_dout", "_device", "_floats", "_gradients", "_kept", "_launch", "_like", "_maps",
        "_results", "_rows", "_scalars", "_scale", "_shared", "_sinks", "_unordered", "_v_of_key",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        call: Call,
        tensor_names: Sequence[str],
        out: View,
        dout: View | None,
        driver: Driver,
        device: int,
        *,
        into: Sequence[View | None] = NOWHERE,
        dlse: bool,
        unordered: str | None = None,
        kept: Variant | None = None,
    ) -> None:
        """Prepare the backward of ``call`` on ``kernel``. Raises LoadError if a cubin does not load.

        ``tensor_names``: the call's own tensors in the order in which it lists their addresses. ``dout`` is None if it
        has to be copied first. ``into``: views of the caller's tensors for dq, dk and dv, if there are any. ``dlse``:
        whether the log-sum-exp has a gradient. ``unordered``: the warning that a gradient has no fixed order, where
        torch wants to be told. ``kept``: what the cache's key refers to by identity, which must therefore stay alive.
        """
        self._kept, self._unordered = kept, unordered
        self._v_of_key = kernel.v_of_key
        self._call, self._device = call.without_tensors(), call.device
        self._scalars, self._scale = Scalars(call.variant.name, call.rules), default_scale(call.head_dim_qk)
        shapes = gradient_shapes(call)
        made = {name: contiguous_view(shape, call.order) for name, shape in shapes.items()}
        self._contiguous_dout = dout is None
        views = {"out": out, "dout": contiguous_view(call.out_shape(), call.order) if dout is None else dout, **made}
        views |= {name: place for name, place in zip(("dq", "dk", "dv"), into, strict=True) if place is not None}
        stored = stored_gradients(kernel, call)
        absent = {"dlse": not dlse, **dict.fromkeys(present_gradients(stored), False)}
        self._launch = Launches(kernel, call, views, tensor_names, driver, device, absent=absent)
        # torch allocates a tensor faster that is like another one
        self._like = call.q == made["dq"], call.k == made["dk"], call.v == made["dv"]
        self._results = tuple(shapes.values())
        self._gradients = tuple(
            (name, None if name in stored else torch.float32, torch.empty if stored.get(name) else torch.zeros)
            for name in differentiable(call)
        )
        self._sinks = bool(learned(call.variant))
        sizes = self._launch.sizes
        self._maps = MapMaker(self._launch, kernel, call, call.device) if self._launch.maps else None
        offsets, self._floats = laid_out(sizes)
        self._shared = tuple(_FLOAT32 * offset for offset in offsets.values())
        #: Where D of each row lies, which sinks read: they alone need what else stays between the kernels.
        self._rows = slice(offsets["delta"], offsets["delta"] + sizes["delta"]) if self._sinks else slice(0)

    def __call__(
        self, given: Given, lse: Tensor, dout: Tensor, addresses: list[int], into: Places = NOWHERE
    ) -> Gradients:
        """Enqueue the backward on the current stream and return its results.

        ``addresses`` as the launch takes them: those of what is allocated here are 0, and what follows those of the
        variant's tensors is missing. Gradients of q, k and v are stored ``into`` these tensors, if not in new ones.
        """
        q, k, v, arguments, scale = given.q, given.k, given.v, given.arguments, given.softmax_scale
        scale = self._scale if scale is None else softmax_scale_of(scale)
        graded: Mapping[str, Tensor] = arguments  # by the names of those that have gradients
        numbers = self._scalars(arguments)
        if self._contiguous_dout:
            dout = dout.clone(memory_format=torch.contiguous_format)
            addresses[DOUT] = dout.data_ptr()
        like_q, like_k, like_v = self._like
        dq, dk, dv = into
        if dq is None:
            dq = torch.empty_like(q) if like_q else self._empty(0, q)
        if dk is None:
            dk = torch.empty_like(k) if like_k else self._empty(1, k)
        if dv is None:
            dv = torch.empty_like(v) if like_v else self._empty(2, v)
        if self._v_of_key:  # dk has the gradient of both
            dv.zero_()
        addresses[DQ], addresses[DK], addresses[DV] = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        workspace = lse.new_empty(self._floats)
        start = workspace.data_ptr()
        sums = {}
        for name, dtype, make in self._gradients:
            own = graded[name]
            sums[name] = make(own.shape, dtype=dtype or own.dtype, device=self._device)
            addresses.append(sums[name].data_ptr())
        addresses += [start + offset for offset in self._shared]
        maps = self._maps.append(given, addresses, scale, numbers) if self._maps else None
        self._launch(addresses, scale, numbers)
        del maps  # kept until the launches are enqueued
        if self._sinks:
            named = {rule.name: number for rule, number in zip(self._call.rules, numbers, strict=True)}
            tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
            call = self._call.with_tensors(tensors, named, given.cu_seqlens_q)
            add_gradients(call, lse, workspace[self._rows].view(lse.shape), sums)
        gradients = {name: total.to(graded[name].dtype) for name, total in sums.items()} if sums else sums
        return dq, dk, dv, gradients

    def warn(self) -> None:
        """Warn of a gradient that has no fixed order, where torch wants to be told."""
        if self._unordered is not None:
            warnings.warn(self._unordered, UserWarning, stacklevel=3)

    def _empty(self, index: int, like: Tensor) -> Tensor:
        return torch.empty(self._results[index], dtype=like.dtype, device=self._device)
