"""jvp_sm90a_tma_bf16_d64_allowed_varlen_m128n32s2w8_m128n32s2w8_tilemap

Attention jvp, variant allowed: mask `allowed[b, q, kv]`.
Rendered by `attngen build tests/render/others.yaml`, schedule triton_jvp.

With tangents dQ, dK, dV of Q, K and V, dS = (dQ K^T + Q dK^T) score' scale and P = exp(S - max) give in one pass over
the keys O = P V, D = rowsum(P dS) and dO = P dV + (P (dS - c)) V, all divided by rowsum(P) in the end. Then D is the
tangent of the log-sum-exp, and dO - (D - c) O that of O, whatever number c is: that of a row is the mean of dS over the
first tile that it sees, so that little cancels of what P (dS - c) loses when it is rounded.
"""

import triton
import triton.language as tl

BLOCK_M = tl.constexpr(128)  # query rows of a tile of the map
BLOCK_N = tl.constexpr(32)  # its keys
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
def count_bits(word):
    """Return the number of set bits of an int32."""
    x = word.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def jvp_sm90a_tma_bf16_d64_allowed_varlen_m128n32s2w8_m128n32s2w8_tilemap(
    q_ptr, dq_ptr,
    k_desc, dk_desc, v_desc, dv_desc,
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    tile_map_ptr, u_allowed,
    stride_q_s, stride_q_h,
    stride_dq_s, stride_dq_h,
    stride_out_s, stride_out_h,
    stride_dout_s, stride_dout_h,
    stride_tile_map_b, stride_tile_map_h, stride_tile_map_q,
    stride_u_allowed_0, stride_u_allowed_1,
    extent_u_allowed_0, extent_u_allowed_1, extent_u_allowed_2,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, max_seqlen_q, max_seqlen_k, total_q, total_k,
    words,
    softmax_scale,
    write_lse, has_seqused_k,
):
    """Compute O and its tangent from tangents of q, k and v."""
    BLOCK_M: tl.constexpr = 128  # query rows of a block
    BLOCK_N: tl.constexpr = 32  # keys of one step
    STAGES: tl.constexpr = 2  # tiles of K, V and their tangents in flight

    # Rows and head of the block. `heads_in_l2` heads run side by side, the longest query tiles first.
    unit, q_tile = schedule_tile(tl.program_id(0), q_tiles, batch * heads, heads_in_l2)
    b = unit // heads
    h = unit % heads
    hk = h // group
    q_begin = tl.load(cu_seqlens_q_ptr + b)
    k_begin = tl.load(cu_seqlens_k_ptr + b)
    seqlen_q = tl.load(cu_seqlens_q_ptr + b + 1) - q_begin
    seqlen_k = tl.load(cu_seqlens_k_ptr + b + 1) - k_begin
    if has_seqused_k != 0:
        seqlen_k = tl.load(seqused_k_ptr + b)
    q_start = q_tile * BLOCK_M
    if q_start >= seqlen_q:
        return
    q_index = q_start + tl.arange(0, BLOCK_M)
    q_row = tl.minimum(q_index, seqlen_q - 1)  # rows beyond the end repeat the last one; they are not stored
    scale_log2e = softmax_scale * LOG2E

    # Keys: tiles that some row sees, and among them those that every row sees whole.
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    visible_hi = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    visible_lo = 0
    tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q
    ragged_tiles = (visible_hi > whole_tiles).to(tl.int32)

    # State of a block: Q and dQ, and for each query the running max, the row sum, D, the center of its dS, O and dO.
    q_rows = q_ptr + h * stride_q_h + (q_begin + q_index)[:, None] * stride_q_s
    q = tl.load(q_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dq_rows = dq_ptr + h * stride_dq_h + (q_begin + q_index)[:, None] * stride_dq_s
    dq = tl.load(dq_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    u_allowed_b = u_allowed + b.to(tl.int64) * stride_u_allowed_0
    slope = softmax_scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_tangent = tl.zeros([BLOCK_M], tl.float32)
    center = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 64], tl.float32)
    dacc = tl.zeros([BLOCK_M, 64], tl.float32)

    # The whole tiles, 32 at a time.
    for word in tl.range(visible_lo // 32, tl.cdiv(tl.minimum(visible_hi, whole_tiles), 32), num_stages=1):
        partial_word = tl.load(tile_map + words + word)
        visible_word = tl.load(tile_map + word) | partial_word
        visible_count = count_bits(visible_word)
        for _ in tl.range(0, visible_count, num_stages=STAGES):
            index = lowest_bit(visible_word)
            visible_word &= visible_word - 1
            tile = word * 32 + index
            kv_start = tile * BLOCK_N
            kv_index = kv_start + tl.arange(0, BLOCK_N)
            k = tl.reshape(k_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            dk = tl.reshape(dk_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            # S = Q K^T, dS = dQ K^T + Q dK^T
            s = tl.dot(q, tl.trans(k))
            ds = tl.dot(dq, tl.trans(k))
            ds = tl.dot(q, tl.trans(dk), ds)
            if ((partial_word >> index) & 1) != 0:
                u_allowed_q_kv = tl.load(
                    u_allowed_b + q_row[:, None].to(tl.int64) * stride_u_allowed_1 + kv_index[None, :].to(tl.int64),
                ) != 0
                visible = u_allowed_q_kv
                s = tl.where(visible, s, float("-inf"))
                ds = tl.where(visible, ds, 0.0)
            p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
            dp = p * (ds * slope)
            row_tangent = row_tangent * alpha + tl.sum(dp, 1)
            # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
            center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
            dp -= p * center[:, None]
            v = tl.reshape(v_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            dv = tl.reshape(dv_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            # O = alpha O + P V, dO = alpha dO + P (dS - center) V + P dV
            acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
            dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])
            dacc = tl.dot(p.to(tl.bfloat16), dv, dacc)

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        dk = tl.reshape(dk_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        # S = Q K^T, dS = dQ K^T + Q dK^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        ds = tl.dot(q, tl.trans(dk), ds)
        u_allowed_q_kv = tl.load(
            u_allowed_b + q_row[:, None].to(tl.int64) * stride_u_allowed_1 + kv_index[None, :].to(tl.int64),
            mask=kv_index[None, :] < extent_u_allowed_2,
            other=0,
        ) != 0
        visible = (kv_index[None, :] < seqlen_k) & (u_allowed_q_kv)
        s = tl.where(visible, s, float("-inf"))
        ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        dv = tl.reshape(dv_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        dv = tl.where(kv_index[:, None] < seqlen_k, dv, 0.0)
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V + P dV
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])
        dacc = tl.dot(p.to(tl.bfloat16), dv, dacc)

    # A row that saw no key gives 0 and -inf.
    dead = row_sum == 0.0
    normalize = tl.where(dead, 0.0, 1.0 / row_sum)
    stored = q_index[:, None] < seqlen_q
    out_rows = out_ptr + h * stride_out_h + (q_begin + q_index)[:, None] * stride_out_s
    column = tl.arange(0, 64)
    out = (acc * normalize[:, None]).to(tl.bfloat16)
    tl.store(out_rows + column[None, :], out, mask=stored)
    if write_lse != 0:
        lse = tl.where(dead, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
        tl.store(lse_ptr + h.to(tl.int64) * total_q + q_begin + q_index, lse, mask=q_index < seqlen_q)
    row_tangent *= normalize
    dout_rows = dout_ptr + h * stride_dout_h + (q_begin + q_index)[:, None] * stride_dout_s
    dlse_rows = dlse_ptr + h.to(tl.int64) * total_q + q_begin + q_index
    tl.store(dlse_rows, row_tangent, mask=q_index < seqlen_q)
    column = tl.arange(0, 64)
    dacc = (dacc - (row_tangent - center)[:, None] * acc) * normalize[:, None]
    tl.store(dout_rows + column[None, :], dacc.to(tl.bfloat16), mask=stored)


@triton.jit
def jvp_sm90a_tma_bf16_d64_allowed_varlen_m128n32s2w8_m128n32s2w8_tilemap_q(
    q_ptr, dq_ptr,
    k_desc, v_desc,
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    tile_map_ptr, u_allowed,
    stride_q_s, stride_q_h,
    stride_dq_s, stride_dq_h,
    stride_out_s, stride_out_h,
    stride_dout_s, stride_dout_h,
    stride_tile_map_b, stride_tile_map_h, stride_tile_map_q,
    stride_u_allowed_0, stride_u_allowed_1,
    extent_u_allowed_0, extent_u_allowed_1, extent_u_allowed_2,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, max_seqlen_q, max_seqlen_k, total_q, total_k,
    words,
    softmax_scale,
    write_lse, has_seqused_k,
):
    """Compute O and its tangent from a tangent of q alone."""
    BLOCK_M: tl.constexpr = 128  # query rows of a block
    BLOCK_N: tl.constexpr = 32  # keys of one step
    STAGES: tl.constexpr = 2  # K/V tiles in flight

    # Rows and head of the block. `heads_in_l2` heads run side by side, the longest query tiles first.
    unit, q_tile = schedule_tile(tl.program_id(0), q_tiles, batch * heads, heads_in_l2)
    b = unit // heads
    h = unit % heads
    hk = h // group
    q_begin = tl.load(cu_seqlens_q_ptr + b)
    k_begin = tl.load(cu_seqlens_k_ptr + b)
    seqlen_q = tl.load(cu_seqlens_q_ptr + b + 1) - q_begin
    seqlen_k = tl.load(cu_seqlens_k_ptr + b + 1) - k_begin
    if has_seqused_k != 0:
        seqlen_k = tl.load(seqused_k_ptr + b)
    q_start = q_tile * BLOCK_M
    if q_start >= seqlen_q:
        return
    q_index = q_start + tl.arange(0, BLOCK_M)
    q_row = tl.minimum(q_index, seqlen_q - 1)  # rows beyond the end repeat the last one; they are not stored
    scale_log2e = softmax_scale * LOG2E

    # Keys: tiles that some row sees, and among them those that every row sees whole.
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    visible_hi = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    visible_lo = 0
    tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q
    ragged_tiles = (visible_hi > whole_tiles).to(tl.int32)

    # State of a block: Q and dQ, and for each query the running max, the row sum, D, the center of its dS, O and dO.
    q_rows = q_ptr + h * stride_q_h + (q_begin + q_index)[:, None] * stride_q_s
    q = tl.load(q_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    dq_rows = dq_ptr + h * stride_dq_h + (q_begin + q_index)[:, None] * stride_dq_s
    dq = tl.load(dq_rows + tl.arange(0, 64)[None, :], mask=(q_index[:, None] < seqlen_q), other=0.0)
    u_allowed_b = u_allowed + b.to(tl.int64) * stride_u_allowed_0
    slope = softmax_scale
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_tangent = tl.zeros([BLOCK_M], tl.float32)
    center = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 64], tl.float32)
    dacc = tl.zeros([BLOCK_M, 64], tl.float32)

    # The whole tiles, 32 at a time.
    for word in tl.range(visible_lo // 32, tl.cdiv(tl.minimum(visible_hi, whole_tiles), 32), num_stages=1):
        partial_word = tl.load(tile_map + words + word)
        visible_word = tl.load(tile_map + word) | partial_word
        visible_count = count_bits(visible_word)
        for _ in tl.range(0, visible_count, num_stages=STAGES):
            index = lowest_bit(visible_word)
            visible_word &= visible_word - 1
            tile = word * 32 + index
            kv_start = tile * BLOCK_N
            kv_index = kv_start + tl.arange(0, BLOCK_N)
            k = tl.reshape(k_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            # S = Q K^T, dS = dQ K^T
            s = tl.dot(q, tl.trans(k))
            ds = tl.dot(dq, tl.trans(k))
            if ((partial_word >> index) & 1) != 0:
                u_allowed_q_kv = tl.load(
                    u_allowed_b + q_row[:, None].to(tl.int64) * stride_u_allowed_1 + kv_index[None, :].to(tl.int64),
                ) != 0
                visible = u_allowed_q_kv
                s = tl.where(visible, s, float("-inf"))
                ds = tl.where(visible, ds, 0.0)
            p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
            dp = p * (ds * slope)
            row_tangent = row_tangent * alpha + tl.sum(dp, 1)
            # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
            center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
            dp -= p * center[:, None]
            v = tl.reshape(v_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
            # O = alpha O + P V, dO = alpha dO + P (dS - center) V
            acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
            dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])

    # The ragged last tile. Keys after the end must not count, and V there must be 0, since 0 * NaN is NaN.
    for tile in tl.range(whole_tiles, whole_tiles + ragged_tiles, num_stages=1):
        kv_start = tile * BLOCK_N
        kv_index = kv_start + tl.arange(0, BLOCK_N)
        k = tl.reshape(k_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        # S = Q K^T, dS = dQ K^T
        s = tl.dot(q, tl.trans(k))
        ds = tl.dot(dq, tl.trans(k))
        u_allowed_q_kv = tl.load(
            u_allowed_b + q_row[:, None].to(tl.int64) * stride_u_allowed_1 + kv_index[None, :].to(tl.int64),
            mask=kv_index[None, :] < extent_u_allowed_2,
            other=0,
        ) != 0
        visible = (kv_index[None, :] < seqlen_k) & (u_allowed_q_kv)
        s = tl.where(visible, s, float("-inf"))
        ds = tl.where(visible, ds, 0.0)
        p, alpha, row_max, row_sum = online_softmax(s, scale_log2e, row_max, row_sum)
        dp = p * (ds * slope)
        row_tangent = row_tangent * alpha + tl.sum(dp, 1)
        # alpha is 0 where nothing accumulated yet: there the mean of dS becomes the center
        center = tl.where(alpha == 0.0, row_tangent / tl.maximum(row_sum, 1.0), center)
        dp -= p * center[:, None]
        v = tl.reshape(v_desc.load([k_begin + kv_start, hk, 0]), [BLOCK_N, 64])
        v = tl.where(kv_index[:, None] < seqlen_k, v, 0.0)
        # O = alpha O + P V, dO = alpha dO + P (dS - center) V
        acc = tl.dot(p.to(tl.bfloat16), v, acc * alpha[:, None])
        dacc = tl.dot(dp.to(tl.bfloat16), v, dacc * alpha[:, None])

    # A row that saw no key gives 0 and -inf.
    dead = row_sum == 0.0
    normalize = tl.where(dead, 0.0, 1.0 / row_sum)
    stored = q_index[:, None] < seqlen_q
    out_rows = out_ptr + h * stride_out_h + (q_begin + q_index)[:, None] * stride_out_s
    column = tl.arange(0, 64)
    out = (acc * normalize[:, None]).to(tl.bfloat16)
    tl.store(out_rows + column[None, :], out, mask=stored)
    if write_lse != 0:
        lse = tl.where(dead, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
        tl.store(lse_ptr + h.to(tl.int64) * total_q + q_begin + q_index, lse, mask=q_index < seqlen_q)
    row_tangent *= normalize
    dout_rows = dout_ptr + h * stride_dout_h + (q_begin + q_index)[:, None] * stride_dout_s
    dlse_rows = dlse_ptr + h.to(tl.int64) * total_q + q_begin + q_index
    tl.store(dlse_rows, row_tangent, mask=q_index < seqlen_q)
    column = tl.arange(0, 64)
    dacc = (dacc - (row_tangent - center)[:, None] * acc) * normalize[:, None]
    tl.store(dout_rows + column[None, :], dacc.to(tl.bfloat16), mask=stored)


@triton.jit
def classify_jvp_sm90a_tma_bf16_d64_allowed_varlen_m128n32s2w8_m128n32s2w8_tilemap(
    tile_map_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, u_allowed,
    stride_tile_map_b, stride_tile_map_h, stride_tile_map_q,
    stride_u_allowed_0, stride_u_allowed_1,
    extent_u_allowed_0, extent_u_allowed_1, extent_u_allowed_2,
    batch, heads, kv_heads, group, heads_in_l2, q_tiles, max_seqlen_q, max_seqlen_k, total_q, total_k,
    words, map_heads,
    has_seqused_k,
):
    """Write 32 tiles of the tile map: one bit each for "every row sees all of it" and for "some row sees some of it"."""
    block = tl.program_id(0)
    word = block % words
    q_tile = block // words % q_tiles
    h = block // words // q_tiles % map_heads
    b = block // words // q_tiles // map_heads
    hk = h // group
    q_begin = tl.load(cu_seqlens_q_ptr + b)
    k_begin = tl.load(cu_seqlens_k_ptr + b)
    seqlen_q = tl.load(cu_seqlens_q_ptr + b + 1) - q_begin
    seqlen_k = tl.load(cu_seqlens_k_ptr + b + 1) - k_begin
    if has_seqused_k != 0:
        seqlen_k = tl.load(seqused_k_ptr + b)
    q_start = q_tile * BLOCK_M
    q_index = q_start + tl.arange(0, BLOCK_M)
    q_row = tl.minimum(q_index, seqlen_q - 1)
    kv_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    whole_tiles = seqlen_k // BLOCK_N
    visible_hi = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    visible_lo = 0
    u_allowed_b = u_allowed + b.to(tl.int64) * stride_u_allowed_0
    full_word = word * 0
    partial_word = word * 0
    last = tl.minimum(visible_hi, whole_tiles)
    for tile in tl.range(tl.maximum(word * 32, visible_lo), tl.minimum(word * 32 + 32, last)):
        kv_index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        u_allowed_q_kv = tl.load(
            u_allowed_b + q_row[:, None].to(tl.int64) * stride_u_allowed_1 + kv_index[None, :].to(tl.int64),
        ) != 0
        visible = u_allowed_q_kv
        # Rows beyond the last query see nothing and ask for nothing; a mask of rows alone becomes one of pairs.
        inside = (q_index[:, None] < seqlen_q) & (kv_index[None, :] < seqlen_k)
        seen = tl.sum((inside & visible).to(tl.int32))
        bit = 1 << (tile - word * 32)
        rows = tl.minimum(seqlen_q - q_start, BLOCK_M)
        full_word |= tl.where(seen == rows * BLOCK_N, bit, 0)
        partial_word |= tl.where((seen > 0) & (seen < rows * BLOCK_N), bit, 0)
    entry = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q
    tl.store(entry + word, full_word)
    tl.store(entry + words + word, partial_word)
