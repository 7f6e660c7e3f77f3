"""Cases that a backend of SGLang has to compute: run with the stub, and inside of SGLang's release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.sglang import backend as sglang_backend
from tests.integrations.engines import engine_batches
from tests.integrations.engines.engine_batches import Seen


@dataclass
class Engine:
    """A SGLang, or the stub of it: how pools and layers are made, and its modes of a forward."""

    pool: Callable[..., Any]  # (slots, page size, dtype, kv_heads, head dim, layers)
    window_pool: Callable[..., Any] | None  # (the same, and the layers with a window)
    layer: Callable[..., Any]
    modes: Any
    kinds: Any
    device: str = "cpu"


@dataclass
class Case:
    """One layer and one batch."""

    queries: tuple[int, ...] = (5, 1, 1, 17)
    lengths: tuple[int, ...] = (40, 33, 1, 17)
    mode: str = "EXTEND"
    kind: str = "DECODER"
    window: int | None = None  # with the query's own key
    window_pool: bool = False
    softcap: float = 0.0
    sinks: bool = False
    encoder: tuple[int, ...] | None = None  # keys of encoders, which come before those of the decoder
    cross: bool = False
    fp8: bool = False
    page_size: int = 16
    graph: bool = False
    padded: int = 0
    drafts: int = 1
    parents: tuple[tuple[int, ...], ...] = ()  # of a tree of drafts, by request: that of each but the first one
    mask: Any = None
    seen: Seen | None = None
    lse: bool = False
    images: dict[int, tuple[int, int]] | None = None  # first and last position by request
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32


_DECODE = {"queries": (1, 1, 1), "lengths": (40, 33, 2), "mode": "DECODE"}
CASES = {
    "prompts and decoding": Case(),
    "pages of one token": Case(page_size=1),
    "decoding": Case(**_DECODE),
    "window": Case(window=9),
    "window, decoding": Case(**_DECODE, window=9),
    "a pool of windows": Case(window=9, window_pool=True),
    "a pool of windows, decoding": Case(**_DECODE, window=9, window_pool=True),
    "sinks": Case(sinks=True),
    "sinks and window": Case(sinks=True, window=7),
    "softcap": Case(softcap=2.0),
    "both ways": Case(kind="DECODER_BIDIRECTIONAL"),
    "encoder": Case(kind="ENCODER_ONLY", queries=(9, 20), lengths=(9, 20)),
    "after an encoder": Case(page_size=1, encoder=(11, 3, 8, 5)),
    "cross": Case(page_size=1, encoder=(11, 3, 8, 5), cross=True),
    "fp8": Case(fp8=True),
    "fp8, head dim 512": Case(fp8=True, dim=512),
    "graph": Case(**_DECODE, graph=True, padded=2),
    "graph, a pool of windows": Case(**_DECODE, graph=True, padded=1, window=9, window_pool=True),
    "drafts": Case(queries=(3, 3), lengths=(40, 21), mode="TARGET_VERIFY", drafts=3),
    "drafts, graph": Case(queries=(3, 3), lengths=(40, 21), mode="TARGET_VERIFY", drafts=3, graph=True, padded=1),
    "trees of drafts": Case(
        queries=(4, 4), lengths=(40, 21), mode="TARGET_VERIFY", drafts=4, parents=((0, 0, 1), (0, 1, 0)),
    ),
    "trees of drafts, graph": Case(
        queries=(4, 4), lengths=(40, 21), mode="TARGET_VERIFY", drafts=4, parents=((0, 0, 1), (0, 1, 0)), graph=True,
        padded=1,
    ),
    "log-sum-exp": Case(lse=True),
    "images": Case(images={0: (36, 38), 3: (4, 12)}),
    "images and window": Case(images={0: (36, 39), 3: (2, 15)}, window=6),
}  # fmt: skip


def trees_of(case: Case) -> Tensor:
    """Pairs of drafts: each sees itself and its ancestors."""
    trees = torch.eye(case.drafts, dtype=torch.bool).repeat(len(case.parents), 1, 1)
    for tree, parents in zip(trees, case.parents, strict=True):
        for draft, parent in enumerate(parents, start=1):
            tree[draft] |= tree[parent]
    return trees


def seen_by(case: Case) -> Seen:
    """The mask of a case, written down for itself."""

    def seen(b: int, q: Tensor, kv: Tensor) -> Tensor:
        if case.seen is not None:
            return case.seen(b, q, kv)
        if case.parents:
            first = case.lengths[b] - case.drafts
            pairs = trees_of(case)[b][(q - first).clamp(min=0), (kv - first).clamp(min=0)]
            return torch.where(kv < first, True, pairs)
        visible = torch.ones(q.shape[0], kv.shape[1], dtype=torch.bool)
        if case.window is not None:
            visible &= (q - kv).abs() < case.window
        if case.kind == "DECODER":
            first, last = (case.images or {}).get(b, (1, 0))
            inside = (first <= q) & (q <= last) & (first <= kv) & (kv <= last)
            back = q - kv < (case.window or 1 << 20)
            visible = (visible & (kv <= q)) | (inside & back)
        return visible

    return seen


def runner_of(engine: Engine, case: Case, pool: Any, rows: Tensor) -> Any:
    """Attributes of a model runner that a backend reads."""
    model = SimpleNamespace(
        attention_arch=None, context_len=128, is_local_attention_model=False, head_dim=case.dim,
        is_encoder_decoder=case.encoder is not None,
    )  # fmt: skip
    translator = SimpleNamespace(is_translating=False, write_ids=lambda batch, kind: batch.window_slots)
    return SimpleNamespace(
        device=torch.device(engine.device), page_size=case.page_size, kv_index_translator=translator,
        req_to_token_pool=SimpleNamespace(req_to_token=rows), token_to_kv_pool=pool, model_config=model,
        is_draft_worker=False, sliding_window_size=None,
    )  # fmt: skip


def run(engine: Engine, case: Case, seed: int = 0) -> tuple[Any, Tensor]:
    """Output of the backend, and what it should be, float64."""
    before = list(case.encoder or [0] * len(case.queries))
    queries = case.queries
    made = engine_batches.batch(
        queries, case.lengths, heads=case.heads, kv_heads=case.kv_heads, dim=case.dim, rows=case.page_size, seed=seed,
        dtype=case.dtype,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    count, page = len(queries), case.page_size
    pages = [-(-(length + b) // page) for length, b in zip(case.lengths, before, strict=True)]
    total = sum(pages) + 3
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    rows = torch.zeros(count + 1, 128 + page, dtype=torch.int32, device=engine.device)  # row 0 is padding
    for b in range(count):
        own = torch.tensor([free.pop() for _ in range(pages[b])])
        tokens = (own[:, None] * page + torch.arange(page)).flatten()
        rows[b + 1, : len(tokens)] = tokens.int()
    cache = torch.float8_e4m3fn if case.fp8 else case.dtype
    make = engine.window_pool if case.window_pool else engine.pool
    assert make is not None
    pool = make(total * page, page, cache, case.kv_heads, case.dim)
    layer = engine.layer(
        case.heads, case.dim, case.dim**-0.5, case.kv_heads, layer_id=0, logit_cap=case.softcap,
        sliding_window_size=-1 if case.window is None else case.window - 1, is_cross_attention=case.cross,
        attn_type=engine.kinds[case.kind],
    )  # fmt: skip
    scales = (0.03, 0.02) if case.fp8 else (None, None)
    layer.k_scale, layer.v_scale = (None if s is None else torch.tensor(s) for s in scales)
    stored: list[tuple[Tensor, Tensor]] = []
    encoders: list[tuple[Tensor, Tensor]] = []
    for b in range(count):
        k, v = made.keys[b], made.values[b]
        if before[b]:
            e = tuple(torch.randn(before[b], case.kv_heads, case.dim, generator=generator) for _ in range(2))
            encoders.append(e)  # type: ignore[arg-type]
            write(pool, layer, rows[b + 1, : before[b]].long(), *e, scales)
        new = queries[b]
        old = rows[b + 1, before[b] : before[b] + case.lengths[b] - new].long()
        write(pool, layer, old, k[: len(old)], v[: len(old)], scales)
        stored.append(tuple(rounded(t, s) for t, s in zip((k, v), scales, strict=True)))  # type: ignore[arg-type]
    place = torch.cat([
        rows[b + 1, before[b] + case.lengths[b] - queries[b] : before[b] + case.lengths[b]].long() for b in range(count)
    ])  # fmt: skip
    mode = engine.modes[case.mode]
    added = case.drafts if case.mode == "TARGET_VERIFY" else 0
    lengths = torch.tensor(case.lengths, dtype=torch.int64) - added
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=count, seq_lens=lengths.to(engine.device), seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(1, count + 1, device=engine.device), spec_info=None,
        extend_seq_lens=torch.tensor(queries, dtype=torch.int32, device=engine.device),
        extend_seq_lens_cpu=list(queries), extend_num_tokens=sum(queries) if case.mode == "EXTEND" else None,
        encoder_lens=None if case.encoder is None else torch.tensor(before, device=engine.device),
        out_cache_loc=place.to(engine.device), out_cache_loc_is_physical=False, encoder_out_cache_loc=None,
        window_slots=None,
    )  # fmt: skip
    if case.window_pool:
        batch.window_slots = pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
    width = 2 if case.parents else 1 if case.drafts > 1 else None
    sglang_backend.get_spec = lambda: SimpleNamespace(
        speculative_num_draft_tokens=case.drafts, speculative_eagle_topk=width, speculative_algorithm="EAGLE"
    )
    sglang_backend.get_exec = lambda: SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False)
    )
    backend = sglang_backend.AttngenAttnBackend(runner_of(engine, case, pool, rows))
    if case.mask is not None:
        backend._mask = sglang_backend.engines.configured(case.mask)
    q, k, v = made.q, made.k, made.v
    if case.parents:
        batch.spec_info = SimpleNamespace(custom_mask=trees_of(case).flatten().to(engine.device))
        assert not backend.verify_mask.fits(1)
    if case.graph:
        q, k, v = in_graph(engine, backend, case, batch, q, k, v)
    else:
        backend.init_forward_metadata(batch)
    if case.images is not None:  # as Gemma 4 sets it
        ranges = torch.full((sum(queries), 2), -1, dtype=torch.int32)
        for b, (first, last) in case.images.items():
            start = int(made.starts[b]) - (case.lengths[b] - queries[b])
            ranges[start + first : start + last + 1] = torch.tensor([first, last], dtype=torch.int32)
        backend.forward_metadata.image_token_ranges = ranges.to(engine.device)
    sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
    options: dict[str, Any] = {"sinks": sinks.to(engine.device)} if sinks is not None else {}
    if case.lse:
        options["return_lse"] = True
    forward = backend.forward_decode if case.mode == "DECODE" else backend.forward_extend
    q, k, v = (t.to(engine.device) for t in (q, k, v))
    out = forward(q.flatten(1), *((None, None) if case.cross else (k, v)), layer, batch, **options)
    made.keys, made.values = map(list, zip(*stored, strict=True))
    if case.cross:
        return out.view(-1, case.heads, case.dim), over_encoders(made, encoders, case)
    wanted = made.expected(seen_by(case), case.dim**-0.5, softcap=case.softcap, sinks=sinks)
    if case.lse:
        return (out[0], out[1]), wanted
    return out.view(-1, case.heads, case.dim)[: len(wanted)].cpu(), wanted


def in_graph(engine: Engine, backend: Any, case: Case, batch: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Prepare a batch as a graph's runner does: captured for another batch, padded, then filled for this one."""
    count, drafts = len(case.queries) + case.padded, case.drafts
    backend.init_cuda_graph_state(8, 8 * drafts)
    pad = torch.zeros(case.padded * drafts, dtype=torch.int64)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, pad])
    if batch.window_slots is not None:
        batch.window_slots = torch.cat([batch.window_slots, pad])
    batch.batch_size = count
    ones = torch.ones(case.padded, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu = torch.cat([batch.seq_lens, ones])
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(case.padded, dtype=torch.int64)])
    captured = replace_of(batch, seq_lens=torch.ones(count, dtype=torch.int64), seq_lens_cpu=torch.ones(count),
                          req_pool_indices=torch.zeros(count, dtype=torch.int64))  # fmt: skip
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    first = backend.forward_metadata
    if case.parents:  # the draft stage fills the backend's own tensor
        assert backend.verify_mask.fits(8)
        given, filled = batch.spec_info.custom_mask, backend.verify_mask.buffer
        filled[: given.shape[0]].copy_(given)
        batch.spec_info = SimpleNamespace(custom_mask=filled)
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata is first, "a graph reads the tensors that it was captured with"
    return [torch.cat([t, torch.zeros(case.padded * drafts, *t.shape[1:])]) for t in (q, k, v)]


