"""Keys in pages, kernel by kernel of ``specs/serving.yaml`` and more: any page size, order of axes and of pages,
appended tokens, shared pages; the bits do not depend on where keys lie; nothing that is hidden matters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import resources
from attngen.build.pipeline import Prepared, plans
from attngen.plan import Plan
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import KernelSpec, load_spec, load_spec_text
from tests.gpu.family import compiled_kernels, for_this_gpu, only_known, rare, rendered, same, some_of
from tests.runtime.pages import Cache, starts_of
from tests.runtime.pages import cache as pages_of
from tests.sampling import sampled

DEVICE = "cuda"
PACKAGE = "attngen_serving"
E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: Kernels beyond the shipped spec: a tile map, padded head dims, fp16, other tiles and depths, a chunked mask.
MORE = """
schema: 1
package: attngen_serving
arch: [sm90a]
kernels:
  - {variant: allowed, head_dim: 64, layout: paged, backend: cuda}
  - {variant: chunked, head_dim: 64, layout: paged, backend: cuda, tile: {m: 192, n: 48}}
  - {variant: causal, head_dim: [40, 96, 256, {qk: 192, v: 128}], layout: paged, backend: cuda}
  - variant: causal
    head_dim: 128
    dtype: fp16
    layout: paged
    backend: cuda
    pipeline: {stages: 3}
    tile: {m: 128, n: 64}
  - variant: [causal, sliding_window]
    head_dim: 80
    layout: paged
    backend: cuda
    tile: {m: 192, n: 80}
    persistent: false
"""

PAGE_SIZES = {"NHD": (1, 16, 48, 64, 128, 256), "HND": (1, 7, 16, 32, 80, 512)}


def _planned() -> list[tuple[KernelSpec, Plan]]:
    """Return the kernels over pages, also those whose blocks share the keys.

    Kernels with q in 8 bits are in ``test_caches_8_bits.py``.
    """
    specs = (load_spec(resources.specs_dir() / "serving.yaml"), load_spec_text(MORE))
    kernels = [(one, plan) for spec in specs for one, plan in plans(spec) if plan.direction == "forward"]
    return [(one, plan) for one, plan in kernels if plan.layout == "paged" and plan.dtype_name in DTYPES]


_PLANNED = {plan.name: (spec, plan) for spec, plan in _planned()}
#: Near-duplicates, which only ``-m exhaustive`` compiles and runs.
LEFT_OUT = rare({name: plan for name, (_, plan) in _PLANNED.items()})


def to_build() -> list[Prepared]:
    return list(rendered(some_of(_PLANNED, LEFT_OUT)).values())


NAMES = sorted(_PLANNED)


@cache
def kernels() -> dict[str, Kernel]:
    """Compile what the cache lacks, for the GPU that is here."""
    here = {kernel.plan.name: for_this_gpu(kernel) for kernel in to_build()}
    return dict(zip(here, compiled_kernels(list(here.values())), strict=True))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with only_known():
        yield


def only(name: str) -> Kernel:
    """Make one kernel known, and no other."""
    kernel = kernels()[name]
    registry.clear()
    registry.add(package_of_kernels([kernel], "tests/gpu/test_pages"))
    return kernel


def arguments_of(kernel: Kernel, batch: int, rows: int, keys: int, heads: int) -> dict[str, Any]:
    """Return the variant's own arguments, for so many rows and keys at most."""
    generator = torch.Generator().manual_seed(rows)
    tensors: dict[str, Any] = {
        "slope": torch.rand(heads, generator=generator) / 8,
        "sink": torch.randn(heads, generator=generator),
        "sinks": torch.randn(heads, generator=generator),
        "tree": torch.rand(batch, rows, rows, generator=generator) < 0.6,
        "allowed": torch.rand(rows, keys, generator=generator) < 0.3,
    }
    scalars = {"window": 100, "cap": 20.0, "chunk": 64}
    given: dict[str, Any] = {}
    for tensor in kernel.variant.tensors:
        made = tensors[tensor.name]
        wanted = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "bool": "bool"}.get(tensor.dtype, tensor.dtype))
        shape = [
            {"b": batch, "h": heads, "seqlen_q": rows, "seqlen_k": keys}.get(str(axis), 1) for axis in tensor.shape
        ]
        while made.dim() < len(shape):
            made = made[None]
        given[tensor.name] = made.expand(shape).contiguous().to(DEVICE, wanted)
    for scalar in kernel.variant.scalars:
        if scalar.const is None:
            given[scalar.name] = scalars[scalar.name]
    return given


