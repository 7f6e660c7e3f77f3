"""Many queries in 16 bits over caches in 8: the cache is widened, and an ordinary kernel gives the result."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.lab.verify.gpu import try_pinned
from attngen.operations import WIDEN
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.operations.widen import kernel as widen
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from tests.gpu.family import compiled_kernels

SPEC = """
schema: 1
package: wide
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: 128, dtype: [bf16, fp16], layout: [dense, paged]}
  - variant: causal
    head_dim: 128
    dtype: [bf16, fp16]
    kv_dtype: fp8_e4m3
    layout: [dense, paged]
    split_kv: true
  - {variant: causal, head_dim: 128, dtype: bf16, kv_dtype: fp8_e4m3, layout: paged, descale: page, split_kv: true}
  - {variant: causal, head_dim: 128, dtype: bf16, kv_dtype: fp8_e4m3, layout: paged, descale: token, split_kv: true}
  - {variant: causal, head_dim: 512, dtype: bf16, kv_dtype: [bf16, fp8_e4m3], layout: paged}
"""
KEYS, KV_HEADS, HEADS = 4096, 4, 16
LENGTHS = (4096, 2500)


def to_build() -> list[Prepared]:
    return prepare(load_spec_text(SPEC))


@cache
def kernels() -> list[Kernel]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    return compiled_kernels(to_build())


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    registry.clear()
    registry.add(package_of_kernels(kernels(), "tests/gpu/test_widen"))
    torch.manual_seed(2)
    yield
    registry.clear()


def a_call(
    dtype: torch.dtype, scales: str, page_size: int | None, queries: int = 700, head_dim: int = 128
) -> dict[str, Any]:
    """Return a call whose unused keys are NaN, and whose unused entries of the table name no page."""
    pages = (2, KEYS) if page_size is None else (2 * KEYS // page_size, page_size)
    shape = (*pages, KV_HEADS, head_dim)
    k, v = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    form = {"tensor": (), "head": (2, KV_HEADS), "page": (shape[0], KV_HEADS), "row": shape[:3]}[scales]
    given: dict[str, Any] = {
        "q": torch.randn(2, queries, HEADS, head_dim, device="cuda", dtype=dtype),
        "variant": "causal",
    }
    given |= {f"{name}_descale": torch.rand(form, device="cuda") + 0.5 for name in "kv"}
    given["seqused_k"] = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    if page_size is None:
        bits = (k.view(torch.uint8), v.view(torch.uint8))
        for each in bits:
            each[1, LENGTHS[1] :] = 0x7F
        return given | {"k": k, "v": v}
    table = torch.randperm(shape[0], device="cuda").int().view(2, -1)
    table[1, -(-LENGTHS[1] // page_size) :] = 2**30
    return given | {"k_pages": k, "v_pages": v, "page_table": table}


def ran(given: dict[str, Any], **more: Any) -> Tensor:
    call = attngen.attention_paged if "k_pages" in given else attngen.attention
    out = call(**given, **more)
    assert isinstance(out, Tensor)
    return out


def errors(out: Tensor, given: dict[str, Any]) -> float:
    """Return ‖out − reference‖ / ‖reference‖, of float64 on what the cache stands for."""
    number, den = 0.0, 0.0
    for b, length in enumerate(LENGTHS):
        keys = []
        for name in "kv":
            scale = given[f"{name}_descale"].double()
            if "k_pages" in given:
                pages = given[f"{name}_pages"]
                listed = given["page_table"][b, : -(-length // pages.shape[1])].long()
                rows = pages.view(torch.uint8)[listed].view(torch.float8_e4m3fn).double()
                of_page = scale.shape[0] == pages.shape[0] if scale.dim() else False
                if of_page:
                    rows = rows * (scale[listed] if scale.dim() == 3 else scale[listed][:, None])[..., None]
                rows = rows.flatten(0, 1)[:length]
            else:
                rows, of_page = given[name][b, :length].double(), False
            if not of_page:
                rows = rows * (scale[b][:, None] if scale.dim() else scale)
            keys.append(rows.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1))
        q = given["q"][b].double().transpose(0, 1)
        s = q @ keys[0].transpose(1, 2) / q.shape[-1] ** 0.5
        place = torch.arange(length, device="cuda")
        s = s.masked_fill(place[None] > place[length - q.shape[1] :, None], -torch.inf)
        wanted = (s.softmax(-1) @ keys[1]).transpose(0, 1)
        number += float((out[b].double() - wanted).square().sum())
        den += float(wanted.square().sum())
    return (number / den) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [None, 16, 256])
@pytest.mark.parametrize("scales", ["tensor", "head", "page", "row"])
def test_results_are_those_of_the_cache(scales: str, page_size: int | None, dtype: torch.dtype) -> None:
    if scales in ("page", "row") and (page_size is None or dtype == torch.float16):
        pytest.skip("no such kernel")
    given = a_call(dtype, scales, page_size)
    error = errors(ran(given), given)
    assert any(isinstance(each, widen.WidenedCall) for each in kernel_call.PREPARED.values())
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)


def test_head_dim_512_takes_the_kernel_of_16_bits() -> None:
    """The second call repeats what the first one, of a new kind of calls, selected."""
    given = a_call(torch.bfloat16, "head", 16, head_dim=512)
    first, second = ran(given), ran(given)
    named = {name.removesuffix("_pages"): value for name, value in given.items()}
    assert attngen.explain(**named).to_dict()["widened_by"] == "wide/widen_sm90a_bf16"
    assert errors(first, given) < 6e-3
    assert torch.equal(first, second)


def test_graphs_and_compiled_programs() -> None:
    given = a_call(torch.bfloat16, "head", 16)
    wanted = ran(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ran(given)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    given["seqused_k"][1] = 1900  # lengths are read on the device
    graph.replay()
    torch.testing.assert_close(out, ran(given), rtol=0, atol=0)
    compiled = torch.compile(lambda q: ran({**given, "q": q}) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(given["q"]), ran(given) * 2)


def test_packed_queries_and_log_sum_exps() -> None:
    given = a_call(torch.bfloat16, "head", 16)
    wanted, lse = attngen.attention_paged(**given, return_lse=True)
    starts = torch.tensor([0, 700, 1400], dtype=torch.int32, device="cuda")
    packed = {**given, "q": given["q"].flatten(0, 1), "cu_seqlens_q": starts, "max_seqlen_q": 700}
    out, other = attngen.attention_paged(**packed, return_lse=True)
    assert torch.equal(out, wanted.flatten(0, 1))
    torch.testing.assert_close(other.view(HEADS, 2, 700).transpose(0, 1), lse)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_verify_finds_nothing(dtype: str) -> None:
    (kernel,) = (one for one in kernels() if one.direction == WIDEN and one.dtype == dtype)
    trial = try_pinned(kernel, torch.device("cuda"), secrets.randbelow(2**31), small=False)
    assert not trial.problems, "\n".join(trial.problems)
