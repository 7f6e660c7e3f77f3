"""Reading PTX: the parameters of a kernel, the ISA version, and the CUDA release that belongs to it."""

from __future__ import annotations

import re
from typing import NamedTuple

from attngen.errors import CompileError


class PtxParameter(NamedTuple):
    """One ``.param`` of an entry: PTX type without the dot, size and alignment in bytes."""

    type: str
    size: int
    align: int

    def __str__(self) -> str:
        return f".{self.type} ({self.size} bytes, aligned to {self.align})"


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$][\w$]*)\s*(?:\((.*?)\))?\s*[.{]", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf]\d+)"
    r"(?:\s+\.ptr(?:\s*\.(?:global|const|shared|local))?(?:\s*\.align\s+\d+)?)?"
    r"\s+[\w$]+\s*(?:\[(?P<count>\d+)\])?"
)


def ptx_parameters(ptx: str) -> list[PtxParameter]:
    """The parameters of the one ``.entry`` of a PTX text, in order.

    Raises CompileError if there is no entry, more than one, or a parameter of a form not known here.
    """
    entries = _ENTRY.findall(_COMMENT.sub("", ptx))
    if len(entries) != 1:
        raise CompileError(f"PTX with {len(entries)} .entry; expected one")
    name, body = entries[0]
    parameters = []
    for text in filter(None, (part.strip() for part in body.split(","))):
        match = _PARAMETER.fullmatch(text)
        if match is None:
            raise CompileError(f"{name}: PTX parameter not understood: {text}")
        size = int(match["type"][1:]) // 8
        parameters.append(PtxParameter(match["type"], size * int(match["count"] or 1), int(match["align"] or size)))
    return parameters


def cuda_major(ptx: str, cubin: bytes = b"") -> int:
    """The CUDA major release of a PTX text, or that of the ptxas that made the cubin of it, if it is newer.

    PTX ISA 7.x is CUDA 11, 8.x is 12, 9.x is 13. Cubins of a newer form name the ptxas that made them; those without a
    name load on the drivers of the PTX's release.
    Source: PTX ISA, "Release Notes", table of the release history.
    """
    major, _ = _isa_version(ptx)
    assembler = re.search(rb"Cuda compilation tools, release (\d+)\.", cubin)
    return max(major + 4, int(assembler[1]) if assembler else 0)


def driver_of_ptx(ptx: str) -> int:
    """The oldest driver that compiles a PTX text, as cuDriverGetVersion gives it: that of the CUDA release of its ISA.

    PTX ISA 8.0 to 8.5 are CUDA 12.0 to 12.5, 8.6 to 8.8 are 12.7 to 12.9, and 9.x is 13.x.
    Source: PTX ISA, "Release Notes", table of the release history.
    """
    major, minor = _isa_version(ptx)
    return 1000 * (major + 4) + 10 * (minor + 1 if major == 8 and minor > 5 else minor)


def image_of(ptx: str) -> bytes:
    """A PTX text as the driver takes it."""
    return ptx.encode() + b"\0"


def _isa_version(ptx: str) -> tuple[int, int]:
    match = re.search(r"^\.version\s+(\d+)\.(\d+)", ptx, re.MULTILINE)
    if match is None:
        raise CompileError("PTX without a .version line")
    return int(match[1]), int(match[2])


def without_register_limit(ptx: str) -> str:
    """The PTX text without the line that limits the registers of its entry."""
    return re.sub(r"^\.maxnreg\s+\d+\n", "", ptx, flags=re.MULTILINE)
