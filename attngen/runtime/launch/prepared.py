"""A call prepared for one set of shapes, strides, dtypes and devices: what is left is to check scalars and launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import LSE, OUT
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.scalars import Number, Scalars
from attngen.runtime.arguments.shapes import default_scale, softmax_scale_of
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.chain import Sized
from attngen.runtime.launch.launches import Launches
from attngen.runtime.launch.repeatable import Repeatable
from attngen.runtime.launch.tile_map import MapMaker, TileMap

#: Repeatable launches of a call, one for each part; None for a part that cannot be repeated.
Repeats = list[Repeatable | None]


class PreparedCall:
    """One kernel, or none where there is nothing to compute, with all that does not change between calls."""

    __slots__ = (
        "_call",
        "_device",
        "_dtype",
        "_first",
        "_kept",
        "_launch",
        "_like_q",
        "_maps",
        "_return_lse",
        "_scale",
        "kernel",
        "scalars",
        "sinks_only",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        kernel: Kernel | None,
        tensor_names: Sequence[str],
        driver: Driver,
        device: int,
        kept: Variant | None = None,
    ) -> None:
        """Prepare ``call`` on ``kernel``; None needs nothing launched. Raises LoadError if the cubin does not load.

        ``tensor_names``: the call's own tensors in the order in which it lists their addresses.
        ``kept``: what the cache's key refers to by identity, which must therefore stay alive.
        """
        self._kept = kept
        self.kernel = kernel
        self._return_lse = call.return_lse
        self._like_q = False  # whether the result has q's shape and strides: torch allocates such a tensor faster
        #: Whether there are no keys, so that sinks alone make the log-sum-exp that is asked for.
        own_sink = call.variant.sink is not None and call.variant.sink_in_lse
        self.sinks_only = kernel is None and call.return_lse and own_sink
        self._device, self._scale = call.device, default_scale(call.head_dim_qk)
        self._dtype = call.out_dtype
        self.scalars = Scalars(call.variant.name, call.rules)
        self._call = call.without_tensors()
        self._launch: Launches | None = None
        self._maps: MapMaker | None = None
        if kernel is None:
            self._first = Sized(call)
            return
        self._like_q = call.q == call.out_view() and call.dtype not in QUANTIZED_DTYPES
        self._launch = launch = Launches(kernel, call, {}, tensor_names, driver, device)
        self._maps = MapMaker(launch, kernel, call, call.device) if launch.maps else None
        self._first = launch.first

    def resize(self, call: Call) -> Sized:
        """Size-dependent values of another call of the kind, which has something to compute and no tile map."""
        assert self._launch is not None
        return self._launch.resize(call)

    def __call__(
        self, given: Given, addresses: list[int], sized: Sized | None = None, repeats: Repeats | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the call. ``addresses`` as launches take them: those of results that are allocated here are 0, and what
        follows those of the variant's tensors is missing. ``sized``: of a call of other sizes than the prepared one.
        ``repeats``: a list to which its launches are added, if they can be repeated, else None."""
        if repeats is not None:
            repeats.append(made := self._repeatable(given, addresses.copy(), sized))
            if made is not None:
                made.launch(addresses[0], addresses[OUT], ())
                out: Tensor = given.out
                return out if made.lse is None else (out, made.lse)
        scale, out, lse = given.softmax_scale, given.out, None
        scale = self._scale if scale is None else softmax_scale_of(scale)
        scalars = self.scalars(given.arguments) if self._call.rules else ()
        launch = self._launch
        if launch is None:
            return self._nothing(out)
        if sized is None:
            sized = self._first
        if out is None:
            out = self.new_output(given.q, sized)
            addresses[OUT] = out.data_ptr()
        if self._return_lse:
            lse = self._new_lse(sized, addresses)
        shared = maps = None  # kept until the launches are enqueued
        if sized.workspaces:
            shared = launch.enter_workspaces(addresses, sized)
        if self._maps is not None:
            maps = self._enter_map(given, addresses, scalars)
        chain = launch.ready(addresses, sized)
        if chain is not None:
            chain(addresses, scale, scalars, sized)
        del shared, maps
        return out if lse is None else (out, lse)

    def new_output(self, q: Tensor, sized: Sized) -> Tensor:
        """Memory for the output of a call with this q."""
        if self._like_q:
            return torch.empty_like(q)
        return torch.empty(sized.out_shape, dtype=self._dtype, device=self._device)

    def scale_of(self, given: object) -> float:
        """The softmax scale of a call that gives this one, or None."""
        return self._scale if given is None else softmax_scale_of(given)

    def enqueue(self, addresses: list[int], scale: float, scalars: Sequence[Number], sized: Sized) -> Tensor | None:
        """Enqueue a call on the current stream, whose results lie at ``addresses``, and which needs no tile map. The
        result is memory to keep until then."""
        launch = self._launch
        assert launch is not None
        kept = launch.enter_workspaces(addresses, sized) if sized.workspaces else None
        chain = launch.ready(addresses, sized)
        if chain is not None:
            chain(addresses, scale, scalars, sized)
        return kept

    @property
    def runs_beside(self) -> bool:
        """Whether a call only launches a kernel, which may lead, or follow, another one that runs side by side with
        it."""
        kernel = self.kernel
        if kernel is None or self._maps is not None or self._return_lse:
            return False
        return len(kernel.launches) == 1 and kernel.main.pdl and "beside" in kernel.main.bounds

    def _repeatable(self, given: Given, addresses: list[int], sized: Sized | None) -> Repeatable | None:
        """The launches of a call, to be repeated; None if it allocates its results, needs a tile map, or launches
        nothing; or if its device is not the current one."""
        launch = self._launch
        if launch is None or self._maps is not None or given.out is None:
            return None
        if not launch.device_is_ready():
            return None
        scale = self._scale if given.softmax_scale is None else softmax_scale_of(given.softmax_scale)
        return self.repeatable(addresses, scale, self.scalars(given.arguments), self._first if sized is None else sized)

    def repeatable(self, addresses: list[int], scale: float, scalars: Sequence[Number], sized: Sized) -> Repeatable:
        """The launches of a call that can be repeated, on the current stream of a device that is ready."""
        launch = self._launch
        assert launch is not None
        given = tuple(addresses), scale, scalars
        lse = self._new_lse(sized, addresses) if self._return_lse else None
        kept = launch.enter_workspaces(addresses, sized) if sized.workspaces else None
        chain = launch.ready(addresses, sized)
        assert chain is not None, "there is something to compute"
        return Repeatable(chain, addresses, scale, scalars, sized, launch.stream(), kept, given, lse)

    def _new_lse(self, sized: Sized, addresses: list[int]) -> Tensor:
        """Memory for the log-sum-exp of a call, whose address is entered."""
        # with strides, which torch takes faster than a shape alone
        lse = torch.empty_strided(sized.lse_shape, sized.lse_strides, dtype=torch.float32, device=self._device)
        addresses[LSE] = lse.data_ptr()
        return lse

    def _enter_map(self, given: Given, addresses: list[int], scalars: Sequence[Number]) -> list[Tensor]:
        """Append the address of the tile map, the caller's or one that is kept or made now, and return it."""
        assert self.kernel is not None
        assert self._maps is not None
        assert self._launch is not None
        if given.tile_map is not None:
            assert isinstance(given.tile_map, TileMap), "``require_map`` has seen to it"
            words = given.tile_map.check(self.kernel, self._call, self._maps.shape)
            self._maps.enter(words, addresses)
            return [words]
        if not self._launch.classifies(next(iter(self._launch.maps))):
            raise NoKernelError(f"{self.kernel.full_name} needs a tile map and has no classifier; pass tile_map=")
        return self._maps.append(given, addresses, self._scale, scalars)

    def made_map(self, addresses: list[int], scalars: Sequence[Number]) -> Tensor:
        """Return the tile map of a call, made now."""
        assert self._maps is not None
        return self._maps.made(addresses, self._scale, scalars)

    def _nothing(self, out: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the results of a call without work, the output in the tensor that is given for it: every query sees no
        key."""
        if out is None:
            out = torch.zeros(self._first.out_shape, dtype=self._dtype, device=self._device)
        else:
            out.zero_()
        if not self._return_lse:
            return out
        first = self._first
        lse = torch.empty_strided(first.lse_shape, first.lse_strides, dtype=torch.float32, device=self._device)
        return out, lse.fill_(-math.inf)
