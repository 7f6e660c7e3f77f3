"""The forward by mma.sync, for cards without wgmma: all warps copy by cp.async and multiply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

from attngen.arch import ARCHES, Arch
from attngen.errors import PlanError
from attngen.families.hopper_forward.eight_bits import PROBABILITIES as PROBABILITIES_OF_8_BITS
from attngen.families.hopper_forward.softmax import softmax_of
from attngen.families.mma_forward.structure import MmaForward
from attngen.lang.runs import positions
from attngen.lang.simplify import TRUE
from attngen.parts.boxes import BOX_BYTES, is_paged, widest_box, widths
from attngen.parts.fields import ADDRESSES, ATTENTION
from attngen.parts.heads import by_head
from attngen.parts.probabilities import PROBABILITIES
from attngen.parts.promises import keep_promises
from attngen.plan import arguments
from attngen.plan.allowances import MMA_SPILLS
from attngen.plan.choices import L2_BYTES, check_head_dims, check_sizes, is_beyond_256, iteration_of, refuse
from attngen.plan.draft import drafted, forward_launches
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Argument, Plan, Region
from attngen.plan.operands import operands_of
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import ANY, only
from attngen.plan.times import first_see_most
from attngen.plan.traits import gathers, key_values, shows_few_keys
from attngen.schema.kernel_spec import KernelSpec

#: The softmax of scores that are not bounded: measured to be the fastest.
_USUAL = "lazy"
_SOFTMAXES = ("lazy", "exact_max", "bounded")

#: Query rows of a product: M of mma.m16n8k16. A warp has one or two such blocks of rows, which share what it loads of K
#: and V.
_ROWS, _MOST_BLOCKS = 16, 2

#: Bytes of a row of Q or K that one product sums over: K of mma.m16n8k16, or of m16n8k32.
_PRODUCT_BYTES = 32

#: Rows of a tile are a multiple of these, so that the heads of a group fill them.
_TILE_ROWS = 64

#: Keys of a tile, stages of the ring in which tiles of K and V alternate, and warps, that a spec may name. Not
#: measured.
_KEYS, _STAGES, _WARPS = (16, 32, 64, 128), (2, 3, 4, 5, 6), (4, 8)

#: Operands of 8 bits, which come with scales, and the capability of the first cards that multiply them.
_8_BITS, _MULTIPLIES_8_BITS = "fp8_e4m3", 89

#: Shared memory that the system takes of each block on a multiprocessor.
_RESERVED = 1024

#: Fewest columns of O that pairs of warps divide: each warp multiplies P of both by its half of V, so it loads half as
#: much of V. Columns are divided in blocks of 32, two to a box of 128 bytes (docs/notebook/mma.md, "Columns of
#: O for two warps").
_PAIRED_COLUMNS, _DIVIDED = 192, 64

#: Bytes of a value of a key, and the most columns up to which these come once for a tile: with more, not faster
#: (docs/notebook/mma.md, "Values of keys").
_VALUE_BYTES, _VALUED_COLUMNS = 4, 128

#: Most columns up to which masked kernels copy all boxes of a row by one address: others were faster with one for each
#: (docs/notebook/mma.md, "Columns of O for two warps").
_ONE_ADDRESS_COLUMNS = 128

#: Shares of a tile's products among which its copies stand, the first ones: of most kernels, and of those without a
#: mask whose rows are one box, where smaller parts would be single copies (docs/notebook/mma.md, "Copies among
#: products" and "Copies in pairs, and branches at head dim 256").
_SHARE, _SHARE_OF_ONE_BOX = 4, 8

#: Most columns of O that leave a thread registers for exponentials among the products with V; and columns of Q in
#: shared memory where a kernel without a mask spills less with a branch before S than with one before these products
#: (docs/notebook/mma.md, "Copies in pairs, and branches at head dim 256").
_MIXED_COLUMNS, _SPILLING_COLUMNS = 192, 64

#: Warps of a multiprocessor that have registers for products. Not measured: 128 for each thread.
_MOST_WARPS = 16

#: Capability of the first cards of "sm120".
_CONSUMER_BLACKWELL = 120

#: Bytes of shared memory from which a card has room for the tiles of "large".
_LARGE = 163 * 1024


@dataclass(frozen=True, slots=True)
class _ForwardTile:
    """Rows, keys, stages and warps of a block, and how many blocks a multiprocessor should run at once.

    ``q_operand`` says where the products with K find Q; the last ``q_kept`` columns stay in shared memory even if it
    says registers. ``pairs``: pairs of warps divide the columns of O. ``key_values`` counts the values of a key that
    mask and score find in shared memory.
    """

    m: int
    n: int
    stages: int
    warps: int
    blocks: int
    q_operand: str = "shared"
    pairs: bool = False
    q_kept: int = 0
    key_values: int = 0


#: (family, largest head_dim) -> tile, first match wins. "gather" loads a value for each pair of query and key;
#: "unmasked" attends to all keys; "large" cards have 163 KB of shared memory, others 99 KB; for "sm120" kernels spill
#: less with other tiles. Measured on Hopper cards, with their shared memory (docs/notebook/mma.md, "Blocks on a
#: multiprocessor", "Tiles of 99 KB" and "Columns of O for two warps").
_TABLE: tuple[tuple[str, int, _ForwardTile], ...] = (
    ("gather", 64, _ForwardTile(64, 64, 3, 4, 2)),
    ("gather", 128, _ForwardTile(64, 32, 3, 4, 2)),
    ("gather", 256, _ForwardTile(64, 16, 3, 4, 1)),
    ("unmasked", 64, _ForwardTile(128, 64, 3, 4, 2, "registers")),
    ("large", 64, _ForwardTile(128, 64, 4, 4, 3)),
    ("large", 128, _ForwardTile(128, 64, 3, 4, 2)),
    ("large", 192, _ForwardTile(64, 64, 3, 4, 2, "registers", pairs=True)),
    ("large", 256, _ForwardTile(64, 64, 2, 4, 2, "registers", pairs=True, q_kept=64)),
    ("any", 64, _ForwardTile(128, 64, 2, 4, 3)),
    ("any", 96, _ForwardTile(128, 64, 2, 4, 2)),
    ("any", 128, _ForwardTile(128, 32, 2, 4, 2)),
    ("any", 192, _ForwardTile(64, 64, 2, 4, 2, "registers")),
    ("sm120", 256, _ForwardTile(64, 64, 2, 4, 1, "registers", pairs=True, q_kept=64)),
    ("any", 256, _ForwardTile(64, 64, 2, 4, 1, "registers", pairs=True, q_kept=128)),
)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec, arch):
        raise refused
    check_head_dims(spec)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "p")
    iteration = iteration_of(spec)
    pack_gqa = spec.pack_gqa is True
    if pack_gqa and iteration == "tile_map":
        raise refuse(
            spec,
            "pack_gqa",
            "a tile map lists the tiles of single heads; allowed: false, or true with tile_map: never",
        )
    if pack_gqa and spec.variant.dropout:
        raise refuse(
            spec,
            "pack_gqa",
            "dropout shares random numbers among rows of one head, and packed rows belong to several; allowed: false",
        )
    qk, v = widths(spec.head_dim_qk, element), widths(spec.head_dim_v, element)
    tile = _tile(spec, arch, max(qk.width, v.width))
    row_blocks = tile.m // (_ROWS * tile.warps)
    of_8_bits = spec.dtype == _8_BITS
    numbers = PROBABILITIES_OF_8_BITS[spec.dtype] if of_8_bits else PROBABILITIES[spec.dtype]
    fixed = of_8_bits or spec.variant.max_logits
    softmax, constant = ("exact_max", None) if fixed else softmax_of(spec, numbers.exponents)
    if spec.variant.max_logits:
        if spec.softmax not in (None, "exact_max"):
            raise refuse(spec, "softmax", f"'{spec.softmax}' keeps no largest logit of all keys; allowed: exact_max")
        softmax = "exact_max"
    elif spec.softmax is None and constant is None and not of_8_bits:
        softmax = _USUAL
    step = _PRODUCT_BYTES // element.bytes
    multiplied_qk, multiplied_v = -(-spec.head_dim_qk // step) * step, -(-spec.head_dim_v // _ROWS) * _ROWS
    unmasked = spec.variant.mask == TRUE
    ranges = iteration == "ranges" and not unmasked
    one_box = max(qk.width, v.width) * element.bytes <= BOX_BYTES[0]
    shares_keys = ranges and not tile.pairs and _may_share_keys(spec)
    structure = MmaForward(
        row_blocks=row_blocks,
        blocks=tile.blocks,
        q_in_ring=_q_in_ring(tile),
        q_kept=tile.q_kept,
        one_address=tile.q_kept > 0 or (not unmasked and _columns(spec) <= _ONE_ADDRESS_COLUMNS),
        copy_share=_SHARE_OF_ONE_BOX if one_box and unmasked else _SHARE,
        paired_copies=one_box and not unmasked,
        shares_keys=shares_keys,
        q_first=ranges and tile.q_operand == "shared" and (not one_box or shares_keys),
        bounded_rows=not unmasked,
        q_by_warps=shares_keys and not one_box and not tile.key_values,
        key_values=tile.key_values,
        pairs=tile.pairs,
        s_apart=unmasked and tile.q_kept > 0,
        v_apart=multiplied_v > _MIXED_COLUMNS and not ranges and not (unmasked and tile.q_kept == _SPILLING_COLUMNS),
        columns_qk=multiplied_qk,
        columns_v=multiplied_v,
        box_bytes=widest_box(qk.width * element.bytes, v.width * element.bytes),
        longest_first=spec.order != "natural",
        from_first=ranges and spec.order != "natural" and first_see_most(spec),
        skips=ranges,
        raise_above=numbers.raise_above,
        peak=numbers.peak,
        fixed_max="0.0f" if constant is None else f"{constant:.1f}f",
        shared=_regions_of(tile, spec),
    )
    planned = drafted(
        spec,
        label="mma",
        width=f"w{tile.warps}",
        tile_map=iteration == "tile_map",
        alignment=16,
        choices=(
            *([] if softmax == _USUAL or of_8_bits else [softmax.replace("_", "")]),
            *([] if structure.longest_first else ["natural"]),
            *(["pack"] if pack_gqa else []),
        ),
        columns_qk=(qk,),
        columns_v=(v,),
        backend="cuda",
        schedule="mma_forward",
        loads="pointer",
        q_operand=tile.q_operand,
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        max_registers=None,
        iteration=iteration,
        mask_code="branch",
        softmax=softmax,
        l2_bytes=L2_BYTES,
        structure=structure,
        pack_gqa=pack_gqa,
    )
    return forward_launches(
        planned,
        _arguments(planned),
        lambda: arguments.classifier_signature(planned, "q_tiles", max_seqlen_k=True),
        shared_bytes=structure.shared_bytes,
        max_spills=MMA_SPILLS.bytes,
    )


def _arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    operands = (
        *(arguments.pointer(plan, name) for name in ("q", "k", "v", "out")), *arguments.results_of_rows(plan),
        *arguments.descales(plan),
    )  # fmt: skip
    return arguments.signature(
        plan, operands, tiles="q_tiles", strided=("q", "k", "v", "out"), max_seqlen_k=True,
        present=("lse", "seqused_k"),
    )  # fmt: skip


def _may_pair(spec: KernelSpec, tile: _ForwardTile) -> bool:
    """Whether pairs of warps may divide the columns of O: warps of 16 rows, where there are many columns."""
    element = operands_of(spec).v
    row_bytes = (widths(head_dim, element).width * element.bytes for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    columns = -(-spec.head_dim_v // _ROWS) * _ROWS
    return (
        element.bytes == 2
        and tile.m == _ROWS * tile.warps
        and columns >= _PAIRED_COLUMNS
        and columns % _DIVIDED == 0
        and widest_box(*row_bytes) == 2 * _DIVIDED
    )


def _q_in_ring(tile: _ForwardTile) -> bool:
    """Whether Q has room in a stage of the ring, which it leaves before this is filled."""
    return tile.q_operand == "registers" and tile.m <= tile.n


def _tile(spec: KernelSpec, arch: Arch, width: int) -> _ForwardTile:
    """Return the spec's tile, completed from the table, and within the shared memory of the arch."""
    families = {"any"}
    if arch.shared_memory >= _LARGE:
        families.add("large")
    if arch.capability >= _CONSUMER_BLACKWELL:
        families.add("sm120")
    if spec.variant.mask == TRUE:
        families.add("unmasked")
    if gathers(spec.variant):
        families.add("gather")
    fixed = (spec.tile_m, spec.tile_n, spec.stages, spec.num_warps)
    rows_of_width = [row for row in _TABLE if width <= row[1]]
    table = next(tile for name, _, tile in rows_of_width if name in families)
    # the tile of a kernel for another card, which is verified on this one, brings its order of products
    alike = (tile for name, _, tile in sorted(rows_of_width, key=itemgetter(1)) if name in families | {"large"})
    table = next((tile for tile in alike if (tile.m, tile.n, tile.stages, tile.warps) == fixed), table)
    check_sizes(
        spec,
        (
            ("tile.n", spec.tile_n, _KEYS),
            ("num_warps", spec.num_warps, _WARPS),
            ("pipeline.stages", spec.stages, _STAGES),
        ),
    )
    warps = spec.num_warps or table.warps
    rows = [m for m in (_ROWS * warps, _MOST_BLOCKS * _ROWS * warps) if m % _TILE_ROWS == 0]
    if spec.num_warps is None and spec.tile_m is not None:
        warps = next((w for w in (table.warps, *_WARPS) if spec.tile_m in (_ROWS * w, _MOST_BLOCKS * _ROWS * w)), warps)
        rows = [m for m in (_ROWS * warps, _MOST_BLOCKS * _ROWS * warps) if m % _TILE_ROWS == 0]
    check_sizes(spec, (("tile.m", spec.tile_m, rows),))
    m = spec.tile_m or (table.m if table.m in rows else rows[-1])
    tile = _ForwardTile(m, spec.tile_n or table.n, spec.stages or table.stages, warps, table.blocks, table.q_operand)
    tile = replace(tile, pairs=table.pairs and _may_pair(spec, tile))
    if _q_in_ring(tile) and tile.pairs and spec.head_dim_qk == width:
        tile = replace(tile, q_kept=table.q_kept)
    while True:
        total = _memory(tile, spec)
        if total <= arch.shared_memory:
            break
        if tile.pairs or tile.q_kept:
            tile = replace(tile, pairs=False, q_kept=0)
        elif spec.stages is None and tile.stages > _STAGES[0]:
            tile = replace(tile, stages=tile.stages - 1)
        elif spec.tile_n is None and tile.n > _KEYS[0]:
            tile = replace(tile, n=tile.n // 2)
        else:
            ring = next(region.bytes for region in _regions_of(tile, spec) if region.name == "ring")
            raise refuse(
                spec,
                "tile",
                f"Shared memory {total} B exceeds {arch.shared_memory} B on {arch.name}: Q {total - ring} + "
                f"{tile.stages} stages x {ring // tile.stages}",
            )
    with_values = replace(tile, key_values=_key_values(spec))
    if _blocks(with_values, spec, arch) == max(_blocks(tile, spec, arch), 1):
        tile = with_values
    return replace(tile, blocks=max(_blocks(tile, spec, arch), 1))


def _may_share_keys(spec: KernelSpec) -> bool:
    """Whether warps of a tile may have rows of several heads of a group: under masks that show few keys to a query, the
    same for all heads. Causal kernels, and pairs of warps, were not faster (docs/notebook/mma.md)."""
    return shows_few_keys(spec) and spec.pack_gqa is not True and not by_head(spec.variant)


def _columns(spec: KernelSpec) -> int:
    """Columns of the wider ones of K and V."""
    return max(spec.head_dim_qk, spec.head_dim_v)


def _key_values(spec: KernelSpec) -> int:
    """Number of values of a key that are loaded or computed once for all rows of a tile."""
    if is_paged(spec) or iteration_of(spec) == "tile_map" or _columns(spec) > _VALUED_COLUMNS:
        return 0
    values = key_values(spec.variant, "packed" if spec.pack_gqa else "single", fast_math=spec.fast_math)
    return len(values.loads)


def _blocks(tile: _ForwardTile, spec: KernelSpec, arch: Arch) -> int:
    """Blocks that a multiprocessor runs at once, no more than the tile says; 0 if there is no room for one."""
    room = arch.shared_memory + _RESERVED
    return min(tile.blocks, room // (_memory(tile, spec) + _RESERVED), _MOST_WARPS // tile.warps)


def _regions_of(tile: _ForwardTile, spec: KernelSpec) -> tuple[Region, ...]:
    """Regions of shared memory: Q, which may lie in the last stage of the ring; the ring of K and V; P and factors of
    rows, which pairs of warps exchange; values of keys."""
    element = operands_of(spec).q
    width_qk, width_v = (widths(head_dim, element).width for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    q, stage = tile.m * width_qk * element.bytes, tile.n * max(width_qk, width_v) * element.bytes
    ring = 0 if _q_in_ring(tile) else q
    end = ring + tile.stages * stage
    regions = [Region("q", (tile.stages - 1) * stage if _q_in_ring(tile) else 0, q), Region("ring", ring, end - ring)]
    if tile.q_kept:  # the last columns of Q lie behind the ring
        end += tile.m * tile.q_kept * element.bytes
        regions[0] = Region("q", end - q, q)
    if tile.pairs:
        p = tile.m * tile.n * element.bytes
        regions += [Region("p", end, p), Region("factors", end + p, 8 * 32 * tile.warps)]
        end = regions[-1].offset + regions[-1].bytes
    if tile.key_values:  # of the tiles of K that the ring may hold
        regions.append(Region("key_values", end, _VALUE_BYTES * tile.key_values * tile.n * (tile.stages // 2 + 1)))
    return tuple(regions)


def _memory(tile: _ForwardTile, spec: KernelSpec) -> int:
    last = _regions_of(tile, spec)[-1]
    return last.offset + last.bytes


def _refusal(spec: KernelSpec, arch: Arch) -> PlanError | None:
    """Reason why the schedule cannot serve a spec at all, or None."""
    if positions(spec.variant) is not None:
        return refuse(spec, "backend", "kernels by mma.sync take no tensor of row positions; allowed: triton")
    return _refusal_of_8_bits(spec, arch) if spec.dtype == _8_BITS else None


def _refusal_of_8_bits(spec: KernelSpec, arch: Arch) -> PlanError | None:
    """Reason why operands of 8 bits cannot be multiplied, or None."""
    if arch.capability < _MULTIPLIES_8_BITS:
        return refuse(spec, "dtype", f"{arch.name} multiplies no numbers of 8 bits; allowed: bf16, fp16")
    if any(head_dim % 16 for head_dim in (spec.head_dim_qk, spec.head_dim_v)):
        return refuse(spec, "head_dim", "cp.async copies 16 bytes, so 8-bit head dims are multiples of 16 here")
    if spec.softmax not in (None, "exact_max"):
        return refuse(spec, "softmax", f"'{spec.softmax}' does not exist in {spec.dtype}; allowed: exact_max")
    if spec.variant.dropout:
        return refuse(spec, "dtype", f"{spec.dtype} has no dropout; allowed: bf16, fp16")
    return None


def _keep_promises(spec: KernelSpec) -> None:
    """Refuse what Triton computes more exactly, and cards with wgmma, which Triton kernels multiply by."""
    keep_promises(spec)
    if ARCHES[spec.arch].wgmma:
        raise refuse(
            spec, "loads", "cuda kernels that load by pointers multiply by mma.sync, not by wgmma; say "
            "'backend: cuda' to accept that"
        )  # fmt: skip


def _alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with tiles that need fewer registers than that of its ``first`` plan."""
    rows = [first.tile_m] if spec.tile_m else [m for m in (first.tile_m, 64) if m <= first.tile_m]
    keys = [first.tile_n] if spec.tile_n else [n for n in reversed(_KEYS) if n <= first.tile_n]
    for m, n in product(dict.fromkeys(rows), keys):
        if (m, n) != (first.tile_m, first.tile_n):
            yield replace(spec, tile_m=m, tile_n=n)


def _tunable(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with each tile, depth and number of warps that may be the fastest."""
    del first
    for m, n, stages, warps in product((64, 128, 256), (32, 64, 128), (2, 3, 4), _WARPS):
        yield replace(spec, tile_m=m, tile_n=n, stages=stages, num_warps=warps)


SCHEDULE = Schedule(
    name="mma_forward",
    backend="cuda",
    direction="forward",
    template="cuda/mma_forward/kernel.cu.j2",
    view="attngen.families.mma_forward.view:mma_view",
    explanation="attngen.families.mma_forward.explain:MmaForwardExplanation",
    supports=lambda arch: not arch.tensor_memory,
    suits=lambda spec: (not ARCHES[spec.arch].wgmma or spec.loads == "pointer") and not is_beyond_256(spec),
    plan=_plan,
    alternatives=plans_of(_alternatives, _plan),
    tunable=_tunable,
    keep_promises=_keep_promises,
    layouts=tuple(LAYOUTS),
    serves={
        "dtype": only(*PROBABILITIES, _8_BITS, why="cuda kernels by mma.sync take bf16, fp16 and fp8_e4m3"),
        "kv_dtype": only(None, _8_BITS, why="kernels by mma.sync multiply no other numbers of 8 bits"),
        "out_dtype": ANY,
        **ATTENTION, **ADDRESSES, "max_logits": ANY,
        "roles": only(None, why="cuda kernels by mma.sync have no roles; give a count"),
        "persistent": only(None, False, why="cuda kernels by mma.sync are not persistent"),
        "epilogue": only(None, "direct", why="cuda kernels by mma.sync store from registers"),
        "softmax": only(None, *_SOFTMAXES, why="kernels by mma.sync have no other row max"),
        "scale_block": only(0, why="kernels by mma.sync take a scale of each head"),
        "transposed_v": only(False, why="kernels by mma.sync transpose v themselves"),
        **dict.fromkeys(
            ("tile_m", "tile_n", "stages", "num_warps", "tile_map", "order", "pack_gqa", "dropout"), ANY
        ),
    },
)  # fmt: skip
