"""The kernel of index scores: whether it takes a call, its arguments, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import gcd, prod
from operator import mul

import torch
from torch import Tensor

from attngen.lang.divisors import divisors, reciprocal
from attngen.lang.variant import Variant
from attngen.manifest import Argument
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device import tensormap
from attngen.runtime.device.interface import Driver
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.kernels.module import Kernel, KernelLaunch
from attngen.runtime.operations.index_scores import arguments as index_scores
from attngen.runtime.operations.index_scores.arguments import FIELDS, Bound, IndexScores, scores_shape
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands, takes
from attngen.runtime.operations.shared.operands import MOST
from attngen.runtime.operations.shared.path import Helper, first_that_takes

#: Blocks of a launch for each of those that a device runs at once, at least, and tiles of keys of a block, at least.
#: Not measured: the last blocks take a quarter of the time at most.
_ROUNDS, _LEAST_TILES = 4, 8

#: Blocks with few queries that a multiprocessor runs at once (docs/notebook/index_scores.md, "Index scores and
#: selection").
_FEW_RESIDENT = 4

#: Time of a query in a block with few queries, in units of that in one with many: its products are narrow.
#: Not measured.
_FEW_COST = 1.5

#: Place of the scores among the tensors of a call.
_OUT = FIELDS.tensors.index("out")

#: Copies by TMA begin at multiples of so many bytes in shared memory (PTX ISA, "cp.async.bulk.tensor").
_COPY_ALIGNMENT = 128


class PreparedScores:
    """A call of one form on a kernel."""

    __slots__ = ("_launches", "_shape", "variant")

    def __init__(self, launches: HelperLaunches, shape: tuple[int, ...], variant: str | Variant) -> None:
        self._launches, self._shape, self.variant = launches, shape, variant

    def run(self, call: IndexScores, addresses: list[int]) -> Tensor:
        """Launch the call and return its scores."""
        out = call.out
        if out is None:
            out = call.q.new_empty(self._shape, dtype=torch.float32)
            addresses[_OUT] = out.data_ptr()
        self._launches(addresses)
        return out


def prepare(given: IndexScores, bound: Bound, driver: Driver) -> PreparedScores | str:
    """The launch of a checked call on the first kernel that takes it, or the reason why none does."""
    kernels = [kernel for kernel in bound.resolved.kernels if kernel.direction == given.does]
    missing = f"no package has a kernel of {given.does} for '{bound.call.variant.name}'"
    device = given.q.device.index or 0
    return first_that_takes(kernels, device, driver, lambda kernel: prepare_on(kernel, given, bound, driver), missing)


def prepare_on(kernel: Kernel, given: IndexScores, bound: Bound, driver: Driver) -> PreparedScores | str:
    """The launch of a checked call on one kernel, or the reason against it."""
    call = bound.call
    reason = _against(kernel, given, call)
    if reason is not None:
        return reason
    launch = _launch_for(kernel, call)
    batches, query_tiles = _query_tiles(launch, call)
    step = (given.block or launch.tile_n) // launch.tile_n  # tiles that blocks may not divide
    tiles = _tiles_of_block(launch, call, batches * query_tiles, driver.multiprocessors(given.q.device.index or 0))
    tiles = -(-tiles // step) * step
    chunks = -(-call.seqlen_k // (tiles * launch.tile_n))
    blocks = batches * query_tiles * chunks
    if blocks > MOST:
        return "more blocks than 31 bits count"
    paged = call.page_table is not None
    sizes: dict[str, float] = {
        "heads": call.heads, "seqlen_q": call.seqlen_q, "max_seqlen_q": call.seqlen_q, "max_seqlen_k": call.seqlen_k,
        "total_q": call.total_q, "total_k": call.total_k, "chunk": tiles * launch.tile_n, "chunks": chunks,
        "query_tiles": query_tiles, "block_tiles": step, **_sizes_of_variant(kernel, call),
    }  # fmt: skip
    box_rows = launch.tile_n
    if paged:
        box_rows = gcd(call.page_size, launch.tile_n)
        sizes |= {
            "page_size": call.page_size, "num_pages": call.num_pages, "box_rows": box_rows,
            "page_size_reciprocal": reciprocal(call.page_size), "batch": call.batch, "least_tiles": _LEAST_TILES,
            "hides_rest": int(given.out is None),
        }  # fmt: skip
    shape = scores_shape(call, given.block)
    dtype = kernel.dtype_of("q").name

    def map_of(tensor: Tensor, rows: int | None) -> Callable[[Argument], TensorMap]:
        def made(parameter: Argument) -> TensorMap:
            box = parameter.box if rows is None else (1, rows, parameter.box[-1])
            at = driver, given.q.device.index or 0, dtype
            return TensorMap(*at, tuple(tensor.shape), tensor.stride(), box, parameter.swizzle)

        return made

    q = given.q if call.cu_seqlens_q is None else given.q[None]
    maps = {"q": map_of(q, None), "k": map_of(given.k, box_rows)}
    own = [f"tensor:{name}" for name, value in given.arguments if isinstance(value, Tensor)]
    operands = LaunchOperands((*FIELDS.tensors, *own), sizes, _strides(given, call, shape), maps)
    grid = Grid(launch.entry, blocks)
    launches = HelperLaunches(kernel, operands, [grid], driver, given.q.device.index or 0)
    return PreparedScores(launches, shape, given.variant)


def _against(kernel: Kernel, given: IndexScores, call: Call) -> str | None:
    """The reason why a kernel does not take a call, or None."""
    for label, built, asked in (
        ("layout", kernel.layout, call.layout),
        ("dtype", kernel.dtype, call.dtype),
        ("head_dim", kernel.head_dim_qk, call.head_dim_qk),
    ):
        if built != asked:
            return f"{kernel.full_name}: {label} is {built}, the call has {asked}"
    if call.cu_seqlens_q is not None and not takes(kernel, "cu_seqlens_q"):
        return f"{kernel.full_name}, from an older attngen, does not take packed queries; rebuild it"
    if not (call.batch and call.seqlen_q and call.total_q and call.seqlen_k and call.heads):
        return "there is no score"
    if given.block is not None and given.block % kernel.tile_n:
        return f"{kernel.full_name} takes blocks of a multiple of {kernel.tile_n} keys, not {given.block}"
    most = max(map(_heads_of, kernel.launches))
    if call.heads > most:
        return f"{kernel.full_name} takes at most {most} heads, not {call.heads}"
    for name, value in kernel.const_scalars.items():
        if call.scalars.get(name, value) != value:
            return f"{kernel.full_name}: {name} was fixed to {value}, the call passes {call.scalars[name]}"
    for name, tensor in (("q", given.q), ("k", given.k)):
        if tensor.data_ptr() % tensormap.ADDRESS_ALIGNMENT:
            return f"{name} does not begin at a multiple of {tensormap.ADDRESS_ALIGNMENT} B"
        if reason := tensormap.reason_against(name, tensor.shape, tensor.stride(), tensor.element_size()):
            return reason
    if call.page_table is not None:
        rows = gcd(call.page_size, kernel.tile_n)
        if rows * call.head_dim_qk * given.k.element_size() % _COPY_ALIGNMENT:
            return f"{rows} keys of a page are not a multiple of {_COPY_ALIGNMENT} B"
    for declared in call.variant.tensors:
        tensor = call.tensors[declared.name]
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"the last dimension of {declared.name} is not contiguous"
    if given.out is not None and given.out.shape[-1] > 1 and given.out.stride(-1) != 1:
        return "the last dimension of out is not contiguous"
    return None


def _heads_of(launch: KernelLaunch) -> int:
    """The most heads that a launch takes: those of its box of queries."""
    (box,) = (one.box for one in launch.entry.layout.parameters if one.of == "q" and one.kind == "descriptor")
    return box[2]


def _launch_for(kernel: Kernel, call: Call) -> KernelLaunch:
    """The fastest launch: the fewest heads that suffice, and tiles for many or for few queries."""
    heads = min(count for count in map(_heads_of, kernel.launches) if count >= call.heads)
    few, many = sorted((one for one in kernel.launches if _heads_of(one) == heads), key=lambda one: one.tile_m)
    of_few, of_many = (prod(_query_tiles(one, call)) * one.tile_m for one in (few, many))
    return few if _FEW_COST * of_few < of_many else many


def _query_tiles(launch: KernelLaunch, call: Call) -> tuple[int, int]:
    """Parts of the batch whose queries have tiles of their own, and the tiles of each: those of a sequence, or, of
    packed queries, as many as there may be of all sequences (packed_tiles.cuh)."""
    if call.cu_seqlens_q is None:
        return call.batch, -(-call.seqlen_q // launch.tile_m)
    return 1, (call.total_q + call.batch * (launch.tile_m - 1)) // launch.tile_m


def _tiles_of_block(launch: KernelLaunch, call: Call, query_tiles: int, multiprocessors: int) -> int:
    """Tiles of keys of a block, few enough that blocks run in several rounds, so that a partial last round costs
    little."""
    resident = multiprocessors * (1 if launch.entry.threads > 256 else _FEW_RESIDENT)
    tiles = -(-call.seqlen_k // launch.tile_n)
    chunks = max(-(-_ROUNDS * resident // query_tiles), 1)
    return max(-(-tiles // chunks), min(_LEAST_TILES, tiles))


def _strides(given: IndexScores, call: Call, shape: tuple[int, ...]) -> dict[tuple[str, str | int | None], int]:
    """Strides of the tensors that kernels read by address; 0 for those that are not given, and between the sequences
    of packed rows."""
    rows = ("b", "s") if call.cu_seqlens_q is None else ("s",)
    of_scores = rows if given.block is None else (*rows, "h")
    scale = given.k_scale
    of_out = tuple(accumulate(reversed(shape[1:]), mul))[::-1] if given.out is None else given.out.stride()
    of_keys = ("b" if call.page_table is None else "page", "s")
    strides: dict[tuple[str, str | int | None], int] = {("weights", "b"): 0, ("out", "b"): 0}
    for name, axes, steps in (
        ("weights", (*rows, "h"), (0, 0, 0) if given.weights is None else given.weights.stride()),
        ("out", of_scores, of_out),
        ("k_scale", of_keys, (0, 0) if scale is None else scale.stride()),
    ):
        strides |= {(name, axis): step for axis, step in zip(axes, steps)}  # noqa: B905
    if call.page_table is not None:
        strides["page_table", "b"] = call.page_table.stride(0)
    for name, tensor in call.tensors.items():
        strides |= {(f"tensor:{name}", axis): tensor.stride(axis) for axis in range(tensor.dim())}
    return strides


def _sizes_of_variant(kernel: Kernel, call: Call) -> dict[str, float]:
    """Extents of the variant's tensors, its scalars, and the divisors that follow from these."""
    sizes: dict[str, float] = {f"scalar:{name}": value for name, value in call.scalars.items()}
    for name, tensor in call.tensors.items():
        sizes |= {f"extent:{name}:{axis}": extent for axis, extent in enumerate(tensor.shape)}
    if any((one.of or "").startswith("divisor:") for one in kernel.main.entry.layout.parameters):
        for divisor in divisors(kernel.variant):
            value = divisor.value({name: int(number) for name, number in call.scalars.items()})
            sizes |= {f"divisor:{divisor.text}:value": value, f"divisor:{divisor.text}:reciprocal": reciprocal(value)}
    return sizes


class IndexScoresHelper(Helper[IndexScores, Bound, Tensor]):
    """Scoring keys for an index; a call gives scores."""

    name = "index_scores"
    fields = FIELDS

    def check(self, call: IndexScores) -> Bound:
        return index_scores.check(call)

    def check_contents(self, call: IndexScores, sizes: Bound) -> None:
        index_scores.check_contents(call, sizes)

    def in_torch(self, call: IndexScores, sizes: Bound) -> Tensor:
        return index_scores.score(call, sizes)

    def prepare(self, call: IndexScores, sizes: Bound, driver: Driver) -> PreparedScores | str:
        return prepare(call, sizes, driver)


SCORES = IndexScoresHelper()
