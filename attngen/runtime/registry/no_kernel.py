"""The error of a call that no kernel takes: the reason against each candidate, and the lines of a spec that add one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attngen.arch import ARCHES, Arch, arch_of
from attngen.cards import KINDS
from attngen.drivers import cuda_release, driver_text
from attngen.dtypes import (
    ATTENTION_DTYPES,
    BESIDE_CACHES,
    BESIDE_LATENT_ROWS,
    CACHE_DTYPES,
    DESCALE_BLOCKS,
    HEAD_DIM_STEP,
    HEAD_DIMS,
    KEY_VALUE_DIMS,
    KEY_VALUE_DTYPES,
    LATENT_ROWS,
    QUANTIZED_DTYPES,
    WIDE_HEAD_DIMS,
    dtype,
)
from attngen.errors import NoKernelError
from attngen.operations import JVP
from attngen.runtime.arguments.checked import ATTENTION_DTYPES as ATTENTION_NAMES
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device import tensormap
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.select import Request, select, v_of_key


def no_kernel(kernels: Sequence[Kernel], request: Request, driver: Driver) -> NoKernelError:
    """Return the error that lists each candidate, its reason, and the YAML lines that add a kernel for the call."""
    call = request.call
    capability = driver.capability(request.device)
    lines = [
        f"no kernel takes this call: {call.variant.name}, {describe(call, request.direction)}, on sm{capability}"
        + (f", backend {request.backend}" if request.backend else "")
    ]
    if not any(kernel.direction == request.direction for kernel in kernels):
        kind = "kernel" if request.direction == "forward" else f"{request.direction} kernel"
        lines.append(f"  (no {kind} of this variant is built)")
    elif all(_for_another_machine(kernel, capability, driver) for kernel in kernels):
        lines.append(_another_machine(kernels, capability, driver))
    lines += [f"  {r.kernel.full_name}: {r.reason}" for r in select(kernels, request, driver).rejected]
    never = no_spec_adds(request, capability)
    if never is not None:
        lines.append(never)
    else:
        lines += on_demand.offer()
        lines += [on_demand.remedy(), *yaml_lines(call, capability, request)]
    return NoKernelError("\n".join(lines))


def no_spec_adds(request: Request, capability: int) -> str | None:
    """Reason why no spec can add a kernel for a call, and what helps instead, or None."""
    listed = request.call.variant.keys is not None
    key_values = (request.direction == "forward" or listed) and takes_key_values(request, capability)
    return (
        _beyond_card(request, arch_of(capability))
        or _beyond_all_kernels(request.call, capability, key_values)
        or _beyond_copies(request.call, request)
        or _beyond_cuda(request.call, capability, request)
    )


def _for_another_machine(kernel: Kernel, capability: int, driver: Driver) -> bool:
    return not kernel.arch.runs_on(capability) or driver.version() < kernel.min_driver


def _another_machine(kernels: Sequence[Kernel], capability: int, driver: Driver) -> str:
    """Say what all kernels of a variant need that this machine lacks, whatever else a call asks for."""
    arches = ", ".join(dict.fromkeys(kernel.arch.name for kernel in kernels))
    needed = min(kernel.min_driver for kernel in kernels)
    return (
        f"  none of its kernels runs on this machine: they need {arches} and a driver for {driver_text(needed)} or "
        f"later; this is sm{capability}, with a driver for CUDA {cuda_release(driver.version())}"
    )


def _mixes_widths(call: Call) -> bool:
    """Whether k and v are a cache in fewer bits than q."""
    return call.kv_dtype != call.dtype and call.dtype not in QUANTIZED_DTYPES


def describe(call: Call, direction: str = "forward") -> str:
    """Say in a few words what a call needs."""
    dims = str(call.head_dim_qk) if call.head_dim_qk == call.head_dim_v else f"{call.head_dim_qk}/{call.head_dim_v}"
    cache = "" if call.kv_dtype == call.dtype else f" with k and v in {call.kv_dtype}"
    out = "" if call.asked_out is None else f" to {ATTENTION_NAMES[call.asked_out]}"
    return f"{direction}, {call.layout}, {call.dtype}{cache}{out}, head_dim {dims}"


def takes_key_values(request: Request, capability: int) -> bool:
    """Whether a kernel that takes the values from k could be built for a call; none with a v of its own has such head
    dims."""
    call, arch = request.call, arch_of(capability)
    fits = (call.head_dim_qk, call.head_dim_v) in KEY_VALUE_DIMS and (
        {call.dtype, call.kv_dtype} <= {*KEY_VALUE_DTYPES}
        or (call.kv_dtype in (*LATENT_ROWS, *CACHE_DTYPES) and call.dtype == BESIDE_LATENT_ROWS)
    )
    return fits and arch is not None and arch.name in KINDS["latent attention"].arches and v_of_key(request)


def _kinds_of(request: Request) -> Iterator[str]:
    """Kinds of kernels (``cards.KINDS``) that a call asks for and not every card has."""
    call = request.call
    latent = v_of_key(request) and (call.head_dim_qk, call.head_dim_v) in KEY_VALUE_DIMS
    if call.variant.keys is not None:
        which = "latent keys by index" if latent else "keys by index"
    elif latent:
        which = "latent attention"
    else:
        which = ""
    if request.direction == "backward":
        yield f"backward of {which}" if which else "backward"
        return
    if request.direction == JVP:
        yield "forward-mode derivative"
        return
    if which:
        yield which
        return
    if call.layout == "paged":
        yield "keys in pages"
    if call.split_size or call.num_splits > 1:
        yield "split-KV"
    if call.dtype in QUANTIZED_DTYPES:
        yield "forward in e4m3" if {call.dtype, call.kv_dtype} <= {*CACHE_DTYPES} else "forward in e5m2"
    elif _mixes_widths(call):
        yield "caches in e4m3"
    if call.descales and 0 not in call.scale_blocks:
        of_pages = max(call.scale_blocks) < 0 or call.layout == "paged"
        yield "scales of pages" if of_pages else "scales of blocks or tokens"


def _beyond_card(request: Request, arch: Arch | None) -> str | None:
    """Reason why no spec can add a kernel for a call on the GPU where it runs, but for others, or None."""
    for kind in _kinds_of(request) if arch is not None else ():
        arches = KINDS[kind].arches
        if arch is not None and arch.name not in arches:
            return (
                f"No kernel can be built for {arch.name} of this kind: {kind}, only for {', '.join(arches)}; the "
                "reference takes it"
            )
    return None


def _beyond_all_kernels(call: Call, capability: int, key_values: bool = False) -> str | None:
    """Reason why no spec can add a kernel for a call, and what helps instead, or None."""
    if call.kv_dtype in LATENT_ROWS and call.dtype != BESIDE_LATENT_ROWS:
        return (
            f"No kernel can be built for q of {call.dtype} with a cache in {call.kv_dtype}, only of "
            f"{BESIDE_LATENT_ROWS}; the reference takes it"
        )
    if call.dtype not in ATTENTION_DTYPES:
        return (
            f"No kernel can be built for {call.dtype}, only for {', '.join(ATTENTION_DTYPES)}; the reference takes it"
        )
    if _mixes_widths(call) and call.dtype not in BESIDE_CACHES:
        return (
            f"No kernel can be built for q of {call.dtype} with k and v in {call.kv_dtype}, only of "
            f"{' and '.join(BESIDE_CACHES)}; the "
            "reference takes it"
        )
    if _mixes_widths(call) and max(call.scale_blocks) > 0 and call.layout != "paged":
        return (
            f"No kernel can be built for {call.dtype} with k and v in {call.kv_dtype} and a scale of each block; the "
            "reference takes it"
        )
    if arch_of(capability) is None:
        return f"No kernel can be built for sm{capability}, only for {', '.join(ARCHES)}; the reference runs there"
    if call.variant.keys is not None and {call.dtype, call.kv_dtype} - {*KEY_VALUE_DTYPES} and not key_values:
        return (
            f"No kernel can be built for keys by index ('keys: {call.variant.keys}') but in "
            f"{' and '.join(KEY_VALUE_DTYPES)}; the reference takes others"
        )
    if not key_values and (reason := _beyond_head_dims(call, arch_of(capability))):
        return reason
    return None


def _beyond_copies(call: Call, request: Request) -> str | None:
    """Reason why no kernel of head dims beyond those of most kernels takes a call's strides and addresses, or None."""
    wide = max(call.head_dim_qk, call.head_dim_v) > HEAD_DIMS[-1] and not v_of_key(request)
    if not wide or request.direction != "forward" or not _access_lines(call, request):
        return None
    return (
        f"No kernel beyond head_dim {HEAD_DIMS[-1]} can be built for these strides and addresses, since it copies 16 "
        "bytes at a time; .contiguous() tensors have one"
    )


