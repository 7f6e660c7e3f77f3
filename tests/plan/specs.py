"""Kernel specs from a few words."""

from __future__ import annotations

from attngen.plan import Plan, plan
from attngen.schema import KernelSpec, expand, load_spec_text


def kernel_spec(variant: str = "causal", *, arch: str = "sm90a", declared: str = "", **fields: object) -> KernelSpec:
    """Return the one kernel spec of a spec, with ``split_kv`` that kernel; fields as in its YAML. The kernel's entry
    starts at line 5."""
    # a kernel of the specs under test is in Triton unless they say something else; None leaves the backend open
    triton = {"backward": "{backend: triton}"} if fields.get("passes") == "backward" else {"backend": "triton"}
    given = {"head_dim": 64, **fields, **{name: value for name, value in triton.items() if name not in fields}}
    lines = "".join(f"    {name}: {value}\n" for name, value in given.items() if value is not None)
    text = f"schema: 1\npackage: tested\narch: [{arch}]\nkernels:\n  - variant: {variant}\n{lines}{declared}"
    *ordinary, spec = expand(load_spec_text(text, "test.yaml"))
    assert len(ordinary) <= ("split_kv" in fields)
    return spec


def planned(variant: str = "causal", **fields: object) -> Plan:
    """Return the plan of the one kernel of a spec."""
    return plan(kernel_spec(variant, **fields))  # type: ignore[arg-type]
