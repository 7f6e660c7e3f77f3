"""Cases that a backend of vLLM has to compute: run with the stub, and inside of vLLM's releases.

After what vLLM's own test of its backends checks, and more of the contract. ``Engine`` holds what differs between the
two: how configurations and layers are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.vllm import backend as vllm_backend
from tests.integrations.engines import engine_batches
from tests.integrations.engines.engine_batches import ORDERS, Batch, Seen


@dataclass
class Engine:
    """A vLLM, or the stub of it. ``config(**model)`` makes a configuration; ``current`` makes it the current one."""

    common: Any  # CommonAttentionMetadata
    config: Any
    current: Any
    kinds: Any  # AttentionType
    device: str = "cpu"


@dataclass
class Case:
    """One layer and one batch."""

    queries: tuple[int, ...] = (5, 1, 1, 17)
    lengths: tuple[int, ...] = (40, 33, 1, 17)
    kind: str = "decoder"
    causal: Any = True  # or flags of requests
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    images: dict[int, list[tuple[int, int]]] | None = None
    clamped: bool = False
    prompts: tuple[int, ...] | None = None
    prompt_window: int = 6
    fp8: str = ""  # "tensor", "head" or "row": what has a scale
    order: tuple[int, ...] = ORDERS[0]
    padded: int = 0
    extra_tokens: int = 0
    capture: bool = False
    shared: int = 0  # blocks that requests begin with in common
    rows: int = 16
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32
    mask: Any = None  # of the user
    seen: Seen | None = None  # with a mask of the user's
    model: dict[str, Any] = field(default_factory=dict)


#: vLLM's names of caches by what has a scale; else "fp8".
CACHES = {"": "auto", "row": "fp8_per_token_head"}

CASES = {
    "mixed": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "decoding alone": Case(queries=(1, 1, 1), lengths=(70, 3, 16)),
    "blocks side by side": Case(order=ORDERS[1]),
    "heads outermost": Case(order=ORDERS[2]),
    "blocks of 32": Case(rows=32),
    "window": Case(window=9),
    "sinks": Case(sinks=True),
    "sinks and window": Case(sinks=True, window=8),
    "softcap": Case(softcap=2.0),
    "softcap and window": Case(softcap=2.0, window=8),
    "alibi": Case(alibi=True),
    "alibi and window": Case(alibi=True, window=11),
    "not causal": Case(causal=False),
    "not causal, window": Case(causal=False, window=4),
    "causal by request": Case(causal=(1, 0, 1, 0)),
    "causal by request, window": Case(causal=(0, 0, 1, 0), window=6),
    "images": Case(images={0: [(30, 38)], 3: [(2, 7), (9, 15)]}),
    "images beyond the chunk": Case(images={0: [(30, 60), (3, 3)], 1: [(0, 8)]}),
    "images and window": Case(window=5, images={0: [(33, 39)], 3: [(0, 12)]}),
    "images within the window": Case(window=5, clamped=True, images={3: [(0, 12)]}),
    "images and softcap": Case(softcap=2.0, images={3: [(0, 12)]}),
    "no image in this batch": Case(queries=(1, 1), lengths=(40, 33), images={0: [(2, 9)]}),
    "prompts and windows": Case(prompts=(10, 4, 1, 17), prompt_window=6, model={"rswa_window": 6}),
    "fp8": Case(fp8="tensor"),
    "fp8 by head": Case(fp8="head", sinks=True, window=8),
    "fp8 by row": Case(fp8="row"),
    "fp8 by row, heads within rows": Case(fp8="row", order=ORDERS[1], window=9, dtype=torch.bfloat16),
    "fp8 by row, heads outermost": Case(fp8="row", order=ORDERS[2], dim=512, queries=(1, 1), lengths=(40, 33)),
    "fp8, head dim 512": Case(fp8="head", dim=512),
    "padded requests and tokens": Case(padded=3, extra_tokens=4),
    "captured": Case(queries=(1, 1, 1), lengths=(20, 3, 16), padded=2, extra_tokens=2, capture=True),
    "shared blocks": Case(queries=(1, 1, 1, 1), lengths=(70, 49, 16, 66), shared=3),
    "shared blocks, drafts": Case(queries=(3, 1, 2), lengths=(70, 49, 66), shared=3, sinks=True, order=ORDERS[1]),
    "shared blocks, captured": Case(
        queries=(1, 1, 1), lengths=(40, 33, 50), shared=2, padded=2, extra_tokens=2, capture=True
    ),
    "shared blocks in 8 bits": Case(queries=(1, 1, 1), lengths=(70, 49, 66), shared=3, fp8="head"),
    "shared blocks and a window": Case(queries=(1, 1), lengths=(40, 50), shared=2, window=9),
    "encoder": Case(kind="encoder_only", causal=False, queries=(9, 1, 20), lengths=(9, 1, 20)),
    "encoder, window": Case(kind="encoder_only", causal=False, window=4, queries=(9, 20), lengths=(9, 20)),
    "cross": Case(kind="encoder_decoder", causal=False, queries=(3, 1), lengths=(30, 12)),
}  # fmt: skip


def seen_by(case: Case) -> Seen:
    """The mask of a case, written down for itself."""

    def seen(b: int, q: Tensor, kv: Tensor) -> Tensor:
        if case.seen is not None:
            return case.seen(b, q, kv)
        flag = case.causal if isinstance(case.causal, bool) else bool(case.causal[b])
        visible = torch.ones(q.shape[0], kv.shape[1], dtype=torch.bool)
        if case.window is not None:
            visible &= (q - kv).abs() < case.window
        if flag:
            visible &= kv <= q
        for first, last in (case.images or {}).get(b, []):
            inside = (first <= q) & (q <= last) & (first <= kv) & (kv <= last) & (first < last)
            visible |= inside & (q - kv < case.window) if case.clamped and case.window else inside
        if case.prompts is not None:
            visible &= (kv < case.prompts[b]) | (q - kv < case.prompt_window)
        return visible

    return seen


def run(engine: Engine, case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Output of the backend, and what it should be, float64."""
    scale = case.dim**-0.5
    by_head = (torch.linspace(0.02, 0.04, case.kv_heads), torch.linspace(0.01, 0.03, case.kv_heads))
    scales = {"tensor": (torch.tensor(0.03), torch.tensor(0.02)), "head": by_head}
    made = engine_batches.batch(
        case.queries, case.lengths, heads=case.heads, kv_heads=case.kv_heads, dim=case.dim, rows=case.rows,
        dtype=case.dtype, fp8=scales.get(case.fp8), padded=case.padded, extra_tokens=case.extra_tokens,
        order=case.order, seed=seed, device=engine.device, shared=case.shared, scaled_rows=case.fp8 == "row",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    sinks = torch.randn(case.heads, generator=generator).to(case.dtype) if case.sinks else None
    slopes = [2.0 ** -(i + 1) for i in range(case.heads)] if case.alibi else None
    config = engine.config(images=case.images is not None, mask=case.mask, **case.model)
    spec = SimpleNamespace(block_size=case.rows, num_kv_heads=case.kv_heads, head_size=case.dim)
    with engine.current(config):
        builder = vllm_backend.AttngenMetadataBuilder(spec, ["layer"], config, torch.device(engine.device))
        impl = vllm_backend.AttngenImpl(
            case.heads, case.dim, scale, case.kv_heads, slopes, case.window, CACHES.get(case.fp8, "fp8"),
            case.softcap or None, engine.kinds(case.kind), None, None if sinks is None else sinks.to(engine.device),
        )  # fmt: skip
    common = metadata(engine, case, made)
    built = builder.build_for_cudagraph_capture(common) if case.capture else builder.build(0, common)
    k_scale, v_scale = (t.to(engine.device) for t in scales.get(case.fp8, (torch.tensor(1.0),) * 2))
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale, mm_prefix_clamp_sliding_window=case.clamped)
    q = made.q
    output = torch.full_like(q, torch.nan)
    keys, values = (made.k, made.v)
    if case.fp8 == "row":
        before_k, before_v, slots = made.before
        impl.do_kv_cache_update(layer, before_k, before_v, made.cache, slots)
    if case.kind != "encoder_only":
        impl.do_kv_cache_update(layer, keys, values, made.cache, made.slots)
    impl.forward(layer, q, keys, values, made.cache, built, output)
    tokens = sum(case.queries)
    wanted = made.expected(
        seen_by(case), scale, softcap=case.softcap, sinks=sinks,
        slopes=None if slopes is None else torch.tensor(slopes),
    )  # fmt: skip
    return output[:tokens].cpu(), wanted


