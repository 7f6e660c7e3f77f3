"""The state of random numbers of calls with dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.runtime.arguments.dropout import draw, with_state
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.torch_state import is_traced
from attngen.runtime.registry.binding import find


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
