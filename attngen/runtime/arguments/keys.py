"""Cache keys of prepared calls: shapes and strides of tensors, and names, but no values."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.runtime.arguments.given import PLACES, Given

#: Types of tensors that need no look at what a mode or a subclass makes of them.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Types of scalars that need none either.
NUMBERS = (int, float, bool)


def note(key: list[object], tensor: object) -> int:
    """Add what a launch depends on of a tensor to a key, and return its address; 0 if it is not a tensor."""
    if not isinstance(tensor, Tensor):
        key.append(type(tensor))  # refused when the call is bound
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        if tensor.layout == torch.strided:
            raise
        key.append(tensor.layout)  # refused when the call is bound
        return 0
    if not address:
        key.append(type(tensor))  # no tensor, or one without memory of its own, which is refused when the call is bound
    key += (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.get_device(),
        address & 15,
        tensor.is_neg(),
        tensor.requires_grad and torch.is_grad_enabled(),
    )
    return address


def note_others(key: list[object], addresses: list[int], given: Given) -> None:
    """Add to a key, and to the addresses, all tensors of a call but q, k and v; and the names of its arguments."""
    for place in PLACES[given.form]:
        tensor = given[place]
        if tensor is not None:
            key.append(place)
            addresses[place] = note(key, tensor)
    arguments = given.arguments
    if arguments:
        for name, value in arguments.items():
            key.append(name)
            if type(value) not in NUMBERS and isinstance(value, Tensor):
                addresses.append(note(key, value))
