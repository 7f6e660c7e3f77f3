"""Tile maps: which KV tiles each query tile has to visit, for masks that only the data knows.

A map is a tensor of int32 words (batch or 1, heads or 1, query tiles, 2, words): for each query tile the bits of
the tiles that every row sees whole, then the bits of the tiles that some row sees in part. Bit t % 32 of word
t // 32 stands for KV tile t. A generated classifier kernel computes it; a caller may keep it and pass it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngen.errors import CallError
from attngen.runtime.checked import Call
from attngen.runtime.module import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """A computed map, and what it was computed for. Its content follows the mask's tensors and scalars of that moment.

    ``words`` is None where no map is needed: on the CPU, and for kernels that bound their loops by other means.
    """

    variant: str | None
    words: torch.Tensor | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def of_words(cls, words: torch.Tensor) -> TileMap:
        """Return a map of which only the words are known, as they pass through a traced program."""
        return cls(None, words)

    def check(self, kernel: Kernel, call: Call, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the words if they fit a call of a kernel; CallError says what does not."""
        if self.words is None:
            raise CallError(f"tile_map: it holds no map, but {kernel.full_name} needs one; compute it on {call.device}")
        for label, found, wanted in (
            ("variant", self.variant, kernel.variant_name),
            ("tile_m", self.tile_m, kernel.tile_m),
            ("tile_n", self.tile_n, kernel.tile_n),
            ("seqlen_q", self.seqlen_q, call.seqlen_q),
            ("seqlen_k", self.seqlen_k, call.seqlen_k),
            ("shape", tuple(self.words.shape), shape),
            ("device", self.words.device, call.device),
        ):
            if found is not None and found != wanted:
                raise CallError(f"tile_map: its {label} is {found}, but {kernel.full_name} needs {wanted} in this call")
        return self.words
