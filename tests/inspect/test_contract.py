"""The contract tells good results from bad ones: each kind of damage to a right result is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from torch import Tensor

from attngen.inspect.cases import Case
from attngen.inspect.contract import Expected, Tally, deviation, expected
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.runtime.arguments.checked import Call
from attngen.schema import preset
from tests.sampling import few

DENSE = Case("dense", (20,) * 2, (13,) * 2, heads=4, kv_heads=2, used=(13, 5))
PACKED = Case("packed", (20, 0, 3), (13, 7, 0), heads=4, kv_heads=2)


def right(name: str = "causal", layout: str = "dense", dtype: str = "fp16") -> tuple[Call, Expected, Tensor, Tensor]:
    """Return a call, what is expected, and the reference rounded to the dtype: the best that a kernel can give."""
    variant = preset(name)
    element = Element(dtype, 32, 16)
    inputs = make_inputs(variant, DENSE if layout == "dense" else PACKED, layout, element, "cpu", 5)
    call = inputs.bind(variant)
    wanted = expected(call, inputs.q, inputs.k, inputs.v)
    return call, wanted, wanted.out.to(element.torch), wanted.lse.float()


@few("dtype", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("name", ["full", "causal", "softcap", "alibi", "packed_documents", "causal_sink"])
def test_a_rounded_reference_meets_it(name: str, layout: str, dtype: str) -> None:
    call, wanted, out, lse = right(name, layout, dtype)
    errors = deviation(call, out, lse, wanted)
    assert errors.ok, errors
    tally = Tally([errors])
    assert tally.ok
    assert 0 < tally.rmse < tally.rmse_allowed


def test_plain_torch_is_as_good_as_its_limit_says() -> None:
    call, wanted, _, lse = right()
    errors = deviation(call, wanted.plain_out, lse, wanted)
    assert errors.ok
    assert errors.max_allowed >= 2 * errors.max_error


DAMAGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a wrong element": lambda out, lse: out[0, 19, 0, 3].add_(0.1),
    "a NaN": lambda out, lse: out[0, 19, 0, 3].fill_(math.nan),
    "an infinity": lambda out, lse: out[0, 19, 0, 3].fill_(math.inf),
    "a wrong lse": lambda out, lse: lse[0, 0, 19].add_(1e-3),
    "a NaN lse": lambda out, lse: lse[0, 0, 19].fill_(math.nan),
    "a dead row that is not zero": lambda out, lse: out[0, 0, 0, 0].fill_(1e-7),
    "a dead row of NaN": lambda out, lse: out[0, 0].fill_(math.nan),
    "a dead row with a finite lse": lambda out, lse: lse[0, 0, 0].fill_(-1e30),
    "a live row with lse -inf": lambda out, lse: lse[0, 0, 19].fill_(-math.inf),
    "a shifted row": lambda out, lse: out[0, 18].copy_(out[0, 19]),
    "everything slightly too large": lambda out, lse: out.mul_(1.02),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_found(damage: Callable[[Tensor, Tensor], object]) -> None:
    call, wanted, out, lse = right()
    assert wanted.lse[0, 0, 0] == -math.inf
    damage(out, lse)
    assert not Tally([deviation(call, out, lse, wanted)]).ok


def test_rows_of_no_sequence_do_not_count() -> None:
    call, wanted, out, lse = right("causal", "varlen")
    assert wanted.rows.all()
    rows = wanted.rows.clone()
    rows[:, 20:] = False
    out[20:] = math.nan
    lse[:, 20:] = math.nan
    few = Expected(wanted.out, wanted.lse, wanted.plain_out, wanted.plain_lse, None, rows)
    assert deviation(call, out, lse, few).ok


def test_a_small_bias_exceeds_the_rmse_only() -> None:
    call, wanted, _, lse = right("full", dtype="fp32")
    plain_rmse = Tally([deviation(call, wanted.plain_out, lse, wanted)])
    limit = plain_rmse.rmse_allowed
    biased = wanted.out + 1.5 * limit
    errors = deviation(call, biased.float(), lse, wanted)
    assert Tally([errors]).rmse > limit
    assert not Tally([errors]).ok
