"""The manifest of a kernel: each of its entries is declared here once, for the plan that decides it, for the file, and
for the runtime that goes by it.

A plan and a kernel of the runtime are both ``KernelFields``, their launches ``LaunchFields``: a field that is added
there is planned, written, checked and read. ``Manifest`` and ``LaunchEntry`` are the rest of the file that the runtime
reads; the plan and the compilers write more into it, for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar

from attngen.errors import REMEDY, LoadError
from attngen.formats import MANIFEST_FORMAT
from attngen.lang.host import is_bound
from attngen.lang.variant import VariantText
from attngen.records import Axis, Count, MisfitError, Name, Signed, Size, Some, ValueKind, read, shown, written

#: Grids of split-KV launches, of those whose blocks share the keys of a tile of queries, and of those that merge
#: partial results of the first.
GRID, SHARES, MERGED = "splits", "key_shares", "merged_rows"
#: Grid of a backward of keys by index: heads of a query.
LISTS = "lists"
#: Grids of launches that take turns over chunks of query rows: tiles of these rows, and tiles of keys for each part.
CHUNK_ROWS, CHUNK_KEYS = "chunk_rows", "chunk_keys"

#: Type of an argument → bytes; alignment is the same. Triton passes a bool as one byte.
TYPE_BYTES: Mapping[str, int] = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}

#: Kinds of arguments that are passed by value as a struct, with bytes and alignment: a TMA descriptor (CUtensorMap);
#: a divisor, its reciprocal and the shift after it (divisor.cuh).
STRUCTS: Mapping[str, tuple[int, int]] = {"descriptor": (128, 64), "divisor": (12, 4)}

POINTER_KINDS = ("pointer", "scratch")
KINDS = (
    *POINTER_KINDS, *STRUCTS, "stride", "extent", "size", "scalar", "scale", "present", "descriptor_shape",
    "descriptor_stride",
)  # fmt: skip

Times = Annotated[
    tuple[float, ...],
    ValueKind(
        "three numbers of nanoseconds, or none",
        lambda v: (
            isinstance(v, list | tuple)
            and len(v) in (0, 3)
            and all(type(n) in (int, float) and 0 <= n < 1e12 for n in v)
        ),
        tuple,
    ),
]
Visible = Annotated[
    tuple[Any, Any],
    ValueKind("two bounds", lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(map(is_bound, v)), tuple),
]


@dataclass(frozen=True)
class Argument:
    """One kernel argument: its name and type in the source, and the value that the runtime passes.

    ``kind`` and ``of`` identify the value (a pointer to q, the stride of k along ``axis`` …); ``type`` is the Triton
    type of the signature; ``divisibility`` is a promise of the runtime to the compiler (0: none).
    """

    name: Name
    kind: str
    type: str
    of: str | None = None
    axis: Axis | None = None
    divisibility: Count = 0
    box: tuple[Some, ...] = ()
    swizzle: Count | None = None  # bytes; None leaves it to the compiler
    window: Count | None = None  # rows of a descriptor through which rows after a sequence's end arrive as zeros
    packed: bool = False  # rows of the box are the heads of a group, then the next position
    paged: bool = False  # a copy brings gcd(rows of the box, page size) rows; the call gives the page size
    transposed: bool = False  # the fastest axis is that of keys, and rows are columns of the tensor
    offset: Count = -1  # bytes from the start of the parameters, as the cubin has it; -1: by the rules of C structs

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the manifest, without the entries that have their defaults."""
        return written(self, sparse=True)

    @property
    def form(self) -> tuple[int, int]:
        """Size and alignment of the parameter, in bytes. Raises KeyError for an unknown type."""
        if self.kind in POINTER_KINDS:
            return 8, 8
        struct = STRUCTS.get(self.kind)
        return struct or (TYPE_BYTES[self.type], TYPE_BYTES[self.type])

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return self.form[0]

    @property
    def tensor(self) -> str | None:
        """Name of the variant's tensor that this argument describes, or None."""
        return self.of.removeprefix("tensor:") if self.of and self.of.startswith("tensor:") else None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that launches of one call share. Uninitialized for each call.

    It holds the sum of ``terms`` elements, rounded up to a multiple of ``multiple``. A term is a product of numbers and
    of sizes of the call, which the runtime knows by name (``Geometry.sizes``).
    """

    name: Name  # what arguments are ``of``
    dtype: str
    terms: tuple[tuple[Size, ...], ...]
    multiple: Some = 1

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Number of elements in a call of such sizes; LoadError for a size that is not known."""
        total = 0
        for term in self.terms:
            try:
                product = 1
                for factor in term:
                    product *= sizes[factor] if isinstance(factor, str) else factor
                total += product
            except KeyError as error:
                raise LoadError(f"workspace '{self.name}': no size is called {error}") from None
        return -(-total // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class TileMapAxes:
    """The tile map that a launch reads or writes: its owner, and whether it differs by batch entry and by head."""

    owner: Name  # the launch that reads it
    batch: bool
    heads: bool
    slots: bool = False  # each tile has a slot, which says where the bits of its visible pairs are
    bits: Count = 0  # 32-bit words of these bits that a lane reads of a partial tile; 0: the launch reads none
    rows: Count = 0  # queries or keys of a row of the map, where a row is of one consumer; 0: those of a tile
    columns: Count = 0  # keys or queries of a bit of the map, where a tile has several blocks; 0: those of a tile


@dataclass(frozen=True, slots=True)
class TunedOn:
    """A card on which choices were measured to be faster than the plan's own, and by which file.

    ``times`` are what selection reads on this card in place of the plan's; none if the schedule has none.
    """

    file: str
    gpu: str
    times: Times = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureFields:
    """Decisions of a schedule that the runtime predicts times by."""

    skips: bool = False  # a consumer skips tiles that only other consumers see
    end_alignment: Count = 0  # of the first key of a tile, where tiles end with the last visible key; 0: the tile
    from_first: bool = False  # tiles of queries go from the first on, since the first rows see the most keys
    uneven: bool = False  # data decide how many steps a tile takes
    blocks: Some = 1  # that a multiprocessor runs at once


@dataclass(frozen=True, kw_only=True)
class WorkLimits:
    """Limits by which workers, blocks or clusters of them, cut a list of work, in tiles of keys.

    Kernels have them as constants (``work_list.cuh``), and the host computes with the same.
    """

    #: Equal parts of items may have one of so many tiles more than an equal share, and one of so many workers may be
    #: idle where items stay whole.
    one_of: ClassVar[int] = 16

    least_tiles: Some = 2  # fewest of a worker: with fewer, fewer workers have any
    cut_tiles: Count = 2  # how many more than an equal share a worker may have if all its tiles belong to one work item
    whole_tiles: Count = 64  # most of a worker where items stay whole: with more, idle workers cost more than merging


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureEntry(StructureFields, WorkLimits):
    """The decisions of a schedule in the file of a manifest."""


@dataclass(frozen=True, eq=False)
class LaunchFields:
    """Launch parameters of one entry of a kernel's source. A call launches all of a kernel's entries, one after the
    other.

    ``grid`` says what a block is: some ``rows`` of a head, a tile of ``queries`` or of ``keys``, or one word of the
    tile map of either (``query_words``, ``key_words``), or a row of it (``query_map_rows``, ``key_map_rows``); or a
    range of the keys of a tile of queries (``key_shares``), which the blocks of a cluster, at most ``cluster``, divide
    among themselves. Launches that take turns over chunks of query rows have tiles of these rows, or of keys
    (``chunk_rows``, ``chunk_keys``), and come once for each chunk.
    """

    name: Name
    symbol: Name
    grid: str
    tile_m: Some
    tile_n: Some
    _: KW_ONLY
    tile_map: TileMapAxes | None = None  # what it reads or writes
    persistent: bool = False  # a block works until no tile is left
    cluster: Some = 1  # blocks of a tile
    pdl: bool = False  # programmatic dependent launch: it starts early and waits for the launches before it
    cooperative: bool = False  # its blocks wait for each other, so all must be resident
    row_warps: Some = 1  # most warps that hold the query rows of a work item, where blocks share keys
    row_blocks: Some = 1  # most blocks of a cluster that hold the query rows of a work item
    split: bool = False  # a tile has a block for each split of the keys
    merges: bool = False  # blocks that hold parts of a work item merge them, and count who is there and who has left


@dataclass(frozen=True, slots=True)
class LaunchMemory:
    """Shared memory of a launch's blocks, as the compiler reports it."""

    shared_memory: Count = 0  # bytes


@dataclass(frozen=True, eq=False)
class LaunchEntry(LaunchFields):
    """A launch in the file of a manifest."""

    threads: Some
    parameters: tuple[Argument, ...]
    resources: LaunchMemory | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelFields:
    """The decisions about a kernel that calls go by."""

    name: Name  # file, symbol and log label
    package: Name
    head_dim_qk: Some
    head_dim_v: Some
    layout: str  # dense | varlen | paged
    direction: str  # of an operation of attngen.operations
    backend: str  # triton | cuda
    loads: str  # descriptor | pointer
    tile_m: Some
    tile_n: Some
    iteration: str = "ranges"  # ranges | classified | tile_map
    workspaces: tuple[Workspace, ...] = ()
    structure: StructureFields = StructureFields()
    pack_gqa: bool = False  # the rows of a tile are all query heads of one KV head, then the next query
    v_of_key: bool = False  # v is the first columns of k
    split_kv: bool = False  # a forward whose blocks split the keys of a sequence
    split_size: Count = 0  # keys of a split; 0: blocks do not split the keys of a sequence
    scale_block: Signed = 0  # tokens that share a scale of quantized q, k and v; 0: all of a head
    transposed_v: bool = False  # keys lie side by side in v
    grouped_v: bool = False  # in groups of 32, in the order of the lanes of an accumulator
    least_heads_in_l2: Some = 1  # KV heads that run side by side at least, in a backward by tiles of keys
    sum_columns: Count = 0  # of the float32 dQ accumulator in global memory; may exceed those of dQ; 0: there is none
    ordered: bool = False  # tiles of keys add to it in a fixed order
    times: Times = ()  # measured nanoseconds of a launch, a work item and a step; none: unknown
    # keys that a tile of queries may see, or queries that may see a tile of keys: ``plan.times``; none: all
    visible: tuple[Visible, ...] = ()
    tuned: tuple[TunedOn, ...] = ()  # where its tile, stages and warps were measured, if a file had them

    @property
    def summed(self) -> tuple[str, ...]:
        """Gradients of q, k and v that blocks of a backward add up in global memory."""
        if any(workspace.name == "dkv_sum" for workspace in self.workspaces):
            return ("dk",) if self.v_of_key else ("dk", "dv")
        return ("dq",) if self.sum_columns else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest(KernelFields):
    """The file of a manifest, as far as the runtime reads it."""

    variant: VariantText
    arch: str
    dtype: str
    l2_keys: Some
    structure: StructureEntry = StructureEntry()
    main: Name
    launches: tuple[LaunchEntry, ...]
    resources: LaunchMemory
    operands: Mapping[str, Name] = field(default_factory=dict)
    sha256: str | None = None
    min_driver: Count | None = None


def parse_manifest(value: Any, origin: str) -> Manifest:
    """The manifest that a JSON value holds.

    Raises LoadError, with ``origin`` as the subject, unless it has this version's format, all that the runtime needs,
    and the right types.
    """
    if not isinstance(value, dict):
        raise LoadError(f"{origin}: its manifest is not an object but {shown(value)}; {REMEDY}")
    version = value.get("format")
    if type(version) is not int or version != MANIFEST_FORMAT:
        raise LoadError(
            f"{origin}: manifest format {'unknown' if version is None else shown(version)}, but this version of "
            f"attngen reads format {MANIFEST_FORMAT}; {REMEDY}"
        )
    try:
        return read(Manifest, value)
    except MisfitError as misfit:
        raise LoadError(f"{origin}: the manifest {misfit}; {REMEDY}") from None