def metadata(engine: Engine, case: Case, made: Batch) -> Any:
    """Metadata that vLLM hands to a builder."""
    causal = case.causal
    if not isinstance(causal, bool):
        causal = torch.tensor(causal, dtype=torch.int32, device=engine.device)
    prompts = case.prompts
    return engine.common(
        query_start_loc=made.starts.to(engine.device), query_start_loc_cpu=made.starts,
        seq_lens=made.used.to(engine.device), num_reqs=len(case.queries) + case.padded,
        num_actual_tokens=made.q.shape[0], max_query_len=max(case.queries), max_seq_len=max(case.lengths),
        block_table_tensor=made.table, slot_mapping=made.slots, causal=causal, seq_lens_cpu_upper_bound=made.used,
        mm_req_doc_ranges=case.images,
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts, dtype=torch.int32, device=engine.device),
    )  # fmt: skip


def tolerance(case: Case) -> float:
    """Largest absolute error of outputs about as large as 1."""
    return {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[case.dtype]


def check(engine: Engine, case: Case, seed: int = 0) -> float:
    """Run a case, and return its largest error; AssertionError if that is too large."""
    out, wanted = run(engine, case, seed)
    error = float((out.double() - wanted).abs().max())
    assert error <= tolerance(case), f"{error} for {case}"
    return error
