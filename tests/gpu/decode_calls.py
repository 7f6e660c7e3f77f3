"""Calls of split-KV kernels with inputs on the GPU, which can be run again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
from tests.gpu.test_decode import PACKAGE, on_gpu, own_of
from tests.runtime.pages import cache, starts_of

LAYOUTS = ("dense", "varlen", "paged")


@dataclass(frozen=True, slots=True)
class Form:
    """Properties that a kernel is built for."""

    variant: str
    layout: str
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Ready:
    """A call on its inputs on the GPU, and the same inputs on the CPU in float64."""

    form: Form
    tensors: tuple[Tensor, ...]  # q, k, v and what the layout adds
    positions: tuple[int, ...]  # positional arguments after the tensors
    options: dict[str, Any]

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one launch."""
        return self._call(self.tensors, {**self.options, **more})

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the reference in float64."""
        exact = tuple(t.cpu().double() if t.dtype.is_floating_point else t.cpu() for t in self.tensors)
        options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return self._call(exact, options)

    def _call(self, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        door = {
            "dense": attngen.attention, "varlen": attngen.attention_varlen, "paged": attngen.attention_paged,
        }[self.form.layout]  # fmt: skip
        return door(*tensors, *self.positions, **options)


def ready(
    form: Form, lengths: Sequence[int], *, rows: int = 1, heads: int = 8, kv_heads: int = 2, page_size: int = 16,
    seed: int = 0, **options: Any,
) -> Ready:  # fmt: skip
    """Return a call with random inputs: ``rows`` queries for each of the sequences, whose keys are ``lengths``."""
    batch, dim = len(lengths), form.head_dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, generator=generator).to(form.dtype)

    def placed(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.cuda() for t in tensors)

    own = on_gpu(own_of(form.variant, batch, rows, heads))
    options |= {"variant": form.variant, "return_lse": True, "package": PACKAGE, **own}
    q = random(batch, rows, heads)
    if form.layout == "paged":
        c = cache(lengths, page_size, kv_heads=kv_heads, head_dim=dim, dtype=form.dtype, seed=seed)
        return Ready(form, placed(q, c.k_pages, c.v_pages, c.page_table, c.seqused_k), (), options)
    if form.layout == "varlen":
        packed = placed(q.flatten(0, 1), random(sum(lengths), kv_heads), random(sum(lengths), kv_heads))
        starts = placed(starts_of([rows] * batch), starts_of(lengths))
        return Ready(form, (*packed, *starts), (rows, max(lengths)), options)
    longest = max(*lengths, 1)
    options["seqused_k"] = torch.tensor(lengths, dtype=torch.int32).cuda()
    return Ready(form, placed(q, random(batch, longest, kv_heads), random(batch, longest, kv_heads)), (), options)
