"""Calls that append to caches, of all kinds, and their comparison with plain torch."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append.arguments import Append, check
from tests.runtime.pages import starts_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLACES = ["pages", "slots", "long slots", "dense", "index"]
BATCH, PAGES, PAGE_SIZE, POSITIONS = 4, 13, 8, 64
LENGTHS = [0, 7, 8, 21]


def angles(half: int, dtype: torch.dtype, positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    turns = torch.randn(positions, half)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def both(given: dict[str, Any], written: tuple[str, ...] = ("k_cache", "v_cache", "q_out")) -> None:
    """Assert that a call gives with the kernel what it gives in torch, and changes nothing else."""
    names = Append._fields
    ours = {name: given.get(name) for name in names}
    ours["page_layout"] = given.get("page_layout", "NHD")
    ours["rotary_interleaved"] = given.get("rotary_interleaved", False)
    storages = {name: t.untyped_storage().clone() for name, t in ours.items() if isinstance(t, Tensor)}
    theirs = {}
    for name, t in ours.items():
        theirs[name] = t
        if isinstance(t, Tensor):
            theirs[name] = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                storages[name].clone(), t.storage_offset(), t.shape, t.stride()
            )  # fmt: skip
    if given.get("q_out") is given.get("q"):
        theirs["q_out"] = theirs["q"]
    call = Append(**theirs)
    wanted = append_torch.append(call, check(call))
    rotated = attngen.append_kv(**{name: value for name, value in ours.items() if value is not None})
    assert (rotated is None) == (wanted is None)
    if rotated is not None:
        assert wanted is not None
        assert rotated.dtype == wanted.dtype
        assert torch.equal(bits(rotated), bits(wanted))
    for name, t in ours.items():
        if isinstance(t, Tensor):
            changed = bytes_of(t.untyped_storage())
            kept = theirs[name].untyped_storage() if name in written or t is ours["q_out"] else storages[name]
            assert torch.equal(changed, bytes_of(kept)), name


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its tensors on the GPU, each with the memory around it."""
    moved: dict[int, Tensor] = {}
    for t in given.values():
        if isinstance(t, Tensor) and id(t) not in moved:
            storage = bytes_of(t.untyped_storage()).cuda().untyped_storage()
            empty = torch.empty(0, dtype=t.dtype, device="cuda")
            moved[id(t)] = empty.set_(storage, t.storage_offset(), t.shape, t.stride())
    return {name: moved[id(t)] if isinstance(t, Tensor) else t for name, t in given.items()}


def a_call(
    chance: random.Random, where: str, dtype: torch.dtype, *, dims: tuple[int, int] = (64, 32), packed: bool = False,
    page_layout: str = "NHD", half: int = 0, table_dtype: torch.dtype = torch.float32, heads: int = 3,
    kv_heads: int = 2, queries: bool = True, offsets: bool = False, lost: bool = True, scales: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return a call with rows of caches beyond its tokens poisoned, and, if some may be ``lost``, tokens without a
    place. ``scales``: what has a scale of a cache in 8 bits, ``tensor``, ``head``, ``page`` or ``row``; empty: the
    cache has the dtype of the tokens."""
    news = [chance.randrange(4) for _ in range(BATCH)] if packed else [3] * BATCH
    tokens = sum(news)
    spare = 2 if packed else 0  # rows of no sequence
    shape = (tokens + spare,) if packed else (BATCH, 3)
    given: dict[str, Any] = {
        "k": some((*shape, kv_heads, dims[0]), dtype), "v": some((*shape, kv_heads, dims[1]), dtype),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32), "page_layout": page_layout,
    }  # fmt: skip
    rows = 40 if where in ("dense", "index") else PAGE_SIZE
    for name, width in zip(("k_cache", "v_cache"), dims, strict=True):
        cached = torch.float8_e4m3fn if scales else dtype
        cache = torch.full((PAGES, rows, kv_heads, width), torch.nan, dtype=cached)
        given[name] = cache if page_layout == "NHD" else cache.transpose(1, 2).contiguous()
    for name in ("k_descale", "v_descale") if scales else ():
        of = {
            "tensor": (), "head": (BATCH, kv_heads), "page": (PAGES, kv_heads), "row": given["k_cache"].shape[:3]
        }[scales]  # fmt: skip
        given[name] = torch.exp2(torch.randn(of) * 4 - 6)  # some numbers saturate, and some are subnormal
    if packed:
        given["cu_seqlens"] = starts_of(news)
    if where == "pages":
        order = chance.sample(range(PAGES), PAGES)
        given["page_table"] = torch.tensor(order[:12], dtype=torch.int32).view(BATCH, 3)
        if lost:
            given["page_table"][2, 1] = chance.choice([-1, PAGES, 2**31 - 1, -(2**31)])
            given["cache_seqlens"][3] = 3 * PAGE_SIZE - 1
    elif where.endswith("slots"):
        slots = torch.tensor(chance.sample(range(PAGES * PAGE_SIZE), tokens + spare))
        if lost and len(slots) > 1:
            slots[0], slots[1] = -1, chance.choice([PAGES * PAGE_SIZE, 2**31 - 1])
        given["slots"] = (slots if where.startswith("long") else slots.int()).view(shape)
    elif where == "index":
        given["batch_index"] = torch.tensor([4, 0, PAGES if lost else 5, 2], dtype=torch.int32)
    elif lost:
        given["cache_seqlens"][1:3] = torch.tensor([-2, 39], dtype=torch.int32)
    if half:
        given["rotary_cos"], given["rotary_sin"] = angles(half, table_dtype)
        if queries:
            given["q"] = some((*shape, heads, dims[0]), dtype)
        if offsets:
            given["rotary_offsets"] = torch.tensor([5, 63, 80, -4], dtype=torch.int32)
    return given


UNSUITED: dict[str, Any] = {
    "k begins between": lambda given: {"k": some((BATCH * 3 * 2 * 64 + 1,), torch.bfloat16)[1:].view(BATCH, 3, 2, 64)},
    "rows of caches are 8 bytes apart": lambda given: {
        name: torch.zeros(PAGES, PAGE_SIZE, 2, given[name].shape[-1] + 4).bfloat16()[..., :-4]
        for name in ("k_cache", "v_cache")
    },
    "columns are apart": lambda given: {"v": some((BATCH, 3, 32, 2), torch.bfloat16).transpose(2, 3)},
    "a table of float64": lambda given: {n: given[n].double() for n in ("rotary_cos", "rotary_sin")},
    "tables differ": lambda given: {"rotary_cos": given["rotary_cos"].half()},
    "columns of tables are apart": lambda given: {"rotary_cos": given["rotary_cos"].t().contiguous().t()},
    "columns of the page table are apart": lambda given: {"page_table": given["page_table"].t().contiguous().t()},
}
