"""Batches of latent attention as vLLM makes them, and what they mean in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import vllm_stub

HEADS, COLUMNS, RANK, BLOCK = 3, 576, 512, 16
SCALE = 192**-0.5


def attend(q: Tensor, k: Tensor, v: Tensor, offset: int | None) -> tuple[Tensor, Tensor]:
    """Attention of (tokens, heads, columns) in float64 and its log-sum-exp (tokens, heads); query i sees keys up to
    i + ``offset``, or all."""
    s = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    if offset is not None:
        s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(offset + 1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.double()), s.logsumexp(-1).T


def packed_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Latent rows (..., 576) as bytes (..., 656), and what these hold. Rows with NaN become bytes that nothing may
    read."""
    rows = rows.bfloat16()
    free = rows.isnan().any(-1)
    groups = rows[..., :RANK].float().nan_to_num().unflatten(-1, (4, 128))
    scales = (groups.abs().amax(-1) / 448).clamp(min=1e-12)
    latents = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    stored = (latents.flatten(-2), scales.float(), rows[..., RANK:].nan_to_num().contiguous())
    packed = torch.cat([part.view(torch.uint8) for part in stored], dim=-1)
    packed[free] = 0x7F  # NaN of e4m3 and huge scales
    held = torch.cat([(latents.float() * scales[..., None]).flatten(-2), rows[..., RANK:].float()], dim=-1)
    return packed, held


