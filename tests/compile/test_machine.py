"""Reading machine code from the bytes of a cubin, judged by what nvdisasm prints of it."""

from __future__ import annotations

import struct
from functools import cache

import pytest

from attngen.compile import compile_source, triton
from attngen.compile.hazards import overwritten, overwritten_operands
from attngen.compile.inspect import disassemble
from attngen.compile.machine import decode, parse, sections
from attngen.errors import ChoiceError, CompileError
from tests.compile.plans import DESCRIPTOR, Source


@cache
def cubin() -> bytes:
    """Return a kernel whose loop multiplies Q and P, both in registers."""
    return compile_source(DESCRIPTOR, Source(DESCRIPTOR.name)).cubin  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_bytes_say_what_the_text_says() -> None:
    decoded, parsed = decode(cubin()), parse(disassemble(cubin()))
    assert len(decoded) == len(parsed) > 100
    for ours, theirs in zip(decoded, parsed, strict=True):
        assert (ours.product, ours.reads, ours.target) == (theirs.product, theirs.reads, theirs.target), theirs.text
        assert theirs.writes <= ours.writes, theirs.text
    assert sum(bool(instruction.reads) for instruction in parsed) >= 8
    assert any(i.target is not None and i.target < place for place, i in enumerate(parsed))


@pytest.mark.exhaustive
def test_right_code_is_not_disassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.compile.hazards.disassemble", None)
    assert overwritten_operands(cubin()) == []


@pytest.mark.exhaustive
def test_a_register_of_q_given_to_p_is_found() -> None:
    code = decode(cubin())
    start, end = next((i.target, n) for n, i in enumerate(code) if i.target is not None and i.target < n)
    loop = code[start:end]
    written = frozenset[int]().union(*(i.writes for i in loop))
    q = min(next(i.reads for i in loop if i.product and not i.reads & written))
    p = min(next(i.reads for i in loop if i.product and i.reads <= written))
    maker = start + max(n for n, i in enumerate(loop) if i.writes == {p})
    wrong = with_result(cubin(), maker, q)
    assert overwritten(decode(wrong))
    assert all(f"reads R{q}" in problem for problem in overwritten_operands(wrong))
    assert len(overwritten_operands(wrong)) == 1


def test_a_kernel_with_an_overwritten_operand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "overwritten_operands", lambda cubin: ["HGMMA reads R248"])
    with pytest.raises(ChoiceError, match=f"{DESCRIPTOR.name}: {triton.WRONG_CODE}: HGMMA reads R248"):
        compile_source(DESCRIPTOR, Source(DESCRIPTOR.name))  # type: ignore[arg-type]


def with_result(data: bytes, place: int, register: int) -> bytes:
    """Return a cubin in which one instruction writes another register: byte 2 of its 16."""
    (code,) = (content for name, content in sections(data) if name.startswith(b".text."))
    at = data.index(code) + 16 * place + 2
    return data[:at] + bytes([register]) + data[at + 1 :]


@pytest.mark.exhaustive
def test_an_unknown_operation_may_write_four_registers() -> None:
    at = next(n for n, i in enumerate(decode(cubin())) if len(i.writes) == 1)
    known = decode(cubin())[at].writes
    changed = bytearray(cubin())
    (code,) = (content for name, content in sections(cubin()) if name.startswith(b".text."))
    struct.pack_into("<H", changed, cubin().index(code) + 16 * at, 0x7777)
    assert decode(bytes(changed))[at].writes == set(range(min(known), min(known) + 4))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("SHFL.BFLY PT, R24, R25, 0x2, 0x1f", {24}),
        ("LOP3.LUT P0, R7, R5, 0x3, RZ, 0xc0, !PT", {7}),
        ("CS2R R24, SRZ", {24, 25}),
        ("CS2R.32 R24, SR_CLOCKLO", {24}),
        ("ISETP.GT.AND P0, PT, R4, R5, PT", set()),
        ("LDSM.16.M88.4 R64, [R64+UR40]", {64, 65, 66, 67}),
    ],
)
def test_registers_that_an_instruction_writes(text: str, written: set[int]) -> None:
    (instruction,) = parse(f"        /*0100*/                   {text} ;")
    assert instruction.writes == written


def test_files_that_are_no_cubins_are_refused() -> None:
    for data in (b"", b"no cubin", cubin()[:3000]):
        with pytest.raises(CompileError, match="not an ELF file"):
            decode(data)