class Run:
    """One kernel on sequences whose keys lie in pages."""

    def __init__(
        self, name: str, rows: list[int], lengths: list[int], page_size: int, *, page_layout: str = "NHD",
        uniform: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.kernel = kernel = only(name)
        self.dtype = DTYPES[kernel.dtype]
        self.eight = kernel.dtype_of("k").torch == "float8_e4m3fn"
        self.rows, self.uniform, self.page_layout = rows, uniform, page_layout
        self.heads, self.kv_heads = 8, 2
        self.cache: Cache = pages_of(
            lengths, page_size, kv_heads=self.kv_heads, head_dim=kernel.head_dim_qk, head_dim_v=kernel.head_dim_v,
            page_layout=page_layout, dtype=E4M3 if self.eight else self.dtype, seed=seed,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed + 1)
        self.q = torch.randn(sum(rows), self.heads, kernel.head_dim_qk, generator=generator).to(DEVICE, self.dtype)
        self.keys = self.cache.page_table.shape[1] * page_size
        self.own = arguments_of(kernel, len(rows), max(rows), self.keys, self.heads)

    def __call__(self, cache: Cache | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of each row."""
        pages = cache or self.cache
        k, v, table, used = (t.to(DEVICE) for t in (pages.k_pages, pages.v_pages, pages.page_table, pages.seqused_k))
        q = self.q
        if self.eight:  # the same number for all, so that bits do not depend on where keys lie
            rows = k.shape[0] if self.kernel.name.endswith("pagescales") else len(self.rows)
            scales = torch.ones(rows, self.kv_heads, device=DEVICE)
            options |= {"k_descale": 0.75 * scales, "v_descale": 0.5 * scales}
        if options.get("backend") == "reference":
            q = q.double()
            k, v = (t if self.eight else t.double() for t in (k, v))
        packing: dict[str, Any] = {"cu_seqlens_q": starts_of(self.rows).to(DEVICE), "max_seqlen_q": max(self.rows)}
        if self.uniform:
            q, packing = q.unflatten(0, (len(self.rows), self.rows[0])), {}
        out, lse = attngen.attention_paged(
            q, k, v, table, used, variant=self.kernel.variant_name, package=PACKAGE, page_layout=self.page_layout,
            return_lse=True, **packing, **self.own, **options,
        )  # fmt: skip
        if self.uniform:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out, lse

    def check(self) -> None:
        """Compare with float64."""
        (out, lse), (wanted, wanted_lse) = self(), self(backend="reference")
        assert torch.isfinite(out).all()
        assert float((out.double() - wanted).abs().max()) < 2e-2
        dead = wanted_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, dead)
        assert (out[dead.all(0)] == 0).all()
        torch.testing.assert_close(lse[~dead].double(), wanted_lse[~dead].double(), rtol=1e-4, atol=2e-3)
        again = self()
        assert same((out, lse), again)


@sampled(name=NAMES, page_layout=["NHD", "HND"])
def test_page_sizes(name: str, page_layout: str) -> None:
    """Ragged queries, lengths of 0, of 1, and across tiles; more queries than keys; rows after the end are NaN."""
    for page_size in PAGE_SIZES[page_layout]:
        Run(
            name, [130, 3, 0, 64, 17], [515, 1, 40, 0, 1234], page_size, page_layout=page_layout, seed=page_size
        ).check()


@sampled(name=NAMES, tokens=[1, 4, 16, 33, 64])
def test_appended_tokens(name: str, tokens: int) -> None:
    """A few new tokens beside caches of any lengths: as many to each sequence, without cu_seqlens_q, or not."""
    lengths = [tokens, 4096, tokens + 63, 2049]
    Run(name, [tokens] * 4, lengths, 16, uniform=True, seed=tokens).check()
    Run(name, [tokens, 1, tokens, 0], lengths, 64, page_layout="HND", seed=tokens).check()


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_where_keys_lie(name: str) -> None:
    """Any page size, in either order, shuffled again, with a wider table: the same boxes of keys are multiplied."""
    first = None
    for page_size in (16, 1, 48, 64, 128, 256):
        for page_layout in ("NHD", "HND"):
            run = Run(name, [70, 9], [517, 300], page_size, page_layout=page_layout)
            if "seqlen_k" in {str(axis) for tensor in run.kernel.variant.tensors for axis in tensor.shape}:
                pytest.skip("its own tensor has the shape of the table")
            results = run()
            first = first or results
            assert same(results, first), (page_size, page_layout)


@pytest.mark.parametrize("name", [name for name in NAMES if "sliding_window" in name])
def test_a_window_reads_its_own_pages_alone(name: str) -> None:
    """Pages before the tiles of the window may hold anything, and entries of the table may be no pages."""
    run = Run(name, [33, 1], [4000, 2500], 64)
    results = run()
    table, k, v = run.cache.page_table.clone(), run.cache.k_pages.clone(), run.cache.v_pages.clone()
    for b, length in enumerate((4000, 2500)):
        seen = (length - run.rows[b] - 100 - 2 * run.kernel.tile_n) // 64
        assert seen > 10
        for page in table[b, :seen].tolist():
            k[page], v[page] = torch.nan, torch.nan
        table[b, :seen] = 2**31 - 1
    changed = Cache(k, v, table, run.cache.seqused_k, run.cache.keys, run.cache.values)
    assert same(run(changed), results)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_share_pages(name: str) -> None:
    """The pages of a common beginning stand in several rows of a table."""
    run = Run(name, [20, 20], [640, 640], 64)
    table, keys = run.cache.page_table.clone(), run.cache
    table[1, :5] = table[0, :5]
    shared = Cache(keys.k_pages, keys.v_pages, table, keys.seqused_k, keys.keys, keys.values)
    out, _ = run(shared)
    wanted, _ = run(shared, backend="reference")
    assert float((out.double() - wanted).abs().max()) < 2e-2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LEFT_OUT][:4])
def test_numbers_that_are_no_pages_read_nothing_outside(name: str) -> None:
    """Wrong tables are the caller's fault; their keys count as zeros, and other sequences do not notice."""
    run = Run(name, [20, 20], [640, 640], 64)
    results = run()
    table, keys = run.cache.page_table.clone(), run.cache
    for wrong in (-1, -(2**31), 2**31 - 1, keys.k_pages.shape[0]):
        table[1, 3] = wrong
        out, lse = run(Cache(keys.k_pages, keys.v_pages, table, keys.seqused_k, keys.keys, keys.values))
        assert same((out[:20], lse[:, :20]), (results[0][:20], results[1][:, :20]))
        assert torch.isfinite(out).all()
