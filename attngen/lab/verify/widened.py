"""Kernels that widen caches, compared with plain torch: the same bits, and rows beyond the used ones untouched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import Trial, try_cases
from attngen.runtime.arguments.checked import PAGE_LAYOUTS, TORCH_DTYPES
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.shared.records import addresses_of
from attngen.runtime.operations.widen.kernel import CacheForm, Widen, prepare

_BATCH, _KV_HEADS, _PAGE_SIZE = 3, 2, 16

#: Value of unused rows before the launch.
_BEFORE = -7.0


@dataclass(frozen=True, slots=True)
class _WidenCase:
    """A kind of call: the order of a page, or None for a dense cache; what has a scale; room for so many keys."""

    page_layout: str | None
    scales: str  # tensor | head | page | row
    used: bool  # lengths are given
    room: int

    @property
    def name(self) -> str:
        words = [f"pages {self.page_layout}" if self.page_layout else "dense", f"a scale for each {self.scales}"]
        return " ".join([*words, *(["used lengths"] if self.used else []), f"{self.room} keys"])


def _cases(*, small: bool) -> Iterator[_WidenCase]:
    room = 48 if small else 1504
    for layout, scales, used in product((None, *PAGE_LAYOUTS), ("tensor", "head", "page", "row"), (True, False)):
        if layout is not None or scales not in ("page", "row"):
            yield _WidenCase(layout, scales, used or layout is not None, room)


def try_widen(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on caches of all kinds; ``small``: with few keys each."""
    deviation = partial(_deviation, kernel, device=torch.device(device))
    return try_cases([(case.name, partial(deviation, case)) for case in dict.fromkeys(_cases(small=small))], seed)


def _deviation(kernel: Kernel, case: _WidenCase, device: torch.device, seed: int) -> Deviation:
    generator = torch.Generator().manual_seed(seed)
    dims = kernel.head_dim_qk, kernel.head_dim_v
    room, pages = case.room, _BATCH * case.room // _PAGE_SIZE
    caches, scales, table = [], [], None
    for head_dim in dims:
        shape = (_BATCH, room, _KV_HEADS, head_dim)
        if case.page_layout is not None:
            middle = (_PAGE_SIZE, _KV_HEADS) if case.page_layout == "NHD" else (_KV_HEADS, _PAGE_SIZE)
            shape = (pages, *middle, head_dim)
        bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
        caches.append(bits.to(device).view(torch.float8_e4m3fn))
        extents = {
            "tensor": (), "head": (_BATCH, _KV_HEADS), "page": (pages, _KV_HEADS), "row": (pages, _KV_HEADS, _PAGE_SIZE)
        }[case.scales]  # fmt: skip
        scale = torch.rand(extents, generator=generator, dtype=torch.float32, device="cpu") + 0.1
        scales.append(scale.to(device).expand((_BATCH, _KV_HEADS) if case.scales == "tensor" else extents))
    if case.page_layout is not None:
        table = torch.randperm(pages, generator=generator, device="cpu").int().view(_BATCH, -1).to(device)
    lengths = torch.randint(0, room + 1, (_BATCH,), generator=generator, device="cpu").int()
    lengths[0] = room
    cache = Widen(caches[0], caches[1], scales[0], scales[1], lengths.to(device) if case.used else None, table)
    form = CacheForm(room, case.page_layout, case.scales in ("page", "row"))
    dtype = TORCH_DTYPES[kernel.dtype]
    out = [torch.full((_BATCH, room, _KV_HEADS, head_dim), _BEFORE, dtype=dtype, device=device) for head_dim in dims]
    launch = prepare(kernel, cache, form, drivers.current(), device.index or 0)
    launch(addresses_of(cache._replace(k=out[0], v=out[1])))
    wrong, largest, elements = [], 0.0, 0
    for name, actual, given, scale in zip("kv", out, caches, scales, strict=True):
        expected = torch.full_like(actual, _BEFORE)
        for b in range(_BATCH):
            count = int(lengths[b]) if case.used else room
            expected[b, :count] = _rows(given, scale, table, case, b)[:count].to(dtype)
        elements += actual.numel()
        alike = (actual == expected) | (actual.isnan() & expected.isnan())
        if not bool(alike.all()):
            wrong.append(f"{name}: {int((~alike).sum())} of {actual.numel()} numbers are others than plain torch's")
    return Deviation(largest, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, elements, 0, tuple(wrong))


def _rows(cache: Tensor, scale: Tensor, table: Tensor | None, case: _WidenCase, b: int) -> Tensor:
    """Return the keys or values (room, kv_heads, head_dim) of a sequence in float32, times their scales."""
    rows = cache.float()
    if table is None:
        return rows[b] * scale[b, :, None]
    if case.page_layout == "HND":
        rows = rows.transpose(1, 2)
    listed = table[b].long()
    if case.scales == "row":
        return (rows[listed] * scale[listed].transpose(1, 2)[..., None]).flatten(0, 1)
    each = scale[listed][:, None, :, None] if case.scales == "page" else scale[b, :, None]
    return (rows[listed] * each).flatten(0, 1)
