"""The only place that makes a kernel's name: file, symbol, cache label and log line are all this one string."""

from __future__ import annotations

_DIRECTIONS = {"forward": "fwd", "backward": "bwd", "jvp": "jvp"}


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


def operation_name(direction: str, arch: str, *labels: str) -> str:
    """Return the name of a kernel that is not attention, such as ``append_sm90a_bf16``.

    ``labels`` tell the kernels of an operation apart: dtypes, a head dim, a variant, as in
    ``index_scores_sm90a_fp8_e4m3_d128_causal_paged``.
    """
    return "_".join([direction, arch, *labels])


def gradient_label(tile_m: int, tile_n: int, stages: int, warps: int) -> str:
    """Tile, stages and warps of one launch of several: ``m64n128s2w8``."""
    return f"m{tile_m}n{tile_n}s{stages}w{warps}"


def launch_name(kernel: str, launch: str) -> str:
    """Return the symbol of one launch of several, such as ``bwd_…_dq``."""
    return f"{kernel}_{launch}"


def classifier_name(kernel: str) -> str:
    """Return the name of the kernel that computes the tile map for ``kernel``."""
    return f"classify_{kernel}"
