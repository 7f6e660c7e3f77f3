"""Kernels that are compiled when a call first lacks them: planned, compiled, stored and found, without a GPU.

The compiles are real; the driver records what is launched instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.build.first_call import _Maker
from attngen.errors import CallError, NoKernelError
from attngen.packaging.vendor import runtime_files
from attngen.runtime.operations.attention import kernel_call
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec, load_spec_text
from attngen.store import Store
from tests.runtime.support import FakeDriver, kernel
from tests.sampling import few


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attngen.jit, "_maker", _Maker())
    monkeypatch.setattr(on_demand, "maker", None)


@pytest.fixture
def launched(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols that were loaded; nothing runs."""
    symbols: list[str] = []

    def load(image: bytes, symbol: str, *_: Any) -> Any:
        assert image[:4] == b"\x7fELF"
        symbols.append(symbol)
        return SimpleNamespace(symbol=symbol)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpu, "load", load)
    monkeypatch.setattr(gpu, "launch", lambda *_: None)
    return symbols


def tensors(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, 64, 2, head_dim, dtype=dtype)


def test_a_call_without_it_says_both_ways_out(gpu: FakeDriver) -> None:
    q = tensors()
    with pytest.raises(NoKernelError, match=r"(?s)attngen\.jit\(\), or ATTNGEN_JIT=1.*run 'attngen build'"):
        attngen.attention(q, q, q, variant="causal")
    assert not attngen.jit.on


@pytest.mark.parametrize("given", [{"on": "off"}, {"on": 1}, {"fast_math": None}])
def test_a_switch_is_true_or_false(given: dict[str, Any]) -> None:
    with pytest.raises(CallError, match=f"attngen.jit: {next(iter(given))} must be True or False, got"):
        attngen.jit(**given)
    assert not attngen.jit.on


@few("backward", [False, True], ids=["forward", "backward"])
def test_what_a_call_needs_is_compiled_once(
    launched: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, backward: bool
) -> None:
    made = attngen.variant("q_pos >= kv and kv % 2 == 0", name="even")
    q = tensors().requires_grad_(backward)
    with attngen.jit():
        out = attngen.attention(q, q, q, variant=made)
        assert attngen.explain(q, q, q, variant=made).runs == "kernel"
        if backward:
            out.sum().backward()
        attngen.attention(q.detach(), q.detach(), q.detach(), variant=made)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["attngen.jit:", "compiled"]] * (1 + backward)
    assert "fwd_sm90a" in lines[0]
    assert "bwd_sm90a" in lines[-1] or not backward
    assert lines[0].endswith(" s")
    assert "fwd_sm90a" in launched[0]
    assert any("bwd" in symbol for symbol in launched) == backward
    assert len(list((Store().root / "kernels").iterdir())) == 1 + backward
    # what this process compiled stays, another process finds it in the cache
    attngen.attention(q.detach(), q.detach(), q.detach(), variant=made)
    registry.clear()
    kernel_call.PREPARED.clear()
    with pytest.raises(NoKernelError):
        attngen.attention(q.detach(), q.detach(), q.detach(), variant=made)
    with attngen.jit():
        attngen.attention(q.detach(), q.detach(), q.detach(), variant=made)
    assert capsys.readouterr().err == ""
    attngen.jit.save(tmp_path / "mine.yaml")
    saved = load_spec(tmp_path / "mine.yaml")
    assert saved.variants["even"].variant.definition == made.value.definition
    assert [(k.direction, k.arch, k.head_dim_qk, k.dtype) for k in expand(saved)] == [
        (direction, "sm90a", 64, "bf16") for direction in ("forward", "backward")[: 1 + backward]
    ]


