"""Appending keys and values to a cache, with rotated queries: calls of ``append_kv``, and their expected results."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.lab.bench.serving.cells import DTYPE, HEAD_DIM, CacheShape, Problem
from attngen.lab.bench.timing import Contender, input_sets
from attngen.operations import APPEND_VARIANT
from attngen.runtime.operations.append import in_torch as append_torch
from attngen.runtime.operations.append.arguments import Append, check
from attngen.runtime.operations.append.call import append_kv
from attngen.runtime.registry.lookup import registry


class Appending:
    """New tokens of a problem, in as many sets as exceed twice the L2 cache, and one cache with places for all."""

    def __init__(
        self, problem: Problem, form: CacheShape, device: torch.device, l2_bytes: int, generator: torch.Generator
    ) -> None:
        room, new, batch = max(problem.lengths), problem.seqlen_q, problem.batch
        self.sets = min(input_sets(problem.cache_bytes, l2_bytes), room // new)
        dtype = getattr(torch, dtype_row(DTYPE).torch)

        def tokens(heads: int) -> list[Tensor]:
            shape = (batch, new, heads, HEAD_DIM)
            return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(self.sets)]

        size = form.page_size or room
        shape = (batch * room // size, size, problem.kv_heads, HEAD_DIM)
        k_cache, v_cache = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        table = None
        if form.page_size is not None:
            table = torch.randperm(shape[0], dtype=torch.int32, device="cpu").view(batch, -1).to(device)
        angles = torch.randn(room, HEAD_DIM // 2, generator=generator, device=device, dtype=torch.float32)
        out = torch.empty(batch, new, problem.heads, HEAD_DIM, device=device, dtype=dtype)
        self.calls = [
            Append(
                k, v, k_cache, v_cache, torch.full((batch,), number * new, device=device, dtype=torch.int32), table,
                None, None, None, "NHD", q, out, angles.cos(), angles.sin(), False, None,
            )
            for number, (k, v, q) in enumerate(
                zip(tokens(problem.kv_heads), tokens(problem.kv_heads), tokens(problem.heads), strict=True)
            )
        ]  # fmt: skip

    def contender(self, name: str) -> Contender:
        """The calls, whose result is the rotated queries."""
        return Contender(
            name,
            [partial(append_kv, **call._asdict()) for call in self.calls],
        )

    def error(self, out: Tensor) -> float:
        """Count the numbers written by the last set that differ from those of plain torch."""
        call = self.calls[-1]
        caches = call.k_cache, call.v_cache
        plain = call._replace(k_cache=caches[0].clone(), v_cache=caches[1].clone(), q_out=torch.empty_like(out))
        append_torch.append(plain, check(plain))
        pairs = zip((out, *caches), (plain.q_out, plain.k_cache, plain.v_cache), strict=True)
        return float(sum(int((actual != expected).sum()) for actual, expected in pairs))


def kernel_of(package: str) -> str | None:
    """The kernel of a package that appends; None if it has none."""
    for _, known in registry.packages():
        if known.name == package:
            return next((kernel.full_name for kernel in known.kernels(APPEND_VARIANT)), None)
    return None
