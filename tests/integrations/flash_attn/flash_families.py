"""The cases of flash-attention's grids run, family by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn import v3 as flash_attn_3
from tests.integrations.flash_attn.flash_grids import DTYPES, FP8, HEADS, NOISE, Case, Outcome, value_dims
from tests.integrations.flash_attn.flash_reference import Mask, Tensors, Wanted, beyond


def run(case: Case, device: str) -> Outcome:
    """Run a case on a device, and judge its results."""
    check: Callable[[Case, Tensors], str | None] = _FAMILIES[case.family]
    try:
        actual = check(case, Tensors(case.seed, device))
    except (CallError, NoKernelError) as error:
        return Outcome("refused", str(error))
    return Outcome("right") if actual is None else Outcome("wrong", actual)


def _inputs(case: Case, made: Tensors, rows: int, keys: int) -> tuple[list[Tensor], Tensor | None]:
    """Return q (rows, h, d), k and v (keys, hk, d), and qv or None."""
    dtype, dim = DTYPES[case["dtype"]], case["head_dim"]
    dim_v = value_dims(case.values)[case["wide"]]
    wide = torch.bfloat16 if dtype == FP8 else dtype
    q = made.normal(rows, HEADS, dim, dtype=wide)
    if case["softcap"]:
        q = q * (case["softcap"] / 4)  # logits reach the cap
    q = q.to(dtype).to(wide)
    k, v = (made.normal(keys, case["kv_heads"], n, dtype=dtype) for n in (dim, dim_v))
    return [q, k, v], made.normal(rows, HEADS, dim_v, dtype=dtype) if case["qv"] else None


def _descales(case: Case, made: Tensors, batch: int) -> list[Tensor | None]:
    if case["dtype"] != "fp8":
        return [None] * 3
    return [made.uniform(batch, case["kv_heads"]) * 2 for _ in range(3)]


def _options(case: Case, descales: Sequence[Tensor | None]) -> dict[str, Any]:
    names = ("q_descale", "k_descale", "v_descale")
    return {
        "causal": case["causal"], "softcap": case["softcap"], "pack_gqa": case["pack_gqa"],
        "num_splits": case["num_splits"], **dict(zip(names, descales, strict=True)),
    }  # fmt: skip


def _differentiates(case: Case) -> bool:
    """Whether the file looks at gradients."""
    wide = value_dims(case.values)[case["wide"]] > 256
    return case["dtype"] != "fp8" and not (case["qv"] or case["chunked"] or wide)


def _forward(case: Case, made: Tensors) -> str | None:
    rows, keys = case["lengths"]
    batch = 9 if keys <= 2048 else 2
    flat, qv = _inputs(case, made, batch * rows, batch * keys)
    dense = [t.unflatten(0, (batch, -1)) for t in flat]
    window = (made.number(0, keys), made.number(0, keys)) if case["local"] else (-1, -1)
    chunk = made.number(1, 2 * keys) if case["chunked"] else 0
    descales = _descales(case, made, batch)
    dtype = DTYPES[case["dtype"]]
    leaves = [t.to(dtype).requires_grad_(dtype != FP8) for t in dense]
    out = flash_attn_3.flash_attn_func(
        *leaves, qv=None if qv is None else qv.unflatten(0, (batch, -1)), window_size=list(window),
        attention_chunk=chunk, **_options(case, descales),
    )  # fmt: skip
    dout = made.normal(*out.shape, dtype=out.dtype) if _differentiates(case) else None
    grads = torch.autograd.grad(out, leaves, dout) if dout is not None else None
    wanted = Wanted.none()
    seen = Mask(case["causal"], window, chunk).seen(rows, keys, 0, made.device)
    for b in range(batch):
        scales = [None if scale is None else scale[b] for scale in descales]
        wanted.add(
            [t[b] for t in dense], scales, seen, case["softcap"], FP8 if dtype == FP8 else None,
            None if dout is None else dout[b],
        )  # fmt: skip
    gradients = None if grads is None else [list(t) for t in grads]
    return _judge(case, list(out.detach()), gradients, wanted)


def _judge(case: Case, outs: list[Tensor], gradients: list[list[Tensor]] | None, wanted: Wanted) -> str | None:
    factor, extra = (3, 3e-4) if case["softcap"] else (2, NOISE)
    wrong = beyond("out", torch.cat(outs), torch.cat(wanted.exact), torch.cat(wanted.plain), factor)
    if gradients is not None:
        for place, name in enumerate(("dq", "dk", "dv")):
            exact, plain = (torch.cat([each[place] for each in side]) for side in wanted.gradients)
            wrong = wrong or beyond(name, torch.cat(gradients[place]), exact, plain, factor, extra)
    return wrong


def _varlen(case: Case, made: Tensors) -> str | None:
    longest = case["lengths"]
    batch = 9 if longest[0] <= 2048 else 2
    used = made.lengths(longest[0], batch), made.lengths(longest[1], batch, zeros=True)
    whole = used
    if case["unused"]:
        others = made.lengths(longest[0], batch), made.lengths(longest[1], batch)
        whole = tuple([max(pair) for pair in zip(*both, strict=True)] for both in zip(used, others, strict=True))
        used = tuple([min(pair) for pair in zip(*both, strict=True)] for both in zip(used, others, strict=True))
    starts = [[0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in whole]
    packed, qv = _inputs(case, made, starts[0][-1], starts[1][-1])
    window = (made.number(0, longest[1]), made.number(0, longest[1])) if case["local"] else (-1, -1)
    chunk = made.number(1, 2 * longest[1]) if case["chunked"] else 0
    descales = _descales(case, made, batch)
    dtype = DTYPES[case["dtype"]]
    leaves = [t.to(dtype).requires_grad_(dtype != FP8) for t in packed]
    out = flash_attn_3.flash_attn_varlen_func(
        *leaves, *(made.integers(s) for s in starts), *(max(lengths) for lengths in whole),
        seqused_q=made.integers(used[0]), seqused_k=made.integers(used[1]), qv=qv, attention_chunk=chunk,
        window_size=torch.tensor(window) if case["local"] else window, **_options(case, descales),
    )  # fmt: skip
    dout = made.normal(*out.shape, dtype=out.dtype) if _differentiates(case) else None
    grads = torch.autograd.grad(out, leaves, dout) if dout is not None else None
    wanted, mask = Wanted.none(), Mask(case["causal"], window, chunk)
    places = [
        [slice(first, first + n) for first, n in zip(s, lengths, strict=False)]
        for s, lengths in zip(starts, used, strict=True)
    ]
    for b in range(batch):
        rows, keys = places[0][b], places[1][b]
        inputs = [packed[0][rows], packed[1][keys], packed[2][keys]]
        scales = [None if scale is None else scale[b] for scale in descales]
        seen = mask.seen(used[0][b], used[1][b], 0, made.device)
        wanted.add(
            inputs, scales, seen, case["softcap"], FP8 if dtype == FP8 else None, None if dout is None else dout[rows]
        )
    gradients = None
    if grads is not None:
        gradients = [[t[part] for part in places[min(place, 1)]] for place, t in enumerate(grads)]
    return _judge(case, [out.detach()[part] for part in places[0]], gradients, wanted)


@torch.no_grad()
def _cache(case: Case, made: Tensors) -> str | None:
    rows, capacity = case["lengths"]
    batch, dim, dtype = 5, 128, DTYPES[case["dtype"]]
    entries = 2 * batch if case["indexed"] else batch
    causal, local = case["mask"] == "causal", case["mask"] == "local"
    window = (made.number(0, capacity), made.number(0, capacity)) if local else (-1, -1)
    chunk = made.number(1, 2 * capacity) if case["chunked"] else 0
    half = int(case["rotary"] * dim) // 16 * 8
    queries = made.lengths(rows, batch) if case["packed"] else [rows] * batch
    longest_new = rows if case["new_as_queries"] else made.number(1, rows + 1)
    news = [0] * batch
    if case["new_keys"]:
        news = made.lengths(longest_new, batch) if case["packed"] else [longest_new] * batch
    room = capacity - (rows if half and case["mask"] != "full" else longest_new)
    before = [made.number(0, room + 1) if case["new_keys"] else made.number(1, capacity + 1) for _ in range(batch)]
    pads = [made.number(0, n) if case["leftpad"] and n else 0 for n in before]
    index = made.order(entries)[:batch] if case["indexed"] else None
    q = made.normal(sum(queries), HEADS, dim, dtype=dtype)
    k, v = (made.normal(sum(news), case["kv_heads"], dim, dtype=dtype) for _ in "kv")
    if case["page_size"] is None:
        table, shape = None, (entries, capacity)
    else:
        shape = (3 * capacity // case["page_size"] * entries, case["page_size"])
        table = made.order(shape[0]).view(entries, -1)
    caches = [made.normal(*shape, case["kv_heads"], dim, dtype=dtype) for _ in "kv"]
    cos = sin = None
    if half:
        angles = made.uniform(capacity if table is None else shape[0] * shape[1], half) * (2 * math.pi)
        cos, sin = (f(angles).to(torch.bfloat16).to(dtype).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def logical(cache: Tensor, b: int) -> Tensor:
        """Keys of a sequence in their order, a copy."""
        entry = b if index is None else int(index[b])
        rows = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch moves bytes, but not numbers of 8 bits
        rows = (rows[entry] if table is None else rows[table[entry]].flatten(0, 1))[:capacity].clone()
        return rows.view(cache.dtype)

    wanted, mask, kept = Wanted.none(), Mask(causal, window, chunk), []
    row = new = 0
    for b in range(batch):
        own, ours, theirs = q[row : row + queries[b]], k[new : new + news[b]], v[new : new + news[b]]
        row, new, length = row + queries[b], new + news[b], before[b] + news[b]
        if cos is not None and sin is not None:
            offset = torch.arange(queries[b], device=made.device) * (case["mask"] != "full")
            own = _rotated(own, cos, sin, before[b] + offset, case["interleaved"])
            ours = _rotated(ours, cos, sin, before[b] + torch.arange(news[b], device=made.device), case["interleaved"])
        keys, values = logical(caches[0], b), logical(caches[1], b)
        keys[before[b] : length], values[before[b] : length] = ours, theirs
        kept.append((keys, values))
        seen = mask.seen(queries[b], length, pads[b], made.device)
        wanted.add([own, keys[:length], values[:length]], [None] * 3, seen, 0.0, FP8 if dtype == FP8 else None, None)

    real = [t.to(dtype) for t in caches]
    lengths = made.integers(before)
    given: dict[str, Any] = {
        "cache_seqlens": lengths, "cache_batch_idx": index, "page_table": table, "rotary_seqlens": lengths,
        "cache_leftpad": made.integers(pads) if case["leftpad"] else None,
        "rotary_cos": None if cos is None else cos.to(dtype), "rotary_sin": None if sin is None else sin.to(dtype),
        "rotary_interleaved": case["interleaved"], "causal": causal, "attention_chunk": chunk,
        "window_size": torch.tensor(window) if local else window, "num_splits": case["num_splits"],
    }  # fmt: skip
    q = q.to(dtype)
    if case["packed"]:
        given |= {"cu_seqlens_q": made.integers([0, *torch.tensor(queries).cumsum(0)]), "max_seqlen_q": max(queries)}
    else:
        q = q.unflatten(0, (batch, -1))
    if case["new_keys"]:
        given |= {"k": k.to(dtype), "v": v.to(dtype)}
        if case["packed"]:
            given["cu_seqlens_k_new"] = made.integers([0, *torch.tensor(news).cumsum(0)])
        else:
            given |= {name: given[name].unflatten(0, (batch, -1)) for name in "kv"}
    if case["metadata"]:
        given["scheduler_metadata"] = flash_attn_3.get_scheduler_metadata(
            batch, max(queries), capacity if table is None else table.shape[1] * shape[1], HEADS, case["kv_heads"],
            dim, lengths, dtype, headdim_v=dim, cu_seqlens_q=given.get("cu_seqlens_q"),
            cu_seqlens_k_new=given.get("cu_seqlens_k_new"), cache_leftpad=given["cache_leftpad"],
            max_seqlen_k_new=longest_new, page_size=case["page_size"], causal=causal,
            window_size=given["window_size"], attention_chunk=chunk, num_splits=case["num_splits"],
        )  # fmt: skip
    for _ in range(1 + case["metadata"]):  # metadata are used again
        given_caches = [t.clone() for t in real]
        out, _, *_ = flash_attn_3.flash_attn_with_kvcache(q, *given_caches, **given, return_softmax_lse=True)
        wrong = _judge_cache(case, out if case["packed"] else out.flatten(0, 1), wanted, dtype)
        for b, (keys, values) in enumerate(kept if case["new_keys"] else ()):
            wrong = wrong or _judge_rows(case, [logical(t, b).float() for t in given_caches], keys, values, dtype)
        if wrong is not None:
            return wrong
    return None


def _judge_cache(case: Case, out: Tensor, wanted: Wanted, dtype: torch.dtype) -> str | None:
    exact, plain = (torch.cat(side).float() for side in (wanted.exact, wanted.plain))
    error, allowed = (out.float() - exact).abs(), (plain - exact).abs()
    factor, factor_of_mean = (4, 3) if dtype == FP8 else (2, 1.5)
    if not error.max() <= factor * allowed.max() + 1e-5:
        return f"out is off by {error.max().item():.3g}; plain torch by {allowed.max().item():.3g}"
    if not error.mean() <= factor_of_mean * allowed.mean():
        return f"out is off by {error.mean().item():.3g} in the mean; plain torch by {allowed.mean().item():.3g}"
    return None


def _judge_rows(case: Case, actual: list[Tensor], keys: Tensor, values: Tensor, dtype: torch.dtype) -> str | None:
    """Compare what a cache holds after the call."""
    keys, values = (t.to(dtype).float() for t in (keys, values))
    near = 1e-3 if dtype == FP8 else 0.0
    if not torch.allclose(actual[1], values, rtol=near, atol=near):
        return "the cache of v holds something else"
    near = 0.0 if not case["rotary"] else 1e-1 if dtype == FP8 else 1e-3
    return None if torch.allclose(actual[0], keys, rtol=near, atol=near) else "the cache of k holds something else"


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first numbers of (rows, heads, head_dim) in float32, each row by that of its position."""
    half = cos.shape[1]
    cos, sin = (t[positions].float()[:, None] for t in (cos, sin))
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    actual = x.float()
    a, b = actual[..., first].clone(), actual[..., second].clone()
    actual[..., first], actual[..., second] = a * cos - b * sin, a * sin + b * cos
    return actual.to(x.dtype)


