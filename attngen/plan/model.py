"""The plan: a frozen value that holds every decision about one kernel. Templates and compilers only read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import DType, dtype
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.bands import Heads
from attngen.lang.variant import Variant


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: its name and type in the source, and what the runtime puts there.

    ``kind`` and ``of`` say what it is (a pointer to q, the stride of k along ``axis`` …); ``type`` is the Triton
    type of the signature; ``divisibility`` is a promise of the runtime to the compiler (0: none).
    """

    name: str
    kind: str
    type: str
    of: str | None = None
    axis: str | int | None = None
    divisibility: int = 0
    box: tuple[int, ...] | None = None
    swizzle: int | None = None  # bytes; None leaves it to the compiler
    window: int | None = None  # rows of a descriptor through which rows behind a sequence's end arrive as zeros
    packed: bool = False  # rows of the box are the heads of a group, then the next position

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest, without the entries that are unset."""
        fields = asdict(self).items()
        return {key: value for key, value in fields if (value is not None and value != 0) or key == "axis"}


@dataclass(frozen=True, slots=True)
class Columns:
    """A power-of-two block of head_dim columns: ``width`` columns from ``start``, ``used`` of them real."""

    start: int
    width: int
    used: int


@dataclass(frozen=True, slots=True)
class Classifier:
    """The kernel that computes the tile map of a mask which no analysis can bound."""

    name: str
    arguments: tuple[Argument, ...]
    batch: bool  # the map has one entry per batch (else it is shared)
    heads: bool  # the map has one entry per head (else it is shared)
    num_warps: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the kernels that a backward launches, one after the other; all stand in one source.

    ``grid`` says what a block is: some ``rows`` of a head, a tile of ``queries`` or of ``keys``, or one word of the
    tile map of either (``query_words``, ``key_words``).
    """

    name: str  # preprocess | classify_dkdv | dkdv | classify_dq | dq
    symbol: str
    grid: str
    tile_m: int
    tile_n: int
    stages: int
    num_warps: int
    driver: str  # ranges | classified | tile_map
    tile_map: tuple[bool, bool] | None = None  # read or written by it: an entry for each batch, for each head
    arguments: tuple[Argument, ...] = ()
    persistent: bool = False  # a block works until no tile is left
    cluster: int = 1  # blocks of a tile

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {
            "name": self.name,
            "symbol": self.symbol,
            "grid": self.grid,
            "persistent": self.persistent,
            "cluster": self.cluster,
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "stages": self.stages,
            "num_warps": self.num_warps,
            "threads": 32 * self.num_warps,
            "driver": self.driver,
            "tile_map": None if self.tile_map is None else dict(zip(("batch", "heads"), self.tile_map, strict=True)),
            "parameters": [argument.to_dict() for argument in self.arguments],
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan of the same kernel that was compiled before this one, and why its machine code was not taken."""

    name: str
    backend: str
    reason: str  # in one line
    slow: tuple[bool, int] | None = None  # products wait, bytes of spills: if it was right and only slow

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {"name": self.name, "backend": self.backend, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Region:
    """A part of shared memory, in bytes from its start."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Hopper:
    """Roles, pipeline and memory of a Hopper kernel in CUDA."""

    specialized: bool  # a warpgroup more produces; else those that multiply also load
    consumers: int  # warpgroups of 64 query rows
    producer_registers: int  # per thread, as is the next
    consumer_registers: int
    pingpong: bool  # consumers take turns at the tensor cores
    overlap: bool  # the product with V runs under the softmax of the next tile
    persistent: bool  # a block works until no tile is left
    longest_first: bool  # query tiles from the last to the first, head by head within a section
    staged: bool  # outputs leave through shared memory
    skips: bool  # a consumer passes over tiles that only other consumers see
    q_stages: int  # tiles of Q in flight
    box_columns: int  # columns of one copy
    out_columns: int  # columns of O that are staged at once
    lookahead: int  # steps before the end of a tile at which the next one is taken
    redo_above: str  # literal; see docs/performance.md
    redo_growth: str
    softmax: str
    shared: tuple[Region, ...]

    @property
    def schedule(self) -> str:
        """How consumers share the tensor cores, as specs say it."""
        return "pingpong" if self.pingpong else "cooperative"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.shared[-1].offset + self.shared[-1].bytes


@dataclass(frozen=True, slots=True)
class HopperGradients:
    """Roles, pipeline and memory of a Hopper kernel of dQ, dK and dV in CUDA."""

    consumers: int  # warpgroups that keep sums in registers: of 64 keys each, or one of dV and one of dK
    producer_registers: int  # per thread, as are the next two
    consumer_registers: int
    overlap: str  # what the softmax of a step runs over: pingpong (products of the other consumer) |
    # gradients (dQ and dK of the step before) | dk | nothing;
    # in a cluster: roles (products of other warpgroups) | dv (that of the step before, too)
    packed: bool  # dS is computed from probabilities in 16 bits, not in float32
    rows_ahead: int  # times 16 rows whose LSE and D a consumer loads before it needs them; 0: it does not
    rows_early: bool  # the loader asks for LSE and D of a step before it has a place for them
    q_stages: int  # tiles of Q in flight; those of dO are the plan's stages
    box_columns: int  # columns of one copy
    dq_columns: int  # columns of dQ of a consumer, or of a block of a cluster
    dq_by_rows: bool  # a consumer has half of dQ's rows, not half of its columns
    ordered: bool  # dQ is added up in a fixed order, by counters of tiles of keys behind its sums
    shared: tuple[Region, ...]
    cluster: int = 1  # blocks that share a tile of keys, each with 64; 1: one block has all
    queries_registers: int = 0  # where a warpgroup of its own multiplies dQ,
    dq_part: int = 0  # so many columns at once

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.shared[-1].offset + self.shared[-1].bytes

    @property
    def pingpong(self) -> bool:
        """Whether consumers take turns at the tensor cores."""
        return self.overlap == "pingpong"

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 64 if self.cluster > 1 else 64 * self.consumers

    @staticmethod
    def parts_of(width: int) -> int:
        """Products that columns of dK or dV are parted into where four warpgroups run: ptxas plans each with the 128
        registers that a thread of them begins with."""
        return 2 if width > 192 else 1

    @property
    def sum_columns(self) -> int:
        """Columns of the sums of dQ, which may be more than dQ has."""
        return self.dq_columns if self.dq_by_rows else self.consumers * self.dq_columns


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision about one kernel. ``name`` is file, symbol and log label."""

    name: str
    package: str
    spec_file: str  # as headers of sources name it
    variant: Variant
    arch_name: str
    dtype_name: str
    head_dim_qk: int
    head_dim_v: int
    columns_qk: tuple[Columns, ...]
    columns_v: tuple[Columns, ...]
    layout: str  # dense | varlen
    direction: str  # forward | backward
    backend: str  # triton | cuda
    schedule: str  # row of the catalogue; names the template
    loads: str  # descriptor | pointer
    q_operand: str  # registers | shared: where the products with K find the query tile
    alignment: int  # bytes that pointers and strides are multiples of
    tile_m: int
    tile_n: int
    stages: int
    num_warps: int
    max_registers: int | None  # of a thread; None leaves it to ptxas
    driver: str  # ranges | classified | tile_map
    mask_code: str  # branch: one loop, in which tiles that need the mask branch | loop: these have a loop of their own
    softmax: str
    fast_math: bool
    section_bytes: int  # K and V of the heads that run side by side, sized for L2
    allow: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    classifier: Classifier | None = None
    hopper: Hopper | None = None  # of CUDA forwards
    gradients: HopperGradients | None = None  # of CUDA backwards
    pack_gqa: bool = False  # the rows of a tile are all query heads of one KV head, then the next query
    parts: tuple[Part, ...] = ()  # of a backward, in the order of their launches; the plan itself describes "dkdv"
    section_heads: int = 1  # KV heads that run side by side at least, in a backward by tiles of keys
    refused: tuple[Refused, ...] = ()  # what was compiled before, and was not taken
    backend_reason: str = ""  # of the choice, not of the kernel: no part of its JSON form

    @property
    def arch(self) -> Arch:
        """The row of limits and features of the target."""
        return ARCHES[self.arch_name]

    @property
    def dtype(self) -> DType:
        """The row of the element type of q, k, v and out."""
        return dtype(self.dtype_name)

    @property
    def approximate(self) -> bool:
        """Whether functions of mask and score may be the hardware's, which are coarser than float32."""
        return self.fast_math and self.dtype.bytes == 2

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed and located by cu_seqlens."""
        return self.layout == "varlen"

    @property
    def box_heads(self) -> Heads:
        """Whether a box of rows spans heads, as the analysis of tiles calls it."""
        return "packed" if self.pack_gqa else "single"

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.num_warps

    @property
    def section_keys(self) -> int:
        """Keys, of all heads that run side by side, whose K and V take ``section_bytes``.

        In a backward by tiles of keys these are queries, with Q, dO and the sums of dQ.
        """
        width = sum(block.width for block in (*self.columns_qk, *self.columns_v))
        sums = 4 * self.gradients.sum_columns if self.gradients else 0
        return self.section_bytes // (width * self.dtype.bytes + sums)

    @property
    def signature(self) -> dict[str, str]:
        """Argument name to Triton type, in order."""
        return {argument.name: argument.type for argument in self.arguments}

    @property
    def attributes(self) -> dict[str, int]:
        """Argument name to promised divisibility, for those that have one."""
        return {argument.name: argument.divisibility for argument in self.arguments if argument.divisibility}

    def with_arguments(self, arguments: tuple[Argument, ...], classifier: Classifier | None) -> Plan:
        """Return the plan completed by its argument list."""
        return replace(self, arguments=arguments, classifier=classifier)

    def of_part(self, part: Part) -> Plan:
        """Return the plan of one kernel of a backward by itself."""
        return replace(
            self,
            name=part.symbol,
            tile_m=part.tile_m,
            tile_n=part.tile_n,
            stages=part.stages,
            num_warps=part.num_warps,
            driver=part.driver,
            arguments=part.arguments,
        )

    def part(self, name: str) -> Part:
        """Return a kernel of a backward by its name; KeyError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return every choice as JSON; hashed into the cache key and written to the manifest."""
        classifier = None
        if self.classifier:
            classifier = {
                "symbol": self.classifier.name,
                "parameters": [argument.to_dict() for argument in self.classifier.arguments],
                "num_warps": self.classifier.num_warps,
                "threads": 32 * self.classifier.num_warps,
            }
        return {
            "format": MANIFEST_FORMAT,
            "name": self.name,
            "symbol": self.part("dkdv").symbol if self.parts else self.name,
            "package": self.package,
            "variant": self.variant.to_dict(),
            "arch": self.arch_name,
            "capability": self.arch.capability,
            "specific": self.arch.specific,
            "dtype": self.dtype_name,
            "head_dim_qk": self.head_dim_qk,
            "head_dim_v": self.head_dim_v,
            "columns_qk": [asdict(c) for c in self.columns_qk],
            "columns_v": [asdict(c) for c in self.columns_v],
            "layout": self.layout,
            "direction": self.direction,
            "backend": self.backend,
            "schedule": self.schedule,
            "loads": self.loads,
            "q_operand": self.q_operand,
            "alignment": self.alignment,
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "stages": self.stages,
            "num_warps": self.num_warps,
            "max_registers": self.max_registers,
            "threads": self.threads,
            "driver": self.driver,
            "mask_code": self.mask_code,
            "softmax": self.softmax,
            "fast_math": self.fast_math,
            "section_bytes": self.section_bytes,
            "section_keys": self.section_keys,
            "section_heads": self.section_heads,
            "allow": list(self.allow),
            "hopper": asdict(self.hopper) if self.hopper else None,
            "gradients": asdict(self.gradients) if self.gradients else None,
            "sum_columns": self.gradients.sum_columns if self.gradients else 0,
            "ordered": bool(self.gradients and self.gradients.ordered),
            "persistent": bool(self.hopper and self.hopper.persistent),
            "pack_gqa": self.pack_gqa,
            "tile_map": {"batch": self.classifier.batch, "heads": self.classifier.heads} if self.classifier else None,
            "classifier": classifier,
            "parameters": [argument.to_dict() for argument in self.arguments],
            **({"parts": [part.to_dict() for part in self.parts]} if self.parts else {}),
            **({"refused": [row.to_dict() for row in self.refused]} if self.refused else {}),
        }
