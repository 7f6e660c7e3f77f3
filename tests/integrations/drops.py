"""Factors by which a call with dropout multiplies its probabilities: the numbers that it draws next, as a dense
tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.runtime.arguments.dropout import draw, kept, rate_of


def next_factors(rate: float, lengths: list[tuple[int, int]], heads: int, device: str = "cpu") -> list[Tensor]:
    """Draw as a call does, and return for each sequence 0 where it drops and 1 / (1 − rate) elsewhere: (h, sq, sk).

    ``lengths`` holds the queries and the keys of each sequence. The rate should be a multiple of 2⁻¹⁶.
    """
    call: Any = SimpleNamespace(
        variant=attngen.variant(dropout=True).value, heads=heads, scalars={"dropout_p": rate},
        tensors={"rng_state": draw(torch.device(device))},
    )  # fmt: skip
    scale = rate_of(call)[1]
    return [kept(call, i, slice(0, rows), keys) * scale for i, (rows, keys) in enumerate(lengths)]


def next_dense_factors(rate: float, batch: int, heads: int, rows: int, keys: int, device: str = "cpu") -> Tensor:
    """Return the factors of a dense call, (b, h, sq, sk)."""
    return torch.stack(next_factors(rate, [(rows, keys)] * batch, heads, device))


def factors(seed: int, rate: float, batch: int, heads: int, rows: int, keys: int, device: str = "cpu") -> Tensor:
    """Return the factors of the first dense call after ``torch.manual_seed(seed)``, and seed again for that call."""
    torch.manual_seed(seed)
    actual = next_dense_factors(rate, batch, heads, rows, keys, device)
    torch.manual_seed(seed)
    return actual
