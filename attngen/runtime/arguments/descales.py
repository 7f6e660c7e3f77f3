"""The scales that bring quantized q, k and v back to their units: checked and laid out as kernels read them.

An element of 8 bits times its scale is what it stands for. A scale is one number; or one for each batch entry and KV
head, whose query heads share that of q; or one for each block of 64 or 128 tokens of each head; or one for each query
and each key, and values as before; or, of a cache in pages, one for each KV head of a page, or of each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attngen.dtypes import DESCALE_BLOCKS, DESCALES, KEY_VALUE_DIMS, PAGE_BLOCK, QUANTIZED_DTYPES
from attngen.errors import CallError
from attngen.runtime.arguments.checked import Call

#: Tokens that may share a scale, where not all of a head do.
_BLOCKS = tuple(block for block in DESCALE_BLOCKS.values() if block > 0)


def check_descales(call: Call, given: Mapping[str, object], k: Tensor, v: Tensor) -> None:
    """Check the scales of a call and lay them out as kernels read them; only quantized operands have any. A v that is
    the first columns of k has its scales, unless the call gives others.

    Raises CallError for scales that are missing, that nobody asked for, or of another form.
    """
    named: dict[str, Tensor] = {}
    for name in DESCALES:
        value, operand = given.get(name), name[0]
        dtype = call.dtype if operand == "q" else call.kv_dtype
        if dtype in QUANTIZED_DTYPES:
            named[name] = value
        elif value is not None:
            raise CallError(f"{name} is for quantized tensors, but {operand} has dtype {dtype}; leave it out")
    if not named:
        return
    if named.get("v_descale") is None and _is_head(call, v, k):
        del named["v_descale"]
    for name, value in named.items():
        if value is None:
            needed = _form(call, name, ())
            raise CallError(
                f"{name} is missing: {call.kv_dtype} tensors need a scale, {needed}; attngen.quantize makes it"
            )
        if not isinstance(value, Tensor):
            raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.device != call.device:
            raise CallError(f"{name} is on {value.device}, but q is on {call.device}")
    if call.layout == "paged":
        call.scale_blocks, laid_out = _of_pages(call, named)
        call.descales = {
            name: _laid_out(call, name, value, ()) if laid_out is None or name == "q_descale"
            else laid_out(call, name, value)
            for name, value in named.items()
        }  # fmt: skip
        return
    call.scale_blocks = _blocks(call, named) or (0,)
    blocks = tuple(block for block in call.scale_blocks if block > 0)
    call.descales = {name: _laid_out(call, name, value, blocks) for name, value in named.items()}


def _is_head(call: Call, v: Tensor, k: Tensor) -> bool:
    """Whether v is the first columns of k, in memory; without memory, as in a trace, whether it may be."""
    if (call.head_dim_qk, call.head_dim_v) not in KEY_VALUE_DIMS or call.k.strides != call.v.strides:
        return False
    try:
        return k.data_ptr() == v.data_ptr()
    except RuntimeError:
        return True


def _of_pages(
    call: Call, given: Mapping[str, Tensor]
) -> tuple[tuple[int, ...], Callable[[Call, str, Tensor], Tensor] | None]:
    """Shapes that scales of keys in pages may have, and how they are laid out where pages, or their rows, have scales
    of their own.

    (pages, kv_heads) of a cache with as many pages as there are sequences is (batch, kv_heads); with a last axis of 1
    it is of pages in any case. One number for all suits kernels of both kinds, and so do scales of pages of one row.
    """
    scales = [given[name] for name in ("k_descale", "v_descale") if name in given]
    if all(tuple(scale.shape) in ((), (1,)) for scale in scales):
        return (0, PAGE_BLOCK), None
    pages, rows = (call.num_pages, call.kv_heads), shape_of_rows(call)
    heads = (call.batch, call.kv_heads)
    if call.page_size == 1 and all(tuple(scale.shape) in ((), (1,), rows) for scale in scales):
        return (PAGE_BLOCK, 1), _by_row
    if any(tuple(scale.shape) == (*pages, 1) or tuple(scale.shape) == pages != heads for scale in scales):
        return (PAGE_BLOCK,), _by_page
    if any(tuple(scale.shape) == rows for scale in scales):
        return (1,), _by_row
    return (0,), None


def _by_page(call: Call, name: str, scale: Tensor) -> Tensor:
    """Return a scale as (pages, kv_heads), a view of what was given."""
    pages = (call.num_pages, call.kv_heads)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), pages, (*pages, 1)):
        raise CallError(
            f"{name} must be float32 of shape () or (pages, kv_heads) = {pages}, where the other one has a scale for "
            f"each page, got {scale.dtype} of shape {tuple(scale.shape)}"
        )
    return (scale[..., 0] if scale.dim() == 3 else scale).expand(pages)


def shape_of_rows(call: Call) -> tuple[int, ...]:
    """Shape of the scales of the rows of pages: that of the cache, without the numbers of a row."""
    rows = (call.page_size, call.kv_heads)
    return (call.num_pages, *(rows if call.page_layout == "NHD" else reversed(rows)))


def _by_row(call: Call, name: str, scale: Tensor) -> Tensor:
    """Return a scale as (pages, kv_heads, page_size), a view of what was given."""
    rows = shape_of_rows(call)
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), rows):
        raise CallError(
            f"{name} must be float32 of shape () or {rows}, where the other one has a scale for each row of a page, "
            f"got {scale.dtype} of shape {tuple(scale.shape)}"
        )
    scale = scale.expand(rows)
    return scale.transpose(1, 2) if call.page_layout == "NHD" else scale


def _blocks(call: Call, given: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the sizes of blocks that scales may be of, none if there is one for each head; CallError if no size suits
    all that have an axis of blocks."""
    of_blocks = {name: scale for name, scale in given.items() if scale.dim() == 3}
    if not of_blocks:
        return ()
    sizes = [
        block
        for block in _BLOCKS
        if all(tuple(scale.shape) == _shape(call, name, block) for name, scale in of_blocks.items())
    ]
    if not sizes:
        # the one that is of no size of blocks, or else one of two that disagree
        name, scale = min(of_blocks.items(), key=lambda item: _fits(call, *item))
        raise CallError(f"{name} must be {_form(call, name, _BLOCKS)}, got shape {tuple(scale.shape)}")
    return tuple(sizes)


