"""The arguments of all launches, each described once: the templates' signatures, the compiler's attributes and the
runtime's packing all follow this order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.dtypes import DESCALES, PAGE_BLOCK, QUANTIZED_DTYPES, SCALAR_TYPES, V_GROUP, dtype
from attngen.lang.biases import box_bytes
from attngen.lang.variant import Tensor, Variant
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Argument, Columns, Plan
from attngen.plan.symbols import argument_name, divisor_name, extent_name, map_name, pointer_name, strides

#: Tensors whose rows are keys, whatever a launch calls them.
_OF_KEYS = frozenset({"k", "v", "dk", "dv"})


def signature(
    plan: Plan,
    operands: Iterable[Argument],
    *,
    tiles: str,
    strided: Iterable[str] = (),
    promised: bool = True,
    counted: bool = False,
    own_gradients: Iterable[Argument] = (),
    more_sizes: Iterable[str] = (),
    max_seqlen_k: bool = False,
    present: Iterable[str] = ("seqused_k",),
) -> tuple[Argument, ...]:
    """Arguments of a launch that multiplies: its ``operands``, and those that every such launch takes.

    A block is one of ``tiles`` ("q_tiles", "kv_tiles"). ``strided`` names the tensors that come by address and strides;
    these are ``promised`` to be multiples of the plan's alignment. ``counted``: tiles are taken from a counter.
    ``max_seqlen_k``: a dense sequence, too, may be shorter than the length of k. ``present`` names what a call may
    leave out; of a paged one that is ``cu_seqlens_q`` and never ``seqused_k``.
    """
    rows = {"q_tiles": "q", "kv_tiles": "kv"}[tiles]
    mapped = plan.iteration == "tile_map"
    return (
        *operands,
        *lengths(plan),
        *([tile_map()] if mapped else []),
        *([Argument("tile_counter", "pointer", "*u32", of="tile_counter", divisibility=4)] if counted else []),
        *tensor_pointers(plan.variant),
        *own_gradients,
        *strides_of(plan, strided, promised=promised),
        *(map_strides(rows) if mapped else ()),
        *tensor_shapes(plan.variant),
        *sizes(plan, tiles, max_seqlen_k=max_seqlen_k),
        *(size(name) for name in more_sizes),
        *([size("words")] if mapped else []),
        *([map_words()] if plan.map_bits else []),
        scale(),
        *scalar_arguments(plan),
        *presence(plan, present),
    )


def classifier_signature(plan: Plan, tiles: str, *, max_seqlen_k: bool = False) -> tuple[Argument, ...]:
    """Arguments of the launch that computes the tile map of a launch whose blocks are ``tiles``."""
    with_slots = plan.backend == "cuda" and not plan.structure.map_rows
    return (
        tile_map(),
        *((tile_hashes(), tile_list()) if with_slots else ()),
        *lengths(plan),
        *tensor_pointers(plan.variant),
        *(() if with_slots else map_strides({"q_tiles": "q", "kv_tiles": "kv"}[tiles])),
        *tensor_shapes(plan.variant),
        *sizes(plan, tiles, max_seqlen_k=max_seqlen_k),
        size("words"),
        *([map_words()] if with_slots else []),
        size("map_heads"),
        *scalar_arguments(plan),
        *presence(plan, ("seqused_k",)),
    )


# --- operands -----------------------------------------------------------------------------------------------


def pointer(plan: Plan, of: str) -> Argument:
    """Return the address of an operand."""
    element = plan.operands.of(of)
    divisibility = plan.alignment if plan.alignment > element.bytes else 0
    return Argument(f"{of}_ptr", "pointer", f"*{element.triton}", of=of, divisibility=divisibility)


def row_pointer(of: str) -> Argument:
    """Return the address of one float32 number for each query row."""
    return Argument(f"{of}_ptr", "pointer", "*fp32", of=of, divisibility=4)


def results_of_rows(plan: Plan) -> Iterator[Argument]:
    """Yield the address of the log-sum-exp, if there is one, and, where largest logits follow it in memory, how many
    rows have one."""
    if plan.variant.has_lse:
        yield row_pointer("lse")
    if plan.variant.max_logits:
        yield size("lse_rows", form="i64")


def partial_pointers() -> Iterator[Argument]:
    """Yield the addresses of partial results, and of the counters by which the last block to finish is known."""
    yield Argument("partials_ptr", "pointer", "*fp32", of="partials", divisibility=16)
    yield Argument("counters_ptr", "pointer", "*u32", of="split_counters", divisibility=4)


def descales(plan: Plan) -> Iterator[Argument]:
    """Yield the addresses of the scales of quantized operands, and their strides; nothing for operands without scales.
    There is one for each batch entry and KV head, for each block of tokens of each head, or for each KV head of a
    page or of each of its keys."""
    if not plan.descaled:
        return
    given = [name for name in DESCALES if plan.operands.of(name[0]).name in QUANTIZED_DTYPES]
    for name in given:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    for name in given:
        in_pages = plan.key_access == "paged"
        if in_pages and plan.scale_block in (PAGE_BLOCK, 1) and name != "q_descale":
            axes = ("page", "h", "s") if plan.token_scales else ("page", "h")
        else:
            of_tokens = not in_pages and (plan.block_scales or (plan.token_scales and name != "v_descale"))
            axes = ("b", "h", "s") if of_tokens else ("b", "h")
        for axis in axes:
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)


def key_scales(plan: Plan) -> Iterator[Argument]:
    """Yield the address and the strides of the scales of k in a kernel whose values are the head of its keys."""
    return (argument for argument in descales(plan) if argument.of == "k_descale")


def descriptor(plan: Plan, of: str, name: str, rows: int, block: Columns, window: int | None = None) -> Argument:
    """Return the descriptor through which Triton loads some rows of a column block; see ``tensormap.windowed``."""
    box: tuple[int, ...] = (rows, 1, block.width) if plan.varlen else (1, rows, 1, block.width)
    if window is not None:
        box = (*box[:-3], 1, *box[-3:])
    shape = ",".join(map(str, box))
    form = f"tensordesc<{plan.operands.of(of).triton}[{shape}]>"
    return Argument(name, "descriptor", form, of=of, box=box, window=window)


def tensor_map(
    plan: Plan, of: str, rows: int, box_bytes: int, *, window: int | None = None, packed: bool = False
) -> Argument:
    """Return the tensor map of a CUDA kernel, whose box is ``rows`` rows of ``box_bytes``, swizzled over these.

    That of pages is over (page, KV head, row of the page, column), in whatever order these lie in memory. A page may
    hold less than ``rows`` rows, or a number that ``rows`` does not divide: a copy brings gcd(page_size, ``rows``),
    which the argument ``box_rows`` tells the kernel, and the window has as many. The page ``num_pages`` lies outside,
    so that its rows arrive as zeros.
    """
    columns = box_bytes // plan.operands.of(of).bytes
    transposed = of == "v" and plan.transposed_v
    paged = plan.key_access == "paged" and of in _OF_KEYS
    box: tuple[int, ...] = (1, rows, columns) if paged or transposed else (rows, 1, columns)
    if window is not None:
        box = (1, *box)
    if paged or not plan.ragged_queries:
        box = (1, *box)
    return Argument(
        f"{of}_map",
        "descriptor",
        "tensor_map",
        of=of,
        box=box,
        swizzle=box_bytes,
        window=window,
        packed=packed,
        paged=paged,
        transposed=transposed,
    )


def grouped_map(plan: Plan, keys: int) -> Argument:
    """Tensor map of V in groups of 32 keys, a row of 32 for each column: one copy brings all groups of a tile."""
    box = (1, 1, keys // V_GROUP, plan.columns_v[0].width, V_GROUP)
    return Argument("v_map", "descriptor", "tensor_map", of="v", box=box, swizzle=V_GROUP)


def bias_map(tensor: Tensor, rows: int, keys: int) -> Argument:
    """Return the tensor map of a bias for tiles of ``rows`` queries and ``keys`` keys.

    One copy brings all rows and as many keys as a swizzled row of its box has (``box_bytes``).

    It has the axes of the tensor, and at least three. An axis that the call expanded has one place (``as_described``).
    """
    element = dtype(tensor.dtype).bytes
    swizzle = box_bytes(keys, element)
    box = (*[1] * max(len(tensor.shape) - 2, 1), rows, swizzle // element)
    return Argument(
        map_name(tensor.name), "descriptor", "tensor_map", of=f"tensor:{tensor.name}", box=box, swizzle=swizzle
    )


def block_suffix(blocks: tuple[Columns, ...], index: int) -> str:
    """Suffix of a column block in names; empty where there is only one."""
    return f"_{index}" if len(blocks) > 1 else ""


# --- arguments of several launches ---------------------------------------------------------------------------


def lengths(plan: Plan, *names: str) -> Iterator[Argument]:
    """Yield the addresses of sequence starts, page tables and counts of used keys; or only ``names`` of these.
    ``cu_seqlens_q`` of a paged kernel may be null: sequence i then begins at row i * max_seqlen_q."""
    by_access = {
        "contiguous": ("seqused_k",),
        "ragged": ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        "paged": ("cu_seqlens_q", "page_table", "seqused_k"),
    }
    for name in by_access[plan.key_access]:
        if not names or name in names:
            yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)


def presence(plan: Plan, of: Iterable[str]) -> Iterator[Argument]:
    """Yield a flag for each tensor that a call may leave out. Paged calls pass ``seqused_k``, others
    ``cu_seqlens_q``."""
    for name in of:
        if plan.key_access == "paged" and name == "seqused_k":
            name = "cu_seqlens_q"
        yield Argument(f"{'write' if name == 'lse' else 'has'}_{name}", "present", "i32", of=name)


def page_sizes(plan: Plan) -> Iterator[Argument]:
    """Yield the sizes of the cache that a paged kernel takes, and nothing for others: elements from a row of the page
    table to the next, keys in a page, pages of the cache (the first that is none of it), rows that one copy brings."""
    if plan.key_access == "paged":
        yield Argument("page_table_stride", "stride", "i64", of="page_table", axis="b")
        for name in ("page_size", "num_pages", "box_rows"):
            yield size(name)


def tile_map() -> Argument:
    """Return the address of a tile map."""
    return Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)


def tile_hashes() -> Argument:
    """Return the address of a hash for each slot of a tile map, of the visible pairs of its tile; null: not wanted."""
    return Argument("tile_hashes_ptr", "pointer", "*i64", of="tile_hashes", divisibility=8)


def tile_list() -> Argument:
    """Return the address of a list of slots whose visible pairs are written, after their number; null: all tiles are
    classified."""
    return Argument("tile_list_ptr", "pointer", "*i32", of="tile_list", divisibility=4)


def map_words() -> Argument:
    """Return the number of words of a tile map, after which its slots stand, and after these the visible pairs."""
    return size("map_words", form="i64")


def map_strides(rows: str) -> Iterator[Argument]:
    """Yield the strides of a tile map whose rows are tiles along the axis ``rows``."""
    for axis in ("b", "h", rows):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)


def strides_of(plan: Plan, names: Iterable[str], *, promised: bool = True) -> Iterator[Argument]:
    """Yield the strides of operands, multiples of the plan's alignment if that is ``promised``."""
    layout = LAYOUTS[plan.layout]
    for name in names:
        elements = plan.alignment // plan.operands.of(name).bytes if promised else 1
        for axis in layout.key_strides if name in _OF_KEYS else layout.query_strides:
            yield Argument(
                f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis,
                divisibility=elements if elements > 1 else 0,
            )  # fmt: skip


