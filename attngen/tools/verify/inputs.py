"""Random inputs of a call, made from a variant's declarations and nothing else.

Keys and values after the end of each sequence are NaN: in the padding of a dense tensor, after ``seqused_k``, after the
last packed sequence, in the rows of a page that a sequence does not fill, and in pages of no sequence. A kernel that
lets any of it through returns NaN. Entries of a page table after those that a sequence needs are not pages of the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import DESCALES, QUANTIZED_DTYPES
from attngen.dtypes import dtype as dtype_row
from attngen.lang.variant import Variant
from attngen.runtime.arguments import Call, Packing, bind
from attngen.runtime.descales import check_descales
from attngen.runtime.paging import Paging, bind_paged
from attngen.tools.cases import Case
from attngen.tools.values import arguments_of

#: Rows of NaN after each sequence of a dense tensor, or after the last packed one.
_POISONED_ROWS = 24

#: Factor of normal numbers before they are rounded to 8 bits: far below 448, and above the subnormals.
_QUANTIZED_SCALE = 32.0

#: Pages of a cache that no sequence has.
_SPARE_PAGES = 3

#: Entries of a page table that must not be read.
_NO_PAGES = (-1, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call. ``arguments`` holds the variant's own scalars and tensors by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    packing: Packing | None = None
    seqused_k: Tensor | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    paging: Paging | None = None
    page_layout: str = "NHD"
    packed: Inputs | None = None  # of a call over pages: the same sequences, one after the other
    descales: Mapping[str, Tensor] = field(default_factory=dict)  # of quantized q, k and v

    def bind(self, variant: Variant) -> Call:
        """Return the checked call, which asks for the log-sum-exp."""
        call = self._bind(variant)
        check_descales(call, self.descales)
        return call

    def _bind(self, variant: Variant) -> Call:
        if self.paging is not None:
            return bind_paged(
                variant, self.q, self.k, self.v, self.paging, softmax_scale=None, seqused_k=self.seqused_k,
                return_lse=True, page_layout=self.page_layout, arguments=self.arguments,
            )  # fmt: skip
        return bind(
            variant, self.q, self.k, self.v, self.packing, softmax_scale=None, seqused_k=self.seqused_k,
            return_lse=True, layout="bshd", arguments=self.arguments,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Element:
    """What q, k and v are made of: their dtype (its name in specs) and head dims."""

    dtype: str
    head_dim_qk: int
    head_dim_v: int
    scale_block: int = 0  # tokens that share a scale of a quantized dtype; 0: all of a head

    @property
    def torch(self) -> torch.dtype:
        """The dtype as torch knows it."""
        found = getattr(torch, dtype_row(self.dtype).torch)
        assert isinstance(found, torch.dtype)
        return found

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return random numbers in this dtype; those of 8 bits are larger, so that they use its range."""
        return (tensor * _QUANTIZED_SCALE if self.dtype in QUANTIZED_DTYPES else tensor).to(self.torch)


def make_inputs(
    variant: Variant, case: Case, layout: str, element: Element, device: torch.device | str, seed: int, *,
    calm: float = 1.0,
) -> Inputs:  # fmt: skip
    """Return fresh random inputs; the same seed gives the same on every device.

    ``calm`` from 1 to 0 narrows the integer tensors that have no declared range, for variants that use these as
    indices: see ``values.arguments_of``.
    """
    if layout == "paged":
        return _in_pages(variant, case, element, device, seed, calm)
    generator = torch.Generator().manual_seed(seed)
    lengths = case.k_lengths if case.used is None else case.used
    shapes = {"q": (case.heads, element.head_dim_qk), "k": (case.kv_heads, element.head_dim_qk)}
    shapes["v"] = (case.kv_heads, element.head_dim_v)
    rows = {
        "q": (case.q_lengths, case.q_lengths),
        "k": (case.k_lengths, lengths),
        "v": (case.k_lengths, lengths),
    }
    fill = _packed if layout == "varlen" else _padded
    filled = {name: fill(*rows[name], shapes[name], generator) for name in shapes}
    tensors = {name: element.rounded(tensor).to(device) for name, tensor in filled.items()}
    cut = {name: _cut(tensors[name], rows[name][0], layout) for name in tensors}
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments_of(variant, case, layout, generator, calm).items()
    }
    return Inputs(
        **cut,
        packing=_packing(case, device) if layout == "varlen" else None,
        seqused_k=None if case.used is None else torch.tensor(case.used, dtype=torch.int32, device=device),
        arguments=arguments,
        descales=_descales(case, element, generator, device) if element.dtype in QUANTIZED_DTYPES else {},
    )


