"""The emulation of PTX and machine code, on small pairs written for it."""

from __future__ import annotations

import random

import pytest

from attngen.compile import compile_source
from attngen.compile.emulate.differential import wrong_products
from attngen.compile.emulate.launch import LAUNCHES
from attngen.compile.emulate.program import CannotDecide
from attngen.compile.emulate.sass_program import sass_program
from attngen.plan.planner import plan
from attngen.render.source import render
from attngen.schema import expand, load_spec_text

#: Where the descriptor of an operand in shared memory says how it lies there: 0x40000040 in the upper word.
_LAYOUT = 0x4000004000010000

PARAMETERS = [
    {"name": "steps", "kind": "size", "of": "kv_tiles", "type": "i32", "offset": 0},
    {"name": "bias", "kind": "pointer", "of": "tensor:bias", "type": "*fp32", "offset": 8},
]

#: Two products in each turn of a loop, the second one 32 units of 16 bytes after the first, in three stages.
PTX = f"""
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u32 k_param_0, .param .u64 .ptr .global .align 4 k_param_1)
.reqntid 128
{{
  .reg .pred %p<4>;
  .reg .b32 %r<40>;
  .reg .b64 %rd<8>;
  ld.param.b32 %r1, [k_param_0];  // comments are no code: bra $L_1;
  ld.param.b64 %rd5, [k_param_1];
  mov.b32 %r2, global_smem;
  mov.b32 %r3, 0;
  mov.b32 %r4, 0;
$L_1:
  shl.b32 %r5, %r4, 11;
  add.s32 %r6, %r2, %r5;
  {{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [%r6], %r3;
    @!complete bra.uni waitLoop;
  }}
  bfe.u32 %r7, %r6, 4, 14;
  cvt.u64.u32 %rd1, %r7;
  or.b64 %rd2, %rd1, {_LAYOUT};
  add.s64 %rd3, %rd2, 32;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {{%r20,%r21,%r22,%r23}}, {{%r24,%r25,%r26,%r27}}, %rd2, 1, 1, 1, 0;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20,%r21,%r22,%r23}}, %rd2, %rd3, 1, 1, 1, 0, 0;
  add.s32 %r4, %r4, 1;
  setp.lt.s32 %p1, %r4, 3;
  selp.b32 %r4, %r4, 0, %p1;
  add.s32 %r3, %r3, 1;
  setp.lt.s32 %p2, %r3, %r1;
  @%p2 bra $L_1;
  ret;
}}
"""

_SASS = """
.text.k:
 ULDC UR4, c[0x0][0x210]
 S2UR UR9, SR_CgaCtaId
 UMOV UR5, 0x400
 ULEA UR5, UR9, UR5, 0x18
 UMOV UR6, URZ
 UMOV UR7, URZ
 UMOV UR11, 0x40000040
.L_x_0:
 ULEA UR8, UR7, UR5, 0xb
 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R0
 @!P0 BRA `(.L_x_1)
.L_x_2:
 USHF.R.U32.HI UR8, URZ, 0x4, UR8
 USGXT.U32 UR8, UR8, 0xe
 ULOP3.LUT UR10, UR8, 0x10000, URZ, 0xfc, !UPT
 WARPGROUP.ARRIVE
 HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20
 UMOV UR12, UR10
 UMOV UR13, UR11
 UMOV UR14, UR10
 UIADD3 UR14, UP0, UR10, 0x20, URZ
 UIADD3.X UR15, UR11, URZ, URZ, UP0, !UPT
 HGMMA.64x8x16.F32.BF16 R20, gdesc[UR12], R20, gsb0
 UIADD3 UR7, UR7, 0x1, URZ
 UISETP.GE.AND UP1, UPT, UR7, 0x3, UPT
 USEL UR7, UR7, URZ, !UP1
 UIADD3 UR6, UR6, 0x1, URZ
 UISETP.GE.AND UP1, UPT, UR6, UR4, UPT
 PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x0
 @!P0 BRA `(.L_x_0)
 EXIT
.L_x_1:
 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R0
 @!P0 BRA `(.L_x_1)
 BRA `(.L_x_2)
"""


def listing(code: str) -> str:
    """Return lines of machine code as nvdisasm prints them: each with its address, and ended by a semicolon."""
    lines, address = [], 0
    for line in code.strip().splitlines():
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/        {line.strip()} ;")
            address += 16
    return "\n".join(lines)