def size(name: str, of: str | None = None, form: str = "i32") -> Argument:
    """Return a size of the call, which the runtime knows by name (``Geometry.sizes``)."""
    return Argument(name, "size", form, of=of or name)


def reciprocals(*names: str) -> Iterator[Argument]:
    """Yield the reciprocals by which a kernel divides by sizes (``Geometry.sizes``; divisor.cuh)."""
    for name in names:
        yield size(f"{name}_reciprocal")


def sizes(plan: Plan, tiles: str, *, max_seqlen_k: bool = False) -> Iterator[Argument]:
    """Yield lengths and counts. ``group`` is query heads per KV head, ``group_bits`` its log2 where heads are packed,
    ``heads_in_l2`` the heads that run side by side."""
    bits = ["group_bits"] if plan.pack_gqa else []
    for name in ("batch", "heads", "kv_heads", "group", *bits, "heads_in_l2", tiles):
        yield size(name)
    ragged = plan.ragged_queries
    yield Argument("max_seqlen_q" if ragged else "seqlen_q", "size", "i32", of="seqlen_q")
    yield Argument("max_seqlen_k" if ragged or max_seqlen_k else "seqlen_k", "size", "i32", of="seqlen_k")
    for name in ("total_q", "total_k"):
        yield size(name)
    yield from page_sizes(plan)


