"""The parameter list that a PTX text declares, and the check against the planned one."""

from __future__ import annotations

import pytest

from attngen.compile.parameters import check_parameters, placed_parameters, triton_parameters
from attngen.compile.ptx import PtxParameter, cuda_major, ptx_parameters
from attngen.errors import CompileError
from attngen.manifest import Argument

PTX = """
.version 8.7
.target sm_90a
.address_size 64

	// .globl	f                       // -- Begin function f
.extern .shared .align 16 .b8 global_smem[];
                                        // @f
.visible .entry f(
	.param .align 64 .b8 f_param_0[128],
	.param .u32 f_param_1,
	.param .u64 f_param_2, // a comment, with a comma
	.param .u64 .ptr .global .align 1 f_param_3,
	.param .f32 f_param_4,
	.param .u8 f_param_5
)
.reqntid 128
{
	ret;
}
"""

U32, U64, F32 = PtxParameter("u32", 4, 4), PtxParameter("u64", 8, 8), PtxParameter("f32", 4, 4)


def test_parameters_of_an_entry() -> None:
    assert ptx_parameters(PTX) == [PtxParameter("b8", 128, 64), U32, U64, U64, F32, PtxParameter("u8", 1, 1)]


@pytest.mark.parametrize(
    "text",
    [".entry g()\n{", ".entry g\n{", ".visible .entry g\n.maxntid 32\n{", ".weak .entry g$1( )\n.reqntid 32\n{"],
)
def test_an_entry_without_parameters(text: str) -> None:
    assert ptx_parameters(text) == []


def test_older_spelling_of_pointers() -> None:
    text = ".entry g(\n.param .u64 g_param_0,\n.param .u64 .ptr .align 16 g_param_1\n)\n{"
    assert ptx_parameters(text) == [U64, U64]


@pytest.mark.parametrize("text", ["", ".func f() {}", PTX + PTX, ".entry g(.param .v4 .b32 x)\n{"])
def test_ptx_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(CompileError):
        ptx_parameters(text)


def test_cuda_release_of_an_isa_version() -> None:
    assert cuda_major(PTX) == 12
    assert cuda_major(".version 9.4\n") == 13
    assert cuda_major(".version 7.8\n") == 11
    with pytest.raises(CompileError):
        cuda_major("")


def test_a_cubin_that_names_a_newer_assembler_belongs_to_its_release() -> None:
    named = b"\x7fELF...Cuda compilation tools, release 13.4, V13.4.59"
    assert cuda_major(PTX, named) == 13
    assert cuda_major(".version 9.4\n", named.replace(b"13.4", b"12.9")) == 13
    assert cuda_major(PTX, b"\x7fELF") == 12


def parameter(name: str, type_: str, kind: str = "size") -> Argument:
    return Argument(name, kind, type_)


PLANNED = [
    Argument("q", "descriptor", "tensordesc<bf16[1,64,1,64]>", "q"),
    parameter("n", "i32"),
    parameter("stride", "i64"),
    parameter("out", "*bf16", "pointer"),
    parameter("scale", "fp32"),
    parameter("flag", "i1"),
]


def test_a_list_that_agrees() -> None:
    check_parameters("f", PLANNED, PTX)


@pytest.mark.parametrize("i", range(len(PLANNED)))
def test_each_parameter_counts(i: int) -> None:
    with pytest.raises(CompileError):
        check_parameters("f", PLANNED[:i] + PLANNED[i + 1 :], PTX)


@pytest.mark.parametrize(("i", "type_"), [(1, "i64"), (1, "fp32"), (2, "i32"), (3, "i32"), (4, "i32"), (5, "i32")])
def test_a_retyped_parameter_is_named(i: int, type_: str) -> None:
    planned = [*PLANNED[:i], parameter("wrong", type_), *PLANNED[i + 1 :]]
    with pytest.raises(CompileError, match=rf"f: parameter {i} 'wrong' was planned as .* a launch would pass garbage"):
        check_parameters("f", planned, PTX)


@pytest.mark.parametrize("planned", [PLANNED[:-1], [*PLANNED, parameter("more", "i32")]])
def test_another_number_of_parameters(planned: list[Argument]) -> None:
    with pytest.raises(CompileError, match="were planned, but the compiled kernel has 6"):
        check_parameters("f", planned, PTX)


def test_an_unknown_type() -> None:
    with pytest.raises(CompileError, match="unknown type 'complex'"):
        check_parameters("f", [parameter("x", "complex")], PTX)


def test_descriptors_and_scratch_are_spelled_out() -> None:
    arguments = [
        Argument("q_desc", "descriptor", "tensordesc<bf16[64,1,128]>", "q", box=(64, 1, 128)),
        parameter("n", "i32"),
    ]
    parameters = triton_parameters(arguments, [{"block_size": [64, 1, 64], "swizzle": 3}])
    assert [(p.kind, p.axis, p.type) for p in parameters] == [
        ("descriptor", None, "tensordesc<bf16[64,1,128]>"),
        ("descriptor_shape", 0, "i32"),
        ("descriptor_shape", 1, "i32"),
        ("descriptor_shape", 2, "i32"),
        ("descriptor_stride", 0, "i64"),
        ("descriptor_stride", 1, "i64"),
        ("descriptor_stride", 2, "i64"),
        ("size", None, "i32"),
        ("scratch", None, "*i8"),
        ("scratch", None, "*i8"),
    ]
    assert (parameters[0].box, parameters[0].swizzle) == ((64, 1, 64), 128)
    assert all(p.of == "q" for p in parameters[:7])
    assert len({p.name for p in parameters}) == len(parameters)
    with pytest.raises(CompileError, match="no tensor map for 'q_desc'"):
        triton_parameters(arguments, [])


def test_parameters_get_the_places_of_the_cubin() -> None:
    parameters = [parameter("n", "i32"), parameter("stride", "i64")]
    placed = placed_parameters("f", parameters, [(0, 4), (8, 8)])
    assert [p.offset for p in placed] == [0, 8]
    with pytest.raises(CompileError, match="parameter 'stride' takes 8 B, but 4 B in the cubin"):
        placed_parameters("f", parameters, [(0, 4), (4, 4)])
    with pytest.raises(CompileError, match="2 parameters were planned, but the cubin has 1"):
        placed_parameters("f", parameters, [(0, 4)])
