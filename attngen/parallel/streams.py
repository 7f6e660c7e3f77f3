"""Two streams that take turns, so that a kernel's last blocks and the next kernel's first ones run at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_sides: dict[torch.device, Any] = {}


class Turns:
    """The current stream and another one of a GPU. Work of the other one begins after what was enqueued before."""

    def __init__(self, device: torch.device) -> None:
        self._streams: list[Any] = []
        self._used = False
        if device.type == "cuda":
            if device not in _sides:
                _sides[device] = torch.cuda.Stream(device)
            self._streams = [torch.cuda.current_stream(device), _sides[device]]
            self._start = self._streams[0].record_event()

    def on(self, turn: int) -> AbstractContextManager[Any]:
        """Enqueue on the stream whose turn it is."""
        if not self._streams:
            return nullcontext()
        if turn % 2 and not self._used:
            self._streams[1].wait_event(self._start)
            self._used = True
        return torch.cuda.stream(self._streams[turn % 2])

    def event(self) -> Any:
        """What was enqueued so far on the current stream."""
        return torch.cuda.current_stream().record_event() if self._streams else None

    @staticmethod
    def wait(event: Any) -> None:
        """Let the current stream wait."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Let the first stream wait for the other one; tensors that this one reads have to live until here."""
        if self._used:
            self._streams[0].wait_stream(self._streams[1])
