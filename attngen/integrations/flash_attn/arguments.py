"""The arguments of flash-attn's functions, of all of its versions, as calls of attngen."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attngen.dtypes import HEAD_DIMS
from attngen.errors import CallError
from attngen.integrations.shared import choice
from attngen.integrations.shared.arguments import refused, tensor
from attngen.integrations.shared.choice import NO_LIMIT, Packing, Pages, VariantCandidate, attend
from attngen.lang.ir import MAX_SEQLEN

#: The shipped spec that builds what these functions ask for.
SPEC = "flash_attn"

#: Reasons for refusing arguments of version 4.
CUTE_MASKS = "functions of CuTe are not translated; attngen.variant and attngen.integrations.flex_attention take masks"
OWN_TILES = "kernels find the tiles that they visit in the mask"
GATHERED_KEYS = "no kernel gathers keys by index"

#: A window: (left, right), or a tensor or an array of two integers.
Window: TypeAlias = Sequence[int | None] | Tensor


def sequences_of(cu_seqlens_q: Tensor) -> int:
    """Number of packed sequences."""
    return tensor("cu_seqlens_q", cu_seqlens_q).shape[0] - 1


def packing_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any) -> Packing:
    """Packed sequences of a call; reading a longest length from a tensor waits for the GPU."""
    longest_q, longest_k = (int(n) if isinstance(n, Tensor) else n for n in (max_seqlen_q, max_seqlen_k))
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k


def candidates_for(
    q: Tensor,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    batch: int,
    chunk: int = 0,
) -> list[VariantCandidate]:
    """The variants that serve the arguments, the most specific first; ``chunk`` 0 means none."""
    left, right = sides_of(window_size)
    if causal:
        right = 0
    if softcap is None or softcap < 0:
        raise CallError(f"softcap must be positive, or 0 for none, got {softcap}")
    whole = _integer(chunk)
    if whole is None or not 0 <= whole <= MAX_SEQLEN:
        raise CallError(f"attention_chunk must be an integer from 1 to {MAX_SEQLEN}, or 0 for none, got {chunk!r}")
    chunk = whole
    sides = {"left": left, "right": right}
    if chunk:
        return _in_chunks(sides, chunk, softcap, alibi_slopes)
    if alibi_slopes is not None:
        slope = slopes_of(alibi_slopes, batch, q.shape[-2])
        if softcap:
            return [VariantCandidate("window_softcap_alibi", {**sides, "cap": softcap, "slope": slope})]
        general = VariantCandidate("window_alibi", {**sides, "slope": slope})
        plain = alibi_slopes.dim() == 1 and (left, right) == (NO_LIMIT, 0)
        return [VariantCandidate("alibi", {"slope": alibi_slopes}), general] if plain else [general]
    capped, suffix = ({"cap": softcap}, "_softcap") if softcap else ({}, "")
    general = VariantCandidate(f"window{suffix}", {**sides, **capped})
    if (left, right) == (NO_LIMIT, 0):
        return [VariantCandidate("softcap" if softcap else "causal", capped), general]
    if right == 0:
        return [
            VariantCandidate("softcap_window" if softcap else "sliding_window", {"window": left + 1, **capped}),
            general,
        ]
    if (left, right) == (NO_LIMIT, NO_LIMIT) and not softcap:
        return [VariantCandidate("full"), general]
    return [general]


def attend_wide(
    candidates: Sequence[VariantCandidate], q: Tensor, k: Tensor, v: Tensor, *, pages: Pages | None = None,
    return_lse: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """As ``attend``, also for a v that is wider than kernels are: one call for each of its parts.

    Columns of the output do not depend on each other, so each call computes those of its part, and S and P again.
    """
    widest = HEAD_DIMS[-1]
    if v.shape[-1] <= widest or q.shape[-1] > widest or not choice.on_gpu(q):
        return attend(candidates, q, k, v, pages=pages, return_lse=return_lse, **options)
    outs, lse = [], None
    for place, part in enumerate(v.split(widest, dim=-1)):
        own = pages
        if pages is not None and pages.out is not None:
            own = replace(pages, out=pages.out.split(widest, dim=-1)[place])
        result = attend(candidates, q, k, part, pages=own, return_lse=return_lse and not place, **options)
        out, lse = result if return_lse and not place else (result, lse)
        outs.append(out)
    whole = torch.cat(outs, dim=-1) if pages is None or pages.out is None else pages.out
    return (whole, lse) if return_lse else whole


def sides_of(window_size: Window) -> tuple[int, int]:
    """Keys before and after its own position that a query sees; −1 means no limit.

    Reading a tensor that is on a GPU waits for it.
    """
    pair: Any = window_size
    if isinstance(pair, Tensor) or type(pair).__module__ == "numpy":
        pair = pair.tolist()
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise _no_window(window_size)
    left, right = (_side(side, window_size) for side in pair)
    return left, right


def _side(side: Any, window_size: Window) -> int:
    if side is None:
        return NO_LIMIT
    reach = _integer(side)
    if reach is None:
        raise _no_window(window_size)
    return reach if 0 <= reach < MAX_SEQLEN else NO_LIMIT


def _no_window(window_size: Any) -> CallError:
    return CallError(
        "window_size must be (left, right), integers with -1 or None for no limit, as a tuple, a list, a tensor or an "
        f"array, got {window_size!r}"
    )


def _integer(value: Any) -> int | None:
    """Value of an integer of Python, numpy or torch; None for anything else, bools among them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _in_chunks(
    sides: Mapping[str, int], chunk: int, softcap: float, alibi_slopes: Tensor | None
) -> list[VariantCandidate]:
    """The variants in which queries see their own chunk of keys only."""
    if alibi_slopes is not None:
        raise refused("alibi_slopes", "no variant of this integration has both ALiBi and attention_chunk")
    given = {**sides, "chunk": chunk}
    if softcap:
        return [VariantCandidate("window_chunk_softcap", {**given, "cap": softcap})]
    general = VariantCandidate("window_chunk", given)
    causal = (sides["left"], sides["right"]) == (NO_LIMIT, 0)
    return [VariantCandidate("chunked", {"chunk": chunk}), general] if causal else [general]


def slopes_of(slopes: Tensor, batch: int, heads: int) -> Tensor:
    """ALiBi slopes as (batch, heads), without copying them."""
    if tensor("alibi_slopes", slopes).dtype != torch.float32 or slopes.shape not in ((heads,), (batch, heads)):
        raise CallError(
            f"alibi_slopes must be float32 of shape ({heads},) or ({batch}, {heads}), got {slopes.dtype} of shape "
            f"{tuple(slopes.shape)}"
        )
    return slopes.expand(batch, heads)


def unpack(name: str, packed: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """Views of the parts of a packed tensor of ``rank`` dimensions; the third to last dimension counts them."""
    if tensor(name, packed).dim() != rank or packed.shape[-3] != parts:
        form = f"({'batch, seqlen' if rank == 5 else 'total'}, {parts}, heads, head_dim)"
        raise CallError(f"{name} must have shape {form}, got {tuple(packed.shape)}")
    return packed.unbind(-3)
