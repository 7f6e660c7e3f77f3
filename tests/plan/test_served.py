"""Each field of specs and variants is served by a schedule, or refused by it with its name: none is ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any

import pytest

from attngen.dtypes import PAGE_BLOCK
from attngen.errors import PlanError
from attngen.lang.variant import WEIGHTS, Variant
from attngen.operations import OPERATIONS
from attngen.plan import plan
from attngen.plan.catalogue import named, schedules, with_schedule
from attngen.plan.served import _OTHERS, ANY, UNDECLARED
from attngen.schema import expand, load_spec, load_spec_text
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec, Roles
from tests.render.generated import SPECS
from tests.sampling import few

VARIANTS = """
  listed: {keys: index}
  scored: {mask: "q_pos >= kv", score: "s + 1.0"}
"""

#: An entry of a spec for each schedule of attention that shipped specs have; ``tests/render/others.yaml`` has the rest.
ENTRIES = {
    "hopper_forward": "variant: causal, head_dim: 64",
    "hopper_fp8": "variant: causal, head_dim: 128, dtype: fp8_e4m3",
    "hopper_decode": "variant: causal, head_dim: 64, split_kv: true",
    "hopper_wide": "variant: causal, head_dim: 512",
    "hopper_mla": "variant: causal, v: key, head_dim: {qk: 576, v: 512}",
    "hopper_indexed": "variant: listed, v: key, head_dim: {qk: 576, v: 512}",
    "mma_indexed": "variant: listed, head_dim: 64",
    "mma_forward": "variant: causal, head_dim: 64, arch: sm80",
    "mma_decode": "variant: causal, head_dim: 64, split_kv: true, arch: sm80",
    "triton_forward": "variant: causal, head_dim: 64, backend: triton",
    "hopper_backward": "variant: causal, head_dim: 64, passes: backward",
    "hopper_cluster": "variant: causal, head_dim: 256, passes: backward",
    "mla_backward": "variant: causal, v: key, head_dim: {qk: 576, v: 512}, passes: backward",
    "indexed_backward": "variant: listed, v: key, head_dim: {qk: 576, v: 512}, passes: backward",
    "mma_indexed_backward": "variant: listed, head_dim: 64, passes: backward",
    "mma_backward": "variant: causal, head_dim: 64, arch: sm80, passes: backward",
    "triton_backward": "variant: causal, head_dim: 64, passes: backward, backward: {backend: triton}",
    "triton_jvp": "variant: causal, head_dim: 64, passes: jvp",
    "index_scores": "variant: causal, head_dim: 128, passes: index_scores",
    "block_scores": "variant: causal, head_dim: 128, passes: block_scores",
}

#: Values of each field of ``KernelSpec`` that some schedule serves, beside its default.
VALUES: dict[str, tuple[Any, ...]] = {
    "kv_dtype": ("fp8_e4m3", "fp8_e5m2"),
    "out_dtype": ("fp16",),
    "tile_m": (64, 128),
    "tile_n": (16, 32, 64),
    "stages": (2, 3, 4, 8),
    "num_warps": (4, 8),
    "roles": (Roles(consumer=1), Roles(consumer=2), Roles(overlap=False)),
    "backward": (
        Backward(dkdv=Gradient(tile_m=64)),
        Backward(dkdv=Gradient(stages=2)),
        Backward(dq=Gradient(stages=2)),
    ),
    "loads": ("descriptor", "pointer"),
    "tile_map": ("never", "always"),
    "alignment": (16, 2),
    "fast_math": (False,),
    "softmax": ("exact_max", "lazy", "first_max", "bounded"),
    "softmax_scale": (0.5,),
    "deterministic": (True,),
    "persistent": (True, False),
    "order": ("longest_first", "natural"),
    "epilogue": ("staged", "direct"),
    "pack_gqa": (True, False),
    "transposed_v": (True,),
    "grouped_v": (True,),
    "scale_block": (1, 64, 128, PAGE_BLOCK),
}

#: What kernels do whatever these fields say: all but backward kernels in CUDA that add up dQ give the same bits, or
#: refuse, and masks of index scores are exact.
ALWAYS = {
    *(("deterministic", name) for name in ENTRIES if "backward" not in name or name == "triton_backward"),
    ("deterministic", "hopper_blocks"),
    ("fast_math", "index_scores"),
    ("fast_math", "block_scores"),
}


@cache
def spec_of(name: str) -> KernelSpec:
    """The spec that a schedule plans."""
    if name not in ENTRIES:
        return others()[name]
    text = f"schema: 1\narch: sm90a\nvariants:{VARIANTS}kernels:\n  - {{{ENTRIES[name]}}}\n"
    return replace(expand(load_spec_text(text))[-1], backend=named(name).backend)


@cache
def others() -> dict[str, KernelSpec]:
    """Specs of schedules of no shipped spec, and of those beside attention that kernels of attention bring."""
    text = (
        "schema: 1\narch: sm90a\nvariants:\n  blockwise: {blocks: 64}\nkernels:\n"
        "  - {variant: causal, head_dim: 64, layout: paged}\n"
        "  - {variant: causal, head_dim: 64, dtype: fp8_e4m3}\n"
        "  - {variant: causal, head_dim: 64, kv_dtype: fp8_e4m3, split_kv: true}\n"
        "  - {variant: causal, head_dim: 64}\n"
        "  - {variant: causal, head_dim: 64, passes: [index_scores, block_scores]}\n"
        "  - {variant: blockwise, head_dim: 64}\n"
    )
    kernels = expand(load_spec_text(text))
    made = [spec for row in OPERATIONS if row.specs for spec in resolve_name(row.specs)(kernels)]
    return {plan(spec).schedule: spec for spec in (*expand(load_spec(SPECS["others"])), *made)}


ALL = [row.name for operation in OPERATIONS for direction in operation.directions for row in schedules(direction)]


@few("name", ALL, always=range(0, 999, 2))
def test_the_plan_follows_each_field_that_a_schedule_serves(name: str) -> None:
    """A value that the declaration names may be what kernels do anyway. One that it leaves to the plan changes it."""
    spec, row = spec_of(name), named(name)
    first = plan(spec)
    assert first.schedule == name
    ignored = []
    for label, values in VALUES.items():
        answers = [answer(replace(spec, **{label: value}), name) for value in values]
        same = [value for value, planned in zip(values, answers, strict=True) if planned == first]
        if row.serves.get(label) is ANY:
            if len(same) == len(values) and (label, name) not in ALWAYS:
                ignored.append(label)
        elif any(value not in declared(row, label) for value in same):
            ignored.append(label)
    assert not ignored, ignored


def declared(row: Any, label: str) -> tuple[Any, ...]:
    values = row.serves.get(label)
    return () if values is None else values.allowed or ()


def answer(spec: KernelSpec, name: str) -> Any:
    """The plan of a spec by a schedule, or None if it refuses it or another one takes it."""
    try:
        planned = plan(spec)
    except PlanError:
        return None
    return planned if planned.schedule == name else None


def test_the_values_are_of_all_fields_that_a_declaration_may_list() -> None:
    names = {one.name for one in fields(KernelSpec)}
    assert names == {*VALUES, "dtype", *_OTHERS}
    assert {*UNDECLARED} == {*VALUES, "dtype", "mask", "score", "sink", "dropout", "keys"}


@dataclass(frozen=True)
class Later(KernelSpec):
    """A spec with a field that no schedule has heard of."""

    unheard: bool = False


@dataclass(frozen=True)
class LaterVariant(Variant):
    """A variant with a setting that nobody has heard of."""

    unheard: bool = field(default=False, kw_only=True)


@pytest.mark.parametrize("name", ALL)
def test_a_field_that_nobody_has_heard_of_is_refused_by_name(name: str) -> None:
    spec = spec_of(name)
    given = {one.name: getattr(spec, one.name) for one in fields(spec)}
    assert plan(Later(**given)).schedule == name
    with pytest.raises(PlanError, match="does not serve it; found true; allowed: false") as caught:
        plan(Later(**given, unheard=True))
    assert caught.value.field == "unheard"
    variant = LaterVariant(**{one.name: getattr(spec.variant, one.name) for one in fields(spec.variant)}, unheard=True)
    with pytest.raises(PlanError, match="does not serve it; found true; allowed: false") as caught:
        plan(replace(spec, variant=variant))
    assert caught.value.field == "variant.unheard"


@pytest.mark.parametrize("name", ALL)
def test_weights_that_nobody_has_heard_of_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would else compute others, under their name."""
    monkeypatch.setitem(WEIGHTS, "unheard", WEIGHTS["sigmoid"])
    spec = spec_of(name)
    with pytest.raises(PlanError, match="found unheard") as caught:
        plan(replace(spec, variant=replace(spec.variant, weights="unheard")))
    assert caught.value.field == "variant.weights"


