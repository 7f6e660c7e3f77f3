"""The plan as a value: names that tell kernels apart, arguments that cannot collide, JSON and pickles."""

from __future__ import annotations

import dataclasses
import itertools
import json
import keyword
import pickle

import pytest

from attngen.plan import plan
from attngen.plan.symbols import PREFIX
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, preset_names
from tests.plan.specs import kernel_spec, planned
from tests.sampling import few

SHIPPED = sorted(path.name for path in specs_dir().glob("*.yaml"))

CHOICES: tuple[dict[str, object], ...] = (
    {},
    {"head_dim": 128},
    {"head_dim": "{qk: 64, v: 128}"},
    {"dtype": "fp16"},
    {"dtype": "fp32"},
    {"layout": "varlen"},
    {"arch": "sm80"},
    {"arch": "sm100a"},
    {"tile": "{m: 32}"},
    {"tile": "{n: 32}"},
    {"pipeline": "{stages: 1}"},
    {"warps": 2},
    {"loads": "pointer"},
    {"alignment": "element"},
    {"fast_math": "false"},
    {"tile_map": "always"},
    {"variant": "full"},
)


def test_plans_that_differ_have_different_names() -> None:
    plans = [planned(**choice) for choice in CHOICES]  # type: ignore[arg-type]
    for one, other in itertools.combinations(plans, 2):
        assert one.name != other.name
    for kernel in plans:
        assert kernel.name.isidentifier()
        assert len(kernel.name) < 120
        assert kernel.arch_name in kernel.name
        assert kernel.variant.name in kernel.name


def test_the_same_spec_gives_the_same_plan() -> None:
    for choice in CHOICES:
        one, other = (plan(kernel_spec(**choice)) for _ in range(2))  # type: ignore[arg-type]
        assert one == other
        assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())


def test_a_plan_is_frozen_and_travels() -> None:
    kernel = planned("allowed")
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.tile_m = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(kernel)) == kernel


@few("name", SHIPPED, always=range(0, 999, 5))
def test_every_kernel_of_a_shipped_spec_is_planned_once(name: str) -> None:
    plans = [plan(spec) for spec in expand(load_spec(specs_dir() / name))]
    assert len({kernel.name for kernel in plans}) == len(plans)
    assert not any("/" in kernel.spec_file and kernel.spec_file.startswith("/") for kernel in plans)


@few("layout", ["dense", "varlen"], always=range(0, 999, 3))
@pytest.mark.parametrize("name", preset_names())
def test_arguments_have_names_of_their_own(name: str, layout: str) -> None:
    for loads in ("descriptor", "pointer"):
        kernel = planned(name, layout=layout, loads=loads)
        for arguments in (launch.arguments for launch in kernel.launches):
            names = [argument.name for argument in arguments]
            assert len(set(names)) == len(names)
            assert all(n.isidentifier() and not keyword.iskeyword(n) for n in names)
            for argument in arguments:
                if argument.kind in ("scalar", "extent") or (argument.of or "").startswith("tensor:"):
                    assert argument.name.removeprefix(f"{argument.kind}_").startswith(PREFIX)


def test_arguments_promise_what_the_alignment_says() -> None:
    aligned = planned(loads="pointer").attributes
    assert aligned["q_ptr"] == 16
    assert aligned["stride_q_s"] == 8  # elements of two bytes
    loose = planned(alignment="element").attributes
    assert "q_ptr" not in loose
    assert "stride_q_s" not in loose
    assert planned(dtype="fp32", loads="pointer").attributes["stride_q_s"] == 4


def test_scalars_that_are_fixed_are_no_arguments() -> None:
    declared = 'variants:\n  w:\n    mask: "q_pos - kv < n"\n    scalars: {n: {type: int32, const: 7}}\n'
    kernel = planned("w", declared=declared)
    assert not [argument for argument in kernel.arguments if argument.kind == "scalar"]


@pytest.mark.parametrize("name", ["tile", "acc", "p", "q_index", "lowest_bit", "full_lo_3", "visible_until_0"])
def test_a_scalar_with_a_name_of_the_kernel_gets_another_one(name: str) -> None:
    declared = f'variants:\n  w:\n    mask: "q_pos - kv < {name}"\n    scalars: {{{name}: {{type: int32}}}}\n'
    kernel = planned("w", declared=declared)
    (argument,) = [argument for argument in kernel.arguments if argument.kind == "scalar"]
    assert argument.of == name
    assert argument.name != name
