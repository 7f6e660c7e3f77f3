"""NVRTC without ptxas: whether it takes a source, with all that ``static_assert`` says in it."""

from __future__ import annotations

from attngen.compile.nvrtc import load
from attngen.compile.options import nvrtc_options
from attngen.compile.toolchain import chosen_nvrtc
from attngen.errors import CompileError
from attngen.render import Source


def to_ptx(source: Source, arch: str = "sm90a") -> str:
    """Return the PTX of a CUDA source; CompileError with NVRTC's log if it is refused."""
    virtual = [option.replace("-arch=sm_", "-arch=compute_") for option in nvrtc_options(arch) if "ptxas" not in option]
    bodies, files = [text.encode() for text in source.headers.values()], [file.encode() for file in source.headers]
    installed = chosen_nvrtc()
    assert installed is not None
    nvrtc = load(installed)
    program = nvrtc.createProgram(source.text, f"{source.name}.cu", bodies, files)
    try:
        nvrtc.compileProgram(program, virtual)
        return nvrtc.getPTX(program).decode()
    except nvrtc.NVRTCError:
        raise CompileError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)
