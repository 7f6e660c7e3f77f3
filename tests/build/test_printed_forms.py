"""A Python prompt prints a spec, and each value made from it, as one line that says which it is."""

from __future__ import annotations

from typing import Any

from attngen import resources
from attngen.compile.artifact import Artifact
from attngen.plan.planner import plan
from attngen.render import render
from attngen.runtime.registry.packages import Package
from attngen.schema import expand, load_spec


def test_a_spec_and_its_plans_print_in_a_line() -> None:
    spec = load_spec(resources.specs_dir() / "hopper.yaml")
    planned = plan(expand(spec)[0])
    texts = {
        repr(spec): ("hopper.yaml", "package attngen_hopper", f"{len(spec.model.kernels)} entries"),
        repr(spec.tree): ("hopper.yaml", "schema"),
        repr(planned): (planned.name, "hopper.yaml"),
        repr(render(planned)): (f"{planned.name}.cu", "lines"),
        **{repr(one): (name,) for name, one in spec.variants.items()},
    }
    for text, parts in texts.items():
        assert len(text) < 200, text
        assert all(part in text for part in parts), text


def test_a_package_prints_in_a_line() -> None:
    def unread() -> Any:
        raise AssertionError("a kernel was read")

    package = Package("few", "somewhere", {"causal": (unread, unread), "full": (unread,)})
    assert repr(package) == "Package(few, from somewhere: 2 variants, 3 kernels)"


def test_an_artifact_prints_in_a_line() -> None:
    assert repr(Artifact(b"\0" * 70, {"name": "fwd"}, {"source.cu": "x" * 999})) == "Artifact(fwd: a cubin of 70 B)"
