"""The kernels of the specs of ``specs/integrations/`` that tests call, and what these tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import resources
from attngen.build.pipeline import BuiltKernel, Prepared, compile_kernels, plans
from attngen.operations import APPEND, INDEX_SCORES, TOPK
from attngen.plan import Plan
from attngen.render import render
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import KernelSpec, load_spec, spec_hash
from attngen.store.index import Index, IndexEntry, write_index
from attngen.store.store import Store
from tests.gpu.family import for_this_gpu
from tests.integrations.transformers import families
from tests.sampling import exhaustive

BATCH, HEADS, KV_HEADS = 2, 4, 2


def _sdpa(spec: KernelSpec, plan: Plan) -> bool:
    return exhaustive() or plan.dtype_name != "fp16" or plan.head_dim_qk == 64


def _flash_attn(spec: KernelSpec, plan: Plan) -> bool:
    narrow = plan.head_dim_qk == 64
    if plan.dtype_name == "fp16":
        return (exhaustive() or narrow) and plan.layout == "dense" and not plan.ordered
    return plan.dtype_name == "bf16" and (narrow or (plan.layout == "dense" and not plan.ordered))


def _caches(spec: KernelSpec, plan: Plan) -> bool:
    wide = {"bf16": 128, "fp16": 64}.get(plan.dtype_name, 0)
    sixteen = spec.kv_dtype in (None, plan.dtype_name)
    return plan.direction == APPEND or (sixteen and plan.head_dim_qk in (64, wide) and wide > 0)


def _engines(spec: KernelSpec, plan: Plan) -> bool:
    if plan.direction != "forward":
        return True
    wide = 256 if plan.variant.name == "image_ranges_softcap" else 128
    in_8_bits = plan.descaled and plan.variant.name == "causal"  # also of head dim 512
    return plan.dtype_name == "bf16" and (plan.head_dim_qk == wide or (in_8_bits and plan.head_dim_qk == 512))


def _engines_sparse(spec: KernelSpec, plan: Plan) -> bool:
    return plan.direction in (INDEX_SCORES, TOPK) or (spec.variant.name == "listed_keys" and plan.dtype_name == "bf16")


def _natten(spec: KernelSpec, plan: Plan) -> bool:
    wide = 128 if plan.variant.name in ("natten", "full") else 64
    return plan.dtype_name == "bf16" and plan.head_dim_qk in (64, wide)


def _cuequivariance(spec: KernelSpec, plan: Plan) -> bool:
    if plan.dtype_name == "fp16":
        return plan.head_dim_qk == 32 and plan.variant.name in ("triangle", "triangle_unmasked")
    if plan.variant.name == "triangle_bf16" and plan.head_dim_qk in (24, 48):  # of attention_pair_bias
        return True
    bf16 = plan.head_dim_qk == 64 or (plan.head_dim_qk, plan.variant.name) == (16, "triangle")
    return plan.head_dim_qk == 32 or (bf16 and plan.variant.name != "triangle_unmasked")


def near_duplicate(parameters: Mapping[str, Any]) -> bool:
    """Whether a test with these parameters calls kernels that only ``-m exhaustive`` compiles."""
    dims = parameters.get("dim", parameters.get("dims", 64))
    return parameters.get("dtype") is torch.float16 and dims not in (64, (64, 64))


#: Of the kernels of each shipped spec those that tests and examples call: one of them all takes minutes to compile.
CALLED: dict[str, Callable[[KernelSpec, Plan], bool]] = {
    "cuequivariance": _cuequivariance,
    "sdpa": _sdpa,
    "flash_attn": _flash_attn,
    "flash_attn_kvcache": _caches,
    "engines": _engines,
    "engines_sparse": _engines_sparse,
    "natten": _natten,
    "transformers": lambda spec, plan: plan.dtype_name == "bf16" and plan.head_dim_qk == 64,
}


@cache
def called(spec: str) -> list[Prepared]:
    """Return the kernels of a shipped spec that are called, for the GPU that is here."""
    planned = plans(load_spec(resources.specs_dir() / f"integrations/{spec}.yaml"))
    return [for_this_gpu(Prepared(one, plan, render(plan))) for one, plan in planned if CALLED[spec](one, plan)]


def to_build() -> list[Prepared]:
    return [kernel for spec in CALLED for kernel in called(spec)]


@cache
def _built(spec: str) -> list[BuiltKernel]:
    """Compile what the cache lacks."""
    here = called(spec)
    built, failures = compile_kernels(here, store=Store())
    assert not failures, "\n".join(f"{failure.name}: {failure.error}" for failure in failures)
    return [built[kernel.plan.name] for kernel in here]


@cache
def package(spec: str) -> Package:
    """Return the package of the kernels of a shipped spec that are called."""
    kernels = [read_kernel(Store().path(kernel.key)) for kernel in _built(spec)]
    return package_of_kernels(kernels, "tests/gpu/packages")


def indexed(spec: str) -> None:
    """Leave the kernels of a shipped spec that are called in the cache as a build of the whole spec does."""
    path = resources.specs_dir() / f"integrations/{spec}.yaml"
    loaded = load_spec(path)
    rows = [(one.name, one.key, one.manifest) for one in _built(spec)]
    entries = tuple(IndexEntry(name, key, m["variant"]["name"], m["arch"], m["backend"]) for name, key, m in rows)
    inputs = {str(source.path): source.sha256 for source in loaded.sources}
    write_index(Store(), Index(loaded.package, str(path), spec_hash(loaded), inputs, entries))


def only_package(spec: str) -> Any:
    """Mark a test of the kernels of one spec, which takes them as the fixture ``only``."""
    return pytest.mark.parametrize("only", [spec], indirect=True)


def no_worse(actual: Tensor, plain: Tensor, exact: Tensor, times: float = 2, least: float = 0.0) -> None:
    """Assert that a result errs at most ``times`` as much as plain PyTorch in the same dtype, or by one unit of it.

    The unit is that of the largest value, or of ``least`` where that is larger. All have one shape; ``exact`` is in a
    wider dtype. A row that sees no key may be NaN in ``plain``.
    """
    assert actual.shape == exact.shape
    plain = plain.nan_to_num()
    assert torch.isfinite(actual).all()
    unit = torch.finfo(actual.dtype).eps * max(float(exact.abs().max()), least)
    allowed = max(times * float((plain.to(exact.dtype) - exact).abs().max()), unit)
    assert float((actual.to(exact.dtype) - exact).abs().max()) <= allowed


def qkv(rows: int, keys: int, dim: int, dtype: torch.dtype, *, heads_first: bool = False) -> list[Tensor]:
    """Return random q, k and v with fewer KV heads: (batch, seqlen, heads, head_dim), or heads first."""
    torch.manual_seed(rows * 1000 + keys)
    shapes = [(BATCH, rows, HEADS, dim), (BATCH, keys, KV_HEADS, dim), (BATCH, keys, KV_HEADS, dim)]
    made = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    return [t.transpose(1, 2).contiguous() for t in made] if heads_first else made


def flash_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return options of the CPU's tests with windows that are some tiles wide."""
    options = dict(given)
    shape = options.pop("alibi", None)
    if shape is not None:
        torch.manual_seed(5)
        options["alibi_slopes"] = torch.rand(shape, device="cuda") * 0.1
    if "window_size" in options:
        options["window_size"] = tuple(
            40 * side if side is not None and 0 < side < 1000 else side for side in options["window_size"]
        )
    return options


def larger(options: dict[str, Any], rows: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return options of the CPU's tests with masks for these lengths."""
    options = dict(options)
    mask = options.get("attn_mask")
    if mask is not None:
        sizes = {7: rows, 11: keys}
        repeats = [-(-sizes.get(n, n) // n) for n in mask.shape]
        mask = mask.repeat(repeats)[tuple(slice(sizes.get(n, n)) for n in mask.shape)].cuda()
        options["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
    return options


@cache
def model(family: str, implementation: str, *, all_experts: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model on the GPU."""
    return families.make(family, 64, implementation, "cuda", dtype, all_experts=all_experts)


@cache
def exact(family: str, *, all_experts: bool = False) -> Any:
    """Return the eager model in float32, of the same weights rounded to bf16."""
    rounded = families.make(family, 64, "eager", "cuda", all_experts=all_experts)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    return rounded
