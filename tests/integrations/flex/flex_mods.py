"""Mask and score functions as people write them for FlexAttention, from their descriptions; all at one small size.

Each maker returns (mask_mod, score_mod), either of them None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, LENGTH = 2, 4, 49
Mod = Callable[..., Any]
Pair = tuple[Mod | None, Mod | None]
MODS: dict[str, Callable[[str], Pair]] = {}


def mod(maker: Callable[[str], Any]) -> Callable[[str], Any]:
    """Register a maker; it takes the device."""
    MODS[maker.__name__] = maker
    return maker


def numbers(*shape: int, device: str, seed: int = 0, scale: float = 1.0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(device).requires_grad_(grad)


def documents(device: str, *lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(device)


def causal_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


# --- masks by position --------------------------------------------------------------------------------------


@mod
def causal(device: str) -> Pair:
    return causal_mask, None


@mod
def strictly_before(device: str) -> Pair:
    return lambda b, h, q, kv: (q > kv) | ((q == 0) & (kv == 0)), None


@mod
def noop(device: str) -> Pair:
    from attngen.integrations.flex.attention import noop_mask

    return noop_mask, None


@mod
def sliding_window(device: str) -> Pair:
    window = 9
    return lambda b, h, q, kv: (q - kv <= window) & (q >= kv), None


@mod
def two_sided_window(device: str) -> Pair:
    return lambda b, h, q, kv: (q - kv).abs() <= 6, None


@mod
def prefix_lm(device: str) -> Pair:
    return lambda b, h, q, kv: (kv < 11) | (q >= kv), None


@mod
def prefix_by_sequence(device: str) -> Pair:
    prefix = torch.tensor([5, 20], device=device, dtype=torch.int32)
    return lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv), None


@mod
def dilated(device: str) -> Pair:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0), None


@mod
def dilated_by_head(device: str) -> Pair:
    steps = torch.tensor([1, 2, 3, 5], device=device)
    return lambda b, h, q, kv: (q >= kv) & ((q - kv) % steps[h] == 0), None


@mod
def chunked_local(device: str) -> Pair:
    return lambda b, h, q, kv: (q // 8 == kv // 8) & (q >= kv), None


@mod
def blockwise_causal(device: str) -> Pair:
    return lambda b, h, q, kv: q // 7 >= kv // 7, None


@mod
def strided(device: str) -> Pair:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < 6) | (kv % 6 == 5)), None


@mod
def longformer(device: str) -> Pair:
    return lambda b, h, q, kv: ((q - kv).abs() <= 4) | (kv < 3) | (q < 3), None


@mod
def attention_sinks(device: str) -> Pair:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < 10) | (kv < 4)), None


@mod
def local_and_global_heads(device: str) -> Pair:
    return lambda b, h, q, kv: (q >= kv) & ((h % 2 == 0) | (q - kv < 7)), None


@mod
def window_by_head(device: str) -> Pair:
    windows = torch.tensor([3, 7, 12, 40], device=device, dtype=torch.int32)
    return lambda b, h, q, kv: (q >= kv) & (q - kv < windows[h]), None


@mod
def neighbourhood_1d(device: str) -> Pair:
    kernel = 7

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        centre = q.clamp(kernel // 2, LENGTH - 1 - kernel // 2)
        return (centre - kv).abs() <= kernel // 2

    return mask, None


@mod
def neighbourhood_2d(device: str) -> Pair:
    width = 7

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row, column = q // width, q % width
        return ((row - kv // width).abs() <= 1) & ((column - kv % width).abs() <= 2)

    return mask, None


@mod
def neighbourhood_3d(device: str) -> Pair:
    def place(i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return i // 16, i // 4 % 4, i % 4

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        apart = [(x - y).abs() for x, y in zip(place(q), place(kv), strict=True)]
        return (apart[0] <= 1) & (apart[1] <= 1) & (apart[2] <= 1)

    return mask, None


@mod
def tiled_2d(device: str) -> Pair:
    def tile(i: Tensor) -> Tensor:
        return i // 14 * 4 + i % 7 // 2

    return lambda b, h, q, kv: tile(q) == tile(kv), None


@mod
def axial_rows(device: str) -> Pair:
    return lambda b, h, q, kv: torch.where(h < 2, q // 7 == kv // 7, q % 7 == kv % 7), None


@mod
def checkerboard(device: str) -> Pair:
    return lambda b, h, q, kv: ((q ^ kv) & 1) == 0, None


@mod
def bits_of_distance(device: str) -> Pair:
    """Powers of two before the query, and itself."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = q - kv
        return (distance >= 0) & ((distance & (distance - 1)) == 0)

    return mask, None


