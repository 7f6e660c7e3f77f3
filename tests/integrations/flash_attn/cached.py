"""Calls over caches as flash-attn's own tests vary them, and what they mean, sequence by sequence in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.vllm import flash_attn as vllm_flash_attn


@dataclass
class Cached:
    """A call of one of the functions: its arguments by flash-attn's names, without the tensors that are made of it."""

    function: str  # flash_attn | flash_attn_3 | varlen (of version 2, with a block table) | vllm
    batch: int
    seqlen_q: int
    capacity: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    new: int = 0
    rotary_half: int = 0
    page_size: int = 0
    indexed: bool = False
    padded: bool = False
    alibi: bool = False
    sinks: bool = False
    varlen_q: bool = False
    varlen_new: bool = False
    with_lse: bool = True

    def text(self) -> str:
        return f"{self}"


def draw(seed: int, *, device: str, dtype: torch.dtype, largest: int, head_dims: tuple[int, ...]) -> Cached:
    """Return a call that one of the functions takes; every argument is present in many of them."""
    chance = Random(seed)
    function = chance.choice(
        ["flash_attn", "flash_attn", "flash_attn", "flash_attn_3", "flash_attn_3", "varlen", "vllm"]
    )
    kv_heads = chance.choice([1, 2, 3])
    with_prefix = function in ("varlen", "vllm")  # lengths count the keys of the queries, too
    page_size = chance.choice([16, 64, 128] if with_prefix else [0, 0, 0, 16, 64, 256, 20])
    call = Cached(
        function, batch=chance.randint(1, 4), seqlen_q=chance.choice([1, 1, 3, 5, 16, 40]),
        capacity=chance.randint(48, largest), heads=kv_heads * chance.choice([1, 2, 4, 5]), kv_heads=kv_heads,
        head_dim=chance.choice(head_dims), dtype=dtype, device=device, seed=seed, page_size=page_size,
        with_lse=chance.random() < 0.7,
    )  # fmt: skip
    window = chance.choice([(-1, -1), (-1, -1), (-1, -1), (7, 0), (33, 5), (-1, 4), (12, -1)])
    options: dict[str, Any] = {"causal": chance.random() < 0.6, "window_size": window}
    if chance.random() < 0.25:
        options["softcap"] = 3.0
    if chance.random() < 0.3:
        options["num_splits"] = chance.choice([1, 3])
    if chance.random() < 0.2:
        options["softmax_scale"] = 0.2
    call.options = options
    if with_prefix:
        call.varlen_q = True
        options.pop("num_splits", None) if function == "varlen" else None
        call.sinks = (
            function == "vllm"
            and "softcap" not in options
            and options["causal"]
            and window in ((-1, -1), (7, 0), (-1, 4))
        )
        call.alibi = not call.sinks and chance.random() < 0.4
        return call
    call.indexed = not page_size and chance.random() < 0.4
    call.padded = chance.random() < 0.3
    call.new = chance.choice([0, 1, 5, call.seqlen_q]) if call.capacity > 2 * call.seqlen_q else 0
    if call.new and chance.random() < 0.6:
        call.rotary_half = chance.choice([call.head_dim // 2, call.head_dim // 4, 8])
        options["rotary_interleaved"] = chance.random() < 0.5
    if function == "flash_attn":
        call.alibi = chance.random() < 0.3
    else:
        call.varlen_q = chance.random() < 0.5
        call.varlen_new = bool(call.new) and chance.random() < 0.5
        if chance.random() < 0.2 and not call.padded and window == (-1, -1):
            options["attention_chunk"] = 24
            options.pop("softcap", None)
    return call


@dataclass
class Tensors:
    """The tensors of a call. Caches hold NaN where no key is, and page tables numbers that no cache has."""

    q: Tensor  # (b, longest, h, d)
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    queries: list[int]
    news: list[int]
    table: Tensor | None = None
    index: Tensor | None = None
    leftpad: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def place(self, b: int, position: int) -> tuple[int, int]:
        """Return page and row of a key."""
        if self.table is None:
            return (b if self.index is None else int(self.index[b])), position
        rows = self.k_cache.shape[1]
        return int(self.table[b, position // rows]), position % rows


def tensors(call: Cached) -> Tensors:
    """Return random tensors of a call."""
    generator = torch.Generator().manual_seed(call.seed)
    chance = Random(call.seed + 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(call.dtype).to(call.device)

    queries = [chance.randint(0, call.seqlen_q) if call.varlen_q else call.seqlen_q for _ in range(call.batch)]
    news = [chance.randint(0, call.new) if call.varlen_new else call.new for _ in range(call.batch)]
    if call.varlen_q and call.varlen_new and call.rotary_half and chance.random() < 0.5:
        news = list(queries) if max(queries) <= call.new else news
    least = max(queries) if call.function in ("varlen", "vllm") else 1
    lengths = [chance.randint(least, call.capacity - call.new) for _ in range(call.batch)]
    row = (call.kv_heads, call.head_dim)
    made = Tensors(
        random(call.batch, call.seqlen_q, call.heads, call.head_dim), torch.empty(0), torch.empty(0),
        torch.tensor(lengths, dtype=torch.int32, device=call.device), queries, news,
    )  # fmt: skip
    if call.page_size:
        each = -(-call.capacity // call.page_size)
        pages = call.batch * each + 2
        order = torch.randperm(pages, generator=generator)[: call.batch * each].view(call.batch, each)
        table = torch.cat((order, torch.full((call.batch, 1), 2**30)), 1).int()
        for b in range(call.batch):  # entries beyond a sequence are no pages
            table[b, -(-(lengths[b] + news[b]) // call.page_size) :] = 2**30
        made.table, shape = table.to(call.device), (pages, call.page_size, *row)
    elif call.indexed:
        order = torch.randperm(call.batch + 2, generator=generator)[: call.batch]
        made.index, shape = order.int().to(call.device), (call.batch + 2, call.capacity, *row)
    else:
        shape = (call.batch, call.capacity, *row)
    made.k_cache, made.v_cache = (torch.full(shape, float("nan"), dtype=call.dtype, device=call.device) for _ in "kv")
    for b in range(call.batch):
        old_k, old_v = random(lengths[b], *row), random(lengths[b], *row)
        places = [made.place(b, i) for i in range(lengths[b])]
        at = tuple(torch.tensor(axis, device=call.device) for axis in zip(*places, strict=True))
        made.k_cache[at], made.v_cache[at] = old_k, old_v
    if call.padded:
        pads = [chance.randint(0, max(n - 1, 0)) for n in lengths]
        made.leftpad = torch.tensor(pads, dtype=torch.int32, device=call.device)
    if call.new:
        made.k, made.v = random(call.batch, call.new, *row), random(call.batch, call.new, *row)
    if call.rotary_half:
        angles = torch.rand(call.capacity + call.seqlen_q, call.rotary_half, generator=generator) * 2 * math.pi
        made.cos, made.sin = (f(angles).to(call.dtype).to(call.device) for f in (torch.cos, torch.sin))
    if call.alibi:
        made.slopes = (torch.rand(call.batch, call.heads, generator=generator) * 0.3).to(call.device)
    if call.sinks:
        made.sinks = random(call.heads)
    return made


def run(call: Cached, given: Tensors) -> tuple[Tensor, Tensor | None]:
    """Call the function; return out as (b, longest, h, d), and lse as (b, h, longest), NaN where no query is."""
    q, starts = given.q, None
    if call.varlen_q:
        q, starts = _packed(q, given.queries), _starts(given.queries, call.device)
    k, v, new_starts = given.k, given.v, None
    if call.varlen_new and k is not None and v is not None:
        k, v, new_starts = _packed(k, given.news), _packed(v, given.news), _starts(given.news, call.device)
        if starts is not None and given.news == given.queries:
            new_starts = starts
    options = dict(call.options)
    if call.function == "vllm":
        out = torch.full_like(q, float("nan"))
        result = vllm_flash_attn.flash_attn_varlen_func(
            q, given.k_cache, given.v_cache, max_seqlen_q=call.seqlen_q, cu_seqlens_q=starts,
            max_seqlen_k=call.capacity, seqused_k=given.lengths, block_table=given.table, alibi_slopes=given.slopes,
            s_aux=given.sinks, return_softmax_lse=call.with_lse, out=out, fa_version=3, **options,
        )  # fmt: skip
        assert (result[0] if call.with_lse else result) is out
    elif call.function == "varlen":
        result = flash_attn.flash_attn_varlen_func(
            q, given.k_cache, given.v_cache, starts, torch.nn.functional.pad(given.lengths.cumsum(0), (1, 0)).int(),
            call.seqlen_q, call.capacity, alibi_slopes=given.slopes, block_table=given.table,
            return_attn_probs=call.with_lse, **options,
        )  # fmt: skip
        result = result[:2] if call.with_lse else result
    else:
        options |= {
            "k": k, "v": v, "rotary_cos": given.cos, "rotary_sin": given.sin, "cache_seqlens": given.lengths,
            "cache_batch_idx": given.index, "cache_leftpad": given.leftpad, "return_softmax_lse": call.with_lse,
        }  # fmt: skip
        if call.function == "flash_attn":
            result = flash_attn.flash_attn_with_kvcache(
                q, given.k_cache, given.v_cache, block_table=given.table, alibi_slopes=given.slopes, **options
            )
        else:
            result = flash_attn_3.flash_attn_with_kvcache(
                q, given.k_cache, given.v_cache, page_table=given.table, cu_seqlens_q=starts,
                cu_seqlens_k_new=new_starts, max_seqlen_q=call.seqlen_q if starts is not None else None, **options,
            )  # fmt: skip
    out, lse = result[:2] if call.with_lse else (result, None)
    if starts is None:
        return out, lse
    padded = torch.full_like(given.q, float("nan"))
    shape = (call.batch, call.heads, call.seqlen_q)
    padded_lse = torch.full(shape, float("nan"), device=call.device) if lse is not None else None
    for b, rows in enumerate(given.queries):
        first = int(starts[b])
        padded[b, :rows] = out[first : first + rows]
        if lse is not None and padded_lse is not None:
            padded_lse[b, :, :rows] = lse[:, first : first + rows]
    return padded, padded_lse


def expected(call: Cached, given: Tensors, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse and the caches that a call leaves, of the tensors as they were; arithmetic in ``compute``.

    New keys and rotated queries are rounded to the dtype, as they are kept in it.
    """
    k_cache, v_cache = given.k_cache.clone(), given.v_cache.clone()
    out = torch.full(given.q.shape, float("nan"), dtype=compute, device=call.device)
    lse = torch.full((call.batch, call.heads, call.seqlen_q), float("nan"), dtype=compute, device=call.device)
    left, right = call.options["window_size"]
    right = 0 if call.options["causal"] else right
    chunk = call.options.get("attention_chunk")
    local = call.options["causal"] or call.options["window_size"] != (-1, -1) or bool(chunk)
    for b in range(call.batch):
        used, new, rows = int(given.lengths[b]), given.news[b], given.queries[b]
        q = given.q[b, :rows]
        if new and given.k is not None and given.v is not None:
            k_new = given.k[b, :new]
            if given.cos is not None:
                k_new = _turned(call, given, k_new, torch.arange(used, used + new))
            for i in range(new):
                page, row = given.place(b, used + i)
                k_cache[page, row], v_cache[page, row] = k_new[i], given.v[b, i]
        if given.cos is not None:
            q = _turned(call, given, q, used + (torch.arange(rows) if local else torch.zeros(rows, dtype=torch.long)))
        used += new
        places = [given.place(b, i) for i in range(used)]
        k = torch.stack([k_cache[place] for place in places]).to(compute)
        v = torch.stack([v_cache[place] for place in places]).to(compute)
        group = call.heads // call.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scale = call.options.get("softmax_scale") or call.head_dim**-0.5
        s = torch.einsum("qhd,khd->hqk", q.to(compute), k) * scale
        if cap := call.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        position = torch.arange(rows, device=call.device)[:, None] + used - rows
        key = torch.arange(used, device=call.device)[None]
        if given.slopes is not None:
            s = s - given.slopes[b].to(compute)[:, None, None] * (position - key).abs()
        seen = torch.ones(rows, used, dtype=torch.bool, device=call.device)
        if left >= 0:
            seen &= key >= position - left
        if right >= 0:
            seen &= key <= position + right
        if chunk:
            seen &= key // chunk == torch.div(position, chunk, rounding_mode="floor")
        if given.leftpad is not None:
            seen &= key >= given.leftpad[b]
        s = s.masked_fill(~seen, float("-inf"))
        if given.sinks is not None:
            s = torch.cat((s, given.sinks.to(compute)[:, None, None].expand(-1, rows, 1)), 2)
        lse[b, :, :rows] = s.logsumexp(-1)
        p = torch.softmax(s, -1).nan_to_num(0.0)[..., :used]
        out[b, :rows] = torch.einsum("hqk,khd->qhd", p.to(compute), v)
    return out, lse, k_cache, v_cache


def _turned(call: Cached, given: Tensors, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (rows, heads, head_dim) number by number, in float32."""
    assert given.cos is not None
    assert given.sin is not None
    half = call.rotary_half
    actual = x.float().clone()
    cos, sin = (t.float()[positions.to(call.device)][:, None] for t in (given.cos, given.sin))
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if call.options["rotary_interleaved"]
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = (x.float()[..., part] for part in pairs)
    actual[..., pairs[0]] = a * cos - b * sin
    actual[..., pairs[1]] = a * sin + b * cos
    return actual.to(x.dtype)


def _packed(x: Tensor, rows: list[int]) -> Tensor:
    return torch.cat([x[b, :n] for b, n in enumerate(rows)])


def _starts(rows: list[int], device: str) -> Tensor:
    return torch.tensor([0, *rows], device=device).cumsum(0).int()


def checked(call: Cached) -> None:
    """Run a call and compare out, lse and caches: at most three times the error of plain torch in the same dtype."""
    given = tensors(call)
    exact = expected(call, given, torch.float64)
    plain = expected(call, given, call.dtype)
    out, lse = run(call, given)
    rows = ~exact[0].isnan()
    assert torch.equal(rows, ~out.isnan()), call.text()
    error = (out.double() - exact[0])[rows].abs().max().item() if rows.any() else 0.0
    allowed = (plain[0].double() - exact[0])[rows].abs().nan_to_num(0.0).max().item() if rows.any() else 0.0
    assert error <= 3 * allowed + 1e-5, f"{error} against {allowed}: {call.text()}"
    if lse is not None:
        some = exact[1].isfinite()
        assert torch.equal(lse.isneginf(), exact[1].isneginf()), call.text()
        wrong = (lse.double() - exact[1])[some].abs().max().item() if some.any() else 0.0
        assert wrong <= (1e-5 if call.dtype == torch.float32 else 2e-3), f"lse {wrong}: {call.text()}"
    for actual, wanted in ((given.k_cache, exact[2]), (given.v_cache, exact[3])):
        assert torch.allclose(
            actual.float(), wanted.float(), rtol=1e-2 if call.rotary_half else 0, atol=0, equal_nan=True
        ), f"a cache holds something else: {call.text()}"


def on(call: Cached, **changes: Any) -> Cached:
    """Return a call with other fields."""
    return replace(call, **changes)
