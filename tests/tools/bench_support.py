"""What the tests of races share: clocks, peers, a report by hand, and the form of its document."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.errors import CallError, NoKernelError
from attngen.runtime.module import Kernel
from attngen.runtime.registry import registry
from attngen.spec import load_spec_text, preset
from attngen.tools import bench_kernels, bench_machine, bench_peers, bench_race
from attngen.tools.bench_cases import BenchCase, bench_cases
from attngen.tools.bench_check import Oracle
from attngen.tools.bench_kernels import Team, chosen, teams
from attngen.tools.bench_machine import Memory, Monitor, Reading, parse_reading
from attngen.tools.bench_peers import Peer, Tensors, reason_against
from attngen.tools.bench_race import Track, foresee
from attngen.tools.bench_report import Result
from attngen.tools.bench_timing import Contestant, race
from attngen.tools.bench_workloads import Terms, Workload, terms_of, workload
from attngen.tools.build import Prepared, prepare
from attngen.tools.interpreter import kernel_of

from tests.tools.x import y
SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: 32, dtype: fp16, layout: [dense, varlen]}
  - {variant: causal, head_dim: 32, dtype: fp16, tile: {m: 16, n: 16}}
  - {variant: causal, head_dim: 32, dtype: fp16, arch: sm80}
  - {variant: [full, alibi], head_dim: {qk: 32, v: 16}, dtype: fp16}
"""


@dataclass
class FakeClock:
    """Milliseconds of a GPU and of the host, moved by calls."""

    gpu: float = 0.0
    host: float = 0.0

    def mark(self) -> float:
        return self.gpu

    def milliseconds(self, start: float, end: float) -> float:
        return end - start

    def host_seconds(self) -> float:
        return self.host / 1e3


class TickClock(FakeClock):
    """Every mark is a millisecond after the one before."""

    def mark(self) -> float:
        self.gpu += 1.0
        return self.gpu


def racing(variant: Any, name: str, seqlen: int, dtype: torch.dtype = torch.float16) -> tuple[Workload, list[Tensors]]:
    case = BenchCase("variants", name, "fp16", 32, 16, 2, seqlen, 4, 2)
    shapes = ((4, 32), (2, 32), (2, 16))
    inputs = [Tensors(*(torch.randn(2, seqlen, *shape, dtype=dtype) for shape in shapes)) for _ in range(2)]
    return workload(variant, case, "cpu"), inputs


@dataclass
class StubPeer:
    """A library that does with the reference's output what a test asks for."""

    name: str
    change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    absent: str | None = None

    def missing(self) -> str | None:
        return self.absent

    def refuses(self, case: BenchCase, terms: Terms) -> str | None:
        return None if terms.flags is not None else "knows no such mask"

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contestant:
        def attend(one: Tensors) -> torch.Tensor:
            return self.change(attended(one, causal=terms.flags is not None and terms.flags.causal))

        return Contestant(self.name, [lambda one=one: attend(one) for one in inputs])


def attended(one: Tensors, causal: bool) -> torch.Tensor:
    q, k, v = (t.float() for t in one.heads_first)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).to(one.q.dtype)


def result(name: str, tflops: float | None, *, ours: bool = False, **fields: Any) -> Result:
    timing = None if tflops is None else Timing((1e3 / tflops, 2e3 / tflops, 1.5e3 / tflops), 12.0, True)
    status = "unsupported" if tflops is None else "measured"
    fields = {"status": status, "timing": timing, "tflops": tflops, "error": 1e-3, **fields}
    return Result(name, "fwd_kernel" if ours else None, **fields)


def report(**fields: Any) -> BenchReport:
    """Two groups: causal over three lengths and beside the variants, and alibi, which one kernel does not take."""
    rows = []
    speeds = [(400, 300, 600, 500), (500, 400, 550, 450), (600, 400, 480, None), (610, 305, 671, None)]
    for case, (flash, flex, cuda, triton) in zip(bench_cases("causal", "bf16", 128, 128), speeds, strict=True):
        rows.append(Row(case, (result("flash", flash), result("flex", flex), result("attngen cuda", cuda, ours=True),
                               result("attngen triton", triton, ours=True, reason=None if triton else "needs more")),
                        1e9, 1, Reading(1500.0, 690.0, 60.0)))  # fmt: skip
    (alibi,) = bench_cases("alibi", "bf16", 128, 128)
    rows.append(Row(alibi, (result("flash", None, reason="knows no ALiBi"), result("flex", 250),
                            result("attngen cuda", 500, ours=True)), 1e9, 1))  # fmt: skip
    given: dict[str, Any] = {
        "gpu": {"name": "a card"}, "versions": {"torch": "2.11.0", "fa3-fwd": None}, "rounds": 3, "seed": 7,
        "ceilings": Ceilings(750.0, 4300.0), "left_out": {"fwd_varlen": "only dense calls are raced"},
    }  # fmt: skip
    return BenchReport("mine.yaml", "mine", tuple(rows), **{**given, **fields})


NUMBER, TEXT = {"type": ["number", "null"]}, {"type": ["string", "null"]}
SCHEMA = {
    "type": "object",
    "required": [
        "format", "spec", "package", "ok", "stopped", "gpu", "versions", "ceilings", "rounds", "seed", "rows", "means",
        "left_out",
    ],
    "properties": {
        "format": {"const": 1},
        "ceilings": {"type": ["object", "null"], "required": ["matrix_tflops", "copy_gbps"]},
        "versions": {"type": "object", "additionalProperties": TEXT},
        "left_out": {"type": "object", "additionalProperties": {"type": "string"}},
        "means": {"type": "array", "items": {"type": "object", "required": ["of", "ratios", "least", "cases"]}},
        "rows": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    **dict.fromkeys(("name", "variant", "dtype"), {"type": "string"}),
                    "suite": {"enum": ["grid", "variants"]},
                    **dict.fromkeys(
                        ("head_dim_qk", "head_dim_v", "batch", "seqlen", "heads", "kv_heads"),
                        {"type": "integer", "minimum": 1},
                    ),
                    **dict.fromkeys(("visible_pairs", "flops", "input_sets"), NUMBER),
                    "gpu": {"type": ["object", "null"], "required": ["sm_mhz", "watts", "celsius"]},
                    "best_peer": TEXT,
                    "ratios": {"type": "object", "additionalProperties": {"type": "number"}},
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "contestant": {"type": "string"},
                                "status": {"enum": ["measured", "planned", "unsupported", "failed"]},
                                **dict.fromkeys(("kernel", "reason"), TEXT),
                                **dict.fromkeys(
                                    ("tflops", "relative_error", "milliseconds", "host_microseconds"), NUMBER
                                ),
                                "samples": {"type": "array", "items": {"type": "number"}},
                                "host_bound": {"type": ["boolean", "null"]},
                            },
                        },
                    },
                },
            },
        },
    },
}  # fmt: skip
for _schema in (SCHEMA["properties"]["rows"]["items"], SCHEMA["properties"]["rows"]["items"]["properties"]["results"]["items"]):  # type: ignore[index]  # fmt: skip  # noqa: E501
    _schema["required"] = list(_schema["properties"])


