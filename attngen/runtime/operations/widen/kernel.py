"""Many queries in 16 bits over a cache in 8: whether to widen the cache first, and how that runs.

The kernels that read caches in 8 bits multiply by single warps, which suits few queries. With many, the products take
longer than it takes to write K and V once in 16 bits, and an ordinary kernel is done sooner. It reads what it would
read of a cache in 16 bits: keys and values times their scales, each rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES, HEAD_DIMS, LATENT_ROWS, PAGE_BLOCK, QUANTIZED_DTYPES
from attngen.operations import WIDEN, WIDEN_VARIANT
from attngen.runtime.arguments.checked import TORCH_DTYPES, Call, Results, contiguous_view
from attngen.runtime.arguments.given import Given
from attngen.runtime.device.counters import in_graph
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.prediction import pairs_of_tiles, predict
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, Key, LaunchOperands, Resized
from attngen.runtime.operations.shared.path import first_that_takes, kernels_of
from attngen.runtime.operations.shared.records import addresses_of
from attngen.runtime.registry.order import card_of, rounded, splits_keys
from attngen.runtime.registry.select import Request, Selection, reason_against, select

if TYPE_CHECKING:
    from attngen.runtime.launch.prepared import Repeats

#: Numbers of 8 bits that a thread reads at once.
_NUMBERS = CHUNK_BYTES // 2

#: Keys of a page that is written: whole pages of the cache, together about as many. Not measured.
_PAGE_KEYS = 256

#: Significant digits of a number of pages that is written.
_PAGE_DIGITS = 2

#: Bytes of K and V in 16 bits beyond which the cache stays as it is. A call has a tensor of all keys for which its page
#: table has room. Not measured: a bound of memory.
_MOST_BYTES = 2**32

#: Floating-point operations of visited tiles that a kernel over a cache in 8 bits does in a nanosecond, and an ordinary
#: one whose times are not known; bytes that are read and written while a cache is widened; nanoseconds of
#: the launches that this takes. One H200 (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
_SPLIT_FLOPS, _ORDINARY_FLOPS, _BYTES, _LAUNCHES = 210e3, 500e3, 3.4e3, 5000.0


@dataclass(frozen=True, slots=True)
class WidenRoute:
    """A call whose cache is widened: by which kernel, what is called then, and which kernel takes that."""

    kernel: Kernel
    call: Call
    selection: Selection


def mixes_widths(call: Call) -> bool:
    """Whether k and v are a cache in 8 bits beside a wider q."""
    return call.kv_dtype not in (call.dtype, *LATENT_ROWS) and call.dtype not in QUANTIZED_DTYPES


def route_of(request: Request, kernels: Sequence[Kernel], driver: Driver) -> WidenRoute | None:
    """Route of a forward pass over a cache in 8 bits that should be done sooner with its cache widened; None for all
    others, also where a call says how blocks share the keys."""
    call = request.call
    if not mixes_widths(call) or request.direction != "forward":
        return None
    if call.num_splits or call.split_size or _bytes(call, 2) > _MOST_BYTES or call.layout == "varlen":
        return None
    asked = _asked(request)
    selection = select(kernels, asked, driver)
    if (
        selection.kernel is None
        or not _takes_many(selection.kernel, asked.call)
        or not _sooner(selection.kernel, asked.call, request, driver)
    ):
        return None
    kernel = _kernel_for(call, request.device, driver)
    return None if kernel is None else WidenRoute(kernel, asked.call, selection)


def _takes_many(kernel: Kernel, call: Call) -> bool:
    """Whether a kernel is for a call of many rows: an ordinary one, or, beyond head dim 256, the one for any number of
    them, where the call has more than those of which ``RaggedCalls`` leave the cache as it is."""
    wide = max(kernel.head_dim_qk, kernel.head_dim_v) > HEAD_DIMS[-1]
    return not kernel.split_kv or (wide and not splits_keys(call))


def keeps_few_rows(request: Request, kernels: Sequence[Kernel], driver: Driver) -> bool:
    """Whether calls like this one, but with so few rows that their blocks share the keys, leave the cache as it is."""
    asked = _asked(request)
    takers = [kernel for kernel in kernels if reason_against(kernel, asked, driver) is None]
    return not takers or any(kernel.split_kv for kernel in takers)


def _asked(request: Request) -> Request:
    """The request of the call whose cache is widened."""
    return replace(request, call=_widened(request.call), addresses={**request.addresses, "k": 0, "v": 0})


def _bytes(call: Call, size: int) -> int:
    """Bytes of K and V of all keys that a call has room for, with ``size`` for each number."""
    return size * call.batch * call.seqlen_k * call.kv_heads * (call.head_dim_qk + call.head_dim_v)


def _sooner(kernel: Kernel, wide: Call, request: Request, driver: Driver) -> bool:
    """Whether a kernel is done with the widened call before one that reads the cache would be."""
    pairs = pairs_of_tiles(kernel, wide)
    if pairs is None:
        return False
    flops = 2.0 * pairs * (wide.head_dim_qk + wide.head_dim_v)
    prediction = predict(kernel, wide, card_of(driver, request.device))
    ordinary = flops / _ORDINARY_FLOPS if prediction is None else prediction.nanoseconds
    return _LAUNCHES + _bytes(wide, 3) / _BYTES + ordinary < flops / _SPLIT_FLOPS


def _pages(call: Call) -> tuple[int, int]:
    """Number of pages written for a sequence, and keys of each; one page of all keys for a dense call."""
    if call.page_table is None:
        return 1, call.seqlen_k
    most = call.page_table.shape[1]
    fitting = range(1, max(_PAGE_KEYS // max(call.page_size, 1), 1) + 1)
    together = max(n for n in fitting if most % n == 0)
    return most // together, together * call.page_size


def _widened(call: Call) -> Call:
    """The call with K and V in the dtype of q, as they are written: dense, or pages one after the other."""
    count, keys = _pages(call)
    order = "NHD" if call.layout == "paged" else "bshd"
    shape = call.batch * count, keys, call.kv_heads
    wide = replace(
        call, kv_dtype=call.dtype, descales={}, scale_blocks=(0,),
        k=contiguous_view((*shape, call.head_dim_qk), order), v=contiguous_view((*shape, call.head_dim_v), order),
    )  # fmt: skip
    if call.layout == "paged":
        wide.page_size, wide.num_pages = keys, call.batch * count
    return wide


def _kernel_for(call: Call, device: int, driver: Driver) -> Kernel | None:
    """The first kernel that widens a cache to the dtype of q on a device."""
    kernels = (one for one in kernels_of(WIDEN, WIDEN_VARIANT, call.dtype) if one.dtype_of("k").name == call.kv_dtype)
    kernel = first_that_takes(kernels, device, driver, lambda one: one, "there is none")
    return None if isinstance(kernel, str) else kernel


class Widen(NamedTuple):
    """The tensors of a launch, in the order of their addresses: K and V in 8 bits, of dense sequences or in pages that
    a table names, their scales, and K and V in 16 bits, (batch, room, kv_heads, head_dim)."""

    k_cache: Tensor
    v_cache: Tensor
    k_descale: Tensor
    v_descale: Tensor
    seqused_k: Tensor | None
    page_table: Tensor | None
    k: Tensor | None = None
    v: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The form of a cache. ``room`` counts the keys that a sequence may have; ``page_layout`` is NHD, HND, or None for
    (batch, seqlen_k, kv_heads, head_dim). Scales are (batch, kv_heads), or with ``scales_of_pages`` (pages, kv_heads)
    or (pages, kv_heads, rows of a page)."""

    room: int
    page_layout: str | None = None
    scales_of_pages: bool = False


