"""fwd_sm90a_tma_bf16_d128_neighbourhood_2d_m64n64s3w4

Attention forward, variant neighbourhood_2d: mask `abs(q // width - kv // width) <= radius and abs(q % width - kv % width) <= radius`.
Rendered by `attngen build specs/hopper_triton.yaml`, schedule triton_forward.
"""

import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)  # query rows of a block
BLOCK_N = tl.constexpr(64)  # keys of one step
STAGES = tl.constexpr(3)  # K and V tiles in flight
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(x, scale, row_max, row_sum):
    """Return (p, alpha, row_max, row_sum) after one more tile of logits ``x * scale``, which are in units of log2.

    p = exp2(x * scale - row_max); what was accumulated before must be multiplied by alpha (Milakov and
    Gimelshein 2018, "Online normalizer calculation for softmax").
    """
    new_max = tl.maximum(row_max, tl.max(x, 1) * scale)

    # A row that saw no key yet has the maximum -inf, and (-inf) - (-inf) would be NaN.
    offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(x * scale - offset[:, None])
    alpha = tl.exp2(row_max - offset)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def schedule_tile(block, q_tiles, units, heads_in_l2):
    """Return (unit, q_tile) of a block: `heads_in_l2` units (batch x head) share L2, longest tiles first."""
    units_before = block // (heads_in_l2 * q_tiles) * heads_in_l2
    width = tl.minimum(heads_in_l2, units - units_before)
    rest = block - units_before * q_tiles
    return units_before + rest % width, q_tiles - 1 - rest // width


