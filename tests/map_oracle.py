"""Expected tile maps: masks pair by pair, cut into tiles, and random arguments for the variants of
tests/gpu/maps.yaml.

Every tile is empty, partial or full as the mask says, and the visible pairs of partial tiles are those of the mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attngen.lang.eager import evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.reference.eager import lengths, names_of

VARIANTS = (
    "ids", "ids_of_64_bits", "apart", "other_heads", "shifted", "nested", "windows", "images", "images_of_text",
    "unlike", "later", "not_earlier", "halves", "pairs", "pairs_and_ids", "flags", "drafts", "squares", "blocks",
    "causal_blocks", "small_blocks", "blocks_of_rows", "shifted_blocks",
)  # fmt: skip


def in_runs(values: list[float], generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Values that come in runs of random length and come back, some longer than a tile."""
    *outer, length = shape
    rows = []
    for _ in range(math.prod(outer)):
        numbers: list[float] = []
        while len(numbers) < length:
            longest = (4, 90, 700)[int(torch.randint(3, (), generator=generator))]
            run = int(torch.randint(1, longest, (), generator=generator))
            numbers += [values[int(torch.randint(len(values), (), generator=generator))]] * run
        rows.append(torch.tensor(numbers[:length], dtype=dtype))
    return torch.stack(rows).reshape(shape)


def in_blocks(generator: torch.Generator, *shape: int) -> Tensor:
    """Bools that are alike in blocks of 128 or 64 a side, or all but few in a block, or differ from one to the next."""

    def random(side: int) -> Tensor:
        *outer, rows, columns = shape
        coarse = torch.rand(*outer, -(-rows // side), -(-columns // side), generator=generator)
        return coarse.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., :rows, :columns]

    kind, inner, each = random(128), random(64), random(1)
    mixed = torch.where(inner < 0.7, inner < 0.4, each < 0.9)
    few = each < 2**-13
    return (kind < 0.2) | (kind > 0.4) & torch.where(kind < 0.6, mixed, few ^ (kind < 0.8))


def values(
    name: str, batch: int, heads: int, queries: int, keys: int, seed: int, device: str = "cpu"
) -> dict[str, Any]:
    """Return random arguments of a variant of tests/gpu/maps.yaml, which reads no tensor beyond its end."""
    given = _values(name, batch, heads, queries, keys, seed)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}


