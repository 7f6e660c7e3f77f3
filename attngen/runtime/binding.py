"""What a call's arguments stand for: the variant, its kernels, and the checked call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attngen.dtypes import ATTENTION_DTYPES as KERNEL_DTYPES
from attngen.dtypes import HEAD_DIMS
from attngen.errors import CallError, NoKernelError, suggest
from attngen.lang.variant import Variant
from attngen.runtime import debug as debugging
from attngen.runtime.arguments import ATTENTION_DTYPES, Call, Packing, bind
from attngen.runtime.paging import Paging, bind_paged
from attngen.runtime.registry import Found, registry

#: What ``backend=`` may say.
BACKENDS = ("triton", "cuda", "reference")


def find(variant: str | Variant, package: str | None) -> Found:
    """Return the variant and its kernels. A variant given as a value takes the kernels that compute exactly it."""
    if not isinstance(variant, Variant):
        if not isinstance(variant, str):
            raise CallError(f"variant must be a name or a Variant, got {type(variant).__name__}")
        try:
            found = registry.find(variant, package)
            if found.kernels or not registry.refresh_if_built():  # a preset may have been built since
                return found
        except NoKernelError:
            if not registry.refresh_if_built():
                raise
        return registry.find(variant, package)
    return registry.of_value(variant, package)


def check_backend(backend: Any) -> None:
    """Raise CallError if ``backend`` is neither None nor one of ``BACKENDS``."""
    if backend is not None and backend not in BACKENDS:
        raise CallError(
            f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}{suggest(str(backend), BACKENDS)}"
        )


def require_reference(call: Call, backend: str | None) -> None:
    """Raise CallError where a call that no GPU can run asks for a kind of kernel."""
    if backend not in (None, "reference"):
        raise CallError(
            f"backend {backend!r} runs on a GPU, and q is on {call.device}; leave 'backend' out and the reference runs "
            "there, or move q, k and v to a GPU"
        )


def bind_call(
    q: Any,
    k: Any,
    v: Any,
    packing: tuple[Any, Any, Any, Any] | None,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Any,
    return_lse: bool,
    layout: str,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
) -> tuple[Call, Found]:
    """Check all arguments of a call, and on the CPU, where it costs no wait, the lengths that its tensors hold."""
    found = _found(variant, package, q, v, backend, "dense" if packing is None else "varlen")
    call = bind(
        found.variant,
        q,
        k,
        v,
        None if packing is None else Packing(*packing),
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        return_lse=return_lse,
        layout=layout,
        arguments=arguments,
    )
    if call.device.type == "cpu":
        debugging.check_lengths(call)
    return call, found


def bind_paged_call(
    q: Any,
    k: Any,
    v: Any,
    paging: Paging,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Any,
    return_lse: bool,
    page_layout: str,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
) -> tuple[Call, Found]:
    """As ``bind_call``, for keys in pages; on the CPU it also checks that the pages in use are those of the cache."""
    found = _found(variant, package, q, v, backend, "paged")
    call = bind_paged(
        found.variant, q, k, v, paging, softmax_scale=softmax_scale, seqused_k=seqused_k, return_lse=return_lse,
        page_layout=page_layout, arguments=arguments,
    )  # fmt: skip
    if call.device.type == "cpu":
        debugging.check_lengths(call)
    return call, found


def _found(variant: str | Variant, package: str | None, q: Any, v: Any, backend: str | None, layout: str) -> Found:
    """Return the variant and its kernels. Raises CallError, and NoKernelError with what to add to a spec."""
    check_backend(backend)
    try:
        return find(variant, package)
    except NoKernelError as error:
        raise _with_needs(error, q, v, layout) from None


def _with_needs(error: NoKernelError, q: Any, v: Any, layout: str) -> NoKernelError:
    """Return the error of an unknown variant with the lines that a kernel for these tensors takes."""
    if not (isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() and v.dim()):
        return error
    dims, dtype = (q.shape[-1], v.shape[-1]), ATTENTION_DTYPES.get(q.dtype)
    if any(dim not in HEAD_DIMS for dim in dims) or dtype not in KERNEL_DTYPES:
        return error
    head_dim = str(dims[0]) if dims[0] == dims[1] else f"{{qk: {dims[0]}, v: {dims[1]}}}"
    found = [f"      head_dim: {head_dim}", f"      dtype: {dtype}", f"      layout: {layout}"]
    lines = [line for line in str(error).splitlines() if not line.startswith("      head_dim:")]
    return NoKernelError("\n".join([*lines, *found]))
