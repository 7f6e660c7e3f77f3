"""Resources and machine code of a cubin, by the log of ptxas and the tools in Triton's wheel."""

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
    """Resources of one kernel: registers and spilled bytes of a thread, and whether ptxas serialized its wgmma."""

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
    """The path of a tool such as ``ptxas`` or ``nvdisasm`` in Triton's wheel, or None. Imports nothing."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "backends", "nvidia", "bin", name)
        if path.is_file():
            return path
    return None


def tool_version(path: Path) -> str:
    """The version that an NVIDIA tool prints for ``--version``, such as ``13.4.59``; else ``unknown``."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


@cache
def tool_release(path: Path) -> tuple[int, ...]:
    """The version of an NVIDIA tool as numbers; () if it is unknown."""
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


@lru_cache(maxsize=4)  # several checks read the same cubin, and nvdisasm takes half a second
def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text (SASS)."""
    return _run_tool("nvdisasm", "--print-code", "--no-dataflow", cubin=cubin)


def count_instructions(cubin: bytes, name: str) -> int:
    """Count the machine instructions of a cubin whose name matches a pattern such as ``[HQ]GMMA``."""
    return len(re.findall(rf"\b{name}\.", disassemble(cubin)))


#: In ``.nv.info`` sections: attributes with a payload of their own length, and the one that describes a parameter.
_WITH_PAYLOAD, _PARAMETER = 0x04, 0x17


def parameter_places(cubin: bytes, symbol: str | None = None) -> list[tuple[int, int]]:
    """Offset and size in bytes of each parameter of a kernel, in order; without ``symbol``, of the only kernel.

    Offsets count from the start of the parameter block, but alignment holds in the constant bank, where that block
    starts at an address of its own (0x210 on sm90): a tensor map aligned to 64 bytes does not start at offset 0.
    Raises CompileError for anything but a cubin. cuobjdump prints the same, but is slower to start.
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
    """Number, offset and size of each parameter in a section of attributes."""
    place = 0
    while place < len(attributes):
        form, attribute, length = struct.unpack_from("<BBH", attributes, place)
        place += 4
        if form != _WITH_PAYLOAD:  # the value stands in place of a length
            continue
        if attribute == _PARAMETER:
            _, number, offset, word = struct.unpack_from("<IHHI", attributes, place)
            yield number, offset, word >> 18
        place += length
