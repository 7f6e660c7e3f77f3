"""The checks of machine code for what ptxas compiled wrongly."""

import pytest

from attngen.compile.hazards import lost, overwritten
from attngen.compile.machine import parse

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
    (found,) = overwritten(parse(_LOOP.replace("{p}", "R102")))
    assert "reads R102" in found


def test_registers_of_their_own_are_right() -> None:
    # What stands behind the loop may overwrite Q, and a wait that branches back into the loop is none itself.
    assert overwritten(parse(_LOOP.replace("{p}", "R104"))) == []


def test_an_operand_in_shared_memory_reads_no_registers() -> None:
    code = _LOOP.replace("{p}", "R102").replace("R24, R100, gdesc", "R24, gdesc[UR20], gdesc")
    assert overwritten(parse(code)) == []


_ADDRESS = """
        /*0100*/                   USHF.R.U32.HI UR10, URZ, 0x4, UR40 ;
        /*0110*/                   USGXT.U32 UR42, UR10, 0xe ;
        /*0120*/                   {upper} ;
        /*0130*/                   UIADD3 UR42, UP1, UR42, 0x40, URZ ;
        /*0140*/                   IMAD.MOV.U32 R22, RZ, RZ, R80 ;
        /*0150*/                   UIADD3.X UR43, UR43, -0x7fffffe0, URZ, UP1, !UPT ;
        /*0160*/                   UIADD3 UR46, UP2, UR42, 0x40, URZ ;
        /*0170*/                   UIADD3.X UR47, UR43, URZ, URZ, UP2, !UPT ;
        /*0180*/                   EXIT ;
"""


@pytest.mark.parametrize(
    "upper",
    ["UMOV UR43, UR35", "UMOV UR47, URZ", "@UP1 UMOV UR43, URZ", "R2UR UR43, R7", "ULDC.64 UR42, c[0x0][0x208]"],
)
def test_a_step_added_to_no_address_is_found(upper: str) -> None:
    assert lost(_ADDRESS.format(upper=upper)) == ["UIADD3.X UR43, UR43, -0x7fffffe0, URZ, UP1, !UPT"]


def test_a_step_added_to_an_address_is_right() -> None:
    assert lost(_ADDRESS.format(upper="UMOV UR43, URZ")) == []
