"""Calls of one case: attngen with constants, with scalars and through its front end, other libraries, and causal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from attngen import variant
from attngen.integrations.flex import attention as front_end
from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.masks.cases.forms import Forms, Mod, Size
from attngen.lab.bench.masks.report import (
    CAUSAL,
    CONSTANTS,
    FLEX,
    FRONT_END,
    RIVALS,
    SCALARS,
    TILE,
    UNLEARNED,
    MaskCell,
)
from attngen.lab.bench.masks.rivals import rivals
from attngen.runtime.operations.attention.entry import attention
from attngen.runtime.operations.attention.introspection import explain

#: Pairs of a mask that torch's block masks are made of without a compiler, which takes seconds for each.
_EAGER_PAIRS = 2**27


@dataclass(frozen=True)
class MaskInputs:
    """q, k and v, which require gradients, and a gradient of the output."""

    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor

    def heads_first(self) -> MaskInputs:
        """The same numbers as (batch, heads, seqlen, head_dim), contiguous."""
        q, k, v = (one.detach().transpose(1, 2).contiguous().requires_grad_() for one in self.leaves)
        return MaskInputs((q, k, v), self.dout.transpose(1, 2).contiguous())


@lru_cache(8)
def inputs(shape: tuple[int, int, int, int], kv_heads: int, device: torch.device) -> tuple[MaskInputs, MaskInputs]:
    """Random inputs as (batch, seqlen, heads, head_dim), and the same with heads first."""
    generator = torch.Generator(device).manual_seed(1)
    kv_shape = (*shape[:2], kv_heads, shape[3])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    shapes = (shape, kv_shape, kv_shape, shape)
    q, k, v, dout = (torch.randn(each, device=device, dtype=dtype, generator=generator) for each in shapes)
    bshd = MaskInputs((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), dout)
    return bshd, bshd.heads_first()


@dataclass(frozen=True)
class MaskContender:
    """One way to compute a case.

    ``call`` returns the output in the order of axes of ``dout``; ``learned`` are the tensors that take gradients beside
    q, k and v. ``explained`` are the arguments of ``attngen.explain``; None for other libraries.
    """

    name: str
    call: Callable[[], Tensor]
    inputs: MaskInputs
    learned: tuple[Tensor, ...] = ()
    explained: Mapping[str, Any] | None = None
    heads_first: bool = False

    def forward(self) -> Tensor:
        """Compute the output, without a graph."""
        with torch.no_grad():
            return self.call()

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of q, k, v and the learned tensors; ``out`` keeps its graph."""
        return torch.autograd.grad(out, (*self.inputs.leaves, *self.learned), self.inputs.dout, retain_graph=True)

    def results(self) -> list[Tensor]:
        """Compute the output, the gradients of q, k and v as (batch, seqlen, heads, head_dim), and the others."""
        out = self.call()
        results = [out.detach(), *self.gradients(out)]
        return [one.transpose(1, 2) for one in results[:4]] + results[4:] if self.heads_first else results

    def kernels(self) -> dict[str, tuple[str, bool]]:
        """The name of the kernel of each direction, and whether it reads a tile map."""
        if self.explained is None:
            return {}
        kernels = {each: explain(*self.inputs.leaves, direction=each, **self.explained).kernel for each in DIRECTIONS}
        return {each: (one.full_name, one.needs_tile_map) for each, one in kernels.items() if one is not None}