def scale() -> Argument:
    """Return the scale of the logits."""
    return Argument("softmax_scale", "scale", "fp32")


# --- arguments of a variant --------------------------------------------------------------------------


def tensor_pointers(variant: Variant) -> Iterator[Argument]:
    """Yield the addresses of a variant's tensors."""
    for tensor in variant.tensors:
        yield Argument(
            pointer_name(tensor.name), "pointer", f"*{dtype(tensor.dtype).triton}", of=f"tensor:{tensor.name}"
        )


def tensor_shapes(variant: Variant) -> Iterator[Argument]:
    """Yield the strides, but for that of the last axis, and the extents of a variant's tensors."""
    for tensor in variant.tensors:
        of = f"tensor:{tensor.name}"
        for axis, name in enumerate(strides(tensor)[:-1]):
            yield Argument(name, "stride", "i64", of=of, axis=axis)
        for axis in range(len(tensor.shape)):
            yield Argument(extent_name(tensor, axis), "extent", "i32", of=of, axis=axis)


def scalar_arguments(plan: Plan) -> Iterator[Argument]:
    """Yield the scalars that a variant takes at the call, and the divisors of a CUDA kernel."""
    for scalar in plan.variant.arguments:
        yield Argument(argument_name(scalar.name), "scalar", SCALAR_TYPES[scalar.dtype].triton, of=scalar.name)
    for divisor in plan.divisors:
        yield Argument(divisor_name(divisor), "divisor", "divisor", of=divisor.text)
