"""Any name that a spec may give: words of C++ and Python, macros of NVRTC, all that templates and headers say."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.errors import CompileError
from attngen.plan import plan, symbols
from attngen.render import Source, render
from attngen.resources import templates_dir
from attngen.runtime.operations.attention import entry as calls
from attngen.runtime.operations.attention import operators, paged_operators
from attngen.schema import KernelSpec, expand, load_spec_text
from attngen.schema.names import check_symbol
from attngen.store import Store
from tests.compile.frontend import to_ptx
from tests.plan.specs import planned
from tests.sampling import few, sampled

_CPP = """
alignas alignof and and_eq asm atomic_cancel atomic_commit atomic_noexcept auto bitand bitor bool break case catch char
char8_t char16_t char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr constinit
continue contract_assert decltype default delete do double dynamic_cast else enum explicit export extern false float for
friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected
public reflexpr register reinterpret_cast requires return short signed sizeof static static_assert static_cast struct
switch synchronized template this thread_local throw true try typedef typeid typename typeof union unsigned using
virtual void volatile wchar_t while xor xor_eq final override import module
"""
_NVRTC = """
NULL NAN INFINITY HUGE_VAL INT_MAX FLT_MAX DBL_MAX CUDARTAPI CUDART_VERSION CUDA_VERSION CUDART_INF_F NDEBUG assert
offsetof va_arg va_copy va_end va_list va_start errno EOF linux unix i386 isnan isinf signbit size_t ptrdiff_t
nullptr_t clock_t uint ushort ulong uchar uint8_t int32_t uint64_t int2 int4 uint2 uint4 float2 float4 double2 dim3 half
threadIdx blockIdx blockDim gridDim warpSize cudaStream_t cudaError_t cudaSuccess printf malloc free memcpy memset clock
std cuda thrust min max abs fabsf fmaf fminf fmaxf floorf ceilf expf exp2f logf log2f tanhf sqrtf rsqrtf sinf cosf tanf
atomicAdd atomicInc make_float2 D1 D16 OUT1 OUT16 DEFINE_PRODUCT DEFINE_PRODUCTS I complex main host device inline
"""
CPP, NVRTC = _CPP.split(), _NVRTC.split()
_CONTROL = re.compile(r"\$\{[^}]*\}|<%[^%]*%>|<#.*?#>|(?m:^\s*(?:#%|//%)[^\n]*$)", re.DOTALL)
#: Every word that a header or a template says, beside its control lines: what it defines, and what it calls.
OURS = sorted(
    {
        name
        for part in ("cuda", "triton")
        for path in (templates_dir() / part).rglob("*.*")
        for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*", _CONTROL.sub(" ", path.read_text()))
    }
)
KINDS = ("scalar", "tensor", "let")


def legal(names: Iterable[str]) -> list[str]:
    accepted = []
    for name in dict.fromkeys(names):
        try:
            check_symbol(name)
        except ValueError:
            continue
        accepted.append(name)
    return accepted


def source_of(kind: str, names: list[str], backend: str = "cuda", passes: str = "forward") -> Source:
    return render(plan(spec_of(kind, names, backend, passes)))


def spec_of(kind: str, names: list[str], backend: str = "cuda", passes: str = "forward") -> KernelSpec:
    """Return a kernel whose mask and score read each name, let values twice, so that they become temporaries."""
    declared = {
        "scalar": lambda name: f"{name}: {{type: int32, min: 0, max: 9}}",
        "tensor": lambda name: f"{name}: {{dtype: int32, shape: [seqlen_k], range: {{min: 0, max: 9}}}}",
        "let": lambda name: f'{name}: "(kv * {3 + names.index(name)}) % 7"',
    }[kind]
    read = " + ".join(f"{name}[kv]" if kind == "tensor" else name for name in names)
    field = {"scalar": "scalars", "tensor": "tensors", "let": "let"}[kind]
    backend_line = f"backward: {{backend: {backend}}}" if passes == "backward" else f"backend: {backend}"
    text = (
        f"schema: 1\narch: sm90a\nvariants:\n  own:\n    {field}:\n"
        + "".join(f"      {declared(name)}\n" for name in names)
        + f'    mask: "kv <= q and ({read} + q) % 5 < 3"\n    score: "s + 0.25 * float({read})"\n'
        + f"kernels: [{{variant: own, head_dim: 64, passes: {passes}, {backend_line}}}]\n"
    )
    (spec,) = expand(load_spec_text(text, "names.yaml"))
    return spec


def check(kind: str, names: list[str], passes: str = "forward") -> None:
    """Every name compiles; if all at once do not, say which."""
    try:
        to_ptx(source_of(kind, names, passes=passes))
    except CompileError as error:
        failed = [name for name in names if not compiles(kind, name, passes)]
        pytest.fail(f"not in the namespace of users, or no name of it there: {failed}\n{str(error)[:2000]}")


def compiles(kind: str, name: str, passes: str) -> bool:
    try:
        to_ptx(source_of(kind, [name], passes=passes))
    except CompileError:
        return False
    return True


def in_groups(names: list[str], size: int = 24) -> list[list[str]]:
    return [names[i : i + size] for i in range(0, len(names), size)]


WORDS = legal([*CPP, *NVRTC])
OWN = legal(OURS)
#: Some of each, for every run: words of C++, macros, types, what headers and templates define, names of the namespace.
SOME = ["nullptr", "long", "struct", "xor", "NULL", "D1", "std", "float2", "threadIdx", "first", "stage", "choose"]
SOME += [
    "Work",
    "kBlockM",
    "row_max",
    "acc",
    "tl",
    "triton",
    "lse_ptr",
    "visible_lo",
    "window_1",
    "u",
    "u_first",
    "void",
]


def test_names_of_the_kernels_are_found_and_free() -> None:
    assert {"nullptr", "xor", "bitand", "compl", "NULL", "long", "struct", "register", "threadIdx"} <= set(WORDS)
    assert {"choose", "TensorMap", "pack", "D1", "row_max", "acc", "k_ring", "visible_word", "tl"} <= set(OWN)
    assert legal(SOME) == SOME


@pytest.mark.exhaustive
@sampled(every=2, always=1, kind=KINDS, passes=["forward", "backward"])
def test_names_of_the_kernel_compile_in_cuda(kind: str, passes: str) -> None:
    check(kind, SOME[:: 3 if kind == "tensor" else 2], passes)


@pytest.mark.exhaustive
def test_names_of_the_kernel_compile_in_triton(tmp_path: Path) -> None:
    """As in a build: of Triton 3.8, ptxas compiles the first tile wrongly, and the next one is taken."""
    spec = spec_of("scalar", SOME, backend="triton")
    built, failures = compile_kernels([Prepared(spec, plan(spec), render(plan(spec)))], store=Store(tmp_path))
    assert not failures, failures[0].error
    (kernel,) = built.values()
    assert kernel.manifest["backend"] == "triton"


@few("kind", KINDS, always=range(0, 999, 3))
def test_names_of_the_kernel_are_python(kind: str) -> None:
    """No parameter of a kernel is there twice, none is a keyword."""
    for names in in_groups(list(dict.fromkeys([*WORDS, *OWN]))[KINDS.index(kind) :: 72], 30):
        compile(source_of(kind, names, backend="triton").text, "kernel.py", "exec")


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("names", in_groups([*WORDS, *OWN], 24), ids=lambda names: f"{names[0]}-to-{names[-1]}")
def test_all_names_compile(kind: str, passes: str, names: list[str]) -> None:
    check(kind, names, passes)


@pytest.mark.exhaustive
def test_a_name_that_does_not_compile_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "PREFIX", "")
    assert not compiles("scalar", "nullptr", "forward")
    assert not compiles("tensor", "kBlockM", "forward")
    assert compiles("scalar", "unheard_of", "forward")


@pytest.mark.parametrize(
    "call", [calls.attention, calls.attention_varlen, calls.attention_paged], ids=lambda call: call.__name__
)
def test_names_of_the_call_are_refused(call: object) -> None:
    parameters = [
        name
        for name, parameter in inspect.signature(call).parameters.items()  # type: ignore[arg-type]
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    assert len(parameters) > 8
    assert not legal(parameters)


@pytest.mark.parametrize("packed", [False, True])
def test_names_of_the_torch_operators_are_refused(packed: bool) -> None:
    schema = operators._backward_schema(planned("full").variant, packed=packed)
    names = re.findall(r"(\w+)(?:=\w+)?[,)]", schema.partition(" -> ")[0])
    assert {"q", "dlse", "softmax_scale", "deterministic"} <= set(names)
    assert not legal(names)


@pytest.mark.parametrize("given", [False, True])
def test_names_of_the_operators_of_pages_are_refused(given: bool) -> None:
    schema = paged_operators.schema_of(planned("full").variant, given=given)
    names = re.findall(r"(\w+)[,)]", schema.partition(" -> ")[0])
    assert {"q", "k_pages", "page_table", "num_splits", "backend"} <= set(names)
    assert not legal(names)


def test_words_of_python_are_refused() -> None:
    """A call could not say them, nor an expression."""
    assert not legal(keyword.kwlist)
