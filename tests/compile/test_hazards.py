"""The check of machine code for what ptxas compiled wrongly."""

import pytest

from attngen.compile.cuda import compile_text
from attngen.compile.hazards import misjudged_clamps, overwritten
from attngen.compile.machine import parse
from attngen.compile.toolchain import chosen_nvrtc

_LOOP = """
        /*0100*/                   LDSM.16.M88.4 R100, [R6+UR32] ;
.L_x_5:
        /*0110*/                   WARPGROUP.ARRIVE ;
        /*0120*/                   HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0140*/              @!P0 BRA `(.L_x_2) ;
.L_x_7:
        /*0150*/                   F2FP.BF16.F32.PACK_AB {p}, R25, R24 ;
        /*0160*/                   HGMMA.64x64x16.F32.BF16 R56, {p}, gdesc[UR16].tnspB, R56, gsb0 ;
        /*0170*/               @P1 BRA `(.L_x_5) ;
        /*0180*/                   MOV R100, RZ ;
        /*0190*/                   EXIT ;
.L_x_2:
        /*01a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR12], R0 ;
        /*01b0*/                   BRA `(.L_x_7) ;
"""


def test_registers_of_q_given_to_p_are_found() -> None:
    (problem,) = overwritten(parse(_LOOP.replace("{p}", "R102")))
    assert "reads R102" in problem


def test_registers_of_their_own_are_right() -> None:
    # Code after the loop may overwrite Q, and a wait that branches back into the loop is none itself.
    assert overwritten(parse(_LOOP.replace("{p}", "R104"))) == []


def test_an_operand_in_shared_memory_reads_no_registers() -> None:
    code = _LOOP.replace("{p}", "R102").replace("R24, R100, gdesc", "R24, gdesc[UR20], gdesc")
    assert overwritten(parse(code)) == []


_CLAMPS = """
extern "C" __global__ void clamps(const int* x, int* out) {
  const int clamped = max(min(x[threadIdx.x], 32), 0);
  out[threadIdx.x] = %s;
}
"""


@pytest.mark.parametrize(("stored", "compares"), [("clamped", False), ("clamped == 32 ? 7 : clamped", True)])
def test_integers_that_are_clamped_and_compared_at_once_are_found(stored: str, compares: bool) -> None:
    """NVRTC 12.9 does so, and no later one."""
    nvrtc = chosen_nvrtc()
    assert nvrtc is not None
    cubin, _ = compile_text("clamps", _CLAMPS % stored, {}, "sm90a")
    assert (misjudged_clamps(cubin) is not None) == (compares and nvrtc.release < (13, 0))
