"""Every option of the compilers, set explicitly, so that a default that changes with their version has no effect."""

from __future__ import annotations

from typing import Any

from attngen.arch import ARCHES


def triton_options(
    num_warps: int, stages: int, max_registers: int | None = None, *, fast_math: bool = True
) -> dict[str, Any]:
    """The options of a compile; hashed into the cache key.

    Names that the installed Triton does not know are left out by the compile.
    """
    return {
        "num_warps": num_warps,
        "num_stages": stages,
        "num_ctas": 1,
        "maxnreg": max_registers,
        # a * b + c in one rounding. Without it, logit - maximum is exactly 0 at the maximum, however large that is.
        "enable_fp_fusion": fast_math,
        "enable_reflect_ftz": True,
        "default_dot_input_precision": "ieee",
        # "" and False rather than None: Triton would take None as "read the environment", which it did at import
        "ptx_options": "",
        "instrumentation_mode": "",
        "debug": False,
        "sanitize_overflow": False,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "clc": False,
        "sched4reg": False,
    }


def nvrtc_options(arch: str) -> list[str]:
    """The options of NVRTC for an arch such as ``sm90a``; hashed into the cache key."""
    return [
        f"-arch={ARCHES[arch].target.replace('sm', 'sm_')}",
        "-std=c++20",
        "-default-device",
        "--ptxas-options=-v",  # registers, spills and warnings of ptxas go into the log
        "--no-cache",  # a cubin from the driver's cache comes without that log
    ]