def judged(old: str = "", new: str = "") -> list[str]:
    """Problems of the machine code with one line replaced."""
    assert _SASS.count(f" {old}\n") == 1 or not old
    return wrong_products(PTX, listing(_SASS.replace(f" {old}\n", f" {new}\n") if old else _SASS), PARAMETERS, 4)


def test_right_code_is_right() -> None:
    assert judged() == []


def test_a_descriptor_stepped_without_its_base_is_found() -> None:
    step = "UIADD3 UR14, UP0, UR10, 0x20, URZ"
    assert judged(step, "UIADD3 UR14, UP0, UR14, 0x20, URZ") == []  # in place, where a copy of the base was made
    code = _SASS.replace(" UMOV UR14, UR10\n", "").replace("UR14, UP0, UR10, 0x20", "UR14, UP0, UR14, 0x20")
    first, *_ = wrong_products(PTX, listing(code), PARAMETERS, 4)
    assert first.startswith("product 1, HGMMA.64x8x16.F32.BF16 R20, gdesc[UR12]")
    assert "data" in first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("UIADD3 UR14, UP0, UR10, 0x20, URZ", "UIADD3 UR14, UP0, UR10, 0x40, URZ"),
        ("UIADD3.X UR15, UR11, URZ, URZ, UP0, !UPT", "UIADD3.X UR15, UR15, URZ, URZ, UP0, !UPT"),
        ("UMOV UR12, UR10", "UMOV UR12, UR8"),
        ("UMOV UR11, 0x40000040", "UMOV UR11, 0x40000080"),
        ("USEL UR7, UR7, URZ, !UP1", "NOP"),
        ("USGXT.U32 UR8, UR8, 0xe", "USGXT.U32 UR8, UR8, 0x6"),
        ("UISETP.GE.AND UP1, UPT, UR6, UR4, UPT", "UISETP.GT.AND UP1, UPT, UR6, UR4, UPT"),
        ("HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20", "HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR12], R20"),
        ("HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20", "HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8].tnspB, R20"),
        ("HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20", "HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], RZ, !UPT"),
        ("HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20", "NOP"),
    ],
)
def test_other_operands_are_found(old: str, new: str) -> None:
    assert judged(old, new)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("UFROBNICATE UR7, UR7, 0x1", "not known"),
        ("UIADD3.SAT UR7, UR7, 0x1, URZ", "modifier SAT"),
        ("UIADD3 UR7, UR7, c[0x4][0x10], URZ", "not understood"),
        ("BRA `(.L_x_9)", "not understood"),
    ],
)
def test_what_is_not_known_is_said(new: str, reason: str) -> None:
    with pytest.raises(CannotDecide, match=reason):
        judged("UIADD3 UR7, UR7, 0x1, URZ", new)


def test_a_descriptor_made_of_data_is_found() -> None:
    (first, *_) = judged("UMOV UR14, UR10", "R2UR UR11, R20")
    assert "data" in first


def test_a_product_that_depends_on_data_is_not_decided() -> None:
    with pytest.raises(CannotDecide, match="depends on data"):
        judged("PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x0", "FSETP.GT.AND P0, PT, R20, RZ, PT")


def test_a_product_that_is_not_reached_is_said() -> None:
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}, %rd2, %rd3, 1, 1, 1, 0, 0;"
    never = PTX.replace("  shl.b32 %r5", "  setp.ge.s32 %p3, %r3, 1000;\n  @%p3 bra $L_2;\n  shl.b32 %r5")
    never = never.replace("  ret;", f"  ret;\n$L_2:\n  {product}\n  ret;")
    with pytest.raises(CannotDecide, match="reaches wgmma"):
        wrong_products(never, listing(_SASS), PARAMETERS, 4)


def test_data_decides_what_is_no_product() -> None:
    # Both ways of a branch meet again before the next product; what they write is not known after that.
    branch = "FSETP.GT.AND P1, PT, R20, RZ, PT\n @P1 BRA `(.L_x_5)\n {}\n.L_x_5:\n UIADD3 UR7, UR7, 0x1, URZ"
    step = "UIADD3 UR7, UR7, 0x1, URZ"
    assert judged(step, branch.format("FADD R30, R20, R20")) == []
    with pytest.raises(CannotDecide, match="depends on data"):
        judged(step, branch.format("UIADD3 UR6, UR6, 0x1, URZ"))