def _of_pages(call: Call) -> bool:
    """Whether pages, or their rows, have scales of their own."""
    return call.page_table is not None and call.scale_blocks[0] in (PAGE_BLOCK, 1)


def prepare(
    kernel: Kernel, cache: Widen, form: CacheForm, driver: Driver, device: int, changing: Collection[Key] = ()
) -> HelperLaunches:
    """The launch that widens caches of a form; ``changing`` as that of ``HelperLaunches``. Raises LoadError if the
    cubin does not load."""
    k, v = (x.transpose(1, 2) if form.page_layout == "HND" else x for x in (cache.k_cache, cache.v_cache))
    table = cache.page_table
    batch = k.shape[0] if table is None else table.shape[0]
    tiles = -(-form.room // kernel.tile_n)
    divisors = {
        "kv_heads": k.shape[2],
        "vectors_k": k.shape[3] // _NUMBERS,
        "vectors_v": v.shape[3] // _NUMBERS,
        "page_size": form.room if table is None else k.shape[1],
    }
    sizes = {
        "batch": batch, "seqlen_k": form.room, "head_dim_qk": k.shape[3], "head_dim_v": v.shape[3], "tiles": tiles,
        "scales_of_pages": int(form.scales_of_pages), **divisors,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    strides: dict[tuple[str, str | int | None], int] = {("page_table", "b"): 0 if table is None else table.stride(0)}
    for name, tensor in (("k_cache", k), ("v_cache", v)):
        strides |= {(name, axis): tensor.stride(place) for place, axis in enumerate(("page", "s", "h"))}
    for name, scale in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
        steps = scale.stride() if scale.dim() == 3 else (*scale.stride(), 0)
        strides |= {(name, axis): step for axis, step in zip("bhs", steps, strict=True)}
    grid = Grid(kernel.main.entry, 2 * batch * tiles)
    return HelperLaunches(kernel, LaunchOperands(Widen._fields, sizes, strides), [grid], driver, device, changing)


class WidenedCall:
    """A call prepared as ``PreparedCall`` is: it widens the cache, then makes the ordinary call."""

    __slots__ = ("_call", "_driver", "_dtype", "_kernel", "_launch", "_pages", "_run", "_scales")

    sinks_only = False

    def __init__(
        self, route: WidenRoute, call: Call, given: Given, run: Callable[[Given], Results], driver: Driver
    ) -> None:
        """``call``: the one over the cache in 8 bits. ``run`` makes the ordinary one. Raises LoadError if the cubin
        does not load."""
        self._pages, self._run, self._kernel, self._driver = _pages(call), run, route.kernel, driver
        self._dtype, self._call = TORCH_DTYPES[call.dtype], call.without_tensors()
        k, v = (each.transpose(1, 2) if call.order == "bhsd" else each for each in (given.k, given.v))
        scales = call.descales["k_descale"], call.descales["v_descale"]
        #: Their shapes and strides.
        self._scales = _without_memory(scales[0]), _without_memory(scales[1])
        cache = Widen(k, v, *scales, call.seqused_k, call.page_table)
        page_layout = call.page_layout if call.layout == "paged" else None
        form = CacheForm(call.seqlen_k, page_layout, _of_pages(call))
        self._launch = prepare(route.kernel, cache, form, driver, call.device.index or 0)

    def __call__(self, given: Given, addresses: Sequence[int]) -> Results:
        """Run the call. ``addresses`` are not needed: the ordinary call finds its own."""
        call, (count, keys) = self._call, self._pages
        k, v = (
            torch.empty((call.batch * count, keys, call.kv_heads, dim), dtype=self._dtype, device=call.device)
            for dim in (call.head_dim_qk, call.head_dim_v)
        )
        tensors = Widen(given.k, given.v, given.k_descale, given.v_descale, given.seqused_k, given.page_table, k, v)
        self._launch(addresses_of(tensors))
        table = None
        if call.layout == "paged":
            table = torch.arange(call.batch * count, dtype=torch.int32, device=call.device).view(call.batch, count)
        if call.order == "bhsd" or (call.layout == "paged" and call.page_layout == "HND"):
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return self._run(given._replace(k=k, v=v, k_descale=None, v_descale=None, page_table=table))

    def of_kind(self, given: Given) -> WidenedCalls | None:
        """All paged calls of the kind of this one, of which ``given`` is one; None for a dense call."""
        if self._call.layout != "paged":
            return None
        cache = Widen(given.k, given.v, *self._scales, given.seqused_k, given.page_table)
        return WidenedCalls(self._kernel, self._call, cache, self._run, self._driver)


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")


class WidenedSizes(NamedTuple):
    """The numbers of a call whose cache is widened: of its launch, pages that it writes, and those of a sequence."""

    resized: Resized
    pages: int
    of_sequence: int


class WidenedCalls:
    """Calls over pages in 8 bits that differ in their sizes only, and whose cache is widened first.

    Pages that are written have a fixed number of keys, and their number is rounded up: calls over them have few kinds.
    """

    __slots__ = ("_call", "_device", "_driver", "_dtype", "_keys", "_launch", "_run", "_tables", "_tile")

    def __init__(
        self, kernel: Kernel, call: Call, cache: Widen, run: Callable[[Given], Results], driver: Driver
    ) -> None:
        """``call``: one of the kind, without its tensors, which are those of ``cache``. Raises LoadError if the cubin
        does not load."""
        self._run, self._call, self._driver = run, call, driver
        self._device, self._dtype, self._tile = call.device.index or 0, TORCH_DTYPES[call.dtype], kernel.tile_n
        self._keys = max(_PAGE_KEYS // max(call.page_size, 1), 1) * call.page_size
        form = CacheForm(call.seqlen_k, call.page_layout, _of_pages(call))
        changing = "batch", "seqlen_k", "tiles", ("page_table", "b")
        self._launch = prepare(kernel, cache, form, driver, self._device, changing)
        #: Numbers of pages in order, by stream: of tables over widened caches.
        self._tables: dict[int, Tensor] = {}

    def resize(self, call: Call) -> WidenedSizes | None:
        """The numbers of another call of the kind; None for one of too many keys."""
        table = call.page_table
        assert table is not None
        if _bytes(call, 2) > _MOST_BYTES:
            return None
        count = -(-call.seqlen_k // self._keys)
        room = count * self._keys
        tiles = -(-room // self._tile)
        changes: dict[Key, float] = {
            "batch": call.batch, "seqlen_k": room, "tiles": tiles, ("page_table", "b"): table.stride(0),
        }  # fmt: skip
        resized = self._launch.resized(changes, [2 * call.batch * tiles])
        return WidenedSizes(resized, rounded(call.batch * count, _PAGE_DIGITS), count)

    def __call__(
        self, given: Given, addresses: Sequence[int], sized: WidenedSizes, repeats: Repeats | None = None
    ) -> Results:
        """Run a call. ``addresses`` are not needed: the ordinary call finds its own. It cannot be repeated."""
        call = self._call
        pages: Tensor = given.page_table
        batch = pages.shape[0]
        k, v = (
            torch.empty((sized.pages, self._keys, call.kv_heads, dim), dtype=self._dtype, device=call.device)
            for dim in (call.head_dim_qk, call.head_dim_v)
        )
        tensors = Widen(given.k, given.v, given.k_descale, given.v_descale, given.seqused_k, pages, k, v)
        self._launch(addresses_of(tensors), sized.resized)
        table = self._numbers(batch * sized.of_sequence).view(batch, sized.of_sequence)
        if call.page_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if repeats is not None:
            repeats.append(None)
        return self._run(given._replace(k=k, v=v, k_descale=None, v_descale=None, page_table=table))

    def _numbers(self, count: int) -> Tensor:
        """The numbers below ``count``."""
        device, stream = self._call.device, self._driver.stream(self._device)
        if in_graph(stream):  # whose memory does not outlive it
            return torch.arange(count, dtype=torch.int32, device=device)
        known = self._tables.get(stream)
        if known is None or known.shape[0] < count:
            known = self._tables[stream] = torch.arange(rounded(count, 1), dtype=torch.int32, device=device)
        return known[:count]
