"""A call runs: as one that was recognized by its tensors, on the reference where there is no GPU, or by a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import Call, Results
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.operations.attention import later
from attngen.runtime.operations.attention.dropout_state import with_random_state
from attngen.runtime.operations.attention.recall import SEEN, of_its_kind, seen_key
from attngen.runtime.registry.binding import bind_call, require_reference

if TYPE_CHECKING:
    from attngen.runtime.launch.prepared import Repeats
    from attngen.runtime.operations.attention.recall import Lookup


def run(given: Given, repeats: Repeats | None = None) -> Results:
    """Run a call now, as operators do, in whatever state torch is; see ``run_plain``."""
    if may_repeat(given.q):
        return run_plain(given, repeats)
    for holds, way in _STATES:
        if holds():
            return way(given)
    return _run_unlike(given)


def run_plain(given: Given, repeats: Repeats | None = None) -> Results:
    """Run a call that ``may_repeat``. It adds to ``repeats`` what launches it again, if a kernel runs.

    A call like an earlier one is recognized by its tensors. Another is checked and runs on the reference, or looks for
    its kernel (``kernel_call``).
    """
    lookup = seen_key(given)  # None from where on the call is not to be remembered
    if lookup is not None:
        try:
            alike = SEEN[lookup[0]]
        except TypeError:  # something that cannot be hashed stands where a name belongs: binding refuses it
            alike = None
        if alike:
            tensors, prepared, calls = alike
            addresses = tensors.addresses(given, lookup[1])
            if addresses is not None:
                sized = None
                if calls is not None:
                    prepared, sized = calls.ready(given) or (None, None)
                if prepared is not None:
                    return of_its_kind(calls, prepared(given, addresses, sized, repeats), repeats)
    return _run_unlike(given, lookup, repeats)


def _run_unlike(given: Given, lookup: Lookup | None = None, repeats: Repeats | None = None) -> Results:
    """Run a call whose tensors were not recognized, or not looked at."""
    given = _with_numbers(given)
    if not torch_state.on_gpu(given.q) or given.backend == "reference":
        return _run_on_reference(given)
    if debugging.active() or not (type(given.k) in PLAIN and type(given.v) in PLAIN):
        given, _ = _bound(given)
        lookup = None
    return later.kernel_call.run(given, lookup, repeats, run)


def _refuse_trace(given: Given) -> Results:
    raise CallError("torch.jit.trace cannot record a launch; allowed: torch.compile, torch.export")


def _run_transformed(given: Given) -> Results:
    given = _with_numbers(given)
    by_kernel = torch_state.on_gpu(given.q) and given.backend != "reference"
    return later.transforms.attend(given, run, later.differentiate if by_kernel else None)


#: States in which a call takes another way, the first one that holds.
_STATES: tuple[tuple[Callable[[], bool], Callable[[Given], Results]], ...] = (
    (torch_state.is_tracing, _refuse_trace),
    (torch_state.transforms_active, _run_transformed),
)


def _with_numbers(given: Given) -> Given:
    """A call with a state of random numbers, if it names a rate of dropout."""
    return with_random_state(given) if given.arguments and DROPOUT_P.name in given.arguments else given


def _bound(given: Given) -> tuple[Given, Call]:
    """A call as it is launched, and with its arguments checked; in debug blocks, with what its tensors hold, too."""
    if given.tile_map is not None:
        later.require_map(given.tile_map)
    given = in_rows(given)
    call, _ = bind_call(given)
    if debugging.active():
        debugging.check(call)
    return given, call


def _run_on_reference(given: Given) -> Tensor | tuple[Tensor, Tensor]:
    given, call = _bound(given)
    require_reference(call, given.backend)
    return _run_reference(call, given)


def _run_reference(call: Call, given: Given) -> Tensor | tuple[Tensor, Tensor]:
    from attngen.runtime.reference.eager import reference

    with torch.autocast(given.q.device.type, enabled=False):
        out, lse = reference(call, given.q, given.k, given.v)
    if given.out is not None:
        out = given.out.copy_(out)
    return (out, lse) if call.return_lse else out
