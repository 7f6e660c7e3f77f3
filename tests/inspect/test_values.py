"""Arguments made from declarations: within every range, in every order, of every shape, and never the same."""

from __future__ import annotations

import pytest
import torch

from attngen.inspect.cases import Case, cases_of, dense_cases
from attngen.inspect.contract import expected
from attngen.inspect.values import arguments_of
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lang.check import compile_variant
from attngen.lang.variant import Monotone, Scalar, Tensor, Variant
from attngen.runtime.arguments import debug
from attngen.schema import preset, preset_names
from tests.sampling import few

CASE = Case("values", (40,) * 3, (60,) * 3, heads=4, kv_heads=2)
ELEMENT = Element("fp16", 16, 16)


def arguments(variant: Variant, seed: int = 0, case: Case = CASE, **options):  # type: ignore[no-untyped-def]
    return arguments_of(variant, case, "dense", torch.Generator().manual_seed(seed), **options)


def test_the_same_seed_gives_the_same_values() -> None:
    variant = preset("packed_documents")
    one, other, third = (arguments(variant, seed)["doc"] for seed in (1, 1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


@few("layout", ["dense", "varlen"])
@pytest.mark.parametrize("name", preset_names())
def test_inputs_of_every_preset_keep_what_is_declared(name: str, layout: str) -> None:
    variant = preset(name)
    for seed, case in enumerate(cases_of(layout, 16, 16)):
        inputs = make_inputs(variant, case, layout, ELEMENT, "cpu", seed)
        debug.check(inputs.bind(variant))


def test_everything_behind_the_end_is_nan() -> None:
    case = Case("used", (5,) * 2, (9,) * 2, used=(4, 0))
    inputs = make_inputs(preset("causal"), case, "dense", ELEMENT, "cpu", 0)
    for tensor in (inputs.k, inputs.v):
        assert torch.isfinite(tensor[0, :4]).all()
        assert tensor[0, 4:].isnan().all()
        assert tensor[1].isnan().all()
        behind = tensor.as_strided((2, 12), (tensor.stride(0), tensor.stride(1)), 9 * tensor.stride(1))
        assert behind.isnan().all()
    packed = make_inputs(preset("causal"), Case("p", (3, 4), (5, 6), used=(2, 6)), "varlen", ELEMENT, "cpu", 0)
    assert packed.k[2:5].isnan().all()
    assert torch.isfinite(packed.k[5:]).all()


def with_scalar(**fields: object) -> Variant:
    scalar = Scalar("n", **{"dtype": "int32", **fields})  # type: ignore[arg-type]
    condition = {"bool": "n", "fp32": "kv + 0.0 < n"}.get(scalar.dtype, "kv < n")
    return compile_variant("own", condition, scalars=[scalar])


@pytest.mark.parametrize("seed", range(20))
def test_scalars_lie_in_their_range(seed: int) -> None:
    for low, high in ((0, None), (5, 7), (None, -3), (-9, -9), (1, "seqlen_k"), (100_000, None)):
        value = arguments(with_scalar(min=low, max=high), seed)["n"]
        assert isinstance(value, int)
        assert low is None or value >= low
        assert high is None or value <= (60 if high == "seqlen_k" else high)
    for low, high in ((0.5, None), (None, -2.0), (0.25, 0.5), (-1.0, 1.0)):
        value = arguments(with_scalar(dtype="fp32", min=low, max=high), seed)["n"]
        assert (low or -1e30) <= value <= (high or 1e30)


def test_the_least_and_greatest_values_are_tried() -> None:
    least, most = (Case("extreme", (8,), (8,), values=values) for values in ("least", "most"))
    variant = with_scalar(min=3, max=9)
    assert arguments(variant, case=least)["n"] == 3
    assert arguments(variant, case=most)["n"] == 9
    free = with_scalar(min=1)
    assert arguments(free, case=most)["n"] == 2**31 - 1


def test_small_and_large_scalars_both_occur() -> None:
    values = {arguments(with_scalar(min=1), seed)["n"] for seed in range(60)}
    assert min(values) == 1
    assert max(values) > 40


def test_constants_are_not_passed_and_given_ones_are_taken() -> None:
    assert arguments(with_scalar(const=4)) == {}
    assert arguments(with_scalar(min=0), given={"n": 17}) == {"n": 17}


def test_staircases_never_fall_and_have_steps() -> None:
    tensor = Tensor("doc", "int32", ("b", "seqlen_k"), Monotone(1), (2, 40))
    variant = compile_variant("own", "doc[b, kv] > 3", tensors=[tensor])
    steps = set()
    for seed in range(20):
        doc = arguments(variant, seed)["doc"]
        assert doc.shape == (3, 60)
        assert doc.dtype == torch.int32
        assert (doc[:, 1:] >= doc[:, :-1]).all()
        assert int(doc.min()) >= 2
        assert int(doc.max()) <= 40
        steps.add(len(doc[0].unique()))
    assert len(steps) > 2


def test_bools_make_full_empty_and_mixed_tiles() -> None:
    allowed = arguments(preset("allowed"), 3, Case("large", (200,), (300,)))["allowed"]
    assert allowed.dtype == torch.bool
    tiles = allowed[0, :192, :288].reshape(4, 48, 6, 48).sum((1, 3))
    assert (tiles == 0).any()
    assert (tiles == 48 * 48).any()
    assert ((tiles > 0) & (tiles < 48 * 48)).any()


def test_free_extents_hold_every_index() -> None:
    variant = preset("relative_bias")
    for seed in range(10):
        inputs = make_inputs(variant, CASE, "dense", ELEMENT, "cpu", seed)
        assert inputs.arguments["table"].shape[0] == 4
        expected(inputs.bind(variant), inputs.q, inputs.k, inputs.v)  # raises IndexError where one leaves its extent


def test_an_extent_may_be_a_scalar() -> None:
    tensor = Tensor("table", "fp32", ("n",))
    variant = compile_variant("own", "kv < n", "s + table[kv % n]", [Scalar("n", "int32", min=1, max=50)], [tensor])
    made = arguments(variant, 2)
    assert made["table"].shape == (made["n"],)


def test_huge_tensors_are_avoided() -> None:
    tensor = Tensor("table", "fp32", ("h", "size"))
    scalars = [Scalar("n", "int32", min=0, max=2**30)]
    variant = compile_variant("own", True, "s + table[h, min(kv, n)] + table[h, n]", scalars, [tensor])
    most = arguments(variant, case=Case("most", (8,), (8,), values="most"))
    assert most["table"].numel() < 2**20


def test_cases_cover_what_matters() -> None:
    for layout in ("dense", "varlen", "paged"):
        for small in (True, False):
            cases = cases_of(layout, 64, 64, small=small)
            assert len({case.name for case in cases}) == len(cases)
            assert {case.values for case in cases} == {"random", "least", "most"}
            assert any(case.used or case.page_size for case in cases)
            assert any(q > k for case in cases for q, k in zip(case.q_lengths, case.k_lengths, strict=True))
            assert all(case.heads % case.kv_heads == 0 for case in cases)
    assert max(case.seqlen_k for case in dense_cases(64, 64)) > 32 * 64  # more tiles than one word lists
