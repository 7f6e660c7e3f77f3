"""The plan: a frozen value that holds every decision about one kernel. Templates and compilers only read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from attngen.arch import ARCHES, Arch
from attngen.dtypes import LATENT_ROWS, QUANTIZED_DTYPES, LatentRow, row_of_keys
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.bands import Heads
from attngen.lang.divisors import Divisor, divisors
from attngen.lang.variant import Variant
from attngen.manifest import (
    SHARES,
    Argument,
    KernelFields,
    LaunchFields,
    StructureFields,
    TileMapAxes,
    TunedOn,
    Workspace,
)
from attngen.operations import JVP
from attngen.plan.layouts import LAYOUTS
from attngen.plan.operands import Operands, dot_precision, kept_bytes
from attngen.records import ValueKind, written

__all__ = [
    "COLUMNS_OF_WORD", "Argument", "Columns", "Launch", "Plan", "Refused", "Region", "Role", "Structure", "TileMapAxes",
    "TunedOn", "Workspace",
]  # fmt: skip

#: Columns of a tile of 64 rows of which a lane's elements fill a 32-bit word, a bit each.
COLUMNS_OF_WORD = 64


@dataclass(frozen=True, slots=True)
class Columns:
    """A power-of-two block of head_dim columns: ``width`` columns from ``start``, ``used`` of them real."""

    start: int
    width: int
    used: int


@dataclass(frozen=True)
class Launch(LaunchFields):
    """One entry of a kernel's source, how it is launched, and what its compile has to give."""

    stages: int
    num_warps: int
    iteration: str = "ranges"  # ranges | classified | tile_map
    arguments: tuple[Argument, ...] = ()
    shared_bytes: int = 0  # of a block; 0 where the compiler lays it out
    max_registers: int | None = None  # of a thread; None leaves it to ptxas
    max_spills: int | None = None  # bytes per thread that may be spilled; None: not checked
    products: int | None = None  # wgmma instructions that its code must have; None: not counted

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the manifest."""
        return {
            **written(self, leave_out=("arguments", "shared_bytes")),
            "threads": 32 * self.num_warps,
            "parameters": [argument.to_dict() for argument in self.arguments],
        }


_Slow = Annotated[
    tuple[bool, int],
    ValueKind(
        "a flag and a number",
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and type(v[0]) is bool and type(v[1]) is int,
        tuple,
    ),
]


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan of the same kernel that was compiled before this one, and why its machine code was refused."""

    name: str
    backend: str
    reason: str  # in one line
    slow: _Slow | None = None  # serialized products, bytes of spills: if it was correct and only slow

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
class Role:
    """Warps of a block with one task, from ``first`` on, and the registers of each thread."""

    name: str
    first: int
    warps: int
    registers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure(StructureFields):
    """Decisions of a schedule beyond those of all plans; a schedule that decides more has a subclass."""

    #: Lanes of a warp that find what the rows of one consumer see; as many more find what all rows see.
    lanes_of_part: ClassVar[int] = 8

    consumers: int = 0  # warpgroups that multiply; 0: the compiler spreads products over all warps
    persistent: bool = False  # a block works until no tile is left
    shared: tuple[Region, ...] = ()
    warp_roles: tuple[Role, ...] = ()  # and their registers; none where all warps do the same
    key_values: int = 0  # values of each key that mask and score read, and that come with a tile of K
    query_values: int = 0  # values of each query that mask or score read, and that come with a tile of Q
    distance_values: int = 0  # values of each distance of a query from a key that the score reads: with either tile
    biases: int = 0  # elements that the score reads at [..., q, kv], of which tiles come with those of K or Q
    bias_bytes: int = 0  # for each pair, of all of these together
    hides_by_entries: bool = False  # entries of a small table that lanes hold are −inf where the mask hides pairs
    table_bytes: int = 0  # of small tables that the score reads at computed indices, of which each consumer has a copy
    relative: bool = False  # a term of the score subtracts the row max, so that logits are relative to it
    map_rows: int = 0  # queries, or keys, of a row of the tile map, where each consumer has its own; 0: those of a tile
    block_keys: int = 0  # keys of a bit of that map, of which a step has one block or two
    lane_sum_log2: int = 0  # log2 of the most that a lane may sum in a step after a new row max; 0: no limit

    def registers_of(self, role: str) -> int:
        """Return the registers of each thread of a role; KeyError if there is none of that name."""
        for one in self.warp_roles:
            if one.name == role:
                return one.registers
        raise KeyError(role)

    @property
    def end_aligned(self) -> bool:
        """Whether tiles of keys end with the last key that a work item sees, not at multiples of their size."""
        return self.end_alignment > 0

    @property
    def own_rows(self) -> int:
        """Queries of a consumer, or keys in a backward, where tiles begin at multiples of their size; 0: elsewhere."""
        return 0

    @property
    def lane_keys_apart(self) -> int:
        """Distance of the two keys that a lane holds of each 8 in a product."""
        return 1

    @property
    def lists_sequences(self) -> bool:
        """Whether blocks find the sequences of a batch that have at least, or at most, so many queries."""
        return False

    @property
    def bounds_tiles(self) -> bool:
        """Whether consumers can bound the logits of a tile below together, once they are there and if a row asks."""
        return False

    @property
    def takes_powers(self) -> bool:
        """Whether P is a polynomial of what bounds the score, in tiles without a mask."""
        return False

    @property
    def in_cluster(self) -> bool:
        """Whether the blocks of a cluster divide a tile of keys."""
        return False

    @property
    def clears_gradients(self) -> bool:
        """Whether a warp clears gradients of biases where no step stores a tile of dS."""
        return False

    @property
    def holds_mask_bits(self) -> bool:
        """Whether consumers apply the mask of a tile map by bits, in the order of their accumulators."""
        return False

    @property
    def finds_ends(self) -> bool:
        """Whether consumers find out which ends of what rows see lie in a partial tile, and compare with these only."""
        return False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes; 0 where the compiler lays it out."""
        return self.shared[-1].offset + self.shared[-1].bytes if self.shared else 0


@dataclass(frozen=True, kw_only=True)
class Plan(KernelFields):
    """Every decision about one kernel."""

    spec_file: str  # as headers of sources name it
    variant: Variant
    arch_name: str
    dtype_name: str  # as specs and names of kernels say it
    operands: Operands
    columns_qk: tuple[Columns, ...]
    columns_v: tuple[Columns, ...]
    schedule: str  # row of the catalogue; names the template
    q_operand: str  # registers | shared: where the products with K find the query tile
    alignment: int  # bytes that pointers and strides are multiples of
    stages: int
    num_warps: int
    max_registers: int | None  # of a thread; None leaves it to ptxas
    mask_code: str  # branch: one loop, in which tiles that need the mask branch | loop: these have a loop of their own
    softmax: str
    fast_math: bool
    l2_bytes: int  # K and V of the heads that run side by side, sized for L2
    allow: tuple[str, ...]
    main: str = "forward"  # the launch that tile, stages, warps and iteration are of
    launches: tuple[Launch, ...] = ()  # in their order
    structure: Structure = Structure()
    refused: tuple[Refused, ...] = ()  # plans that were compiled before and refused
    backend_reason: str = ""  # of the choice, not of the kernel: no part of its JSON form
    tile_reason: str = field(default="", compare=False)  # the same, of tile, stages and warps, where a table has them

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
    def dot_precision(self) -> str | None:
        """Precision of ``tl.dot`` for elements that tensor cores do not take, which are float32; None for others."""
        return None if self.operands.q.mma else dot_precision(self.arch, fast_math=self.fast_math)

    @property
    def kept_bytes(self) -> int:
        """Bytes in shared memory of an element that a Triton kernel multiplies in every step."""
        return kept_bytes(self.arch, self.operands.q, fast_math=self.fast_math)

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
    def map_bits(self) -> int:
        """The same where a tile map may hold them; 0 where consumers evaluate the mask of each partial tile."""
        return 0 if self.structure.map_rows else self.mask_words

    @property
    def has_pairs_of_blocks(self) -> bool:
        """Whether a step of a forward has two blocks of keys, which need not be neighbours."""
        return 0 < self.structure.block_keys < self.tile_n

    @property
    def descaled(self) -> bool:
        """Whether k and v, and maybe q, come with scales."""
        return self.operands.k.name in QUANTIZED_DTYPES

    @property
    def latent_row(self) -> LatentRow | None:
        """The form of rows of k in 8 bits whose head is v, or that hold their scales; None for ordinary ones."""
        name = self.operands.k.name
        return row_of_keys(name, self.head_dim_qk) if self.v_of_key else LATENT_ROWS.get(name)

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
        return self.descaled and not self.split_kv and not self.v_of_key

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
    def lists_sequences(self) -> bool:
        """Whether a launch can leave out the shorter, or the longer, sequences of a batch."""
        of_ranges = not self.mask_words and self.variant.keys is None
        return self.key_access == "paged" and of_ranges and self.structure.lists_sequences

    @property
    def box_heads(self) -> Heads:
        """Whether a box of rows spans heads, as the analysis of tiles calls it."""
        return "packed" if self.pack_gqa else "single"

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.num_warps

    @property
    def l2_keys(self) -> int:
        """Keys, of all heads that run side by side, whose K and V take ``l2_bytes``.

        In a backward by tiles of keys these are queries, with Q, dO and the dQ accumulator; in a forward-mode
        derivative keys have tangents, too.
        """
        given = self.operands
        by_qk, by_v = (given.q, given.dout) if self.direction == "backward" else (given.k, given.v)
        row = sum(block.width for block in self.columns_qk) * by_qk.bytes
        row += sum(block.width for block in self.columns_v) * by_v.bytes
        if self.direction == JVP:
            row *= 2
        return self.l2_bytes // (row + given.accumulator.bytes * self.sum_columns)

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
        return any(launch.grid == SHARES for launch in self.launches)

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
            **written(self, leave_out=("spec_file", "backend_reason", "tile_reason", "arch_name", "dtype_name")),
            "format": MANIFEST_FORMAT,
            "arch": self.arch_name,
            "capability": self.arch.capability,
            "specific": self.arch.specific,
            "dtype": self.dtype_name,
            "threads": self.threads,
            "l2_keys": self.l2_keys,
            "key_access": self.key_access,
        }
