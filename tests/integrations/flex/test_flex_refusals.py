"""Each refusal of a function says what to write instead, and what it says gives the numbers of the original."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as theirs

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from attngen.integrations.flex.rewrites import REWRITES, instead_of
from tests.docs.blocks import ROOT, tables

Mod = Callable[..., Any]
HEADS, LENGTH = 2, 6
PLACES = torch.arange(LENGTH)
BOUNDS = torch.tensor([2, 5])
ROWS = torch.randn(LENGTH, HEADS, generator=torch.Generator().manual_seed(0))
EMBEDDING = torch.nn.Embedding(LENGTH, HEADS)
BUCKETS = torch.bucketize(PLACES, BOUNDS)
TOTAL = ROWS.sum(1)
PRODUCTS = ROWS @ ROWS.T
LGAMMA = torch.lgamma(PLACES + 1.0)
GCD = torch.gcd(PLACES[:, None], PLACES[None])
EXPONENTS = torch.frexp(PLACES.float()).exponent
ROUNDED = ROWS.bfloat16()
PHASES = torch.polar(torch.ones(LENGTH), PLACES.float())
COS, SIN = PHASES.real.clone(), PHASES.imag.clone()

#: By class: a score_mod that is refused, and what its refusal says to write; None where that is to leave it to torch.
REFUSED: dict[str, tuple[Mod, Mod | None]] = {
    "search": (
        lambda s, b, h, q, kv: s + torch.bucketize(q, BOUNDS),
        lambda s, b, h, q, kv: s + BUCKETS[q],
    ),
    "embedding": (
        lambda s, b, h, q, kv: s + EMBEDDING((q - kv).abs())[h],
        lambda s, b, h, q, kv: s + EMBEDDING.weight[(q - kv).abs(), h],
    ),
    "selection": (
        lambda s, b, h, q, kv: s + torch.take(ROWS, (q * HEADS + h).long()),
        lambda s, b, h, q, kv: s + ROWS[q, h],
    ),
    "reduction": (
        lambda s, b, h, q, kv: s + torch.sum(ROWS[q]),
        lambda s, b, h, q, kv: s + TOTAL[q],
    ),
    "product": (
        lambda s, b, h, q, kv: s + ROWS[q] @ ROWS[kv],
        lambda s, b, h, q, kv: s + PRODUCTS[q, kv],
    ),
    "shape": (
        lambda s, b, h, q, kv: torch.stack((s, q / 9)).amax(),
        lambda s, b, h, q, kv: torch.maximum(s, q / 9),
    ),
    "special function": (
        lambda s, b, h, q, kv: s + torch.lgamma(q + 1.0),
        lambda s, b, h, q, kv: s + LGAMMA[q],
    ),
    "divisor": (
        lambda s, b, h, q, kv: s + torch.gcd(q, kv),
        lambda s, b, h, q, kv: s + GCD[q, kv],
    ),
    "bits": (
        lambda s, b, h, q, kv: s + torch.frexp(q.float()).exponent,
        lambda s, b, h, q, kv: s + EXPONENTS[q],
    ),
    "rounding": (
        lambda s, b, h, q, kv: s + ROWS[q, h].bfloat16(),
        lambda s, b, h, q, kv: s + ROUNDED[q, h],
    ),
    "complex": (
        lambda s, b, h, q, kv: s + (PHASES[q] * PHASES[kv].conj()).real,
        lambda s, b, h, q, kv: s + COS[q] * COS[kv] + SIN[q] * SIN[kv],
    ),
    "random": (
        lambda s, b, h, q, kv: s + 0.0 * torch.rand_like(s),
        lambda s, b, h, q, kv: s,
    ),
}  # fmt: skip


def scored(mod: Mod, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with the logits that a function returns for one pair after another."""
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    logits = torch.empty_like(s)
    for place in itertools.product(*map(range, s.shape)):
        logits[place] = mod(s[place], *(torch.tensor(one, dtype=torch.int32) for one in place))
    return torch.softmax(logits, -1) @ v


@pytest.fixture
def tensors() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, HEADS, LENGTH, 8, generator=generator) for _ in range(3))


@pytest.mark.parametrize("of", REWRITES)
@torch.no_grad()
def test_a_refusal_says_what_to_write_instead(of: str, tensors: tuple[Tensor, ...]) -> None:
    refused, rewritten = REFUSED[of]
    with pytest.raises(CallError, match=re.escape(REWRITES[of].instead)) as caught:
        ours.flex_attention(*tensors, refused)
    assert "\n" not in str(caught.value)
    out = ours.flex_attention(*tensors, rewritten)
    assert torch.allclose(out, scored(refused, *tensors), atol=1e-5)


def test_what_no_class_lists_has_a_way_out() -> None:
    with pytest.raises(
        CallError, match=r"aten\.linalg_cross\S* has no equivalent in .*; compute it outside of the function"
    ):
        ours.meaning(None, lambda s, b, h, q, kv: torch.cross(s.expand(3), s.expand(3), 0)[0], torch.device("cpu"))


