"""The plan: a frozen value that holds every decision about one kernel. Templates and compilers only read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.bands import Heads
from attngen.lang.divisors import Divisor, divisors
from attngen.lang.variant import Variant
from attngen.plan.layouts import LAYOUTS
from attngen.plan.operands import Operands

#: Columns of a tile of 64 rows of which a lane's elements fill a 32-bit word, a bit each.
COLUMNS_OF_WORD = 64


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: its name and type in the source, and the value that the runtime passes.

    ``kind`` and ``of`` identify the value (a pointer to q, the stride of k along ``axis`` …); ``type`` is the Triton
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
    window: int | None = None  # rows of a descriptor through which rows after a sequence's end arrive as zeros
    packed: bool = False  # rows of the box are the heads of a group, then the next position
    paged: bool = False  # a copy brings gcd(rows of the box, page size) rows; the call gives the page size
    transposed: bool = False  # the fastest axis is that of keys, and rows are columns of the tensor

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest, without the entries that are unset."""
        entries = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {key: value for key, value in entries if (value is not None and value != 0) or key == "axis"}


@dataclass(frozen=True, slots=True)
class Columns:
    """A power-of-two block of head_dim columns: ``width`` columns from ``start``, ``used`` of them real."""

    start: int
    width: int
    used: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that launches of one call share. Uninitialized for each call.

    It holds the sum of ``terms`` elements, rounded up to a multiple of ``multiple``. A term is a product of numbers and
    of sizes of the call, which the runtime knows by name (``Geometry.sizes``).
    """

    name: str  # what arguments are ``of``
    dtype: str
    terms: tuple[tuple[int | str, ...], ...]
    multiple: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "terms": [list(term) for term in self.terms],
            "multiple": self.multiple,
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of a kernel's source, and how it is launched. A call launches all of a plan's, one after the other.

    ``grid`` says what a block is: some ``rows`` of a head, a tile of ``queries`` or of ``keys``, or one word of the
    tile map of either (``query_words``, ``key_words``); or a range of the keys of a tile of queries (``key_shares``),
    which the blocks of a cluster, at most ``cluster``, divide among themselves.
    """

    name: str
    symbol: str
    grid: str
    tile_m: int
    tile_n: int
    stages: int
    num_warps: int
    iteration: str = "ranges"  # ranges | classified | tile_map
    tile_map: TileMapAxes | None = None  # what it reads or writes
    arguments: tuple[Argument, ...] = ()
    persistent: bool = False  # a block works until no tile is left
    cluster: int = 1  # blocks of a tile
    pdl: bool = False  # programmatic dependent launch: it starts early and waits for the launches before it
    cooperative: bool = False  # its blocks wait for each other, so all must be resident
    row_warps: int = 1  # most warps that hold the query rows of a work item, where blocks share keys
    split: bool = False  # a tile has a block for each split of the keys
    shared_bytes: int = 0  # of a block; 0 where the compiler lays it out
    max_registers: int | None = None  # of a thread; None leaves it to ptxas
    max_spills: int | None = None  # bytes per thread that may be spilled; None: not checked
    products: int | None = None  # wgmma instructions that its code must have; None: not counted

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {
            "name": self.name,
            "symbol": self.symbol,
            "grid": self.grid,
            "persistent": self.persistent,
            "cluster": self.cluster,
            "split": self.split,
            **({"pdl": True} if self.pdl else {}),
            **({"cooperative": True} if self.cooperative else {}),
            **({"row_warps": self.row_warps} if self.row_warps > 1 else {}),
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "stages": self.stages,
            "num_warps": self.num_warps,
            "threads": 32 * self.num_warps,
            "max_registers": self.max_registers,
            "max_spills": self.max_spills,
            "products": self.products,
            "iteration": self.iteration,
            "tile_map": None if self.tile_map is None else asdict(self.tile_map),
            "parameters": [argument.to_dict() for argument in self.arguments],
        }


@dataclass(frozen=True, slots=True)
class TileMapAxes:
    """The tile map that a launch reads or writes: its owner, and whether it differs by batch entry and by head."""

    owner: str  # the launch that reads it
    batch: bool
    heads: bool
    slots: bool = False  # each tile has a slot, which says where the bits of its visible pairs are
    bits: int = 0  # 32-bit words of these bits that a lane reads of a partial tile; 0: the launch reads none


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan of the same kernel that was compiled before this one, and why its machine code was refused."""

    name: str
    backend: str
    reason: str  # in one line
    slow: tuple[bool, int] | None = None  # serialized products, bytes of spills: if it was correct and only slow

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {"name": self.name, "backend": self.backend, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class TunedOn:
    """A card on which choices were measured to be faster than the plan's own, and by which file.

    ``times`` are what selection reads on this card in place of the plan's; none if the schedule has none.
    """

    file: str
    gpu: str
    times: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of the manifest."""
        return {"file": self.file, "gpu": self.gpu, "times": list(self.times)}