@triton.jit
def lowest_bit(word):
    """Return the position of the lowest set bit: the exponent of that power of two as a float."""
    power = (word & -word).to(tl.uint32).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def fwd_sm90a_tma_bf16_d128_neighbourhood_2d_m64n64s3w4(
    q_desc, k_desc, v_desc,
    out_ptr, lse_ptr, seqused_k_ptr,
    stride_out_b, stride_out_s, stride_out_h,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
    u_width, u_radius,
    write_lse, has_seqused_k,
):
    # Rows and head of the block. `heads_in_l2` heads run side by side, the longest query tiles first.
    unit, q_tile = schedule_tile(tl.program_id(0), q_tiles, batch * heads, heads_in_l2)
    b = unit // heads
    h = unit % heads
    hk = h // group
    if has_seqused_k != 0:
        seqlen_k = tl.load(seqused_k_ptr + b)
    q_start = q_tile * BLOCK_M
    q_index = q_start + tl.arange(0, BLOCK_M)
    q_row = tl.minimum(q_index, seqlen_q - 1)  # rows beyond the end repeat the last one; they are not stored
    scale_log2e = softmax_scale * LOG2E

    # Keys: tiles that some row sees, and among them those that every row sees whole.
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    q_hi = tl.minimum(q_start + BLOCK_M, seqlen_q) - 1
    visible_lo = tl.minimum(tl.maximum((q_start // u_width - u_radius).to(tl.int64) * u_width, 0) // BLOCK_N, kv_tiles + 1)
    visible_hi = (tl.minimum(((q_hi // u_width).to(tl.int64) + u_radius) * u_width + u_width, seqlen_k) + BLOCK_N - 1) // BLOCK_N
    visible_lo = visible_lo.to(tl.int32)
    visible_hi = visible_hi.to(tl.int32)
    ragged_tiles = ((visible_lo <= whole_tiles) & (visible_hi > whole_tiles)).to(tl.int32)

    # State of a block: its queries, and for each of them the running max, the row sum and O.
    q = tl.reshape(q_desc.load([b, q_start, h, 0]), [BLOCK_M, 128])
    u_q_div_width = q_row[:, None] // u_width
    u_q_mod_width = q_row[:, None] % u_width
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)

    # The whole tiles, 32 at a time.
    for word in tl.range(visible_lo // 32, tl.cdiv(tl.minimum(visible_hi, whole_tiles), 32), num_stages=1):
        tiles = word * 32 + tl.arange(0, 32)
        kv_lo = tiles * BLOCK_N
        kv_hi = kv_lo + (BLOCK_N - 1)
        u_tiles_q_lo_div_width = q_start // u_width
        u_tiles_q_hi_div_width = q_hi // u_width
        u_tiles_q_lo_div_width_eq_q_hi_div_width = u_tiles_q_lo_div_width == u_tiles_q_hi_div_width
        u_tiles_value = tl.where(u_tiles_q_lo_div_width_eq_q_hi_div_width, q_start % u_width, 0)
        u_tiles_width_minus_1 = u_width - 1
        u_tiles_value_2 = tl.where(u_tiles_q_lo_div_width_eq_q_hi_div_width, q_hi % u_width, u_tiles_width_minus_1)
        u_tiles_kv_hi_div_width = kv_hi // u_width
        u_tiles_kv_lo_div_width = kv_lo // u_width
        u_tiles_column_condition = u_tiles_kv_lo_div_width == u_tiles_kv_hi_div_width
        u_tiles_column_value = tl.where(u_tiles_column_condition, kv_hi % u_width, u_tiles_width_minus_1)
        u_tiles_column_value_2 = tl.where(u_tiles_column_condition, kv_lo % u_width, 0)
        seen = (tiles >= visible_lo) & (tiles < tl.minimum(visible_hi, whole_tiles))
        seen &= (tl.maximum(tl.maximum(u_tiles_q_lo_div_width - u_tiles_kv_hi_div_width, u_tiles_kv_lo_div_width - u_tiles_q_hi_div_width), 0) <= u_radius) & (tl.maximum(tl.maximum(u_tiles_value - u_tiles_column_value, u_tiles_column_value_2 - u_tiles_value_2), 0) <= u_radius)
        bit = 1 << tl.arange(0, 32)
        visible_word = tl.sum(tl.where(seen, bit, 0))
        visible_count = tl.sum(seen.to(tl.int32))
        seen_whole = (tl.maximum(u_tiles_q_hi_div_width - u_tiles_kv_lo_div_width, u_tiles_kv_hi_div_width - u_tiles_q_lo_div_width) <= u_radius) & (tl.maximum(u_tiles_value_2 - u_tiles_column_value_2, u_tiles_column_value - u_tiles_value) <= u_radius)
        partial_word = tl.sum(tl.where(seen & ~seen_whole, bit, 0))
        for _ in tl.range(0, visible_count, num_stages=STAGES):
            index = lowest_bit(visible_word)
            visible_word &= visible_word - 1
            tile = word * 32 + index
            kv_start = tile * BLOCK_N
            kv_index = kv_start + tl.arange(0, BLOCK_N)
            k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
            # S = Q K^T
            s = tl.dot(q, tl.trans(k))
            if ((partial_word >> index) & 1) != 0:
                visible = (tl.abs(u_q_div_width - kv_index[None, :] // u_width) <= u_radius) & (tl.abs(u_q_mod_width - kv_index[None, :] % u_width) <= u_radius)
                s = tl.where(visible, s, float("-inf"))
            p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
            v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
            # O = alpha O + P V
            acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # S = Q K^T
        s = tl.dot(q, tl.trans(k))
        visible = (kv_index[None, :] < seqlen_k) & ((tl.abs(u_q_div_width - kv_index[None, :] // u_width) <= u_radius) & (tl.abs(u_q_mod_width - kv_index[None, :] % u_width) <= u_radius))
        s = tl.where(visible, s, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        # O = alpha O + P V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])

    # A row that saw no key gives 0 and -inf.
    dead = row_sum == 0.0
    normalize = tl.where(dead, 0.0, 1.0 / row_sum)
    stored = q_index[:, None] < seqlen_q
    out_rows = out_ptr + b * stride_out_b + h * stride_out_h + q_index[:, None] * stride_out_s
    column = tl.arange(0, 128)
    out = (acc * normalize[:, None]).to(tl.bfloat16)
    tl.store(out_rows + column[None, :], out, mask=stored)
    if write_lse != 0:
        lse = tl.where(dead, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
        tl.store(lse_ptr + unit.to(tl.int64) * seqlen_q + q_index, lse, mask=q_index < seqlen_q)
