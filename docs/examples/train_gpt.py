"""A small GPT, trained with attngen's kernels, with torch's SDPA, and with eager attention in float32.

    python docs/examples/train_gpt.py --json train_gpt.json --plot train_gpt.png
    python docs/examples/train_gpt.py --tiny --steps 3

It learns to predict the next byte of attngen's own sources. Every second layer sees a window of the keys, the others
all keys before; several query heads share a KV head. All runs begin with the same weights and see the same batches.
What rounding alone does is told by a fourth run, SDPA again with the sequences of each batch in the opposite order: on
paper the same training, in other sums. On a GPU the kernels are built first; elsewhere attngen's eager reference runs.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngen
from attngen.schema import preset
from attngen.tools.build.pipeline import build

SPEC = """
schema: 1
package: train_gpt
arch: [{arch}]
kernels:
  - {{variant: [causal, sliding_window], head_dim: 64, dtype: bf16, passes: [forward, backward]}}
"""
CAUSAL, SLIDING_WINDOW = preset("causal"), preset("sliding_window")

#: From q, k and v, (batch, seqlen, heads, head_dim), and the window, None for all keys before, to the output.
Attend = Callable[[Tensor, Tensor, Tensor, "int | None"], Tensor]


@dataclass(frozen=True)
class Sizes:
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 16
    seqlen: int = 1024
    window: int = 256

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


TINY = Sizes(layers=2, heads=2, kv_heads=1, batch=2, seqlen=64, window=16)

# --- attention, three times ---------------------------------------------------------------------------------


def with_attngen(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    if window is None:
        return attngen.attention(q, k, v, variant=CAUSAL)
    return attngen.attention(q, k, v, variant=SLIDING_WINDOW, window=window)


def with_sdpa(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    q, k, v = heads_first(q, k, v)
    shown = {"is_causal": True} if window is None else {"attn_mask": visible(q.shape[2], window, q.device)}
    return functional.scaled_dot_product_attention(q, k, v, **shown).transpose(1, 2)


def eager(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    q, k, v = heads_first(q, k, v)
    logits = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    logits = logits.masked_fill(~visible(q.shape[2], window, q.device), -math.inf)
    return (torch.softmax(logits, dim=-1) @ v).transpose(1, 2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return (batch, heads, seqlen, head_dim) with a KV head for each query head."""
    group = q.shape[2] // k.shape[2]
    return [t.transpose(1, 2) for t in (q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))]


@cache
def visible(seqlen: int, window: int | None, device: torch.device) -> Tensor:
    position = torch.arange(seqlen, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < (window or seqlen))


# --- the model ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, sizes: Sizes, window: int | None) -> None:
        super().__init__()
        self.sizes, self.window = sizes, window
        self.qkv = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        sizes = self.sizes
        qkv = self.qkv(normed(x)).unflatten(-1, (-1, sizes.head_dim))
        q, k, v = qkv.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=2)
        x = x + self.out(attend(q, k, v, self.window).flatten(-2))
        return x + self.down(functional.gelu(self.up(normed(x))))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, sizes.width)
        self.places = nn.Embedding(sizes.seqlen, sizes.width)
        windows = [None if number % 2 == 0 else sizes.window for number in range(sizes.layers)]
        self.blocks = nn.ModuleList(Block(sizes, window) for window in windows)
        self.head = nn.Linear(sizes.width, 256, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, attend: Attend) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x, attend)
        return self.head(normed(x))


def normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


# --- training -----------------------------------------------------------------------------------------------


