"""What the tests of races share: clocks, peers, a report by hand, and the form of its document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attngen.lang.variant import Variant
from attngen.tools.bench import peers as bench_peers
from attngen.tools.bench.cases import BenchCase, bench_cases
from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.peers import Tensors
from attngen.tools.bench.report import BenchReport, Result, Row
from attngen.tools.bench.timing import Contestant, Timing
from attngen.tools.bench.workloads import Terms, Workload, workload

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: 32, dtype: fp16, layout: [dense, varlen], backend: triton}
  - {variant: causal, head_dim: 32, dtype: fp16, tile: {m: 16, n: 16}, backend: triton}
  - {variant: causal, head_dim: 32, dtype: fp16, arch: sm80}
  - {variant: [full, alibi], head_dim: {qk: 32, v: 16}, dtype: fp16, backend: triton}
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
    """Every mark is 20 milliseconds after the one before, so that samples are of two calls."""

    def mark(self) -> float:
        self.gpu += 20.0
        return self.gpu


def racing(
    variant: Variant, name: str, seqlen: int, dtype: torch.dtype = torch.float16
) -> tuple[Workload, list[Tensors]]:
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

        calls = [lambda one=one: attend(one) for one in inputs]
        return Contestant(self.name, calls, leaves=[one.bshd for one in inputs])


def attended(one: Tensors, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2).float() for t in one.bshd)
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


def backward_report() -> BenchReport:
    """As ``report``, in both directions; ours takes 8 MiB where its bound is 9."""
    forward = report()
    rows = []
    for row in forward.rows:
        results = [
            replace(each, workspace=2**23, workspace_bound=9 * 2**20 if each.ours else None)
            for each in row.results
            if each.contestant != "flash"
        ]
        rows.append(replace(row, case=replace(row.case, direction="backward"), results=tuple(results)))
    return replace(forward, rows=(*forward.rows, *rows))


NUMBER, TEXT, SIZE = {"type": ["number", "null"]}, {"type": ["string", "null"]}, {"type": "integer", "minimum": 1}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these entries."""
    return {
        "type": "object", "required": list(properties), "additionalProperties": False, "properties": properties,
    }  # fmt: skip


def _each(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _map(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


def _or_none(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


#: The document that ``attngen bench --json`` writes.
SCHEMA = _object(
    format={"const": 2},
    spec={"type": "string"}, package={"type": "string"}, ok={"type": "boolean"}, stopped=TEXT,
    gpu={"type": ["object", "null"]}, versions=_map(TEXT),
    ceilings=_or_none(_object(matrix_tflops=NUMBER, copy_gbps=NUMBER)),
    rounds=NUMBER, seed=NUMBER,
    rows=_each(_object(
        name={"type": "string"}, suite={"enum": ["grid", "variants"]}, direction={"enum": ["forward", "backward"]},
        variant={"type": "string"},
        dtype={"type": "string"}, head_dim_qk=SIZE, head_dim_v=SIZE, batch=SIZE, seqlen=SIZE, heads=SIZE,
        kv_heads=SIZE, visible_pairs=NUMBER, flops=NUMBER, input_sets=NUMBER,
        gpu=_or_none(_object(sm_mhz=NUMBER, watts=NUMBER, celsius=NUMBER)),
        best_peer=TEXT, ratios=_map({"type": "number"}), to_causal=_map({"type": "number"}),
        results=_each(_object(
            contestant={"type": "string"}, kernel=TEXT,
            status={"enum": ["measured", "planned", "unsupported", "failed"]}, reason=TEXT,
            tflops=NUMBER, relative_error=NUMBER, milliseconds=NUMBER, samples=_each({"type": "number"}),
            host_microseconds=NUMBER, host_bound={"type": ["boolean", "null"]},
            workspace_bytes=NUMBER, workspace_bound_bytes=NUMBER,
        )),
    )),
    means=_each(_object(of={"type": "string"}, ratios=_map(NUMBER), least=_map(NUMBER), cases=_map(SIZE))),
    left_out=_map({"type": "string"}),
    ladders=_each(_object(
        kernel={"type": "string"},
        rungs=_each(_object(
            name={"type": "string"}, kernel=TEXT, entry=_each({"type": "string"}), changed=_each({"type": "string"}),
            refusal=TEXT, registers=NUMBER, consumer_registers=NUMBER, shared_memory=NUMBER,
        )),
        cases=_each(_object(
            name={"type": "string"},
            rungs=_each(_object(name={"type": "string"}, tflops=NUMBER, to_previous=NUMBER, to_last=NUMBER)),
        )),
    )),
)  # fmt: skip


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no peer but FlexAttention be there."""

    def version(name: str) -> str:
        raise bench_peers.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bench_peers.metadata, "version", version)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
