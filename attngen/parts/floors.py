"""The least time that a Hopper kernel can take, from rates of the chip: in clocks of one multiprocessor.

A step multiplies the query rows of every consumer by one tile of keys. Its floor is the longest of what the tensor
cores, the exponentials and the reads of shared memory take, as if each ran alone; consumers share all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from attngen.dtypes import dtype
from attngen.plan.model import Launch, Plan

ROWS = 64  # query rows of a consumer: M of wgmma


@dataclass(frozen=True, slots=True)
class Rate:
    """A throughput of the chip, and its source."""

    name: str
    value: int
    unit: str
    source: str


FLOPS = Rate("tensor cores", 4096, "FLOP/clk/SM", "NVIDIA H100 white paper, dense bf16 and fp16")
EXPONENTIALS = Rate("exponentials", 16, "op/clk/SM", "CUDA C++ Programming Guide, arithmetic throughput, 9.0")
SHARED = Rate("shared memory", 128, "B/clk/SM", "CUDA C++ Programming Guide, 32 banks of 4 B")
MULTIPROCESSORS = Rate("multiprocessors", 132, "SM", "NVIDIA H200 data sheet, SXM")
MEMORY = Rate("HBM", 4_800_000_000_000, "B/s", "NVIDIA H200 data sheet, SXM")
CLOCK = Rate("clock", 1_980_000_000, "1/s", "nvidia-smi, highest of an H200; less under load")

RATES = (FLOPS, EXPONENTIALS, SHARED, MULTIPROCESSORS, MEMORY, CLOCK)

#: Bytes from HBM per clock and multiprocessor when all of them load: 18.4.
MEMORY_PER_CLOCK = Fraction(MEMORY.value, MULTIPROCESSORS.value * CLOCK.value)


def flops_per_clock(mma_k: int) -> int:
    """Return the FLOP per clock and multiprocessor of products by so large a K: half the bytes, twice the rate."""
    return FLOPS.value * mma_k // dtype("bf16").mma_k


@dataclass(frozen=True, slots=True)
class Product:
    """The wgmma instructions of one matrix product of a consumer: ``count`` times m64 n``n`` k``k``."""

    n: int
    count: int
    k: int

    @property
    def clocks(self) -> int:
        """Clocks of the tensor cores: n / 2 for each instruction."""
        return self.count * (2 * ROWS * self.n * self.k // flops_per_clock(self.k))


@dataclass(frozen=True, slots=True)
class Floor:
    """Floors of a step. Counts and bytes are those of one consumer, save ``loaded``, which consumers share."""

    consumers: int
    qk: Product
    pv: Product
    exponentials: int
    shared_reads: int  # bytes that the products read: Q and K, and V
    loaded: int  # bytes of K and V
    tile: int  # bytes of Q and O of all consumers, once for each work tile

    @property
    def parts(self) -> dict[str, int]:
        """Clocks of one consumer by resource."""
        return {
            "products": self.qk.clocks + self.pv.clocks,
            "exponentials": ceil(self.exponentials / EXPONENTIALS.value),
            "shared memory": ceil(self.shared_reads / SHARED.value),
        }

    @property
    def binding(self) -> tuple[str, ...]:
        """The parts that take longest."""
        return tuple(name for name, clocks in self.parts.items() if clocks == max(self.parts.values()))

    @property
    def clocks(self) -> int:
        """Floor of a step of one consumer that runs alone on a multiprocessor."""
        return max(self.parts.values())

    @property
    def block(self) -> int:
        """Floor of a step of all consumers."""
        return self.consumers * self.clocks

    @property
    def uncached(self) -> int:
        """Clocks that K and V of a step take if none of it is in L2."""
        return ceil(self.loaded / MEMORY_PER_CLOCK)

    @property
    def cached_share(self) -> float:
        """Share of K and V that L2 must hold, or HBM takes longer than the step."""
        return max(0.0, 1 - self.block / float(self.loaded / MEMORY_PER_CLOCK))

    @property
    def tile_memory(self) -> int:
        """Clocks that Q and O of a work tile take, which no other tile shares."""
        return ceil(self.tile / MEMORY_PER_CLOCK)

    def call(self, steps: int, tiles: int) -> int:
        """Clocks of one multiprocessor for ``tiles`` work tiles; ``steps`` are those of their consumers in all."""
        return max(steps * self.clocks, tiles * self.tile_memory)

    def seconds(self, steps: int, tiles: int) -> float:
        """The same in seconds of the whole chip, over which work is spread evenly."""
        return self.call(steps, tiles) / (MULTIPROCESSORS.value * CLOCK.value)


def floor(plan: Plan, exponentials: int = 1) -> Floor:
    """Floors of a Hopper plan. Products include the padding of head dims, which memory does not hold.

    ``exponentials`` counts operations of the MUFU for an element of P.
    """
    width_qk, width_v = plan.columns_qk[0].width, plan.columns_v[0].width
    given = plan.operands
    k, v = plan.tile_n * width_qk * given.k.bytes, plan.tile_n * width_v * given.v.bytes
    key = plan.head_dim_qk * given.k.bytes + plan.head_dim_v * given.v.bytes
    query = plan.head_dim_qk * given.q.bytes + plan.head_dim_v * given.out.bytes
    return Floor(
        consumers=plan.structure.consumers,
        qk=Product(plan.tile_n, width_qk // given.q.mma_k, given.q.mma_k),
        pv=Product(width_v, plan.tile_n // given.p.mma_k, given.p.mma_k),
        exponentials=ROWS * plan.tile_n * exponentials,
        shared_reads=ROWS * width_qk * given.q.bytes + k + v,
        loaded=plan.tile_n * key,
        tile=plan.tile_m * query,
    )


#: Products of a step of each kernel of a backward, as many columns wide or deep as q and k have, and as v has:
#: Q Kᵀ, dO Vᵀ, and those that give dV and dK, or dQ.
_PRODUCTS = {"dkdv": (2, 2), "dk": (2, 1), "dv": (1, 1), "dq": (2, 1)}
#: In CUDA the kernel by tiles of keys gives dQ, too.
_PRODUCTS_IN_CUDA = {"dqkv": (3, 2)}


@dataclass(frozen=True, slots=True)
class GradientFloor:
    """Floors of one kernel of a backward on a Hopper GPU; a step takes ``tile_m`` queries and ``tile_n`` keys.

    ``products`` counts those with as many columns as q and k have, and as v has. ``loaded`` are the bytes that a step
    brings, ``kept`` those that a block reads and writes once.
    """

    launch: Launch
    products: tuple[int, int]
    flops: int
    flops_per_clock: int
    exponentials: int
    loaded: int
    kept: int

    @property
    def parts(self) -> dict[str, int]:
        """Clocks of a step by resource."""
        return {
            "products": ceil(self.flops / self.flops_per_clock),
            "exponentials": ceil(self.exponentials / EXPONENTIALS.value),
        }

    @property
    def binding(self) -> tuple[str, ...]:
        """The parts that take longest."""
        return tuple(name for name, clocks in self.parts.items() if clocks == self.clocks)

    @property
    def clocks(self) -> int:
        """Floor of a step that runs alone on a multiprocessor."""
        return max(self.parts.values())

    @property
    def uncached(self) -> int:
        """Clocks that the operands of a step take if none of them is in L2."""
        return ceil(self.loaded / MEMORY_PER_CLOCK)

    @property
    def cached_share(self) -> float:
        """Share of the operands of a step that L2 must hold, or HBM takes longer than the step."""
        return max(0.0, 1 - self.clocks / float(self.loaded / MEMORY_PER_CLOCK))

    def call(self, steps: int, blocks: int) -> int:
        """Clocks of one multiprocessor for ``steps`` steps of ``blocks`` blocks in all."""
        return max(steps * self.clocks, ceil(blocks * self.kept / MEMORY_PER_CLOCK))


def gradient_floor(plan: Plan, launch: Launch) -> GradientFloor | None:
    """Return the floors of one kernel of a backward, None for those that multiply nothing.

    Rates are those of sm90a. Products include the padding of head dims, which memory does not hold.
    """
    products = _PRODUCTS_IN_CUDA if plan.sum_columns else _PRODUCTS
    if launch.name not in products:
        return None
    by_qk, by_v = products[launch.name]
    m, n, given = launch.tile_m, launch.tile_n, plan.operands
    width = by_qk * sum(c.width for c in plan.columns_qk) + by_v * sum(c.width for c in plan.columns_v)
    query = plan.head_dim_qk * given.q.bytes + plan.head_dim_v * given.dout.bytes + 8  # Q, dO, row statistics
    key = plan.head_dim_qk * given.k.bytes + plan.head_dim_v * given.v.bytes
    gradients = plan.head_dim_qk * given.dk.bytes + plan.head_dim_v * given.dv.bytes
    loaded, kept = (m * query, n * (key + gradients)) if launch.grid == "keys" else (
        n * key, m * (query + plan.head_dim_qk * given.dq.bytes)
    )  # fmt: skip
    rate = flops_per_clock(given.q.mma_k)
    return GradientFloor(launch, (by_qk, by_v), 2 * m * n * width, rate, m * n, loaded, kept)


def row_sums_bytes(plan: Plan) -> int:
    """Return the bytes of a query row outside of the kernels that multiply.

    Its statistics read O, dO and the log-sum-exp, and write two float32 numbers; a dQ accumulator is cleared, and read
    when dQ is rounded.
    """
    given = plan.operands
    added = 2 * given.accumulator.bytes * plan.sum_columns
    sums = added + plan.head_dim_qk * given.dq.bytes if plan.sum_columns else 0
    return plan.head_dim_v * (given.out.bytes + given.dout.bytes) + 12 + sums
