"""Facts about the values of captured tensors that decide the meaning of a function: each tensor is looked at once.

A look is queued on the tensor's stream, and answers when it is asked: making a mask does not wait for the GPU.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.flex.identity import state_of
from attngen.lang.ranges import INT32, INT64

#: Elements of the largest tensor that is searched.
_MOST = 2**24

#: Value in pinned memory until the GPU has answered.
_PENDING = -1


class Look:
    """The facts about one tensor's numbers."""

    __slots__ = ("_answers", "_done", "_known")

    def __init__(self, tensor: Tensor) -> None:
        """Queue what finds them out. Raises CallError while a CUDA graph is captured, in which nothing runs."""
        self._known: tuple[bool, int, int] | None = None  # whether they rise, the least, and the greatest
        if not answers_exist(tensor):
            self._known = False, int(INT64[0]), int(INT64[1])
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CallError(
                "the values of a captured tensor cannot be read while a CUDA graph is captured: make the mask, or "
                "call with the score_mod, once before"
            )
        with torch.no_grad():
            numbers = tensor.detach()
            least, greatest = torch.aminmax(numbers)
            rises = (numbers[..., 1:] >= numbers[..., :-1]).all() if numbers.dim() else least >= least
            answers = torch.stack((rises, least, greatest))
        if not tensor.is_cuda:
            self._read(answers)
            return
        self._answers = torch.full((3,), _PENDING, dtype=answers.dtype, pin_memory=True, device="cpu")
        self._answers.copy_(answers, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(tensor.device))

    def _read(self, answers: Tensor) -> tuple[bool, int, int]:
        rises, least, greatest = answers.tolist()
        self._known = bool(rises), least, greatest
        return self._known

    def _wait(self) -> tuple[bool, int, int]:
        if self._known is not None:
            return self._known
        if not torch.cuda.is_current_stream_capturing():
            self._done.synchronize()
        elif self._answers.tolist()[0] == _PENDING:  # a capture may not wait, but all before it is done
            raise CallError("a mask of this call was made while a CUDA graph is captured: make it before the capture")
        return self._read(self._answers)

    @property
    def rises(self) -> bool:
        """Whether no number is less than the one before it along the last axis, as in document numbers."""
        return self._wait()[0]

    @property
    def natural(self) -> bool:
        """Whether no number is negative."""
        return self._wait()[1] >= 0

    @property
    def positive(self) -> bool:
        """Whether all numbers are at least 1."""
        return self._wait()[1] >= 1

    @property
    def narrow(self) -> bool:
        """Whether int32 holds all numbers."""
        _, least, greatest = self._wait()
        return INT32[0] <= least and greatest <= INT32[1]


def answers_exist(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are looked at: integers, some, and not too many."""
    dtype = tensor.dtype
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool and 0 < tensor.numel() <= _MOST


class Looks:
    """The looks at tensors that exist, which are not kept alive; a tensor that was changed is looked at again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], tuple[int, int], Look]] = {}

    def at(self, tensor: Tensor) -> Look:
        """Return the look at a tensor, a new one where there is none. Changes in inference mode are not counted."""
        identity, state = id(tensor), state_of(tensor)
        known = self._known.get(identity)
        counted = not tensor.is_inference()
        if known is not None and known[0]() is tensor and known[1] == state and counted:
            return known[2]
        look = Look(tensor)
        self._known[identity] = ref(tensor, lambda _: self._known.pop(identity, None)), state, look
        return look


looks = Looks()
