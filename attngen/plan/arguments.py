"""The argument list of a Triton forward kernel, in order: the one description that the template's signature, the
compiler's attributes and the runtime's packing all follow."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from attngen.dtypes import dtype
from attngen.lang.cuda_target import CudaDialect
from attngen.lang.variant import Tensor, Variant
from attngen.plan.model import Argument, Columns, Plan

#: Axes of q, k, v and out that have a stride; the last axis is contiguous.
STRIDED = {"dense": ("b", "s", "h"), "varlen": ("s", "h")}
_NAMES = """
BLOCK_M BLOCK_N STAGES LOG2E LN2 tl triton online_softmax schedule_tile first_at_least lowest_bit count_bits
row_max row_sum p alpha block q_tiles units section inside word unit q_tile b h hk q_begin k_begin seqlen_q
seqlen_k max_seqlen_q max_seqlen_k q_start q_index q_row q_pos q_packed kv_packed q_hi q_pos_lo q_pos_hi
scale_log2e kv_tiles whole_tiles ragged_tiles visible_lo visible_hi words tile_map full_word partial_word
visible_word visible_count index last tiles kv_lo kv_hi bit seen_whole tile i kv_start kv_index s logit
visible dead normalize stored out_rows column lse q k v q_0 q_1 k_0 k_1 v_0 v_1 acc acc_0 acc_1 out out_0
out_1 q_rows k_head v_head q_desc k_desc v_desc batch heads kv_heads group total_q total_k map_heads
softmax_scale write_lse has_seqused_k seen rows entry full_lo full_hi partial_lo partial_hi
Element Spans Work Place Product Matrix QMatrix KMatrix VMatrix shared_memory shared_at warp lane warpgroup work next
more left stage slot phase work_phase q_stage q_phase v_stage v_phase v_tile tile_info remaining mine all spans part
unit q_tiles_of_all asked_phase tile_counter q_map k_map v_map out_map kv kv_first x row reference maximum early sum
kept normalize leader group_thread row_in_group out_rows advance wait_k skip next_work first_tile issue_qk issue_pv
take_turn pass_turn sync_group finish_logits stage_out store_out chunk swizzled column bit partial skipped partial_word
visible_word shared_work index_of_tile load_v load_step sees_any start bf16 fp16 min max
TensorMap Value address before blind blockDim blockIdx box candidate floor_div floor_mod fminf held_for held_phase
held_stage int4 k_phase k_stage q_first next_tile place_tile reinterpret_cast rs ss static_assert static_cast
tanh_approx threadIdx turn_is_spent uint32_t arrive arrive_expecting wait wait_k wait_v wait_operands wait_products
wait_stores_read settle commit_products commit_stores fence_async_proxy fence_barrier_init fence_products init_barrier
named_arrive named_sync prefetch_map load_box store_box store_blocks pack rescale exponentiate find_maximum finish_sum
raise_reference log_sum_exp grow_registers shrink_registers take_tile advance_v hold_v skip_v release_k release_v
first_is_blind free_out give_up_turn write_out key visible_from visible_to Place Row
from_lane k_to k_to_phase k_unloaded v_to v_to_phase v_unloaded load_q load_k tile_at ahead to store_rows kv_head
group_bits h_lo h_hi
dout dout_0 dout_1 dk dk_0 dk_1 dv dv_0 dv_1 dq dq_0 dq_1 dp ds dlogit lse_log2 delta lse_rows delta_rows dlse kv_row
k_rows v_rows dk_rows dv_rows dq_rows q_rows q_head dout_head dout_rows keys k_end q_end inner_heads head start
full_count partial_count full_word factor row_tile row row_tiles dot contribution gradient
nothing used kv_tile visit visits
sink sink_log2e
kept_pairs drop drop_pairs philox dropout_rate dropout_threshold dropout_scale dropout_seed dropout_offset numbers
DsColumns DsRows KeyColumns KeyRows QueryColumns QueryRows Step advance_q buffer columns consumer count delta_numbers
dq_phase exponentiate_step first first_column issue_dk issue_dp issue_dq issue_dv issue_s j key_rows keys_loaded
kv_phase lse_numbers next_step other own pack_probabilities pair pairs place q_used ragged region release_dout
row_numbers store_dq store_ds stride sum_tile sums sync_consumers tell thread threads tiles_of_all upper what both
Earlier Sum await_turn counter counters earlier found last_tile passed store_relaxed store_release sum take_in_order
told turn fence_async_global Piece first_row pieces pieces_of_all take_piece write_rows done piece add_release
load_acquire load_floats take_number round_sums lower counter_at
anew element find_kept first_word high is_kept keep_pairs kept_dp lane_of_warp low whole
accumulate advance_buffer advance_dout buffer_phase ds_region empty here load_dout load_rows loads_dout loads_q
own_start place_of_pairs rank release settle_dv there full end load_keys share share_end
cluster_rank mapped sync_cluster arrive_at load_box_to copy_to add_floats values taken store_to marked_pair
derivative not_hoisted own_lane p_derivative weighted
ds_pairs ds_phase give_turn load_float4 of_rows row_place rows store_float4
Ring Pair Event Named QRing KRing VRing WorkRing KvRing DoutRing DqRing DsRing PieceRing PRing OtherKRing OtherDsRing
q_ring k_ring v_ring work_ring kv_ring dout_ring dq_ring ds_ring other_ds_ring asked added held ring used acquire base
init_barriers
atomicInc clear_rows dout_map four has_dlse make_float2 map step store_transposed sum_chunks unpack wait_stores_written
"""

#: Names that the templates give to their own values; an argument of a variant with such a name gets a suffix.
KERNEL_NAMES: frozenset[str] = frozenset(_NAMES.split()) | CudaDialect.reserved
#: Patterns of such names: ends of ranges, other arguments, constants of CUDA, kernels; and what the suffix gives.
_KERNEL_PATTERN = re.compile(
    r"(full|partial|visible)_(lo|hi|until|from|to)_\d+|(stride|extent|fwd|bwd|classify)_\w+|\w+_ptr|k[A-Z]\w*|\w+_value"
    r"|D\d+|OUT\d+|DEFINE_\w+|CUDA\w*"  # macros
)
_SCALAR_TYPES = {"int32": "i32", "int64": "i64", "fp32": "fp32", "bool": "i32"}


def forward_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the forward kernel of ``plan``."""
    return tuple(_forward(plan))