def _fits(call: Call, name: str, scale: Tensor) -> bool:
    """Whether a scale is one for each block of some size."""
    return any(tuple(scale.shape) == _shape(call, name, block) for block in _BLOCKS)


def _shape(call: Call, name: str, block: int) -> tuple[int, ...]:
    """Return the shape of a scale for each block of so many tokens, or for each head if 0."""
    if not block or (block == 1 and name == "v_descale"):
        return (call.batch, call.kv_heads)
    heads, tokens = (call.heads, call.seqlen_q) if name == "q_descale" else (call.kv_heads, call.seqlen_k)
    return (call.batch, heads, -(-tokens // block))


def _laid_out(call: Call, name: str, scale: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Return a scale as kernels read it, a view of what was given."""
    wanted = _shape(call, name, blocks[0] if blocks else 0)
    per_head = scale.dim() == 2 and tuple(scale.shape) == wanted[:2]
    if scale.dtype != torch.float32 or not (tuple(scale.shape) in ((), (1,), wanted) or per_head):
        raise CallError(f"{name} must be {_form(call, name, blocks)}, got {scale.dtype} of shape {tuple(scale.shape)}")
    if per_head and len(wanted) == 3:
        scale = scale[..., None]
    return scale.expand(wanted)


def _form(call: Call, name: str, blocks: tuple[int, ...]) -> str:
    """The allowed forms of a scale, in words, beside others for blocks of so many tokens."""
    if not blocks:
        of_pages = call.layout == "paged" and name != "q_descale"
        pages = ""
        if of_pages:
            middle = "page_size, kv_heads" if call.page_layout == "NHD" else "kv_heads, page_size"
            pages = (
                f", or (pages, kv_heads) = {(call.num_pages, call.kv_heads)}, or (pages, {middle}) = "
                f"{shape_of_rows(call)}"
            )
        return f"float32 of shape () or (batch, kv_heads) = {_shape(call, name, 0)}{pages}"
    heads = "heads" if name == "q_descale" else "kv_heads"
    shapes = " or ".join(dict.fromkeys(str(_shape(call, name, block)) for block in blocks))
    return f"float32 of shape (), (batch, {heads}) or (batch, {heads}, blocks of {_either(blocks)} tokens) = {shapes}"


def _either(blocks: tuple[int, ...]) -> str:
    return " or ".join(map(str, blocks))


def dequantized(call: Call, name: str, rows: Tensor, b: int, compute: torch.dtype) -> Tensor:
    """Return rows (s, heads, head_dim) of q, k or v of sequence ``b`` in their own units."""
    rows = rows.to(compute)
    scale = call.descales.get(f"{name}_descale")
    if name == "v" and scale is None:  # v is the first columns of k
        scale = call.descales.get("k_descale")
    if scale is None:
        return rows
    if call.page_table is not None and call.scale_blocks[0] in (PAGE_BLOCK, 1) and name != "q":
        return rows * _of_keys(call, scale, b, rows.shape[0])[..., None].to(compute)
    of_sequence = scale[b].to(compute)  # (heads,) or (heads, blocks)
    of_sequence = of_sequence.repeat_interleave(rows.shape[1] // of_sequence.shape[0], dim=0)
    if of_sequence.dim() == 1:
        return rows * of_sequence[:, None]
    each = of_sequence.repeat_interleave(call.scale_blocks[0], dim=1)[:, : rows.shape[0]]
    return rows * each.t()[..., None]


def _of_keys(call: Call, scale: Tensor, b: int, keys: int) -> Tensor:
    """Return the scales (keys, kv_heads) of the keys of a sequence from those of pages, or of their rows."""
    assert call.page_table is not None
    listed = call.page_table[b, : -(-keys // max(call.page_size, 1))].long()
    if scale.dim() == 3:
        return scale[listed].transpose(1, 2).flatten(0, 1)[:keys]
    return scale[listed].repeat_interleave(call.page_size, dim=0)[:keys]
