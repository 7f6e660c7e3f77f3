"""Kernels that append to caches, compared with plain torch: the same bits written, and nothing else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES, LATENT_ROWS
from attngen.errors import LoadError
from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import Trial, try_cases
from attngen.runtime.arguments.checked import PAGE_LAYOUTS, TORCH_DTYPES
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append.arguments import FIELDS, Append, check
from attngen.runtime.operations.append.kernel import PreparedAppend, prepare_on
from attngen.runtime.operations.shared.records import addresses_of

_PLACES = ("pages", "slots", "dense")
_PAGE_SIZE, _PAGES, _ROWS = 16, 64, 80
_KV_HEADS, _HEADS, _POSITIONS = 2, 6, 512


@dataclass(frozen=True, slots=True)
class _AppendCase:
    """A kind of call. ``share`` is the part of each row that is rotated, 0 for no rotation."""

    place: str
    page_layout: str
    packed: bool
    share: float
    interleaved: bool
    long: bool  # many tokens, and 64-bit slots

    @property
    def name(self) -> str:
        words = [self.place, self.page_layout, *(["packed"] if self.packed else []), *(["long"] if self.long else [])]
        words += [f"rotated {self.share:g}"] if self.share else []
        return " ".join(words + (["interleaved"] if self.interleaved else []))


def _cases(*, small: bool) -> Iterator[_AppendCase]:
    rotations = ((0.0, False), (1.0, False), (1.0, True), (0.25, False), (0.3, True))
    for place, layout, packed, (share, interleaved) in product(_PLACES, PAGE_LAYOUTS, (False, True), rotations):
        yield _AppendCase(place, layout, packed, share, interleaved, long=not small and share == 1.0)


def try_append(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on calls of all kinds; ``small``: with few tokens each."""
    deviation = partial(_deviation, kernel, device=torch.device(device))
    return try_cases([(case.name, partial(deviation, case)) for case in _cases(small=small)], seed)


def _deviation(kernel: Kernel, case: _AppendCase, device: torch.device, seed: int) -> Deviation:
    call = _call(kernel, case, device, seed)
    copy = call.k_cache.clone()
    one = call.v_cache is call.k_cache
    plain = call._replace(k_cache=copy, v_cache=copy if one else call.v_cache.clone(), q_out=_like(call.q))
    sizes = check(call)
    prepared = prepare_on(kernel, call, sizes, drivers.current())
    if not isinstance(prepared, PreparedAppend):
        raise LoadError(f"it does not take the call: {prepared}")
    prepared.run(call, addresses_of(FIELDS.tensors_of(call)))
    append_torch.append(plain, sizes)
    wrong, errors, elements = [], [0.0], 0
    for name in ("k_cache", "v_cache", "q_out"):
        actual, expected = getattr(call, name), getattr(plain, name)
        if actual is None:
            continue
        elements += actual.numel()
        both = ~(actual.isnan() & expected.isnan())
        apart = (actual.float() - expected.float())[both].abs()
        errors.append(float(apart.max()) if bool(both.any()) else 0.0)
        if not torch.equal(_bits(actual), _bits(expected)):
            wrong.append(f"{name} has other bits than plain torch's")
    largest = math.inf if any(map(math.isnan, errors)) else max(errors)
    return Deviation(largest, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, elements, 0, tuple(wrong))


def _call(kernel: Kernel, case: _AppendCase, device: torch.device, seed: int) -> Append:
    """Return random tokens for caches of NaN. Some tokens have no place: they must not be written anywhere."""
    generator = torch.Generator().manual_seed(seed)
    dtype, chunk = TORCH_DTYPES[kernel.dtype], CHUNK_BYTES // kernel.main.dtype_of("q").bytes

    def whole(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32, device="cpu").to(device)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype).to(device)

    batch, new = (24, 17) if case.long else (5, 3)
    news = whole(2 * new, batch) if case.packed else torch.full((batch,), new, device=device, dtype=torch.int64)
    tokens = int(news.sum()) + (4 if case.packed else 0)  # rows of no sequence
    shape = (tokens,) if case.packed else (batch, new)
    cached_name = kernel.dtype_of("k").name
    packed = LATENT_ROWS.get(cached_name)
    kv_heads = _KV_HEADS if packed is None else 1
    widths = [-(-width // chunk) * chunk for width in (kernel.head_dim_qk, kernel.head_dim_v)]
    if packed is not None:
        widths = [packed.rotary, packed.latents]
    entries, rows = (batch, _ROWS) if case.place == "dense" else (_PAGES * (1 + 3 * case.long), _PAGE_SIZE)
    axes = (rows, kv_heads) if case.page_layout == "NHD" else (kv_heads, rows)
    if packed is not None:
        cached = dtype
        caches = [torch.full((entries, *axes, packed.bytes), 0x7F, dtype=torch.uint8, device=device)] * 2
    else:
        cached = TORCH_DTYPES[cached_name]
        caches = [torch.full((entries, *axes, width), math.nan, dtype=cached, device=device) for width in widths]
    lengths = whole(_ROWS - 2 * new, batch)
    table = slots = starts = cos = sin = q = None
    if case.packed:
        starts = torch.cat([news.new_zeros(1), news.cumsum(0)]).int()
    if case.place == "pages":
        order = torch.randperm(entries, generator=generator, device="cpu").int().to(device)
        table = order[: batch * (_ROWS // _PAGE_SIZE)].view(batch, -1)
        table[1] = entries  # not a page of the cache
    elif case.place == "slots":
        slots = torch.randperm(entries * rows, generator=generator, device="cpu")[:tokens].to(device)
        slots[:2] = torch.tensor([-1, entries * rows], device=device)
        slots = (slots if case.long else slots.int()).view(shape)
    else:
        lengths[1] = rows
    if case.share:
        half = max(int(case.share * widths[0]) // 2, 1)
        angles = torch.randn(_POSITIONS, half, generator=generator, dtype=torch.float32, device="cpu").to(device)
        cos, sin = angles.cos(), angles.sin()
        q = real(*shape, _HEADS, widths[0])
    k, v = (real(*shape, kv_heads, width) for width in widths)
    offsets = whole(_POSITIONS, batch) if case.share == 1.0 else None
    scales: list[Tensor] = []
    if cached != dtype:  # of pages, of heads, or one for all
        of = {"pages": (entries, _KV_HEADS, 1), "slots": (), "dense": (batch, _KV_HEADS)}[case.place]
        scales = [torch.exp2(real(*of).float() - 6) for _ in caches]
    return Append(
        k, v, caches[0], caches[1], lengths, table, slots, None, starts, case.page_layout, q, _like(q), cos, sin,
        case.interleaved, offsets, *scales,
    )  # fmt: skip


def _like(q: Tensor | None) -> Tensor | None:
    return None if q is None else torch.full_like(q, math.nan)


def _bits(t: Tensor) -> Tensor:
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()])
