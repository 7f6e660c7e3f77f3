"""fwd_sm90a_tma_bf16_d64_causal_packed_m64n64s3w4

Attention forward, variant causal_packed: mask `kv <= q_pos and doc_start[b, q_pos] <= kv`.
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
def fwd_sm90a_tma_bf16_d64_causal_packed_m64n64s3w4(
    q_desc, k_desc, v_desc,
    out_ptr, lse_ptr, seqused_k_ptr, u_doc_start,
    stride_out_b, stride_out_s, stride_out_h,
    stride_u_doc_start_0,
    extent_u_doc_start_0, extent_u_doc_start_1,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
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
    q_pos = q_row + (seqlen_k - seqlen_q)  # aligned at the bottom right
    scale_log2e = softmax_scale * LOG2E

    # Keys: tiles that some row sees, and among them those that every row sees whole.
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    q_hi = tl.minimum(q_start + BLOCK_M, seqlen_q) - 1
    q_pos_lo = q_start + (seqlen_k - seqlen_q)
    q_pos_hi = q_hi + (seqlen_k - seqlen_q)
    u_q_pos_lo_max_0 = tl.maximum(q_pos_lo, 0)
    u_doc_start_q_pos_lo_max_0 = tl.load(
        u_doc_start + b.to(tl.int64) * stride_u_doc_start_0 + u_q_pos_lo_max_0.to(tl.int64),
        mask=u_q_pos_lo_max_0 < extent_u_doc_start_1,
        other=0,
    )
    visible_lo = u_doc_start_q_pos_lo_max_0 // BLOCK_N
    visible_hi = (tl.maximum(q_pos_hi + 1, 0) + BLOCK_N - 1) // BLOCK_N
    u_q_pos_hi_max_0 = tl.maximum(q_pos_hi, 0)
    u_doc_start_q_pos_hi_max_0 = tl.load(
        u_doc_start + b.to(tl.int64) * stride_u_doc_start_0 + u_q_pos_hi_max_0.to(tl.int64),
        mask=u_q_pos_hi_max_0 < extent_u_doc_start_1,
        other=0,
    )
    full_lo = (tl.maximum(u_doc_start_q_pos_hi_max_0, 0) + BLOCK_N - 1) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(q_pos_lo + 1, 0) // BLOCK_N, whole_tiles)
    ragged_tiles = ((visible_lo <= whole_tiles) & (visible_hi > whole_tiles)).to(tl.int32)

    # State of a block: its queries, and for each of them the running max, the row sum and O.
    q = tl.reshape(q_desc.load([b, q_start, h, 0]), [BLOCK_M, 64])
    u_doc_start_b = u_doc_start + b.to(tl.int64) * stride_u_doc_start_0
    u_doc_start_q_pos = tl.load(
        u_doc_start_b + q_pos[:, None].to(tl.int64),
        mask=q_pos[:, None] >= 0,
        other=0,
    )
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 64], tl.float32)

    # The whole tiles.
    for tile in tl.range(visible_lo, tl.minimum(visible_hi, whole_tiles), num_stages=STAGES):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 64])
        # S = Q K^T
        s = tl.dot(q, tl.trans(k))
        if (tile < full_lo) | (tile >= full_hi):
            visible = (kv_index[None, :] <= q_pos[:, None]) & (u_doc_start_q_pos <= kv_index[None, :])
            s = tl.where(visible, s, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 64])
        # O = alpha O + P V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 64])
        # S = Q K^T
        s = tl.dot(q, tl.trans(k))
        visible = (kv_index[None, :] < seqlen_k) & ((kv_index[None, :] <= q_pos[:, None]) & (u_doc_start_q_pos <= kv_index[None, :]))
        s = tl.where(visible, s, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 64])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        # O = alpha O + P V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])

    # A row that saw no key gives 0 and -inf.
    dead = row_sum == 0.0
    normalize = tl.where(dead, 0.0, 1.0 / row_sum)
    stored = q_index[:, None] < seqlen_q
    out_rows = out_ptr + b * stride_out_b + h * stride_out_h + q_index[:, None] * stride_out_s
    column = tl.arange(0, 64)
    out = (acc * normalize[:, None]).to(tl.bfloat16)
    tl.store(out_rows + column[None, :], out, mask=stored)
    if write_lse != 0:
        lse = tl.where(dead, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
        tl.store(lse_ptr + unit.to(tl.int64) * seqlen_q + q_index, lse, mask=q_index < seqlen_q)