def _values(name: str, batch: int, heads: int, queries: int, keys: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    n = max(queries, keys)
    ids = [-(2**31), 2**31 - 1, -1, 0, 1, 2, 3]
    match name:
        case "ids":
            return {"id": in_runs(ids, generator, torch.int32, batch, keys)}
        case "ids_of_64_bits":
            return {"id": in_runs([-(2**63), 2**63 - 1, 2**40, 2**40 + 1, -5, 0], generator, torch.int64, n)}
        case "apart":
            return {"id": in_runs(ids, generator, torch.int32, n), "gap": -1}
        case "other_heads":
            return {"id": in_runs(ids, generator, torch.int32, heads, n)}
        case "shifted":
            return {"id": in_runs(ids, generator, torch.int32, n + 1), "shift": 200}
        case "nested":
            start = torch.randint(-300, n + 300, (16,), generator=generator, dtype=torch.int32)
            return {"id": in_runs(list(range(16)), generator, torch.int32, n), "start": start}
        case "windows":
            return {"width": in_runs([-(2**31), 2**31 - 1, 0, 1, 65, 300, 400], generator, torch.int32, n)}
        case "images" | "unlike":
            return {"image": in_runs([0, 1], generator, torch.bool, n)}
        case "images_of_text":
            return {"image": in_runs([0, 0, 0, 1, 2, 33, 65], generator, torch.int32, n)}
        case "later" | "not_earlier":
            times = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0, 3.0e38]
            kept = times if seed % 2 else times[1:]
            return {"time": in_runs(kept, generator, torch.float32, n)}
        case "flags":
            return {"flags": in_runs([-(2**31), 2**31 - 1, 0, 1, 2, 4, 5], generator, torch.int32, n)}
        case "drafts":
            prompt = n // 48 * 16 + (seed + 1) % 2
            drafts = -(-(n - prompt) // 16) * 16
            return {"seen": in_blocks(generator, drafts, drafts), "prompt": prompt}
        case "blocks" | "causal_blocks":
            return {"sel": torch.rand(heads, -(-queries // 64), -(-keys // 64), generator=generator) < 0.4}
        case "small_blocks":
            sel = torch.rand(-(-queries // 16), -(-keys // 32), generator=generator) < 0.7
            return {"sel": sel, "id": in_runs(ids, generator, torch.int32, batch, keys)}
        case "blocks_of_rows":
            return {"sel": torch.rand(queries, -(-keys // 128), generator=generator) < 0.4}
        case "shifted_blocks":
            kind = torch.randint(3, (n // 64 + 2,), generator=generator, dtype=torch.int32)
            return {"kind": kind, "sees": torch.rand(3, 3, generator=generator) < 0.5}
        case "halves":
            return {"time": in_runs([math.nan, math.inf, -1.0, 0.25, 0.5, 0.75], generator, torch.bfloat16, n)}
    if name in ("pairs", "pairs_and_ids"):
        columns = keys + 16 * (name == "pairs_and_ids")
        stride = -(-columns // 16) * 16 if seed % 2 else columns  # bools are read 16 at a time, or one by one
        allowed = in_blocks(generator, heads, queries, stride)[..., :columns]
        allowed[:, : queries // 6] = bool(seed % 2)
        if name == "pairs":
            return {"allowed": allowed}
        return {"allowed": allowed[0], "id": in_runs(ids, generator, torch.int32, batch, keys)}
    return {"n": 37 + seed, "m": 5, "w": 2}


def visible(call: Call) -> list[Tensor]:
    """Return the mask of each sequence, over heads, queries and keys."""
    masks = []
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)):
        names = names_of(call, b, slice(0, rows), rows, keys, q_offset, k_offset)
        mask = torch.as_tensor(evaluate(call.variant.mask, names, call.tensors), dtype=torch.bool)
        masks.append(mask.to(call.device).broadcast_to(call.heads, rows, keys))
    return masks


def tiled(mask: Tensor, tile_m: int, tile_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks by tile: whether each is full, whether it is partial, and its pairs; those beyond the ends are hidden."""
    rows, keys = mask.shape
    q_tiles, kv_tiles = -(-rows // tile_m), -(-keys // tile_n)
    padded = mask.new_zeros(q_tiles * tile_m, kv_tiles * tile_n)
    padded[:rows, :keys] = mask
    pairs = padded.reshape(q_tiles, tile_m, kv_tiles, tile_n).transpose(1, 2)
    behind = (torch.arange(q_tiles * tile_m, device=mask.device) >= rows).reshape(q_tiles, 1, tile_m, 1)
    full, some = (pairs | behind).all(-1).all(-1), pairs.any(-1).any(-1)
    return full & some, some & ~full, pairs


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of the last axis, one after the other."""
    places = torch.arange(32, device=words.device, dtype=torch.int32)
    return (words[..., None] >> places & 1).bool().flatten(-2)


def tiles_of(launch: Any) -> tuple[int, int]:
    """Queries and keys of a bit of the map of a launch."""
    axes = launch.tile_map
    queries, keys = (
        (axes.columns, axes.rows) if launch.grid in ("keys", "key_words", "key_map_rows") else (axes.rows, axes.columns)
    )
    return queries or launch.tile_m, keys or launch.tile_n


def check_map(words: Tensor, shape: Any, tiles: tuple[int, int], call: Call, *, by_keys: bool) -> None:
    """Compare a map, with visible pairs if it has them, with the mask."""
    words = words.flatten()
    rows = words[: shape.row_words].reshape(shape.batch, shape.heads, shape.rows, 2, shape.words)
    slots = words[shape.map_words :][: 16 * shape.row_words].reshape(shape.batch, shape.heads, shape.rows, -1)
    stored = words[shape.map_words + shape.slots :]
    if shape.order:
        check_order(words[shape.row_words : shape.map_words], bits_of(rows).sum((1, 3, 4)), by_keys=by_keys)
    width = tiles[0] if by_keys else tiles[1]
    lane_words = -(-width // 64)
    count = len(stored) // shape.tile_words if shape.tile_words else 0
    pairs = pairs_of(stored.reshape(count, tiles[by_keys] // 64, lane_words, 128), width) if count else None
    for b, masks in enumerate(visible(call)[: shape.batch]):
        for h in range(shape.heads):
            full, partial, wanted = tiled(masks[h], *tiles)
            if by_keys:
                full, partial, wanted = full.T, partial.T, wanted.permute(1, 0, 3, 2)
            for number, kind in enumerate((full, partial)):
                bits = bits_of(rows[b, h, :, number])
                assert torch.equal(bits[: kind.shape[0], : kind.shape[1]], kind), ("full", "partial")[number]
                assert bits.sum() == kind.sum()
            if pairs is None:
                continue
            slot = slots[b, h, : partial.shape[0], : partial.shape[1]]
            assert torch.equal(slot >= 0, partial)
            assert torch.equal(pairs[slot[partial].long()], wanted[partial])


def check_order(order: Tensor, tiles: Tensor, *, by_keys: bool = True) -> None:
    """Compare an order with that of rows as they are, and with those that begin with the rows of many more tiles, whose
    number follows, or 0 where none of them is to be cut: the others as they are, or by their tiles as well. By their
    tiles, all that have any may be cut."""
    orders, most = order[:-1].view(tiles.shape).tolist(), int(order[-1])
    wanted, by_length, numbers, natural = [], [], [], list(range(tiles.shape[1]))[:: 1 if by_keys else -1]
    for counts in tiles.tolist():
        long = [row for row in natural if counts[row] * len(counts) > 2 * sum(counts)]
        first = sorted(long, key=lambda row, own=counts: -own[row])  # type: ignore[misc]
        wanted.append(first + [row for row in natural if row not in first])
        by_length.append(sorted(natural, key=lambda row, own=counts: -own[row]))  # type: ignore[misc]
        numbers.append(len(first))
    assert orders in (wanted, by_length) or (orders == [natural] * len(wanted) and most == 0)
    nonempty = max(sum(count > 0 for count in counts) for counts in tiles.tolist())
    assert most in (0, max(numbers)) or (most == nonempty and orders == by_length)


def pairs_of(words: Tensor, width: int) -> Tensor:
    """Bit of each pair in the words of the consumers' lanes, by rows of the map and by its columns."""
    tiles, consumers, lane_words, _ = words.shape
    consumer, part, lane, bit = torch.meshgrid(
        *(torch.arange(n, device=words.device) for n in (consumers, lane_words, 128, 32)), indexing="ij"
    )
    row = 64 * consumer + 16 * (lane // 32) + lane % 32 // 4 + 8 * (bit % 4 // 2)
    column = 64 * part + 8 * (bit // 4) + 2 * (lane % 4) + bit % 2
    pairs = torch.zeros(tiles, 64 * consumers, 64 * lane_words, dtype=torch.bool, device=words.device)
    pairs[:, row.flatten(), column.flatten()] = bits_of(words).flatten(1)
    return pairs[..., :width]
