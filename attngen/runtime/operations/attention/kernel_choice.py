"""The kernel for a call: what selection looks at, and kernels that are built or made on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from attngen.errors import NoKernelError
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.autograd.training import asks_for_determinism
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import Resolved, registry
from attngen.runtime.registry.no_kernel import no_kernel
from attngen.runtime.registry.select import Request, first_that_fits


def request_of(call: Call, addresses: Sequence[int], given: Given) -> Request:
    """The request that selection looks at; ``addresses`` as ``run`` lists them."""
    names = tensor_names(given.arguments)
    known = dict(zip(TENSORS, addresses, strict=False))
    known |= {f"tensor:{name}": address for name, address in zip(names, addresses[len(FORWARD) :], strict=True)}
    scalars = {name: call.scalars[name] for name in given.arguments if name in call.scalars}
    return Request(call, device_index(call), known, scalars, given.backend)


def tensor_names(arguments: Mapping[str, object]) -> list[str]:
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