def _descales(
    case: Case, element: Element, generator: torch.Generator, device: torch.device | str
) -> dict[str, Tensor]:
    """Return the scales of quantized q, k and v, each with strides of its own; elements times these are about 1."""
    of_head: tuple[int, ...] = (case.batch, case.kv_heads)
    shapes = dict.fromkeys(DESCALES, of_head)
    if block := element.scale_block:
        shapes = dict.fromkeys(DESCALES, (*of_head, -(-case.seqlen_k // block)))
        shapes["q_descale"] = (case.batch, case.heads, -(-case.seqlen_q // block))
        if block == 1:
            shapes["v_descale"] = of_head
    scales = {name: (0.5 + torch.rand(shape, generator=generator)) / _QUANTIZED_SCALE for name, shape in shapes.items()}
    scales["k_descale"] = scales["k_descale"].transpose(0, 1).contiguous().transpose(0, 1)
    if not block:
        scales["v_descale"] = scales["v_descale"][0, 0]
    return {name: scale.to(device) for name, scale in scales.items()}


def _in_pages(
    variant: Variant, case: Case, element: Element, device: torch.device | str, seed: int, calm: float
) -> Inputs:
    """Return the inputs of a call over pages in random order, and those of its sequences packed."""
    generator = torch.Generator().manual_seed(seed)
    made = arguments_of(variant, case, "paged", generator, calm)
    arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        for lengths in (case.q_lengths, case.k_lengths)
    )
    rows = {"q": case.q_lengths, "k": case.k_lengths, "v": case.k_lengths}
    shapes = {"q": (case.heads, element.head_dim_qk), "k": (case.kv_heads, element.head_dim_qk)}
    shapes["v"] = (case.kv_heads, element.head_dim_v)
    flat = {name: _cut(_packed(rows[name], rows[name], shapes[name], generator), rows[name], "varlen") for name in rows}
    table, pages = _paged(case, starts_k, flat["k"], flat["v"], generator)
    equal = len(set(case.q_lengths)) == 1
    page_layout = "HND" if seed % 2 else "NHD"
    if page_layout == "HND":
        pages = tuple(tensor.transpose(1, 2).contiguous() for tensor in pages)
    flat = {name: tensor.to(device, element.torch) for name, tensor in flat.items()}
    starts_q, starts_k, table = (tensor.to(device) for tensor in (starts_q, starts_k, table))
    longest = case.max_pages * case.page_size  # seqlen_k in the shapes of the variant's tensors
    return Inputs(
        flat["q"].unflatten(0, (case.batch, case.seqlen_q)) if equal else flat["q"],
        pages[0].to(device, element.torch),
        pages[1].to(device, element.torch),
        seqused_k=starts_k.diff(),
        arguments=arguments,
        paging=Paging(table) if equal else Paging(table, starts_q, case.seqlen_q),
        page_layout=page_layout,
        packed=Inputs(**flat, packing=Packing(starts_q, starts_k, case.seqlen_q, longest), arguments=arguments),
    )


def _paged(
    case: Case, starts: Tensor, k: Tensor, v: Tensor, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a page table, and keys and values in pages (pages, page_size, kv_heads, head_dim)."""
    counts = [-(-length // case.page_size) for length in case.k_lengths]
    order = iter(torch.randperm(sum(counts) + _SPARE_PAGES, generator=generator).tolist())
    table = torch.tensor(_NO_PAGES)[torch.randint(0, len(_NO_PAGES), (case.batch, case.max_pages), generator=generator)]
    shape = (sum(counts) + _SPARE_PAGES, case.page_size)
    pages = tuple(torch.full((*shape, *rows.shape[1:]), torch.nan) for rows in (k, v))
    for b, count in enumerate(counts):
        for i in range(count):
            page = next(order)
            table[b, i] = page
            first = int(starts[b]) + i * case.page_size
            last = min(first + case.page_size, int(starts[b + 1]))
            for tensor, rows in zip(pages, (k, v), strict=True):
                tensor[page, : last - first] = rows[first:last]
    return table.to(torch.int32), pages


def _padded(
    extents: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return (batch, longest + padding, heads, head_dim): random up to each length, NaN after it."""
    tensor = torch.full((len(extents), max(extents) + _POISONED_ROWS, *shape), torch.nan)
    for row, length in zip(tensor, lengths, strict=True):
        row[:length] = torch.randn((length, *shape), generator=generator)
    return tensor


def _packed(
    extents: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return (total + padding, heads, head_dim): sequences one after the other, NaN after each one's length."""
    tensor = torch.full((sum(extents) + _POISONED_ROWS, *shape), torch.nan)
    start = 0
    for extent, length in zip(extents, lengths, strict=True):
        tensor[start : start + length] = torch.randn((length, *shape), generator=generator)
        start += extent
    return tensor


def _cut(tensor: Tensor, extents: tuple[int, ...], layout: str) -> Tensor:
    """Return the view that a call gets: what follows its last row is not the call's memory."""
    return tensor[: sum(extents)] if layout == "varlen" else tensor[:, : max(extents)]


def _packing(case: Case, device: torch.device | str) -> Packing:
    offsets = [
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        for lengths in (case.q_lengths, case.k_lengths)
    ]
    return Packing(offsets[0], offsets[1], case.seqlen_q, case.seqlen_k)
