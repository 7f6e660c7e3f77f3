"""A call runs: as one that was recognized by its tensors, on the reference where there is no GPU, or by a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.arguments.torch_state import is_tracing, transforms_active
from attngen.runtime.operations.attention import later
from attngen.runtime.operations.attention.dropout_state import with_random_state
from attngen.runtime.operations.attention.recall import SEEN, of_its_kind, seen_key
from attngen.runtime.registry.binding import bind_call, require_reference

if TYPE_CHECKING:
    from attngen.runtime.launch.prepared import Repeats


def run(given: Given, repeats: Repeats | None = None) -> Any:
    """Run a call now, whether it comes from a program or from an operator.

    A call like an earlier one is recognized by its tensors. Another is checked and runs on the reference, or looks for
    its kernel (``kernel_call``). It adds to ``repeats`` what launches it again, if a kernel runs.
    """
    lookup = seen_key(given)  # None from where on the call is not to be remembered
    if lookup is not None:
        try:
            alike: Any = SEEN[lookup[0]]
        except TypeError:  # something that cannot be hashed stands where a name belongs: binding refuses it
            alike = None
        addresses = alike[0].addresses(given, lookup[1]) if alike else None
        if addresses is not None and not (debugging.active() or is_tracing() or transforms_active()):
            _, prepared, calls = alike
            sized = None
            if calls is not None:
                prepared, sized = calls.ready(given) or (None, None)
            if prepared is not None:
                return of_its_kind(calls, prepared(given, addresses, sized, repeats), repeats)
    q, k, v, backend = given.q, given.k, given.v, given.backend
    if given.arguments and DROPOUT_P.name in given.arguments:
        given = with_random_state(given)
    on_gpu = torch_state.on_gpu(q)
    if is_tracing():
        raise CallError("torch.jit.trace cannot record a launch; allowed: torch.compile, torch.export")
    if transforms_active():
        return later.transforms.attend(given, run, later.differentiate if on_gpu and backend != "reference" else None)
    if not on_gpu or backend == "reference" or debugging.active() or not (type(k) in PLAIN and type(v) in PLAIN):
        if given.tile_map is not None:
            later.require_map(given.tile_map)
        given = in_rows(given)
        call, _ = bind_call(given)
        if debugging.active():
            debugging.check(call)
        if backend == "reference" or not on_gpu:
            require_reference(call, backend)
            return _run_reference(call, given)
        lookup = None
    return later.kernel_call.run(given, lookup, repeats, run)


def _run_reference(call: Call, given: Given) -> Tensor | tuple[Tensor, Tensor]:
    from attngen.runtime.reference.eager import reference

    with torch.autocast(given.q.device.type, enabled=False):
        out, lse = reference(call, given.q, given.k, given.v)
    if given.out is not None:
        out = given.out.copy_(out)
    return (out, lse) if call.return_lse else out