def replace_of(batch: Any, **changes: Any) -> Any:
    """A batch with other fields."""
    return SimpleNamespace(**{**vars(batch), **changes})


def write(pool: Any, layer: Any, slots: Tensor, k: Tensor, v: Tensor, scales: Any) -> None:
    """Write keys and values that were there before."""
    if not len(slots):
        return
    location = sglang_backend.KVWriteLoc(slots)
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        location = sglang_backend.KVWriteLoc(slots, pool.translate_loc_from_full_to_swa(slots))
    pool.set_kv_buffer(layer, location, k.clone(), v.clone(), *scales)


def rounded(t: Tensor, scale: float | None) -> Tensor:
    """Numbers as a cache in 8 bits holds them."""
    return t if scale is None else (t / scale).to(torch.float8_e4m3fn).float() * scale


def over_encoders(made: engine_batches.Batch, encoders: list[tuple[Tensor, Tensor]], case: Case) -> Tensor:
    """Cross attention in float64."""
    outs, start = [], 0
    for (k, v), count in zip(encoders, case.queries, strict=True):
        seen = torch.ones(count, len(k), dtype=torch.bool)
        outs.append(engine_batches.attention(made.q[start : start + count], k, v, seen, case.dim**-0.5))
        start += count
    return torch.cat(outs)


def check(engine: Engine, case: Case, seed: int = 0) -> None:
    """Run a case; AssertionError if its error is too large."""
    out, wanted = run(engine, case, seed)
    if case.lse:
        out, lse = out
        assert lse.shape == out.shape[:2]
    error = float((out.cpu().double() - wanted).abs().max())
    assert error <= (1e-5 if case.dtype == torch.float32 else 0.02), f"{error} for {replace(case)}"
