"""A server's loop: transformers' continuous batching on a Llama of 8B's shape, with attngen's kernels and without.

Weights are random, so that nothing is downloaded. It needs the kernels of specs/serving.yaml, or of
specs/integrations/flash_attn_kvcache.yaml, and prints the tokens that each implementation generates in a second.
"""

import argparse
import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import attngen.integrations.transformers as attngen_transformers

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--heads", type=int, default=32, help="of 128 numbers; a fourth of them for keys and values")
parser.add_argument("--requests", type=int, default=64)
parser.add_argument("--prompt", type=int, default=1024, help="most tokens of a prompt; the least are a fourth")
parser.add_argument("--new-tokens", type=int, default=128)
parser.add_argument("--implementations", default="attngen,sdpa,eager")
parser.add_argument("--tiny", action="store_true", help="a model for the CPU")
options = parser.parse_args()

attngen_transformers.register()
device = "cuda" if torch.cuda.is_available() else "cpu"
head_dim = 16 if options.tiny else 128
hidden = options.heads * head_dim
config = LlamaConfig(
    vocab_size=128 if options.tiny else 128256,
    hidden_size=hidden,
    intermediate_size=7 * hidden // 2,
    num_hidden_layers=options.layers,
    num_attention_heads=options.heads,
    num_key_value_heads=options.heads // 4,
    head_dim=head_dim,
    max_position_embeddings=131072,
)
torch.manual_seed(0)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model = model.to(torch.bfloat16).to_empty(device=device).eval()
with torch.device(device):
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)

lengths = torch.randint(options.prompt // 4, options.prompt + 1, (options.requests,)).tolist()
prompts = [torch.randint(3, config.vocab_size, (length,)).tolist() for length in lengths]
longest = options.prompt + options.new_tokens
page_size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # before transformers 5.18
for name in options.implementations.split(","):
    if name == "attngen":
        attngen_transformers.use_pages(model)
    else:
        model.set_attn_implementation(name)
    seconds = []
    for new_tokens in (2, options.new_tokens):  # the first time everything is compiled and loaded
        begin = time.perf_counter()
        results = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                **{page_size: 64},
                use_cuda_graph=False,
                num_blocks=options.requests * (longest // 64 + 2),
                max_batch_tokens=min(4096, 4 * longest),
            ),
            progress_bar=False,
        )
        seconds.append(time.perf_counter() - begin)
    tokens = sum(len(result.generated_tokens) for result in results.values())
    print(f"{name}: {tokens / seconds[-1]:.0f} tokens/s, {tokens} tokens in {seconds[-1]:.1f} s")
