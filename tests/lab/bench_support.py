"""Clocks, peers, a stand-in for a GPU, a report by hand, and the form of its document, for tests of benchmarks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attngen.build.pipeline import BuiltKernel, Failure, Prepared
from attngen.errors import CompileError
from attngen.lab.bench import kernels as bench_kernels
from attngen.lab.bench import peers as bench_peers
from attngen.lab.bench import runner
from attngen.lab.bench.cases import BenchCase, bench_cases
from attngen.lab.bench.grid import GridReport, GridResult, GridRow, measure
from attngen.lab.bench.kernels import Team
from attngen.lab.bench.machine import Ceilings, Reading
from attngen.lab.bench.peers import Tensors
from attngen.lab.bench.timing import Contender, Timing
from attngen.lab.bench.workloads import Terms, Workload, workload
from attngen.lab.verify.gpu import Gpu
from attngen.lab.verify.interpreter import kernel_of
from attngen.lang.variant import Variant

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

    def hold(self, milliseconds: float) -> None:
        self.gpu += milliseconds


class TickClock(FakeClock):
    """Every mark is 20 milliseconds after the one before, so that samples are of two calls."""

    def mark(self) -> float:
        self.gpu += 20.0
        return self.gpu


class FakeMonitor:
    """A card whose state never changes."""

    def __init__(self, gpu: Gpu) -> None:
        pass

    def __enter__(self) -> FakeMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def since(self, moment: float) -> Reading:
        return Reading(1500.0, 690.0, 60.0)

    def within(self, spans: Sequence[tuple[float, float]]) -> Reading:
        assert spans
        return Reading(1500.0, 600.0, 60.0)


def replayed(calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], Any], Any]:
    """As a CUDA graph: replays write where the captured calls wrote."""
    result = [call() for call in calls][-1]

    def replay() -> None:
        for call in calls:
            out = call()
        result.copy_(out)

    return replay, result


def compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch, refused: str = "no such kernel") -> None:
    """Stand in for a GPU of sm90 whose calls the CPU computes; kernels named after ``refused`` do not compile."""
    plans: dict[str, Any] = {}

    def compile_kernels(prepared: Sequence[Prepared], **_: Any) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
        plans.update({kernel.plan.name: kernel.plan for kernel in prepared})
        wrong = tuple(Failure(name, CompileError(f"{name}: no")) for name in plans if refused in name)
        return {name: BuiltKernel(name, name, "built", {}) for name in plans if refused not in name}, wrong

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Gpu, "current", lambda: Gpu(torch.device("cpu"), 90, "a stand-in"))
    monkeypatch.setattr(Gpu, "answers", lambda self: True)
    monkeypatch.setattr(bench_kernels, "compile_kernels", compile_kernels)
    monkeypatch.setattr(bench_kernels, "read_kernel", lambda folder: kernel_of(plans[folder.name]))
    monkeypatch.setattr(runner, "gpu_facts", lambda gpu: {"name": gpu.name, "l2_bytes": 1})
    monkeypatch.setattr(runner, "ceilings", lambda gpu, clock, rounds: Ceilings(750.0, 4300.0))
    monkeypatch.setattr(runner, "cuda_graph", replayed)
    monkeypatch.setattr(runner, "CudaClock", TickClock)
    monkeypatch.setattr(runner, "Monitor", FakeMonitor)


def bench_on_cpu(rounds: int = 3, **fields: Any) -> runner.Bench:
    """The rules of a small benchmark on the CPU."""
    rules = {
        "device": torch.device("cpu"), "l2_bytes": 1, "clock": TickClock(), "capture": replayed,
        "generator": torch.Generator().manual_seed(5), "order": random.Random(5),
    }  # fmt: skip
    return runner.Bench(rounds=rounds, **{**rules, **fields})


def measured(
    team: Team, case: BenchCase, *peers: Any, errors: Mapping[str, str] | None = None, taken: bool = False,
    **rules: Any,
) -> tuple[dict[str, GridResult], GridRow]:  # fmt: skip
    """Measure a case on the CPU: results by contender, and the row. With ``errors`` no kernel compiled."""
    members = () if errors else (*team.members.values(), *team.forward_kernels)
    kernels = {one.plan.name: kernel_of(one.plan) for one in members}
    with torch.no_grad():
        row = measure(bench_on_cpu(**rules), team, case, kernels, errors or {}, peers, taken=taken)
    return {one.contender: one for one in row.results}, row


def workload_of(
    variant: Variant, name: str, seqlen: int, dtype: torch.dtype = torch.float16
) -> tuple[Workload, list[Tensors]]:
    """A small case of a variant, and two sets of inputs."""
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

    def enter(self, work: Workload, terms: Terms, inputs: Sequence[Tensors]) -> Contender:
        def attend(one: Tensors) -> torch.Tensor:
            return self.change(attended(one, causal=terms.flags is not None and terms.flags.causal))

        calls = [lambda one=one: attend(one) for one in inputs]
        return Contender(self.name, calls, leaves=[one.bshd for one in inputs])


def attended(one: Tensors, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2).float() for t in one.bshd)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).to(one.q.dtype)


def shown(ends: torch.Tensor, seqlen: int) -> torch.Tensor:
    """The pairs of intervals by their ends, (heads, ends, queries): bools (heads, queries, keys)."""
    kv = torch.arange(seqlen)
    passed = (kv >= ends.transpose(1, 2)[..., None]).sum(-2)  # ends up to a key
    return passed % 2 == 0


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, bias: torch.Tensor | float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of (batch, heads, seqlen, head_dim) in plain torch; the bools of pairs are broadcast."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    logits = torch.where(seen, q @ k.mT / q.shape[-1] ** 0.5 + bias, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    return torch.softmax(logits, -1).nan_to_num(nan=0.0)[..., : k.shape[2]] @ v


class StubCudnn:
    """The functions of cuDNN's frontend in plain torch."""

    @staticmethod
    def sdpa_torch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, window_left: int,
        sinks: torch.Tensor | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        seen = (row >= column) | torch.tensor(not is_causal)
        if window_left >= 0:
            seen = seen & (row - column < window_left)
        out = masked(q, k, v, seen, sinks=sinks)
        return (out, None) if return_lse else out

    @staticmethod
    def create_mask_plan(
        ends: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, build_backward: bool
    ) -> torch.Tensor:
        batch, seqlen, heads = q.shape[:3]
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends.shape[0] in (1, heads)
        assert ends.shape[2] == batch * seqlen
        return shown(ends, k.shape[1]).unflatten(1, (batch, seqlen)).transpose(0, 1)

    @staticmethod
    def flex_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask_plan: torch.Tensor) -> torch.Tensor:
        return masked(*(each.transpose(1, 2) for each in (q, k, v)), mask_plan).transpose(1, 2)

    @staticmethod
    def block_sparse_attention_forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor, *, q2k_block_nums: torch.Tensor,
        sparse_block_size: int,
    ) -> Any:  # fmt: skip
        return masked(q, k, v, of_lists(lists, q2k_block_nums, sparse_block_size, q.shape[2])), None

    @staticmethod
    def block_sparse_attention_backward(
        dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: None,
        lists: torch.Tensor, **options: Any,
    ) -> Any:  # fmt: skip
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        with torch.enable_grad():
            again, _ = StubCudnn.block_sparse_attention_forward(*leaves, lists, **options)
        return torch.autograd.grad(again, leaves, dout)


