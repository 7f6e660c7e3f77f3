"""What the arguments of flash-attn's functions mean, whichever of its versions they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.choice import NO_LIMIT, Candidate
from attngen.lang.ir import MAX_SEQLEN

#: The shipped spec that builds what these functions ask for.
SPEC = "flash_attn"


def tensor(name: str, value: Any) -> Tensor:
    """Return an argument that must be a tensor, or raise CallError."""
    if not isinstance(value, Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def steppable(name: str, given: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, a copy only if need be, as flash-attn does."""
    return given if tensor(name, given).stride(-1) == 1 else given.contiguous()


def candidates_for(
    q: Tensor,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
    batch: int,
    chunk: int = 0,
) -> list[Candidate]:
    """Return the variants that compute what the arguments ask for, the most specific first; ``chunk`` 0 means none."""
    left, right = sides_of(window_size)
    if causal:
        right = 0
    if softcap is None or softcap < 0:
        raise CallError(f"softcap must be positive, or 0 for none, got {softcap}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 0 <= chunk <= MAX_SEQLEN:
        raise CallError(f"attention_chunk must be an integer from 1 to {MAX_SEQLEN}, or 0 for none, got {chunk!r}")
    sides = {"left": left, "right": right}
    if chunk:
        return _in_chunks(sides, chunk, softcap, alibi_slopes)
    if alibi_slopes is not None:
        slope = slopes_of(alibi_slopes, batch, q.shape[-2])
        if softcap:
            return [Candidate("window_softcap_alibi", {**sides, "cap": softcap, "slope": slope})]
        general = Candidate("window_alibi", {**sides, "slope": slope})
        plain = alibi_slopes.dim() == 1 and (left, right) == (NO_LIMIT, 0)
        return [Candidate("alibi", {"slope": alibi_slopes}), general] if plain else [general]
    capped, suffix = ({"cap": softcap}, "_softcap") if softcap else ({}, "")
    general = Candidate(f"window{suffix}", {**sides, **capped})
    if (left, right) == (NO_LIMIT, 0):
        return [Candidate("softcap" if softcap else "causal", capped), general]
    if right == 0:
        return [Candidate("softcap_window" if softcap else "sliding_window", {"window": left + 1, **capped}), general]
    if (left, right) == (NO_LIMIT, NO_LIMIT) and not softcap:
        return [Candidate("full"), general]
    return [general]


def sides_of(window_size: Sequence[int | None]) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees; −1 means no limit."""
    pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not pair or any(isinstance(side, float | str) for side in window_size):
        raise CallError(
            f"window_size must be (left, right), integers with -1 or None for no limit, got {window_size!r}"
        )
    left, right = (NO_LIMIT if side is None or not 0 <= side < MAX_SEQLEN else int(side) for side in window_size)
    return left, right


def _in_chunks(sides: Mapping[str, int], chunk: int, softcap: float, alibi_slopes: Tensor | None) -> list[Candidate]:
    """Return the variants in which queries see their own chunk of keys only."""
    if alibi_slopes is not None:
        raise refused("alibi_slopes", "no variant of this integration has both ALiBi and attention_chunk")
    given = {**sides, "chunk": chunk}
    if softcap:
        return [Candidate("window_chunk_softcap", {**given, "cap": softcap})]
    general = Candidate("window_chunk", given)
    causal = (sides["left"], sides["right"]) == (NO_LIMIT, 0)
    return [Candidate("chunked", {"chunk": chunk}), general] if causal else [general]


def slopes_of(slopes: Tensor, batch: int, heads: int) -> Tensor:
    """Return ALiBi slopes as (batch, heads), without copying them."""
    if tensor("alibi_slopes", slopes).dtype != torch.float32 or slopes.shape not in ((heads,), (batch, heads)):
        raise CallError(
            f"alibi_slopes must be float32 of shape ({heads},) or ({batch}, {heads}), got {slopes.dtype} of shape "
            f"{tuple(slopes.shape)}"
        )
    return slopes.expand(batch, heads)


def unpack(name: str, packed: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """Return views of the parts of a packed tensor of ``rank`` dimensions; the third to last dimension counts them."""
    if tensor(name, packed).dim() != rank or packed.shape[-3] != parts:
        form = f"({'batch, seqlen' if rank == 5 else 'total'}, {parts}, heads, head_dim)"
        raise CallError(f"{name} must have shape {form}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def refused(argument: str, reason: str) -> NoKernelError:
    """Return the error for an argument that no kernel serves."""
    return NoKernelError(f"{argument} is not supported: {reason}")
