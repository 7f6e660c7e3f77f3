"""Two streams that take turns, so that a kernel begins on the multiprocessors that the one before it has left."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_sides: dict[torch.device, Any] = {}


class Turns:
    """The current stream of a GPU and a second one, which are joined at the end of a ``with`` block.

    Work of the second stream begins after what was enqueued before the block. Tensors that are used in the block live
    until its end, but for those that one turn alone makes and uses; what is returned from the block is ``handed`` over.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[Any] = []
        self._used = False
        if device.type == "cuda":
            if device not in _sides:
                _sides[device] = torch.cuda.Stream(device)
            self._streams = [torch.cuda.current_stream(device), _sides[device]]
            self._start = self._streams[0].record_event()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        if self._used:
            self._streams[0].wait_stream(self._streams[1])

    def on(self, turn: int) -> AbstractContextManager[Any]:
        """Enqueue on the stream whose turn it is."""
        if not self._streams:
            return nullcontext()
        if turn % 2 and not self._used:
            self._streams[1].wait_event(self._start)
            self._used = True
        return torch.cuda.stream(self._streams[turn % 2])

    def event(self) -> Any:
        """An event after what was enqueued on the current stream."""
        return torch.cuda.current_stream().record_event() if self._streams else None

    @staticmethod
    def wait(event: Any) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def handed(self, x: Tensor) -> Tensor:
        """A tensor that the first stream uses after the block."""
        if self._used:
            x.record_stream(self._streams[0])
        return x