#: A division as ptxas writes it: R9 / R0, whose absolute value is R7, into R4.
_DIVISION = """
 IABS R7, R0
 I2F.RP R2, R7
 MUFU.RCP R2, R2
 VIADD R4, R2, 0xffffffe
 F2I.FTZ.U32.TRUNC.NTZ R5, R4
 IMAD.MOV.U32 R4, RZ, RZ, RZ
 IMAD.MOV R3, RZ, RZ, -R5
 IMAD R11, R3, R7, RZ
 IABS R12, R9
 IMAD.HI.U32 R4, R5, R11, R4
 IMAD.HI.U32 R4, R4, R12, RZ
 IMAD.MOV R5, RZ, RZ, -R4
 IMAD R12, R7, R5, R12
 ISETP.GT.U32.AND P1, PT, R7, R12, PT
 @!P1 IMAD.IADD R12, R12, 0x1, -R7
 @!P1 VIADD R4, R4, 0x1
 ISETP.GE.U32.AND P0, PT, R12, R7, PT
 LOP3.LUT R12, R9, R0, RZ, 0x3c, !PT
 @P0 VIADD R4, R4, 0x1
 ISETP.GE.AND P2, PT, R12, RZ, PT
 @!P2 IMAD.MOV R4, RZ, RZ, -R4
 R2UR UR10, R4
 UMOV UR11, URZ
 HGMMA.64x8x16.F32.BF16 R20, R24, gdesc[UR8], R20
 EXIT
"""


def test_divisions_by_what_is_no_constant() -> None:
    chance = random.Random(0)
    numbers = [
        1,
        2,
        3,
        7,
        100,
        2**31 - 1,
        *(chance.randrange(1, 2**31) >> chance.randrange(31) or 1 for _ in range(60)),
    ]
    for _ in range(300):
        a, b = (chance.choice(numbers) * chance.choice((1, -1)) for _ in "ab")
        code = f" UMOV UR4, {a:#x}\n UMOV UR5, {b:#x}\n MOV R9, UR4\n MOV R0, UR5\n" + _DIVISION.lstrip("\n")
        machine = LAUNCHES[0].machine(PARAMETERS, 0)
        sass_program(listing(code)).run(machine)
        (product,) = machine.products
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        assert product.descriptors == (quotient & 0xFFFF_FFFF,), (a, b)


#: A call of a function at the end, as ptxas makes one of a long division; R40 says where it returns to.
_CALL = " MOV R40, {back:#x}\n IMAD.MOV.U32 R41, RZ, RZ, R20\n CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rem_s64)"
_FUNCTION = """
$__internal_0_$__cuda_sm20_rem_s64:
 I2F.U64.RP R34, R32
 {written}
 IMAD.WIDE.U32 R36, P4, R34, R43, R36
 RET.REL.NODEC R40 `(k)
.L_x_6:
 BRA `(.L_x_6)
"""


def _with_call(written: str = "MUFU.RCP R34, R34", off: int = 0) -> str:
    step = " UIADD3 UR7, UR7, 0x1, URZ\n"
    before, after = _SASS.split(step)
    place = sum(not line.endswith(":") for line in before.strip().splitlines())
    call = _CALL.format(back=16 * (place + 3 + off))
    return before + call + "\n" + step + after + _FUNCTION.format(written=written).lstrip("\n")


def test_a_called_function_leaves_what_it_writes_unknown() -> None:
    assert wrong_products(PTX, listing(_with_call()), PARAMETERS, 4) == []
    with pytest.raises(CannotDecide, match="depends on data"):
        wrong_products(PTX, listing(_with_call("R2UR UR6, R34")), PARAMETERS, 4)


@pytest.mark.parametrize(
    ("written", "off", "reason"),
    [
        ("STS [R34], R34", 0, "function with STS"),
        ("BRA `(.L_x_2)", 0, "function with BRA"),
        ("MUFU.RCP R34, R34", 1, "unknown return address"),
    ],
)
def test_a_function_that_does_more_is_not_understood(written: str, off: int, reason: str) -> None:
    with pytest.raises(CannotDecide, match=reason):
        wrong_products(PTX, listing(_with_call(written, off)), PARAMETERS, 4)


def test_bounds_that_count_heads_are_reached() -> None:
    """Where few heads leave no tile whole, launches with more of them reach the products of whole tiles."""
    mask = "kv <= kv_heads * 16 and q + 3 <= kv"
    spec = f"""
schema: 1
arch: [sm90a]
variants: {{counted: {{mask: "{mask}"}}}}
kernels:
  - {{variant: counted, head_dim: 192, layout: varlen, tile: {{m: 64, n: 16}}, backend: triton, loads: descriptor}}
"""
    (kernel,) = expand(load_spec_text(spec))
    planned = plan(kernel)
    assert compile_source(planned, render(planned)).cubin
