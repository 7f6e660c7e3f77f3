"""A forward-mode derivative prepared for one set of shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import DK, DLSE, DOUT, DQ, DV, LSE, OUT
from attngen.runtime.arguments.checked import TORCH_DTYPES, Call, View, contiguous_view
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Scalars
from attngen.runtime.arguments.shapes import default_scale, softmax_scale_of
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.launches import Launches
from attngen.runtime.launch.tile_map import MapMaker

#: out, its log-sum-exp, and the tangents of both.
Derived = tuple[Tensor, Tensor, Tensor, Tensor]

#: Tangents of q, k and v, None for none.
Directions = Sequence[Tensor | None]

TANGENTS = ("dq", "dk", "dv")


def tangents_of(kernel: Kernel, launch: str) -> tuple[bool, ...]:
    """Whether a launch of a kernel takes the tangent of q, of k and of v."""
    (own,) = (one for one in kernel.launches if one.name == launch)
    read = {parameter.of for parameter in own.entry.layout.parameters}
    return tuple(name in read for name in TANGENTS)


def launch_for(kernel: Kernel, directions: Directions) -> tuple[str, tuple[bool, ...]]:
    """The launch of a kernel that takes these tangents and fewest others, and which tangents it takes."""
    given = [tangent is not None for tangent in directions]
    taken = {one.name: tangents_of(kernel, one.name) for one in kernel.launches if not one.classifies}
    enough = [name for name, takes in taken.items() if all(a or not b for a, b in zip(takes, given, strict=True))]
    name = min(enough, key=lambda name: sum(taken[name]))
    return name, taken[name]


class PreparedJvp:
    """The kernel of one forward-mode derivative, with all that does not change between calls."""

    __slots__ = (
        "_device", "_dtype", "_kept", "_launch", "_lse_shape", "_lse_strides", "_maps", "_out_shape", "_scalars",
        "_scale",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        call: Call,
        tensor_names: Sequence[str],
        only: str,
        directions: Sequence[View | None],
        driver: Driver,
        device: int,
        kept: Variant | None = None,
    ) -> None:
        """Prepare ``call`` on the launch ``only`` of ``kernel``. Raises LoadError if a cubin does not load.

        ``tensor_names``: the call's own tensors in the order in which it lists their addresses. ``directions``: views
        of the tangents of q, k and v that the launch takes. ``kept``: what the cache's key refers to by identity, which
        must therefore stay alive.
        """
        self._kept = kept
        self._scalars, self._scale = Scalars(call.variant.name, call.rules), default_scale(call.head_dim_qk)
        self._device, self._dtype = call.device, TORCH_DTYPES[call.dtype]
        self._out_shape, self._lse_shape, self._lse_strides = call.out_shape(), call.lse_shape(), call.lse_strides()
        out = contiguous_view(self._out_shape, call.order)
        # a launch that another one stands in for is sized all the same, by the tensors themselves
        like = (call.q, call.k, call.v)
        views = {"out": out, "dout": out}
        views |= {
            name: own if view is None else view for name, view, own in zip(TANGENTS, directions, like, strict=True)
        }
        self._launch = Launches(kernel, call, views, tensor_names, driver, device, only=only)
        self._maps = MapMaker(self._launch, kernel, call, call.device) if self._launch.maps else None

    def __call__(self, given: Given, directions: Directions, addresses: list[int]) -> Derived:
        """Enqueue the kernel on the current stream and return its results.

        ``directions``: the tangents that the launch takes. ``addresses`` as the launch takes them: those of tangents
        and of what is allocated here are 0, and what follows those of the variant's tensors is missing.
        """
        scale = self._scale if given.softmax_scale is None else softmax_scale_of(given.softmax_scale)
        numbers = self._scalars(given.arguments)
        results = [torch.empty(self._out_shape, dtype=self._dtype, device=self._device) for _ in range(2)]
        results += [
            torch.empty_strided(self._lse_shape, self._lse_strides, dtype=torch.float32, device=self._device)
            for _ in range(2)
        ]
        out, dout, lse, dlse = results
        for place, tensor in zip((OUT, DOUT, LSE, DLSE, DQ, DK, DV), (*results, *directions), strict=True):
            addresses[place] = 0 if tensor is None else tensor.data_ptr()
        maps = self._maps.append(given, addresses, scale, numbers) if self._maps else None
        self._launch(addresses, scale, numbers)
        del maps  # kept until the launch is enqueued
        return out, lse, dout, dlse
