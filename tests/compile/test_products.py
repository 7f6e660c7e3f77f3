"""The comparison of products on a real kernel, whose machine code is changed one instruction at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from attngen.compile import compile_source, triton
from attngen.compile.emulate.differential import wrong_products
from attngen.compile.emulate.launch import LAUNCHES
from attngen.compile.emulate.program import CannotDecide
from attngen.compile.emulate.sass_program import sass_program
from attngen.compile.emulate.sass_text import SassInstruction, read_sass
from attngen.compile.inspect import disassemble
from attngen.errors import CompileError
from tests.compile.plans import DESCRIPTOR, Source

_NAME = re.compile(r"\b(U?[RP])(\d+)\b")
_GROUP = re.compile(r"gdesc\[UR(\d+)\]")
_WIDE = {"64", "WIDE", "U64"}

#: Instructions whose lack changes nothing: a constant that its register holds already, and the rank of a block in its
#: cluster, of which no descriptor has a bit.
_SAME = re.compile(r"(UMOV UR\d+, 0x4\w{7}|ULEA UR\d+, UR\d+, UR\d+, 0x18) ; -> .* NOP ;$")


class Kernel(NamedTuple):
    """A kernel with two products in its loop."""

    ptx: str
    sass: str
    parameters: list[dict[str, Any]]

    def wrong(self, sass: str) -> bool:
        """Whether other machine code of it is refused."""
        try:
            return bool(wrong_products(self.ptx, sass, self.parameters, 4))
        except CannotDecide:
            return True


@cache
def kernel() -> Kernel:
    artifact = compile_source(DESCRIPTOR, Source(DESCRIPTOR.name))  # type: ignore[arg-type]
    return Kernel(artifact.texts["ptx"], disassemble(artifact.cubin), artifact.manifest["launches"][0]["parameters"])


def test_a_compiled_kernel_is_right() -> None:
    ptx, sass, parameters = kernel()
    assert wrong_products(ptx, sass, parameters, 4) == []


def test_an_instruction_that_makes_a_descriptor_is_missed() -> None:
    tried = {text: kernel().wrong(changed) for text, changed in mutants()}
    assert len(tried) > 30  # 38 by Triton 3.8
    unseen = [text for text, seen in tried.items() if not seen]
    assert len(unseen) < len(tried) // 5
    assert all(_SAME.search(text) for text in unseen), unseen


def mutants() -> Iterator[tuple[str, str]]:
    """Yield each instruction that makes a descriptor, and the machine code without it, or with another constant."""
    sass = kernel().sass
    instructions, _ = read_sass(sass)
    lines = [n for n, line in enumerate(sass.splitlines()) if re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line)]
    assert len(lines) == len(instructions)
    for place in sorted(making_descriptors(instructions)):
        line = sass.splitlines()[lines[place]]
        without = line.replace(instructions[place].text, "NOP")
        yield from _with(lines[place], line, without)
        constants = re.findall(r"0x[0-9a-f]+", instructions[place].text)
        if constants and "LUT" not in instructions[place].modifiers and "c[" not in line:
            head, _, tail = line.rpartition(constants[-1])
            yield from _with(lines[place], line, f"{head}{int(constants[-1], 16) ^ 16:#x}{tail}")


def _with(number: int, line: str, other: str) -> Iterator[tuple[str, str]]:
    assert other != line
    lines = kernel().sass.splitlines()
    lines[number] = other
    yield f"{line.strip()} -> {other.strip()}", "\n".join(lines)


def making_descriptors(instructions: list[SassInstruction]) -> set[int]:
    """Return the places of what a run computes descriptors with: backwards through what it ran, by the text alone."""
    needed: set[str] = set()
    making: set[int] = set()
    for place in reversed(executed()):
        instruction = instructions[place]
        if group := _GROUP.search(instruction.text):
            in_registers = not instruction.operands[1].startswith("gdesc")
            needed |= {f"UR{int(group[1]) + n}" for n in range(2 if in_registers else 0, 4)}
            continue
        results = written(instruction)
        if not results & needed:
            continue
        making.add(place)
        if instruction.guard is None:
            needed -= results
        else:
            needed.add(instruction.guard)
        needed |= read(instruction)
    return making


def executed() -> list[int]:
    """Return the places that the machine code runs through in one launch."""
    program, places = sass_program(kernel().sass), list[int]()

    def noting(place: int, run: Any) -> Any:
        def noted(state: Any) -> Any:
            places.append(place)
            return run(state)

        return noted

    program.steps = [replace(step, run=noting(place, step.run)) for place, step in enumerate(program.steps)]
    program.run(LAUNCHES[0].machine(kernel().parameters, 0))
    return places


def written(instruction: SassInstruction) -> set[str]:
    """Return the registers that an instruction writes, and the predicates before or after the first one."""
    if instruction.name.startswith(("ST", "BRA", "BAR", "SYNCS", "WARP", "UTMA", "EXIT", "HGMMA", "RED", "FENCE")):
        return set()
    first = [text for text in instruction.operands[:2] if re.fullmatch(r"U?P\d", text)]
    results = {*first, *instruction.operands[:1]}
    if first and instruction.operands[0] in first and "SETP" not in instruction.name:
        results.add(instruction.operands[1])
    wide = bool({"64", "WIDE"} & set(instruction.modifiers)) or instruction.name == "CS2R"
    return _registers(results, wide)


def read(instruction: SassInstruction) -> set[str]:
    return _registers(set(instruction.operands[1:]), bool(_WIDE & set(instruction.modifiers)))


def _registers(operands: set[str], wide: bool) -> set[str]:
    registers = {(kind, int(number)) for text in operands for kind, number in _NAME.findall(text)}
    return {f"{kind}{number + n}" for kind, number in registers for n in range(2 if wide and kind[-1] == "R" else 1)}


def test_a_wrong_kernel_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = next(changed for _, changed in mutants() if kernel().wrong(changed))
    monkeypatch.setattr(triton, "disassemble", lambda cubin: wrong)
    with pytest.raises(CompileError, match=f"{triton.WRONG_CODE}|{triton.UNCHECKED_CODE}"):
        compile_source(DESCRIPTOR, Source(DESCRIPTOR.name))  # type: ignore[arg-type]