@mod
def xor_of_masks(device: str) -> Pair:
    return lambda b, h, q, kv: torch.logical_xor(q % 3 == 0, kv % 3 == 0) | (q == kv), None


@mod
def not_the_future(device: str) -> Pair:
    return lambda b, h, q, kv: ~(kv > q), None


@mod
def shifts(device: str) -> Pair:
    return lambda b, h, q, kv: (q >> 2) >= (kv >> 2), None


@mod
def truncated_division(device: str) -> Pair:
    return lambda b, h, q, kv: torch.div(q - kv, 5, rounding_mode="trunc") == 0, None


@mod
def floor_of_negative(device: str) -> Pair:
    return lambda b, h, q, kv: ((kv - q) // 6 <= -1) | (q == kv), None


@mod
def fmod_of_negative(device: str) -> Pair:
    return lambda b, h, q, kv: torch.fmod(kv - q, 4) == -1, None


@mod
def remainder_of_negative(device: str) -> Pair:
    return lambda b, h, q, kv: torch.remainder(kv - q, 4) == 1, None


# --- masks by tensors ---------------------------------------------------------------------------------------


@mod
def document(device: str) -> Pair:
    doc = documents(device, 20, 11, 18)
    return lambda b, h, q, kv: doc[q] == doc[kv], None


@mod
def causal_document(device: str) -> Pair:
    from attngen.integrations.flex.attention import and_masks

    doc = documents(device, 9, 21, 19)
    return and_masks(causal_mask, lambda b, h, q, kv: doc[q] == doc[kv]), None


@mod
def document_by_sequence(device: str) -> Pair:
    doc = torch.stack([documents(device, 20, 29), documents(device, 5, 30, 14)])
    return lambda b, h, q, kv: (doc[b, q] == doc[b, kv]) & (q >= kv), None


@mod
def unordered_groups(device: str) -> Pair:
    group = torch.tensor([(7 * i) % 5 for i in range(LENGTH)], device=device)
    return lambda b, h, q, kv: group[q] == group[kv], None


@mod
def jagged_offsets(device: str) -> Pair:
    """A mask of one sequence, moved to each document of a packed one."""
    doc = documents(device, 16, 33)
    starts = torch.tensor([0, 16], device=device, dtype=torch.int32)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inner_q, inner_kv = q - starts[doc[q]], kv - starts[doc[kv]]
        return (doc[q] == doc[kv]) & (inner_q >= inner_kv) & (inner_q - inner_kv < 8)

    return mask, None


@mod
def padding(device: str) -> Pair:
    lengths = torch.tensor([31, 49], device=device)
    return lambda b, h, q, kv: kv < lengths[b], None


@mod
def left_padding(device: str) -> Pair:
    first = torch.tensor([0, 12], device=device, dtype=torch.int32)
    return lambda b, h, q, kv: (kv >= first[b]) & (q >= kv), None


@mod
def mask_tensor(device: str) -> Pair:
    allowed = numbers(LENGTH, LENGTH, device=device) > -0.5
    return lambda b, h, q, kv: allowed[q, kv], None


@mod
def mask_tensor_by_head(device: str) -> Pair:
    allowed = numbers(BATCH, HEADS, LENGTH, LENGTH, device=device) > 0
    return lambda b, h, q, kv: allowed[b, h, q, kv], None


@mod
def block_sparse_table(device: str) -> Pair:
    table = numbers(7, 7, device=device, seed=3) > -0.8
    return lambda b, h, q, kv: table[q // 7, kv // 7] & (q >= kv), None


@mod
def random_blocks(device: str) -> Pair:
    """BigBird: a window, some global keys, and random blocks."""
    table = numbers(7, 7, device=device, seed=4) > 0.9
    return lambda b, h, q, kv: ((q - kv).abs() < 5) | (kv < 2) | table[q // 7, kv // 7], None


@mod
def tree(device: str) -> Pair:
    """Speculated tokens see the prompt and their ancestors."""
    parent = [-1, 0, 0, 1, 1, 2]
    seen = torch.eye(6, dtype=torch.bool)
    for i, p in enumerate(parent):
        while p >= 0:
            seen[i, p], p = True, parent[p]
    seen, prompt = seen.to(device), LENGTH - 6

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inner = seen[(q - prompt).clamp(min=0), (kv - prompt).clamp(min=0)]
        return torch.where(kv < prompt, q >= kv, (q >= prompt) & inner)

    return mask, None


@mod
def graph_distance(device: str) -> Pair:
    distance = (numbers(LENGTH, LENGTH, device=device).abs() * 3).int()
    return lambda b, h, q, kv: distance[q, kv] <= 2, None


@mod
def modalities(device: str) -> Pair:
    """Text is causal, each image sees itself whole."""
    image = torch.tensor([0] * 10 + [1] * 12 + [0] * 9 + [2] * 10 + [0] * 8, device=device)
    return lambda b, h, q, kv: (q >= kv) | ((image[q] > 0) & (image[q] == image[kv])), None


@mod
def importance(device: str) -> Pair:
    weight = numbers(LENGTH, device=device)
    return lambda b, h, q, kv: (q >= kv) & ((weight[kv] > 0.3) | (q - kv < 4)), None


@mod
def spans(device: str) -> Pair:
    first = (torch.arange(LENGTH) - 5).clamp(min=0).to(device)
    last = (torch.arange(LENGTH) + 3).to(device)
    return lambda b, h, q, kv: (kv >= first[q]) & (kv <= last[q]), None


@mod
def negative_index(device: str) -> Pair:
    keep = numbers(LENGTH, device=device, seed=8) > -1
    return lambda b, h, q, kv: keep[kv - LENGTH] & (q >= kv), None


@mod
def number_of_a_tensor(device: str) -> Pair:
    window = torch.tensor(8, device=device)
    return lambda b, h, q, kv: (q >= kv) & (q - kv < window), None


# --- scores -------------------------------------------------------------------------------------------------


@mod
def alibi(device: str) -> Pair:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv - q)

    return causal_mask, score


@mod
def alibi_slopes(device: str) -> Pair:
    slopes = numbers(HEADS, device=device).abs()
    return causal_mask, lambda s, b, h, q, kv: s - slopes[h] * (q - kv)


@mod
def alibi_both_sides(device: str) -> Pair:
    slopes = numbers(HEADS, device=device).abs().requires_grad_()
    return None, lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs()


@mod
def softcap(device: str) -> Pair:
    return causal_mask, lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)


@mod
def relative_bias(device: str) -> Pair:
    table = numbers(HEADS, 2 * LENGTH - 1, device=device, grad=True)
    return None, lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH - 1]


