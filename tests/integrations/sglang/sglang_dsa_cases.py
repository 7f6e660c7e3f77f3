"""Steps of sparse latent attention as SGLang makes them: with the stub, and inside of its release."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.integrations.engines.index_batches import PAGE, IndexBatch, index_batch
from tests.integrations.engines.sparse_batches import RANK, WIDE, SparseBatch, sparse_batch
from tests.integrations.vllm.vllm_mla_cases import attend

#: Imported beside the stub, or SGLang; as an attribute of its package, another may be found.
sglang_dsa = import_module("attngen.integrations.sglang.dsa")

SCALE = 192**-0.5

#: Queries and lengths of the requests of a step, by the name of its mode; drafts are of three tokens.
STEPS = {
    "DECODE": ((1, 1, 1), (40, 33, 2)),
    "EXTEND": ((5, 1, 9), (40, 33, 9)),
    "TARGET_VERIFY": ((3, 3), (40, 21)),
}


def settings(**changed: Any) -> dict[str, Any]:
    """Functions that say what SGLang's context does: of an execution, its parallelism and its drafts."""
    drafts, dcp = changed.pop("eagle_topk", 1), changed.pop("dcp", 1)
    execution = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=changed.pop("deterministic", False)),
        features=SimpleNamespace(enable_memory_saver=False), overlap=SimpleNamespace(enable_two_batch_overlap=False),
        kernel=SimpleNamespace(
            dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3", dsa_triton_union=0,
            dsa_topk_backend="sgl-kernel",
        ),
    )  # fmt: skip
    assert not changed
    parallel = SimpleNamespace(
        attn_dcp_size=dcp, attn_dcp_rank=0, attn_cp_size=1, attn_tp_size=1, dcp_enabled=False
    )  # fmt: skip
    spec = SimpleNamespace(
        speculative_eagle_topk=drafts, speculative_num_draft_tokens=3, speculative_algorithm=None,
        speculative_dsa_topk_backend=None,
    )  # fmt: skip
    return {"get_exec": lambda: execution, "get_parallel": lambda: parallel, "get_spec": lambda: spec}


def runner(pool: Any, slots: Tensor, **changed: Any) -> Any:
    """A model runner with such a pool and such slots of requests."""
    config = {
        "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 24, "index_n_heads": 4, "index_head_dim": 128,
        "index_kpool": changed.pop("index_kpool", 1),
    }  # fmt: skip
    model = SimpleNamespace(
        hf_config=SimpleNamespace(**config), hf_text_config=SimpleNamespace(**config), context_len=128,
        num_attention_heads=3, qk_nope_head_dim=128, kv_lora_rank=changed.pop("kv_lora_rank", RANK),
        qk_rope_head_dim=changed.pop("qk_rope_head_dim", WIDE - RANK),
    )  # fmt: skip
    return SimpleNamespace(**{
        "device": "cpu", "page_size": 64, "token_to_kv_pool": pool, "model_config": model, "is_draft_worker": False,
        "hisparse_coordinator": None, "kv_cache_dtype": pool.dtype, "max_running_requests": 8,
        "req_to_token_pool": SimpleNamespace(req_to_token=slots, size=8), **changed,
    })  # fmt: skip


def step(mode: Any, made: SparseBatch | IndexBatch) -> Any:
    """A step of SGLang over a batch. Lengths leave out drafts, which ``TARGET_VERIFY`` adds."""
    added = made.queries[0] if mode.is_target_verify() else 0
    known = (torch.tensor(made.lengths) - added).to(made.q.device)
    earlier = [length - count for count, length in zip(made.queries, made.lengths, strict=True)]
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(made.queries), seq_lens=known, seq_lens_cpu=known.cpu(),
        seq_lens_sum=int(known.sum()), req_pool_indices=torch.arange(len(made.queries)),
        extend_seq_lens=torch.tensor(made.queries, dtype=torch.int32), extend_seq_lens_cpu=list(made.queries),
        extend_prefix_lens=torch.tensor(earlier, dtype=torch.int32), extend_prefix_lens_cpu=earlier,
        extend_num_tokens=sum(made.queries), out_cache_loc=None, global_num_tokens_cpu=None, spec_info=None,
        attn_cp_metadata=None, get_max_chunk_capacity=lambda: 1 << 17, using_mha_one_shot_fp8_dequant=False,
    )  # fmt: skip


