"""Compile a spec with a schedule from outside of attngen, the package ``one_row`` beside this script.

It plans, renders and compiles, which needs no GPU. On a GPU it also calls the kernels and compares them with the
float64 reference.

    python docs/examples/add_a_schedule.py --source
"""

from __future__ import annotations

import argparse

import torch
from one_row import SCHEDULE

import attngen
from attngen.plan import plan
from attngen.plan.schedules import with_schedule
from attngen.render import render
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from attngen.store.store import Store
from attngen.tools.build.pipeline import compile_kernels, prepare

SPEC = """
schema: 1
package: one_row
arch: [sm90a]
variants:
  window_alibi:
    mask: "0 <= q_pos - kv and q_pos - kv < window[h]"
    score: "s - 0.125 * (q_pos - kv)"
    tensors: {window: {dtype: int32, shape: [h], range: {min: 1, max: 65536}}}
kernels:
  - {variant: [causal, window_alibi], head_dim: [64, {qk: 40, v: 72}]}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", action="store_true", help="print the last kernel")
    options = parser.parse_args()
    store = Store()
    with with_schedule(SCHEDULE, before="hopper_forward"):  # asked before attngen's own
        spec = load_spec_text(SPEC)
        plans = [plan(kernel) for kernel in expand(spec)]
        assert {planned.schedule for planned in plans} == {"one_row"}
        source = render(plans[-1]).text
        built, failures = compile_kernels(prepare(spec), store=store, jobs=1)
    assert not failures, failures
    for name, kernel in built.items():
        print(name, kernel.key[:12])
    if options.source:
        print(source)
    call_on_gpu(store, [kernel.key for kernel in built.values()])


def call_on_gpu(store: Store, keys: list[str]) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("compiled; calls need a GPU of compute capability 9.0")
        return
    registry.add(package_of_kernels([read_kernel(store.path(key)) for key in keys], "one_row"))
    window = torch.tensor([3, 40, 40, 200], device="cuda", dtype=torch.int32)
    for dim_qk, dim_v in ((64, 64), (40, 72)):
        for rows, seqlen_k in ((1, 1), (5, 48), (130, 333), (7, 3)):
            q = torch.randn(2, rows, 4, dim_qk, device="cuda").bfloat16()
            k = torch.randn(2, seqlen_k, 2, dim_qk, device="cuda").bfloat16()
            v = torch.randn(2, seqlen_k, 2, dim_v, device="cuda").bfloat16()
            for variant, tensors in (("causal", {}), ("window_alibi", {"window": window})):
                call = {"variant": variant, "package": "one_row", "return_lse": True, **tensors}
                out, lse = attngen.attention(q, k, v, **call)
                wanted, wanted_lse = attngen.attention(q.double(), k.double(), v.double(), backend="reference", **call)
                torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-2)
                torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=0, atol=1e-4)
    print("the kernels agree with the float64 reference")


if __name__ == "__main__":
    main()