@mod
def clipped_relative_bias(device: str) -> Pair:
    table = numbers(HEADS, 17, device=device, grad=True)
    return None, lambda s, b, h, q, kv: s + table[h, torch.clamp(q - kv, -8, 8) + 8]


@mod
def bias_of_pairs(device: str) -> Pair:
    bias = numbers(LENGTH, LENGTH, device=device, grad=True)
    return None, lambda s, b, h, q, kv: s + bias[q, kv]


@mod
def bias_of_keys(device: str) -> Pair:
    bias = numbers(BATCH, LENGTH, device=device)
    return None, lambda s, b, h, q, kv: s + bias[b, kv]


@mod
def scaled_by_head(device: str) -> Pair:
    gain = numbers(HEADS, device=device, grad=True)
    return causal_mask, lambda s, b, h, q, kv: s * (1.0 + 0.3 * gain[h])


@mod
def temperature_by_length(device: str) -> Pair:
    """Scaled by the logarithm of the position."""
    return causal_mask, lambda s, b, h, q, kv: s * torch.log(q + 2.0)


@mod
def bucketed_bias(device: str) -> Pair:
    table = numbers(8, HEADS, device=device)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[torch.clamp((q - kv).abs() // 4, max=7), h]

    return None, score


@mod
def distance_decay(device: str) -> Pair:
    return causal_mask, lambda s, b, h, q, kv: s - 0.1 * torch.sqrt((q - kv).abs() + 1.0)


@mod
def sandwich(device: str) -> Pair:
    """Position bias by a sum of cosines."""

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        apart = (q - kv) * 1.0
        return s + 0.2 * (torch.cos(apart) + torch.cos(apart / 10.0))

    return causal_mask, score


@mod
def hidden_by_minus_infinity(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf"))


@mod
def hidden_by_tensor(device: str) -> Pair:
    hide = torch.tensor(-float("inf"), device=device)
    return None, lambda s, b, h, q, kv: torch.where((q - kv).abs() < 6, s, hide)


@mod
def penalty_across_documents(device: str) -> Pair:
    doc = documents(device, 17, 32)
    return None, lambda s, b, h, q, kv: torch.where(doc[q] == doc[kv], s, s - 2.0)


@mod
def row_by_row(device: str) -> Pair:
    table = numbers(HEADS, LENGTH, device=device)
    return None, lambda s, b, h, q, kv: s + table[h][kv]


@mod
def learned_number(device: str) -> Pair:
    gain = numbers(2, device=device, grad=True)
    return None, lambda s, b, h, q, kv: s * torch.sigmoid(gain[1])


@mod
def gated(device: str) -> Pair:
    gate = numbers(LENGTH, device=device)
    return None, lambda s, b, h, q, kv: s * torch.sigmoid(gate[kv])


@mod
def even_keys_doubled(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: torch.where(kv % 2 == 0, s * 2.0, s)


@mod
def cubed(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: 0.1 * s**3 + s


@mod
def bounded(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: s.clamp(-1.0, 1.5)


@mod
def relative_position_buckets(device: str) -> Pair:
    """T5's: exact up to 8, then logarithmic up to 64."""
    table = numbers(16, HEADS, device=device, grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = -torch.min(kv - q, torch.zeros_like(q))
        far = 8 + (torch.log(distance.float() / 8) / math.log(64 / 8) * 8).to(torch.long)
        bucket = torch.where(distance < 8, distance, torch.min(far, torch.full_like(far, 15)))
        return s + table[bucket, h]

    return causal_mask, score


@mod
def gelu(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: torch.nn.functional.gelu(2.0 * s)


@mod
def softplus(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: torch.nn.functional.softplus(s) - torch.expm1(-s.abs())


@mod
def power_by_key(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: (s.abs() + 0.5) ** (0.02 * kv) + 0.1 * (0.2 * s - 2.0) ** (kv % 3).float()


@mod
def rounded_distance(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: s - 0.1 * torch.round((q - kv).abs() / 4) + torch.sign(q - kv) * 0.2


@mod
def rotated(device: str) -> Pair:
    return None, lambda s, b, h, q, kv: torch.atan2(s, 1.0 + 0.1 * kv) + torch.atan(s)


@mod
def buckets_of_logarithms(device: str) -> Pair:
    return lambda b, h, q, kv: (q >= kv) & (torch.log2((q - kv).float() + 1.25).int() % 2 == 0), None


@mod
def temperature_by_head(device: str) -> Pair:
    temperature = torch.tensor([0.5, 0.8, 1.25, 2.0], device=device)
    return None, lambda s, b, h, q, kv: s / temperature[h]


@mod
def partial_arguments(device: str) -> Pair:
    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, size: int) -> Tensor:
        return (q >= kv) & (q - kv < size)

    return partial(window, size=13), None


@mod
def default_arguments(device: str) -> Pair:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, cap: float = 3.0) -> Tensor:
        return cap * torch.tanh(s / cap)

    return None, score


class _Decay:
    """A method over tensors of its own."""

    def __init__(self, device: str) -> None:
        self.rate = numbers(HEADS, device=device).abs()

    def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s - self.rate[h] * (q - kv).abs() / math.sqrt(LENGTH)


@mod
def method(device: str) -> Pair:
    return causal_mask, _Decay(device).score


@mod
def nested_closures(device: str) -> Pair:
    def limited(mask: Mod, reach: int) -> Mod:
        return lambda b, h, q, kv: mask(b, h, q, kv) & (q - kv <= reach)

    doc = documents(device, 25, 24)
    return limited(limited(lambda b, h, q, kv: doc[q] == doc[kv], 12), 9), None


@mod
def sizes_on_the_device(device: str) -> Pair:
    """A chunk and a window as tensors of one number, as programs keep them that must not recompile."""
    chunk, window = (torch.tensor(size, device=device) for size in (16, 9))
    return lambda b, h, q, kv: (q // chunk == kv // chunk) | ((q - kv).abs() % (2 * chunk) < window), None


@mod
def rows_by_number(device: str) -> Pair:
    chosen = torch.randint(0, 7, (3, 7), generator=torch.Generator().manual_seed(4)).int().to(device)
    return lambda b, h, q, kv: (chosen[0, q // 7] == kv // 7) | (chosen[-1, q // 7] == kv // 7) | (q == kv), None


@mod
def quotients(device: str) -> Pair:
    return causal_mask, lambda s, b, h, q, kv: 3.0 * s / (3.0 + s.abs()) - torch.sqrt(1.0 + (q - kv).abs() / 7)
