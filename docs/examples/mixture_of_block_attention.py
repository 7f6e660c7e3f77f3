"""Mixture of block attention (Lu et al. 2025), trained for a few steps: each query of each head chooses blocks of keys.

    python docs/examples/mixture_of_block_attention.py --steps 40

A query attends to the keys of its own block up to itself, and to those blocks before it whose mean key has the largest
product with the query. The choice differs from query to query and from head to head, so that lists are of keys by
token (``keys: head_blocks_of_16``); lists of blocks of queries (``blocks: 64``) would make neighbours choose together.
On a GPU the kernels are compiled on the first call; elsewhere attngen's eager reference runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngen

HEADS, HEAD_DIM = 8, 64  # with fewer KV heads, repeat k and v for each head: lists are of KV heads
WIDTH = HEADS * HEAD_DIM
BLOCK = 16  # keys; a block of 512, as in the paper, is four entries of "head_blocks_of_128" side by side

CHOSEN = attngen.variant("q_pos >= kv", keys=f"head_blocks_of_{BLOCK}", name="chosen")


def chosen_blocks(q: Tensor, k: Tensor, count: int) -> Tensor:
    """Blocks of each query and head, (batch, seqlen, heads, count), -1 for none; the query's own is one of them."""
    means = k.unflatten(1, (-1, BLOCK)).mean(2)
    products = torch.einsum("bshd,bkhd->bshk", q, means).float()
    own = torch.arange(q.shape[1], device=q.device)[:, None, None] // BLOCK
    block = torch.arange(means.shape[1], device=q.device)
    products = products.masked_fill(block > own, -math.inf).masked_fill(block == own, math.inf)
    best = products.topk(min(count, len(block)), dim=-1)
    return torch.where(best.values > -math.inf, best.indices, -1).int()


def mixture_of_blocks(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim) to ``count`` blocks of each query and head."""
    with torch.no_grad():  # gradients reach q and k through attention alone
        indices = chosen_blocks(q, k, count)
    return attngen.attention(q, k, v, variant=CHOSEN, indices=indices)


class Attention(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count  # blocks that a query attends to
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.contiguous() for t in self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2))
        return self.out(mixture_of_blocks(q, k, v, self.count).flatten(-2))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, seqlen: int, count: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(seqlen, WIDTH)
        self.attention = nn.ModuleList(Attention(count) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for attention, up, down in zip(self.attention, self.ups, self.downs, strict=True):
            x = x + attention(functional.rms_norm(x, (WIDTH,)))
            x = x + down(functional.gelu(up(functional.rms_norm(x, (WIDTH,)))))
        return self.head(functional.rms_norm(x, (WIDTH,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    layers, seqlen, batch, count = (4, 2048, 4, 16) if on_gpu else (1, 128, 1, 4)
    attngen.jit()
    files = sorted(Path(attngen.__file__).parent.rglob("*.py"))
    corpus = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    torch.manual_seed(0)
    model = Model(layers, seqlen, count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses = []
    for _ in range(given.steps):
        starts = torch.randint(len(corpus) - seqlen, (batch, 1))
        text = corpus[starts + torch.arange(seqlen + 1)].long().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        warm.step()
        losses.append(loss.item())
    print(f"{layers} layers, {seqlen} tokens; a query sees {count * BLOCK} keys at most, in {dtype}")
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    if len(losses) >= 20:
        assert losses[-1] < losses[0] - 0.5, losses


if __name__ == "__main__":
    main()
