"""Rules of all Triton schedules: what they do not support, and how they load."""

from __future__ import annotations

from attngen.arch import Arch
from attngen.dtypes import PLAIN_DTYPES
from attngen.lang.runs import positions
from attngen.parts.fields import ATTENTION
from attngen.plan.choices import check_head_dims, refuse
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec

#: What all Triton kernels serve.
TRITON = {
    "dtype": only(*PLAIN_DTYPES, why=f"Triton kernels take {', '.join(PLAIN_DTYPES)}"),
    **ATTENTION,
    "weights": only("softmax", "sigmoid", why="other weights do not exist in Triton kernels"),
    **dict.fromkeys(("loads", "alignment", "tile_map", "dropout"), ANY),
}

#: What forward kernels in Triton serve.
TRITON_FORWARD = TRITON | {
    "softmax": only(None, "exact_max", why="other kinds do not exist in Triton kernels"),
    "roles": only(None, why="Triton kernels have no roles; give a count"),
    "persistent": only(None, False, why="Triton kernels are not persistent"),
    "order": only(None, "longest_first", why="Triton kernels begin with the longest tiles"),
    "epilogue": only(None, "direct", why="Triton kernels store from registers"),
    "pack_gqa": only(None, False, why="Triton kernels give each query head tiles of its own"),
    **dict.fromkeys(("tile_m", "tile_n", "stages", "num_warps", "max_logits"), ANY),
}

#: Labels of the loads in kernel names.
LABELS = {"descriptor": "tma", "pointer": "ptr"}


def loads_of(spec: KernelSpec, arch: Arch) -> str:
    """Loads of a kernel, through descriptors if possible; PlanError for what Triton kernels do not support."""
    if spec.softmax is not None and not spec.variant.has_lse:
        raise refuse(spec, "softmax", f"'weights: {spec.variant.weights}' keeps no row max; leave it out")
    if spec.variant.dropout and positions(spec.variant) is not None:
        raise refuse(spec, "dropout", "Triton kernels draw random numbers by row, and here rows have other positions")
    check_head_dims(spec)
    if spec.loads == "pointer":
        return "pointer"
    reason = None
    if spec.alignment not in (None, 16):
        reason = f"descriptors need alignment 16, not {spec.alignment}"
    elif not arch.descriptors:
        reason = f"{arch.name} has no tensor descriptors; use loads: pointer"
    if reason is None:
        return "descriptor"
    if spec.loads == "descriptor":
        raise refuse(spec, "loads", reason)
    return "pointer"


def alignment_of(spec: KernelSpec, element_bytes: int) -> int:
    """Return the bytes that pointers and strides must be multiples of."""
    if spec.alignment not in (None, 16, element_bytes):
        raise refuse(spec, "alignment", f"{spec.alignment} is not allowed; allowed: 16, {element_bytes} (one element)")
    return spec.alignment or 16
