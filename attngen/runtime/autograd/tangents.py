"""Outputs and their tangents by a kernel: forward-mode derivatives of calls whose q, k or v carry tangents.

As with a forward, the first call with some shapes checks everything, selects a kernel and prepares its launch; later
ones find that in a cache.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.lang.variant import Variant
from attngen.operations import JVP
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.addresses import NO_BACKWARD, known_of
from attngen.runtime.arguments.checked import view
from attngen.runtime.arguments.given import KEPT, Given, keyed_of
from attngen.runtime.arguments.keys import note_others
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.expanded import need_copies, with_copies
from attngen.runtime.launch.gradients import usable
from attngen.runtime.launch.prepared_jvp import Derived, Directions, PreparedJvp, launch_for
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import bind_call, find
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.no_kernel import no_kernel
from attngen.runtime.registry.select import Request, first_that_fits

#: Prepared calls, and which tangents they take, by everything that they depend on.
_PREPARED: RecentCache[tuple[PreparedJvp, tuple[bool, ...]]] = RecentCache(PREPARED_CALLS)


def by_kernel(given: Given, directions: Directions) -> Derived | None:
    """Output, log-sum-exp and the tangents of both, from the tangents of q, k and v; None if no kernel takes the call.

    A call for which a kernel could have been built gives a warning, which says how.
    """
    if debugging.active():
        debugging.check(bind_call(given)[0])
    q, k, v, variant = given.q, given.k, given.v, given.variant
    moved = [None if t is None else _readable(t, like) for t, like in zip(directions, (q, k, v), strict=True)]
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), *NO_BACKWARD]
    key: list[object] = [
        variant if isinstance(variant, str) else id(variant), registry.generation, *keyed_of(given),
        q.dtype, q.get_device(),
        q.shape, q.stride(), addresses[0] & 15,
        k.shape, k.stride(), addresses[1] & 15,
        v.shape, v.stride(), addresses[2] & 15,
        *[None if tangent is None else tangent.stride() for tangent in moved],
    ]  # fmt: skip
    note_others(key, addresses, given)
    identity = tuple(key)
    prepared = _PREPARED[identity]
    if prepared is None:
        call, _ = bind_call(given._replace(return_lse=KEPT, out=None))
        if call.empty:
            return None
        if need_copies(call):
            return by_kernel(with_copies(given), moved)
        names = tuple(name for name, value in given.arguments.items() if isinstance(value, Tensor))
        device = call.device.index or 0
        request = Request(call, device, known_of(names, addresses), dict(call.scalars), direction=JVP)
        try:
            kernel = _kernel(request, given)
        except NoKernelError as error:
            slow = f"the tangent is computed by plain torch in float32, which is slow: {error}"
            warnings.warn(slow, UserWarning, stacklevel=2)
            return None
        only, taken = launch_for(kernel, moved)
        completed = _completed(moved, taken, given)
        views = [None if t is None else view(t.shape, t.stride(), call.order) for t in completed]
        kept = variant if isinstance(variant, Variant) else None
        prepared = PreparedJvp(kernel, call, names, only, views, drivers.current(), device, kept), taken
        _PREPARED.put(identity, prepared)
    derivative, taken = prepared
    return derivative(given, _completed(moved, taken, given), addresses)


def _kernel(request: Request, given: Given) -> Kernel:
    """The kernel for a call, compiled where ``attngen.jit`` is on and none is built. Raises NoKernelError."""
    driver = drivers.current()
    kernel = first_that_fits(find(given.variant, given.package).kernels, request, driver)
    if kernel is None and registry.refresh_if_built():
        kernel = first_that_fits(find(given.variant, given.package).kernels, request, driver)
    if kernel is None and given.package is None and on_demand.make(request):
        kernel = first_that_fits(find(given.variant, given.package).kernels, request, driver)
    if kernel is None:
        raise no_kernel(find(given.variant, given.package).kernels, request, driver)
    on_demand.note(request)
    return kernel


def _readable(tangent: Tensor, like: Tensor) -> Tensor:
    """A tangent as kernels read it: in the dtype of its tensor, in memory, with rows at multiples of 16 bytes."""
    if tangent._is_zerotensor():
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    tangent = tangent.resolve_neg().to(like.dtype)
    return tangent if usable(tangent) else tangent.clone(memory_format=torch.contiguous_format)


def _completed(moved: Directions, taken: tuple[bool, ...], given: Given) -> list[Tensor | None]:
    """The tangents that a launch takes: zeros where there is none."""
    of = zip(moved, taken, (given.q, given.k, given.v), strict=True)
    return [
        None if not takes else torch.zeros_like(like, memory_format=torch.contiguous_format) if t is None else t
        for t, takes, like in of
    ]
