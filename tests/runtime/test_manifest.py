"""A manifest's entries: what a plan decides arrives in the runtime, and what does not fit is named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from attngen.errors import LoadError
from attngen.manifest import Argument, KernelFields, LaunchFields, StructureFields, TunedOn
from attngen.operations import HELPER_VARIANTS
from attngen.plan.model import Plan
from attngen.records import MisfitError, read
from attngen.runtime.kernels.module import Kernel
from tests.plan.specs import planned


def manifest_of(plan: Plan) -> dict[str, Any]:
    """The manifest of a plan as a build writes it to a file."""
    content: dict[str, Any] = json.loads(json.dumps({**plan.to_dict(), "resources": {"shared_memory": 0}}))
    return content


PLANS = {
    "forward": planned(backend="cuda"),
    "tile map": planned("packed_documents", backend="cuda", layout="varlen", tile_map="always"),
    "decode": planned(head_dim=128, backend="cuda", layout="paged", split_kv="true"),
    "triton": planned(backend="triton"),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_a_plan_decides_arrives(name: str) -> None:
    plan = replace(PLANS[name], tuned=(TunedOn("a.yaml", "a card", (1.0, 2.0, 3.0)),))
    kernel = Kernel(manifest_of(plan), bytes, origin="here")
    for field in fields(KernelFields):
        if field.name not in ("structure", "visible"):
            assert getattr(kernel, field.name) == getattr(plan, field.name), field.name
    assert json.loads(json.dumps(plan.visible)) == json.loads(json.dumps(kernel.visible))
    for field in fields(StructureFields):
        assert getattr(kernel.structure, field.name) == getattr(plan.structure, field.name), field.name
    for launch, own in zip(kernel.launches, plan.launches, strict=True):
        for field in fields(LaunchFields):
            assert getattr(launch, field.name) == getattr(own, field.name), field.name
        for parameter, argument in zip(launch.entry.layout.parameters, own.arguments, strict=True):
            assert replace(parameter, offset=-1) == argument


@pytest.mark.parametrize("name", sorted(HELPER_VARIANTS))
def test_names_of_what_no_variant_computes_are_read(name: str) -> None:
    manifest = manifest_of(PLANS["forward"])
    manifest["variant"]["name"] = name
    assert Kernel(manifest, bytes, origin="here").variant_name == name


@pytest.mark.parametrize("name", ["../append-kv", "/append", "-kv", "", "a" * 201])
def test_a_variants_name_is_no_path(name: str) -> None:
    manifest = manifest_of(PLANS["forward"])
    manifest["variant"]["name"] = name
    with pytest.raises(LoadError, match="where a name"):
        Kernel(manifest, bytes, origin="here")


def test_an_argument_is_written_without_its_defaults() -> None:
    argument = Argument("q_ptr", "pointer", "*bf16", of="q", box=(64, 1))
    assert argument.to_dict() == {"name": "q_ptr", "kind": "pointer", "type": "*bf16", "of": "q", "box": [64, 1]}
    assert read(Argument, argument.to_dict()) == argument


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("tile_m",), 0, "has 0 in tile_m, where a number from 1 to 2147483647 must stand"),
        (("pack_gqa",), 1, "has 1 in pack_gqa, where true or false must stand"),
        (("structure", "skips"), None, "has null in structure.skips, where true or false must stand"),
        (("launches", 0, "cluster"), "2", r'has "2" in launches\[0\].cluster, where a number from 1'),
        (("launches",), {}, "has an object in launches, where a list must stand"),
        (("variant", "scalars"), [{"name": "x"}], r"lacks 'variant.scalars\[0\].dtype'"),
        (("format",), 1, "manifest format 1, but this version of attngen reads format 3"),
    ],
)
def test_what_does_not_fit_is_named(place: tuple[Any, ...], value: Any, message: str) -> None:
    manifest = manifest_of(PLANS["forward"])
    holder = manifest
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    with pytest.raises(LoadError, match=message):
        Kernel(manifest, bytes, origin="here")


def test_what_a_newer_version_writes_beside_is_passed_over() -> None:
    manifest = manifest_of(PLANS["forward"])
    manifest["shape_of_things"] = manifest["launches"][0]["more"] = {"to": "come"}
    assert Kernel(manifest, bytes, origin="here").tile_m == PLANS["forward"].tile_m


def test_a_record_that_is_no_object_is_refused() -> None:
    with pytest.raises(MisfitError, match="an object must stand"):
        read(Argument, [])
