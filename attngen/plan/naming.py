"""The only place that makes a kernel's name: file, symbol, cache label and log line are all this one string."""

from __future__ import annotations

_DIRECTIONS = {"forward": "fwd", "backward": "bwd"}


def head_dim_label(head_dim_qk: int, head_dim_v: int) -> str:
    """Return ``128`` or, where they differ, ``192x128``."""
    return str(head_dim_qk) if head_dim_qk == head_dim_v else f"{head_dim_qk}x{head_dim_v}"


def dtype_label(dtype: str, kv_dtype: str | None, out_dtype: str | None = None) -> str:
    """``bf16`` or, where k and v have another dtype, ``bf16_kv_fp8_e4m3``; an unusual dtype of the output is appended,
    as in ``fp8_e4m3_out_fp16``."""
    return "_".join([dtype, *(["kv", kv_dtype] if kv_dtype else []), *(["out", out_dtype] if out_dtype else [])])


def kernel_name(
    *,
    direction: str,
    arch: str,
    schedule: str,
    dtype: str,
    head_dim_qk: int,
    head_dim_v: int,
    variant: str,
    layout: str,
    tile_m: int,
    tile_n: int,
    stages: int,
    width: str,
    fast_math: bool,
    aligned: bool,
    tile_map: bool,
    choices: tuple[str, ...] = (),
) -> str:
    """Return the kernel's name, such as ``fwd_sm90a_tma_bf16_d128_causal_m64n64s3w4``.

    ``width`` says how many warps (``w4``) or consumer warpgroups (``c2``) share a tile. ``choices`` and others that
    differ from the default are appended: ``_varlen``, ``_paged``, ``_exactmath``, ``_unaligned``, ``_tilemap``.
    """
    parts = [
        _DIRECTIONS[direction],
        arch,
        schedule,
        dtype,
        f"d{head_dim_label(head_dim_qk, head_dim_v)}",
        variant,
        *([] if layout == "dense" else [layout]),
        f"m{tile_m}n{tile_n}s{stages}{width}",
        *([] if fast_math else ["exactmath"]),
        *([] if aligned else ["unaligned"]),
        *(["tilemap"] if tile_map else []),
        *choices,
    ]
    return "_".join(parts)


def append_name(*, arch: str, dtype: str, kv_dtype: str | None = None) -> str:
    """Return the name of the kernel that appends to caches, such as ``append_sm90a_bf16``; one that quantizes on the
    way names the dtype of the cache, too."""
    return f"append_{arch}_{dtype_label(dtype, kv_dtype)}"


def widen_name(*, arch: str, dtype: str) -> str:
    """Return the name of the kernel that widens caches, such as ``widen_sm90a_bf16``, by the dtype that it writes."""
    return f"widen_{arch}_{dtype}"


def topk_name(*, arch: str) -> str:
    """Name of the kernel that selects the largest scores of rows, such as ``topk_sm90a``."""
    return f"topk_{arch}"


def index_scores_name(*, arch: str, dtype: str, head_dim: int, variant: str, layout: str) -> str:
    """Name of the kernel that scores keys for an index, such as ``index_scores_sm90a_fp8_e4m3_d128_causal_paged``."""
    parts = ["index_scores", arch, dtype, f"d{head_dim}", variant, *([] if layout == "dense" else [layout])]
    return "_".join(parts)


def quantize_name(*, arch: str, dtype: str, head_dim: int = 0) -> str:
    """Return the name of the kernel that quantizes, such as ``quantize_sm90a_bf16``, by the dtype that it reads;
    one of a single head dim says so: ``quantize_sm90a_bf16_d128``."""
    return f"quantize_{arch}_{dtype}" + (f"_d{head_dim}" if head_dim else "")


def gradient_label(tile_m: int, tile_n: int, stages: int, warps: int) -> str:
    """Tile, stages and warps of a backward kernel: ``m64n128s2w8``."""
    return f"m{tile_m}n{tile_n}s{stages}w{warps}"


def launch_name(backward: str, launch: str) -> str:
    """Return the symbol of one launch of a backward, such as ``bwd_…_dq``."""
    return f"{backward}_{launch}"


def classifier_name(kernel: str) -> str:
    """Return the name of the kernel that computes the tile map for ``kernel``."""
    return f"classify_{kernel}"