@torch.no_grad()
def _combine(case: Case, made: Tensors) -> str | None:
    splits, batch, heads = case["num_splits"], 5, 16
    dtype = DTYPES[case["dtype"]]
    shape = (2 * splits, batch, heads, case["seqlen"], case["head_dim"])
    outs = made.normal(*shape, dtype=torch.float32).transpose(2, 3)[:splits]  # neither is contiguous
    lses = made.normal(splits, batch, 2 * heads, case["seqlen"], dtype=torch.float32).transpose(-1, -2)[..., :heads]
    lses[splits // 2 :, : batch // 3] = -math.inf
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, out_dtype=dtype)
    wanted_lse = torch.logsumexp(lses, dim=0)
    weight = torch.exp(lses - wanted_lse).nan_to_num(0.0, 0.0, 0.0)
    exact = (weight[..., None] * outs).sum(0)
    rounded = exact.to(dtype)
    if out.dtype != dtype or not torch.allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5):
        return "the log-sum-exp is another one"
    error, allowed = ((t.float() - exact).abs().max().item() for t in (out, rounded))
    if error <= 2 * allowed or torch.allclose(out, rounded, atol=1e-5, rtol=1e-5):
        return None
    return f"out is off by {error:.3g}; rounding by {allowed:.3g}"


