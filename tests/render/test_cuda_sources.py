"""Every CUDA source: it takes the planned arguments, names no user's text and no machine, and reads well."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import pytest

from attngen.lang.declared import Scalar
from attngen.lang.facts import index
from attngen.lang.ir import Op, Type
from attngen.lang.printing import canonical
from attngen.lang.simplify import integer, make
from attngen.plan import plan
from attngen.render import render
from attngen.render.cuda_math import element_bindings
from attngen.render.expressions import CUDA, corner_bindings
from attngen.resources import root, templates_dir
from attngen.schema import KernelSpec
from attngen.schema.names import check_symbol
from tests.plan.specs import kernel_spec, planned
from tests.render.cuda_sources import SPECS, code, identifiers, kernels, rendered
from tests.render.headers import headers
from tests.sampling import few, sampled

MAX_BYTES = 45_000
#: The same of latent attention, whose two consumers exchange parts of S and P, or multiply the transposes of few rows.
MAX_LATENT_BYTES = 73_500
#: The bounds of ``dilated`` and ``neighbourhood_2d`` are formulas of one line.
MAX_LINE = 320

both = few("spec", SPECS, always=(1,), often=(0, 4))


@both
def test_kernels_take_the_planned_arguments(spec: str) -> None:
    for kernel, source in rendered(spec):
        wanted = {kernel.name: [argument.name for argument in kernel.arguments]}
        for launch in kernel.launches:
            wanted[launch.symbol] = [argument.name for argument in launch.arguments]
        assert kernels(source.text) == wanted
        assert source.name == kernel.name
        assert source.file_name == f"{kernel.name}.cu"


@both
def test_sources_are_of_a_readable_size(spec: str) -> None:
    for kernel, source in rendered(spec):
        largest = MAX_LATENT_BYTES if "_mla_" in kernel.name else MAX_BYTES
        assert len(source.text.encode()) <= largest, kernel.name
        assert max(map(len, source.text.splitlines())) <= MAX_LINE, kernel.name
        assert not re.search(r"[ \t]$|\t|\n\n\n", source.text, re.M), f"{kernel.name}: blanks"
        assert source.text.endswith("}\n")


@both
def test_no_template_syntax_is_left(spec: str) -> None:
    for kernel, source in rendered(spec):
        assert not re.search(r"\$\{|<%|%>|<#|#>|//%|\bUndefined\b", source.text), kernel.name
        assert not re.search(r"\b(None|True|False)\b", code(source.text)), kernel.name


@both
def test_brackets_balance(spec: str) -> None:
    for kernel, source in rendered(spec):
        open_ones = []
        for character in code(source.text):
            if character in "([{":
                open_ones.append(character)
            elif character in ")]}":
                assert open_ones, kernel.name
                assert open_ones.pop() + character in ("()", "[]", "{}"), kernel.name
        assert not open_ones, kernel.name


@both
def test_sources_name_their_origin_and_no_machine(spec: str) -> None:
    for kernel, source in rendered(spec):
        head = source.text.partition("#include")[0]
        assert head.startswith(f"// {kernel.name}\n")
        assert f"variant {kernel.variant.name}: mask `{canonical(kernel.variant.mask)}`" in head
        assert f"Rendered by `attngen build {spec}`, schedule {kernel.schedule}." in head
        assert str(root()) not in source.text
        assert not re.search(r"(/home/|/root/|/tmp/|/work/|[A-Z]:\\)", source.text)
        assert not re.search(r"\b20\d\d-\d\d-\d\d\b", source.text), "a date"


@both
def test_every_include_is_carried(spec: str) -> None:
    for kernel, source in rendered(spec):
        included = re.findall(r'^#include "([^"]*)"$', source.text, re.M)
        assert source.text.count("#include") == len(included) >= 5, kernel.name
        reached = {name for text in source.headers.values() for name in re.findall(r'#include "([^"]*)"', text)}
        assert set(included) | reached == set(source.headers), kernel.name


def test_headers_have_names_of_their_own_and_include_no_other_files() -> None:
    """Packages have all of their headers in one folder."""
    assert len(headers()) == len(list((templates_dir() / "cuda").rglob("*.cuh"))), "two headers of one name"
    for text in headers().values():
        assert set(re.findall(r'#include "([^"]*)"', text)) <= set(headers())
        assert not re.search(r"#include *<", text), "a header of the toolkit, which a build may lack"


def test_rendering_again_gives_the_same_bytes() -> None:
    for variant in ("causal", "packed_documents", "allowed"):
        one, other = (render(planned(variant, backend="cuda")) for _ in range(2))
        assert one == other


def test_the_users_own_text_reaches_no_source() -> None:
    declared = (
        "variants:\n  own:\n    description: 'thirty-three */ keys'\n"
        '    mask: "(kv)  <=  ((q_pos))  and  not   kv  <  33"\n    score: "s   +   0.250"\n'
    )
    text = render(planned("own", backend="cuda", declared=declared)).text
    for written in ("thirty", "(kv)  <=", "not   kv", "s   +", "0.250"):
        assert written not in text
    assert "0.25f" in text


# --- packed heads ---------------------------------------------------------------------------------------------


def test_values_of_the_head_are_computed_for_each_row() -> None:
    """No line outside the loop over elements, and no multiplier, holds a value of one head."""
    declared = (
        'variants:\n  own:\n    mask: "kv < limit[h] and kv <= q_pos - 3 * h"\n'
        '    score: "gain[h] * cap * tanh(s / cap)"\n'
        "    scalars: {cap: {type: fp32, const: 20.0}}\n"
        "    tensors:\n      limit: {dtype: int32, shape: [h]}\n"
        "      gain: {dtype: fp32, shape: [h], range: {min: 0}}\n"
    )
    for packed in (True, False):
        text = render(planned("own", backend="cuda", declared=declared, pack_gqa=str(packed).lower())).text
        work = text.partition("while (more) {")[2].partition("const auto finish_logits")[0]
        element = text.partition("const auto finish_logits")[2].partition("// The first tile.")[0]
        for name in ("u_limit[", "u_gain["):
            assert (name in element) == packed
            assert (name in work) == (not packed)
        # the first thing that is declared for a row of an element
        assert element.count("const int h = (hk << group_bits) + (row_in_group + 8 * row & group - 1);") == 2 * packed
        assert ("const int h_lo = hk << group_bits, h_hi = h_lo + (group - 1);" in text) == packed
        assert bool(re.search(r"\bwork\.h\b", text)) != packed


def value(expression: str, **names: int) -> int:
    """Evaluate integer arithmetic of a source: C and Python agree on the order of these operators."""
    number = eval(expression.replace("work.", "").replace(" / ", " // "), {"min": min}, names)
    assert isinstance(number, int)
    return number


@sampled(always=3, group=[1, 2, 4, 8, 16, 32, 64], layout=["dense", "varlen"])
def test_rows_of_a_packed_tile_are_the_heads_of_a_query_then_the_next(layout: str, group: int) -> None:
    """Row r of a tile is query r / group and head r % group, wherever rows are written, masked or scored."""
    kernel = planned("alibi", backend="cuda", layout=layout, pack_gqa="true", tile="{m: 192}")
    text = render(kernel).text
    fixed = {"group": group, "group_bits": group.bit_length() - 1, "q_start": 5, "hk": 3, "seqlen_q": 10**6}
    wanted = {r: (5 + r // group, 3 * group + r % group) for r in range(192)}
    places = re.findall(r"const int q = (.*);\n *const int h = (.*);", text)
    assert len(places) == (3 if layout == "dense" else 4)  # two by the scheduler, lse, and out of a varlen kernel
    (first,) = set(re.findall(r"const int q_first = (.*);", text))
    (q_row,) = set(re.findall(r"const int q_row = (.*);  //", text))
    (h_row,) = set(re.findall(r"const int h = (\(hk .*);", text))
    for r, (q, h) in wanted.items():
        warpgroup, in_group = divmod(r, 64)
        own = {**fixed, "warpgroup": warpgroup, "row_in_group": in_group - 8 * (in_group // 8 % 2)}
        for where, head in places:
            by_chunk = 8 if "i / 8" in where else 1
            names = own | {"i": by_chunk * r, "row": in_group // 8 % 2 if "row_in_group" in where else in_group}
            assert (value(where, **names), value(head, **names)) == (q, h), where
        names = own | {"row": in_group // 8 % 2}
        assert value(q_row, q_first=value(first, **names), **names) == q
        assert value(h_row, **names) == h
    assert ("work.q_start + (64 * warpgroup >> group_bits), work.hk, work.b);" in text) == (layout == "dense")


# --- names ----------------------------------------------------------------------------------------------------

#: Between them, these make every line of the templates.
FORMS: tuple[tuple[str, dict[str, object]], ...] = (
    ("full", {}),
    ("causal", {"layout": "varlen"}),
    ("causal", {"warps": "{schedule: cooperative, overlap: false}", "persistent": "false", "softmax": "lazy"}),
    ("causal", {"softmax": "exact_max", "head_dim": 256}),
    ("causal", {"epilogue": "direct", "order": "natural"}),
    ("sliding_window", {"epilogue": "direct", "order": "natural", "softmax": "lazy"}),
    ("causal_packed", {"warps": "{overlap: false}", "layout": "varlen"}),
    ("causal_packed", {}),
    ("softcap_window", {}),
    ("relative_bias", {}),
    ("dilated", {"layout": "varlen", "head_dim": 80}),
    ("allowed", {}),
    ("allowed", {"layout": "varlen"}),
    ("alibi", {"pack_gqa": "true"}),
    ("dilated", {"pack_gqa": "true", "layout": "varlen"}),
    ("sliding_window", {"pack_gqa": "true", "tile": "{m: 128}"}),
)


def is_legal(name: str) -> bool:
    try:
        check_symbol(name)
    except ValueError:
        return False
    return True


#: Names that one rendering tries: the end of a range that reads as many is still found in closed form.
TOGETHER = 16


def with_scalars(spec: KernelSpec, names: Sequence[str]) -> Counter[str]:
    """Return the identifiers of a kernel whose mask compares the key with the sum of these scalars, too."""
    variant = spec.variant
    added = reduce(lambda total, name: make("add", total, index(name)), names, integer(0))
    scalars = (*variant.scalars, *(Scalar(name, "int32", min=0, max=1000) for name in names))
    mask = Op("and", (variant.mask, Op("lt", (index("kv"), added), Type.BOOL)), Type.BOOL)
    return identifiers(render(plan(replace(spec, variant=replace(variant, mask=mask, scalars=scalars)))).text)


def collisions(spec: KernelSpec, together: int = TOGETHER) -> set[str]:
    """Return the names of a source that a scalar may have, and that the source says more or less often then.

    Those count as well that the source says with a number then, so that it steps aside.
    """
    own = {declared.name for declared in (*spec.variant.scalars, *spec.variant.tensors)}
    unheard = [f"unheard_of_{number}" for number in range(together)]
    free = {count: with_scalars(spec, unheard[:count]) for count in (1, together)}
    names = sorted(
        {name for known in free.values() for name in known if is_legal(name) and "unheard" not in name} - own
    )
    colliding = set[str]()
    for first in range(0, len(names), together):
        tried = names[first : first + together]
        before = free.get(len(tried)) or with_scalars(spec, unheard[: len(tried)])
        after = with_scalars(spec, tried)
        changed = {name for name in after | before if after[name] != before[name]}
        stepped_aside = {re.sub(r"_\d+$", "", name) for name in changed}  # a name that is taken gets a number
        colliding |= {name for name in tried if name in changed | stepped_aside}
    return colliding


#: Names of users begin with a prefix of their own in kernels, and tests/compile/test_names.py compiles every name that
#: there is.
@few(
    ("variant", "fields"),
    FORMS,
    always=0,
    often=range(0, len(FORMS), 4),
    ids=[f"{variant}-{len(fields)}" for variant, fields in FORMS],
)
def test_a_scalar_with_the_name_of_anything_in_the_source_does_not_collide(
    variant: str, fields: dict[str, object]
) -> None:
    assert not collisions(kernel_spec(variant, backend="cuda", **fields))  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_collision_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.plan import symbols

    monkeypatch.setattr(symbols, "PREFIX", "")
    assert "k_ring" in collisions(kernel_spec("causal", backend="cuda"))


@pytest.mark.parametrize("name", ["stage", "work", "wait", "kStages", "stride_out_b", "lse_ptr", "u_stage"])
def test_a_tensor_may_have_a_name_of_the_kernel(name: str) -> None:
    declared = f'variants:\n  own:\n    mask: "kv < {name}[h]"\n    tensors: {{{name}: {{dtype: int32, shape: [h]}}}}\n'
    kernel = planned("own", backend="cuda", declared=declared)
    (parameters,) = kernels(render(kernel).text).values()
    assert f"u_{name}" in parameters
    assert f"extent_u_{name}_0" in parameters
    assert len(set(parameters)) == len(parameters)


def test_symbols_of_the_analysis_are_no_names_of_a_variant() -> None:
    """A scalar of such a name would stand for where a sequence begins, or for the number of its tiles."""
    kernel = planned("causal", backend="cuda")
    for bound in (corner_bindings(kernel, CUDA), element_bindings(kernel, ragged=True)):
        assert not [name for name in bound if is_legal(name)]


@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_packed_positions_are_bound_in_masks(layout: str) -> None:
    """Intervals of keys are measured from where the sequence begins."""
    for mask in ("kv_global < 100", "q_global - kv_global >= 5", "kv < 5 and q_global > 3"):
        declared = f'variants:\n  own:\n    mask: "{mask}"\n'
        text = render(planned("own", backend="cuda", layout=layout, declared=declared)).text
        work = text.partition("while (more) {")[2].partition("const auto finish_logits")[0]
        assert re.search(r"const int (q|k)_begin = work\.\1_begin;", work), mask


def test_a_bound_that_reads_an_int64_is_declared_once() -> None:
    declared = 'variants:\n  own:\n    mask: "limits[b] > 3"\n    tensors: {limits: {dtype: int64, shape: [b]}}\n'
    text = render(planned("own", backend="cuda", declared=declared)).text
    assert len(re.findall(r"const \w+ visible_hi = ", text)) == 1


@pytest.mark.parametrize(("head_dim", "keeps"), [("64", True), ("128", False)])
def test_a_turn_in_8_bits_is_passed_after_the_products_where_the_plan_says_so(head_dim: str, keeps: bool) -> None:
    text = render(planned("full", backend="cuda", dtype="fp8_e4m3", head_dim=head_dim)).text
    step = text.split("// The other tiles:")[1].split("issue_pv(")[1]
    assert (step.index("pingpong_arrive();") > step.index("wait_products<0>();")) == keeps


@pytest.mark.exhaustive
@pytest.mark.parametrize("descale", ["head", "128"])
def test_scales_of_the_next_tile_of_work_are_multiplied_when_it_begins(descale: str) -> None:
    """No consumer waits for them before its last products are issued."""
    text = render(planned("full", backend="cuda", dtype="fp8_e4m3", head_dim="128", descale=descale)).text
    ends = text[text.index("read_scales(next, next_scales);") :]
    assert "next_scales[" not in ends