@pytest.mark.parametrize("mod", [lambda s, b, h, q, kv: torch.special.i0e(s), lambda s, b, h, q, kv: torch.erfinv(s)])
def test_what_a_refusal_leaves_to_torch_runs_there(
    mod: Mod, tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    small = tuple(0.1 * t for t in tensors)
    with pytest.raises(CallError, match="fallback=True for torch's FlexAttention"):
        ours.flex_attention(*small, mod)
    out = ours.flex_attention(*small, mod, fallback=True)
    assert torch.allclose(out, theirs.flex_attention(*small, mod))


def test_the_page_has_the_table() -> None:
    (rows,) = tables(ROOT / "docs/flex_attention.md", "operation", "why", "instead")
    documented = {_plain(why): _plain(instead) for _, why, instead in rows}
    for rewrite in REWRITES.values():
        assert documented[rewrite.reason] == rewrite.instead


def _plain(cell: str) -> str:
    """The text of a cell without code marks and links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("\\|", "|")


FLAG = torch.tensor(True)

#: Masks that do not depend on positions, and whether keys are seen.
CONSTANT: dict[str, tuple[Mod, bool]] = {
    "True": (lambda b, h, q, kv: True, True),
    "False": (lambda b, h, q, kv: False, False),
    "a captured bool": (lambda b, h, q, kv: bool(LENGTH), True),
    "a tensor": (lambda b, h, q, kv: torch.tensor(False), False),
    "a captured tensor": (lambda b, h, q, kv: FLAG, True),
    "computed from one": (lambda b, h, q, kv: ~FLAG, False),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_masks_may_be_constant(name: str, tensors: tuple[Tensor, ...]) -> None:
    mask_mod, seen = CONSTANT[name]
    mask = ours.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=2)
    assert bool(mask.visible().all()) is bool(mask.visible().any()) is seen
    assert bool(mask.to_dense().all()) is seen
    q, k, v = tensors
    wanted = functional.scaled_dot_product_attention(q, k, v) if seen else torch.zeros_like(q)
    assert torch.allclose(ours.flex_attention(q, k, v, block_mask=mask), wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["a tensor", "a captured tensor", "computed from one"])
def test_constant_masks_are_those_of_torch(name: str) -> None:
    mask_mod, _ = CONSTANT[name]
    for one, other in zip(
        *(
            of.create_block_mask(mask_mod, 1, 1, LENGTH, LENGTH, "cpu", BLOCK_SIZE=2).as_tuple()
            for of in (ours, theirs)
        ),
        strict=True,
    ):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other or callable(one)


@pytest.mark.parametrize("score", [0.5, 2, torch.tensor(0.5)])
def test_scores_may_be_constant(score: Any, tensors: tuple[Tensor, ...]) -> None:
    q, k, v = (t.clone().requires_grad_() for t in tensors)
    out = ours.flex_attention(q, k, v, lambda s, b, h, m, n: score)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand_as(v), atol=1e-5)
    (gradient,) = torch.autograd.grad(out.sum(), q, allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize(
    ("mask_mod", "told"),
    [
        (lambda b, h, q, kv: 1, "a mask is a condition, but it returns int64; compare it, as in result != 0"),
        (lambda b, h, q, kv: q - kv, "a mask is a condition, but it returns int32; compare it"),
        (lambda b, h, q, kv: None, "it returns NoneType; allowed: a tensor, or a Python bool or number"),
        (lambda b, h, q, kv: q.tolist() > 0, "branches on the value of an index"),
        (lambda b, h, q, kv: torch.nonzero(q - kv).numel() > 0, "branches on the value of an index"),
        (lambda b, h, q, kv: max(q, kv) > 3, r"branches on the value of an index.*torch\.maximum"),
        (lambda b, h, q, kv: ROWS[q, ...] > 0, "branches on the value of an index.*one index for each dimension"),
        (lambda b, h, q, kv: ROWS[q] > 0, r"a row of a captured tensor .*index all of its dimensions, as in tensor\["),
        (lambda b, h, q, kv: ROWS[q, h].expand(3) > 0, "it returns a tensor of shape .*; allowed: one number"),
        (lambda b, h, q, kv: (q >= BOUNDS).sum() > 0, "stands where a number belongs; index it, as in"),
        (
            lambda b, h, q, kv: TOTAL[q > kv] > 0,
            r"an index is a condition; allowed: an integer, such as condition\.int",
        ),
        (lambda b, h, q, kv: PHASES[q].real > 0, "a captured tensor is complex64; write the real and the imaginary"),
        (lambda b, h, q, kv: torch.ones(6, dtype=torch.uint16)[q] > 0, r"is uint16; allowed: its copy by \.float\(\)"),
        (
            lambda b, h, q, kv: (q * 1.0).view(torch.int32) > 0,
            "no access to the bits of a float.*view.dtype.*; compute",
        ),
        (lambda b, h, q, kv: torch.ones(6).to("meta")[q] > 0, r"is on meta, the call on cpu; .*\.to\('cpu'\)"),
    ],
)
def test_other_refusals_say_what_is_allowed(mask_mod: Mod, told: str) -> None:
    with pytest.raises(CallError, match=told):
        ours.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu")


def test_a_score_is_no_condition() -> None:
    with pytest.raises(CallError, match=r"it returns a condition; that is a mask_mod .*torch\.where"):
        ours.meaning(None, lambda s, b, h, q, kv: q > kv, torch.device("cpu"))


def test_names_of_special_functions_have_one_way_out() -> None:
    assert instead_of("special_bessel_j0") == REWRITES["special function"].instead
