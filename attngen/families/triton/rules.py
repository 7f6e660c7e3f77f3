"""Rules of all Triton schedules: what they do not support, and how they load."""

from __future__ import annotations

from attngen.arch import Arch
from attngen.dtypes import PLAIN_DTYPES
from attngen.lang.runs import positions
from attngen.plan.choices import check_head_dims, refuse
from attngen.schema.kernel_spec import KernelSpec

#: Labels of the loads in kernel names.
LABELS = {"descriptor": "tma", "pointer": "ptr"}


def loads_of(spec: KernelSpec, arch: Arch) -> str:
    """Loads of a kernel, through descriptors if possible; PlanError for what Triton kernels do not support."""
    if spec.dtype not in PLAIN_DTYPES:
        raise refuse(spec, "dtype", f"Triton kernels take {', '.join(PLAIN_DTYPES)}, not {spec.dtype}")
    if spec.softmax is not None and not spec.variant.has_lse:
        raise refuse(spec, "softmax", f"'weights: {spec.variant.weights}' keeps no row max; leave it out")
    if spec.softmax not in (None, "exact_max"):
        raise refuse(spec, "softmax", f"'{spec.softmax}' does not exist in Triton kernels; allowed: exact_max")
    if spec.roles:
        raise refuse(spec, "warps", "Triton kernels have no roles; give a count")
    if spec.softmax_scale is not None:
        raise refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    if spec.persistent:
        raise refuse(spec, "persistent", "Triton kernels are not persistent; allowed: false")
    if spec.order == "natural":
        raise refuse(spec, "order", "Triton kernels begin with the longest tiles; allowed: longest_first")
    if spec.epilogue == "staged":
        raise refuse(spec, "epilogue", "Triton kernels store from registers; allowed: direct")
    if spec.pack_gqa:
        raise refuse(spec, "pack_gqa", "Triton kernels give each query head tiles of its own; allowed: false")
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
