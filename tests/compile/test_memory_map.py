"""Records in shared memory lie where their words allow: sources say so by ``static_assert``, compiling is the test."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.errors import CompileError
from attngen.lang.ir import MAX_SEQLEN
from attngen.plan import Plan
from attngen.render import render
from tests.compile.frontend import to_ptx
from tests.plan.specs import planned
from tests.sampling import few, sampled

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


def kernel(bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str, **more: str) -> Plan:
    mask, tensors = BOUNDS[bounds]
    variant = f"variants:\n  own:\n    mask: {mask!r}\n" + (f"    {tensors}\n" if tensors else "")
    fields = {"pack_gqa": str(pack_gqa).lower(), "layout": layout, "tile": f"{{m: {64 * consumers}, n: 64}}", **more}
    if bounds in ((1, 0), (2, 0), (4, 4)) or (pack_gqa and bounds is None):
        fields["tile_map"] = "never"  # which masks that read tensors of queries, or see more than three ranges, have
    return planned("own", backend="cuda", declared=variant, **fields)


def check_forward(bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str, **more: str) -> None:
    plan = kernel(bounds, consumers, pack_gqa, layout, **more)
    assert plan.structure.consumers == consumers
    source = render(plan)
    spans = re.search(r"struct Spans \{(.*?)\};", source.text, re.DOTALL)
    counts = spans and tuple(len(re.findall(rf"\b{kind}_lo", spans[1])) for kind in ("visible", "full"))
    assert counts == bounds
    assert ".entry" in to_ptx(source)


@pytest.mark.exhaustive
@pytest.mark.long
@sampled(
    always=1,
    bounds={"listed" if key is None else "visible{}-full{}".format(*key): key for key in BOUNDS},
    consumers=(2, 1, 3),
    pack_gqa={"": False, "pack": True},
    layout=("dense", "varlen"),
)
def test_records_of_forwards_are_aligned(
    bounds: tuple[int, int] | None, consumers: int, pack_gqa: bool, layout: str
) -> None:
    check_forward(bounds, consumers, pack_gqa, layout)


@pytest.mark.exhaustive
def test_three_spans_of_one_range_are_padded() -> None:
    """Three spans take 24 bytes, so that the second record would not begin at a word of 16 bytes."""
    check_forward((1, 0), 2, False, "dense")


@pytest.mark.exhaustive
@pytest.mark.long
@sampled(
    always=1,
    bounds={"listed" if key is None else "visible{}-full{}".format(*key): key for key in BOUNDS},
    consumers=(3, 2, 1),
    layout=("paged", "varlen", "dense"),
)
def test_records_of_shared_tiles_are_aligned(bounds: tuple[int, int] | None, consumers: int, layout: str) -> None:
    check_forward(bounds, consumers, False, layout, split_kv="tiles")


@pytest.mark.exhaustive
def test_a_value_behind_a_condition_on_the_pair_comes_with_the_tile_of_keys() -> None:
    """The value takes the room that the plan made for it, and only the pairs that need it read it."""
    mask = "abs(q_pos - kv) <= until[kv] and one[b, kv] and kv <= q_pos - 65 and two[b, kv]"
    padding = "{dtype: bool, shape: [b, seqlen_k]}"
    tensors = f"tensors: {{until: {{dtype: int64, shape: [seqlen_k]}}, one: {padding}, two: {padding}}}"
    variant = f"variants:\n  own:\n    mask: {mask!r}\n    {tensors}\n"
    plan = planned("own", backend="cuda", head_dim=192, declared=variant, tile_map="never")
    source = render(plan)
    (record,) = re.findall(r"struct KeyValues {(.*?)};", source.text, re.DOTALL)
    assert record.count(";") == plan.structure.key_values == 2
    assert ".entry" in to_ptx(source)


@pytest.mark.exhaustive
def test_partial_results_beyond_q_k_and_v_have_a_region() -> None:
    """Those of shared tiles, where Q, K and V are small."""
    source = render(planned("full", backend="cuda", split_kv="tiles", head_dim=128, tile="{m: 128, n: 16}"))
    assert "constexpr uint32_t kMorePartials" in source.text
    assert ".entry" in to_ptx(source)


@pytest.mark.exhaustive
@pytest.mark.long
@sampled(
    always=1,
    head_dim=(64, 80, 128, 192, 256),
    deterministic={"": False, "ordered": True},
    layout=("dense", "varlen"),
    variant=("causal", "packed_documents"),
)
def test_records_of_backwards_are_aligned(head_dim: int, deterministic: bool, layout: str, variant: str) -> None:
    fields = {"head_dim": head_dim, "deterministic": str(deterministic).lower(), "layout": layout}
    plan = planned(variant, passes="backward", backward="{backend: cuda}", **fields)
    assert ".entry" in to_ptx(render(plan))


# --- packed words ---------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@sampled(always=1, consumers=[1, 2, 3], tile_n=[16, 32, 64])
def test_a_word_holds_the_last_tile_of_the_longest_sequence_and_all_flags(consumers: int, tile_n: int) -> None:
    plan = planned("sliding_window", backend="cuda", tile=f"{{m: {64 * consumers}, n: {tile_n}}}")
    source = render(plan)
    match = re.search(r"kTileMask = \(1 << (\d+)\) - 1;.*\n.*kPartialBit = (\d+), kSkippedBit", source.text)
    assert match is not None
    mask_bits, partial_bit = map(int, match.groups())
    assert (MAX_SEQLEN - 1) // tile_n < 2**mask_bits <= 2**partial_bit
    to_ptx(source)  # which asserts that the flags of all consumers fit above
    crowded = source.text.replace(f"kPartialBit = {partial_bit},", f"kPartialBit = {33 - 2 * consumers},")
    with pytest.raises(CompileError, match="static assertion failed"):
        to_ptx(replace(source, text=crowded))


@pytest.mark.exhaustive
@few("head_dim", [64, 256])
def test_steps_of_backwards_hold_the_last_tile(head_dim: int) -> None:
    plan = planned(passes="backward", backward="{backend: cuda}", head_dim=head_dim)
    source = render(plan)
    last = (MAX_SEQLEN - 1) // plan.tile_m
    assert f"static_assert({last} < kPartial)" in source.text
    to_ptx(source)
    with pytest.raises(CompileError, match="static assertion failed"):
        to_ptx(replace(source, text=source.text.replace(f"static_assert({last} <", f"static_assert({2**24} <")))
