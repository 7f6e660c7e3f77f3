"""Kernels that score keys, or blocks of them, for an index, against float64, and those that select scores, against a
stable sort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.errors import LoadError
from attngen.inspect.cases import Case, cases_of
from attngen.inspect.contract import Deviation
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.trial import Trial, try_cases
from attngen.operations import BLOCK_SCORES, INDEX_SCORES
from attngen.runtime.arguments.paging import Paging
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.index_scores import arguments as index_scores
from attngen.runtime.operations.index_scores import kernel as index_scores_kernel
from attngen.runtime.operations.index_scores.arguments import FIELDS, IndexScores
from attngen.runtime.operations.shared.records import addresses_of
from attngen.runtime.operations.topk import kernel as topk
from attngen.runtime.operations.topk.kernel import Topk

#: Heads of the calls of each case: those of the launches, and fewer; and keys of a block.
_HEADS = {INDEX_SCORES: (3, 64, 100), BLOCK_SCORES: (1, 3, 8)}
_BLOCK = 128

#: Largest difference from float64, in units of the sum of |w| |q| · |k|. Tensor cores sum products of 8 bits in fewer
#: bits than float32 has.
_ALLOWED = {"fp8_e4m3": 5e-4, "bf16": 2e-6, "fp16": 2e-6}


def try_index_scores(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel that scores keys on the cases of its layout; ``small`` picks the quick ones."""
    cases = [
        replace(case, heads=heads, kv_heads=1)
        for case in cases_of(kernel.layout, kernel.tile_m, kernel.tile_n, small=small)
        if kernel.layout == "paged" or len(set(case.q_lengths)) == 1
        for heads in _HEADS[kernel.direction]
    ]
    run = partial(_scored, kernel, torch.device(device))
    return try_cases([(f"{case.name}, {case.heads} heads", partial(run, case)) for case in cases], seed)


def _scored(kernel: Kernel, device: torch.device, case: Case, seed: int) -> Deviation:
    given = _scores_call(kernel, device, case, seed)
    bound = index_scores.check(given)
    prepared = index_scores_kernel.prepare_on(kernel, given, bound, drivers.current())
    if isinstance(prepared, str):
        if not all(index_scores.scores_shape(bound.call, given.block)):
            return Deviation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
        raise LoadError(prepared)
    scores = prepared.run(given, addresses_of(FIELDS.tensors_of(given)))
    exact = _in_double(given)
    weights = None if exact.weights is None else exact.weights.abs()
    of_magnitudes = exact._replace(q=exact.q.abs(), k=exact.k.abs(), weights=weights)
    wanted, largest = (index_scores.score(one, index_scores.check(one)) for one in (exact, of_magnitudes))
    hidden = wanted == -torch.inf
    wrong = ["other keys are hidden than the mask hides"] if not torch.equal(scores == -torch.inf, hidden) else []
    errors = ((scores.double() - wanted).abs() / (largest + 1e-6)).masked_fill(hidden, 0.0)
    worst = float(errors.max()) if errors.numel() else 0.0
    return Deviation(worst, _ALLOWED[kernel.dtype], 0.0, 0.0, 0.0, 0.0, 0.0, scores.numel(), 0, tuple(wrong))


def _scores_call(kernel: Kernel, device: torch.device, case: Case, seed: int) -> IndexScores:
    """A call of a case. What no query may see is NaN."""
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_qk)
    for calm in (1.0, 0.5, 0.0):
        inputs = make_inputs(kernel.variant, case, kernel.layout, element, device, seed, calm=calm)
        paged = inputs.paging is not None
        k = inputs.k[:, 0] if paged and inputs.page_layout == "HND" else inputs.k[:, :, 0]
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(inputs.q.shape[:-1], generator=generator, dtype=torch.float32, device="cpu").to(device)
        k_scale = (torch.rand(k.shape[:2], generator=generator, dtype=torch.float32, device="cpu") + 0.5).to(device)
        paging: Any = inputs.paging or Paging(None)
        given = IndexScores(
            inputs.q, k, weights, k_scale, inputs.seqused_k, paging.cu_seqlens_q, paging.page_table, None,
            paging.max_seqlen_q, kernel.variant, None, tuple(inputs.arguments.items()),
        )  # fmt: skip
        if kernel.direction == BLOCK_SCORES:
            given = given._replace(weights=None, k_scale=None, block=_BLOCK)
        try:
            index_scores.score(given, index_scores.check(given))
        except IndexError:  # the mask reads a tensor beyond its extent
            if not calm:
                raise
        else:
            break
    return given


def _in_double(given: IndexScores) -> IndexScores:
    weights, k_scale = (None if tensor is None else tensor.double() for tensor in (given.weights, given.k_scale))
    return given._replace(q=given.q.double(), k=given.k.double(), weights=weights, k_scale=k_scale)


def try_topk(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel that selects scores on rows of many kinds; ``small``: short ones."""
    run = partial(_selected, kernel, torch.device(device))
    cases = [
        (f"{name}, {columns} columns, k {k}", partial(run, name, columns, k))
        for columns in ((37, 3000) if small else (1, 256, 2048, 20001, 131075))
        if columns <= topk.most_columns(kernel)
        for k in (1, 2048, max(launch.tile_m for launch in kernel.launches))
        for name, _ in _rows(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    ]
    return try_cases(cases, seed)


def _rows(normal: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "random", normal
    yield "ties", (normal * 2).round()
    yield "ascending", normal.sort(dim=1).values
    yield "hidden", normal.masked_fill(normal < 0.5, -torch.inf)
    yield "not finite", torch.where(normal > 1.5, torch.where(normal > 2, torch.nan, torch.inf), normal)


def _selected(kernel: Kernel, device: torch.device, name: str, columns: int, k: int, seed: int) -> Deviation:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((3, columns), generator=generator, dtype=torch.float32, device="cpu")
    scores = dict(_rows(normal))[name].to(device)
    lengths = torch.randint(0, columns + 1, (3,), generator=generator, dtype=torch.int32, device="cpu")
    lengths[0] = columns
    call = Topk(scores, k, lengths.to(device))
    prepared = topk.prepare_on(kernel, call, topk.check(call), drivers.current())
    if isinstance(prepared, str):
        raise LoadError(prepared)
    actual = prepared.run(call, addresses_of(topk.FIELDS.tensors_of(call)))
    on_cpu = Topk(scores.cpu(), k, lengths)
    expected = topk.select(on_cpu, topk.check(on_cpu))
    others = int((actual.cpu() != expected).sum())
    wrong = (f"{others} of {actual.numel()} indices are others than a stable sort's",) if others else ()
    return Deviation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, actual.numel(), 0, wrong)
