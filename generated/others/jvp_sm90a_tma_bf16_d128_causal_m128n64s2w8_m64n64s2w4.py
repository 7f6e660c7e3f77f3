"""jvp_sm90a_tma_bf16_d128_causal_m128n64s2w8_m64n64s2w4

Attention jvp, variant causal: mask `q_pos >= kv`.
Rendered by `attngen build tests/render/others.yaml`, schedule triton_jvp.

With tangents dQ, dK, dV of Q, K and V, dS = (dQ K^T + Q dK^T) score' scale and P = exp(S - max) give in one pass over
the keys O = P V, D = rowsum(P dS) and dO = P dV + (P (dS - c)) V, all divided by rowsum(P) in the end. Then D is the
tangent of the log-sum-exp, and dO - (D - c) O that of O, whatever number c is: that of a row is the mean of dS over the
first tile that it sees, so that little cancels of what P (dS - c) loses when it is rounded.
"""

import triton
import triton.language as tl

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
def jvp_sm90a_tma_bf16_d128_causal_m128n64s2w8_m64n64s2w4(
    q_ptr, dq_ptr,
    k_desc, dk_desc, v_desc, dv_desc,
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, seqused_k_ptr,
    stride_q_b, stride_q_s, stride_q_h,
    stride_dq_b, stride_dq_s, stride_dq_h,
    stride_out_b, stride_out_s, stride_out_h,
    stride_dout_b, stride_dout_s, stride_dout_h,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
    write_lse, has_seqused_k,
):
    """Compute O and its tangent from tangents of q, k and v."""
    BLOCK_M: tl.constexpr = 128  # query rows of a block
    BLOCK_N: tl.constexpr = 64  # keys of one step
    STAGES: tl.constexpr = 2  # tiles of K, V and their tangents in flight

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
    visible_hi = (tl.maximum(q_pos_hi + 1, 0) + BLOCK_N - 1) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(q_pos_lo + 1, 0) // BLOCK_N, whole_tiles)
    ragged_tiles = (visible_hi > whole_tiles).to(tl.int32)

    # State of a block: Q and dQ, and for each query the running max, the row sum, D, the center of its dS, O and dO.
    q_rows = q_ptr + b * stride_q_b + h * stride_q_h + q_index[:, None] * stride_q_s
    q = tl.load(q_rows + tl.arange(0, 128)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dq_rows = dq_ptr + b * stride_dq_b + h * stride_dq_h + q_index[:, None] * stride_dq_s
    dq = tl.load(dq_rows + tl.arange(0, 128)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    slope = softmax_scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_tangent = tl.zeros([BLOCK_M], tl.float32)
    center = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    dacc = tl.zeros([BLOCK_M, 128], tl.float32)

    # The whole tiles.
    for tile in tl.range(0, tl.minimum(visible_hi, whole_tiles), num_stages=STAGES):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        dk = tl.reshape(dk_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # S = Q K^T, dS = dQ K^T + Q dK^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        ds = tl.dot(q, tl.trans(dk), ds)
        if tile >= full_hi:
            visible = q_pos[:, None] >= kv_index[None, :]
            s = tl.where(visible, s, float("-inf"))
            ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        dv = tl.reshape(dv_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V + P dV
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])
        dacc = tl.dot(p.to(tl.bfloat16), dv, dacc)

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        dk = tl.reshape(dk_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # S = Q K^T, dS = dQ K^T + Q dK^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        ds = tl.dot(q, tl.trans(dk), ds)
        visible = (kv_index[None, :] < seqlen_k) & (q_pos[:, None] >= kv_index[None, :])
        s = tl.where(visible, s, float("-inf"))
        ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        dv = tl.reshape(dv_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        dv = tl.where(kv_index[:, None] < seqlen_k, dv, 0.0)
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V + P dV
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])
        dacc = tl.dot(p.to(tl.bfloat16), dv, dacc)

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
    row_tangent *= normalize
    dout_rows = dout_ptr + b * stride_dout_b + h * stride_dout_h + q_index[:, None] * stride_dout_s
    dlse_rows = dlse_ptr + unit.to(tl.int64) * seqlen_q + q_index
    tl.store(dlse_rows, row_tangent, mask=q_index < seqlen_q)
    column = tl.arange(0, 128)
    dacc = (dacc - (row_tangent - center)[:, None] * acc) * normalize[:, None]
    tl.store(dout_rows + column[None, :], dacc.to(tl.bfloat16), mask=stored)


@triton.jit
def jvp_sm90a_tma_bf16_d128_causal_m128n64s2w8_m64n64s2w4_q(
    q_ptr, dq_ptr,
    k_desc, v_desc,
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, seqused_k_ptr,
    stride_q_b, stride_q_s, stride_q_h,
    stride_dq_b, stride_dq_s, stride_dq_h,
    stride_out_b, stride_out_s, stride_out_h,
    stride_dout_b, stride_dout_s, stride_dout_h,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
    write_lse, has_seqused_k,
):
    """Compute O and its tangent from a tangent of q alone."""
    BLOCK_M: tl.constexpr = 64  # query rows of a block
    BLOCK_N: tl.constexpr = 64  # keys of one step
    STAGES: tl.constexpr = 2  # K/V tiles in flight

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
    visible_hi = (tl.maximum(q_pos_hi + 1, 0) + BLOCK_N - 1) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(q_pos_lo + 1, 0) // BLOCK_N, whole_tiles)
    ragged_tiles = (visible_hi > whole_tiles).to(tl.int32)

    # State of a block: Q and dQ, and for each query the running max, the row sum, D, the center of its dS, O and dO.
    q_rows = q_ptr + b * stride_q_b + h * stride_q_h + q_index[:, None] * stride_q_s
    q = tl.load(q_rows + tl.arange(0, 128)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dq_rows = dq_ptr + b * stride_dq_b + h * stride_dq_h + q_index[:, None] * stride_dq_s
    dq = tl.load(dq_rows + tl.arange(0, 128)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    slope = softmax_scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_tangent = tl.zeros([BLOCK_M], tl.float32)
    center = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    dacc = tl.zeros([BLOCK_M, 128], tl.float32)

    # The whole tiles.
    for tile in tl.range(0, tl.minimum(visible_hi, whole_tiles), num_stages=STAGES):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # S = Q K^T, dS = dQ K^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        if tile >= full_hi:
            visible = q_pos[:, None] >= kv_index[None, :]
            s = tl.where(visible, s, float("-inf"))
            ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        # S = Q K^T, dS = dQ K^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        visible = (kv_index[None, :] < seqlen_k) & (q_pos[:, None] >= kv_index[None, :])
        s = tl.where(visible, s, float("-inf"))
        ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([b, kv_start, hk, 0]), [BLOCK_N, 128])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])

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
    row_tangent *= normalize
    dout_rows = dout_ptr + b * stride_dout_b + h * stride_dout_h + q_index[:, None] * stride_dout_s
    dlse_rows = dlse_ptr + unit.to(tl.int64) * seqlen_q + q_index
    tl.store(dlse_rows, row_tangent, mask=q_index < seqlen_q)
    column = tl.arange(0, 128)
    dacc = (dacc - (row_tangent - center)[:, None] * acc) * normalize[:, None]
    tl.store(dout_rows + column[None, :], dacc.to(tl.bfloat16), mask=stored)
