"""NVRTC without ptxas: whether it takes a source, with all that ``static_assert`` says in it."""

from __future__ import annotations

from cupy_backends.cuda.libs import nvrtc

from attngen.compile.options import nvrtc_options
from attngen.errors import CompileError
from attngen.render import Source


def to_ptx(source: Source, arch: str = "sm90a") -> str:
    """Return the PTX of a CUDA source; CompileError with NVRTC's log if it is refused."""
    virtual = [option.replace("-arch=sm_", "-arch=compute_") for option in nvrtc_options(arch) if "ptxas" not in option]
    bodies, files = [text.encode() for text in source.headers.values()], [file.encode() for file in source.headers]
    program = nvrtc.createProgram(source.text, f"{source.name}.cu", bodies, files)
    try:
        nvrtc.compileProgram(program, virtual)
        ptx: bytes = nvrtc.getPTX(program)
        return ptx.decode().rstrip("\0")
    except nvrtc.NVRTCError:
        raise CompileError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
