"""FlashMLA's decoding and sparse prefill, argument for argument, on attngen's kernels: replace one import.

The forms are those of https://github.com/deepseek-ai/FlashMLA. Values are the first ``head_dim_v`` columns of the
cache, which kernels of specs with ``v: key`` read once. Blocks share the keys of sequences by the lengths on the GPU,
so that there is no metadata to compute: ``get_mla_metadata`` returns an empty object, as FlashMLA itself does, and a
graph may capture a call whose lengths change later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.dtypes import LATENT_ROWS
from attngen.errors import CallError, NoKernelError
from attngen.integrations.shared import recalled
from attngen.integrations.shared.arguments import contiguous_rows, refuse, tensor
from attngen.integrations.shared.catalogue import variant
from attngen.integrations.shared.choice import Pages, VariantCandidate, attend
from attngen.integrations.shared.constants import Key, counted, filled
from attngen.runtime.arguments.given import Given

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

#: The shipped spec that builds what these functions ask for.
SPEC = "flash_mla"

_SCALED_ROWS = "the rows hold their scales"
_WITH_INDICES = "it belongs to indices, which are missing"
_REASONS = {
    "descale_q": _SCALED_ROWS, "descale_k": _SCALED_ROWS,
    "kv_format": "the bytes of a token say the format", "extra_indices_in_kvcache": _WITH_INDICES,
    "extra_k_cache": _WITH_INDICES, "extra_topk_length": _WITH_INDICES, "topk_length": _WITH_INDICES,
    "attn_sink": _WITH_INDICES, "causal": "entries of indices are slots of the cache, which have no order",
}  # fmt: skip

#: Bytes of a token of caches whose rows hold their scales.
_ROW_BYTES = [row.bytes for row in LATENT_ROWS.values()]

#: The same of those whose scales follow the rows of a block.
_SCALES_AFTER_ROWS = [row.bytes for row in LATENT_ROWS.values() if row.scales_after_rows]

#: Dtypes of caches in 8 bits: rows of bytes, whatever they are called.
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_BYTES_BUT_UINT8 = _BYTES[1:]

#: Types of a scale that a key may have.
_SCALES = (float, int, type(None))

#: Places of some tensors of a call: q, the cache, indices, their counts, the sink, pages, keys in them; then the second
#: cache, its indices, their counts.
_TOPK_LENGTH, _TABLE, _USED, _EXTRA_TOPK_LENGTH = 3, 5, 6, 9


class _ListedRows(NamedTuple):
    """A cache, and the rows of it that each query lists; ``prefix`` is what their arguments are called after."""

    cache: Tensor
    indices: Tensor
    topk_length: Tensor | None
    prefix: str = ""


@dataclass
class FlashMLASchedMeta:
    """Metadata of a schedule, which holds no schedule: blocks find their work on the GPU.

    It holds the constant tensors of calls that passed it, such as lengths of full lists. Where a graph captures a later
    call that passes it, the graph reads these instead of filling its own: keep the metadata as long as the graph.
    """

    constants: dict[Key, Tensor] = field(default_factory=dict, repr=False, compare=False)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty schedule, and None, for ``flash_mla_with_kvcache``; arguments are those of older versions."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention of q (b, sq, h, 576) over a cache (blocks, block_size, 1, 576), and its log-sum-exp.

    ``block_table`` (b, max_blocks) int32 lists the blocks of each sequence, ``cache_seqlens`` (b,) int32 counts its
    keys, those of its queries included. The last query sees the last key if ``causal``. The output is (b, sq, h,
    ``head_dim_v``); the log-sum-exp (b, h, sq) is float32, natural, −inf for a query that sees no key.
    ``softmax_scale`` is 1/√576 unless given. Head dims 512/512 are taken as well, and a block size of any multiple of
    16. ``tile_scheduler_metadata``, ``num_splits`` and ``use_legacy`` change no result; with
    ``enable_batch_invariant`` one block takes a sequence, and the bits of a row depend on that alone.

    With ``indices`` (b, sq, topk) int32 each query sees the rows that it lists, ``block * block_size + row``, wherever
    they are; others than those of the cache, such as −1, are ignored. ``block_table`` and ``cache_seqlens`` are not
    read then. ``topk_length`` (b,) int32 counts the entries of a sequence's queries that matter, and ``attn_sink`` (h,)
    float32 is a logit without a value, which the log-sum-exp leaves out. The cache then holds 576 or 512 numbers of 16
    bits a token, or, in 8 bits, 656 bytes (head dims 576/512) or 584 (512/512): see ``attngen.append_kv``.

    ``extra_k_cache``, of the same format, and ``extra_indices_in_kvcache`` (b, sq, extra_topk) add keys of a second
    cache, with any number of blocks and rows in a block; ``extra_topk_length`` (b,) int32 is to them what
    ``topk_length`` is to the first ones. One launch reads both.

    Without indices, a cache in 8 bits holds 576 or 512 numbers in e4m3 a token, and ``descale_k``, one float32 number,
    1 if it is missing, is what they are multiplied by. q may be in e4m3, too, with ``descale_q``: it is converted to
    bf16, which is the dtype of the output. Raises CallError for arguments that disagree.
    """
    del num_splits, use_legacy
    listed, constants = indices is not None, None
    record: recalled.Record = (
        q, k_cache, indices, topk_length, attn_sink, None if listed else block_table, None if listed else cache_seqlens,
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length,
    )  # fmt: skip
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        constants = tile_scheduler_metadata.constants
    key = recalled.key_of(
        record, head_dim_v, softmax_scale, causal, is_fp8_kvcache, enable_batch_invariant, kv_format, descale_q,
        descale_k,
    )  # fmt: skip
    results = None if key is None else recalled.again(key, record, constants, softmax_scale)
    if results is not None:
        return _as_given(q, *results) if listed else results
    if type(softmax_scale) not in _SCALES:
        key = None
    refuse(_REASONS, kv_format=kv_format)
    _check_cache("k_cache", k_cache)
    in_8_bits = k_cache.dtype in _BYTES
    if is_fp8_kvcache not in (None, in_8_bits):
        raise CallError(f"is_fp8_kvcache is {is_fp8_kvcache}, but k_cache has {k_cache.dtype}")
    if indices is not None:
        refuse(_REASONS, causal=causal, descale_q=descale_q, descale_k=descale_k)
        rows = _ListedRows(k_cache, indices, topk_length)
        extra = _second_cache(k_cache, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        arguments = _Arguments(record, constants, key)
        return _as_given(q, *_listed_in_caches(
            q, rows, extra, head_dim_v, softmax_scale, attn_sink, arguments, one_block=enable_batch_invariant
        ))  # fmt: skip
    refuse(
        _REASONS, topk_length=topk_length, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
    )  # fmt: skip
    if block_table is None or cache_seqlens is None:
        raise CallError("block_table and cache_seqlens are needed: they say where the keys of a sequence are")
    if not 0 < head_dim_v <= k_cache.shape[-1]:
        raise CallError(f"head_dim_v is {head_dim_v}, but k_cache has {k_cache.shape[-1]} columns")
    descales: dict[str, Tensor] = {}
    if in_8_bits:
        _check_numbers(k_cache)
        k_cache = k_cache.view(torch.float8_e4m3fn)
        descales["k_descale"] = _scale("descale_k", descale_k, k_cache.device)
    elif descale_k is not None:
        raise CallError(f"descale_k belongs to a cache in 8 bits, but k_cache has {k_cache.dtype}")
    if tensor("q", q).dtype == torch.float8_e4m3fn:
        q = (q.float() * _scale("descale_q", descale_q, q.device)).to(torch.bfloat16)
    elif descale_q is not None:
        raise CallError(f"descale_q belongs to q in 8 bits, but q has {q.dtype}")
    (q,) = contiguous_rows(q=q)
    name, num_splits = "causal" if causal else "full", 1 if enable_batch_invariant else None
    pages, v = Pages(tensor("block_table", block_table), num_splits=num_splits), k_cache[..., :head_dim_v]
    used = tensor("cache_seqlens", cache_seqlens)
    out, lse = attend(
        [VariantCandidate(name)], q, k_cache, v, spec=SPEC, pages=pages, softmax_scale=softmax_scale, seqused_k=used,
        return_lse=True, descales=descales,
    )  # fmt: skip
    if key is not None and not descales:
        recalled.note(key, record, (), (), Given(
            q=q, k=k_cache, v=v, seqused_k=used, page_table=pages.page_table, arguments={}, softmax_scale=softmax_scale,
            variant=variant(name), return_lse=True, form="paged", layout="NHD", num_splits=num_splits,
        ))  # fmt: skip
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    return_max_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of q (s_q, h, 576) to the rows of kv (s_kv, 1, 576) that ``indices`` (s_q, 1, topk) lists.

    Returns the output (s_q, h, ``d_v``); the largest logit of each query and head (s_q, h) with ``return_max_logits``,
    else None; and the log-sum-exp (s_q, h). The latter two are natural, in float32, and −inf for a query without a key.
    The kernels that store largest logits are others than those that do not.

    Entries below 0, or not below s_kv, are ignored. ``topk_length`` (s_q,) int32 is the number of entries of each query
    that count, from the first one on. ``attn_sink`` (h,) float32 is a logit without a value, which the
    log-sum-exp leaves out. Any topk and any number of heads are taken, and head dims 512/512 as well. The rows of a
    paged cache in 16 bits are one tensor, whose indices are ``block * block_size + row``.

    Raises CallError for arguments that disagree.
    """
    shapes = {
        "q": (q, "(s_q, heads, head_dim)"),
        "kv": (kv, "(s_kv, 1, head_dim)"),
        "indices": (indices, "(s_q, 1, topk)"),
    }
    for name, (given, form) in shapes.items():
        if tensor(name, given).dim() != 3:
            raise CallError(f"{name} must have shape {form}, got {tuple(given.shape)}")
    if kv.shape[1] != 1 or indices.shape[1] != 1:
        raise CallError(f"kv and indices must have one KV head, got {kv.shape[1]} and {indices.shape[1]}")
    if not 0 < d_v <= kv.shape[-1]:
        raise CallError(f"d_v is {d_v}, but kv has {kv.shape[-1]} columns")
    queries = q.shape[0]
    if topk_length is None:
        topk_length = filled(q, queries, indices.shape[-1])
    else:
        topk_length = tensor("topk_length", topk_length)[None]
    q, kv, indices = contiguous_rows(q=q, kv=kv, indices=indices)
    own = {"indices": indices[:, 0][None], "topk_length": topk_length}
    tensors = q[None], kv[None], kv[None, ..., :d_v]
    if not return_max_logits:
        out, lse = _listed(*tensors, own, attn_sink, sm_scale)
        return out[0], None, lse[0].T
    own = _with_sink(own, q, attn_sink)
    out, lse, largest = attend(
        [VariantCandidate(_name(own), own)], *tensors, spec=SPEC, softmax_scale=sm_scale, rows=True
    )
    return out[0], largest[0].T, lse[0].T


def _check_cache(name: str, cache: Tensor) -> None:
    if tensor(name, cache).dim() != 4:
        raise CallError(f"{name} must have shape (blocks, block_size, 1, head_dim), got {tuple(cache.shape)}")


def _check_numbers(cache: Tensor) -> None:
    """Refuse a cache whose rows hold scales, where no kernel of the spec reads whole sequences of it."""
    if cache.shape[-1] in _ROW_BYTES:
        raise NoKernelError(
            f"without indices a cache of {cache.shape[-1]} bytes a token is not supported: attngen.attention_paged "
            "reads it"
        )


def _scale(name: str, given: Tensor | None, device: torch.device) -> Tensor:
    """A scale of all elements of a tensor; 1 if it is missing."""
    if given is None:
        return torch.ones((), dtype=torch.float32, device=device)
    if tensor(name, given).numel() != 1 or given.dtype != torch.float32:
        raise CallError(f"{name} must be one float32 number, got {given.dtype} of shape {tuple(given.shape)}")
    return given.reshape(())


def _second_cache(
    k_cache: Tensor, cache: Tensor | None, indices: Tensor | None, topk_length: Tensor | None
) -> _ListedRows | None:
    """The rows of the second cache, if a call has one."""
    if cache is None and indices is None:
        if topk_length is not None:
            raise CallError("extra_topk_length counts entries of extra_indices_in_kvcache, which is missing")
        return None
    if cache is None or indices is None:
        missing = "extra_k_cache" if cache is None else "extra_indices_in_kvcache"
        raise CallError(f"extra_k_cache and extra_indices_in_kvcache go together: {missing} is missing")
    _check_cache("extra_k_cache", cache)
    if cache.shape[-1] != k_cache.shape[-1] or _format(cache) != _format(k_cache):
        raise CallError(
            f"extra_k_cache must have the format of k_cache, {k_cache.shape[-1]} columns in {k_cache.dtype}, got "
            f"{cache.shape[-1]} in {cache.dtype}"
        )
    return _ListedRows(cache, indices, topk_length, "extra_")


def _format(cache: Tensor) -> torch.dtype:
    """The dtype of a cache, which for rows of bytes is uint8."""
    return torch.uint8 if cache.dtype in _BYTES else cache.dtype


def _check_sink(q: Tensor, attn_sink: Tensor) -> None:
    if tensor("attn_sink", attn_sink).shape != (q.shape[-2],):
        raise CallError(f"attn_sink must have shape ({q.shape[-2]},), got {tuple(attn_sink.shape)}")


@dataclass
class _Arguments:
    """The arguments of a call with indices, and what kernels get in the place of some, or where there is none."""

    record: recalled.Record
    constants: dict[Key, Tensor] | None
    key: tuple[Any, ...] | None  # under which the call is remembered
    makers: list[recalled.Maker] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def put(self, place: int, make: Callable[[recalled.Record, dict[Key, Tensor] | None], Tensor]) -> Tensor:
        """Make what stands in a place, now and whenever such a call is made again."""
        self.makers.append((place, make))
        self.made.append(made := make(self.record, self.constants))
        return made


def _listed_in_caches(
    q: Tensor,
    rows: _ListedRows,
    extra: _ListedRows | None,
    head_dim_v: int,
    softmax_scale: float | None,
    attn_sink: Tensor | None,
    arguments: _Arguments,
    *,
    one_block: bool,
) -> tuple[Tensor, Tensor]:
    """Attention to the listed rows of one cache or of two: all queries are of one sequence, whose keys are the whole
    first cache."""
    lengths = _lengths(q, rows, _TOPK_LENGTH, arguments)
    k_cache, indices, _, _ = rows
    batch, queries, heads, head_dim = q.shape
    count = batch * queries
    blocks, block_size, kv_heads, columns = k_cache.shape
    more_lengths = None
    if extra is not None:
        if extra.cache.requires_grad and torch.is_grad_enabled():
            raise CallError("extra_k_cache requires gradients, which it has none of: pass extra_k_cache.detach()")
        more_lengths = _lengths(q, extra, _EXTRA_TOPK_LENGTH, arguments)
    in_8_bits = k_cache.dtype in _BYTES
    stride, row = k_cache.stride()[:2]
    table = used = None
    if one_block or stride != block_size * row or (in_8_bits and columns in _SCALES_AFTER_ROWS):
        table = arguments.put(_TABLE, lambda record, held: counted(record[0], blocks, held))
        used = arguments.put(_USED, lambda record, held: filled(record[0], 1, blocks * block_size, held))
    if k_cache.dtype in _BYTES_BUT_UINT8:
        k_cache = k_cache.view(torch.uint8)
    q, k_cache, indices = contiguous_rows(q=q, k_cache=k_cache, indices=indices)
    own = {"indices": indices.reshape(1, count, indices.shape[2]), "topk_length": lengths}
    if extra is not None and more_lengths is not None:
        cache, listed = contiguous_rows(extra_k_cache=extra.cache, extra_indices_in_kvcache=extra.indices)
        own |= {"extra_k": cache.view(torch.uint8), "extra_indices": listed.reshape(1, count, listed.shape[2])}
        own["extra_topk_length"] = more_lengths
    as_one = q.reshape(1, count, heads, head_dim)
    keys, pages = k_cache, None
    if table is not None and used is not None:
        pages, used = Pages(table, num_splits=1 if one_block else None), used[0]
    else:
        keys = k_cache.view(1, blocks * block_size, kv_heads, columns)
    values = keys if in_8_bits else keys[..., :head_dim_v]
    out, lse = _listed(as_one, keys, values, own, attn_sink, softmax_scale, pages, used)
    if out.shape[-1] != head_dim_v:
        raise CallError(f"head_dim_v is {head_dim_v}, but values of the cache have {out.shape[-1]} columns")
    if arguments.key is not None:
        if attn_sink is not None:
            own["sinks"] = attn_sink
        splits = None if pages is None else pages.num_splits
        form, layout = ("dense", "bshd") if pages is None else ("paged", "NHD")
        recalled.note(arguments.key, arguments.record, arguments.makers, arguments.made, Given(
            q=as_one, k=keys, v=values, seqused_k=used, page_table=table, arguments=own, softmax_scale=softmax_scale,
            variant=variant(_name(own)), return_lse=True, form=form, layout=layout, num_splits=splits,
        ))  # fmt: skip
    return out, lse


def _lengths(q: Tensor, rows: _ListedRows, place: int, arguments: _Arguments) -> Tensor:
    """Entries that count of each query's list, as kernels get them: put in their ``place``, if they are not the
    argument itself. Raises CallError for lists that do not go with q."""
    _, indices, topk_length, prefix = rows
    name = f"{prefix}indices_in_kvcache" if prefix else "indices"
    shape, listed = tensor("q", q).shape, tensor(name, indices).shape
    if len(shape) != 4 or len(listed) != 3 or shape[:2] != listed[:2]:
        raise CallError(
            f"q and {name} must have shape (b, sq, h, head_dim) and (b, sq, topk), got {tuple(shape)} and "
            f"{tuple(listed)}"
        )
    batch, queries, topk = listed
    count = batch * queries
    if topk_length is None:
        return arguments.put(place, lambda record, held: filled(record[0], count, topk, held))
    if tensor(f"{prefix}topk_length", topk_length).shape != (batch,):
        raise CallError(f"{prefix}topk_length must have shape ({batch},), got {tuple(topk_length.shape)}")
    if queries == 1:
        return topk_length.unsqueeze(0)
    return arguments.put(place, lambda record, _: _for_each(record[place], queries, count))


def _for_each(lengths: Tensor, queries: int, count: int) -> Tensor:
    """Lengths of sequences as those of their queries, (1, ``count``)."""
    return lengths.repeat_interleave(queries, output_size=count).unsqueeze(0)


def _as_given(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output (b, sq, h, head_dim_v) and log-sum-exp (b, h, sq) of a call whose queries are of one sequence."""
    batch, queries, heads, _ = q.shape
    if queries == 1:
        return out.view(batch, 1, heads, out.shape[3]), lse.permute(2, 1, 0)
    return out.view(batch, queries, heads, out.shape[3]), lse.view(heads, batch, queries).transpose(0, 1)


def _listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: dict[str, Tensor],
    attn_sink: Tensor | None,
    softmax_scale: float | None,
    pages: Pages | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to listed keys, and the log-sum-exp (b, h, sq) without the sink."""
    own = _with_sink(own, q, attn_sink)
    out, lse = attend(
        [VariantCandidate(_name(own), own)], q, k, v, spec=SPEC, pages=pages, softmax_scale=softmax_scale,
        seqused_k=seqused_k, return_lse=True,
    )  # fmt: skip
    return out, lse


def _with_sink(own: dict[str, Tensor], q: Tensor, attn_sink: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a call with its sinks, if it has any. Raises CallError."""
    if attn_sink is None:
        return own
    _check_sink(q, attn_sink)
    return {**own, "sinks": attn_sink}


def _name(own: dict[str, Tensor]) -> str:
    """Name of the variant of a call with indices, by its arguments."""
    return f"listed_keys{'_of_two_caches' if 'extra_k' in own else ''}{'_sink' if 'sinks' in own else ''}"
