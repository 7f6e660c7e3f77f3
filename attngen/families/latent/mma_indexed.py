"""The forward in which a call lists the keys of each query by index: the split-KV forward by mma.sync, whose loaders
gather the listed rows of K and V by cp.async.

A work item is one query with its heads that share a KV head: gathering their rows binds, not the products.
"""

from __future__ import annotations

from attngen.arch import Arch
from attngen.dtypes import KEY_VALUE_DTYPES
from attngen.families.decode.pipes import decode_pipes_of
from attngen.families.decode.schedule import SPLIT, split_plan
from attngen.parts.fields import LISTED, ONE_CACHE
from attngen.parts.promises import keep_promises
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    return split_plan(spec, arch, schedule="mma_indexed", label="mmaindexed", loads="pointer", cluster=1)


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
    serves=SPLIT | LISTED | {
        "dtype": only(*KEY_VALUE_DTYPES, why=f"keys by index have kernels in {' and '.join(KEY_VALUE_DTYPES)}"),
        "kv_dtype": only(None, why="keys by index have no kernels of caches in fewer bits"),
        "keys": ONE_CACHE,
        **dict.fromkeys(("num_warps", "stages"), ANY),
    },
)  # fmt: skip
