"""flash-attn's functions on attngen's kernels: the import is all that changes."""

import torch

from attngen.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

device = "cuda" if torch.cuda.is_available() else "cpu"  # tensors on the CPU run the eager reference
q = torch.randn(2, 256, 8, 64, device=device, dtype=torch.bfloat16)  # batch, queries, heads, head_dim
k = torch.randn(2, 256, 2, 64, device=device, dtype=torch.bfloat16)  # batch, keys, KV heads, head_dim
v = torch.randn_like(k)

# any combination of causal, window_size, softcap and alibi_slopes
slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)], device=device)
out = flash_attn_func(q, k, v, causal=True)
out = flash_attn_func(q, k, v, window_size=(64, 16), softcap=30.0, alibi_slopes=slopes)
out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(127, 0), return_attn_probs=True)
print("out", tuple(out.shape), "lse", tuple(lse.shape))

# training with dropout: the numbers are those of torch's generator
torch.manual_seed(0)
dropped = flash_attn_func(q, k, v, dropout_p=0.1, causal=True)
torch.manual_seed(0)
assert torch.equal(dropped, flash_attn_func(q, k, v, dropout_p=0.1, causal=True))

# sequences of 100, 0 and 156 tokens, packed without padding
starts = torch.tensor([0, 100, 100, 256], device=device, dtype=torch.int32)
packed = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 156, 156, causal=True)

# the first sequence is as it is alone
alone = flash_attn_func(q[:1, :100], k[:1, :100], v[:1, :100], causal=True)
assert torch.allclose(packed[:100], alone[0], atol=2e-2)

# a step of decoding: the new key goes after those that the cache holds
k_cache, v_cache = (torch.zeros(2, 512, 2, 64, device=device, dtype=torch.bfloat16) for _ in "kv")
k_cache[:, :256], v_cache[:, :256] = k, v
held = torch.tensor([256, 40], device=device, dtype=torch.int32)
step = flash_attn_with_kvcache(q[:, :1], k_cache, v_cache, k[:, :1], v[:, :1], cache_seqlens=held, causal=True)
print("step", tuple(step.shape))
