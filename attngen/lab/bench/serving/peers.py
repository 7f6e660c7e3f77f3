"""Serving libraries, as far as they are installed: the forms of cache that each takes, and how it is called.

All that a library lets a program plan before it decodes, such as schedules and splits, is planned outside of the timed
region.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from attngen.lab.bench.peers import output_of
from attngen.lab.bench.serving.cells import HEAD_DIM, CacheShape, Problem
from attngen.lab.bench.serving.contents import ServingInputs
from attngen.lab.bench.timing import Contender

#: Bytes that FlashInfer's kernels get for partial results, and for semaphores, which start as zeros.
_WORKSPACE, _SEMAPHORES = 512 * 2**20, 8 * 2**20


class ServingPeer(Protocol):
    """A library beside attngen, on causal problems only."""

    @property
    def name(self) -> str:
        """The name of its rows."""

    @property
    def latent(self) -> bool:
        """Whether it solves problems of latent attention, and no others."""

    def missing(self) -> str | None:
        """Reason why it cannot be used here at all, or None. Imports nothing."""

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """Forms of cache in which it is measured; none if it does not support a problem."""

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """Its calls; this and the first of them raise whatever the library raises for what it lacks."""


def serving_peers() -> tuple[ServingPeer, ...]:
    """All libraries in the order of their rows."""
    return (
        ServingSdpa("SDPA flash", "FLASH_ATTENTION"),
        ServingSdpa("SDPA cuDNN", "CUDNN_ATTENTION"),
        ServingFlashAttention3(),
        FlashInferDecode("FlashInfer", {"use_tensor_cores": True, "backend": "fa2"}, (16, 64)),
        FlashInferDecode("cuDNN by FlashInfer", {"backend": "cudnn"}, (64,)),
        Xqa(),
        FlashInferPrefill("FlashInfer fa2", "fa2"),
        FlashInferPrefill("FlashInfer fa3", "fa3"),
        CudnnPrefill(),
        FlashMla(),
    )


def _lacking(*modules: str) -> str | None:
    if any(find_spec(module) is not None for module in modules):
        return None
    return f"not installed: {' or '.join(modules)}"


@dataclass(frozen=True)
class ServingSdpa:
    """torch's own, over whole dense caches: a single query, or as many queries as keys."""

    name: str
    backend: str
    latent: ClassVar[bool] = False

    def missing(self) -> str | None:
        """See ``ServingPeer``."""
        return None

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``. Its causal mask is aligned at the first key."""
        alike = problem.uniform and problem.seqlen_q in (1, problem.lengths[0])
        return (CacheShape(heads_first=True),) if alike else ()

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        problem = contents.problem
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=problem.seqlen_q > 1, enable_gqa=True
        )
        calls = []
        for number, q in enumerate(contents.queries):
            cached = (each[:, :, : problem.lengths[0]] for each in contents.cache(number, form))
            calls.append(partial(attend, q.transpose(1, 2), *cached))
        session = partial(sdpa_kernel, getattr(SDPBackend, self.backend))
        return Contender(self.name, calls, session, lambda out: out.transpose(1, 2))


class ServingFlashAttention3:
    """FlashAttention-3: a build of its sources has pages, the wheel ``fa3-fwd`` only dense caches."""

    name, latent = "FlashAttention-3", False
    _WITH_PAGES, _WHEEL = "flash_attn_interface", "fa3_fwd_interface"

    def missing(self) -> str | None:
        """See ``ServingPeer``."""
        return _lacking(self._WITH_PAGES, self._WHEEL)

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        sizes = (None, 16, 64, 256) if find_spec(self._WITH_PAGES) is not None else (None,)
        return tuple(CacheShape(size) for size in sizes)

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        library = import_module(self._WITH_PAGES if find_spec(self._WITH_PAGES) is not None else self._WHEEL)
        problem = contents.problem
        causal = problem.seqlen_q > 1
        given: dict[str, Any] = {"cache_seqlens": contents.lengths, "causal": causal}
        room = contents.room
        if form.page_size is not None:
            given["page_table"] = contents.pages(form.page_size).table
            room = given["page_table"].shape[1] * form.page_size
        if problem.seqlen_q <= 64:
            paged = {} if form.page_size is None else {"page_size": form.page_size}
            given["scheduler_metadata"] = library.get_scheduler_metadata(
                problem.batch, problem.seqlen_q, room, problem.heads, problem.kv_heads, HEAD_DIM, contents.lengths,
                qkv_dtype=contents.queries[0].dtype, causal=causal, **paged,
            )  # fmt: skip
        attend = partial(library.flash_attn_with_kvcache, **given)
        calls = [partial(attend, q, *contents.cache(number, form)) for number, q in enumerate(contents.queries)]
        return Contender(self.name, calls, as_bshd=output_of)


class _FlashInfer:
    """Common base of the calls of FlashInfer."""

    latent: ClassVar[bool] = False

    def missing(self) -> str | None:
        """See ``ServingPeer``."""
        return _lacking("flashinfer")


@dataclass(frozen=True)
class FlashInferDecode(_FlashInfer):
    """FlashInfer's decoding over pages, by its own kernels or by cuDNN's."""

    name: str
    options: dict[str, Any]
    sizes: tuple[int, ...]

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        return tuple(CacheShape(size) for size in self.sizes) if problem.seqlen_q == 1 else ()

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        assert form.page_size is not None
        problem, pages = contents.problem, contents.pages(form.page_size)
        dtype = contents.queries[0].dtype
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            _scratch(contents.device, _WORKSPACE), "NHD", **self.options
        )
        more = {"block_tables": pages.table, "seq_lens": contents.lengths} if self.options["backend"] == "cudnn" else {}
        wrapper.plan(
            pages.starts, pages.listed, pages.last, problem.heads, problem.kv_heads, HEAD_DIM, form.page_size,
            q_data_type=dtype, kv_data_type=dtype, **more,
        )  # fmt: skip
        return _planned(self.name, wrapper, contents, form)


class Xqa(_FlashInfer):
    """XQA, TensorRT-LLM's decoding, as FlashInfer has it."""

    name = "XQA"

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        return (CacheShape(64, heads_first=True),) if problem.seqlen_q == 1 else ()

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        assert form.page_size is not None
        problem, table = contents.problem, contents.pages(form.page_size).table
        attend = import_module("flashinfer").xqa
        workspace = _scratch(contents.device, _WORKSPACE, "xqa")
        semaphores = _scratch(contents.device, _SEMAPHORES, "semaphores")
        lengths = contents.lengths.view(-1, 1)
        out = torch.empty_like(contents.queries[0])

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attend(
                q, k, v, table, lengths, out, workspace, semaphores, problem.kv_heads, form.page_size, kv_layout="HND"
            )
            return out

        calls = [partial(call, q, *contents.cache(number, form)) for number, q in enumerate(contents.queries)]
        return Contender(self.name, calls)


