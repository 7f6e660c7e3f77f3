"""Triton's interpreter without what it does at every operation for nothing, which is most of its time.

What is computed stays the same. What the installed Triton does not have is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Replace the slow parts of the interpreter, in this process. Triton is imported, to interpret."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    kind = semantic.TritonSemantic
    for owner, name, make in (
        (kind, "binary_op_sanitize_overflow_impl", _overflow),
        (kind, "broadcast_impl_value", _broadcast),
        (core, "_unwrap_if_constexpr", _unwrap),
        (core.block_type, "__init__", _block_types),
        (core.tensor, "__init__", _tensors),
        (interpreter, "_get_np_dtype", _dtypes),
        (interpreter, "_patch_lang", _patches),
    ):
        if hasattr(owner, name):
            setattr(owner, name, make(getattr(owner, name)))


def _overflow(original: Callable[..., None]) -> Callable[..., None]:
    """Look for overflow only where it would be told: without ``debug``, five operations find it and say nothing."""

    def check(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            original(self, *arguments)

    return check


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave operands of one shape alone, which Triton broadcasts to that shape."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _unwrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Pass on at once arguments that are no list, tuple or constant of Triton's, as most are."""
    from triton.language import core

    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else original(value)

    return unwrap


def _block_types(original: Callable[..., None]) -> Callable[..., None]:
    """Check the shape of a type of blocks, and write its name, once."""
    known: dict[tuple[Any, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not all(type(extent) is int for extent in shape):
            original(self, element_ty, shape)
            return
        key = (str(element_ty), tuple(shape))
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            self.__dict__.update(known[key], element_ty=element_ty)

    return init


def _tensors(original: Callable[..., None]) -> Callable[..., None]:
    """Write the shape of tensors as constants of Triton's once for each shape, not for each tensor."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:  # both are given by these names, too
        shape = type.shape if type.is_block() else ()
        if shape not in known:
            original(self, handle, type)
            known[shape] = {name: value for name, value in vars(self).items() if name in ("shape", "numel")}
        else:
            self.__dict__.update(known[shape], handle=handle, type=type, dtype=type.scalar)

    return init


def _dtypes(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep NumPy's types by the names of Triton's: for each, a table of all is written."""
    known: dict[str, Any] = {}

    def dtype_of(type_: Any) -> Any:
        dtype = known.get(type_.name)
        if dtype is None:
            dtype = known[type_.name] = original(type_)
        return dtype

    return dtype_of


def _patches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the functions of Triton's language once, and not at each call of a function of a kernel."""
    import inspect

    from triton.runtime import interpreter

    done: set[str] = set()

    def patch(fn: Any) -> Any:
        language = interpreter.tl
        modules = {
            m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in (language, language.core)
        }
        if not modules or not modules <= done:
            original(fn)  # for good: what would restore it is dropped
            done.update(modules)
        return interpreter._LangPatchScope()

    return patch