def test_a_schedule_without_a_declaration_serves_the_fields_that_it_could_know() -> None:
    outside = replace(named("hopper_forward"), name="outside", serves=UNDECLARED)
    spec = replace(spec_of("hopper_forward"), softmax="lazy", loads="pointer")
    with with_schedule(outside, before="hopper_forward"):
        assert plan(spec).softmax == "lazy"
        with pytest.raises(PlanError, match="outside does not serve it"):
            plan(Later(**{one.name: getattr(spec, one.name) for one in fields(spec)}, unheard=True))


@pytest.mark.parametrize(
    ("field", "value"), [("persistent", True), ("order", "natural"), ("order", "longest_first"), ("epilogue", "staged")]
)
def test_blocks_that_share_a_tile_refuse_an_order_of_tiles(field: str, value: Any) -> None:
    """An entry of a spec leaves these to its ordinary kernel; a ``KernelSpec`` may say them."""
    split = replace(spec_of("hopper_forward"), split_tiles=True)
    assert plan(replace(split, persistent=False, epilogue="direct")) == plan(split)
    with pytest.raises(PlanError, match="'split_kv: tiles' a block has a part of one tile.*; leave it out") as caught:
        plan(replace(split, **{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("entry", "field", "says"),
    [
        ("variant: causal, head_dim: 64, transposed_v: true", "transposed_v", "or say 'dtype: fp8_e4m3'$"),
        (
            "variant: causal, head_dim: 64, dtype: fp8_e4m3, layout: varlen, transposed_v: true",
            "transposed_v", "or say 'layout: dense'$",
        ),
        ("variant: causal, head_dim: 512, softmax: first_max", "softmax", "lazy .*; found first_max; allowed: lazy"),
        ("variant: causal, head_dim: 64, split_kv: true, softmax: lazy", "softmax", "found lazy; allowed: exact_max"),
        ("variant: listed, head_dim: 64, tile: {m: 128}", "tile.m", "have one tile.*; found 128; leave it out"),
        (
            "variant: causal, v: key, head_dim: {qk: 576, v: 512}, kv_dtype: fp8_mla_656, loads: descriptor",
            "loads", "are read by address",
        ),
        ("variant: scored, head_dim: 128, passes: index_scores", "variant.score", r"mask alone; found s \+ 1.0"),
        (
            "variant: causal, v: key, head_dim: {qk: 576, v: 512}, passes: backward, tile_map: always",
            "tile_map", "found always; allowed: auto, never",
        ),
        # the condition that failed, and nothing that would not help
        (
            "variant: causal, head_dim: 64, split_kv: true, arch: sm100a, backend: cuda",
            "backend", "^(?!.*split_kv).*cuda has no forward for sm100a",
        ),
        (
            "variant: causal, head_dim: 512, split_kv: tiles, backend: cuda",
            "split_kv", "beyond 256 whose blocks share the keys of a tile of queries; allowed: .*split_kv: false",
        ),
    ],
)  # fmt: skip
def test_what_was_ignored_is_refused_with_the_condition_that_failed(entry: str, field: str, says: str) -> None:
    text = f"schema: 1\narch: sm90a\nvariants:{VARIANTS}kernels:\n  - {{{entry}}}\n"
    with pytest.raises(PlanError, match=says) as caught:
        for spec in expand(load_spec_text(text)):
            plan(spec)
    assert caught.value.field == field


@few("name", ALL, always=range(0, 999, 2))
def test_refusals_say_values_as_specs_do(name: str) -> None:
    spec = spec_of(name)
    said = {
        "roles": (Roles(overlap=True, producer_registers=24),),
        "backward": (Backward(dkdv=Gradient(64, 32, 2, 8)),),
    }
    for label, values in VALUES.items():
        for value in (*values, *said.get(label, ())):
            refused = refusal(replace(spec, **{label: value}))
            assert not re.search(r"\b(?:None|True|False)\b|[{(\[]'|tile_m|num_warps|_registers", refused), refused


def refusal(spec: KernelSpec) -> str:
    """The message that refuses a spec; none if it is planned."""
    try:
        plan(spec)
    except PlanError as error:
        return error.message
    return ""


def test_a_refusal_names_the_tile_of_a_backward() -> None:
    given = Backward(dkdv=Gradient(tile_m=64, num_warps=8))
    says = "one tile; found {dkdv: {tile: {m: 64}, warps: 8}}; leave it out"
    with pytest.raises(PlanError, match=re.escape(says)):
        plan(replace(spec_of("mla_backward"), backward=given))
