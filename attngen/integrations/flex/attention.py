"""FlexAttention's functions on attngen's kernels: replace one import.

    from attngen.integrations.flex_attention import create_block_mask, flex_attention

The signatures are those of ``torch.nn.attention.flex_attention``. A ``mask_mod`` or ``score_mod`` is traced once into
the language of specs, as a variant that ``attngen build`` or ``attngen.jit()`` compiles like any other; bands replace
lists of blocks, so that making a mask costs no more than a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from attngen.errors import CallError
from attngen.integrations.flex.call import last_of, now
from attngen.integrations.flex.mask import BlockMask, Mod
from attngen.integrations.flex.meaning import meaning
from attngen.runtime.operations.attention import entry as calls

__all__ = [
    "BlockMask",
    "flex_attention",
    "AuxOutput",
    "AuxRequest",
    "FlexKernelOptions",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "or_masks",
    "and_masks",
    "noop_mask",
    "meaning",
]

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
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    fallback: bool = False,
) -> BlockMask:
    """Make the mask of ``mask_mod(b, h, q_idx, kv_idx)``, for sequences of ``Q_LEN`` queries and ``KV_LEN`` keys.

    The function is traced, and captured tensors are read once: if a tensor that is compared with itself never
    decreases, as document numbers do, that makes a band. ``BLOCK_SIZE`` and the arguments from ``separate_full_blocks``
    on are only for the lists of blocks, which torch computes where a program reads them; ``_compile`` changes nothing.
    Raises CallError for a function that the language cannot express, unless ``fallback`` leaves such functions to
    torch.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {}
    if not separate_full_blocks or compute_dq_write_order:
        options = {"separate_full_blocks": separate_full_blocks}
        if compute_dq_write_order:
            options.update(compute_dq_write_order=True, dq_kv_order=dq_kv_order)
        unknown = [name for name in options if name not in signature(of_torch.create_block_mask).parameters]
        if unknown:
            raise CallError(f"{unknown[0]} is not known to torch {torch.__version__}, which computes lists of blocks")
    return BlockMask.create(mask_mod, B, H, Q_LEN, KV_LEN, where, BLOCK_SIZE, options, fallback=fallback)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    fallback: bool = False,
) -> Any:
    """Attention of query (B, Hq, L, E) over key and value (B, Hkv, S, E), as (B, Hq, L, Ev).

    ``score_mod(score, b, h, q_idx, kv_idx)`` changes the scaled logit; ``block_mask`` says which keys a query sees.
    With ``return_lse`` the result is (out, lse); ``return_aux`` gives (out, AuxOutput), with the log-sum-exp and the
    largest logit of each query where it asks for them, from kernels of entries with ``max_logits: true``. Captured
    tensors that require gradients get them. ``kernel_options`` tune torch's kernels, and change nothing here. What the
    language cannot express raises CallError, and what no kernel computes NoKernelError;
    with ``fallback``, both run on torch's FlexAttention.
    """
    del kernel_options
    if _is_compiling() and not fallback:
        from attngen.integrations.flex.program import in_a_program  # torch's compiler takes a second to import

        return in_a_program(
            query, key, value, score_mod, block_mask, scale, enable_gqa=enable_gqa, return_lse=return_lse,
            return_aux=return_aux,
        )  # fmt: skip
    if return_aux is None and not fallback and not query.is_nested:
        last = last_of(block_mask, score_mod) if block_mask is None or type(block_mask) is BlockMask else None
        if last is not None and last.checked == (query.shape, key.shape, enable_gqa):
            traced = last.of(score_mod)
            if traced is not None:
                return calls.attention(
                    query, key, value, variant=traced.handle, softmax_scale=scale, layout="bhsd", return_lse=return_lse,
                    **traced.tensors(query.dtype),
                )  # fmt: skip
    return now(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux, fallback)


def create_nested_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK_SIZE,
    _compile: bool = False,
) -> BlockMask:
    """Raise CallError: packed sequences are another call."""
    raise CallError(
        "nested tensors are not supported. attngen.attention_varlen takes packed sequences with cu_seqlens, and the "
        "variant of the mask: variant=meaning(mask_mod, None, device).variant; or pack them into one sequence, with "
        "document numbers that the mask_mod compares"
    )


def __getattr__(name: str) -> Any:
    """The rest of torch's module, such as its types of functions."""
    try:
        return getattr(of_torch, name)
    except AttributeError:
        raise AttributeError(f"module 'attngen.integrations.flex_attention' has no attribute '{name}'") from None
