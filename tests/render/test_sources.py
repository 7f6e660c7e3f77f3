"""Every Triton source of every shipped spec: it parses, binds no name of the user, names no path, and reads well."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest

from attngen.lang.ir import Op, Type, Var
from attngen.lang.variant import Scalar
from attngen.plan import plan
from attngen.plan.symbols import PREFIX, argument_name
from attngen.render import render
from attngen.resources import root
from attngen.schema import KernelSpec, expand, load_spec_text, preset_names
from tests.render.sources import TRITON, assigned, functions, kernels, parameters, rendered
from tests.sampling import some

pytestmark = pytest.mark.filterwarnings("error")  # a backslash that Python warns of

MAX_SOURCE_BYTES, MAX_LINE = 32_000, 320


@pytest.mark.parametrize("spec", TRITON)
def test_sources_parse_and_take_the_planned_arguments(spec: str) -> None:
    for kernel, source in rendered(spec):
        by_name = {function.name: function for function in functions(source.text)}
        assert source.name == kernel.name
        assert source.file_name == f"{kernel.name}.py"
        for part in kernel.launches:
            assert parameters(by_name[part.symbol]) == [argument.name for argument in part.arguments]
        if not kernel.launches:
            assert parameters(by_name[kernel.name]) == [argument.name for argument in kernel.arguments]


@pytest.mark.parametrize("spec", TRITON)
def test_no_kernel_binds_what_the_user_named(spec: str) -> None:
    for planned, source in rendered(spec):
        own = {a.name for a in planned.arguments if a.kind == "scalar" or (a.of or "").startswith("tensor:")}
        for kernel in kernels(source.text):
            assert not assigned(kernel) & own, planned.name


def with_scalar(spec: KernelSpec, name: str) -> KernelSpec:
    """Return the kernel with one more scalar of that name, which its mask reads."""
    variant = spec.variant
    read = Op("lt", (Var("kv", Type.INT), Var(name, Type.INT)), Type.BOOL)
    mask = Op("and", (variant.mask, read), Type.BOOL)
    return replace(spec, variant=replace(variant, mask=mask, scalars=(*variant.scalars, Scalar(name, "int32"))))


@pytest.mark.parametrize("preset", some(preset_names(), ("causal",)))
def test_a_scalar_with_the_name_of_any_temporary_does_not_collide(preset: str) -> None:
    entry = f"{{variant: {preset}, head_dim: 64, backend: triton}}"
    text = f"schema: 1\npackage: t\narch: [sm90a]\nkernels:\n  - {entry}\n"
    (spec,) = expand(load_spec_text(text))
    bound = set[str]().union(*(assigned(kernel) for kernel in kernels(render(plan(spec)).text)))
    temporaries = {name.removeprefix(PREFIX) for name in bound if name.startswith(PREFIX)}
    for name in sorted(temporaries):
        renamed = plan(with_scalar(spec, name))
        for kernel in kernels(render(renamed).text):
            assert not assigned(kernel) & set(parameters(kernel)) & {argument_name(name)}, name


@pytest.mark.parametrize("spec", TRITON)
def test_names_are_bound_before_they_are_read(spec: str) -> None:
    for kernel, source in rendered(spec):
        tree = ast.parse(source.text)
        known = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} | {"tl", "triton", "float"}
        known |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        for function in functions(source.text):
            bound = known | set(parameters(function)) | assigned(function)
            loads = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            assert loads <= bound, f"{kernel.name}: {sorted(loads - bound)}"


@pytest.mark.parametrize("spec", TRITON)
def test_sources_are_of_a_readable_size(spec: str) -> None:
    for kernel, source in rendered(spec):
        assert len(source.text) < MAX_SOURCE_BYTES, kernel.name
        assert max(map(len, source.text.splitlines())) <= MAX_LINE, kernel.name
        assert not re.search(r"[ \t]$", source.text, re.M), f"{kernel.name}: trailing blanks"
        assert "\n\n\n\n" not in source.text
        assert "\t" not in source.text
        assert source.text.endswith("\n")
        assert not source.text.endswith("\n\n")


@pytest.mark.parametrize("spec", TRITON)
def test_sources_name_their_origin_and_no_machine(spec: str) -> None:
    for kernel, source in rendered(spec):
        header = ast.get_docstring(ast.parse(source.text)) or ""
        assert header.startswith(kernel.name)
        assert f"Rendered by `attngen build specs/{spec}.yaml`, schedule {kernel.schedule}." in header
        assert str(root()) not in source.text
        assert not re.search(r"(/home/|/root/|/tmp/|/work/|[A-Z]:\\)", source.text)
        assert not re.search(r"\b20\d\d-\d\d-\d\d\b", source.text), "a date"


@pytest.mark.parametrize("spec", TRITON)
def test_no_template_syntax_is_left(spec: str) -> None:
    for kernel, source in rendered(spec):
        assert not re.search(r"\$\{|<%|%>|<#|#>|#%|\bUndefined\b|= None\b", source.text), kernel.name


def test_helpers_are_carried_only_where_they_are_called() -> None:
    for kernel, source in rendered("hopper_triton"):
        for function in functions(source.text):
            if function.name not in {launch.symbol for launch in kernel.launches}:
                assert source.text.count(f"{function.name}(") >= 2, f"{kernel.name}: {function.name} is never called"


HOSTILE = ("a b", "x;y", 'x"""', "../x", "ｘ", "import", "", "a\\nb", "_x", "x" * 65)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_could_break_a_source_never_reaches_one(name: str) -> None:
    from attngen.errors import SpecError

    text = (
        "schema: 1\npackage: t\narch: [sm90a]\nvariants:\n"
        f'  v:\n    mask: "kv < 3"\n    scalars: {{{name!r}: {{type: int32}}}}\n'
        "kernels:\n  - variant: v\n    head_dim: 64\n"
    )
    with pytest.raises(SpecError):
        expand(load_spec_text(text))