@dataclass(frozen=True)
class Contenders:
    """The contenders of a cell by name, each made when it is needed, which may raise."""

    cell: MaskCell
    device: torch.device
    forms: Forms
    block_mask: Any = field(default=None)

    @classmethod
    def of(cls, cell: MaskCell, device: torch.device, *, quick: bool = False) -> Contenders:
        """Make the tensors of a cell, and FlexAttention's block mask: compiled as documented, or ``quick``."""
        forms = cell.case.make(Size(cell.seqlen, cell.heads, cell.head_dim, device, batch=cell.batch))
        return cls(cell, device, forms, block_mask(forms.mask_mod, cell, device, quick=quick, by_head=forms.by_head))

    def left_out(self) -> dict[str, str]:
        """The libraries that do not take the cell, with the reasons."""
        reasons = {one.name: one.missing() or one.refuses(self.cell, self.forms) for one in rivals()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def names(self) -> list[str]:
        """Their names, FlexAttention first."""
        left_out = self.left_out()
        return [
            FLEX, *(name for name in RIVALS if name not in left_out),
            CONSTANTS, *([SCALARS] if self.forms.sizes else []), FRONT_END,
            *([UNLEARNED] if self.forms.learned else []), CAUSAL,
        ]  # fmt: skip

    def make(self, name: str) -> MaskContender:
        """Make a contender. Raises what a library raises for a function that it does not take."""
        cell, forms = self.cell, self.forms
        bshd, bhsd = inputs((cell.batch, cell.seqlen, cell.heads, cell.head_dim), cell.kv_heads, self.device)
        learned = tuple(forms.tensors[each] for each in forms.learned)
        shared = cell.heads != cell.kv_heads
        if name == FLEX:
            attend = _with_own_code(_attend(forms.score_mod, self.block_mask, shared), cell.name)
            call = attend if self.device.type == "cpu" else torch.compile(attend, dynamic=False)
            return MaskContender(name, partial(call, *bhsd.leaves), bhsd, learned, heads_first=True)
        for rival in rivals():
            if rival.name == name:
                given = bhsd if rival.heads_first else bshd
                call = rival.enter(cell, forms, *given.leaves)
                return MaskContender(name, call, given, learned, heads_first=rival.heads_first)
        if name == FRONT_END:
            mask = None
            if forms.mask_mod is not None:
                mask = front_end.create_block_mask(
                    forms.mask_mod, None, cell.heads if forms.by_head else None, cell.seqlen, cell.seqlen,
                    device=self.device,
                )  # fmt: skip
            traced = front_end.meaning(forms.mask_mod, forms.score_mod, self.device)
            explained = {"variant": traced.handle, "layout": "bhsd", **traced.tensors(bhsd.dout.dtype)}
            call = partial(front_end.flex_attention, *bhsd.leaves, forms.score_mod, mask, enable_gqa=shared)
            return MaskContender(name, call, bhsd, learned, explained, heads_first=True)
        if name == CAUSAL:
            return _own(name, bshd, {"variant": "causal"})
        if name == UNLEARNED:
            forms, learned = replace(forms, learned=()), ()
            forms = replace(forms, tensors={each: one.detach() for each, one in forms.tensors.items()})
        constant = name != SCALARS
        own = variant(name=cell.case.identifier, **forms.fields(constant=constant))
        keywords = {"variant": own, **forms.arguments(constant=constant)}
        return _own(name, bshd, keywords, learned)

    def mask_reads_tensors(self) -> bool:
        """Whether tensors decide which pairs are visible; else one tile map serves all calls of a shape."""
        own = variant(name=self.cell.case.identifier, **self.forms.fields(constant=True)).value
        return bool(own.uses(own.mask)[1])

    def tiles(self) -> int:
        """Count the tiles of 128 x 128 pairs that are not empty, over all heads and sequences."""
        mask = self.block_mask
        if self.forms.hides is not None:
            mask = block_mask(self.forms.hides, self.cell, self.device, quick=True)
        if mask is None:
            return (-(-self.cell.seqlen // TILE)) ** 2 * self.cell.heads * self.cell.batch
        counts = [mask.kv_num_blocks, mask.full_kv_num_blocks]
        tiles = sum(int(count.sum()) for count in counts if count is not None)
        return tiles * self.cell.heads // mask.kv_num_blocks.shape[1]

    def pair_bytes(self, tiles: int) -> int:
        """Bytes of tensors over pairs in so many tiles of all heads."""
        return sum(
            TILE**2 * tensor.element_size() * (tiles if tensor.dim() > 2 else tiles // self.cell.heads)
            for tensor in self.forms.over_pairs
        )


def _own(name: str, bshd: MaskInputs, keywords: dict[str, Any], learned: tuple[Tensor, ...] = ()) -> MaskContender:
    return MaskContender(name, partial(attention, *bshd.leaves, **keywords), bshd, learned, keywords)


def block_mask(
    mask_mod: Mod | None, cell: MaskCell, device: torch.device, *, quick: bool, by_head: bool = False
) -> Any:
    """torch's block mask of a function, None for none. ``quick`` leaves the compiler out where memory allows."""
    if mask_mod is None:
        return None
    heads = cell.heads if by_head else None
    quick = device.type == "cpu" or (quick and cell.seqlen**2 * (heads or 1) <= _EAGER_PAIRS)

    def make() -> Any:
        return of_torch.create_block_mask(mask_mod, None, heads, cell.seqlen, cell.seqlen, device=device.type)

    return make() if quick else torch.compile(_with_own_code(make, f"mask of {cell.name}"))()


def _attend(score_mod: Mod | None, block_mask: Any, shared: bool) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return of_torch.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=shared)

    return attend


def _with_own_code(function: Any, name: str) -> Any:
    """Copy a function with a code object of its own: torch compiles only so many versions of one code object."""
    code = function.__code__.replace(co_name="".join(one if one.isalnum() else "_" for one in name))
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time a call, with the work that it enqueues, in seconds."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began
