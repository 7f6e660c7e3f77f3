"""Steps of latent attention as SGLang makes them, and what they mean in float64: with the stub, and inside of its
release. Tensors have the device and the dtype of an engine's ``like``."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.integrations.vllm.vllm_mla_cases import COLUMNS, HEADS, RANK, SCALE, attend

#: Those that are imported beside the stub, or SGLang; as attributes of their package, others may be found.
sglang_backend, sglang_mla = (
    import_module(f"attngen.integrations.{name}") for name in ("sglang.backend", "sglang.mla")
)  # fmt: skip

#: Queries and lengths of the requests of a step, by the name of its mode; drafts are of two tokens.
STEPS = {
    "DECODE": ((1, 1, 1), (40, 33, 2)),
    "EXTEND": ((5, 1, 17), (40, 33, 17)),
    "TARGET_VERIFY": ((2, 2), (40, 21)),
}


def backend_of(
    pool: Any, rows: Tensor, page_size: int, *, deterministic: bool = False, dtype: torch.dtype = torch.bfloat16,
    **model: Any,
) -> Any:  # fmt: skip
    """A backend of a model runner with such a pool and such slots of requests."""
    sglang_backend.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=2, speculative_eagle_topk=1)
    sglang_backend.get_exec = lambda: SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=deterministic)
    )
    config = {
        "context_len": 128, "is_local_attention_model": False, "is_encoder_decoder": False, "kv_lora_rank": RANK,
        "qk_rope_head_dim": COLUMNS - RANK, **model,
    }  # fmt: skip
    return sglang_mla.AttngenMLABackend(SimpleNamespace(
        device=rows.device, page_size=page_size, token_to_kv_pool=pool, is_draft_worker=False,
        kv_index_translator=SimpleNamespace(is_translating=False), kv_cache_dtype=dtype,
        req_to_token_pool=SimpleNamespace(req_to_token=rows), model_config=SimpleNamespace(**config),
    ))  # fmt: skip


def batch_of(mode: Any, queries: tuple[int, ...], lengths: tuple[int, ...], slots: Tensor, **more: Any) -> Any:
    """A step, whose new tokens go to these slots."""
    added = queries[0] if mode.is_target_verify() else 0
    known, device = torch.tensor(lengths) - added, slots.device
    return SimpleNamespace(**{
        "forward_mode": mode, "batch_size": len(queries), "seq_lens": known.to(device), "seq_lens_cpu": known,
        "req_pool_indices": torch.arange(len(queries), device=device),
        "extend_seq_lens": torch.tensor(queries, dtype=torch.int32, device=device),
        "extend_seq_lens_cpu": list(queries), "extend_num_tokens": sum(queries), "encoder_lens": None,
        "spec_info": None, "out_cache_loc": slots, "out_cache_loc_is_physical": False, "encoder_out_cache_loc": None,
        "mha_return_lse": False, "attn_attend_prefix_cache": None, **more,
    })  # fmt: skip


def check_absorbed(engine: Any, name: str, page_size: int, *, graph: bool = False) -> None:
    """Assert that a step over latent rows gives what it means, and writes its own."""
    (queries, lengths), mode = STEPS[name], engine.modes[name]
    torch.manual_seed(0)
    pages = [-(-length // page_size) for length in lengths]
    slots = torch.zeros(len(lengths), 128 + page_size, dtype=torch.int32)
    free = (torch.randperm(sum(pages)) + 1).tolist()
    for b, count in enumerate(pages):
        own = torch.tensor([free.pop() for _ in range(count)])
        slots[b, : count * page_size] = (own[:, None] * page_size + torch.arange(page_size)).flatten().int()
    slots = slots.to(engine.like.device)
    latents = [torch.randn(length, 1, COLUMNS).to(engine.like) for length in lengths]
    pool = engine.pool((sum(pages) + 1) * page_size, page_size)
    layer = engine.layer(HEADS, COLUMNS, SCALE, 1, v_head_dim=RANK, **of_layers(engine))
    new = []
    for b, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        old = slots[b, : length - count].long()
        pool.set_kv_buffer(layer, sglang_backend.KVWriteLoc(old), latents[b][: len(old)], None)
        new.append(slots[b, length - count : length].long())
    batch = batch_of(mode, queries, lengths, torch.cat(new))
    backend = backend_of(pool, slots, page_size)
    if graph:
        backend.init_cuda_graph_state(4, 4 * queries[0])
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    q = torch.randn(sum(queries), HEADS, COLUMNS).to(engine.like)
    k = torch.cat([rows[-count:] for rows, count in zip(latents, queries, strict=True)])
    forward = backend.forward_decode if name == "DECODE" else backend.forward_extend
    out = forward(q.flatten(1), k, k[..., :RANK], layer, batch).view(-1, HEADS, RANK)
    first = 0
    for rows, count, length in zip(latents, queries, lengths, strict=True):
        part, keys = slice(first, first + count), rows.expand(-1, HEADS, -1).cpu()
        wanted, _ = attend(q[part].cpu(), keys, keys[..., :RANK], length - count)
        close(out[part], wanted)
        first += count


def check_expanded(engine: Any) -> None:
    """Assert that prompts see their own tokens, and all of the earlier ones of a chunk."""
    counts, earlier = (5, 9), (7, 0)
    torch.manual_seed(1)
    q, k = (torch.randn(sum(counts), HEADS, 192).to(engine.like) for _ in range(2))
    v = torch.randn(sum(counts), HEADS, 256).to(engine.like)[..., 128:]
    old_k, old_v = (torch.randn(sum(earlier), HEADS, width).to(engine.like) for width in (192, 128))
    device = engine.like.device
    layer = engine.layer(HEADS, 192, SCALE, HEADS, v_head_dim=128, **of_layers(engine))
    backend = backend_of(engine.pool(16, 1), torch.zeros(2, 64, dtype=torch.int32, device=device), 1)
    lengths = tuple(map(sum, zip(counts, earlier, strict=True)))
    batch = batch_of(
        engine.modes.EXTEND, counts, lengths, torch.zeros(sum(counts), dtype=torch.int64, device=device),
        prefix_chunk_idx=0,
        prefix_chunk_cu_seq_lens=torch.tensor([[0, *accumulate(earlier)]], dtype=torch.int32, device=device),
        prefix_chunk_max_seq_lens=[max(earlier)],
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    batch.attn_attend_prefix_cache = False
    alone = backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)
    batch.mha_return_lse = True
    own = backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)
    torch.testing.assert_close(alone, own[0], atol=0, rtol=0)
    batch.attn_attend_prefix_cache = True
    before = backend.forward_extend(q, old_k, old_v, layer, batch, save_kv_cache=False)
    starts = [0, *accumulate(counts)]
    for b, count in enumerate(counts):
        part = slice(starts[b], starts[b] + count)
        for (ours, lse), keys, values, offset in ((own, k[part], v[part], 0), (before, old_k, old_v, None)):
            assert lse.shape == ours.shape[:2]
            if offset is None and not earlier[b]:
                assert not ours[part].any()
                assert bool((lse[part] == -torch.inf).all())
                continue
            wanted, sums = attend(q[part].cpu(), keys.cpu(), values.cpu(), offset)
            close(ours[part], wanted)
            close(lse[part], sums, ours.dtype)


def close(ours: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert that results of tensors of a dtype, by default that of the results, are those of float64."""
    tolerance = 1e-5 if (dtype or ours.dtype) == torch.float32 else 2e-2
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def of_layers(engine: Any) -> dict[str, Any]:
    return {"layer_id": 0, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False,
            "attn_type": engine.kinds.DECODER}  # fmt: skip
