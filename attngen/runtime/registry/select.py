"""Selection of the kernel that takes a call: each candidate either accepts it or names the one reason against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from attngen.arch import ARCHES, Arch, arch_of
from attngen.drivers import INSTALL_NVRTC_12, MOST_FOR_CUDA_12, cuda_release, driver_text, min_driver
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
    PAGE_BLOCK,
    QUANTIZED_DTYPES,
    WIDE_HEAD_DIMS,
    dtype,
)
from attngen.errors import NoKernelError
from attngen.lang.listed import EXTRA_K
from attngen.manifest import Argument
from attngen.runtime.arguments.checked import ATTENTION_DTYPES as ATTENTION_NAMES
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.arguments.extra_cache import has_extra_cache
from attngen.runtime.arguments.scalars import Number
from attngen.runtime.device import tensormap
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.heads_in_l2 import group_of, tiles_of
from attngen.runtime.geometry.prediction import Card, Prediction, predict
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.order import against_form, card_of, in_order, preferred

#: Largest grid along its first axis. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_BLOCKS = 2**31 - 1

#: Rows of one consumer of a packed tile: whole groups of heads fill them.
PACKED_ROWS = 64

#: Rows of all queries and heads of a group, which a packed kernel counts in 32 bits, a tile beyond the end too.
MAX_ROWS = 2**31 - 1 - 256


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate and the one reason why it does not take a call."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel that takes a call, if any, and why the candidates before it do not."""

    kernel: Kernel | None
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Input of selection: the call, where it runs, and what is known of its addresses and scalars.

    ``addresses`` maps q, k, v and ``tensor:<name>`` to addresses; ``given`` holds the scalars that the caller passed.
    """

    call: Call
    device: int
    addresses: Mapping[str, int]
    given: Mapping[str, Number]
    backend: str | None = None
    direction: str = "forward"
    deterministic: bool = False  # the same bits on every run


def _tiles(kernel: Kernel, call: Call) -> int:
    """Return the work tiles of a call."""
    return prod(tiles_of(call, kernel.tile_m, pack_gqa=kernel.pack_gqa))


def first_that_fits(kernels: Sequence[Kernel], request: Request, driver: Driver) -> Kernel | None:
    """The first kernel that takes the call, if any."""
    candidates = [kernel for kernel in kernels if kernel.direction == request.direction]
    ordered = in_order(candidates, request.call, card_of(driver, request.device))
    return next((kernel for kernel in ordered if reason_against(kernel, request, driver) is None), None)


def select(kernels: Sequence[Kernel], request: Request, driver: Driver) -> Selection:
    """The first kernel that takes the call, with the reasons against those before it, or against all of them."""
    rejected: list[Rejection] = []
    candidates = [kernel for kernel in kernels if kernel.direction == request.direction]
    for kernel in in_order(candidates, request.call, card_of(driver, request.device)):
        reason = reason_against(kernel, request, driver)
        if reason is None:
            return Selection(kernel, tuple(rejected))
        rejected.append(Rejection(kernel, reason))
    return Selection(None, tuple(rejected))


def foreseen(
    kernels: Sequence[Kernel], request: Request, driver: Driver, card: Card
) -> tuple[tuple[Kernel, Prediction], ...]:
    """Predicted times of a call on each kernel that takes it and has measured times, in order of preference."""
    times = []
    for kernel in preferred([one for one in kernels if one.direction == request.direction], request.call, card):
        prediction = predict(kernel, request.call, card)
        if prediction is not None and reason_against(kernel, request, driver) is None:
            times.append((kernel, prediction))
    return tuple(times)


def reason_against(kernel: Kernel, request: Request, driver: Driver) -> str | None:
    """Return the one reason why a kernel does not take a call, or None if it does."""
    call = request.call
    if kernel.direction != request.direction:
        return f"it is a {kernel.direction} kernel"
    if request.backend is not None and kernel.backend != request.backend:
        return f"backend is {kernel.backend}, the call has {request.backend}"
    if reason := against_form(kernel, call):
        return reason
    if kernel.v_of_key and not _v_of_key(request):
        return f"it takes the values from k: v must be k[..., :{kernel.head_dim_v}]"
    if kernel.v_of_key and "v_descale" in call.descales:
        return "it takes the values from k, with its scales: leave v_descale out"
    if not kernel.v_of_key and call.kv_dtype in QUANTIZED_DTYPES and "v_descale" not in call.descales:
        return "it needs v_descale"
    if call.descales and kernel.scale_block not in call.scale_blocks:
        given = _sharing(call.scale_blocks[0])
        return f"it takes a scale for {_sharing(kernel.scale_block)}, the call has one for {given}"
    if request.deterministic and not kernel.reproducible:
        summed = " and ".join(f"d{name[1:].upper()}" for name in kernel.summed)
        remedy = "'deterministic: true' in the spec builds a backward that has one, and all in Triton have one"
        if "dk" in kernel.summed:
            remedy = "no kernel of latent attention or of keys by index has one; the reference does"
        return (
            f"it accumulates {summed} in no fixed order, and the call, or torch.use_deterministic_algorithms(True), "
            f"requires one; {remedy}"
        )
    for name in ("least_queries", "most_queries"):
        if getattr(call, name) and name not in kernel.main.bounds:
            return f"it cannot leave out sequences by their queries, and the call has {name}={getattr(call, name)}"
    if (call.split_size or call.num_splits > 1) and not kernel.split_kv:
        asked = f"split_size={call.split_size}" if call.split_size else f"num_splits={call.num_splits}"
        return f"its blocks do not share keys, and the call has {asked}"
    if call.num_splits == 1 and kernel.main.shares > 1:
        return "its blocks share the keys of a tile, and the call has num_splits=1"
    for name, value in kernel.const_scalars.items():
        if name in request.given and request.given[name] != value:
            return f"{name} was fixed to {value} when it was built, the call passes {request.given[name]}"
    return (
        against_device(kernel, request.device, driver)
        or _against_group(kernel, call)
        or _against_tensors(kernel, request)
    )


def _v_of_key(request: Request) -> bool:
    """Whether v is the first columns of k, in memory."""
    addresses, k, v = request.addresses, request.call.k, request.call.v
    if v.in_groups:
        return False
    # The stride of an axis of extent 1 is arbitrary.
    steps = zip(k.strides, v.strides, v.shape, strict=True)
    return addresses["k"] == addresses["v"] and all(of_k == of_v for of_k, of_v, extent in steps if extent > 1)


def _sharing(block: int) -> str:
    """Say whose tokens share a scale."""
    if block == PAGE_BLOCK:
        return "each page"
    return f"each block of {block} tokens" if block > 1 else "each query and key" if block else "each head"


def against_device(kernel: Kernel, device: int, driver: Driver) -> str | None:
    """Return the one reason why a kernel does not run on a device, or None if it does."""
    capability = driver.capability(device)
    if not kernel.arch.runs_on(capability):
        later = "and later" if kernel.arch.portable else "and later of its generation"
        only = "only" if kernel.arch.specific else later
        return f"it is built for {kernel.arch.name} {only}, device {device} is sm{capability}"
    needed, version = kernel.min_driver, driver.version()
    if version < needed:
        return (
            f"it needs a driver for {driver_text(needed)} or later, this one is for CUDA {cuda_release(version)}; "
            f"{_driver_remedy(kernel, version)}"
        )
    if kernel.shared_memory > driver.shared_memory(device):
        return (
            f"it needs {kernel.shared_memory} B of shared memory, a block of device {device} "
            f"has {driver.shared_memory(device)} B"
        )
    return None


def _driver_remedy(kernel: Kernel, version: int) -> str:
    """Say what helps against a driver that is too old: a compiler of its CUDA release, if that compiles the kernel."""
    capability = kernel.arch.capability
    if kernel.backend == "cuda" and capability <= MOST_FOR_CUDA_12 and min_driver(12, capability) <= version:
        return f"update the driver, or build the kernel with NVRTC 12.9 ({INSTALL_NVRTC_12})"
    return "update the driver"


def _against_group(kernel: Kernel, call: Call) -> str | None:
    """Reason why a kernel that packs the heads of a group cannot pack those of the call."""
    group = group_of(call)
    if not kernel.pack_gqa:
        return None
    if PACKED_ROWS % group and not kernel.split_kv:
        return (
            f"it packs the query heads of a KV head into {PACKED_ROWS} rows, which {group} heads do not fill; "
            f"it takes {', '.join(str(2**n) for n in range(PACKED_ROWS.bit_length()))}"
        )
    if call.seqlen_q * group > MAX_ROWS:
        return f"it would pack {call.seqlen_q} queries of {group} heads, and counts at most {MAX_ROWS} rows"
    return None


def _against_tensors(kernel: Kernel, request: Request) -> str | None:
    """Check what was promised to the compiler, and what a TMA descriptor can express."""
    call = request.call
    views: dict[str, View] = {"q": call.q, "k": call.k, "v": call.v}
    if call.out is not None:
        views["out"] = call.out
        if reason := _against_out(call.out, request, kernel.dtype_of("out").bytes):
            return reason
    for parameter in (parameter for launch in kernel.launches for parameter in launch.entry.layout.parameters):
        if parameter.kind == "descriptor" and parameter.of in views:
            if request.addresses[parameter.of] % tensormap.ADDRESS_ALIGNMENT:
                return f"{parameter.of} does not start at a multiple of 16 B, which a TMA descriptor needs"
            view, size = views[parameter.of], kernel.dtype_of(parameter.of).bytes
            form = tensormap.columns_first if parameter.transposed else tuple
            reason = tensormap.reason_against(parameter.of, form(view.shape), form(view.strides), size)
            if reason:
                return reason
        elif parameter.kind == "descriptor" and parameter.tensor in call.tensors:
            name = parameter.tensor
            reason = against_own_map(name, call.tensors[name], request.addresses[f"tensor:{name}"])
            if reason:
                return reason
        elif parameter.divisibility:
            reason = _against_promise(parameter, request, views, kernel)
            if reason:
                return reason
    reason = _against_own_tensors(kernel, call)
    if reason:
        return reason
    if has_extra_cache(call) and request.addresses[f"tensor:{EXTRA_K.name}"] % tensormap.ADDRESS_ALIGNMENT:
        return f"{EXTRA_K.name} does not start at a multiple of 16 B"
    blocks = _blocks(kernel, call)
    if blocks > MAX_BLOCKS:
        return f"it would need {blocks} blocks, a grid has at most {MAX_BLOCKS}"
    return None


def against_own_map(name: str, tensor: Tensor, address: int) -> str | None:
    """Reason why no descriptor can have a variant's tensor, or None."""
    if address % tensormap.ADDRESS_ALIGNMENT:
        return f"{name} does not start at a multiple of 16 B, which a TMA descriptor needs"
    if 0 in tensor.shape:
        return f"{name} is empty, which a TMA descriptor cannot be"
    return tensormap.reason_against(
        name, *tensormap.of_own_tensor(tensor.shape, tensor.stride()), tensor.element_size()
    )


