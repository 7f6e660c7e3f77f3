"""Memory that the launches of a stream share: counters, which are 0 between launches, and small workspaces.

A persistent kernel takes tiles from a counter, and blocks that share keys count who comes last. A kernel sets its
counters back to 0, so that nothing has to be cleared. Launches of one stream follow each other, and may share counters;
those of different streams may not. A captured graph will run on unknown streams, beside whatever its capture stream
runs, so that each of its launches gets counters of its own, from memory that lives as long as the process: in the
graph's pool, another launch would have to clear them at each replay. Workspaces of graphs are in that pool.
"""

from __future__ import annotations

import threading

import torch

from attngen.runtime.device import driver as drivers

_COUNTER_BYTES = 4

#: Counters that are allocated at once, for the splits of launches on a stream and for all launches in graphs. Not
#: measured: 64 KB, for thousands of launches.
_MANY = 16384

#: Largest workspace in bytes that a stream keeps. It is allocated with a power of two of bytes. Not measured: a bound
#: of what idle streams hold.
_MOST_KEPT = 32 << 20

_COUNTERS: dict[tuple[int, int, int], int] = {}
_SPLITS: dict[tuple[int, int, int], tuple[int, int]] = {}
_SPARE: dict[int, tuple[int, int]] = {}
_WORKSPACES: dict[tuple[int, int, int], tuple[int, int]] = {}
_LOCK = threading.Lock()


def in_graph(stream: int) -> bool:
    """Whether the current stream, of this handle, records a graph. Torch's default stream, 0, cannot."""
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def address(stream: int, device: int, lane: int = 0) -> int:
    """Return the address of the counter for a launch on a stream of a device, in one of the ``lanes`` of the stream:
    launches of different lanes may run at the same time."""
    if in_graph(stream):
        return _for_graph(1, device)
    counter = _COUNTERS.get((device, stream, lane))
    if counter is None:
        with _LOCK:
            counter = _COUNTERS.get((device, stream, lane))
            if counter is None:
                counter = _COUNTERS[device, stream, lane] = drivers.current().zeros(_COUNTER_BYTES, device)
    return counter


def of_splits(count: int, stream: int, device: int, lane: int = 0) -> int:
    """Return the address of ``count`` counters for a launch on a stream of a device."""
    if in_graph(stream):
        return _for_graph(count, device)
    counters = _SPLITS.get((device, stream, lane))
    if counters is None or counters[1] < count:
        with _LOCK:
            counters = _SPLITS.get((device, stream, lane))
            if counters is None or counters[1] < count:
                size = max(count, _MANY)
                counters = _SPLITS[device, stream, lane] = drivers.current().zeros(_COUNTER_BYTES * size, device), size
    return counters[0]


def workspace(size: int, stream: int, device: int, lane: int = 0) -> int:
    """Return the address of ``size`` bytes for one launch on a stream of a device, which the next launch may overwrite.

    It is 0 if the caller has to allocate the workspace: for a launch in a graph, or one of too many bytes.
    """
    if size > _MOST_KEPT or in_graph(stream):
        return 0
    kept = _WORKSPACES.get((device, stream, lane))
    if kept is None or kept[1] < size:
        with _LOCK:
            kept = _WORKSPACES.get((device, stream, lane))
            if kept is None or kept[1] < size:
                room = 1 << (size - 1).bit_length()
                kept = _WORKSPACES[device, stream, lane] = drivers.current().zeros(room, device), room
    return kept[0]


def _for_graph(count: int, device: int) -> int:
    """Return the address of counters that no other launch has."""
    with _LOCK:
        address, left = _SPARE.get(device, (0, 0))
        if left < count:
            left = max(count, _MANY)
            address = drivers.current().zeros(_COUNTER_BYTES * left, device)
        _SPARE[device] = address + _COUNTER_BYTES * count, left - count
    return address