def _beyond_head_dims(call: Call, arch: Arch | None) -> str | None:
    """Reason why no kernel can be built for the head dims of a call, and what helps instead, or None."""
    wide = (
        arch is not None
        and arch.name in KINDS["head dims beyond 256"].arches
        and ({call.dtype, call.kv_dtype} <= {*KEY_VALUE_DTYPES} or call.kv_dtype in CACHE_DTYPES)
    )
    wide = wide and call.variant.keys is None and not call.variant.dropout
    allowed = (*HEAD_DIMS, *WIDE_HEAD_DIMS) if wide else HEAD_DIMS
    for dim in (call.head_dim_qk, call.head_dim_v):
        if dim not in allowed:
            wider = next((other for other in allowed if other > dim), None)
            padded = "the reference takes it" if wider is None else f"zeros after the {dim} numbers make {wider}"
            keep = "" if wider is None or dim != call.head_dim_qk else f" (softmax_scale stays {call.scale:.6g})"
            return (
                f"No kernel can be built for head_dim {dim}, only for multiples of {HEAD_DIM_STEP} from "
                f"{allowed[0]} to {allowed[-1]}; {padded}{keep}"
            )
    return None


def yaml_lines(call: Call, capability: int, request: Request | None = None) -> list[str]:
    """Return the lines of a spec that would add a kernel for the call."""
    arch = arch_of(capability)
    assert arch is not None, "there is something that no spec can add"
    if call.head_dim_qk == call.head_dim_v:
        head_dim = str(call.head_dim_qk)
    else:
        head_dim = f"{{qk: {call.head_dim_qk}, v: {call.head_dim_v}}}"
    lines = [
        f"  arch: [{arch.name}]",
        "  kernels:",
        f"    - variant: {call.variant.without_max_logits().name}",
        *(["      max_logits: true"] if call.variant.max_logits else []),
        f"      head_dim: {head_dim}",
        f"      dtype: {call.dtype}",
        *([] if call.kv_dtype == call.dtype else [f"      kv_dtype: {call.kv_dtype}"]),
        *([] if call.asked_out is None else [f"      out_dtype: {ATTENTION_NAMES[call.asked_out]}"]),
        f"      layout: {call.layout}",
    ]
    listed = call.variant.keys is not None
    if request is not None and takes_key_values(request, capability):
        lines.append("      v: key")
        if request.direction == "forward":
            return lines + _descale_lines(call)
    if request is not None and request.direction == "backward":
        lines.append("      passes: [forward, backward]")
        if request.deterministic:
            lines.append("      deterministic: true")
    elif request is not None and request.direction == JVP:
        lines.append("      passes: [forward, jvp]")
    elif request is not None and request.backend is not None:
        lines.append(f"      backend: {request.backend}")
    caches = _mixes_widths(call) or (call.layout == "paged" and call.descales)
    if (call.split_size or call.num_splits > 1 or caches) and not listed:
        lines.append("      split_kv: true")
    lines += _descale_lines(call)
    lines += _access_lines(call, request)
    return lines