def corpus() -> Tensor:
    """Return the sources of attngen, one after the other, as bytes."""
    files = sorted(Path(attngen.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(sizes: Sizes, steps: int, device: str) -> Tensor:
    """Return (steps, batch, seqlen + 1) bytes from random places; the same in each run."""
    text, generator = corpus(), torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - sizes.seqlen, (steps, sizes.batch), generator=generator)
    return text[starts[..., None] + torch.arange(sizes.seqlen + 1)].to(device)


def train(attend: Attend, sizes: Sizes, given: Tensor, dtype: torch.dtype, *, flip: bool = False) -> dict[str, object]:
    """Train from the same weights on given batches; return the loss of each step and the seconds that a step took."""
    device = given.device.type
    torch.manual_seed(0)
    model = Gpt(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    warm = max(len(given) // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    context = nullcontext if dtype == torch.float32 else partial(torch.autocast, device, dtype)
    losses, began = [], time.perf_counter()
    for step, batch in enumerate(given):
        if step == 1:  # what the first one compiles and loads does not count
            began = finished(device)
        text = batch.flip(0).long() if flip else batch.long()
        with context():
            logits = model(text[:, :-1], attend)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    seconds = (finished(device) - began) / max(len(given) - 1, 1)
    return {"losses": torch.stack(losses).tolist(), "milliseconds_per_step": 1e3 * seconds}


def finished(device: str) -> float:
    """Wait for the device, and return the time."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build_kernels() -> None:
    """Build the kernels for the GPU that is here; calls find them in the cache."""
    from attngen.arch import arch_of

    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    assert arch is not None, f"no kernels can be built for sm{major}{minor}"
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "train_gpt.yaml"
        spec.write_text(SPEC.format(arch=arch.name))
        failures = build(spec).failures
    assert not failures, failures


#: Attention, dtype, and whether the sequences of a batch stand in the opposite order.
RUNS: dict[str, tuple[Attend, torch.dtype, bool]] = {
    "float32, eager": (eager, torch.float32, False),
    "bf16, SDPA": (with_sdpa, torch.bfloat16, False),
    "bf16, SDPA, flipped": (with_sdpa, torch.bfloat16, True),
    "bf16, attngen": (with_attngen, torch.bfloat16, False),
}


def differences(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Distances of losses: the largest and the mean of all steps."""
    pairs = {
        "attngen and SDPA": ("bf16, attngen", "bf16, SDPA"),
        "SDPA flipped and SDPA": ("bf16, SDPA, flipped", "bf16, SDPA"),
        "attngen and float32": ("bf16, attngen", "float32, eager"),
        "SDPA and float32": ("bf16, SDPA", "float32, eager"),
    }
    apart = {name: [abs(a - b) for a, b in zip(losses[x], losses[y], strict=True)] for name, (x, y) in pairs.items()}
    return {name: {"largest": max(found), "mean": sum(found) / len(found)} for name, found in apart.items()}


def draw(losses: dict[str, list[float]], title: str, path: Path) -> None:
    """Draw the losses, and how far each run is from SDPA's."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from attngen.tools.bench.plot import STYLE

    with rc_context(dict(STYLE)):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        curves, apart = figure.subplots(1, 2)
        for number, (name, found) in enumerate(losses.items()):
            ours = name == "bf16, attngen"
            style = {"color": f"C{number}", "linewidth": 1.0, "linestyle": "--" if ours else "-", "label": name}
            curves.plot(found, **style)
            if name != "bf16, SDPA":
                distance = [abs(a - b) for a, b in zip(found, losses["bf16, SDPA"], strict=True)]
                apart.plot(distance, **{**style, "linestyle": "-"})
        curves.set_title(title)
        curves.set_ylabel("loss, nats per byte")
        apart.set_title("distance from SDPA in bf16")
        apart.set_yscale("log")
        for axis in (curves, apart):
            axis.set_xlabel("step")
            axis.legend(fontsize="x-small")
        figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in seconds")
    parser.add_argument("--json", type=Path, help="write losses and differences to this file")
    parser.add_argument("--plot", type=Path, help="draw the losses; needs matplotlib")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if given.tiny else Sizes()
    if device == "cuda":
        build_kernels()
    text = batches(sizes, given.steps, device)

    runs = {}
    for name, (attend, dtype, flip) in RUNS.items():
        runs[name] = train(attend, sizes, text, dtype, flip=flip)
        last = runs[name]["losses"][-10:]
        step = f"{runs[name]['milliseconds_per_step']:.1f} ms a step"
        print(f"{name:20s} loss {runs[name]['losses'][0]:.4f} -> {sum(last) / len(last):.4f}, {step}")
    losses = {name: run["losses"] for name, run in runs.items()}
    apart = differences(losses)
    for name, found in apart.items():
        print(f"{name:24s} at most {found['largest']:.1e}, {found['mean']:.1e} in the mean")
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if given.json is not None:
        facts = {
            "device": where,
            "torch": torch.__version__,
            "sizes": asdict(sizes),
            "runs": runs,
            "differences": apart,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    if given.plot is not None:
        draw(losses, f"{sizes.layers} layers, width {sizes.width}, {where}", given.plot)

    assert all(math.isfinite(loss) for found in losses.values() for loss in found)
    # rounding makes runs part; ours must not part from SDPA further than SDPA does from itself
    noise = max(apart["SDPA flipped and SDPA"]["mean"], apart["SDPA and float32"]["mean"])
    assert apart["attngen and SDPA"]["mean"] <= 2 * noise + 1e-3, apart
    print("the curves coincide within the rounding of bf16")


if __name__ == "__main__":
    main()
