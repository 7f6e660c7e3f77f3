"""``block_sparse_attention_forward`` and ``_backward`` of ``cudnn.block_sparse_attention``, argument for argument.

The forms are those of nvidia-cudnn-frontend 1.32. Lengths, head dimensions, cards and dtypes are those of attngen's
kernels, and the reference serves the CPU. ``allow_empty_block_nums``, ``kv_splits``, ``use_clc`` and
``bucket_size_blocks`` tune kernels there, and change nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.shared.arguments import contiguous_rows, refused, tensor
from attngen.integrations.shared.blocks import SPEC, Pairs, candidate, of_lists, sizes_of
from attngen.integrations.shared.choice import VariantCandidate, attend
from attngen.integrations.shared.gradients import gradients_of, write
from attngen.runtime.device import driver as drivers

__all__ = ["BSA", "block_sparse_attention_backward", "block_sparse_attention_forward"]

#: The axis of queries, or of keys.
_LAYOUTS = {"bhsd": 2, "bshd": 1}


class Results(dict[str, Tensor]):
    """Tensors by name, or by place, which unpack in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Tensor:
        return [*self.values()][key] if isinstance(key, int) else super().__getitem__(key)


def block_sparse_attention_forward(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    q2k_block_index: Tensor,
    block_sparse_num: int | None = None,
    block_sizes: Tensor | None = None,
    q2k_block_nums: Tensor | None = None,
    *,
    sparse_block_size: int | None = None,
    allow_empty_block_nums: bool = False,
    softmax_scale: float | None = None,
    pack_gqa: bool | None = None,
    layout: str = "bhsd",
    kv_splits: int | str = 1,
    use_clc: bool | None = None,
) -> Results:
    """Attention of q (b, h, sq, d) over those blocks of k and v (b, hk, sk, d) that each block of queries lists.

    ``q2k_block_index`` (b, h, query blocks, capacity) int32 lists key blocks in any order, each once; of a list the
    first ``q2k_block_nums`` (b, h, query blocks) int32 entries count, or ``block_sparse_num``, or all.
    ``block_sizes`` int32 says how many keys of each key block count, from its first on: (key blocks,), (b, key blocks)
    or (b, h, key blocks). ``sparse_block_size`` 64 or 128 is that of queries and keys; None is 64, but 128 on GPUs of
    compute capability 10 and 11. With ``layout="bshd"`` q, k, v and the output are (b, s, h, d).

    Returns o_tensor, in the layout of q, and lse_tensor, natural, (b, h, sq) float32 in both layouts. A query that sees
    no key has 0 and −inf. Autograd differentiates both. Raises CallError, and NoKernelError.
    """
    del allow_empty_block_nums, kv_splits, use_clc
    if pack_gqa:
        raise refused("pack_gqa", "lists are of each head of q; leave it out, or pass False")
    q, k, v = _rows(layout, q_tensor=q_tensor, k_tensor=k_tensor, v_tensor=v_tensor)
    chosen = _candidate(q, k, q2k_block_index, q2k_block_nums, block_sparse_num, block_sizes, sparse_block_size)
    out, lse = attend([chosen], q, k, v, spec=SPEC, softmax_scale=softmax_scale, return_lse=True)
    return Results(o_tensor=out.transpose(1, _LAYOUTS[layout]), lse_tensor=lse)


def block_sparse_attention_backward(
    do_tensor: Tensor,
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    lse_tensor: Tensor,
    q2k_block_index: Tensor,
    block_sparse_num: int | None = None,
    block_sizes: Tensor | None = None,
    q2k_block_nums: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    dq_tensor: Tensor | None = None,
    dk_tensor: Tensor | None = None,
    dv_tensor: Tensor | None = None,
    bucket_size_blocks: int | None = None,
    sparse_block_size: int | None = None,
    layout: str = "bhsd",
) -> Results:
    """Gradients of the forward pass with the same arguments, from its o_tensor and lse_tensor.

    Returns dq_tensor, dk_tensor and dv_tensor in the layout of q; those that are passed are written, and returned. Not
    differentiable. Raises CallError, and NoKernelError.
    """
    del bucket_size_blocks
    q, k, v, out, dout = _rows(
        layout, q_tensor=q_tensor, k_tensor=k_tensor, v_tensor=v_tensor, o_tensor=o_tensor, do_tensor=do_tensor
    )
    chosen = _candidate(q, k, q2k_block_index, q2k_block_nums, block_sparse_num, block_sizes, sparse_block_size)
    gradients = gradients_of(
        [chosen], q, k, v, out, tensor("lse_tensor", lse_tensor), dout, spec=SPEC, softmax_scale=softmax_scale
    )
    made = [each.transpose(1, _LAYOUTS[layout]) for each in gradients]
    given = dq_tensor, dk_tensor, dv_tensor
    write(made, given)
    dq, dk, dv = (one if into is None else into for one, into in zip(made, given, strict=True))
    return Results(dq_tensor=dq, dk_tensor=dk, dv_tensor=dv)


class BSA:
    """The functions by the name under which the package ``cudnn`` has them."""

    block_sparse_attention_forward = staticmethod(block_sparse_attention_forward)
    block_sparse_attention_backward = staticmethod(block_sparse_attention_backward)


def _rows(layout: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors as (b, s, h, d), with contiguous rows."""
    if layout not in _LAYOUTS:
        raise CallError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
    for name, given in tensors.items():
        if tensor(name, given).dim() != 4:
            raise CallError(f"{name} must have 4 dimensions, got shape {tuple(given.shape)}")
    return [each.transpose(1, _LAYOUTS[layout]) for each in contiguous_rows(**tensors)]


def _candidate(
    q: Tensor, k: Tensor, indices: Tensor, counts: Tensor | None, count: int | None, sizes: Tensor | None,
    block: int | None,
) -> VariantCandidate:  # fmt: skip
    """The variant of a call, with its lists as a block mask."""
    if block is None:
        block = _default_block(q)
    if block not in (64, 128):
        raise CallError(f"sparse_block_size must be 64 or 128, got {block!r}")
    pairs = Pairs(q.shape[0], q.shape[2], q.shape[1], k.shape[1], block, block)
    if counts is None and count is not None:
        capacity = tensor("q2k_block_index", indices).shape[-1]
        if not 1 <= count <= capacity:
            raise CallError(f"block_sparse_num must be from 1 to {capacity}, the entries of a list, got {count}")
        indices = indices[..., :count]
    shown = of_lists(("q2k_block_index", "q2k_block_nums"), indices, counts, pairs)
    sizes = None if sizes is None else sizes_of("block_sizes", sizes, pairs)
    return candidate(shown, pairs, sizes=sizes)


def _default_block(q: Tensor) -> int:
    if not q.is_cuda:
        return 64
    return 128 if drivers.current().capability(q.device.index or 0) // 10 in (10, 11) else 64