@dataclass(frozen=True, slots=True)
class Region:
    """A part of shared memory, in bytes from its start."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Role:
    """Warps of a block with one task, from ``first`` on, and the registers of each thread."""

    name: str
    first: int
    warps: int
    registers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Decisions of a schedule beyond those of all plans; a schedule that decides more has a subclass."""

    consumers: int = 0  # warpgroups that multiply; 0: the compiler spreads products over all warps
    skips: bool = False  # a consumer skips tiles that only other consumers see
    anchor: int = 0  # alignment of the first key of a tile, where tiles end with the last visible key; 0: the tile
    persistent: bool = False  # a block works until no tile is left
    shared: tuple[Region, ...] = ()
    warp_roles: tuple[Role, ...] = ()  # and their registers; none where all warps do the same

    def registers_of(self, role: str) -> int:
        """Return the registers of each thread of a role; KeyError if there is none of that name."""
        for one in self.warp_roles:
            if one.name == role:
                return one.registers
        raise KeyError(role)

    @property
    def holds_mask_bits(self) -> bool:
        """Whether consumers apply the mask of a tile map by bits, in the order of their accumulators."""
        return False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes; 0 where the compiler lays it out."""
        return self.shared[-1].offset + self.shared[-1].bytes if self.shared else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision about one kernel. ``name`` is file, symbol and log label."""

    name: str
    package: str
    spec_file: str  # as headers of sources name it
    variant: Variant
    arch_name: str
    dtype_name: str  # as specs and names of kernels say it
    operands: Operands
    head_dim_qk: int
    head_dim_v: int
    columns_qk: tuple[Columns, ...]
    columns_v: tuple[Columns, ...]
    layout: str  # dense | varlen | paged
    direction: str  # forward | backward | append | quantize
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
    iteration: str  # ranges | classified | tile_map
    mask_code: str  # branch: one loop, in which tiles that need the mask branch | loop: these have a loop of their own
    softmax: str
    fast_math: bool
    section_bytes: int  # K and V of the heads that run side by side, sized for L2
    allow: tuple[str, ...]
    main: str = "forward"  # the launch that tile, stages, warps and iteration are of
    launches: tuple[Launch, ...] = ()  # in their order
    workspaces: tuple[Workspace, ...] = ()
    structure: Structure = Structure()
    pack_gqa: bool = False  # the rows of a tile are all query heads of one KV head, then the next query
    split_kv: bool = False  # a forward whose blocks split the keys of a sequence
    sum_columns: int = 0  # of the float32 dQ accumulator in global memory; may exceed those of dQ
    ordered: bool = False  # it adds them in a fixed order
    times: tuple[float, ...] = ()  # measured nanoseconds of a launch, a work item and a step; none: unknown
    # keys that a tile of queries may see, or queries that may see a tile of keys: ``plan.times``; none: all
    visible: tuple[tuple[Any, Any], ...] = ()
    scale_block: int = 0  # tokens that share a scale of quantized q, k and v; 0: all of a head
    transposed_v: bool = False  # keys lie side by side in v
    split_size: int = 0  # keys of a split; 0: blocks do not split the keys of a sequence
    section_heads: int = 1  # KV heads that run side by side at least, in a backward by tiles of keys
    refused: tuple[Refused, ...] = ()  # plans that were compiled before and refused
    tuned: tuple[TunedOn, ...] = ()  # where its tile, stages and warps were measured, if a file had them
    backend_reason: str = ""  # of the choice, not of the kernel: no part of its JSON form

    def __repr__(self) -> str:
        return f"Plan({self.name} of {self.spec_file})"

    @property
    def arch(self) -> Arch:
        """The row of limits and features of the target."""
        return ARCHES[self.arch_name]

    @property
    def approximate(self) -> bool:
        """Whether functions of mask and score may be the hardware's, which are coarser than float32."""
        return self.fast_math and self.operands.out.bytes < self.operands.accumulator.bytes

    @property
    def divisors(self) -> tuple[Divisor, ...]:
        """Divisors that scalars decide, by whose reciprocals the kernel multiplies. Triton divides instead."""
        return divisors(self.variant) if self.backend == "cuda" else ()

    @property
    def mask_words(self) -> int:
        """32-bit words in which a lane holds the visible pairs of a partial tile, a bit for each of its elements; 0 if
        the mask's expression is evaluated for each element instead."""
        if self.iteration != "tile_map" or not self.structure.holds_mask_bits:
            return 0
        columns = self.tile_n if self.direction == "forward" else self.tile_m
        return -(-columns // COLUMNS_OF_WORD)

    @property
    def descaled(self) -> bool:
        """Whether k and v, and maybe q, come with scales."""
        return self.operands.k.name in QUANTIZED_DTYPES

    @property
    def block_scales(self) -> bool:
        """Whether blocks of so many tokens have scales of their own."""
        return self.scale_block > 1

    @property
    def token_scales(self) -> bool:
        """Whether each query and each key has a scale of its own."""
        return self.scale_block == 1

    @property
    def scaled_logits(self) -> bool:
        """Whether products become logits only by the scales of q and k, which the softmax scale takes up."""
        return self.descaled and not self.split_kv

    @property
    def lane_keys_apart(self) -> int:
        """Distance of the two keys that a lane holds of each 8 in a product: 4 for rows of 8 bits, to avoid bank
        conflicts, else 1."""
        return 4 if self.split_kv and self.descaled else 1

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed and located by cu_seqlens."""
        return self.layout == "varlen"

    @property
    def key_access(self) -> str:
        """Access to the keys of a sequence: contiguous, ragged or paged."""
        return LAYOUTS[self.layout].key_access

    @property
    def ragged_queries(self) -> bool:
        """Whether q, out and lse hold the rows of all sequences, one after the other."""
        return LAYOUTS[self.layout].ragged_queries

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

        In a backward by tiles of keys these are queries, with Q, dO and the dQ accumulator.
        """
        given = self.operands
        by_qk, by_v = (given.k, given.v) if self.direction == "forward" else (given.q, given.dout)
        row = sum(block.width for block in self.columns_qk) * by_qk.bytes
        row += sum(block.width for block in self.columns_v) * by_v.bytes
        return self.section_bytes // (row + given.accumulator.bytes * self.sum_columns)

    @property
    def signature(self) -> dict[str, str]:
        """Argument name to Triton type, in order."""
        return {argument.name: argument.type for argument in self.arguments}

    @property
    def attributes(self) -> dict[str, int]:
        """Argument name to promised divisibility, for those that have one."""
        return {argument.name: argument.divisibility for argument in self.arguments if argument.divisibility}

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the main launch; none before it is planned."""
        return self.launch(self.main).arguments if self.launches else ()

    def with_launches(self, *launches: Launch, workspaces: tuple[Workspace, ...] = ()) -> Plan:
        """The plan completed by its launches, in order, and by the memory that they share."""
        return replace(self, launches=launches, workspaces=workspaces)

    def launch(self, name: str) -> Launch:
        """Return a launch by its name; KeyError if there is none."""
        for launch in self.launches:
            if launch.name == name:
                return launch
        raise KeyError(name)

    @property
    def split_tiles(self) -> bool:
        """Whether blocks split the keys of a tile of queries."""
        return any(launch.grid == "key_shares" for launch in self.launches)

    def has_launch(self, name: str) -> bool:
        """Whether there is a launch of that name."""
        return any(launch.name == name for launch in self.launches)

    def of_launch(self, launch: Launch) -> Plan:
        """Return the plan of one launch by itself."""
        return replace(
            self,
            name=launch.symbol,
            tile_m=launch.tile_m,
            tile_n=launch.tile_n,
            stages=launch.stages,
            num_warps=launch.num_warps,
            iteration=launch.iteration,
            main=launch.name,
            launches=(launch,),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every choice as JSON; hashed into the cache key and written to the manifest."""
        return {
            "format": MANIFEST_FORMAT,
            "name": self.name,
            "package": self.package,
            "variant": self.variant.to_dict(),
            "arch": self.arch_name,
            "capability": self.arch.capability,
            "specific": self.arch.specific,
            "dtype": self.dtype_name,
            "operands": self.operands.to_dict(),
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
            "iteration": self.iteration,
            "mask_code": self.mask_code,
            "softmax": self.softmax,
            "fast_math": self.fast_math,
            "section_bytes": self.section_bytes,
            "section_keys": self.section_keys,
            "scale_block": self.scale_block,
            "transposed_v": self.transposed_v,
            "split_size": self.split_size,
            "section_heads": self.section_heads,
            "allow": list(self.allow),
            "structure": asdict(self.structure),
            "sum_columns": self.sum_columns,
            "ordered": self.ordered,
            "times": list(self.times),
            "visible": self.visible,
            "pack_gqa": self.pack_gqa,
            "key_access": self.key_access,
            "split_kv": self.split_kv,
            "main": self.main,
            "launches": [launch.to_dict() for launch in self.launches],
            "workspaces": [workspace.to_dict() for workspace in self.workspaces],
            **({"refused": [row.to_dict() for row in self.refused]} if self.refused else {}),
            **({"tuned": [row.to_dict() for row in self.tuned]} if self.tuned else {}),
        }
