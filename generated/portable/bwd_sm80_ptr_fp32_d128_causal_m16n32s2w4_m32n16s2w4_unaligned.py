"""bwd_sm80_ptr_fp32_d128_causal_m16n32s2w4_m32n16s2w4_unaligned

Attention backward, variant causal: mask `q_pos >= kv`.
Rendered by `attngen build specs/portable.yaml`, schedule triton_backward.

P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D) score', dV = P^T dO, dQ = dS K and
dK = dS^T Q, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def schedule_tile(block, q_tiles, units, heads_in_l2):
    """Return (unit, q_tile) of a block: `heads_in_l2` units (batch x head) share L2, longest tiles first."""
    units_before = block // (heads_in_l2 * q_tiles) * heads_in_l2
    width = tl.minimum(heads_in_l2, units - units_before)
    rest = block - units_before * q_tiles
    return units_before + rest % width, q_tiles - 1 - rest // width


@triton.jit
def bwd_sm80_ptr_fp32_d128_causal_m16n32s2w4_m32n16s2w4_unaligned_preprocess(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr,
    stride_out_b, stride_out_s, stride_out_h,
    stride_dout_b, stride_dout_s, stride_dout_h,
    heads, rows, row_tiles,
    has_dlse,
):
    """Write D = rowsum(dO * O) - dLSE, and the log-sum-exp in units of log2, of each query row."""
    BLOCK_M: tl.constexpr = 64  # query rows of a block
    block = tl.program_id(0)
    h = block % heads
    row_tile = block // heads % row_tiles
    b = block // heads // row_tiles
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    stored = row < rows
    out_rows = out_ptr + b * stride_out_b + h * stride_out_h + row[:, None] * stride_out_s
    dout_rows = dout_ptr + b * stride_dout_b + h * stride_dout_h + row[:, None] * stride_dout_s
    delta = tl.zeros([BLOCK_M], tl.float32)
    column = tl.arange(0, 64)
    out = tl.load(out_rows + column[None, :], mask=stored[:, None], other=0.0)
    dout = tl.load(dout_rows + column[None, :], mask=stored[:, None], other=0.0)
    delta += tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    column = 64 + tl.arange(0, 64)
    out = tl.load(out_rows + column[None, :], mask=stored[:, None], other=0.0)
    dout = tl.load(dout_rows + column[None, :], mask=stored[:, None], other=0.0)
    delta += tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    entry = (b * heads + h).to(tl.int64) * rows + row
    if has_dlse != 0:
        delta -= tl.load(dlse_ptr + entry, mask=stored, other=0.0)
    lse = tl.load(lse_ptr + entry, mask=stored, other=0.0)

    # A row that sees no key: +inf makes each of its probabilities 0.
    dead = lse == float("-inf")
    tl.store(lse_log2_ptr + entry, tl.where(dead, float("inf"), lse * LOG2E), mask=stored)
    tl.store(delta_ptr + entry, tl.where(dead, 0.0, delta), mask=stored)


@triton.jit
def bwd_sm80_ptr_fp32_d128_causal_m16n32s2w4_m32n16s2w4_unaligned_dkdv(
    q_ptr, dout_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, lse_log2_ptr, delta_ptr, seqused_k_ptr,
    stride_q_b, stride_q_s, stride_q_h,
    stride_dout_b, stride_dout_s, stride_dout_h,
    stride_k_b, stride_k_s, stride_k_h,
    stride_v_b, stride_v_s, stride_v_h,
    stride_dk_b, stride_dk_s, stride_dk_h,
    stride_dv_b, stride_dv_s, stride_dv_h,
    batch, heads, kv_heads, group, heads_in_l2, kv_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
    has_seqused_k,
):
    """Compute dK and dV of a tile of keys, from the queries of all heads that share it."""
    BLOCK_M: tl.constexpr = 16  # query rows of one step
    BLOCK_N: tl.constexpr = 32  # keys of a block
    STAGES: tl.constexpr = 2  # Q and dO tiles in flight

    # Keys and KV head of the block. `heads_in_l2` heads run side by side, the first keys first: most queries see them.
    unit, kv_tile = schedule_tile(tl.program_id(0), kv_tiles, batch * kv_heads, heads_in_l2)
    kv_tile = kv_tiles - 1 - kv_tile
    b = unit // kv_heads
    hk = unit % kv_heads
    keys = seqlen_k  # all have gradients, though only the used ones are seen
    if has_seqused_k != 0:
        seqlen_k = tl.load(seqused_k_ptr + b)
    kv_start = kv_tile * BLOCK_N
    kv_index = kv_start + tl.arange(0, BLOCK_N)
    kv_row = tl.minimum(kv_index, seqlen_k - 1)  # keys beyond the end repeat the last one; they are not stored
    scale_log2e = softmax_scale * LOG2E

    # State of a block: its keys and values, and their gradients.
    k_rows = k_ptr + b * stride_k_b + hk * stride_k_h + kv_index[:, None] * stride_k_s
    k_0 = tl.load(k_rows + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    k_1 = tl.load(k_rows + 64 + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    v_rows = v_ptr + b * stride_v_b + hk * stride_v_h + kv_index[:, None] * stride_v_s
    v_0 = tl.load(v_rows + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    v_1 = tl.load(v_rows + 64 + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    dk_0 = tl.zeros([BLOCK_N, 64], tl.float32)
    dk_1 = tl.zeros([BLOCK_N, 64], tl.float32)
    dv_0 = tl.zeros([BLOCK_N, 64], tl.float32)
    dv_1 = tl.zeros([BLOCK_N, 64], tl.float32)

    # Queries: tiles of which some row sees some key, and the full ones, of which every row sees every key.
    q_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    whole_tiles = seqlen_q // BLOCK_M
    kv_hi = tl.maximum(tl.minimum(kv_start + BLOCK_N, seqlen_k) - 1, kv_start)
    u_seqlen_q_minus_seqlen_k = seqlen_q - seqlen_k
    visible_lo = tl.maximum(u_seqlen_q_minus_seqlen_k + kv_start, 0) // BLOCK_M
    visible_hi = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    full_lo = (tl.maximum(u_seqlen_q_minus_seqlen_k + kv_hi, 0) + BLOCK_M - 1) // BLOCK_M

    inner_heads = (kv_start < seqlen_k).to(tl.int32) * group  # no query sees keys after the used ones

    # The same tiles for each head of the group: one loop, since accumulators that pass from loop to loop cost registers.
    visits = tl.maximum(visible_hi - visible_lo, 0)
    for visit in tl.range(0, inner_heads * visits, num_stages=STAGES):
        h = hk * group + visit // tl.maximum(visits, 1)
        tile = visible_lo + visit % tl.maximum(visits, 1)
        lse_rows = lse_log2_ptr + (b * heads + h).to(tl.int64) * seqlen_q
        delta_rows = delta_ptr + (b * heads + h).to(tl.int64) * seqlen_q
        q_head = q_ptr + b * stride_q_b + h * stride_q_h
        dout_head = dout_ptr + b * stride_dout_b + h * stride_dout_h

        q_start = tile * BLOCK_M
        q_index = q_start + tl.arange(0, BLOCK_M)
        q_0 = tl.load(q_head + q_index[:, None] * stride_q_s + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        q_1 = tl.load(q_head + q_index[:, None] * stride_q_s + 64 + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        # S^T = K Q^T
        s = tl.dot(k_0, tl.trans(q_0), input_precision="tf32x3")
        s = tl.dot(k_1, tl.trans(q_1), s, input_precision="tf32x3")
        if (tile < full_lo) | (tile >= whole_tiles):
            q_pos = q_index + (seqlen_k - seqlen_q)
            visible = (q_index[None, :] < seqlen_q) & (q_pos[None, :] >= kv_row[:, None])
            s = tl.where(visible, s, float("-inf"))
        dout_0 = tl.load(dout_head + q_index[:, None] * stride_dout_s + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        dout_1 = tl.load(dout_head + q_index[:, None] * stride_dout_s + 64 + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        # dP^T = V dO^T
        dp = tl.dot(v_0, tl.trans(dout_0), input_precision="tf32x3")
        dp = tl.dot(v_1, tl.trans(dout_1), dp, input_precision="tf32x3")
        lse_log2 = tl.load(lse_rows + q_start + tl.arange(0, BLOCK_M), mask=tl.arange(0, BLOCK_M) < seqlen_q - q_start, other=0.0)
        delta = tl.load(delta_rows + q_start + tl.arange(0, BLOCK_M), mask=tl.arange(0, BLOCK_M) < seqlen_q - q_start, other=0.0)
        p = tl.exp2(s * scale_log2e - lse_log2[None, :])
        ds = p * (dp - delta[None, :])
        # dV += P^T dO, dK += dS^T Q
        dv_0 = tl.dot(p.to(tl.float32), dout_0, dv_0, input_precision="tf32x3")
        dv_1 = tl.dot(p.to(tl.float32), dout_1, dv_1, input_precision="tf32x3")
        dk_0 = tl.dot(ds.to(tl.float32), q_0, dk_0, input_precision="tf32x3")
        dk_1 = tl.dot(ds.to(tl.float32), q_1, dk_1, input_precision="tf32x3")

    dk_rows = dk_ptr + b * stride_dk_b + hk * stride_dk_h + kv_index[:, None] * stride_dk_s
    dv_rows = dv_ptr + b * stride_dv_b + hk * stride_dv_h + kv_index[:, None] * stride_dv_s
    stored = kv_index[:, None] < keys
    used = kv_index[:, None] < seqlen_k
    column = tl.arange(0, 64)
    dk_0 = tl.where(used, dk_0 * softmax_scale, 0.0).to(tl.float32)
    tl.store(dk_rows + column[None, :], dk_0, mask=stored)
    column = 64 + tl.arange(0, 64)
    dk_1 = tl.where(used, dk_1 * softmax_scale, 0.0).to(tl.float32)
    tl.store(dk_rows + column[None, :], dk_1, mask=stored)
    column = tl.arange(0, 64)
    dv_0 = tl.where(used, dv_0, 0.0).to(tl.float32)
    tl.store(dv_rows + column[None, :], dv_0, mask=stored)
    column = 64 + tl.arange(0, 64)
    dv_1 = tl.where(used, dv_1, 0.0).to(tl.float32)
    tl.store(dv_rows + column[None, :], dv_1, mask=stored)


@triton.jit
def bwd_sm80_ptr_fp32_d128_causal_m16n32s2w4_m32n16s2w4_unaligned_dq(
    q_ptr, dout_ptr, k_ptr, v_ptr, dq_ptr, lse_log2_ptr, delta_ptr, seqused_k_ptr,
    stride_q_b, stride_q_s, stride_q_h,
    stride_dout_b, stride_dout_s, stride_dout_h,
    stride_k_b, stride_k_s, stride_k_h,
    stride_v_b, stride_v_s, stride_v_h,
    stride_dq_b, stride_dq_s, stride_dq_h,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, seqlen_q, seqlen_k, total_q, total_k,
    softmax_scale,
    has_seqused_k,
):
    """Compute dQ of a tile of queries."""
    BLOCK_M: tl.constexpr = 32  # query rows of a block
    BLOCK_N: tl.constexpr = 16  # keys of one step
    STAGES: tl.constexpr = 2  # K and V tiles in flight

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

    # State of a block: its queries and the gradients of their outputs, the sums of their rows, and dQ.
    q_rows = q_ptr + b * stride_q_b + h * stride_q_h + q_index[:, None] * stride_q_s
    q_0 = tl.load(q_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    q_1 = tl.load(q_rows + 64 + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dout_rows = dout_ptr + b * stride_dout_b + h * stride_dout_h + q_index[:, None] * stride_dout_s
    dout_0 = tl.load(dout_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dout_1 = tl.load(dout_rows + 64 + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    entry = unit.to(tl.int64) * seqlen_q + q_index
    lse_log2 = tl.load(lse_log2_ptr + entry, mask=q_index < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + entry, mask=q_index < seqlen_q, other=0.0)
    k_head = k_ptr + b * stride_k_b + hk * stride_k_h
    v_head = v_ptr + b * stride_v_b + hk * stride_v_h
    dq_0 = tl.zeros([BLOCK_M, 64], tl.float32)
    dq_1 = tl.zeros([BLOCK_M, 64], tl.float32)
    for tile in tl.range(0, visible_hi, num_stages=STAGES):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k_0 = tl.load(k_head + kv_index[:, None] * stride_k_s + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        k_1 = tl.load(k_head + kv_index[:, None] * stride_k_s + 64 + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        # S = Q K^T
        s = tl.dot(q_0, tl.trans(k_0), input_precision="tf32x3")
        s = tl.dot(q_1, tl.trans(k_1), s, input_precision="tf32x3")
        if tile >= full_hi:
            visible = (kv_index[None, :] < seqlen_k) & (q_pos[:, None] >= kv_index[None, :])
            s = tl.where(visible, s, float("-inf"))
        v_0 = tl.load(v_head + kv_index[:, None] * stride_v_s + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        v_1 = tl.load(v_head + kv_index[:, None] * stride_v_s + 64 + tl.arange(0, 64)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        # dP = dO V^T
        dp = tl.dot(dout_0, tl.trans(v_0), input_precision="tf32x3")
        dp = tl.dot(dout_1, tl.trans(v_1), dp, input_precision="tf32x3")
        p = tl.exp2(s * scale_log2e - lse_log2[:, None])
        ds = p * (dp - delta[:, None])
        # dQ += dS K
        dq_0 = tl.dot(ds.to(tl.float32), k_0, dq_0, input_precision="tf32x3")
        dq_1 = tl.dot(ds.to(tl.float32), k_1, dq_1, input_precision="tf32x3")

    dq_rows = dq_ptr + b * stride_dq_b + h * stride_dq_h + q_index[:, None] * stride_dq_s
    stored = q_index[:, None] < seqlen_q
    column = tl.arange(0, 64)
    dq_0 = (dq_0 * softmax_scale).to(tl.float32)
    tl.store(dq_rows + column[None, :], dq_0, mask=stored)
    column = 64 + tl.arange(0, 64)
    dq_1 = (dq_1 * softmax_scale).to(tl.float32)
    tl.store(dq_rows + column[None, :], dq_1, mask=stored)
