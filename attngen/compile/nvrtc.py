"""NVRTC by its C interface: a compiler as a library, which needs no GPU, no driver and no header of the toolkit."""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

from attngen.compile.toolchain import Nvrtc
from attngen.errors import ToolchainError

#: nvrtcResult of a source that is refused, and of one on which the compiler itself fails.
_COMPILATION, _INTERNAL_ERROR = 6, 11

#: nvrtcResult of a process that has too little memory.
_OUT_OF_MEMORY = 1


class NVRTCError(RuntimeError):
    """A call of NVRTC that failed. ``code`` is its nvrtcResult."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code

    @property
    def of_source(self) -> bool:
        """Whether another source may compile."""
        return self.code in (_COMPILATION, _INTERNAL_ERROR)

    @property
    def of_memory(self) -> bool:
        """Whether there was too little memory."""
        return self.code == _OUT_OF_MEMORY


class Library:
    """A loaded libnvrtc."""

    def __init__(self, path: str) -> None:
        """Raises OSError for what is no libnvrtc."""
        self._library = ctypes.CDLL(path)
        try:
            self._library.nvrtcGetErrorString.restype = c_char_p
            self._library.nvrtcGetErrorString.argtypes = [c_int]
            for name, *arguments in (
                ("Version", POINTER(c_int), POINTER(c_int)),
                ("CreateProgram", POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
                ("CompileProgram", c_void_p, c_int, c_void_p), ("DestroyProgram", POINTER(c_void_p)),
                ("GetCUBINSize", c_void_p, POINTER(c_size_t)), ("GetCUBIN", c_void_p, c_char_p),
                ("GetPTXSize", c_void_p, POINTER(c_size_t)), ("GetPTX", c_void_p, c_char_p),
                ("GetProgramLogSize", c_void_p, POINTER(c_size_t)), ("GetProgramLog", c_void_p, c_char_p),
            ):  # fmt: skip
                getattr(self._library, f"nvrtc{name}").argtypes = arguments
        except AttributeError as error:
            raise OSError(str(error)) from error

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, f"nvrtc{name}")(*arguments)
        if result:
            raise NVRTCError(self._library.nvrtcGetErrorString(result).decode(), result)

    def getVersion(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = c_int(), c_int()
        self._call("Version", major, minor)
        return major.value, minor.value

    def createProgram(self, text: str, name: str, headers: Sequence[bytes], names: Sequence[bytes]) -> c_void_p:
        """Make a program of a source and the headers that it may include."""
        program, many = c_void_p(), c_char_p * len(headers)
        self._call("CreateProgram", program, text.encode(), name.encode(), len(headers), many(*headers), many(*names))
        return program

    def compileProgram(self, program: c_void_p, options: Sequence[str]) -> None:
        """Compile a program. Raises NVRTCError; the log has the reason."""
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        self._call("CompileProgram", program, len(options), given)

    def getCUBIN(self, program: c_void_p) -> bytes:
        """The machine code, an ELF file."""
        return self._bytes("GetCUBIN", program)

    def getPTX(self, program: c_void_p) -> str:
        """The PTX of a program that was compiled for a virtual architecture."""
        return self._bytes("GetPTX", program).rstrip(b"\0").decode()

    def getProgramLog(self, program: c_void_p) -> str:
        """The messages of the compiler."""
        return self._bytes("GetProgramLog", program).rstrip(b"\0\n").decode("utf-8", "replace")

    def _bytes(self, name: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, size)
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(name, program, buffer)
        return buffer.raw[: size.value]

    def destroyProgram(self, program: c_void_p) -> None:
        """Free it."""
        self._call("DestroyProgram", program)


@cache
def load(nvrtc: Nvrtc) -> Library:
    """Load an installed NVRTC. Raises ToolchainError if it is damaged.

    NVRTC opens libnvrtc-builtins by name while it compiles. That of 13.0 has no run path to the folder that both lie
    in, so the builtins are loaded first: the loader then finds them by their soname.
    """
    major, minor = nvrtc.release
    try:
        _keep_loaded(str(nvrtc.library.with_name(f"libnvrtc-builtins.so.{major}.{minor}")))
        library = Library(str(nvrtc.library))
        version = library.getVersion()
    except (OSError, NVRTCError) as error:
        raise broken(nvrtc, f"it cannot be loaded: {error}") from None
    if version != (major, minor):
        raise broken(nvrtc, f"{nvrtc.library} is NVRTC {version[0]}.{version[1]}")
    return library


@cache
def _keep_loaded(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def broken(nvrtc: Nvrtc, fault: str) -> ToolchainError:
    """The error of an NVRTC that does not work."""
    return ToolchainError(f"{nvrtc} ({nvrtc.distribution}) does not work: {fault}; {nvrtc.remedy}")
