"""The forward in which a call lists the keys of each query by index: the split-KV forward by mma.sync, whose loaders
gather the listed rows of K and V by cp.async.

A work item is one query with its heads that share a KV head: gathering their rows binds, not the products.
"""

from __future__ import annotations

from attngen.arch import Arch
from attngen.dtypes import KEY_VALUE_DTYPES
from attngen.errors import PlanError
from attngen.families.decode.pipes import decode_pipes_of
from attngen.families.decode.schedule import split_kv_refusal, split_plan
from attngen.parts.promises import keep_promises
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule
from attngen.schema.kernel_spec import KernelSpec


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    return split_plan(spec, arch, schedule="mma_indexed", label="mmaindexed", loads="pointer", cluster=1)


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    if spec.dtype not in KEY_VALUE_DTYPES or spec.kv_dtype is not None:
        dtypes = f"{spec.dtype} with a cache in {spec.kv_dtype}" if spec.kv_dtype else spec.dtype
        return refuse(spec, "dtype", f"keys by index have kernels in {' and '.join(KEY_VALUE_DTYPES)}, not {dtypes}")
    if spec.loads == "descriptor":
        return refuse(spec, "loads", "keys by index are gathered by address; allowed: pointer")
    if spec.alignment not in (None, 16):
        return refuse(spec, "alignment", f"cp.async copies 16 bytes, which need alignment 16, not {spec.alignment}")
    return split_kv_refusal(spec)


SCHEDULE = Schedule(
    name="mma_indexed",
    backend="cuda",
    direction="forward",
    template="cuda/decode/kernel.cu.j2",
    view="attngen.families.latent.indexed_view:mma_indexed_view",
    supports=lambda arch: not arch.tensor_memory,
    plan=_plan,
    keep_promises=keep_promises,
    pipes=decode_pipes_of,
    layouts=tuple(LAYOUTS),
    listed_keys=True,
    split_kv=True,
)
