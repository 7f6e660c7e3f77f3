"""The decode loop of docs/serving.md on a GPU, its graph, replayed while lengths grow, and steps of other sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import attngen
from attngen import resources
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.arguments.given import Given
from attngen.runtime.operations.attention import mixed
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec
from tests.docs.blocks import ROOT, blocks
from tests.gpu.family import compiled_kernels, for_this_gpu, only_known


def to_build() -> list[Prepared]:
    """Return the causal kernels of ``specs/serving.yaml`` that read pages, of head dimension 128."""
    return [
        kernel for kernel in prepare(load_spec(resources.specs_dir() / "serving.yaml"))
        if kernel.plan.layout == "paged" and kernel.plan.variant.name == "causal" and "d128" in kernel.plan.name
    ]  # fmt: skip


@pytest.fixture
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    wanted = [for_this_gpu(kernel) for kernel in to_build()]
    assert wanted
    with only_known(package_of_kernels(compiled_kernels(wanted), "tests/gpu")):
        yield


def test_the_loop_and_its_graph(kernels: None) -> None:
    shown: dict[str, Any] = {}
    exec(compile(blocks(ROOT / "docs/serving.md", "python")[0].text, "docs/serving.md", "exec"), shown)
    lengths = shown["lengths"]
    for turn in range(40):
        for name in "qkv":
            shown[name].normal_()
        shown["graph"].replay()
        assert lengths.tolist() == [5 + turn] * 4
        wanted = attngen.attention_paged(
            shown["q"], *shown["pages"], shown["page_table"], lengths, variant="causal", backend="reference"
        )
        torch.testing.assert_close(shown["out"].float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_steps_whose_sizes_never_repeat(kernels: None) -> None:
    """Decoding and chunks of prompts in one batch, which is padded by sequences without keys."""
    rng = random.Random(0)
    k, v = (torch.randn(600, 16, 2, 128, device="cuda").bfloat16() for _ in range(2))
    for step in range(30):
        rows = [1] * rng.randint(1, 40) + [rng.randint(1, 400)] * (step % 2)
        keys = [rng.randint(n, 1500) for n in rows]
        rows += [1] * (step % 5)
        keys += [0] * (step % 5)
        table = torch.randint(0, 600, (len(rows), -(-max(keys) // 16) + step % 3), dtype=torch.int32, device="cuda")
        lengths = torch.tensor(keys, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device="cuda")
        q = torch.randn(sum(rows), 8, 128, device="cuda").bfloat16()
        out = torch.full_like(q, torch.nan)
        step_of = {"cu_seqlens_q": starts, "max_seqlen_q": max(rows), "variant": "causal", "return_lse": True}
        ours, lse = attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of)
        wanted, wanted_lse = attngen.attention_paged(q, k, v, table, lengths, backend="reference", **step_of)
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
        step_of |= {"return_lse": False, "num_decodes": next((b for b, n in enumerate(rows) if n > 1), len(rows))}
        behind = next((b for b, n in enumerate(reversed(rows)) if n > 1), len(rows))
        for decodes in (*[step_of["num_decodes"]] * 3, -behind):  # the third is recognized by its tensors
            out = torch.full_like(q, torch.nan)
            step_of["num_decodes"] = decodes
            assert attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of) is out
            torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)


#: Queries of the sequences of a batch: decoding in any place, drafts, chunks of prompts, none at all.
ROWS = {
    "one prompt behind": [1] * 40 + [300],
    "in any order": [1, 500, 1, 0, 4, 1, 5, 1, 17, 1, 1, 130, 1],
    "drafts": [4] * 20 + [3, 2, 400],
    "more than a warp of masks": [1] * 1000 + [250, 90, 1, 1, 77],
    "no prompt": [1] * 30 + [0, 4],
    "no sequence that decodes": [300, 5, 6, 7, 8, 9],
}


@pytest.mark.parametrize("name", ROWS)
def test_kernels_find_sequences_by_length(kernels: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without ``num_decodes`` two launches divide a batch among them, also in a graph that serves other lengths."""
    rows = ROWS[name]
    rng, batch = random.Random(name), len(rows)
    by_length: list[int] = []
    attend = mixed.attend_by_length

    def noted(run: Any, few: int, given: Given) -> Any:
        by_length.append(few)
        return attend(run, few, given)

    monkeypatch.setattr(mixed, "attend_by_length", noted)
    pages = 12 * batch
    k, v = (torch.randn(pages, 16, 2, 128, device="cuda").bfloat16() for _ in range(2))
    table = torch.randint(0, pages, (batch, 40), dtype=torch.int32, device="cuda")
    q = torch.randn(sum(rows), 8, 128, device="cuda").bfloat16()
    out = torch.empty_like(q)
    starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([rng.randint(n, 640) for n in rows], dtype=torch.int32, device="cuda")
    step_of: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 500, "variant": "causal"}

    def check() -> None:
        torch.cuda.synchronize()
        for b, (begin, end) in enumerate(pairwise(starts.tolist())):
            count, rows_of = int(lengths[b]), end - begin
            if rows_of:
                of_keys = (x[table[b].long()].flatten(0, 1)[:count].transpose(0, 1).double() for x in (k, v))
                keys, values = (x.repeat_interleave(4, 0) for x in of_keys)
                s = q[begin:end].transpose(0, 1).double() @ keys.transpose(1, 2) * 128**-0.5
                later = torch.ones(rows_of, count, dtype=torch.bool, device="cuda").triu(count - rows_of + 1)
                wanted = (s.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1)
                torch.testing.assert_close(out[begin:end].double(), wanted, rtol=2e-2, atol=2e-2)

    for _ in range(5):
        out.fill_(torch.nan)
        attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of)
        check()
    if mixed.few_queries(Given(q, k, v, cu_seqlens_q=starts, page_table=table, seqused_k=lengths, max_seqlen_q=500,
                               variant="causal", form="paged", layout="NHD")):  # fmt: skip
        assert by_length == [4] * len(by_length)
        assert 0 < len(by_length) < 5, "batches are recognized as a whole after some"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of)
    others = list(reversed(rows))
    starts.copy_(torch.tensor([0, *accumulate(others)], dtype=torch.int32))
    lengths.copy_(torch.tensor([rng.randint(n, 640) for n in others], dtype=torch.int32))
    out.fill_(torch.nan)
    graph.replay()
    check()
