"""Kernels of a spec as contenders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attngen.build.pipeline import Prepared
from attngen.errors import CallError
from attngen.lab.bench import kernels as bench_kernels
from attngen.lab.bench.kernels import chosen, teams
from attngen.lab.verify.interpreter import kernel_of
from attngen.plan import plan
from attngen.runtime.registry.lookup import registry
from attngen.schema import expand, load_spec_text, preset
from tests.lab.bench_support import workload_of


def test_kernels_that_compute_the_same_make_a_team(prepared: list[Prepared]) -> None:
    reasons = [bench_kernels.reason_against(kernel.plan, 90) for kernel in prepared]
    assert reasons.count(None) == 4
    assert reasons.count("only dense calls are measured") == 1
    assert reasons.count("built for sm80, this GPU is sm90") == 1
    assert [bench_kernels.reason_against(kernel.plan, None) for kernel in prepared].count(None) == 5
    causal, full, alibi = teams([kernel for kernel, reason in zip(prepared, reasons, strict=True) if reason is None])
    assert (causal.variant, causal.dtype, causal.head_dim_qk) == (preset("causal"), "fp16", 32)
    first, second = causal.members
    assert first.startswith("attngen triton m")
    assert second.startswith("attngen triton m16n16")
    assert list(full.members) == list(alibi.members) == ["attngen triton"]


def test_backends_are_named_apart(prepared: list[Prepared]) -> None:
    (full,) = [kernel for kernel in prepared if kernel.plan.variant.name == "full"]
    other = replace(full, plan=replace(full.plan, backend="cuda", name=full.plan.name + "_other"))
    (team,) = teams([full, other])
    assert list(team.members) == ["attngen triton", "attngen cuda"]


def test_kernels_for_few_tiles_are_left_to_the_suite_of_small_calls() -> None:
    text = "schema: 1\narch: [sm90a]\nkernels: [{variant: full, head_dim: 64, backend: cuda, split_kv: tiles}]\n"
    ordinary, shared = (plan(each) for each in expand(load_spec_text(text)))
    assert bench_kernels.reason_against(ordinary, 90) is None
    assert "which --suite small measures" in str(bench_kernels.reason_against(shared, 90))


def test_choosing_kernels(prepared: list[Prepared]) -> None:
    assert len(chosen(prepared, None, ())) == len(prepared)
    assert {k.plan.variant.name for k in chosen(prepared, None, ["full", "alibi"])} == {"full", "alibi"}
    assert [k.plan.layout for k in chosen(prepared, "varlen", ["causal"])] == ["varlen"]
    with pytest.raises(CallError, match="no kernel of variant 'casual'; did you mean 'causal'"):
        chosen(prepared, None, ["casual"])
    with pytest.raises(CallError, match="no kernel 'd33'"):
        chosen(prepared, "d33", ())


@pytest.mark.usefixtures("clean_registry")
def test_each_kernel_is_called_by_itself(prepared: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    dense = [k.plan for k in prepared if k.plan.variant.name == "causal" and k.plan.layout == "dense"]
    work, inputs = workload_of(preset("causal"), "causal", 20)
    seen = []

    def attention(*tensors: torch.Tensor, variant: str, package: str, **arguments: Any) -> None:
        (kernel,) = registry.find(variant, package).kernels
        seen.append((kernel.name, tensors[0].shape, arguments))

    monkeypatch.setattr(bench_kernels, "attention", attention)
    contenders = [bench_kernels.enter(plan.name, kernel_of(plan), work, inputs) for plan in dense]
    for contender in contenders:
        for call in contender.calls:
            call()
    assert [name for name, *_ in seen] == [plan.name for plan in dense for _ in inputs]
    assert all(arguments == {} for *_, arguments in seen)
    text = "schema: 1\narch: [sm90a]\nkernels: [{variant: causal, head_dim: 32, max_logits: true}]\n"
    asked = plan(*expand(load_spec_text(text)))
    bench_kernels.enter("asked", kernel_of(asked), work, inputs).calls[0]()
    assert seen[-1][0] == asked.name
    assert seen[-1][2] == {"return_max_logits": True}
