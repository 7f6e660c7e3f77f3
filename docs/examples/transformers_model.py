"""A model of Hugging Face's transformers on attngen's kernels; random weights, so that nothing is downloaded."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import attngen.integrations.transformers as attngen_transformers

attngen_transformers.register()

device = "cuda" if torch.cuda.is_available() else "cpu"
config = Gemma2Config(
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,  # a local layer and a global one
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    query_pre_attn_scalar=64,
    sliding_window=32,
    attn_logit_softcapping=50.0,
    attn_implementation="attngen",
)
torch.manual_seed(0)
model = Gemma2ForCausalLM(config).to(device, torch.bfloat16).eval()

# two prompts of different lengths, padded on the left
ids = torch.randint(3, 500, (2, 48), device=device)
real = torch.ones_like(ids)
real[1, :20] = 0

with torch.no_grad():
    found = model(input_ids=ids, attention_mask=real).logits
    model.set_attn_implementation("eager")
    wanted = model(input_ids=ids, attention_mask=real).logits
error = (found - wanted)[real.bool()].abs().max().item()
assert error <= 0.05 * wanted.abs().max().item(), error

model.set_attn_implementation("attngen")
tokens = model.generate(input_ids=ids, attention_mask=real, max_new_tokens=8, do_sample=False)
print("tokens", tuple(tokens.shape))
