"""Names of a user live in a namespace of their own: nothing in templates, headers or views begins like them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attngen
from attngen.plan import plan, symbols
from attngen.render import render
from attngen.resources import templates_dir
from attngen.schema import expand, load_spec_text
from tests.render.cuda_sources import identifiers
from tests.sampling import few, sampled

PACKAGE = Path(attngen.__file__).parent
TEMPLATES = sorted(path for part in ("cuda", "triton") for path in (templates_dir() / part).rglob("*.*"))
#: Sources of names in kernels beside the templates.
MODULES = sorted(
    path
    for part in ("plan", "render", "parts", "families", "lang")
    for path in (PACKAGE / part).rglob("*.py")
    if path.name != "symbols.py"
)


def of_users(text: str) -> list[str]:
    """Return the names of a text that are of the users' namespace, or of what belongs to a tensor in it."""
    prefix = symbols.PREFIX
    return re.findall(rf"(?<![A-Za-z0-9_])(?:stride_|extent_|gradient_)?{prefix}\w*", text)


def test_names_of_users_are_known_by_their_prefix() -> None:
    names = [symbols.argument_name("window"), symbols.pointer_name("doc"), symbols.gradient_pointer("slope")]
    assert of_users(", ".join(names)) == names == ["u_window", "u_doc", "gradient_u_slope"]
    assert of_users("stride_u_doc_0 + extent_u_doc_1 * cu_seqlens + u") == ["stride_u_doc_0", "extent_u_doc_1"]


def test_no_name_of_a_kernel_is_of_the_users_namespace() -> None:
    names = {path: of_users(path.read_text()) for path in (*TEMPLATES, *MODULES)}
    assert not {path: of for path, of in names.items() if of}
    assert {"kernel.cu.j2", "forward.py.j2", "backward.py.j2", "softmax.cuh", "expression.cuh"} <= {
        path.name for path in names
    }


@few("backend", ["triton", "cuda"])
def test_kinds_of_names_do_not_meet(backend: str) -> None:
    """A scalar that is called as what belongs to a tensor, or as a temporary that is made of one."""
    text = (
        "schema: 1\narch: sm90a\nvariants:\n  own:\n"
        "    tensors: {doc: {dtype: int32, shape: [b, seqlen_k]}, doc_1: {dtype: int32, shape: [b, h]}}\n"
        "    scalars:\n"
        + "".join(
            f"      {name}: {{type: int32}}\n"
            for name in ("doc_ptr", "stride_doc_0", "extent_doc_0", "doc_b_kv", "doc_b", "u_doc", "gradient_doc")
        )
        + '    mask: "doc[b, kv] == doc[b, q_pos] and doc_1[b, h] < kv + doc_ptr + stride_doc_0 + extent_doc_0'
        + ' + doc_b_kv + doc_b + u_doc + gradient_doc"\n'
        + f"kernels: [{{variant: own, head_dim: 64, backend: {backend}}}]\n"
    )
    (spec,) = expand(load_spec_text(text))
    kernel = plan(spec)
    names = [argument.name for argument in kernel.arguments]
    assert len(set(names)) == len(names)
    source = identifiers(render(kernel).text)
    for name in names:
        assert source[name] >= 1
    for name in ("u_doc_ptr", "u_stride_doc_0", "u_doc_b", "u_u_doc"):
        declared = len(re.findall(rf"(?:const \w+ |^ *){name} = ", render(kernel).text, re.MULTILINE))
        assert declared == 0, f"{name} is an argument, and a temporary"


def symbols_of_the_analysis() -> list[str]:
    """Return the names of all symbols that modules make beside those of variants, as texts have them."""
    made = (re.findall(r'\bown\("([\w ]+)"', path.read_text()) for path in MODULES)
    return sorted({name for bound in made for name in bound if name.isidentifier()})


def test_all_symbols_of_the_analysis_are_found() -> None:
    assert set(symbols_of_the_analysis()) >= {
        "q_start", "kv_start", "kv_tiles", "whole_tiles", "kv_first", "BLOCK_N", "LOG2E", "qk"
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@sampled(always=1, passes=["forward", "backward"], layout=["dense", "varlen"])
def test_symbols_of_the_analysis_are_free(backend: str, passes: str, layout: str) -> None:
    """Scalars that are called like them change nothing but their own names."""
    field = "backward: {backend: " + backend + "}" if passes == "backward" else f"backend: {backend}"
    names = symbols_of_the_analysis()

    def text_of(names: list[str]) -> str:
        scalars = "".join(f"{name}: {{type: int32}}, " for name in names)
        text = (
            "schema: 1\narch: sm90a\nvariants:\n  own:\n"
            f"    scalars: {{{scalars}other: {{type: fp32}}}}\n"
            f'    mask: "kv_global - q_global <= {" + ".join(names)} and kv < {names[0]} * 3"\n'
            '    score: "s * other + kv * other"\n'
            f"kernels: [{{variant: own, head_dim: 64, passes: {passes}, layout: {layout}, {field}}}]\n"
        )
        return render(plan(expand(load_spec_text(text))[0])).text

    plain = text_of([f"unheard_{place}_" for place in range(len(names))])
    for place, name in enumerate(names):
        assert f"u_unheard_{place}_" in plain
        plain = plain.replace(f"unheard_{place}_", name)
    assert text_of(names).split() == plain.split()


@few("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", ["acc", "tile", "unusual", "long"])
def test_a_let_value_keeps_its_name(backend: str, name: str) -> None:
    """A value that is used twice becomes a temporary, which is named as in the spec."""
    text = (
        f'schema: 1\narch: sm90a\nvariants:\n  own:\n    let: {{{name}: "q_pos * 3 % 7"}}\n'
        f'    mask: "({name} - kv) * ({name} - kv) % 5 < 2"\n'
        f"kernels: [{{variant: own, head_dim: 64, backend: {backend}}}]\n"
    )
    (spec,) = expand(load_spec_text(text))
    plain = identifiers(render(plan(expand(load_spec_text(text.replace(name, "unheard_of")))[0])).text)
    counts = identifiers(render(plan(spec)).text)
    assert counts[f"u_{name}"] == plain["u_unheard_of"] >= 2
    assert counts[name] == plain[name]