def _descale_lines(call: Call) -> list[str]:
    """Line of a spec for scales that a call has for less than a head."""
    if not call.descales or 0 in call.scale_blocks:
        return []
    block = max(call.scale_blocks)
    return [f"      descale: {next(name for name, size in DESCALE_BLOCKS.items() if size == block)}"]


def _beyond_cuda(call: Call, capability: int, request: Request) -> str | None:
    """Reason why no CUDA kernel can be built for a call that asks for one, or None."""
    arch = arch_of(capability)
    if request.backend != "cuda" or request.direction == "backward" or arch is None:
        return None
    access = _access_lines(call, request)
    reason = None
    if arch.name not in KINDS["forward"].cuda:
        reason = f"for {arch.name}, only for {', '.join(KINDS['forward'].cuda)}"
    elif dtype(call.dtype).mma is None:
        multiplied = [name for name in ATTENTION_DTYPES if dtype(name).mma is not None]
        reason = f"for {call.dtype}, only for {' and '.join(multiplied)}"
    elif any("alignment" in line for line in access):
        reason = "for these strides and addresses, since it copies 16 bytes at a time"
    return reason and f"No CUDA kernel can be built {reason}; leave 'backend' out, and the lines for Triton are named"


def _access_lines(call: Call, request: Request | None) -> list[str]:
    """Lines of a spec for tensors that TMA or 16-byte loads cannot address."""
    if _mixes_widths(call):
        return []  # such kernels have no other access
    size = dtype(call.dtype).bytes
    views = {"q": call.q, "k": call.k, "v": call.v}
    addresses = request.addresses if request is not None else {}
    odd_address = any(addresses.get(name, 0) % 16 for name in views)
    odd_stride = any(
        stride * size % 16
        for view in views.values()
        for extent, stride in zip(view.shape[:-1], view.strides[:-1], strict=True)
        if extent > 1
    )
    described = all(
        tensormap.reason_against(name, view.shape, view.strides, size) is None for name, view in views.items()
    )
    if odd_address or odd_stride:
        return ["      loads: pointer", f"      alignment: {size}"]
    return [] if described else ["      loads: pointer"]
