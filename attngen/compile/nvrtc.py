"""NVRTC by its own C interface, from the wheel that identifies it in cache keys: CuPy takes a second to import.

The functions are named as CuPy's bindings name theirs, which serve where the wheel's library cannot be loaded.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib import metadata
from typing import Any

_PACKAGE = "nvidia-cuda-nvrtc"


class NVRTCError(RuntimeError):
    """What NVRTC says of a call that failed."""


class Library:
    """A loaded libnvrtc."""

    NVRTCError = NVRTCError

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
                ("GetProgramLogSize", c_void_p, POINTER(c_size_t)), ("GetProgramLog", c_void_p, c_char_p),
            ):  # fmt: skip
                getattr(self._library, f"nvrtc{name}").argtypes = arguments
        except AttributeError as error:
            raise OSError(str(error)) from error

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, f"nvrtc{name}")(*arguments)
        if result:
            raise NVRTCError(f"{self._library.nvrtcGetErrorString(result).decode()} ({result})")

    def getVersion(self) -> tuple[int, int]:
        """Return major and minor version."""
        major, minor = c_int(), c_int()
        self._call("Version", major, minor)
        return major.value, minor.value

    def createProgram(self, text: str, name: str, headers: Sequence[bytes], names: Sequence[bytes]) -> c_void_p:
        """Return a program of a source and the headers that it may include."""
        program, many = c_void_p(), c_char_p * len(headers)
        self._call("CreateProgram", program, text.encode(), name.encode(), len(headers), many(*headers), many(*names))
        return program

    def compileProgram(self, program: c_void_p, options: Sequence[str]) -> None:
        """Compile it. Raises NVRTCError; the log says why."""
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        self._call("CompileProgram", program, len(options), given)

    def getCUBIN(self, program: c_void_p) -> bytes:
        """Return the machine code, an ELF file."""
        return self._bytes("GetCUBIN", program)

    def getProgramLog(self, program: c_void_p) -> str:
        """Return what the compiler said."""
        return self._bytes("GetProgramLog", program).decode("utf-8", "replace")

    def _bytes(self, name: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, size)
        found = ctypes.create_string_buffer(max(size.value, 1))
        self._call(name, program, found)
        return found.raw[: size.value]

    def destroyProgram(self, program: c_void_p) -> None:
        """Free it."""
        self._call("DestroyProgram", program)


@cache
def library() -> Library | None:
    """Return the library of the installed wheel, or None where there is none that can be loaded."""
    try:
        files = metadata.distribution(_PACKAGE).files or ()
        paths = [str(file.locate()) for file in files if file.name.startswith("libnvrtc.so")]
        return Library(paths[0]) if len(paths) == 1 else None
    except (metadata.PackageNotFoundError, OSError):
        return None