def slots_of_requests(made: SparseBatch) -> Tensor:
    """Slots of the tokens of each request, as SGLang's pool of requests lists them."""
    rows = made.cache.shape[1]
    place = torch.arange(rows, device=made.table.device)
    return (made.table.long()[:, :, None] * rows + place).flatten(1).int()


def batch(name: str, *, packed: bool = False, heads: int = 3) -> SparseBatch:
    """The batch of a step in bf16; lists are filled from the front, as SGLang's are."""
    made = sparse_batch(*STEPS[name], heads=heads, holes=False)
    return made.packed() if packed else replace(made, q=made.q.bfloat16(), cache=made.cache.bfloat16())


def index_step(name: str) -> IndexBatch:
    """The batch of an indexer's step, longer than its selections."""
    queries, lengths = STEPS[name]
    return index_batch(queries, tuple(length + 60 * (length > 9) for length in lengths), extra_tokens=2)


def index_slots(made: IndexBatch) -> Tensor:
    """Slots of the tokens of each request, as SGLang's pool of requests lists them; 0 where there is no token."""
    pages = made.table.where(made.table < len(made.pages), 0)
    return (pages[:, :, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten(1).int()


def indexer(kind: type, **changed: Any) -> Any:
    """An indexer of a layer."""
    made = kind.__new__(kind)
    fields = {"n_heads": 4, "head_dim": 128, "index_topk": 24, "num_init_tokens": 0, "num_local_tokens": 0, **changed}
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def selected(backend: Any, one: Any, mode: Any, made: IndexBatch, *, into: Tensor | None = None) -> Tensor:
    """Selection of an indexer in a step whose metadata are built, called as SGLang does."""
    batch = step(mode, made)
    metadata = backend.get_indexer_metadata(0, batch)
    given = batch, 0, made.q, made.weights[..., None], metadata
    if mode.is_decode_or_idle() or mode.is_target_verify():
        return one._get_topk_paged(*given)
    return one._get_topk_ragged(False, *given, *([] if into is None else [into]))


def layer(heads: int = 3) -> Any:
    """A layer of the absorbed form."""
    return SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=1, tp_v_head_num=1, head_dim=WIDE, v_head_dim=RANK, scaling=SCALE,
        layer_id=0, logit_cap=0.0, is_cross_attention=False,
    )  # fmt: skip


def check(backend: Any, mode: Any, made: SparseBatch, *, sinks: Tensor | None = None) -> None:
    """Assert that a step whose metadata are built gives what it means."""
    queries = made.q[..., :RANK], made.q[..., RANK:]
    forward = backend.forward_decode if mode.is_decode_or_idle() else backend.forward_extend
    more = {} if sinks is None else {"attn_sink": sinks}
    tokens, heads = made.q.shape[:2]
    out = forward(
        queries[0].flatten(1), None, None, layer(heads), step(mode, made), q_rope=queries[1].flatten(1),
        topk_indices=made.slots(), **more,
    )  # fmt: skip
    wanted, sums = made.expected(SCALE)
    if sinks is not None:
        wanted = wanted * torch.sigmoid(sums - sinks.double())[..., None]
    torch.testing.assert_close(out.view(tokens, heads, RANK).cpu().double(), wanted, atol=0.02, rtol=0.02)


def check_short_prompts(backend: Any, mode: Any) -> None:
    """Assert that prompts of the form with keys of each head see their own keys and all earlier ones."""
    counts, lengths, heads = (5, 9), (12, 9), 3
    torch.manual_seed(0)
    q = torch.randn(sum(counts), heads, 192)
    k, v = torch.randn(sum(lengths), heads, 192), torch.randn(sum(lengths), heads, 256)[..., 128:]
    backend.use_mha = True
    starts = [torch.tensor([0, *accumulate(numbers)], dtype=torch.int32) for numbers in (counts, lengths)]
    backend.forward_metadata = SimpleNamespace(
        cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seq_len_q=max(counts), max_seq_len_k=max(lengths)
    )
    form = SimpleNamespace(
        **{**vars(layer()), "head_dim": 192, "v_head_dim": 128, "tp_k_head_num": 3, "tp_v_head_num": 3}
    )
    out = backend.forward_extend(q, k, v, form, SimpleNamespace(forward_mode=mode), save_kv_cache=False)
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        own, keys = slice(starts[0][b], starts[0][b + 1]), slice(starts[1][b], starts[1][b + 1])
        wanted, _ = attend(q[own], k[keys], v[keys], length - count)
        torch.testing.assert_close(out.view(-1, heads, 128)[own].double(), wanted, atol=1e-5, rtol=1e-5)
