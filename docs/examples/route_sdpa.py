"""Code that calls torch's scaled_dot_product_attention, on attngen's kernels where they fit."""

import torch
from torch.nn.functional import pad

import attngen

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, nhead=4, dropout=0.0, batch_first=True, device=device)
layer = layer.to(torch.bfloat16).train()  # in training mode the layer calls scaled_dot_product_attention
x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
padding = pad(torch.zeros(2, 100, device=device, dtype=torch.bool), (0, 28), value=True)

with torch.no_grad():
    wanted = layer(x, src_key_padding_mask=padding)
    # on the CPU there are no kernels: its calls fall back, unless the reference is asked for
    with attngen.integrations.sdpa(backend=None if device == "cuda" else "reference", explain=True) as routed:
        found = layer(x, src_key_padding_mask=padding)
        layer.self_attn.dropout = 0.1  # which a variant with dropout serves, by torch's random numbers
        dropped = []
        for _ in range(2):
            torch.manual_seed(1)
            dropped.append(layer(x, src_key_padding_mask=padding))
        torch.nn.functional.scaled_dot_product_attention(x, x[:1], x[:1])  # broadcasts: torch serves it

print(routed.report())
assert torch.allclose(found[:, :100], wanted[:, :100], atol=5e-2)
assert torch.equal(*dropped)
assert not torch.equal(dropped[0], found)
