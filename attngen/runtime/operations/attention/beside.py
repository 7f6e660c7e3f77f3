"""Launches that run side by side: how a device is divided among them, and a second stream of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.runtime.device import driver as drivers

#: Operations per nanosecond that prompts reach on Hopper, and the part of a card's bandwidth that decoding does.
#: Not measured for this rule.
_OPERATIONS, _OF_BANDWIDTH = 600e3, 0.85

#: The time of prompts over that of decoding, at least, and the share of multiprocessors that decoding then leaves to
#: prompts. Half of them cost decoding 9 %, as measured: two multiprocessors seem to share a path to memory
#: (docs/notebook/hopper_decode.md, "Prompts beside sequences that decode").
_LEFT = ((5.0, 0.0), (0.45, 0.5), (0.2, 0.2))

#: The estimated time of prompts over that of decoding from which on these come second, and blocks of decoding for each
#: multiprocessor by this ratio, at most. One H100: docs/notebook/hopper_decode.md, "Prompts beside sequences that
#: decode".
_LONG_PROMPTS, _WAVES = 0.7, ((0.09, 8), (0.2, 4))

#: Rows of a tile of prompts, which takes a multiprocessor.
_TILE_ROWS = 128


def heads_axis(layout: str) -> int:
    """The axis of KV heads of a cache."""
    return 2 if layout == "NHD" else 1


def left_to_prompts(q: Tensor, tokens: int, k: Tensor, layout: str, decodes: int) -> int:
    """See ``Division.left_to_prompts``; q may have more rows than there are ``tokens``."""
    return Division(q, k, layout).left_to_prompts(tokens, decodes)


class Sides(NamedTuple):
    """Division of a device between two launches of a batch: which one begins, and the blocks of each."""

    prompts_lead: bool
    decode_blocks: int
    prompt_blocks: int


class Division:
    """Division of a device between decoding and prompts, for tensors that differ in their rows only."""

    __slots__ = ("_heads", "_kv_heads", "_multiprocessors", "_ratio")

    def __init__(self, q: Tensor, k: Tensor, layout: str) -> None:
        driver, device, self._heads = drivers.current(), q.get_device(), q.shape[1]
        self._multiprocessors = driver.multiprocessors(device)
        self._kv_heads = max(k.shape[heads_axis(layout)], 1)
        group = self._heads // self._kv_heads
        bandwidth = _OF_BANDWIDTH * driver.bandwidth(device)
        #: The time of prompts of one row over that of decoding one sequence.
        self._ratio = 2 * group * bandwidth / (k.element_size() * _OPERATIONS)

    def sides(self, tokens: int, decodes: int) -> Sides:
        """The division for launches of which the second does not wait for the first.

        The first one gets one multiprocessor of each pair that shares its way to memory. Long prompts come second, and
        take all multiprocessors at last. Others come first; where decoding takes much longer than these, it has more
        blocks than there is room for, and takes all multiprocessors at last. Decoding of few sequences gets what it can
        use.
        """
        rows, most = tokens - decodes, self._multiprocessors
        ratio, half = self._ratio * rows / decodes, most // 2
        if decodes * self._kv_heads <= half:
            return Sides(False, most, most)
        if ratio >= _LONG_PROMPTS:
            return Sides(False, half, most)
        prompts = min(half, max(-(-rows * self._heads // _TILE_ROWS), 1))
        waves = next((waves for least, waves in _WAVES if ratio < least), 1)
        if 4 * prompts < 3 * half:  # pairs of multiprocessors are the slowest, and should have fewer blocks
            waves = _WAVES[0][1]
        return Sides(True, (most - prompts) * waves, prompts)

    def left_to_prompts(self, tokens: int, decodes: int) -> int:
        """Multiprocessors that decoding leaves to prompts on a second stream, so that both are done at about the same
        time.

        The host knows no length of keys, and takes all sequences to have as many. There are few values, since calls
        that leave another number are of another kind.
        """
        rows = tokens - decodes
        ratio = self._ratio * rows / decodes
        for least, part in _LEFT:
            if ratio >= least:
                left = int(part * self._multiprocessors)
                return left if left * _TILE_ROWS <= rows * self._heads else 0
        return 0


#: Held while two launches are enqueued that run side by side on one stream (``checked.LEADS``): those of other threads
#: would share their counters.
PAIRED = threading.Lock()


class SideStream:
    """Launches on a second stream beside those of the current one.

    What is enqueued before ``switch`` goes to the current stream, and what comes then to the other one, which waits for
    nothing but what came before all of this. At the end, the current stream waits for both.
    """

    def __init__(self, device: int) -> None:
        self._streams, self._ready = streams_beside(device), drivers.current().ready(device)

    def __enter__(self) -> SideStream:
        streams = self._streams
        if self._ready:
            streams.begin()
        else:
            streams.begun.record(streams.main)
        return self

    def switch(self) -> None:
        """Go to the other stream."""
        streams = self._streams
        if self._ready:
            streams.fork()
        else:
            streams.side.wait_event(streams.begun)
        streams.to_side()

    def __exit__(self, *_: object) -> None:
        streams = self._streams
        streams.to_main()
        if self._ready:
            streams.join()
        else:
            streams.done.record(streams.side)
            streams.main.wait_event(streams.done)


class StreamPair:
    """The current stream of a device, one beside it, and the events by which they wait for each other.

    ``begin``, ``fork`` and ``join`` do without torch, in half the time, on a device that is ready: they note what the
    stream beside has to wait for, make it wait, and make the current one wait for both. ``to_side`` and ``to_main``
    change torch's current stream.
    """

    __slots__ = ("_ended", "_wait", "begin", "begun", "done", "fork", "main", "side", "to_main", "to_side")

    def __init__(self, device: int) -> None:
        self.main, self.side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self.begun, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.begun.record(self.main)  # an event has a handle once it is recorded
        self.done.record(self.side)
        driver, main, side = drivers.current(), self.main.cuda_stream, self.side.cuda_stream
        begun, done = self.begun.cuda_event, self.done.cuda_event
        self.begin, self.fork = driver.recorder(begun, main), driver.waiter(begun, side)
        self._ended, self._wait = driver.recorder(done, side), driver.waiter(done, main)
        self.to_main, self.to_side = _setter(self.main), _setter(self.side)

    def join(self) -> None:
        """Make the current stream wait for the other one."""
        self._ended()
        self._wait()


def _setter(stream: torch.cuda.Stream) -> Callable[[], None]:
    """A function that makes a stream torch's current one."""
    return partial(
        torch._C._cuda_setStream, stream_id=stream.stream_id, device_index=stream.device_index,
        device_type=stream.device_type,
    )  # fmt: skip


_STREAMS = threading.local()


def streams_beside(device: int) -> StreamPair:
    """The current stream and the one beside it, which this thread keeps."""
    try:
        kept = _STREAMS.kept
    except AttributeError:
        kept = _STREAMS.kept = {}
    key = device, drivers.current().stream(device)
    known: StreamPair | None = kept.get(key)
    if known is None:
        known = kept[key] = StreamPair(device)
    return known