def _repeated(case: Case, made: Tensors) -> str | None:
    """The same bits on every run, of dq up to the order of its sums."""
    rows, keys = case["lengths"]
    batch = 60 if made.device != "cpu" else 2
    q, k, v = (made.normal(batch, n, 4, case["head_dim"]).requires_grad_() for n in (rows, keys, keys))
    first: tuple[Tensor, ...] | None = None
    dout = made.normal(batch, rows, 4, case["head_dim"])
    for _ in range(20 if made.device != "cpu" else 2):
        out = flash_attn_3.flash_attn_func(q, k, v, causal=case["causal"])
        gradients = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
        first = first or gradients
        dq = first[1]
        near = 2 * (dq + 0.3 - 0.3 - dq).abs().max().item()
        for name, one, other in zip(("out", "dq", "dk", "dv"), gradients, first, strict=True):
            same = torch.allclose(one, other, atol=near) if name == "dq" else torch.equal(one, other)
            if not same:
                return f"{name} differs between two runs"
    return None


def _few_queries(case: Case, made: Tensors) -> str | None:
    q = made.normal(2, 64, 16, 128)
    k, v = (made.normal(2, 8192, 4, 128) for _ in "kv")
    outs = [flash_attn_3.flash_attn_func(q, k, v, causal=case["causal"]) for _ in range(100)]
    wanted, seen = Wanted.none(), Mask(case["causal"]).seen(64, 8192, 0, made.device)
    for b in range(2):
        wanted.add([q[b], k[b], v[b]], [None] * 3, seen, 0.0, None, None)
    if any(not torch.equal(out, outs[0]) for out in outs):
        return "out differs between two runs"
    return beyond("out", torch.cat(list(outs[0])), torch.cat(wanted.exact), torch.cat(wanted.plain), 2)


def _one_prompt(case: Case, made: Tensors) -> str | None:
    """A prompt among decoding sequences, with keys shared among blocks and without."""
    rows, keys = [512 if i == 40 else 1 for i in range(64)], 512
    q = made.normal(sum(rows), HEADS, 128)
    k, v = (made.normal(64 * keys, 2, 128) for _ in "kv")
    starts = made.integers([0, *torch.tensor(rows).cumsum(0)]), made.integers([keys * i for i in range(65)])
    outs = [flash_attn_3.flash_attn_varlen_func(q, k, v, *starts, 512, keys, num_splits=n) for n in (1, 4)]
    error = (outs[0] - outs[1]).abs().max().item()
    return None if error <= 2e-3 else f"splits differ by {error:.3g}"


_FAMILIES = {
    "forward": _forward, "varlen": _varlen, "cache": _cache, "combine": _combine, "repeated": _repeated,
    "few_queries": _few_queries, "one_prompt": _one_prompt,
}  # fmt: skip
