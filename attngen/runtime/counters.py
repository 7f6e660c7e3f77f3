"""Counters from which the blocks of a persistent kernel take tiles: one word per stream, 0 between launches.

A kernel leaves its counter at 0 again, so that nothing has to be cleared. Launches of one stream follow each other and
may share a counter; those of different streams may not. A graph that is being captured will run on streams unknown,
beside what its own capture stream runs, and gets a counter of its own out of the graph's pool.
"""

from __future__ import annotations

import threading

import torch

from attngen.runtime import driver as drivers

_BYTES = 4

_COUNTERS: dict[tuple[int, int], int] = {}
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
