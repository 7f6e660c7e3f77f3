"""A small transformer with a mask and a score written for FlexAttention, ported by changing the import.

Trains it twice from the same weights and on the same batches, with torch's FlexAttention and with attngen's, and once
more with torch's and the sequences of each batch in the opposite order: on paper the same training, in other sums.
The runs differ by rounding alone. On a GPU attngen's kernels are compiled on the first call, without ``fast_math``,
since the hardware's tanh, which it takes for soft-capping, is right to 2^-11. On a CPU a smaller model runs forward
alone, since torch's FlexAttention has no backward there.
"""

from __future__ import annotations

import argparse
import time
import warnings
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as of_torch

import attngen
from attngen.integrations import flex_attention as of_attngen

HEADS, HEAD_DIM, CAP = 4, 64, 20.0
WIDTH = HEADS * HEAD_DIM


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, attend, mask) -> Tensor:
        qkv = self.qkv(functional.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v, score_mod=softcap, block_mask=mask).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(functional.rms_norm(x, x.shape[-1:]))))


class Model(nn.Module):
    def __init__(self, layers: int, seqlen: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(seqlen, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, attend, mask) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x, attend, mask)
        return self.head(functional.rms_norm(x, x.shape[-1:]))


def documents(flex: ModuleType, seqlen: int, device: str):
    """Return the mask of causal attention within documents of 100 tokens."""
    doc = torch.arange(seqlen, device=device) // 100

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx])

    return flex.create_block_mask(same_document, None, None, seqlen, seqlen, device=device)


def train(flex: ModuleType, layers: int, batches: Tensor, *, flip: bool = False) -> Tensor:
    """Return the loss of each step."""
    device, seqlen = batches.device.type, batches.shape[-1] - 1
    torch.manual_seed(0)
    model = Model(layers, seqlen).to(device)
    attend = torch.compile(flex.flex_attention) if flex is of_torch and device == "cuda" else flex.flex_attention
    mask = documents(flex, seqlen, device)
    # at ten times this rate the loss leaps at the tenth step, and roundings decide how it falls from there
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for batch in batches:
        text = (batch.flip(0) if flip else batch).long()
        on_gpu = device == "cuda"
        with torch.set_grad_enabled(on_gpu), torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = model(text[:, :-1], attend, mask)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        if on_gpu:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def run(name: str, flex: ModuleType, layers: int, batches: Tensor, *, flip: bool = False) -> Tensor:
    """Train, and say so."""
    print(f"{name} … ", end="", flush=True)
    start = time.perf_counter()
    losses = train(flex, layers, batches, flip=flip).cpu()
    print(f"loss {losses[0]:.4f} -> {losses[-10:].mean():.4f} in {time.perf_counter() - start:.1f} s")
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60 if on_gpu else 5, help="60 on a GPU, 5 on a CPU")
    given = parser.parse_args()
    layers, batch, seqlen = (4, 16, 1024) if on_gpu else (1, 2, 128)
    what = "training steps" if on_gpu else "forward passes, since torch's FlexAttention has no backward on a CPU"
    print(f"{given.steps} {what}; layers {layers}, batch {batch} x {seqlen} bytes of text")
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU
    source = "".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n\n" for n in range(4000)).encode()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    starts = torch.randint(len(text) - seqlen, (given.steps, batch), generator=torch.Generator().manual_seed(1))
    batches = text[starts[..., None] + torch.arange(seqlen + 1)].to(device)

    theirs = run("torch's FlexAttention", of_torch, layers, batches)
    flipped = run("torch's, batches flipped", of_torch, layers, batches, flip=True)
    with attngen.jit(on_gpu, fast_math=False):
        ours = run("attngen's", of_attngen, layers, batches)
    noise, apart = ((losses - theirs).abs().mean().item() for losses in (flipped, ours))
    print(f"mean difference of losses from torch's: attngen {apart:.1e}, torch with batches flipped {noise:.1e}")
    assert apart <= 2 * noise + 1e-3, (apart, noise)


if __name__ == "__main__":
    main()
