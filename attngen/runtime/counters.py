"""Counters that blocks share, 0 between launches: those from which a persistent kernel takes tiles, one word per
stream, and those by which the blocks that share keys find out who comes last.

A kernel leaves its counter at 0 again, so that nothing has to be cleared. Launches of one stream follow each other and
may share a counter; those of different streams may not. A graph that is being captured will run on streams unknown,
beside what its own capture stream runs, and gets counters of its own: that of tiles out of the graph's pool, those of
splits out of memory that lives as long as the process, so that the graph has nothing to clear.
"""

from __future__ import annotations

import threading

import torch

from attngen.runtime import driver as drivers

_BYTES = 4

#: Counters of splits that are allocated at once, for launches on a stream and for those in graphs.
_MANY = 16384

_COUNTERS: dict[tuple[int, int], int] = {}
_SPLITS: dict[tuple[int, int], tuple[int, int]] = {}
_SPARE: dict[int, tuple[int, int]] = {}
_LOCK = threading.Lock()


def address(stream: int, device: int) -> int:
    """Return the address of the counter for a launch on a stream of a device."""
    if torch.cuda.is_current_stream_capturing():
        return _in_graph(device)
    counter = _COUNTERS.get((device, stream))
    if counter is None:
        with _LOCK:
            counter = _COUNTERS.get((device, stream))
            if counter is None:
                counter = _COUNTERS[device, stream] = drivers.current().zeros(_BYTES, device)
    return counter


def _in_graph(device: int) -> int:
    """Return the address of a new counter in the pool of the graph, which clears it at the start of each replay."""
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}").data_ptr()


def of_splits(count: int, stream: int, device: int) -> int:
    """Return the address of ``count`` counters for a launch on a stream of a device."""
    if torch.cuda.is_current_stream_capturing():
        return _for_graph(count, device)
    found = _SPLITS.get((device, stream))
    if found is None or found[1] < count:
        with _LOCK:
            found = _SPLITS.get((device, stream))
            if found is None or found[1] < count:
                size = max(count, _MANY)
                found = _SPLITS[device, stream] = drivers.current().zeros(_BYTES * size, device), size
    return found[0]


def _for_graph(count: int, device: int) -> int:
    """Return the address of counters that no other launch has."""
    with _LOCK:
        address, left = _SPARE.get(device, (0, 0))
        if left < count:
            left = max(count, _MANY)
            address = drivers.current().zeros(_BYTES * left, device)
        _SPARE[device] = address + _BYTES * count, left - count
    return address
