"""A call whose launches are made again with other addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attngen.runtime.arguments.addresses import OUT
from attngen.runtime.arguments.given import TENSORS
from attngen.runtime.launch.chain import Chain, Moves, Sized

if TYPE_CHECKING:
    from torch import Tensor

    from attngen.runtime.arguments.scalars import Number

_MOVING = _Q, _OUT = TENSORS.index("q"), OUT


class Repeatable:
    """The launches of one call, in a block of parameters of their own. What changes is written to it.

    They run on one stream, since their counters and workspaces belong to it, and in one thread at a time.
    """

    __slots__ = (
        "_block", "_bytes", "_enqueue", "_maps", "_words", "calls", "chain", "given", "kept", "lse", "stream",
    )  # fmt: skip

    def __init__(
        self, chain: Chain, addresses: Sequence[int], scale: float, scalars: Sequence[Number], sized: Sized,
        stream: int, kept: object, given: tuple[Sequence[int], float, Sequence[Number]], lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The arguments of a launch, and memory of its workspaces that is to be ``kept``. ``given``: addresses of a
        call's tensors, its scale and scalars. ``lse``: where each launch writes its log-sum-exp, if it has one."""
        self.chain, self.stream, self.kept, self.given, self.lse = chain, stream, kept, given, lse
        #: Prepared launches for calls of the kind with other sizes: ``RaggedCalls``.
        self.calls: object = None
        self._block = block = chain.take(sized)
        chain.place(block, addresses, sized)
        block.enter(scale, scalars)
        self._bytes, self._words = block.bytes, block.words
        self._maps = chain.maps_of(_MOVING, sized)
        self._enqueue = chain.bound(block, stream)

    def __del__(self) -> None:
        self.chain.give_back(self._block)

    def launch(self, q: int, out: int, moves: Moves) -> None:
        """Enqueue the launches for queries and an output at these addresses, after ``moves`` of other tensors, which
        ``Chain.moves`` made."""
        self._words[_Q], self._words[_OUT] = q, out
        content = self._bytes
        for where, moved in moves:
            content[where] = moved
        for where, tensor_map, which, rows in self._maps:
            content[where] = tensor_map.at(out if which else q, rows)
        self._enqueue()
