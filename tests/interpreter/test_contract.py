"""The exact parts of the contract: strides, canaries, hidden and visible NaN, batches, maps, large logits."""

from __future__ import annotations

import numpy as np
import pytest

from attngen.inspect.cases import Case
from tests.interpreter.process import Interpreter
from tests.interpreter.test_backward import spec as of_gradients
from tests.interpreter.test_numerics import LOADS, spec
from tests.sampling import few, sampled

RAGGED = Case("ragged", (21, 21), (37, 37), heads=4, kv_heads=2)


@sampled(
    always=2, kind=["slices of packed qkv", "padded", "transposed", "transposed view"], loads=["descriptor", "pointer"]
)
def test_strides(interpreter: Interpreter, kind: str, loads: str) -> None:
    difference, largest = interpreter.call("with_strides", spec(loads=loads), kind)
    assert difference == 0
    assert largest > 0.5


@sampled(always=1, kind=["expanded", "odd offset"], dtype=["fp16", "fp32"])
def test_strides_that_only_pointers_express(interpreter: Interpreter, kind: str, dtype: str) -> None:
    text = spec(loads="pointer", alignment="element", dtype=dtype)
    assert interpreter.call("with_strides", text, kind)[0] == 0


@pytest.mark.exhaustive
@sampled(always=1, variant=["causal", "allowed"], head_dim=["32", "48", "112"])
def test_nothing_around_the_output_is_written(interpreter: Interpreter, variant: str, head_dim: str) -> None:
    same, untouched = interpreter.call("padded_output", spec(variant, head_dim=head_dim), RAGGED)
    assert same
    assert untouched


def test_rows_of_no_sequence_are_left_alone(interpreter: Interpreter) -> None:
    assert interpreter.call("varlen_rows_untouched", spec(layout="varlen"))


@pytest.mark.exhaustive
def test_the_log_sum_exp_is_optional(interpreter: Interpreter) -> None:
    assert interpreter.call("without_lse", spec(), RAGGED)


@sampled(always=1, value=[np.nan, np.inf, -np.inf, 6e4], loads=LOADS)
def test_keys_hidden_inside_a_partial_tile_do_not_matter(interpreter: Interpreter, loads: str, value: float) -> None:
    # Keys 30 to 36 lie in a tile that queries of the last tile see in part, but no query sees these keys.
    declared = 'variants:\n  short: {mask: "kv < 30 and q_pos >= kv"}\n'
    text = spec("short", declared=declared, loads=loads)
    zeros = interpreter.call("outputs_with", text, RAGGED, [("k", 30, 37, 0.0)], {})
    poisoned = interpreter.call("outputs_with", text, RAGGED, [("k", 30, 37, value)], {})
    for one, other in zip(zeros, poisoned, strict=True):
        np.testing.assert_array_equal(one, other)


#: Scalars of twelve queries against 64 keys, and keys of which no query sees any.
EMPTY: dict[str, tuple[dict[str, int], tuple[int, int]]] = {
    "sliding_window": ({"window": 5}, (0, 16)),
    "sink_window": ({"sinks": 2, "window": 4}, (16, 32)),
    "chunked": ({"chunk": 48}, (0, 48)),
    "dilated": ({"window": 3, "dilation": 3}, (0, 32)),
}


@sampled(always=1, variant=EMPTY.keys(), tile_map=["auto", "always"], value=[np.nan, np.inf, 6e4])
def test_tiles_that_the_mask_proves_empty_are_never_loaded(
    interpreter: Interpreter, variant: str, tile_map: str, value: float
) -> None:
    text, (arguments, empty) = spec(variant, tile_map=tile_map), EMPTY[variant]
    case = Case("few queries", (12,), (64,), heads=2)
    runs = [
        interpreter.call("outputs_with", text, case, [("k", *empty, x), ("v", *empty, x)], arguments)
        for x in (0.0, value)
    ]
    for one, other in zip(*runs, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one, other)


NARROW = {"sliding_window": {"window": 3}, "sink_window": {"sinks": 0, "window": 3}, "chunked": {"chunk": 16}}


@sampled(always=1, variant=NARROW.keys(), name=["k", "v"], keys=[64, 69])
def test_an_empty_tile_before_a_ragged_last_one_is_never_loaded(
    interpreter: Interpreter, variant: str, name: str, keys: int
) -> None:
    """No query sees any of its keys, also where a ragged last tile is moved back over it."""
    case = Case("last tile only", (2,), (keys,), heads=2)
    last = (keys - 1) // 16 * 16
    runs = [
        interpreter.call("outputs_with", spec(variant), case, [(name, 0, last, x)], NARROW[variant])
        for x in (0.0, np.nan)
    ]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_visible_nan_in_k_reaches_exactly_the_rows_that_see_it(interpreter: Interpreter) -> None:
    case = Case("square", (40,), (40,), heads=2)
    nan, changed = interpreter.call("rows_with_nan", spec(), case, "k", 21)
    seen = np.broadcast_to((np.arange(40) >= 21)[None, :, None], nan.shape)
    np.testing.assert_array_equal(nan, seen)
    np.testing.assert_array_equal(changed, seen)


