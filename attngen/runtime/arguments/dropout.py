"""Dropout at a call: the state of its random numbers, and the same numbers in plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P, MULTIPLIERS, RNG_STATE, ROUNDS, UNITS, WEYL
from attngen.lang.runs import positions
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call

_WORD = 2**32 - 1


def with_state(
    variant: Variant, arguments: Mapping[str, object], device: torch.device, *, draws: bool = True
) -> Mapping[str, object]:
    """Return the arguments of a call that names a rate, with a state of random numbers if it gives none.

    What reads no random number takes one that is not drawn (``draws=False``), and leaves the generator as it is. A
    variant without dropout takes a rate of 0, which is then left out; CallError for any other.
    """
    if variant.dropout:
        if arguments.get(RNG_STATE.name) is not None:
            return arguments
        state = draw(device) if draws else torch.empty(RNG_STATE.shape, dtype=torch.int64, device=device)
        return {**arguments, RNG_STATE.name: state}
    check_rate(variant.name, arguments[DROPOUT_P.name])
    return {name: value for name, value in arguments.items() if name not in (DROPOUT_P.name, RNG_STATE.name)}


def check_rate(variant: str, rate: object) -> None:
    """Refuse a rate other than 0 for a variant that has no dropout."""
    if isinstance(rate, Tensor) or rate != 0:
        raise CallError(
            f"{variant}: dropout_p is {rate!r}, but the variant drops nothing: its spec lacks 'dropout: true'"
        )


def draw(device: torch.device) -> Tensor:
    """Return seed and offset, (2,) int64, from torch's default generator of the device; nothing waits for a GPU.

    They are drawn on the device, so that a captured graph draws again with each replay.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


def rate_of(call: Call) -> tuple[int, float]:
    """Return the threshold of a call, and what multiplies the probabilities that are kept."""
    rate = torch.tensor(call.scalars[DROPOUT_P.name], dtype=torch.float32, device="cpu")  # as a kernel gets it
    threshold = min(int(rate * UNITS + 0.5), UNITS - 1)
    return threshold, UNITS / (UNITS - threshold)


def kept(call: Call, sequence: int, queries: slice | Tensor, keys: int) -> Tensor:
    """Mask (heads, queries, keys) of pairs that dropout keeps, for some queries of a sequence and its keys."""
    load = positions(call.variant)
    if load is not None:
        queries = call.tensors[load.tensor][queries].long()
    state = call.tensors[RNG_STATE.name]
    threshold, _ = rate_of(call)
    if isinstance(queries, Tensor):  # blocks of 16 queries
        blocks, place = torch.unique(queries // 16, return_inverse=True)
        place = 16 * place + queries % 16
    else:
        first, last = queries.start // 16, -(-queries.stop // 16)
        blocks = torch.arange(first, last, device=state.device)
        place = torch.arange(queries.start, queries.stop, device=state.device) - 16 * first
    rows = (8 * blocks[:, None] + torch.arange(8, device=state.device)).view(1, -1, 1)
    groups = torch.arange(-(-keys // 16) * 4, device=state.device)
    units = sequence * call.heads + torch.arange(call.heads, device=state.device)[:, None, None]
    words = philox(state[0], (groups, rows, units, state[1] & _WORD))
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])  # (a, j, e)
    numbers = halves.broadcast_to(8, call.heads, rows.shape[1], groups.shape[0])
    each = numbers.reshape(2, 2, 2, call.heads, rows.shape[1] // 8, 8, groups.shape[0] // 4, 4)
    # (a, j, e, h, block of queries, r, block of keys, t) to (h, query, key)
    table = each.permute(3, 4, 0, 5, 6, 1, 7, 2).reshape(call.heads, 2 * rows.shape[1], 4 * groups.shape[0])
    return table[:, place, :keys] >= threshold


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four 32-bit words of Philox-4x32-10 as int64; the words of the counter broadcast, ``seed`` is an int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = (_product(c, m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a product of two 32-bit numbers."""
    low, high = word * (multiplier & 0xFFFF), word * (multiplier >> 16)
    return (high + (low >> 16)) >> 16, (word * multiplier) & _WORD