@dataclass(frozen=True)
class FlashInferPrefill(_FlashInfer):
    """FlashInfer's attention of several queries over pages, by one of its own kernels."""

    name: str
    backend: str

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        return (CacheShape(16), CacheShape(64)) if problem.seqlen_q > 1 else ()

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        return _planned(self.name, _prefill(contents, form, self.backend), contents, form)


class CudnnPrefill(_FlashInfer):
    """cuDNN's attention of several queries over pages, as FlashInfer calls it."""

    name = "cuDNN by FlashInfer"

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        return (CacheShape(64),) if problem.seqlen_q > 1 else ()

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        assert form.page_size is not None
        problem = contents.problem
        queries = torch.full((problem.batch, 1, 1, 1), problem.seqlen_q, device=contents.device, dtype=torch.int32)
        wrapper = _prefill(
            contents, form, "cudnn", seq_lens=contents.lengths.view(-1, 1, 1, 1), seq_lens_q=queries,
            block_tables=contents.pages(form.page_size).table, max_token_per_sequence=problem.seqlen_q,
            max_sequence_kv=max(problem.lengths),
        )  # fmt: skip
        return _planned(self.name, wrapper, contents, form)


class FlashMla:
    """FlashMLA's decoding over pages of 64 latent rows; its schedule is made by the first call."""

    name, latent = "FlashMLA", True

    def missing(self) -> str | None:
        """See ``ServingPeer``."""
        return _lacking("flash_mla")

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        """See ``ServingPeer``."""
        return (CacheShape(64),)

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        """See ``ServingPeer``."""
        assert form.page_size is not None
        problem, table = contents.problem, contents.pages(form.page_size).table
        library = import_module("flash_mla")
        # newer versions ignore the arguments
        rows = problem.seqlen_q * problem.heads // problem.kv_heads
        schedule = library.get_mla_metadata(contents.lengths, rows, problem.kv_heads)
        calls = [
            partial(
                library.flash_mla_with_kvcache, q, contents.cache(number, form)[0], table, contents.lengths,
                problem.head_dims[1], *schedule, causal=problem.seqlen_q > 1,
            )
            for number, q in enumerate(contents.queries)
        ]  # fmt: skip
        return Contender(self.name, calls, as_bshd=output_of)


def _prefill(contents: ServingInputs, form: CacheShape, backend: str, **more: Any) -> Any:
    """FlashInfer's object for causal attention of several queries over pages, planned."""
    assert form.page_size is not None
    problem, pages = contents.problem, contents.pages(form.page_size)
    dtype = contents.queries[0].dtype
    starts = torch.arange(problem.batch + 1, device=contents.device, dtype=torch.int32) * problem.seqlen_q
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        _scratch(contents.device, _WORKSPACE), "NHD", backend=backend
    )
    wrapper.plan(
        starts, pages.starts, pages.listed, pages.last, problem.heads, problem.kv_heads, HEAD_DIM, form.page_size,
        causal=True, q_data_type=dtype, kv_data_type=dtype, **more,
    )  # fmt: skip
    return wrapper


def _planned(name: str, wrapper: Any, contents: ServingInputs, form: CacheShape) -> Contender:
    """The calls of one of FlashInfer's planned objects, which take queries one after the other."""
    rows = [q.flatten(0, 1) for q in contents.queries]
    out = torch.empty_like(rows[0])
    calls = [partial(wrapper.run, q, contents.cache(number, form), out=out) for number, q in enumerate(rows)]
    problem = contents.problem
    return Contender(name, calls, as_bshd=lambda out: out.view(problem.batch, problem.seqlen_q, problem.heads, -1))


@cache
def _scratch(device: torch.device, size: int, purpose: str = "") -> Tensor:
    """Memory that calls share, zeros at first: one tensor for each purpose."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def missing(peers: Iterable[ServingPeer]) -> dict[str, str]:
    """The libraries that cannot be used here at all, with the reasons."""
    return {peer.name: reason for peer in peers if (reason := peer.missing()) is not None}
