"""bwd_sm80_ptr_fp32_d16_full_m16n64s2w4_m64n16s2w4_unaligned

Attention backward, variant full: mask `True`.
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
def bwd_sm80_ptr_fp32_d16_full_m16n64s2w4_m64n16s2w4_unaligned_preprocess(
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
    column = tl.arange(0, 16)
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
def bwd_sm80_ptr_fp32_d16_full_m16n64s2w4_m64n16s2w4_unaligned_dkdv(
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
    BLOCK_N: tl.constexpr = 64  # keys of a block
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
    scale_log2e = softmax_scale * LOG2E

    # State of a block: its keys and values, and their gradients.
    k_rows = k_ptr + b * stride_k_b + hk * stride_k_h + kv_index[:, None] * stride_k_s
    k = tl.load(k_rows + tl.arange(0, 16)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    v_rows = v_ptr + b * stride_v_b + hk * stride_v_h + kv_index[:, None] * stride_v_s
    v = tl.load(v_rows + tl.arange(0, 16)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
    dk = tl.zeros([BLOCK_N, 16], tl.float32)
    dv = tl.zeros([BLOCK_N, 16], tl.float32)

    # Queries: tiles of which some row sees some key, and the full ones, of which every row sees every key.
    q_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    whole_tiles = seqlen_q // BLOCK_M
    visible_hi = (seqlen_q + BLOCK_M - 1) // BLOCK_M

    inner_heads = (kv_start < seqlen_k).to(tl.int32) * group  # no query sees keys after the used ones

    # The same tiles for each head of the group: one loop, since accumulators that pass from loop to loop cost registers.
    visits = tl.maximum(visible_hi, 0)
    for visit in tl.range(0, inner_heads * visits, num_stages=STAGES):
        h = hk * group + visit // tl.maximum(visits, 1)
        tile = visit % tl.maximum(visits, 1)
        lse_rows = lse_log2_ptr + (b * heads + h).to(tl.int64) * seqlen_q
        delta_rows = delta_ptr + (b * heads + h).to(tl.int64) * seqlen_q
        q_head = q_ptr + b * stride_q_b + h * stride_q_h
        dout_head = dout_ptr + b * stride_dout_b + h * stride_dout_h

        q_start = tile * BLOCK_M
        q_index = q_start + tl.arange(0, BLOCK_M)
        q = tl.load(q_head + q_index[:, None] * stride_q_s + tl.arange(0, 16)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        # S^T = K Q^T
        s = tl.dot(k, tl.trans(q), input_precision="tf32x3")
        if tile >= whole_tiles:
            visible = q_index[None, :] < seqlen_q
            s = tl.where(visible, s, float("-inf"))
        dout = tl.load(dout_head + q_index[:, None] * stride_dout_s + tl.arange(0, 16)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
        # dP^T = V dO^T
        dp = tl.dot(v, tl.trans(dout), input_precision="tf32x3")
        lse_log2 = tl.load(lse_rows + q_start + tl.arange(0, BLOCK_M), mask=tl.arange(0, BLOCK_M) < seqlen_q - q_start, other=0.0)
        delta = tl.load(delta_rows + q_start + tl.arange(0, BLOCK_M), mask=tl.arange(0, BLOCK_M) < seqlen_q - q_start, other=0.0)
        p = tl.exp2(s * scale_log2e - lse_log2[None, :])
        ds = p * (dp - delta[None, :])
        # dV += P^T dO, dK += dS^T Q
        dv = tl.dot(p.to(tl.float32), dout, dv, input_precision="tf32x3")
        dk = tl.dot(ds.to(tl.float32), q, dk, input_precision="tf32x3")

    dk_rows = dk_ptr + b * stride_dk_b + hk * stride_dk_h + kv_index[:, None] * stride_dk_s
    dv_rows = dv_ptr + b * stride_dv_b + hk * stride_dv_h + kv_index[:, None] * stride_dv_s
    stored = kv_index[:, None] < keys
    used = kv_index[:, None] < seqlen_k
    column = tl.arange(0, 16)
    dk = tl.where(used, dk * softmax_scale, 0.0).to(tl.float32)
    tl.store(dk_rows + column[None, :], dk, mask=stored)
    column = tl.arange(0, 16)
    dv = tl.where(used, dv, 0.0).to(tl.float32)
    tl.store(dv_rows + column[None, :], dv, mask=stored)


@triton.jit
def bwd_sm80_ptr_fp32_d16_full_m16n64s2w4_m64n16s2w4_unaligned_dq(
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
    BLOCK_M: tl.constexpr = 64  # query rows of a block
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
    scale_log2e = softmax_scale * LOG2E

    # Keys: tiles that some row sees, and among them those that every row sees whole.
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    visible_hi = (seqlen_k + BLOCK_N - 1) // BLOCK_N

    # State of a block: its queries and the gradients of their outputs, the sums of their rows, and dQ.
    q_rows = q_ptr + b * stride_q_b + h * stride_q_h + q_index[:, None] * stride_q_s
    q = tl.load(q_rows + tl.arange(0, 16)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dout_rows = dout_ptr + b * stride_dout_b + h * stride_dout_h + q_index[:, None] * stride_dout_s
    dout = tl.load(dout_rows + tl.arange(0, 16)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    entry = unit.to(tl.int64) * seqlen_q + q_index
    lse_log2 = tl.load(lse_log2_ptr + entry, mask=q_index < seqlen_q, other=float("inf"))
    delta = tl.load(delta_ptr + entry, mask=q_index < seqlen_q, other=0.0)
    k_head = k_ptr + b * stride_k_b + hk * stride_k_h
    v_head = v_ptr + b * stride_v_b + hk * stride_v_h
    dq = tl.zeros([BLOCK_M, 16], tl.float32)
    for tile in tl.range(0, visible_hi, num_stages=STAGES):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.load(k_head + kv_index[:, None] * stride_k_s + tl.arange(0, 16)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        # S = Q K^T
        s = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if tile >= whole_tiles:
            visible = kv_index[None, :] < seqlen_k
            s = tl.where(visible, s, float("-inf"))
        v = tl.load(v_head + kv_index[:, None] * stride_v_s + tl.arange(0, 16)[None, :], mask=(kv_index[:, None] < seqlen_k), other=0.0)
        # dP = dO V^T
        dp = tl.dot(dout, tl.trans(v), input_precision="tf32x3")
        p = tl.exp2(s * scale_log2e - lse_log2[:, None])
        ds = p * (dp - delta[:, None])
        # dQ += dS K
        dq = tl.dot(ds.to(tl.float32), k, dq, input_precision="tf32x3")

    dq_rows = dq_ptr + b * stride_dq_b + h * stride_dq_h + q_index[:, None] * stride_dq_s
    stored = q_index[:, None] < seqlen_q
    column = tl.arange(0, 16)
    dq = (dq * softmax_scale).to(tl.float32)
    tl.store(dq_rows + column[None, :], dq, mask=stored)
