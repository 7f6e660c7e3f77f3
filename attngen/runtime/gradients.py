"""The kernels of a backward, prepared for one set of shapes, and what each address that they take is of.

Beside the gradients a backward takes two float32 numbers for each query row: its log-sum-exp in units of log2, and
D = rowsum(dO ∘ O) − dLSE. Kernels that add up dQ in global memory take a float32 dQ, padded to tiles. A tensor of the
variant that gets a gradient takes a float32 copy; maps of tiles take a bit or two for each tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attngen.runtime import counters
from attngen.runtime.arguments import Call, Number, View, view
from attngen.runtime.driver import Driver
from attngen.runtime.launch import Geometry, PreparedKernel, PreparedLaunch
from attngen.runtime.module import Kernel, Part
from attngen.runtime.sinks import add_gradients

#: Order of the addresses that the kernels of a backward take; the variant's tensors, their gradients, and the tile map
#: of each kernel that reads one follow.
ADDRESSES = (
    "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "dout", "dlse", "dq", "dk", "dv",
    "lse_log2", "delta", "dq_sum", "tile_counter",
)  # fmt: skip
_COUNTER = ADDRESSES.index("tile_counter")


@dataclass(frozen=True)
class GradientBuffers:
    """The memory of one backward: what the forward took and gave, the gradients of its results, and results.

    ``out``, ``dout``, ``dq``, ``dk`` and ``dv`` may have any strides with a contiguous last dimension; the sums of
    rows, (2, *shape of the log-sum-exp) in float32, and ``lse`` and ``dlse`` are contiguous. ``dq_sum`` is float32,
    with as many elements as ``sums_of`` says, and need not be initialized. ``gradients`` holds a contiguous float32
    tensor of zeros for each tensor of the variant that gets a gradient, ``words`` the tile map of each part that reads
    one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    rows: Tensor
    dq_sum: Tensor | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    words: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self, call: Call) -> dict[str, Tensor | None]:
        """Return what each address is of that kernels of a backward take, but for the variant's tensors."""
        own = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(call, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")},
            "lse_log2": self.rows[0],
            "delta": self.rows[1],
            "dq_sum": self.dq_sum,
            **{f"gradient:{name}": tensor for name, tensor in self.gradients.items()},
            **{f"tile_map:{owner}": tensor for owner, tensor in self.words.items()},
        }


def differentiable(call: Call) -> tuple[str, ...]:
    """Return the tensors of a call's variant that get a gradient."""
    return tuple(tensor.name for tensor in call.variant.tensors if tensor.grad)


def gradient_shapes(call: Call) -> dict[str, tuple[int, ...]]:
    """Return the shapes of dq, dk and dv, in the order of axes of the call."""
    shapes = {"dq": (call.q, call.head_dim_qk), "dk": (call.k, call.head_dim_qk), "dv": (call.v, call.head_dim_v)}
    found = {}
    for name, (seen, width) in shapes.items():
        shape = (*seen.shape[:-1], width)
        found[name] = (shape[0], shape[2], shape[1], shape[3]) if call.order == "bhsd" else shape
    return found


