"""Libraries of some masks and scores beside FlexAttention, as far as they are installed and know a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lab.bench.intervals import endpoints
from attngen.lab.bench.masks.cases.forms import Forms
from attngen.lab.bench.masks.report import CUDNN_BLOCKS, CUDNN_FLEX, CUEQUIVARIANCE, FASTVIDEO, MaskCell
from attngen.lab.bench.peers import CUDNN, TOO_MANY_INTERVALS, lacking, output_of


class Rival(Protocol):
    """A library that takes some of the cases."""

    @property
    def name(self) -> str:
        """The name of its rows."""

    @property
    def heads_first(self) -> bool:
        """Whether it takes (batch, heads, seqlen, head_dim) instead of (batch, seqlen, heads, head_dim)."""

    def missing(self) -> str | None:
        """Reason why it cannot be used here at all, or None. Imports nothing."""

    def refuses(self, cell: MaskCell, forms: Forms) -> str | None:
        """Reason why it does not support a cell, as far as is known beforehand, or None."""

    def enter(self, cell: MaskCell, forms: Forms, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Its call, with gradients; this and the first call raise what the library raises for what it lacks."""


def rivals() -> tuple[Rival, ...]:
    """All of them in the order of their rows."""
    return CudnnIntervals(), CudnnBlocks(), FastVideo(), CuEquivariance()


class CudnnIntervals:
    """The flexible attention of cuDNN's frontend: masks as intervals of keys, whose plan is made beforehand."""

    name, heads_first = CUDNN_FLEX, False

    def missing(self) -> str | None:
        """See ``Rival``."""
        return lacking(CUDNN)

    def refuses(self, cell: MaskCell, forms: Forms) -> str | None:
        """See ``Rival``."""
        return "takes no scores" if forms.score_mod is not None else None

    def enter(self, cell: MaskCell, forms: Forms, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """See ``Rival``."""
        ends = endpoints(forms.mask_mod, cell.seqlen, q.device, heads=cell.heads if forms.by_head else 1)
        if ends is None:
            raise CallError(TOO_MANY_INTERVALS)
        cudnn = import_module("cudnn")
        plan = cudnn.create_mask_plan(ends, q, k, v, build_backward=True)
        return partial(cudnn.flex_attn_func, q, k, v, mask_plan=plan)


class CudnnBlocks:
    """The block-sparse attention of cuDNN's frontend, whose lists are made beforehand."""

    name, heads_first = CUDNN_BLOCKS, True

    def missing(self) -> str | None:
        """See ``Rival``."""
        return lacking(CUDNN)

    def refuses(self, cell: MaskCell, forms: Forms) -> str | None:
        """See ``Rival``."""
        return _side_refused(forms, 64, 128)

    def enter(self, cell: MaskCell, forms: Forms, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """See ``Rival``."""
        lists, counts = block_lists(forms)
        options = {"q2k_block_nums": counts, "sparse_block_size": forms.sizes["block"]}
        return lambda: _ByCudnn.apply(q, k, v, lists, options)


class _ByCudnn(torch.autograd.Function):
    """cuDNN's two block-sparse functions, which are no operation of autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lists: Tensor, options: dict[str, Any]) -> Any:
        """See ``torch.autograd.Function``."""
        out, lse = import_module("cudnn").block_sparse_attention_forward(q, k, v, lists, **options)
        ctx.save_for_backward(q, k, v, out, lse, lists)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        """See ``torch.autograd.Function``."""
        q, k, v, out, lse, lists = ctx.saved_tensors
        attend_backward = import_module("cudnn").block_sparse_attention_backward
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, lists, **ctx.options)
        return dq, dk, dv, None, None


class FastVideo:
    """The attention over chosen blocks in FastVideo's video sparse attention, without their choice and the means."""

    name, heads_first = FASTVIDEO, True

    def missing(self) -> str | None:
        """See ``Rival``."""
        return lacking("fastvideo-kernel")

    def refuses(self, cell: MaskCell, forms: Forms) -> str | None:
        """See ``Rival``."""
        return _side_refused(forms, 64)

    def enter(self, cell: MaskCell, forms: Forms, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """See ``Rival``."""
        attend = import_module("fastvideo_kernel").block_sparse_attn_from_indices
        lists, counts = block_lists(forms)
        sizes = torch.full(lists.shape[-1:], forms.sizes["block"], device=q.device, dtype=torch.int32)
        return lambda: output_of(attend(q, k, v, lists, counts, sizes))


class CuEquivariance:
    """cuEquivariance's attention of triangles: a bias for each pair and head, and keys that none sees."""

    name, heads_first = CUEQUIVARIANCE, True

    def missing(self) -> str | None:
        """See ``Rival``."""
        return lacking("cuequivariance-torch") or lacking(
            "cuequivariance-ops-torch-cu12", "cuequivariance-ops-torch-cu13"
        )

    def refuses(self, cell: MaskCell, forms: Forms) -> str | None:
        """See ``Rival``."""
        return None if forms.pair_bias is not None else "takes a bias of pairs and a mask of keys only"

    def enter(self, cell: MaskCell, forms: Forms, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """See ``Rival``; the sequences are rows of pairs, (1, rows, heads, seqlen, head_dim)."""
        assert forms.pair_bias is not None
        bias, keep = (forms.tensors[name] for name in forms.pair_bias)
        attend = import_module("cuequivariance_torch").triangle_attention
        mask = keep.expand(len(q), -1)[None, :, None, None]
        bias = bias.view(1, 1, *bias.shape[-3:])
        return lambda: attend(q[None], k[None], v[None], bias, mask)[0]


def block_lists(forms: Forms) -> tuple[Tensor, Tensor]:
    """Key blocks that each query block sees, the valid ones first, (1, heads, query blocks, key blocks), and their
    number; int32."""
    assert forms.blocks is not None
    chosen = forms.tensors[forms.blocks][None]
    order = (~chosen).int().argsort(dim=-1, stable=True).int()
    return order.contiguous(), chosen.sum(-1, dtype=torch.int32)


def _side_refused(forms: Forms, *sides: int) -> str | None:
    if forms.blocks is None:
        return "takes lists of blocks only"
    if forms.sizes["block"] not in sides:
        return f"takes blocks of {' or '.join(map(str, sides))}, not of {forms.sizes['block']}"
    return None
