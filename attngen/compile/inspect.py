"""What a cubin costs and what it looks like: ptxas's log, and the disassemblers that Triton ships."""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from attngen.compile.machine import sections
from attngen.errors import CompileError, ToolchainError


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses: registers and spilled bytes of a thread, and what ptxas warned of."""

    registers: int
    spills: int  # bytes stored and loaded
    serialized_wgmma: bool


def resources_of_log(log: str) -> Resources:
    """Read the verbose log of ptxas. Raises CompileError if it lacks the lines, which a new ptxas may have changed."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise CompileError(f"no registers and spills in the log of ptxas:\n{log.strip()}")
    # "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    serialized = re.search(r"wgmma\S* instructions are serialized", log) is not None
    return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), serialized)


def nvidia_tool(name: str) -> Path | None:
    """Return the path of ``ptxas``, ``cuobjdump`` or ``nvdisasm`` in the Triton wheel, or None. Imports nothing."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "backends", "nvidia", "bin", name)
        if path.is_file():
            return path
    return None


def tool_version(path: Path) -> str:
    """Return what ``--version`` of an NVIDIA tool says, such as ``13.4.59``; ``unknown`` if it says nothing usable."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


@cache
def tool_release(path: Path) -> tuple[int, ...]:
    """Return the version of an NVIDIA tool as numbers; () if it says none."""
    version = tool_version(path)
    return tuple(map(int, version.split("."))) if version[0].isdigit() else ()


def _run_tool(name: str, *options: str, cubin: bytes) -> str:
    tool = nvidia_tool(name)
    if tool is None:
        raise ToolchainError(f"{name} is missing; it comes with triton: pip install 'attngen[build]'")
    with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, *options, path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{name} cannot read the cubin: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@lru_cache(maxsize=4)  # one kernel's is looked at several times, and nvdisasm takes half a second
def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    return _run_tool("nvdisasm", "--print-code", "--no-dataflow", cubin=cubin)


def count_instructions(cubin: bytes, name: str) -> int:
    """Return how many machine instructions of a cubin are called ``name``, a pattern such as [HQ]GMMA."""
    return len(re.findall(rf"\b{name}\.", disassemble(cubin)))


#: In ``.nv.info`` sections: attributes with a payload of their own length, and the one that describes a parameter.
_WITH_PAYLOAD, _PARAMETER = 0x04, 0x17


def parameter_places(cubin: bytes, symbol: str | None = None) -> list[tuple[int, int]]:
    """Return offset and size in bytes of each parameter of a kernel, in order; of the only one without ``symbol``.

    Offsets count from the start of the parameter block, but alignment holds in the constant bank, where that block
    starts at an address of its own (0x210 on sm90): a tensor map aligned to 64 bytes does not start at offset 0.
    Raises CompileError for what is no cubin. cuobjdump says the same, but takes longer to start than all of this.
    """
    prefix = b".nv.info."
    rows: set[tuple[int, int, int]] = set()
    try:
        for name, data in sections(cubin):
            if name.startswith(prefix) and symbol in (None, name.removeprefix(prefix).decode()):
                rows.update(_parameters(data))
    except (struct.error, ValueError) as error:
        raise CompileError(f"the cubin is not an ELF file: {error}") from error
    return [(offset, size) for _, offset, size in sorted(rows)]


def _parameters(attributes: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield number, offset and size of each parameter that a section describes."""
    place = 0
    while place < len(attributes):
        form, attribute, length = struct.unpack_from("<BBH", attributes, place)
        place += 4
        if form != _WITH_PAYLOAD:  # what they say is in place of the length
            continue
        if attribute == _PARAMETER:
            _, number, offset, word = struct.unpack_from("<IHHI", attributes, place)
            yield number, offset, word >> 18
        place += length
