"""Records in shared memory lie where their words allow: sources say so by ``static_assert``, compiling is the test."""

from __future__ import annotations

import re

import pytest

from attngen.plan import Plan
from attngen.render import render
from tests.compile.frontend import to_ptx
from tests.plan.specs import planned
from tests.sampling import sampled

_REACH = "tensors: {reach: {dtype: int32, shape: [seqlen_q]}}"
_HIDDEN = "tensors: {hidden: {dtype: int32, shape: [seqlen_k]}}"

#: Masks by how many ranges of visible and of full tiles they have bounds for; None: tiles are listed.
BOUNDS: dict[tuple[int, int] | None, tuple[str, str]] = {
    (1, 1): ("kv <= q_pos", ""),
    (1, 0): ("kv <= q and q - kv <= reach[q]", _REACH),
    (2, 2): ("kv < 4 or (kv <= q_pos and q_pos - kv < 300)", ""),
    (2, 0): ("(kv <= q and q - kv <= reach[q]) or (q + 1000 <= kv and kv - q <= 1000 + reach[q])", _REACH),
    (3, 3): (" or ".join(f"({1000 * i} <= q_pos - kv and q_pos - kv < {1000 * i + 300})" for i in range(3)), ""),
    (4, 4): (" or ".join(f"({1000 * i} <= q_pos - kv and q_pos - kv < {1000 * i + 300})" for i in range(4)), ""),
    None: ("kv <= q_pos and hidden[kv] == 0", _HIDDEN),
}


def kernel(bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str) -> Plan:
    mask, tensors = BOUNDS[bounds]
    variant = f"variants:\n  own:\n    mask: {mask!r}\n" + (f"    {tensors}\n" if tensors else "")
    fields = {"pack_gqa": str(pack_gqa).lower(), "layout": layout, "tile": f"{{m: {64 * consumers}, n: 64}}"}
    return planned("own", backend="cuda", declared=variant, **fields)


def check_forward(bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str) -> None:
    plan = kernel(bounds, consumers, pack_gqa, layout)
    assert plan.hopper is not None
    assert plan.hopper.consumers == consumers
    source = render(plan)
    spans = re.search(r"struct Spans \{(.*?)\};", source.text, re.DOTALL)
    found = spans and tuple(len(re.findall(rf"\b{kind}_lo", spans[1])) for kind in ("visible", "full"))
    assert found == bounds
    assert ".entry" in to_ptx(source)


@sampled(
    bounds={"listed" if key is None else "visible{}-full{}".format(*key): key for key in BOUNDS},
    consumers=(2, 1, 3),
    pack_gqa={"": False, "pack": True},
    layout=("dense", "varlen"),
)
def test_records_of_forwards_are_aligned(
    bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str
) -> None:
    check_forward(bounds, consumers, pack_gqa, layout)


@pytest.mark.parametrize("bounds", [(1, 0), (2, 0)], ids=str)
def test_records_of_an_odd_number_of_words_are_aligned(bounds: tuple[int, int]) -> None:
    """Spans of 8 and of 16 bytes, three of them: the second record would not begin at a word of 16 bytes."""
    check_forward(bounds, 2, False, "dense")


@sampled(
    head_dim=(64, 80, 128, 192, 256),
    deterministic={"": False, "ordered": True},
    layout=("dense", "varlen"),
    variant=("causal", "packed_documents"),
)
def test_records_of_backwards_are_aligned(head_dim: int, deterministic: bool, layout: str, variant: str) -> None:
    fields = {"head_dim": head_dim, "deterministic": str(deterministic).lower(), "layout": layout}
    plan = planned(variant, passes="backward", backward="{backend: cuda}", **fields)
    assert plan.gradients is not None
    assert ".entry" in to_ptx(render(plan))
