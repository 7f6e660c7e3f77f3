"""Two small kernels in the form that a rendered source has: constants on top, jitted functions below."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)


@triton.jit
def descriptor_kernel(q, k, out, lse, stride, n, scale, flag):
    start = tl.program_id(0) * BLOCK
    q_tile = q.load([0, start, 0, 0]).reshape(BLOCK, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        k_tile = k.load([0, i, 0, 0]).reshape(BLOCK, BLOCK)
        s = tl.dot(q_tile, k_tile.T) * scale
        acc = tl.dot(s.to(k_tile.dtype), k_tile, acc)
    if flag:
        acc = acc * 2
    rows = start + tl.arange(0, BLOCK)
    tl.store(lse + rows, tl.max(acc, 1))
    tl.store(out + rows[:, None] * stride + tl.arange(0, BLOCK)[None, :], acc.to(tl.bfloat16))


@triton.jit
def pointer_kernel(x, out, n, scale):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=inside) * scale, mask=inside)


@triton.jit
def classify_kernel(out, n):
    tl.store(out + tl.program_id(0), n)


@triton.jit
def spilling_kernel(x, out):
    # 128 × 256 floats by 4 warps: 256 registers a thread, all that exist, and others beside.
    at = tl.arange(0, 128)[:, None] * 256 + tl.arange(0, 256)[None, :]
    a = tl.load(x + at)
    total = tl.sum(a, 1)
    tl.debug_barrier()
    tl.store(out + at, a * total[:, None])
