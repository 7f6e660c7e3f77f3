"""Random inputs of a call, made from a variant's declarations and nothing else.

Keys and values after the end of each sequence are NaN: in the padding of a dense tensor, after ``seqused_k``, after the
last packed sequence, in the rows of a page that a sequence does not fill, and in pages of no sequence. A kernel that
lets any of it through returns NaN. Entries of a page table after those that a sequence needs are not pages of the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES, DESCALES, LATENT_ROWS, PAGE_BLOCK, QUANTIZED_DTYPES, V_GROUP
from attngen.dtypes import dtype as dtype_row
from attngen.inspect.cases import Case
from attngen.inspect.values import arguments_of
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.descales import check_descales
from attngen.runtime.arguments.given import KEPT
from attngen.runtime.arguments.latent_rows import cache_of, representable
from attngen.runtime.arguments.paging import Paging, bind_paged
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.launch.expanded import biases_in_whole_rows

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
    #: Of a call over pages, the same sequences one after the other; of a cache of latents in bytes, its columns.
    packed: Inputs | None = None
    descales: Mapping[str, Tensor] = field(default_factory=dict)  # of quantized q, k and v
    out_dtype: torch.dtype | None = None  # of their output
    by_token: bool = False  # of keys and values alike, which no call has: those of pages, token by token

    def bind(self, variant: Variant) -> Call:
        """Return the checked call, which asks for the log-sum-exp."""
        call = self._bind(variant)
        if self.by_token:
            call.descales, call.scale_blocks = dict(self.descales), (1,)
        else:
            check_descales(call, self.descales, self.k, self.v)
        call.asked_out = self.out_dtype
        return call

    def _bind(self, variant: Variant) -> Call:
        if self.paging is not None:
            return bind_paged(
                variant, self.q, self.k, self.v, self.paging, softmax_scale=None, seqused_k=self.seqused_k,
                return_lse=KEPT, page_layout=self.page_layout, arguments=self.arguments,
            )  # fmt: skip
        return bind(
            variant, self.q, self.k, self.v, self.packing, softmax_scale=None, seqused_k=self.seqused_k,
            return_lse=KEPT, layout="bshd", arguments=self.arguments,
        )  # fmt: skip


def torch_dtype(name: str) -> torch.dtype:
    """Return a dtype as torch knows it, by its name in specs."""
    dtype = getattr(torch, dtype_row(name).torch)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, slots=True)
class Element:
    """Format of q, k and v: their dtype (its name in specs) and head dims; k and v may have a ``kv_dtype``."""

    dtype: str
    head_dim_qk: int
    head_dim_v: int
    scale_block: int = 0  # tokens that share a scale of a quantized dtype; 0: all of a head, -1: those of a page
    kv_dtype: str = ""  # of k and v, where another than that of q
    out_dtype: str = ""  # of the output of a quantized q, where it is not the usual one
    transposed_v: bool = False  # keys lie side by side in v
    grouped_v: bool = False  # in groups
    v_of_key: bool = False  # v is the first columns of k

    @property
    def torch(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return torch_dtype(self.dtype)

    @property
    def latent_rows(self) -> bool:
        """Whether rows of k hold 8-bit columns and their scales. Its columns are drawn in the dtype of q."""
        return self.kv_dtype in LATENT_ROWS

    def of(self, name: str) -> str:
        """Return the dtype of the numbers of q, k or v."""
        return self.dtype if name == "q" or self.latent_rows else self.kv_dtype or self.dtype

    @property
    def quantized(self) -> tuple[str, ...]:
        """Those of q, k and v that have scales."""
        return tuple(name for name in "qkv" if self.of(name) in QUANTIZED_DTYPES)

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return random numbers in the dtype of q, k or v: one of 8 bits holds them larger, so that they use its
        range."""
        return (tensor * _QUANTIZED_SCALE if name in self.quantized else tensor).to(torch_dtype(self.of(name)))


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
    if element.latent_rows:
        filled["k"] = representable(element.kv_dtype, filled["k"])
    tensors = {name: element.rounded(name, tensor).to(device) for name, tensor in filled.items()}
    cut = {name: _cut(tensors[name], rows[name][0], layout) for name in tensors}
    if element.transposed_v and not element.grouped_v:
        cut["v"] = by_columns(cut["v"])
    if element.v_of_key:
        cut["v"] = cut["k"][..., : element.head_dim_v]
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments_of(variant, case, layout, generator, calm).items()
    }
    own = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    arguments |= biases_in_whole_rows(variant, own)  # as calls pass them on
    inputs = Inputs(
        **cut,
        packing=_packing(case, device) if layout == "varlen" else None,
        seqused_k=None if case.used is None else torch.tensor(case.used, dtype=torch.int32, device=device),
        arguments=arguments,
        descales=_descales(case, element, generator, device),
        out_dtype=torch_dtype(element.out_dtype) if element.out_dtype else None,
    )
    if element.grouped_v:
        return replace(inputs, v=in_groups(cut["v"]), packed=inputs)
    if not element.latent_rows:
        return inputs
    cache = cache_of(element.kv_dtype, cut["k"])
    return replace(inputs, k=cache, v=cache, packed=inputs)


