"""Native sparse attention (Yuan et al. 2025), trained for a few steps: three branches, each a call of attngen.

    python docs/examples/native_sparse_attention.py --steps 40

Each query attends to means of blocks of keys (compressed), to the keys of the blocks that it likes best (selected), and
to the last keys (window), and gates weigh the results. The means also score the blocks: those of the largest
probabilities, summed over the heads of a KV head, are listed for the selected branch, which reads no others. On a GPU
the kernels are compiled on the first call; elsewhere attngen's eager reference runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngen
from attngen.schema import preset

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 64
WIDTH = HEADS * HEAD_DIM
BLOCK, WINDOW = 16, 64  # keys of a block, and those before each query that it always sees

WINDOWED = preset("sliding_window")
COMPRESSED = attngen.variant(f"{BLOCK} * kv + {BLOCK - 1} <= q", name="compressed")  # blocks that end before the query
SELECTED = attngen.variant("q_pos >= kv", keys=f"head_blocks_of_{BLOCK}", name="selected")


def best_blocks(q: Tensor, k: Tensor, count: int) -> Tensor:
    """Blocks of each query and KV head, (batch, seqlen, KV heads, count), -1 for none; first that of the query."""
    seqlen, width = q.shape[1], q.shape[3]
    grouped = q.unflatten(2, (KV_HEADS, -1))
    logits = torch.einsum("bshgd,bkhd->bhgsk", grouped, k).float() / math.sqrt(width)
    query, block = torch.arange(seqlen, device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)
    logits = logits.masked_fill(BLOCK * block + BLOCK - 1 > query, -math.inf)
    shares = torch.softmax(logits, dim=-1).nan_to_num().sum(2)  # of the heads of a group
    shares = shares.masked_fill(block == query // BLOCK, 2.0 * HEADS)
    best = shares.topk(min(count, k.shape[1]), dim=-1)
    return torch.where(best.values > 0, best.indices, -1).int().movedim(1, 2).contiguous()


class SparseAttention(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks  # that a query selects
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.gates = nn.Linear(WIDTH, 3 * HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = (t.contiguous() for t in qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2))
        k_means, v_means = (t.unflatten(1, (-1, BLOCK)).mean(2) for t in (k, v))
        with torch.no_grad():
            indices = best_blocks(q, k_means, self.blocks)
        branches = (
            attngen.attention(q, k_means, v_means, variant=COMPRESSED),
            attngen.attention(q, k, v, variant=SELECTED, indices=indices),
            attngen.attention(q, k, v, variant=WINDOWED, window=WINDOW),
        )
        gates = torch.sigmoid(self.gates(x)).unflatten(-1, (3, HEADS, 1))
        return self.out(sum(gates[:, :, i] * branch for i, branch in enumerate(branches)).flatten(-2))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, seqlen: int, blocks: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(seqlen, WIDTH)
        self.attention = nn.ModuleList(SparseAttention(blocks) for _ in range(layers))
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
    layers, seqlen, batch, blocks = (4, 2048, 4, 16) if on_gpu else (1, 128, 1, 4)
    attngen.jit()
    files = sorted(Path(attngen.__file__).parent.rglob("*.py"))
    corpus = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    torch.manual_seed(0)
    model = Model(layers, seqlen, blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
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
    seen = seqlen // BLOCK + blocks * BLOCK + WINDOW
    print(f"{layers} layers, {seqlen} tokens; a query sees {seen} keys and means of keys at most, in {dtype}")
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    if len(losses) >= 20:
        assert losses[-1] < losses[0] - 0.5, losses


if __name__ == "__main__":
    main()
