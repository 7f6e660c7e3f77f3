"""The Hopper forward in CUDA of operands of 8 bits: that with warp roles, and a warp that transposes V on the way.

wgmma takes operands of 8 bits K-major alone (PTX ISA, "wgmma.mma_async"), and V, whose products sum over keys, lies in
memory as rows of keys. Registers of an accumulator are those of the next product's A after a permutation of keys within
groups of 16, which costs nothing where V has the same one (FlashAttention-3, arXiv 2407.08608, section 3.3).
"""

from __future__ import annotations

from functools import partial

from attngen.arch import Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.families.hopper_forward.alternatives import alternatives, tunable
from attngen.families.hopper_forward.candidates import Form
from attngen.families.hopper_forward.measured import measured_row
from attngen.families.hopper_forward.pipes import forward_pipes_of
from attngen.families.hopper_forward.schedule import plan_forward, serves
from attngen.parts.probabilities import Probabilities
from attngen.parts.promises import keep_promises
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec, Roles

#: e4m3 ends at 448 and has 3 bits of fraction down to 2^-6: the largest P is 2^4 when the row max is set, and may
#: grow until a lane's sum, and so each of its terms, could exceed 448. Where many are equal, the new row max leaves a
#: lane a sum of 2^6. They are e4m3 whatever q, k and v are.
PROBABILITIES = dict.fromkeys(QUANTIZED_DTYPES, Probabilities("448.0f", raise_above="4.0f", peak=4, lane_sum_log2=6))


def _check(spec: KernelSpec, roles: Roles, iteration: str) -> None:
    """Refuse what probabilities of 8 bits cannot do."""
    if spec.scale_block and LAYOUTS[spec.layout].key_access == "paged":
        raise refuse(
            spec, "descale", "keys in pages have a scale for each head here; allowed: head, or page with split_kv: true"
        )  # fmt: skip
    if spec.scale_block and spec.pack_gqa:
        raise refuse(spec, "pack_gqa", "rows of several heads have several scales; allowed: false, or descale: head")


FORM = Form(
    schedule="hopper_fp8",
    label="wgmma",
    check=_check,
    numbers=PROBABILITIES,
    capped_columns=256,  # docs/notebook/hopper_fp8.md, "Scores that cost less, windows that end with what is seen"
    transposes=True,
)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    return plan_forward(spec, arch, FORM)


SCHEDULE = Schedule(
    name="hopper_fp8",
    backend="cuda",
    direction="forward",
    template="cuda/hopper_forward/kernel.cu.j2",
    view="attngen.families.hopper_forward.view:cuda_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: spec.dtype in PROBABILITIES,
    plan=_plan,
    alternatives=plans_of(alternatives, _plan),
    tunable=tunable,
    measured_row=partial(measured_row, form=FORM),
    keep_promises=keep_promises,
    pipes=forward_pipes_of,
    layouts=("dense", "varlen", "paged"),
    explanation="attngen.families.hopper_forward.explain:explain",
    serves=serves(PROBABILITIES) | {
        **dict.fromkeys(("kv_dtype", "out_dtype", "transposed_v", "grouped_v", "scale_block"), ANY),
        "dropout": only(False, why="kernels in 8 bits have no dropout"),
    },
)  # fmt: skip
