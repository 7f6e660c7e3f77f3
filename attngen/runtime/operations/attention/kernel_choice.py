"""The kernel for a call: what selection looks at, and kernels that are built or made on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.dropout import draw, with_state
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.arguments.torch_state import is_traced
from attngen.runtime.autograd.training import asks_for_determinism
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import Resolved, registry
from attngen.runtime.registry.no_kernel import no_kernel
from attngen.runtime.registry.select import Request, first_that_fits


def with_random_state(given: Given, *, draws: bool = True) -> Given:
    """Return a call that names a rate of dropout, with a state of random numbers if need be."""
    device = given.q.device if isinstance(given.q, Tensor) else torch.device("cpu")
    named = given.variant
    variant = named if isinstance(named, Variant) else find(named, given.package).variant
    return given._replace(arguments=with_state(variant, given.arguments, device, draws=draws))


def random_state(q: Tensor) -> Tensor:
    """Seed and offset for a call with this q, (2,) int64, which may be traced, from torch's generator of its device."""
    if not is_traced(q):
        return draw(q.device)
    from attngen.runtime.operations.attention import dropout_operator  # what it imports of torch brings a compiler

    return dropout_operator.call(q.device)


def request_of(call: Call, addresses: Sequence[int], given: Given) -> Request:
    """The request that selection looks at; ``addresses`` as ``run`` lists them."""
    names = tensor_names(given.arguments)
    known = dict(zip(TENSORS, addresses, strict=False))
    known |= {f"tensor:{name}": address for name, address in zip(names, addresses[len(FORWARD) :], strict=True)}
    scalars = {name: call.scalars[name] for name in given.arguments if name in call.scalars}
    return Request(call, device_index(call), known, scalars, given.backend)


def tensor_names(arguments: Mapping[str, Any]) -> list[str]:
    return [name for name, value in arguments.items() if isinstance(value, Tensor)]


def device_index(call: Call) -> int:
    return call.device.index or 0


def choose(resolved: Resolved, request: Request) -> Kernel:
    """Return the kernel for a call, or raise NoKernelError."""
    driver = drivers.current()
    kernel = first_that_fits(resolved.kernels, request, driver)
    if kernel is None:
        raise no_kernel(resolved.kernels, request, driver)
    return kernel


def backward_of(request: Request, given: Given) -> Request:
    """The request of a call's backward pass."""
    ordered = given.deterministic or asks_for_determinism() == 2
    passed = dict(request.call.scalars)
    return replace(request, given=passed, backend=None, direction="backward", deterministic=ordered)


def kernel_for(resolved: Resolved, request: Request, given: Given, *, learns: bool = False) -> Kernel:
    """Return the kernel that serves a call, or raise NoKernelError. If no loaded kernel does, load those that were
    built in the meantime, or compile one, with its backward if the call ``learns``."""
    variant, package = given.variant, given.package
    try:
        kernel = choose(resolved, request)
    except NoKernelError:
        soon = None
        if learns and on_demand.maker is not None:
            later = backward_of(request, given)
            soon = later if first_that_fits(resolved.kernels, later, drivers.current()) is None else None
        if not registry.refresh_if_built() and (package is not None or not on_demand.make(request, soon)):
            raise
        try:
            kernel = choose(find(variant, package), request)
        except NoKernelError:  # the newly built kernels do not serve this call either
            if package is not None or not on_demand.make(request):
                raise
            kernel = choose(find(variant, package), request)
    on_demand.note(request)
    return kernel