def _against_out(out: View, request: Request, size: int) -> str | None:
    """Reason why kernels cannot write a result that the caller allocated: they do so in pieces of 16 bytes."""
    if request.addresses.get("out", 0) % tensormap.ADDRESS_ALIGNMENT:
        return "out does not start at a multiple of 16 B"
    for axis, extent, stride in zip(out.axes[:-1], out.shape[:-1], out.strides[:-1], strict=True):
        if extent > 1 and stride * size % tensormap.STRIDE_ALIGNMENT:
            return f"out's stride along {axis} is {stride * size} B, which is not a multiple of 16 B"
    return None


def _blocks(kernel: Kernel, call: Call) -> int:
    """Return the blocks of the launch that has most."""
    rows = max(
        (-(-call.seqlen_q // one.tile_m) for one in kernel.launches if one.grid in ("rows", "queries")), default=0
    )
    keys = max((-(-call.seqlen_k // one.tile_n) for one in kernel.launches if one.grid == "keys"), default=0)
    packed = 0 if kernel.pack_gqa else rows * call.heads * call.batch
    return max(_tiles(kernel, call), packed, keys * call.kv_heads * call.batch)


def _against_own_tensors(kernel: Kernel, call: Call) -> str | None:
    """First of the variant's tensors that is not contiguous along an axis that the kernel has no stride for."""
    strided = kernel.main.entry.layout.strided
    for name, tensor in call.tensors.items():
        last = tensor.dim() - 1
        if last < 0 or (f"tensor:{name}", last) in strided or tensor.shape[last] == 1 or tensor.stride(last) == 1:
            continue
        return (
            f"the last dimension of '{name}' is not contiguous (stride {tensor.stride(last)}), as this kernel needs; "
            f"pass {name}.contiguous()"
        )
    return None


def _against_promise(parameter: Argument, request: Request, views: Mapping[str, View], kernel: Kernel) -> str | None:
    """Reason why an address or a stride is not a multiple of what the compiler was promised, or None."""
    promised, of = parameter.divisibility, parameter.of or parameter.name
    if parameter.kind == "pointer" and of in request.addresses and request.addresses[of] % promised:
        return f"{of.removeprefix('tensor:')} does not start at a multiple of {promised} B"
    if parameter.kind == "stride" and of in views:
        view, axis = views[of], str(parameter.axis)
        if view.axes and axis in view.axes and view.shape[view.axes.index(axis)] == 1:
            return None  # never stepped along: the launch passes a stride that keeps the promise
        if view.stride(axis) % promised:
            size = kernel.dtype_of(of).bytes
            stride = view.stride(axis) * size
            return f"{of}'s stride along {axis} is {stride} B, which is not a multiple of {promised * size} B"
    return None


def no_kernel(kernels: Sequence[Kernel], request: Request, driver: Driver) -> NoKernelError:
    """Return the error that lists each candidate, its reason, and the YAML lines that add a kernel for the call."""
    call = request.call
    capability = driver.capability(request.device)
    lines = [
        f"no kernel takes this call: {call.variant.name}, {describe(call, request.direction)}, on sm{capability}"
        + (f", backend {request.backend}" if request.backend else "")
    ]
    if not any(kernel.direction == request.direction for kernel in kernels):
        kind = "backward kernel" if request.direction == "backward" else "kernel"
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
        _beyond_all_kernels(request.call, capability, key_values)
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
    return fits and arch is not None and arch.wgmma and _v_of_key(request)


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
    if _mixes_widths(call) and max(call.scale_blocks) > 0:
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
    wide = max(call.head_dim_qk, call.head_dim_v) > HEAD_DIMS[-1] and not _v_of_key(request)
    if not wide or request.direction != "forward" or not _access_lines(call, request):
        return None
    return (
        f"No kernel beyond head_dim {HEAD_DIMS[-1]} can be built for these strides and addresses, since it copies 16 "
        "bytes at a time; .contiguous() tensors have one"
    )


def _beyond_head_dims(call: Call, arch: Arch | None) -> str | None:
    """Reason why no kernel can be built for the head dims of a call, and what helps instead, or None."""
    wide = arch is not None and arch.wgmma and {call.dtype, call.kv_dtype} <= {*KEY_VALUE_DTYPES}
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
        f"    - variant: {call.variant.name}",
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
    if arch.tensor_memory:
        reason = f"for {arch.name}, only for {', '.join(name for name, row in ARCHES.items() if not row.tensor_memory)}"
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
