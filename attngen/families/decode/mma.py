"""The split-KV forward for cards without wgmma: that of Hopper without clusters, and with cp.async instead of TMA."""

from __future__ import annotations

from attngen.arch import ARCHES, Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import PlanError
from attngen.families.decode.pipes import decode_pipes_of
from attngen.families.decode.schedule import SPLIT, split_plan
from attngen.parts.fields import ADDRESSES
from attngen.parts.promises import keep_promises
from attngen.plan.choices import is_beyond_256, refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec

#: First compute capability whose cvt converts e4m3 to fp16. PTX ISA, "cvt": .f16x2.e4m3x2 needs sm_89.
_CONVERTS = 89


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec, arch):
        raise refused
    return split_plan(spec, arch, schedule="mma_decode", label="mmadecode", loads="pointer", cluster=1)


def _refusal(spec: KernelSpec, arch: Arch) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    quantized = {spec.dtype, spec.kv_dtype or spec.dtype} & set(QUANTIZED_DTYPES)
    if quantized and arch.capability < _CONVERTS:
        return refuse(spec, "kv_dtype", f"{arch.name} does not convert numbers of 8 bits; leave it out")
    if quantized and any(head_dim % 16 for head_dim in (spec.head_dim_qk, spec.head_dim_v)):
        return refuse(spec, "head_dim", "cp.async copies 16 bytes, so 8-bit head dims are multiples of 16 here")
    return None


SCHEDULE = Schedule(
    name="mma_decode",
    backend="cuda",
    direction="forward",
    template="cuda/decode/kernel.cu.j2",
    view="attngen.families.decode.view:decode_view",
    supports=lambda arch: not arch.tensor_memory,
    suits=lambda spec: (not ARCHES[spec.arch].wgmma or spec.loads == "pointer") and not is_beyond_256(spec),
    plan=_plan,
    keep_promises=keep_promises,
    pipes=decode_pipes_of,
    layouts=tuple(LAYOUTS),
    split_kv=True,
    serves=SPLIT | ADDRESSES | {
        "scale_block": only(0, why="kernels by mma.sync take a scale of each head"),
        **dict.fromkeys(("num_warps", "stages"), ANY),
    },
)  # fmt: skip
