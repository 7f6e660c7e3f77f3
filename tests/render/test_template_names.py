"""Names that the templates define: a scalar, a tensor or a let value of such a name is refused, or gets another one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from attngen.errors import SpecError
from attngen.plan import plan
from attngen.plan.symbols import argument_name
from attngen.render import render
from attngen.resources import templates_dir
from attngen.schema import expand, load_spec_text
from attngen.schema.names import check_symbol
from tests.render.cuda_sources import code as code_of_cuda
from tests.render.cuda_sources import identifiers

_JINJA = re.compile(r"\$\{[^}]*\}|<%[^%]*%>|<#.*?#>|(?m:^\s*(?:#%|//%)[^\n]*$)")
_PYTHON = re.compile(r"^ *(?:([\w, ]+) (?:[-+*&|]?=) |for ([\w, ]+) in |def (\w+)\()", re.MULTILINE)
_TYPE = r"(?:const |constexpr |auto|int|float|bool|uint32_t|long long|Place|Work|Spans|struct|using|Row)"
_CUDA = re.compile(rf"(?<!\w){_TYPE}+[ *&]+(\w+)|, (\w+)(?:\[\w+\])? = |\[(\w+(?:, \w+)*)\] = ")


def legal(name: str) -> bool:
    try:
        check_symbol(name)
    except ValueError:
        return False
    return True


def defined_in_triton() -> Iterator[str]:
    for path in sorted((templates_dir() / "triton").glob("*.j2")):
        if path.name == "_helpers.py.j2":
            continue  # functions, which have names of their own scope
        text = _JINJA.sub("", path.read_text())
        for groups in _PYTHON.findall(re.sub(r'"""(.|\n)*?"""|#.*', "", text)):
            yield from re.findall(r"\w+", " ".join(groups))


def defined_in_cuda() -> Iterator[str]:
    for path in sorted((templates_dir() / "cuda").rglob("*.j2")):
        text = code_of_cuda(_JINJA.sub("", path.read_text()))
        for groups in _CUDA.findall(text):
            yield from re.findall(r"\w+", " ".join(groups))


DEFINED = sorted({*defined_in_triton(), *defined_in_cuda()})


def test_they_are_found() -> None:
    assert {"row_max", "q_index", "visible_word", "acc", "lse", "dead", "delta_rows"} <= set(defined_in_triton())
    assert {"q_begin", "work", "remaining", "load_v", "row_sum", "kept", "kBlockM", "blind"} <= set(defined_in_cuda())


@pytest.mark.parametrize("name", [name for name in DEFINED if legal(name)])
def test_names_of_the_templates_are_refused_or_get_a_suffix(name: str) -> None:
    assert argument_name(name) != name, f"add {name} to KERNEL_NAMES of attngen/plan/arguments.py"


@pytest.mark.parametrize(
    "name", ["q_start", "kv_start", "kv_tiles", "whole_tiles", "kv_first", "BLOCK_N", "LOG2E", "qk"]
)
@pytest.mark.parametrize("section", ["scalars", "tensors", "let"])
def test_symbols_of_the_analysis_are_refused_with_their_place(section: str, name: str) -> None:
    declared = {"scalars": "{type: int32}", "tensors": "{dtype: int32, shape: []}", "let": "kv + 1"}[section]
    text = f'schema: 1\nvariants:\n  own:\n    mask: "kv < {name}"\n    {section}:\n      {name}: {declared}\n'
    with pytest.raises(SpecError, match=rf"mine\.yaml:6: .*'{name}' is reserved.*such as 'my_{name.lower()}'"):
        load_spec_text(text, "mine.yaml")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_let_value_keeps_no_name_of_the_kernel(backend: str) -> None:
    """A value that is used twice becomes a temporary, which is named as in the spec unless the kernel has that name."""
    for name in ("acc", "tile", "unusual"):
        text = (
            f'schema: 1\narch: sm90a\nvariants:\n  own:\n    let: {{{name}: "q_pos * 3 % 7"}}\n'
            f'    mask: "({name} - kv) * ({name} - kv) % 5 < 2"\n'
            f"kernels: [{{variant: own, head_dim: 64, backend: {backend}}}]\n"
        )
        (spec,) = expand(load_spec_text(text))
        plain = render(plan(expand(load_spec_text(text.replace(name, "unheard_of")))[0])).text
        found = render(plan(spec)).text
        assert identifiers(found)[name] - identifiers(plain)[name] == (
            identifiers(plain)["unheard_of"] if name == "unusual" else 0
        )
