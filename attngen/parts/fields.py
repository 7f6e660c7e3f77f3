"""Fields of specs and variants that kernels of several families serve alike (``Schedule.serves``)."""

from __future__ import annotations

from attngen.lang.listed import LISTS
from attngen.plan.served import ANY, ServedValues, only

#: Of all attention: any mask and sink, and functions that are approximated or not.
MASKS: dict[str, ServedValues] = {
    "softmax_scale": only(None, why="the scale is an argument of the call"),
    "sink_in_lse": only(True, why="only forward kernels with 'v: key' leave a sink out of the log-sum-exp"),
    **dict.fromkeys(("mask", "sink", "fast_math"), ANY),
}

#: Of kernels with any score, which give the same bits for the same inputs where a spec asks for that.
ATTENTION = MASKS | dict.fromkeys(("score", "deterministic"), ANY)

#: Loads by TMA, by cp.async, and by cp.async of listed keys.
DESCRIPTORS = {
    "loads": only(None, "descriptor", why="cuda kernels load through tensor descriptors"),
    "alignment": only(None, 16, why="tensor descriptors need alignment 16"),
}
ADDRESSES = {
    "loads": only(None, "pointer", why="cuda kernels by mma.sync load by cp.async"),
    "alignment": only(None, 16, why="cp.async copies 16 bytes, which need alignment 16"),
}
LISTED = ADDRESSES | {"loads": only(None, "pointer", why="keys by index are gathered by address")}

#: Kernels that classify tiles themselves.
CLASSIFIED = {"tile_map": only("auto", "never", why="these kernels classify tiles themselves")}

#: Forward kernels whose persistent blocks share the keys of rows of several heads.
SHARED_KEYS = ATTENTION | CLASSIFIED | {
    **dict.fromkeys(
        ("tile_m", "tile_n", "stages", "num_warps", "roles"),
        only(None, why="these kernels have one tile, and roles of their own"),
    ),
    **dict.fromkeys(("persistent", "pack_gqa"), only(None, True, why="blocks share the keys of all heads of a group")),
    **dict.fromkeys(("order", "epilogue"), only(None, why="these kernels leave no choice of it")),
    "dropout": only(False, why="dropout shares random numbers among rows of one head, and here rows belong to several"),
    "max_logits": ANY,
}  # fmt: skip

#: A softmax that is always lazy, and one that is always exact.
LAZY = {"softmax": only(None, "lazy", why="these kernels have a lazy row max")}
EXACT = {"softmax": only(None, "exact_max", why="these kernels have the row max of each step")}

#: Backward kernels that fuse the argument of exp2.
FUSED = {"fast_math": only(True, why="the argument of exp2 is fused in cuda kernels, and in Triton's it is not")}

#: Keys that calls list of one cache.
ONE_CACHE = only(
    None,
    *(keys for keys, lists in LISTS.items() if not lists.extra),
    why="only forward kernels with 'v: key' read two caches",
)
