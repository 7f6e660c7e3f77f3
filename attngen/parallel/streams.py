"""Streams of a call: two lanes for attention, so that a kernel starts on multiprocessors that the one before it has
already left, and a stream for copies, which go first wherever a multiprocessor is free."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: Work of a call of attention, over that of the call before it, up to which it is expected to end first. Not
#: measured.
_SHORT = 0.35

#: Cycles for which a kernel waits once the one before it may start, so that its blocks are placed after that one's
#: (docs/notebook/parallel.md, "Order of kernels").
_BEHIND = 2_000

_NOTHING: AbstractContextManager[Any] = nullcontext()


class _Device:
    """The second lane of a GPU, its stream for copies, and events, which calls use again."""

    def __init__(self, device: torch.device) -> None:
        self.lane, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self.events: list[Any] = []


class _OfThread(threading.local):
    """Threads share nothing: an event that one of them records again would mean something else to the other."""

    def __init__(self) -> None:
        self.devices: dict[torch.device, _Device] = {}


_of_thread = _OfThread()


class Streams:
    """The current stream of a GPU, a second lane and a stream for copies, for the calls of a ``with`` block; on a CPU,
    none.

    The others start after what was enqueued before this was made, and the current one waits for them at the end of the
    block. A tensor that several streams use must be made on the current stream before this is made, or live until the
    end of the block. The blocks of ``attention`` and ``copying`` are not nested.
    """

    def __init__(self, device: torch.device) -> None:
        self._all: tuple[Any, ...] = ()
        if device.type != "cuda":
            return
        known = _of_thread.devices.get(device)
        if known is None:
            known = _of_thread.devices[device] = _Device(device)
        self._device = torch.cuda.device(device)
        self._events, self._recorded = known.events, 0
        self._now = torch.cuda.current_stream(device)
        self._all = self._now, known.lane, known.copies
        self._blocks = [_Block(self, each) for each in self._all]
        self._used: set[int] = set()
        self._calls: list[tuple[int, float, Any]] = []  # lane, work and begin of the calls of attention
        self._start = self.event()

    def __enter__(self) -> Streams:
        if self._all:
            self._device.__enter__()
        return self

    def __exit__(self, *of_error: Any) -> None:
        if not self._all:
            return
        for number in self._used:
            self.now(self._all[number])
            end = self.event()
            self.now(self._all[0])
            self.wait(end)
        self._device.__exit__(*of_error)

    def attention(self, work: float, after: Any = None, *, same_lane: bool = False) -> AbstractContextManager[Any]:
        """Enqueue a call of attention, after an event if one is given, and after the begin of the call before it.

        ``work`` is that of the call, in any unit. Lanes alternate, but where the call before is so short that it ends
        before its predecessor: then, and with ``same_lane``, its lane is taken.
        """
        if not self._all:
            return _NOTHING
        lane, begin = 0, None
        if self._calls:
            lane, last, begin = self._calls[-1]
            short = len(self._calls) > 1 and last < _SHORT * self._calls[-2][1]
            if same_lane or short:
                begin = None
            else:
                lane = 1 - lane
        block = self._enter(lane, after)
        if begin is not None:
            self.wait(begin)
            torch.cuda._sleep(_BEHIND)
        self._calls.append((lane, work, self.event()))
        return block

    def copying(self, after: Any = None) -> AbstractContextManager[Any]:
        """Enqueue copies, after an event if one is given."""
        return self._enter(2, after) if self._all else _NOTHING

    def event(self) -> Any:
        """An event after what was enqueued on the stream of the innermost block."""
        if not self._all:
            return None
        if self._recorded == len(self._events):
            self._events.append(torch.cuda.Event())
        event = self._events[self._recorded]
        self._recorded += 1
        event.record(self._now)
        return event

    def wait(self, event: Any) -> None:
        """Let the stream of the innermost block wait for an event."""
        if event is not None:
            self._now.wait_event(event)

    def now(self, stream: Any) -> None:
        """Enqueue on a stream from now on."""
        if stream is not self._now:
            self._now = stream
            torch.cuda.set_stream(stream)

    def _enter(self, number: int, after: Any) -> _Block:
        self.now(self._all[number])
        if number and number not in self._used:
            self._used.add(number)
            self.wait(self._start)
        self.wait(after)
        return self._blocks[number]


class _Block:
    """A block of statements that enqueue on one stream; after it, the current one is used again."""

    __slots__ = ("_stream", "_streams")

    def __init__(self, streams: Streams, stream: Any) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._streams.now(self._stream)

    def __exit__(self, *_: object) -> None:
        self._streams.now(self._streams._all[0])
