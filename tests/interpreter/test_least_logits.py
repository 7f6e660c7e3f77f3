"""Rows of a float mask that hold the least value of a dtype, or another large negative number, in each element.

Their logits are equal in float32, so that their keys have equal weights, as in torch's softmax, and so have the
gradients: no kernel may lose such a row, or its number of keys, to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attngen.inspect.cases import Case
from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as backward
from tests.interpreter.test_numerics import spec as forward
from tests.sampling import few, sampled

QUERIES, KEYS, INF = 33, 45, math.inf
#: Rows of the mask: its elements take turns. Some hide keys beside ordinary ones, or beside keys of the least value.
ROWS = {
    "least": lambda least: [least], "least of bf16": lambda least: [torch.finfo(torch.bfloat16).min],
    "-1e30": lambda least: [-1e30], "-1e9": lambda least: [-1e9], "-1e4": lambda least: [-1e4],
    "least and ordinary": lambda least: [least, 0.25, -1e9, -1.0], "-inf and ordinary": lambda least: [-INF, 0.25, 1.0],
    "-inf and least": lambda least: [-INF, least, least], "-inf": lambda least: [-INF],
}  # fmt: skip


def rows_of_mask(dtype: torch.dtype) -> Tensor:
    """Every kind of row (q, kv) again and again; the other rows are random."""
    least = torch.finfo(dtype).min
    mask = torch.randn((QUERIES, KEYS), generator=torch.Generator().manual_seed(2))
    for place, make in enumerate(ROWS.values()):
        kind = [max(value, least) if value > -INF else value for value in make(least)]
        for row in range(place, QUERIES, len(ROWS) + 1):
            mask[row] = torch.tensor([kind[key % len(kind)] for key in range(KEYS)])
    return mask.to(dtype)


def expected(given: dict[str, Tensor], logits: Tensor, moving: Tensor | bool) -> dict[str, Tensor]:
    """Output and gradients of softmax in float64, from logits that were rounded to float32; 0 where a row sees no key.
    Logits that are not ``moving`` do not depend on q and k."""
    hidden = (logits == -INF).all(-1, keepdim=True)
    weights = logits.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, given["v"])
    dweights = torch.einsum("bqhd,bkhd->bhqk", given["dout"], given["v"])
    dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * moving
    scale = given["q"].shape[-1] ** -0.5
    return {
        "out": out,
        "dv": torch.einsum("bhqk,bqhd->bkhd", weights, given["dout"]),
        "dq": torch.einsum("bhqk,bkhd->bqhd", dlogits, given["k"]) * scale,
        "dk": torch.einsum("bhqk,bqhd->bkhd", dlogits, given["q"]) * scale,
    }


def products(given: dict[str, Tensor]) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", given["q"], given["k"]) * given["q"].shape[-1] ** -0.5


def check(given: dict[str, Tensor], logits: Tensor, moving: Tensor | bool = True) -> None:
    for name, wanted in expected(given, logits.float().double(), moving).items():
        difference = (given[name] - wanted).abs().max()
        assert difference <= 1e-2 * wanted.abs().max(), (name, float(difference))


@few("fast_math", ["true", "false"])
@few(("dtype", "of_mask"), [("fp16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_masks_of_pairs(interpreter: Interpreter, dtype: str, of_mask: str, fast_math: str) -> None:
    declared = (
        'variants:\n  mask:\n    score: "s + bias[q, kv]"\n'
        f"    tensors: {{bias: {{dtype: {of_mask}, shape: [seqlen_q, seqlen_k]}}}}\n"
    )
    mask = rows_of_mask({"fp16": torch.float16, "fp32": torch.float32}[of_mask])
    fields = {"declared": declared, "dtype": dtype, "fast_math": fast_math}
    case = Case("least", (QUERIES,), (KEYS,), heads=1)
    texts = forward("mask", **fields), backward("mask", **fields)
    given = interpreter.call("trained", *texts, case, {"bias": mask})
    check(given, products(given) + mask.double())


@sampled(always=1, added=[False, True], value=[torch.finfo(torch.float32).min, -1e9])
def test_literals(interpreter: Interpreter, value: float, added: bool) -> None:
    """The first queries come before the first key, and give all keys the same weight."""
    score = f"s + (0.0 if q_pos >= kv else {value!r})" if added else f"s if q_pos >= kv else {value!r}"
    declared = f'variants:\n  mask:\n    score: "{score}"\n'
    case = Case("least", (KEYS,), (QUERIES,), heads=1)
    texts = (text("mask", declared=declared, fast_math="true") for text in (forward, backward))
    given = interpreter.call("trained", *texts, case, {})
    visible = torch.arange(KEYS)[:, None] + (QUERIES - KEYS) >= torch.arange(QUERIES)
    logits = products(given) + torch.where(visible, 0.0, value).double()
    check(given, logits, moving=visible | added)
