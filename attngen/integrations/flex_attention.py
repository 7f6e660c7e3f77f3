"""FlexAttention's functions on attngen's kernels: replace one import.

    from attngen.integrations.flex_attention import create_block_mask, flex_attention

The signatures are those of ``torch.nn.attention.flex_attention``. A ``mask_mod`` or ``score_mod`` is traced once into
the language of specs, as a variant that ``attngen build`` or ``attngen.jit()`` compiles like any other; bands replace
lists of blocks, so that making a mask costs no more than a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.flex_call import BlockMask, Mod, last_of, now
from attngen.integrations.flex_meaning import meaning
from attngen.runtime import calls

__all__ = ["BlockMask", "and_masks", "create_block_mask", "flex_attention", "meaning", "noop_mask", "or_masks"]

_BLOCK_SIZE = 128
_is_compiling = torch.compiler.is_compiling


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK_SIZE,
    _compile: bool = False,
    *,
    fallback: bool = False,
) -> BlockMask:
    """Return the mask of ``mask_mod(b, h, q_idx, kv_idx)``, for sequences of ``Q_LEN`` queries and ``KV_LEN`` keys.

    The function is traced, and captured tensors are read once: if a tensor that is compared with itself never
    decreases, as document numbers do, that makes a band. ``BLOCK_SIZE`` is only for ``to_dense``, ``sparsity`` and
    torch; ``_compile`` changes nothing. Raises CallError for a function that the language cannot express, unless
    ``fallback`` leaves such functions to torch.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return BlockMask(mask_mod, B, H, Q_LEN, KV_LEN, where, BLOCK_SIZE, fallback=fallback)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
    fallback: bool = False,
) -> Any:
    """Return attention of query (B, Hq, L, E) over key and value (B, Hkv, S, E), as (B, Hq, L, Ev).

    ``score_mod(score, b, h, q_idx, kv_idx)`` changes the scaled logit; ``block_mask`` says which keys a query sees.
    With ``return_lse`` the result is (out, lse); ``return_aux`` gives (out, AuxOutput), with the log-sum-exp where it
    asks for it. Captured tensors that require gradients get them. ``kernel_options`` tune torch's kernels, and change
    nothing here. What the language cannot express raises CallError, and what no kernel computes NoKernelError; with
    ``fallback``, both run on torch's FlexAttention.
    """
    del kernel_options
    if _is_compiling() and not fallback:
        from attngen.integrations.flex_program import in_a_program  # torch's compiler takes a second to import

        return in_a_program(
            query, key, value, score_mod, block_mask, scale, enable_gqa=enable_gqa, return_lse=return_lse,
            return_aux=return_aux,
        )  # fmt: skip
    if return_aux is None and not fallback and not query.is_nested:
        last = last_of(block_mask, score_mod) if block_mask is None or type(block_mask) is BlockMask else None
        if last is not None and last.checked == (query.shape, key.shape, enable_gqa):
            found = last.of(score_mod)
            if found is not None:
                return calls.attention(
                    query, key, value, variant=found.handle, softmax_scale=scale, layout="bhsd", return_lse=return_lse,
                    **found.tensors(),
                )  # fmt: skip
    return now(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux, fallback)


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Return True: every query sees every key."""
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: Mod) -> Mod:
    """Return a mask_mod that is true where all of these are."""

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            found = found & mask(b, h, q_idx, kv_idx)
        return found

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """Return a mask_mod that is true where any of these is."""

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            found = found | mask(b, h, q_idx, kv_idx)
        return found

    return or_mask