def by_columns(v: Tensor) -> Tensor:
    """Return a tensor (batch, seqlen, heads, head_dim) with the same numbers, whose rows lie side by side. Memory after
    the last one is NaN."""
    batch, seqlen, heads, width = v.shape
    room = -(-seqlen // CHUNK_BYTES) * CHUNK_BYTES + CHUNK_BYTES
    columns = torch.full((batch, heads, width, room), torch.nan, device=v.device, dtype=torch.float32).to(v.dtype)
    columns[..., :seqlen] = v.permute(0, 2, 3, 1)
    return columns[..., :seqlen].permute(0, 3, 1, 2)


def in_groups(v: Tensor) -> Tensor:
    """Return the numbers of a tensor (batch, seqlen, heads, head_dim) in groups of keys: (batch, heads, groups,
    head_dim, 32). A lane's elements of an accumulator, the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, lie side by
    side. Places after the last key are 0."""
    batch, seqlen, heads, width = v.shape
    groups = -(-seqlen // V_GROUP)
    place = torch.arange(V_GROUP, device=v.device)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place % 16 // 4 * 2 + place % 2
    rows = torch.zeros(batch, groups * V_GROUP, heads, width, device=v.device, dtype=torch.float32).to(v.dtype)
    rows[:, :seqlen] = v
    of_groups = rows.view(torch.uint8).reshape(batch, groups, V_GROUP, heads, width)[:, :, key]
    return of_groups.permute(0, 3, 1, 4, 2).contiguous().view(v.dtype)


def _descales(
    case: Case, element: Element, generator: torch.Generator, device: torch.device | str, pages: int = 0
) -> dict[str, Tensor]:
    """Scales of quantized tensors, each with strides of its own: elements times these are about 1."""
    of_head: tuple[int, ...] = (case.batch, case.kv_heads)
    shapes = dict.fromkeys(DESCALES, of_head)
    block = element.scale_block
    if block == PAGE_BLOCK:
        shapes |= dict.fromkeys(("k_descale", "v_descale"), (pages, case.kv_heads))
    elif block == 1 and pages:
        shapes |= dict.fromkeys(("k_descale", "v_descale"), (pages, case.page_size, case.kv_heads))
    elif block:
        shapes = dict.fromkeys(DESCALES, (*of_head, -(-case.seqlen_k // block)))
        shapes["q_descale"] = (case.batch, case.heads, -(-case.seqlen_q // block))
        if block == 1:
            shapes["v_descale"] = of_head
    shapes = {name: shape for name, shape in shapes.items() if name[0] in element.quantized}
    if element.v_of_key:  # it has the scales of k
        shapes.pop("v_descale", None)
    drawn = {
        name: torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }
    scales = {name: (0.5 + share) / _QUANTIZED_SCALE for name, share in drawn.items()}
    if "k_descale" in scales:
        scales["k_descale"] = scales["k_descale"].transpose(0, 1).contiguous().transpose(0, 1)
    if not block and "v_descale" in scales:
        scales["v_descale"] = scales["v_descale"][0, 0]
    return {name: scale.to(device) for name, scale in scales.items()}


def _by_token(
    descales: Mapping[str, Tensor], table: Tensor, lengths: tuple[int, ...], page_size: int
) -> dict[str, Tensor]:
    """Return scales of pages, or of their rows (pages, page_size, kv_heads), as those of the keys of each sequence,
    (batch, kv_heads, longest); others as they are."""
    by_token = dict(descales)
    for name in {"k_descale", "v_descale"}.intersection(descales):
        pages = descales[name]
        by_token[name] = pages.new_ones(len(lengths), pages.shape[-1], max(lengths))
        for b, length in enumerate(lengths):
            listed = table[b, : -(-length // page_size)].long()
            rows = (
                pages[listed].flatten(0, 1) if pages.dim() == 3 else pages[listed].repeat_interleave(page_size, dim=0)
            )
            by_token[name][b, :, :length] = rows[:length].t()
    return by_token


def _as_given(scale: Tensor, page_layout: str) -> Tensor:
    """Scales of pages with a last axis, which says so in any case; those of rows in the order of the cache."""
    if scale.dim() == 2:
        return scale[..., None]
    return scale.transpose(1, 2) if page_layout == "HND" else scale


def _in_pages(
    variant: Variant, case: Case, element: Element, device: torch.device | str, seed: int, calm: float
) -> Inputs:
    """Return the inputs of a call over pages in random order, and those of its sequences packed."""
    generator = torch.Generator().manual_seed(seed)
    made = arguments_of(variant, case, "paged", generator, calm)
    arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], dtype=torch.int32, device="cpu")
        for lengths in (case.q_lengths, case.k_lengths)
    )
    rows = {"q": case.q_lengths, "k": case.k_lengths, "v": case.k_lengths}
    shapes = {"q": (case.heads, element.head_dim_qk), "k": (case.kv_heads, element.head_dim_qk)}
    shapes["v"] = (case.kv_heads, element.head_dim_v)
    flat = {name: _cut(_packed(rows[name], rows[name], shapes[name], generator), rows[name], "varlen") for name in rows}
    if element.latent_rows:
        flat["k"] = representable(element.kv_dtype, flat["k"])
    table, pages = _paged(case, starts_k, flat["k"], flat["v"], generator)
    equal = len(set(case.q_lengths)) == 1
    page_layout = "HND" if seed % 2 else "NHD"
    if page_layout == "HND":
        pages = tuple(tensor.transpose(1, 2).contiguous() for tensor in pages)
    flat = {name: element.rounded(name, tensor).to(device) for name, tensor in flat.items()}
    of_keys = element.rounded("k", pages[0]).to(device)
    of_values = element.rounded("v", pages[1]).to(device)
    if element.latent_rows:
        flat["v"] = flat["k"][..., : element.head_dim_v]
        in_order = of_keys.transpose(1, 2) if page_layout == "HND" else of_keys
        of_keys = cache_of(element.kv_dtype, in_order)
        of_keys = of_values = of_keys.transpose(1, 2) if page_layout == "HND" else of_keys
    elif element.v_of_key:
        flat["v"], of_values = flat["k"][..., : element.head_dim_v], of_keys[..., : element.head_dim_v]
    starts_q, starts_k, table = (tensor.to(device) for tensor in (starts_q, starts_k, table))
    longest = case.max_pages * case.page_size  # what shapes of the variant's tensors mean by seqlen_k
    descales = _descales(case, element, generator, device, pages[0].shape[0])
    of_pages = element.scale_block in (PAGE_BLOCK, 1)
    if of_pages:
        given = {
            name: scale if name == "q_descale" else _as_given(scale, page_layout) for name, scale in descales.items()
        }
        of_rows = _by_token(descales, table, case.k_lengths, case.page_size)
        if "q_descale" in of_rows:
            of_rows["q_descale"] = of_rows["q_descale"].repeat_interleave(case.heads // case.kv_heads, dim=1)[..., None]
            of_rows["q_descale"] = of_rows["q_descale"].expand(-1, -1, case.seqlen_q)
    else:
        given = of_rows = descales
    return Inputs(
        flat["q"].unflatten(0, (case.batch, case.seqlen_q)) if equal else flat["q"],
        of_keys,
        of_values,
        descales=given,
        seqused_k=starts_k.diff(),
        arguments=arguments,
        paging=Paging(table) if equal else Paging(table, starts_q, case.seqlen_q),
        page_layout=page_layout,
        packed=Inputs(
            **flat,
            packing=Packing(starts_q, starts_k, case.seqlen_q, longest),
            arguments=arguments,
            descales=of_rows,
            by_token=of_pages,
        ),
    )


def _paged(
    case: Case, starts: Tensor, k: Tensor, v: Tensor, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a page table, and keys and values in pages (pages, page_size, kv_heads, head_dim)."""
    counts = [-(-length // case.page_size) for length in case.k_lengths]
    order = iter(torch.randperm(sum(counts) + _SPARE_PAGES, generator=generator, device="cpu").tolist())
    chosen = torch.randint(0, len(_NO_PAGES), (case.batch, case.max_pages), generator=generator, device="cpu")
    table = torch.tensor(_NO_PAGES, device="cpu")[chosen]
    shape = (sum(counts) + _SPARE_PAGES, case.page_size)
    pages = tuple(
        torch.full((*shape, *rows.shape[1:]), torch.nan, dtype=torch.float32, device="cpu") for rows in (k, v)
    )
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
    tensor = torch.full(
        (len(extents), max(extents) + _POISONED_ROWS, *shape), torch.nan, dtype=torch.float32, device="cpu"
    )
    for row, length in zip(tensor, lengths, strict=True):
        row[:length] = torch.randn((length, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return tensor


def _packed(
    extents: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return (total + padding, heads, head_dim): sequences one after the other, NaN after each one's length."""
    tensor = torch.full((sum(extents) + _POISONED_ROWS, *shape), torch.nan, dtype=torch.float32, device="cpu")
    start = 0
    for extent, length in zip(extents, lengths, strict=True):
        tensor[start : start + length] = torch.randn(
            (length, *shape), generator=generator, dtype=torch.float32, device="cpu"
        )
        start += extent
    return tensor


def _cut(tensor: Tensor, extents: tuple[int, ...], layout: str) -> Tensor:
    """The view that a call gets: memory after its last row is not the call's."""
    return tensor[: sum(extents)] if layout == "varlen" else tensor[:, : max(extents)]


def _packing(case: Case, device: torch.device | str) -> Packing:
    offsets = [
        torch.tensor([0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], dtype=torch.int32, device=device)
        for lengths in (case.q_lengths, case.k_lengths)
    ]
    return Packing(offsets[0], offsets[1], case.seqlen_q, case.seqlen_k)
