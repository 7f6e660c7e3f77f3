"""From the arguments of a call to its variant, its kernels, and the checked call."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attngen.dtypes import ATTENTION_DTYPES as KERNEL_DTYPES
from attngen.dtypes import DESCALES, HEAD_DIMS, QUANTIZED_DTYPES, WIDE_HEAD_DIMS
from attngen.errors import CallError, NoKernelError, suggest
from attngen.lang.variant import Variant
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, Call, check_out_dtype, refuse_unreadable
from attngen.runtime.arguments.descales import check_descales
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.arguments.paging import bind_paged, given_out
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.registry.lookup import Resolved, registry

#: Values of ``backend=``.
BACKENDS = ("triton", "cuda", "reference")


def find(variant: str | Variant, package: str | None) -> Resolved:
    """Return the variant and its kernels. A variant given as a value takes the kernels that compute exactly it."""
    if not isinstance(package, str | None):
        raise CallError(f"package must be the name of a package, got {type(package).__name__}")
    if not isinstance(variant, Variant):
        if not isinstance(variant, str):
            raise CallError(f"variant must be a name or a Variant, got {type(variant).__name__}")
        try:
            resolved = registry.find(variant, package)
            if resolved.kernels or not registry.refresh_if_built():  # a preset may have been built since
                return resolved
        except NoKernelError:
            if not registry.refresh_if_built():
                raise
        return registry.find(variant, package)
    return registry.of_value(variant, package)


#: Arguments that only calls of one form take, the first tensor of that form, and the function that takes it.
_OF_FORM = {
    "cu_seqlens_k": ("varlen", "cu_seqlens_q"), "max_seqlen_q": ("varlen", "cu_seqlens_q"),
    "max_seqlen_k": ("varlen", "cu_seqlens_q"), "page_layout": ("paged", "page_table"),
    "num_splits": ("paged", "page_table"), "split_size": ("paged", "page_table"),
}  # fmt: skip
_USUAL = {"layout": "bshd", "page_layout": "NHD"}


def check_form(form: str, given: Mapping[str, object]) -> None:
    """Raise CallError for an argument that calls of another form take, where one function takes those of all."""
    for name, value in given.items():
        if value is None or (isinstance(value, str) and value == _USUAL.get(name)):
            continue
        if name == "layout" and form != "dense":
            other = "'page_layout' names that of pages" if form == "paged" else "packed tensors have one"
            raise CallError(f"layout is for dense tensors; {other}")
        owner, first = _OF_FORM.get(name, (form, ""))
        if owner != form and not (form == "paged" and name == "max_seqlen_q"):
            raise CallError(f"{name} goes with {first}, which this call does not have")


def check_backend(backend: object) -> None:
    """Raise CallError if ``backend`` is neither None nor one of ``BACKENDS``."""
    if backend is not None and backend not in BACKENDS:
        raise CallError(
            f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}{suggest(str(backend), BACKENDS)}"
        )


def require_reference(call: Call, backend: str | None) -> None:
    """Raise CallError if a call on tensors outside a GPU asks for a kernel."""
    if backend not in (None, "reference"):
        raise CallError(
            f"backend {backend!r} runs on a GPU, and q is on {call.device}; leave 'backend' out and the reference runs "
            "there, or move q, k and v to a GPU"
        )
    if call.v.in_groups:
        raise CallError(
            "v in groups of keys is for kernels alone; the reference takes (batch, seqlen, heads, head_dim)"
        )


def bind_call(given: Given) -> tuple[Call, Resolved]:
    """Check all arguments of a call, and on the CPU, where it costs no wait, the lengths and pages that it names."""
    resolved = _resolved(given)
    refuse_unreadable({**{name: getattr(given, name) for name in TENSORS}, **given.arguments})
    settings = {
        "softmax_scale": given.softmax_scale, "seqused_k": given.seqused_k, "return_lse": given.return_lse,
        "arguments": given.arguments,
    }  # fmt: skip
    q, k, v = given.q, given.k, given.v
    if given.form == "paged":
        call = bind_paged(resolved.variant, q, k, v, given, page_layout=given.layout, **settings)
        call.sm_margin, call.least_queries, call.most_queries = (
            given.sm_margin, given.least_queries, given.most_queries
        )  # fmt: skip
    else:
        packing = given if given.form == "varlen" else None
        call = bind(resolved.variant, q, k, v, packing, layout=given.layout, **settings)
        call.out = given_out(given.out, call, q)
        call.asked_out = check_out_dtype(q.dtype, given.out_dtype)
    check_descales(call, {name: getattr(given, name) for name in DESCALES}, k, v)
    if call.device.type == "cpu":
        debugging.check_lengths(call)
    return call, resolved


def _resolved(given: Given) -> Resolved:
    """Return the variant and its kernels. Raises CallError, and NoKernelError with what to add to a spec."""
    check_backend(given.backend)
    if not isinstance(given.deterministic, bool):
        raise CallError(f"deterministic must be True or False, got {given.deterministic!r}")
    try:
        return find(given.variant, given.package)
    except NoKernelError as error:
        raise _with_needs(error, given.q, given.v, given.form) from None


def _with_needs(error: NoKernelError, q: object, v: object, layout: str) -> NoKernelError:
    """Return the error of an unknown variant with the lines that a kernel for these tensors takes."""
    if not (isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() and v.dim()):
        return error
    dims, dtype = (q.shape[-1], v.shape[-1]), ATTENTION_DTYPES.get(q.dtype)
    if any(dim not in (*HEAD_DIMS, *WIDE_HEAD_DIMS) for dim in dims) or dtype not in KERNEL_DTYPES:
        return error
    head_dim = str(dims[0]) if dims[0] == dims[1] else f"{{qk: {dims[0]}, v: {dims[1]}}}"
    cache = ATTENTION_DTYPES.get(v.dtype)
    needs = [f"      head_dim: {head_dim}", f"      dtype: {dtype}"]
    needs += [f"      kv_dtype: {cache}"] if cache != dtype else []
    needs += [f"      layout: {layout}"]
    wider = dtype not in QUANTIZED_DTYPES
    needs += ["      split_kv: true"] if cache in QUANTIZED_DTYPES and (wider or layout == "paged") else []
    lines = [line for line in str(error).splitlines() if not line.startswith("      head_dim:")]
    return NoKernelError("\n".join([*lines, *needs]))