class PartGeometry(Geometry):
    """The numbers of a call for one kernel of a backward."""

    def __init__(self, part: Part, call: Call, views: Mapping[str, View], *, sums: int, dlse: bool) -> None:
        """``views`` has out, dout, dq, dk and dv; ``sums``: floats of dQ that are added up in global memory;
        ``dlse``: whether the log-sum-exp has a gradient."""
        super().__init__(part, call, by_keys=part.by_keys)
        self.part = part
        self.views |= views
        packed = call.layout == "varlen"
        rows = call.total_q if packed else call.seqlen_q
        row_tiles = -(-rows // part.tile_m)
        self.sizes |= {"rows": rows, "row_tiles": row_tiles, "sum_chunks": sums // 4}
        self.absent["dlse"] = not dlse
        kv_tiles = self.sizes["kv_tiles"]
        self._blocks = {
            "rows": row_tiles * call.heads * (1 if packed else call.batch),
            "queries": self.tiles,
            "keys": kv_tiles * call.kv_heads * call.batch,
        }

    @property
    def part_tiles(self) -> int:
        """Tiles of work of the kernel, whatever they are."""
        return self.classifier_blocks if self.part.grid.endswith("_words") else self._blocks[self.part.grid]

    def part_blocks(self, driver: Driver, device: int) -> int:
        """Blocks of the kernel: one for each tile, or a cluster, or as many as run at once where each takes tile after
        tile, and rounds dQ of tiles of queries."""
        tiles = self.part_tiles
        if not self.part.persistent:
            return tiles * self.part.cluster
        return min(max(tiles, self.tiles), driver.multiprocessors(device))


def geometries(kernel: Kernel, call: Call, views: Mapping[str, View], *, dlse: bool) -> list[PartGeometry]:
    """Return the numbers of a call for each kernel of a backward, in the order of their launches."""
    sums = sums_of(kernel, call)
    return [PartGeometry(part, call, views, sums=sums, dlse=dlse) for part in kernel.parts]


def sums_of(kernel: Kernel, call: Call) -> int:
    """Return how many floats of dQ a backward adds up in global memory: tiles of all rows, or none.

    Counters of 32 bits follow them.
    """
    if call.layout == "varlen":  # a sequence may end in the middle of a tile
        tiles = call.heads * (call.total_q // kernel.tile_m + call.batch)
    else:
        tiles = call.heads * call.batch * -(-call.seqlen_q // kernel.tile_m)
    return tiles * kernel.tile_m * kernel.sum_columns + _counters(kernel, call)


def _counters(kernel: Kernel, call: Call) -> int:
    """Return how many counters stand behind the sums, padded to what is cleared at once.

    That is one for each tile of keys, where the order is fixed; and one for each KV head and one for all pieces, where
    the kernel that adds dQ up rounds it, too.
    """
    if not kernel.sum_columns:
        return 0
    units, counters = call.batch * call.kv_heads, 0
    if kernel.ordered:
        blocks = max(part.cluster for part in kernel.parts)  # of a tile: each adds to columns of its own
        counters += blocks * units * -(-call.seqlen_k // kernel.tile_n)
    if all(part.name != "dq" for part in kernel.parts):
        counters += units + 1
    return -(-counters // 4) * 4


def map_owner(part: str) -> str:
    """Return the kernel that reads the map of a part: the one itself, or the one that it classifies for."""
    return part.removeprefix("classify_")


def map_shapes(found: Sequence[PartGeometry]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the tile map of each kernel that reads one."""
    return {map_owner(one.part.name): one.map.tensor_shape() for one in found if one.map is not None}


def view_of(tensor: Tensor, call: Call) -> View:
    """Return the view of a tensor in the order of axes of a call."""
    return view(tensor.shape, tensor.stride(), call.order)


class PreparedGradients:
    """The kernels of one backward with one geometry on one device."""

    def __init__(
        self,
        kernel: Kernel,
        call: Call,
        views: Mapping[str, View],
        tensor_names: Iterable[str],
        driver: Driver,
        device: int,
        *,
        dlse: bool,
    ) -> None:
        """Pack what does not change between calls. Raises LoadError if a cubin does not load.

        ``views`` has out, dout, dq, dk and dv; ``dlse``: whether the log-sum-exp has a gradient. ``tensor_names``: the
        call's own tensors in the order in which it lists their addresses.
        """
        found = geometries(kernel, call, views, dlse=dlse)
        self.map_shapes = map_shapes(found)
        #: What each address is of that the kernels take.
        self.names = (
            *ADDRESSES,
            *(f"tensor:{name}" for name in tensor_names),
            *(f"gradient:{name}" for name in differentiable(call)),
            *(f"tile_map:{owner}" for owner in self.map_shapes),
        )
        kernels = []
        for one in found:
            if blocks := one.part_blocks(driver, device):
                position = {name: i for i, name in enumerate(self.names)}
                if one.map is not None:
                    position["tile_map"] = position[f"tile_map:{map_owner(one.part.name)}"]
                kernels.append(PreparedKernel(one.part.entry, blocks, one, position, driver, device))
        self._launch = PreparedLaunch(kernels, len(self.names), driver, device)
        self._counted = any(one.part.counted for one in found)
        self._driver, self._device = driver, device

    def __call__(self, addresses: list[int], scale: float, scalars: Sequence[Number]) -> None:
        """Enqueue all kernels on the current stream; ``addresses`` of what ``names`` says, without the counter's."""
        if self._counted:
            addresses[_COUNTER] = counters.address(self._driver.stream(self._device), self._device)
        self._launch(addresses, scale, scalars)


def finish(call: Call, buffers: GradientBuffers) -> None:
    """Enqueue what comes behind the kernels of a backward: the gradients of sinks, which need no keys."""
    add_gradients(call, buffers.lse, buffers.rows[1], buffers.gradients)
