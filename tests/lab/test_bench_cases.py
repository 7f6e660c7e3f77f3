"""The cases of a race: shapes, operations against brute force, and presets in the words of other libraries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attngen.lab.bench import workloads as bench_workloads
from attngen.lab.bench.cases import BenchCase, bench_cases
from attngen.lab.bench.workloads import terms_of, visible_pairs, workload
from attngen.lang.eager import evaluate
from attngen.lang.variant import Tensor as Declared
from attngen.lang.variant import Variant
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import names_of
from attngen.schema import preset, preset_names
from tests.runtime.support import variant
from tests.sampling import few


def case(name: str, seqlen: int, *, batch: int = 1, heads: int = 1, kv_heads: int = 1) -> BenchCase:
    return BenchCase("variants", name, "bf16", 8, 4, batch, seqlen, heads, kv_heads)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that cut sequences of some dozens."""
    for name, value in {"WINDOW": 12, "PREFIX": 9, "DOCUMENT": 11}.items():
        monkeypatch.setattr(bench_workloads, name, value)


# --- shapes -------------------------------------------------------------------------------------------------


def test_the_grid_keeps_tokens_and_width() -> None:
    cases = bench_cases("full", "bf16", 128, 128)
    assert [(c.batch, c.seqlen, c.heads, c.kv_heads) for c in cases] == [
        (16, 1024, 16, 16), (4, 4096, 16, 16), (1, 16384, 16, 16),
    ]  # fmt: skip
    assert [c.name for c in cases] == ["full d128 bf16 1k", "full d128 bf16 4k", "full d128 bf16 16k"]
    assert {c.suite for c in cases} == {"grid"}


def test_a_variant_is_one_long_sequence_with_shared_kv_heads() -> None:
    (case,) = bench_cases("alibi", "fp16", 128, 128)
    assert (case.suite, case.batch, case.seqlen, case.heads, case.kv_heads) == ("variants", 1, 16384, 32, 8)
    assert case.name == "alibi d128 fp16 h32/8 16k"


def test_causal_is_on_the_grid_and_beside_the_variants() -> None:
    assert [c.suite for c in bench_cases("causal", "bf16", 64, 64)] == ["grid"] * 3 + ["variants"]


@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 256])
def test_any_head_dim_has_a_legal_number_of_heads(head_dim: int) -> None:
    for case in bench_cases("causal", "bf16", head_dim, 128):
        assert case.heads % case.kv_heads == 0
        assert head_dim * case.heads <= 4096
        assert case.batch * case.seqlen == 16384


@pytest.mark.parametrize(
    ("tokens", "seqlens", "shapes"),
    [
        (4096, (), [(4, 1024), (1, 4096), (1, 4096)]),
        (500, (), [(1, 500), (1, 500)]),
        (4096, (512, 1000), [(8, 512), (4, 1000), (8, 512), (4, 1000)]),
        (1024, (2048,), [(1, 2048), (1, 2048)]),
    ],
)
def test_other_sizes(tokens: int, seqlens: tuple[int, ...], shapes: list[tuple[int, int]]) -> None:
    cases = bench_cases("causal", "bf16", 64, 64, tokens=tokens, seqlens=seqlens)
    assert [(c.batch, c.seqlen) for c in cases] == shapes


# --- operations ---------------------------------------------------------------------------------------------


def every_pair(chosen: Variant, at: BenchCase, arguments: dict[str, Any]) -> int:
    """Count visible pairs head by head from the names that the reference uses."""
    q = torch.zeros(at.batch, at.seqlen, at.heads, at.head_dim_qk)
    k = torch.zeros(at.batch, at.seqlen, at.kv_heads, at.head_dim_qk)
    call = bind(
        chosen, q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd", arguments=arguments
    )
    total = 0
    for b in range(at.batch):
        names = names_of(call, b, slice(0, at.seqlen), at.seqlen, at.seqlen, b * at.seqlen, b * at.seqlen)
        visible = evaluate(chosen.mask, names, call.tensors)
        total += int(visible.broadcast_to(at.heads, at.seqlen, at.seqlen).sum())
    return total


@few("name", preset_names(), always=range(0, 999, 3))
def test_visible_pairs_are_those_of_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_workloads, "_PAIRS", 100)  # several pieces
    at = case(name, 37, batch=2, heads=4, kv_heads=2)
    work = workload(preset(name), at, "cpu")
    pairs = every_pair(preset(name), at, dict(work.arguments))
    assert visible_pairs(preset(name), at, work.arguments, "cpu") == pairs
    assert work.pairs == (2 * 4 * 37 * 37 / 2 if name == "causal" else pairs)
    assert 0 < pairs <= 2 * 4 * 37 * 37


def test_pairs_of_a_window_by_formula() -> None:
    work = workload(preset("sliding_window"), case("sliding_window", 100, heads=3), "cpu")
    assert work.pairs == 3 * sum(min(q + 1, 12) for q in range(100))


def test_pairs_of_masks_that_differ_by_head_and_by_batch() -> None:
    by_head = variant("a", "kv <= h and q >= b")
    assert visible_pairs(by_head, case("a", 10, batch=2, heads=3), {}, "cpu") == 10 * (1 + 2 + 3) + 9 * (1 + 2 + 3)
    table = variant("t", "table[b] > kv", tensors=[Declared("table", "int32", ("b",))])
    assert visible_pairs(table, case("t", 10, batch=2), {"table": torch.tensor([3, 7])}, "cpu") == 10 * (3 + 7)