@dataclass
class Decode:
    """Requests with few queries over a cache of latent rows (blocks, block size, columns)."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    q: Tensor
    cache: Tensor
    table: Tensor
    bytes_of_rows: Tensor | None = None  # of a cache in 8 bits, in whose place ``cache`` has its numbers

    def common(self, make: Any) -> Any:
        """vLLM's metadata of the batch."""
        starts = torch.tensor([0, *accumulate(self.queries)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        device = self.q.device
        return make(
            query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=lengths.to(device),
            num_reqs=len(self.queries), num_actual_tokens=int(starts[-1]), max_query_len=max(self.queries),
            max_seq_len=max(self.lengths),
            block_table_tensor=self.table, slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            seq_lens_cpu_upper_bound=lengths,
        )  # fmt: skip

    def packed(self) -> Decode:
        """The batch in bf16, over a cache of 656 bytes a token; ``cache`` keeps what that holds."""
        packed, held = packed_rows(self.cache)
        return replace(self, q=self.q.bfloat16(), cache=held, bytes_of_rows=packed)

    def on_gpu(self) -> Decode:
        """The batch in bf16 on the GPU."""
        packed = None if self.bytes_of_rows is None else self.bytes_of_rows.cuda()
        cache = self.cache.cuda() if packed is not None else self.cache.bfloat16().cuda()
        return replace(self, q=self.q.bfloat16().cuda(), cache=cache, table=self.table.cuda(), bytes_of_rows=packed)

    def check(
        self, impl: Any, metadata: Any, *, in_two_parts: bool = False, lse: bool = False, tolerance: float = 1e-5
    ) -> None:
        """Assert that a layer gives what the batch means."""
        q = self.q.split([RANK, COLUMNS - RANK], dim=-1) if in_two_parts else self.q
        cache = self.cache if self.bytes_of_rows is None else self.bytes_of_rows
        out, sums = impl.forward_mqa(q, cache, metadata, None)
        assert (sums is not None) == lse
        first = 0
        for b, (count, length) in enumerate(zip(self.queries, self.lengths, strict=True)):
            rows = self.cache[self.table[b].long()].flatten(0, 1)[:length, None].expand(-1, HEADS, -1).cpu()
            part = slice(first, first + count)
            wanted, wanted_sums = attend(self.q[part].cpu(), rows, rows[..., :RANK], length - count)
            torch.testing.assert_close(out[part].double().cpu(), wanted, atol=tolerance, rtol=tolerance)
            if lse:
                torch.testing.assert_close(sums[part].double().cpu(), wanted_sums, atol=tolerance, rtol=tolerance)
            first += count


def decode(queries: tuple[int, ...], lengths: tuple[int, ...]) -> Decode:
    """A batch of random rows; blocks that no request has hold NaN."""
    pages = [-(-length // BLOCK) for length in lengths]
    cache = torch.full((sum(pages) + 2, BLOCK, COLUMNS), torch.nan)
    table = torch.zeros(len(lengths), max(pages) + 3, dtype=torch.int32)
    free = (torch.randperm(sum(pages)) + 1).tolist()
    for b, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        own = [free.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(own, dtype=torch.int32)
        rows = torch.full((count * BLOCK, COLUMNS), torch.nan)
        rows[:length] = torch.randn(length, COLUMNS)
        cache[own] = rows.view(count, BLOCK, COLUMNS)
    return Decode(queries, lengths, torch.randn(sum(queries), HEADS, COLUMNS), cache, table)


def check_on_gpu(made: Decode, kv_cache_dtype: str) -> None:
    """Assert that layers with a stub in vLLM's place give what the batch means, on the GPU: the second repeats the
    launches of the first, and one returns log-sum-exps."""
    made = made.on_gpu()
    with imported_with(vllm_stub, "attngen.integrations.vllm.backend", "attngen.integrations.vllm.mla") as mla:
        builder = mla.AttngenMLAMetadataBuilder(None, ["layer"], vllm_stub.Config(), made.q.device)
        metadata = builder.build(0, made.common(vllm_stub.CommonAttentionMetadata))
        for lse in (False, False, True):
            impl = mla.AttngenMLAImpl(
                HEADS, COLUMNS, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None, kv_lora_rank=RANK
            )
            impl.need_to_return_lse_for_decode = lse
            made.check(impl, metadata, in_two_parts=True, lse=lse, tolerance=2e-2)
        assert [one is not None for one in metadata.decode.shared.repeats.values()] == [True]


def check_prompts(prefill: Any, like: Tensor | None = None) -> None:
    """Assert that prompts see their own tokens, and all of the earlier ones that vLLM passes; tensors have the device
    and the dtype of ``like``, by default those of the CPU, in float32."""
    counts, earlier = (5, 9), (7, 0)
    like = torch.empty(0) if like is None else like
    device, tolerance = like.device, 1e-5 if like.dtype == torch.float32 else 2e-2
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    prefill.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=max(counts)))
    q, k = (torch.randn(sum(counts), HEADS, 192).to(like) for _ in range(2))
    v = torch.randn(sum(counts), HEADS, 256).to(like)[..., 128:]
    alone = prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=False)
    out, lse = prefill.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
    torch.testing.assert_close(alone, out, atol=0, rtol=0)
    chunk = SimpleNamespace(
        query_start_loc=starts, cu_seq_lens=torch.tensor([0, *accumulate(earlier)], dtype=torch.int32, device=device),
        max_query_len=max(counts), max_seq_len=max(earlier),
    )  # fmt: skip
    old_k, old_v = (torch.randn(sum(earlier), HEADS, width).to(like) for width in (192, 128))
    before, before_lse = prefill.run_prefill_context_chunk(chunk, q, old_k, old_v)
    for b, count in enumerate(counts):
        part = slice(int(starts[b]), int(starts[b]) + count)
        for ours, sums, keys, values, offset in (
            (out, lse, k[part], v[part], 0), (before, before_lse, old_k, old_v, None)
        ):  # fmt: skip
            if offset is None and not earlier[b]:
                assert not ours[part].any()
                assert bool((sums[:, part] == -torch.inf).all())
                continue
            wanted, wanted_sums = attend(q[part].cpu(), keys.cpu(), values.cpu(), offset)
            torch.testing.assert_close(ours[part].cpu().double(), wanted, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(sums[:, part].T.cpu().double(), wanted_sums, atol=tolerance, rtol=tolerance)