def classifier_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the tile map."""
    return tuple(_classifier(plan))


def _forward(plan: Plan) -> Iterator[Argument]:
    tiles = {
        "q": (plan.columns_qk, plan.tile_m),
        "k": (plan.columns_qk, plan.tile_n),
        "v": (plan.columns_v, plan.tile_n),
    }
    pointers = [name for name in tiles if not has_descriptor(plan, name)]
    for name, (columns, rows) in tiles.items():
        if name in pointers:
            yield pointer_argument(plan, name)
            continue
        for index, block in enumerate(columns):
            yield descriptor_argument(plan, name, f"{name}_desc{block_suffix(columns, index)}", rows, block)
    yield pointer_argument(plan, "out")
    yield Argument("lse_ptr", "pointer", "*fp32", of="lse", divisibility=4)
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
        yield Argument("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)
    if plan.driver == "tile_map":
        yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from tensor_pointers(plan.variant)
    element_alignment = max(plan.alignment // plan.dtype.bytes, 1)
    for name in (*pointers, "out"):
        for axis in STRIDED[plan.layout]:
            divisibility = element_alignment if element_alignment > 1 else 0
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis, divisibility=divisibility)
    if plan.driver == "tile_map":
        for axis in ("b", "h", "q"):
            yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)
    yield Argument("write_lse", "present", "i32", of="lse")
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _classifier(plan: Plan) -> Iterator[Argument]:
    yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
        yield Argument("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)
    yield from tensor_pointers(plan.variant)
    for axis in ("b", "h", "q"):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    yield Argument("map_heads", "size", "i32", of="map_heads")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def has_descriptor(plan: Plan, name: str) -> bool:
    """Whether q, k or v comes through a tensor descriptor."""
    return plan.loads == "descriptor" and (name != "q" or plan.q_operand == "registers")


def block_suffix(blocks: tuple[Columns, ...], index: int) -> str:
    """Return what distinguishes a column block in names: nothing where there is only one."""
    return f"_{index}" if len(blocks) > 1 else ""


def argument_name(name: str) -> str:
    """Return the name of a variant's scalar in the kernel: its own, unless the kernel needs that for itself."""
    taken = name in KERNEL_NAMES or _KERNEL_PATTERN.fullmatch(name) or keyword.iskeyword(name)
    return f"{name}_value" if taken else name


def pointer_name(tensor: str) -> str:
    """Return the name of the argument that holds a tensor's address."""
    return f"{argument_name(tensor)}_ptr"


def descriptor_argument(
    plan: Plan, of: str, name: str, rows: int, block: Columns, window: int | None = None
) -> Argument:
    """Return the tensor descriptor through which some rows of a column block come; see ``tensormap.windowed``."""
    box: tuple[int, ...] = (rows, 1, block.width) if plan.varlen else (1, rows, 1, block.width)
    if window is not None:
        box = (*box[:-3], 1, *box[-3:])
    shape = ",".join(map(str, box))
    return Argument(name, "descriptor", f"tensordesc<{plan.dtype.triton}[{shape}]>", of=of, box=box, window=window)


def pointer_argument(plan: Plan, of: str) -> Argument:
    """Return the address of a tensor of the plan's dtype."""
    divisibility = plan.alignment if plan.alignment > plan.dtype.bytes else 0
    return Argument(f"{of}_ptr", "pointer", f"*{plan.dtype.triton}", of=of, divisibility=divisibility)


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


def strides(tensor: Tensor) -> list[str]:
    """Return the stride of each axis as kernels write it: the last one is contiguous, so that loads are vectors."""
    return [f"stride_{argument_name(tensor.name)}_{axis}" for axis in range(len(tensor.shape) - 1)] + ["1"] * (
        len(tensor.shape) > 0
    )


def extent_name(tensor: Tensor, axis: int) -> str:
    """Return the name of the argument that holds a tensor's extent."""
    return f"extent_{argument_name(tensor.name)}_{axis}"


def _sizes(plan: Plan) -> Iterator[Argument]:
    """Yield lengths and counts; ``group`` is query heads per KV head, ``section`` the heads that run side by side."""
    for name in (
        "batch",
        "heads",
        "kv_heads",
        "group",
        "section",
        "q_tiles",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
    ):
        yield Argument(f"max_{name}" if plan.varlen and name.startswith("seqlen") else name, "size", "i32", of=name)
    if plan.driver == "tile_map":
        yield Argument("words", "size", "i32", of="words")


def scalar_arguments(variant: Variant) -> Iterator[Argument]:
    """Yield the scalars that a variant takes at the call."""
    for scalar in variant.scalars:
        if scalar.const is None:
            yield Argument(argument_name(scalar.name), "scalar", _SCALAR_TYPES[scalar.dtype], of=scalar.name)
