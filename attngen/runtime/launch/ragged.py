"""Calls over sequences in pages, or packed, that differ in their sizes only, prepared once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.kinds import extents_of, resize, resize_batch, sizes_of
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.chain import Sized
from attngen.runtime.launch.prepared import PreparedCall
from attngen.runtime.registry.binding import bind_call
from attngen.runtime.registry.order import card_of, fastest, first_choices, splits_keys, typical_sizes

#: Sizes that are kept for each kind of call, of about a kilobyte each. Not measured: a bound of memory.
KEPT_SIZES = 1024


class Resizes(Protocol):
    """Calls of a kind that run in another way, as a ``PreparedCall`` does."""

    def resize(self, call: Call) -> object:
        """Values that follow from the sizes of a call; None where these need a look."""


class RaggedCalls:
    """The kernels that take all calls of a kind, and what is prepared of them."""

    __slots__ = (
        "_by_splits",
        "_call",
        "_card",
        "_chosen",
        "_driver",
        "_few_rows",
        "_kept",
        "_kept_variant",
        "_lock",
        "_names",
        "_others",
        "_prepared",
    )

    def __init__(
        self, call: Call, kernels: Sequence[Kernel], tensor_names: Sequence[str], driver: Driver, device: int,
        kept: Variant | None, *, prepared: PreparedCall | None = None, few_rows: bool = False,
    ) -> None:  # fmt: skip
        """``call``: one of the kind, which each of the ``kernels`` takes; the rest as of a ``PreparedCall``, of which
        one may be ``prepared`` already. ``few_rows``: only calls whose blocks should share the keys; others may have
        their cache widened first."""
        self._call, self._names = call.without_tensors(), tensor_names
        #: Candidates by whether blocks should share keys.
        self._by_splits = {splits: first_choices(kernels, splits) for splits in (False, True)}
        self._driver, self._card, self._kept_variant = driver, card_of(driver, device), kept
        #: Kernels by typical sizes: one prediction serves all calls that are about alike.
        self._chosen: RecentCache[Kernel] = RecentCache(KEPT_SIZES)
        self._prepared: dict[Kernel, PreparedCall] = {}
        if prepared is not None and prepared.kernel is not None:
            self._prepared[prepared.kernel] = prepared
        #: Calls of sizes that were there before.
        self._kept: RecentCache[tuple[PreparedCall, Sized]] = RecentCache(KEPT_SIZES)
        self._lock, self._few_rows = threading.Lock(), few_rows
        #: The kernel of calls with more rows, or what widens their cache first, by typical sizes.
        self._others: RecentCache[Kernel | Resizes] = RecentCache(KEPT_SIZES)

    def ready(self, given: Given) -> tuple[PreparedCall, Sized] | None:
        """The prepared call and its numbers for a call of the kind, kept for others of the same sizes; None where
        something about its sizes needs a look."""
        sizes = sizes_of(given)
        try:
            known = self._kept[sizes]
        except TypeError:  # something that cannot be hashed stands where a length belongs
            return None
        if known is None:
            known = self._resized(given)
            if known is not None:
                self._kept.put(sizes, known)
        return known

    def _resized(self, given: Given) -> tuple[PreparedCall, Sized] | None:
        call = self._call
        with self._lock:
            if not resize(call, given):
                return None
            return self._of_sizes(given.page_table, lambda kernel: self._prepare(kernel, given))

    def ready_batch(
        self, batch: int, rows: int, longest: int, page_table: Tensor, beside: int = 0, blocks: int = 0
    ) -> tuple[PreparedCall, Sized] | None:
        """As ``ready``, for ``batch`` sequences of a page table, whose tensors were looked at: rows of q, and most
        queries of a sequence. None also where no call has used the kernel before. ``beside`` and ``blocks`` as those of
        a ``Call``."""
        width = page_table.shape[1]
        sizes = batch, rows, longest, width, page_table.stride(0), beside, blocks
        known = self._kept[sizes]
        if known is None:
            known = self.sized_batch(batch, rows, longest, page_table, beside, blocks)
            if known is not None:
                self._kept.put(sizes, known)
        return known

    def sized_batch(
        self, batch: int, rows: int, longest: int, page_table: Tensor, beside: int = 0, blocks: int = 0
    ) -> tuple[PreparedCall, Sized] | None:
        """``ready_batch`` without looking for what is kept."""
        call = self._call
        with self._lock:
            if not resize_batch(call, batch, rows, longest, page_table.shape[1]):
                return None
            call.beside, call.blocks = beside, blocks
            try:
                ready = self._of_sizes(page_table, None)
                return ready if ready is not None and isinstance(ready[0], PreparedCall) else None
            finally:
                call.beside = call.blocks = 0

    def _of_sizes(
        self, page_table: Tensor | None, prepare: Callable[[Kernel], PreparedCall] | None
    ) -> tuple[PreparedCall, Sized] | None:
        """Prepared call for the sizes that are set, and its numbers. ``prepare``: for a kernel that no call has
        used."""
        call = self._call
        splits = splits_keys(call)
        if self._few_rows and not splits:
            other = self._others[typical_sizes(call)]
            if not isinstance(other, Kernel):
                return None if other is None else self._otherwise(other, page_table)
            kernel = other
        else:
            kernels = self._by_splits[splits]
            kernel = kernels[0] if len(kernels) == 1 else self._kernel(kernels)
        prepared = self._prepared.get(kernel)
        if prepared is None:
            if prepare is None:
                return None
            prepared = self._prepared[kernel] = prepare(kernel)
        call.page_table = page_table
        ready = prepared, prepared.resize(call)
        call.page_table = None
        return ready

    def _otherwise(self, calls: Resizes, page_table: Tensor | None) -> tuple[PreparedCall, Sized] | None:
        """Calls that run in another way and their numbers for the sizes that are set, as a prepared call has them: both
        are only ever called with each other."""
        call = self._call
        call.page_table = page_table
        sized = calls.resize(call)
        call.page_table = None
        return None if sized is None else cast("tuple[PreparedCall, Sized]", (calls, sized))

    def note(self, given: Given, other: Kernel | Resizes) -> None:
        """Take what ran a call of the kind with more rows than the kernels are for: others of about the same sizes run
        in the same way."""
        if not self._few_rows:
            return
        with self._lock:
            if not resize(self._call, given) or splits_keys(self._call):
                return
            sizes = typical_sizes(self._call)
        if not (isinstance(other, Kernel) and other.needs_tile_map):
            self._others.put(sizes, other)

    def _kernel(self, kernels: Sequence[Kernel]) -> Kernel:
        """The one of several kernels that should be done first with a call of the sizes that are set."""
        sizes = typical_sizes(self._call)
        return self._chosen[sizes] or self._choose(kernels, sizes)

    def _choose(self, kernels: Sequence[Kernel], sizes: tuple[int, int, int]) -> Kernel:
        """The kernel for typical sizes. Others are chosen when a call has them: all at once are some milliseconds in
        one step of a server, for each kind of call and each typical length."""
        call = self._call
        call.extents = extents_of(call)
        kernel = fastest(kernels, call, self._card, sizes)
        self._chosen.put(sizes, kernel)
        return kernel

    def _prepare(self, kernel: Kernel, given: Given) -> PreparedCall:
        """A call on a kernel that no call of the kind has used before."""
        call, _ = bind_call(given)
        call.return_lse = self._call.return_lse
        return PreparedCall(call, kernel, self._names, self._driver, call.device.index or 0)
