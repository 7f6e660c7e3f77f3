"""Streams of a call: two that alternate, so that a kernel starts on multiprocessors that the one before it has already
left, and one for copies, which go first wherever a multiprocessor is free."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: The second stream of each GPU, and the one for copies, which has a higher priority.
_others: dict[torch.device, tuple[Any, Any]] = {}


class Streams:
    """The current stream of a GPU, a second one and one for copies, for the calls of a ``with`` block; on a CPU, none.

    The others start after what was enqueued before this was made, and the current one waits for them at the end of the
    block. A tensor that several streams use must be made on the current stream before this is made, or live until the
    end of the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[Any] = []
        self._used: set[int] = set()
        if device.type == "cuda":
            if device not in _others:
                _others[device] = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
            self._streams = [torch.cuda.current_stream(device), *_others[device]]
            self._start = self._streams[0].record_event()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._used:
            self._streams[0].wait_stream(self._streams[number])

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Enqueue call ``number``: even ones on the current stream, odd ones on the second."""
        return self._enter(number % 2)

    def copying(self, after: Any = None) -> AbstractContextManager[Any]:
        """Enqueue copies, after an event if one is given."""
        context = self._enter(2)
        if after is not None:
            self._streams[2].wait_event(after)
        return context

    def event(self) -> Any:
        """An event after what was enqueued on the stream of the innermost block."""
        return torch.cuda.current_stream().record_event() if self._streams else None

    @staticmethod
    def wait(event: Any) -> None:
        """Let the stream of the innermost block wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _enter(self, number: int) -> AbstractContextManager[Any]:
        if not self._streams:
            return nullcontext()
        if number and number not in self._used:
            self._streams[number].wait_event(self._start)
            self._used.add(number)
        return torch.cuda.stream(self._streams[number])
