"""The reference's gradients against finite differences in float64 (``torch.autograd.gradcheck``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.checked import Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import reference
from tests.runtime.support import variant
from tests.sampling import sampled

SLOPE = [Declared("slope", "fp32", ("h",), grad=True)]
VARIANTS = {
    "causal": variant(),
    "dead rows": variant("late", "q_pos >= kv + 2 and kv != 1"),
    "alibi": variant("alibi", score="s + slope[h] * (kv - q_pos)", tensors=SLOPE),
    "softcap": variant("softcap", score="3.0 * tanh(s / 3.0)"),
    "branches": variant("branches", score="s * s if q > kv else s + log(abs(s) + 0.1) * slope[h]", tensors=SLOPE),
    "hidden by a score": variant("hidden", None, score="s if (q + kv) % 3 != 0 else -inf"),
}


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, torch.where(lse.isinf(), 0.0, lse)


@sampled(packed=[False, True], name=list(VARIANTS))
def test_gradients_of_the_reference(name: str, packed: bool) -> None:
    chosen = VARIANTS[name]
    shapes = [(5, 4, 3), (6, 2, 3), (6, 2, 2)] if packed else [(1, 4, 4, 3), (1, 5, 2, 3), (1, 5, 2, 2)]
    cu_q, cu_k = (torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 0, 4, 5], [0, 1, 4, 6]))
    packing = Packing(cu_q, cu_k, 4, 3) if packed else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(zip((t.name for t in chosen.tensors), own, strict=True))
        call = bind(
            chosen, q, k, v, packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd",
            arguments=arguments,
        )  # fmt: skip
        return finite(*reference(call, q, k, v))

    assert torch.autograd.gradcheck(attend, inputs(*shapes, *[(4,)] * len(chosen.tensors)), fast_mode=True)