def test_operations_are_those_of_the_two_products() -> None:
    at = case("causal", 6)
    counted = 0
    for q in range(6):
        for _kv in range(q + 1):
            counted += 2 * at.head_dim_qk  # q · k
            counted += 2 * at.head_dim_v  # p · v
    assert at.flops(6 * 7 / 2) == counted


def test_operations_of_a_backward_are_those_of_its_five_products() -> None:
    at = replace(case("causal", 6), direction="backward")
    counted = 0
    for q in range(6):
        for _kv in range(q + 1):
            counted += 2 * at.head_dim_qk  # q · k, again
            counted += 2 * at.head_dim_v  # dO · v
            counted += 2 * at.head_dim_v  # dV += p dO
            counted += 2 * at.head_dim_qk + 2 * at.head_dim_qk  # dQ += ds k, dK += ds q
    assert at.flops(6 * 7 / 2) == counted
    equal = BenchCase("grid", "causal", "bf16", 128, 128, 4, 4096, 16, 16)
    assert replace(equal, direction="backward").flops(1e6) == 2.5 * equal.flops(1e6)


def test_a_backward_says_so_in_its_names() -> None:
    cases = bench_cases("causal", "bf16", 128, 128, direction="backward")
    assert [c.name for c in cases[:2]] == ["causal d128 bf16 backward 1k", "causal d128 bf16 backward 4k"]
    assert [replace(c, direction="forward") for c in cases] == list(bench_cases("causal", "bf16", 128, 128))


def test_equal_head_dims_give_the_usual_formula() -> None:
    at = BenchCase("grid", "causal", "bf16", 128, 128, 4, 4096, 16, 16)
    assert workload(preset("causal"), at, "cpu").flops == 4 * 4 * 16 * 4096**2 * 128 / 2


# --- presets in other words ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(bench_workloads._TERMS))
def test_flex_functions_say_what_the_preset_says(name: str) -> None:
    at = case(name, 40, batch=2, heads=4)
    terms = terms_of(preset(name), at, "cpu")
    assert terms is not None
    b, h, q, kv = (
        index.reshape(shape)
        for index, shape in zip(
            map(torch.arange, (2, 4, 40, 40)),
            ((2, 1, 1, 1), (1, 4, 1, 1), (1, 1, 40, 1), (1, 1, 1, 40)),
            strict=True,
        )
    )
    names = {"b": b, "h": h, "q": q, "q_pos": q, "kv": kv, "seqlen_q": 40, "seqlen_k": 40}
    tensors = {key: value for key, value in terms.arguments.items() if isinstance(value, torch.Tensor)}
    names |= {key: value for key, value in terms.arguments.items() if key not in tensors}
    mask = evaluate(preset(name).mask, names, tensors).expand(2, 4, 40, 40)
    actual = torch.ones_like(mask) if terms.mask_mod is None else terms.mask_mod(b, h, q, kv).expand(2, 4, 40, 40)
    assert torch.equal(actual, mask)
    assert bool(mask.all()) == (name == "full")
    score, s = preset(name).score, 40 * torch.randn(2, 4, 40, 40)
    assert (score is None) == (terms.score_mod is None)
    if score is not None and terms.score_mod is not None:
        wanted = evaluate(score, names | {"s": s}, tensors)
        torch.testing.assert_close(terms.score_mod(s, b, h, q, kv), wanted)
        assert not torch.equal(wanted, s)
    per_sequence = not torch.equal(mask[:1].expand_as(mask), mask)
    assert terms.per_sequence or not per_sequence


def test_what_hides_a_preset_has_no_terms() -> None:
    at = case("causal", 8)
    assert terms_of(preset("causal"), at, "cpu") is not None
    assert terms_of(variant("causal", "q_pos > kv"), at, "cpu") is None
    assert terms_of(variant("mine"), at, "cpu") is None
    assert workload(variant("causal", "q_pos > kv"), at, "cpu").pairs == 28  # counted, not halved


def test_indices_of_a_mask_are_kept_within_their_tensors() -> None:
    few = variant("few", "flag[where[q]]", tensors=[Declared("where", "int32", ("seqlen_q",)),
                                                    Declared("flag", "bool", (4,))])  # fmt: skip
    work = workload(few, case("few", 30), "cpu")
    assert int(work.arguments["where"].max()) < 4
    never = variant("never", "flag[kv + 99]", tensors=[Declared("flag", "bool", ("seqlen_k",))])
    with pytest.raises(IndexError, match="flag"):
        workload(never, case("never", 30), "cpu")


def test_calls_with_their_largest_logits_have_the_cases_of_those_without() -> None:
    asked = preset("causal").with_max_logits()
    given = ("bf16", 64, 64)
    cases = bench_cases(asked.name, *given, plain="causal")
    assert cases == tuple(replace(one, variant=asked.name) for one in bench_cases("causal", *given))
    work = workload(asked, cases[0], "cpu")
    assert work.terms is not None  # those of other libraries, whose outputs are the same
    assert work.pairs == workload(preset("causal"), cases[0], "cpu").pairs
