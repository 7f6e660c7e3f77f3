"""Selection of the kernel that takes a call: each candidate either accepts it or names the one reason against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from attngen.drivers import INSTALL_NVRTC_12, cuda_release, driver_text, min_driver
from attngen.dtypes import PAGE_BLOCK, QUANTIZED_DTYPES
from attngen.lang.listed import EXTRA_K
from attngen.manifest import Argument
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.arguments.extra_cache import has_extra_cache
from attngen.runtime.arguments.scalars import Number
from attngen.runtime.device import tensormap
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.heads_in_l2 import group_of, tiles_of
from attngen.runtime.geometry.prediction import Card, Prediction, predict
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.order import against_form, card_of, in_order, preferred

#: Largest grid along its first axis. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_BLOCKS = 2**31 - 1

#: Rows of one consumer of a packed tile: M of wgmma; whole groups of heads fill them.
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
    if kernel.v_of_key and not v_of_key(request):
        return f"it takes the values from k: v must be k[..., :{kernel.head_dim_v}]"
    if kernel.v_of_key and "v_descale" in call.descales:
        return "it takes the values from k, with its scales: leave v_descale out"
    if not kernel.v_of_key and call.kv_dtype in QUANTIZED_DTYPES and "v_descale" not in call.descales:
        return "it needs v_descale"
    if call.descales and kernel.scale_block not in call.scale_blocks:
        own, given = (_sharing(block, call.layout == "paged") for block in (kernel.scale_block, call.scale_blocks[0]))
        return f"it takes a scale for {own}, the call has one for {given}"
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


def v_of_key(request: Request) -> bool:
    """Whether v is the first columns of k, in memory."""
    addresses, k, v = request.addresses, request.call.k, request.call.v
    if v.in_groups:
        return False
    # The stride of an axis of extent 1 is arbitrary.
    steps = zip(k.strides, v.strides, v.shape, strict=True)
    return addresses["k"] == addresses["v"] and all(of_k == of_v for of_k, of_v, extent in steps if extent > 1)


def _sharing(block: int, in_pages: bool) -> str:
    """Say whose tokens share a scale."""
    if block == PAGE_BLOCK:
        return "each page"
    if in_pages and block:
        return "each row of a page"
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
    cubin = kernel.backend == "cuda" and not kernel.arch.portable
    if cubin and min_driver(12, kernel.arch.capability) <= version:
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