def test_a_visible_nan_in_v_reaches_every_row_that_sees_it(interpreter: Interpreter) -> None:
    case = Case("square", (40,), (40,), heads=2)
    nan, changed = interpreter.call("rows_with_nan", spec(), case, "v", 21)
    rows = np.arange(40)
    assert nan[:, rows >= 21].all()
    assert not changed[:, rows < 16].any()  # query tiles that never load that KV tile


@pytest.mark.exhaustive
@few("variant", ["causal", "allowed", "sliding_window", "packed_documents", "alibi"])
def test_a_sequence_alone_gives_the_same_bits(interpreter: Interpreter, variant: str) -> None:
    case = Case("batch", (21,) * 3, (53,) * 3, heads=4, kv_heads=2, used=(53, 0, 39))
    assert interpreter.call("alone_and_in_batch", spec(variant), case)


def test_decoding_gives_what_the_prefill_gave(interpreter: Interpreter) -> None:
    assert interpreter.call("decode_and_prefill", spec()) <= 1e-3


@pytest.mark.exhaustive
@sampled(
    always=1,
    variant=["allowed", "dilated", "neighbourhood_2d", "packed_documents", "full"],
    layout=["dense", "varlen"],
    seed=range(2),
)
def test_the_classifier_finds_the_map_of_the_reference(
    interpreter: Interpreter, variant: str, layout: str, seed: int
) -> None:
    if layout == "dense":
        case = Case("map", (20,) * 2, (530,) * 2, heads=2, used=(333, 530))
    else:
        case = Case("map", (20, 3), (530, 47), heads=2, used=(530, 20))
    text = spec(variant, tile_map="always", layout=layout)
    assert interpreter.call("map_is_right", text, case, seed)


#: Masks that read tensors at one element for blocks of pairs: smaller than a tile, a tile, larger, of rows; and beside
#: conditions that bounds decide or leave to pairs.
BLOCKS = {
    "small": "sel[h, q // 8, kv // 8]",
    "beside pairs": "sel[h, q // 16, kv // 8] and seen[b, kv]",
    "tile": "sel[h, q // 16, kv // 16]",
    "large": "sel[h, q // 32, kv >> 6] and q_pos >= kv",
    "wide": "sel[h, q // 4, kv // 32] or q_pos == kv",
    "rows": "q_pos >= 0 and sel[h, q_pos, kv // 16]",
    "shifted": "sel[h, (q + 8) // 16, kv // 16] or not sel[h, q // 8, (kv + 4) // 16]",
    "other": "(not sel[h, q // 8, kv // 16]) if q_pos >= kv else seen[b, kv]",
}


def of_blocks(mask: str) -> str:
    """The declaration of a variant with such a mask."""
    tensors = "sel: {dtype: bool, shape: [h, rows, columns]}, seen: {dtype: bool, shape: [b, seqlen_k]}"
    return f'variants:\n  blocks: {{mask: "{mask}", tensors: {{{tensors}}}}}\n'


@pytest.mark.exhaustive
@sampled(every=2, always=1, mask=BLOCKS, layout=["dense", "varlen"], seed=range(2))
def test_the_classifier_decides_blocks(interpreter: Interpreter, mask: str, layout: str, seed: int) -> None:
    """More queries than keys in one sequence, ragged ends, keys that are not used, and more tiles than a word has."""
    if layout == "dense":
        case = Case("map", (20,) * 2, (530,) * 2, heads=2, used=(9, 530))
    else:
        case = Case("map", (20, 23), (530, 11), heads=2, used=(530, 11))
    text = spec("blocks", declared=of_blocks(mask), tile_map="always", layout=layout)
    assert interpreter.call("map_is_right", text, case, seed)


@pytest.mark.exhaustive
@sampled(every=2, always=1, mask=BLOCKS, layout=["varlen", "dense"], tile=["{m: 16, n: 16}", "{m: 32, n: 16}"])
def test_classifiers_of_gradients_decide_blocks(interpreter: Interpreter, mask: str, layout: str, tile: str) -> None:
    lengths = ((45,) * 2, (70,) * 2) if layout == "dense" else ((45, 13), (70, 7))
    case = Case("map", *lengths, heads=2, used=(33, 70) if layout == "dense" else (70, 7))
    text = of_gradients("blocks", declared=of_blocks(mask), tile_map="always", layout=layout, tile=tile)
    assert interpreter.call("gradient_maps_are_right", text, case, 3)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e10, 2e18])
def test_large_logits_stay_finite(interpreter: Interpreter, size: float) -> None:
    text = spec("full", dtype="fp32")
    assert interpreter.call("large_logits", text, size) == (True, True)
