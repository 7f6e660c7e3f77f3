"""Two streams that alternate, so that a kernel starts on multiprocessors that the one before it has already left."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: The second stream of each GPU.
_second: dict[torch.device, Any] = {}


class TwoStreams:
    """The current stream of a GPU and a second one, for the calls of a ``with`` block; on a CPU, neither.

    The second stream starts after what was enqueued before the block, and the current one waits for it at the end of
    the block. A tensor that both streams use must live until then. One that is made in the block and used after it goes
    through ``handed``, so that the allocator does not reuse its memory too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[Any] = []
        self._used = False
        if device.type == "cuda":
            if device not in _second:
                _second[device] = torch.cuda.Stream(device)
            self._streams = [torch.cuda.current_stream(device), _second[device]]
            self._start = self._streams[0].record_event()

    def __enter__(self) -> TwoStreams:
        return self

    def __exit__(self, *_: object) -> None:
        if self._used:
            self._streams[0].wait_stream(self._streams[1])

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Enqueue call ``number``: even ones on the current stream, odd ones on the second."""
        if not self._streams:
            return nullcontext()
        if number % 2 and not self._used:
            self._streams[1].wait_event(self._start)
            self._used = True
        return torch.cuda.stream(self._streams[number % 2])

    def event(self) -> Any:
        """An event after what was enqueued on the current stream."""
        return torch.cuda.current_stream().record_event() if self._streams else None

    @staticmethod
    def wait(event: Any) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def handed(self, x: Tensor) -> Tensor:
        """A tensor of either stream, which the current one uses after the block."""
        if self._used:
            x.record_stream(self._streams[0])
        return x