@pytest.mark.exhaustive
def test_a_kernel_without_approximations_keeps_its_backend(
    launched: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The kernel keeps the backend of the one with approximations, where that has one without."""
    made = attngen.variant("q_pos >= kv", "8.0 * tanh(s / 8.0)", name="capped")
    q = tensors()
    with attngen.jit(fast_math=False):
        attngen.attention(q, q, q, variant=made)
    assert attngen.jit._maker.fast_math
    assert re.search(r"fwd_sm90a_wgmma_bf16_d64_capped_\w+_exactmath", capsys.readouterr().err)
    attngen.jit.save(tmp_path / "mine.yaml")
    assert [k.fast_math for k in expand(load_spec(tmp_path / "mine.yaml")) if k.variant.name == "capped"] == [False]


class _Recorder:
    """Stands for the compiler: takes what it is asked for, and adds a kernel made by hand."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, *wanted: Any) -> None:
        for asked in wanted:
            self._take(asked)

    def _take(self, asked: Any) -> None:
        self.asked.append(asked)
        fields = {"dtype": asked.dtype, "head_dim": (asked.head_dim_qk, asked.head_dim_v), "layout": asked.layout,
                  "align": asked.alignment or 16, "direction": asked.direction}  # fmt: skip
        backend = asked.backend or "triton"
        registry.add_compiled(kernel(asked.variant, package="compiled_on_call", backend=backend, **fields))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, gpu: FakeDriver) -> list[Any]:
    recorder = _Recorder()
    monkeypatch.setattr(attngen.jit._maker, "_compile", recorder)
    return recorder.asked