def of_lists(lists: torch.Tensor, counts: torch.Tensor, block: int, seqlen: int) -> torch.Tensor:
    """The pairs of lists of key blocks: bools (1, heads, seqlen, seqlen)."""
    assert lists.dtype == counts.dtype == torch.int32
    valid = torch.arange(lists.shape[-1]) < counts[..., None]
    chosen = torch.zeros(lists.shape, dtype=torch.bool).scatter_(-1, lists.long(), valid)
    return chosen.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :seqlen, :seqlen]


def result(name: str, tflops: float | None, *, own: bool = False, **fields: Any) -> GridResult:
    timing = None if tflops is None else Timing((1e3 / tflops, 2e3 / tflops, 1.5e3 / tflops), 12.0, True)
    status = "unsupported" if tflops is None else "measured"
    fields = {"status": status, "timing": timing, "flops": 1.5e12, "error": 1e-3, "peer": not own, **fields}
    return GridResult(name, "fwd_kernel" if own else None, **fields)


def report(**fields: Any) -> GridReport:
    """Two groups: causal over three lengths and beside the variants, and alibi, which one kernel does not take."""
    rows = []
    speeds = [(400, 300, 600, 500), (500, 400, 550, 450), (600, 400, 480, None), (610, 305, 671, None)]
    for case, (flash, flex, cuda, triton) in zip(bench_cases("causal", "bf16", 128, 128), speeds, strict=True):
        results = (
            result("flash", flash), result("flex", flex), result("attngen cuda", cuda, own=True),
            result("attngen triton", triton, own=True, reason=None if triton else "needs more"),
        )  # fmt: skip
        rows.append(GridRow(results=results, case=case, pairs=1e9, input_sets=1, reading=Reading(1500.0, 690.0, 60.0)))
    (alibi,) = bench_cases("alibi", "bf16", 128, 128)
    results = (
        result("flash", None, reason="knows no ALiBi"), result("flex", 250), result("attngen cuda", 500, own=True)
    )  # fmt: skip
    rows.append(GridRow(results=results, case=alibi, pairs=1e9, input_sets=1))
    facts: dict[str, Any] = {
        "gpu": {"name": "a card"}, "versions": {"torch": "2.11.0", "fa3-fwd": None}, "rounds": 3, "seed": 7,
        "ceilings": Ceilings(750.0, 4300.0), "left_out": {"fwd_varlen": "only dense calls are measured"},
    }  # fmt: skip
    return GridReport(**{"spec": "mine.yaml", "package": "mine", "rows": tuple(rows), **facts, **fields})


def backward_report() -> GridReport:
    """As ``report``, in both directions; attngen takes 8 MiB where its bound is 9."""
    forward = report()
    rows = []
    for row in forward.rows:
        results = [
            replace(each, workspace=2**23, workspace_bound=None if each.peer else 9 * 2**20)
            for each in row.results
            if each.contender != "flash"
        ]
        rows.append(replace(row, case=replace(row.case, direction="backward"), results=tuple(results)))
    return replace(forward, rows=(*forward.rows, *rows))


NUMBER, TEXT, SIZE = {"type": ["number", "null"]}, {"type": ["string", "null"]}, {"type": "integer", "minimum": 1}


def _object(**properties: Any) -> dict[str, Any]:
    """Schema of an object with exactly these entries."""
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
            contender={"type": "string"}, kernel=TEXT,
            status={"enum": ["measured", "planned", "unsupported", "failed"]}, reason=TEXT,
            tflops=NUMBER, relative_error=NUMBER, milliseconds=NUMBER, samples=_each({"type": "number"}),
            host_microseconds=NUMBER, host_bound={"type": ["boolean", "null"]},
            workspace_bytes=NUMBER, workspace_bound_bytes=NUMBER, joules_per_tflop=NUMBER,
            gpu=_or_none(_object(sm_mhz=NUMBER, watts=NUMBER, celsius=NUMBER)),
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
            rungs=_each(_object(
                name={"type": "string"}, tflops=NUMBER, to_first=NUMBER, to_previous=NUMBER, to_last=NUMBER,
            )),
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