def test_the_error_proposes_the_kernel_that_was_asked_for(asked: list[Any]) -> None:
    """For a preset, a name of a package that lacks the head_dim, and a value; dense, packed and in pages."""
    own = attngen.variant("q_pos > kv", name="own").value
    registry.add(package_of_kernels([kernel(own, package="mine")], "memory"))
    starts = torch.tensor([0, 64], dtype=torch.int32)
    table, used = torch.tensor([[0]], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    q, wide = tensors(), tensors(128, torch.float16)
    with attngen.jit():
        for variant in ("causal", "own", attngen.variant("q_pos >= kv + 1")):
            wanted = attngen.attention(wide, wide, wide, variant=variant, backend="reference")
            torch.testing.assert_close(attngen.attention(wide, wide, wide, variant=variant), wanted)
        attngen.attention(q, q, q, variant="own")  # is built
        attngen.attention_varlen(q[0], q[0], q[0], starts, starts, 64, 64, variant="causal")
        attngen.attention_paged(q, q, q, table, used, variant="causal")
        attngen.attention(q, q, q[..., :32], variant="causal", backend="triton")
        attngen.attention(tensors(65)[..., :64], q, q, variant="causal", backend="triton")
    assert [
        (a.variant.name, a.layout, a.dtype, a.head_dim_qk, a.head_dim_v, a.backend, a.alignment) for a in asked
    ] == [
        ("causal", "dense", "fp16", 128, 128, None, None),
        ("own", "dense", "fp16", 128, 128, None, None),
        ("custom", "dense", "fp16", 128, 128, None, None),
        ("causal", "varlen", "bf16", 64, 64, None, None),
        ("causal", "paged", "bf16", 64, 64, None, None),
        ("causal", "dense", "bf16", 64, 32, "triton", None),
        ("causal", "dense", "bf16", 64, 64, "triton", 2),
    ]


def test_explain_names_what_the_call_would_have_compiled(asked: list[Any]) -> None:
    q = tensors()
    assert attngen.explain(q, q, q, variant="causal").runs == "no kernel"
    with attngen.jit():
        for direction in ("forward", "backward"):
            explanation = attngen.explain(q, q, q, variant="causal", direction=direction)
            assert [each.direction for each in asked][-1] == direction
        assert attngen.explain(tensors(20), tensors(20), tensors(20), variant="causal").runs == "no kernel"
    assert explanation.call.variant.name == "causal"


@pytest.mark.exhaustive
def test_a_drop_in_misses_no_head_dim_and_no_mask(asked: list[Any]) -> None:
    """Eagerly, and in a compiled program."""
    from attngen.integrations.shared.choice import VariantCandidate, attend

    q = tensors(72)
    wanted = attngen.attention(q, q, q, variant="causal", backend="reference")
    with pytest.raises(NoKernelError):
        attend([VariantCandidate("causal")], q, q, q, spec="sdpa")
    with attngen.jit():
        torch.testing.assert_close(attend([VariantCandidate("causal")], q, q, q, spec="sdpa"), wanted)
        traced = torch.compile(lambda q: attend([VariantCandidate("causal")], q, q, q, spec="sdpa"), backend="eager")
        torch.testing.assert_close(traced(q), wanted)
    assert [each.head_dim_qk for each in asked] == [72]


def test_calls_that_no_spec_can_serve_are_refused_as_without_jit(asked: list[Any]) -> None:
    q = tensors(20)
    with attngen.jit(), pytest.raises(NoKernelError, match="No kernel can be built for head_dim 20"):
        attngen.attention(q, q, q, variant="causal")
    with attngen.jit(), pytest.raises(NoKernelError, match="no kernel takes this call"):
        attngen.attention(tensors(), tensors(), tensors(), variant=attngen.variant("q > kv"), package="mine")
    assert not asked


@pytest.mark.exhaustive
def test_a_compiled_program_has_its_kernels_compiled(asked: list[Any]) -> None:
    made, q = attngen.variant("q_pos >= kv + 2"), tensors()
    with attngen.jit():
        for variant in ("causal", made):
            call = lambda q, variant=variant: attngen.attention(q, q, q, variant=variant)  # noqa: E731
            traced = torch.compile(call, backend="eager", fullgraph=True)
            torch.testing.assert_close(traced(q), attngen.attention(q, q, q, variant=variant, backend="reference"))
    assert [each.variant.name for each in asked] == ["causal", "custom"]


@pytest.mark.exhaustive
@few(("dynamic", "learns"), [(False, False), (True, True)], always=(1,))
def test_kernels_are_compiled_while_a_program_is_traced(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, *, dynamic: bool, learns: bool
) -> None:
    """Before anything runs: from fake tensors, of the sizes that the trace begins with; what is lacking alone."""
    from torch._dynamo.backends.common import aot_autograd

    from attngen.integrations.flash_attn import v2 as flash_attn

    at_trace: list[Any] = []

    def traced(graph: Any, inputs: Any) -> Any:
        at_trace[:] = [(each.variant.name, each.direction, each.head_dim_qk, each.dtype) for each in asked]
        return graph

    def program(q: Any, starts: Any) -> Any:
        out = attngen.attention(q, q, q, variant="sliding_window", window=q.shape[1] // 2)
        packed = attngen.attention_varlen(*[q.flatten(0, 1)] * 3, starts, starts, q.shape[1], q.shape[1])
        return out + packed.unflatten(0, (q.shape[0], q.shape[1])) + flash_attn.flash_attn_func(q, q, q, softcap=9.0)

    torch._dynamo.reset()
    q = torch.randn(3, 24, 2, 80).half().requires_grad_(learns)
    backend = aot_autograd(fw_compiler=traced, bw_compiler=traced)
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    starts = torch.tensor([0, 24, 48, 72], dtype=torch.int32)
    monkeypatch.setattr("attngen.integrations.shared.choice.on_gpu", lambda tensor: True)
    with attngen.jit():
        result = compiled(q, starts)
    directions = ("forward", "backward") if learns else ("forward",)
    assert sorted(at_trace) == sorted(
        (name, direction, 80, "fp16")
        for name in ("sliding_window", "full", "window_softcap")
        for direction in directions
    )
    assert len(asked) == len(at_trace)
    torch._dynamo.reset()
    torch.testing.assert_close(result, program(q.detach(), starts), check_device=False)


@pytest.mark.exhaustive
def test_failures_to_compile_at_trace_time_are_reported_at_run_time(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def broken(what: Any, *soon: Any) -> None:
        tried.append(what)
        raise KeyError("tile")

    monkeypatch.setattr(attngen.jit._maker, "_compile", broken)
    torch._dynamo.reset()
    call = torch.compile(lambda q: attngen.attention(q, q, q), backend="aot_eager", fullgraph=True)
    with attngen.jit(), pytest.raises(NoKernelError, match="full, forward.*this is a fault of attngen"):
        call(tensors())
    assert len(tried) == 2  # once by the trace, however often it asks, and once by the call


def test_fake_tensors_alone_compile_nothing(asked: list[Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with attngen.jit(), FakeTensorMode():
        q = tensors()
        assert attngen.attention(q, q, q).shape == q.shape
    assert not asked


def test_a_backward_is_compiled_along_with_its_forward(asked: list[Any]) -> None:
    q = tensors()
    with attngen.jit():
        attngen.attention(q, q, q, variant="causal")
        attngen.attention(q.requires_grad_(), q, q, variant="softcap", cap=5.0)
    assert [(each.variant.name, each.direction) for each in asked] == [
        ("causal", "forward"), ("softcap", "forward"), ("softcap", "backward"),
    ]  # fmt: skip


def test_nothing_is_compiled_in_a_capture(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.build.first_call._capturing", lambda: True)
    with attngen.jit(), pytest.raises(NoKernelError, match="compiles nothing while a CUDA graph is captured"):
        attngen.attention(tensors(), tensors(), tensors(), variant="causal")
    assert not asked


@pytest.mark.exhaustive
def test_a_compile_that_fails_is_the_reason(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.build.compiles.COMPILER", "tests.store.fakes:no_such_function")
    monkeypatch.setattr("attngen.build.pipeline.COMPILER", "tests.store.fakes:no_such_function")
    with attngen.jit(), pytest.raises(NoKernelError, match="attngen.jit cannot build one: "):
        attngen.attention(tensors(), tensors(), tensors(), variant="causal")


def test_a_fault_of_attngen_is_no_traceback(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: Any, *soon: Any) -> None:
        raise KeyError("tile")

    monkeypatch.setattr(attngen.jit._maker, "_compile", broken)
    with attngen.jit(), pytest.raises(NoKernelError, match="causal, forward.*this is a fault of attngen"):
        attngen.attention(tensors(), tensors(), tensors(), variant="causal")


def test_the_switch(asked: list[Any]) -> None:
    attngen.jit()
    assert attngen.jit.on
    with attngen.jit(False):
        assert not attngen.jit.on
        with pytest.raises(NoKernelError):
            attngen.attention(tensors(), tensors(), tensors(), variant="causal")
    assert attngen.jit.on
    attngen.attention(tensors(), tensors(), tensors(), variant="causal")
    attngen.jit(False)
    assert not attngen.jit.on
    assert len(asked) == 1


@few(("value", "on"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_turns_it_on_without_importing_more(value: str, on: str) -> None:
    code = "import sys, attngen\nassert 'torch' not in sys.modules and 'yaml' not in sys.modules\nprint(attngen.jit.on)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "ATTNGEN_JIT": value},
    )  # fmt: skip
    assert done.stdout.strip() == on


def test_a_saved_spec_keeps_two_definitions_of_one_name_apart(asked: list[Any], tmp_path: Path) -> None:
    with pytest.raises(CallError, match="nothing to save"):
        attngen.jit.save(tmp_path / "mine.yaml")
    window = attngen.variant(
        "q_pos - kv < w", "s + g * kv", sink="r[h]", dropout=True,
        scalars={"w": {"type": "int32", "min": 1, "max": "seqlen_k"}, "g": {"type": "fp32", "default": 0.5}},
        tensors={"r": {"dtype": "fp32", "shape": ["h"], "range": {"min": -9.0}}},
    )  # fmt: skip
    other = attngen.variant("q_pos > kv", let={"unused": "kv"})
    with attngen.jit():
        attngen.attention(tensors(), tensors(), tensors(), variant=other)
        attngen.attention(tensors(), tensors(), tensors(), variant=window, w=3, r=torch.zeros(2), dropout_p=0.0)
        attngen.attention(tensors(128), tensors(128), tensors(128), variant=other)
    attngen.jit.save(tmp_path / "mine.yaml")
    saved = load_spec_text((tmp_path / "mine.yaml").read_text())
    definitions = [(k.variant.name, k.variant.definition, k.head_dim_qk) for k in expand(saved)]
    assert definitions == [
        ("custom", other.value.definition, 64), ("custom_2", window.value.definition, 64),
        ("custom", other.value.definition, 128),
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_package_does_not_carry_it() -> None:
    files = runtime_files()
    assert "first_call.py" not in files
    assert b"first_call" not in b"".join(files.values())
