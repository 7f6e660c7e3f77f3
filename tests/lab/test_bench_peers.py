"""Other libraries: which cases they support, and how they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.errors import CallError
from attngen.lab.bench import intervals as bench_intervals
from attngen.lab.bench import peers as bench_peers
from attngen.lab.bench.cases import bench_cases
from attngen.lab.bench.check import Oracle
from attngen.lab.bench.peers import reason_against
from attngen.lab.bench.workloads import Terms, terms_of
from attngen.schema import preset
from tests.lab.bench_support import StubCudnn, shown, without_libraries, workload_of
from tests.sampling import few


def reasons(name: str, dtype: str = "bf16", head_dim: int = 128, **sizes: str) -> dict[str, str | None]:
    (*_, case) = bench_cases(name, dtype, head_dim, head_dim, tokens=64, **sizes)
    terms = terms_of(preset(name), case, "cpu")
    return {peer.name: reason_against(peer, case, terms) for peer in bench_peers.peers()}


def who(name: str, dtype: str = "bf16", **sizes: str) -> list[str]:
    """The libraries that support a variant."""
    return [peer for peer, reason in reasons(name, dtype, **sizes).items() if reason is None]


def test_peers_by_parts_of_their_names() -> None:
    every = bench_peers.peers()
    assert bench_peers.named(every, ()) == every
    assert [peer.name for peer in bench_peers.named(every, ("Attention-", "cudnn"))] == [
        "SDPA cuDNN", "FlashAttention-3", "FlashAttention-4", *CUDNN,
    ]  # fmt: skip
    with pytest.raises(CallError, match="no library has 'cutlass' in its name: SDPA flash, "):
        bench_peers.named(every, ("cudnn", "cutlass"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every library were there."""
    monkeypatch.setattr(bench_peers.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


CUDNN = ("cuDNN frontend", "cuDNN flex")
FLASHES = ("SDPA flash", "SDPA cuDNN", "FlashAttention-3", "FlashAttention-4")


@pytest.mark.usefixtures("installed")
def test_who_supports_what() -> None:
    assert list(reasons("full")) == [
        "SDPA flash",
        "SDPA cuDNN",
        "FlexAttention",
        "FlashAttention-3",
        "FlashAttention-4",
        *CUDNN,
    ]
    for name in ("full", "causal"):
        assert set(reasons(name).values()) == {None}
    flex, (sdpa, intervals) = "FlexAttention", CUDNN
    assert who("softcap") == [flex, *FLASHES[2:]]
    assert who("sliding_window") == [flex, FLASHES[3], *CUDNN]
    assert reasons("sliding_window")["FlashAttention-3"] == "fa3-fwd is built without windows"
    assert who("alibi") == [flex]
    assert who("prefix_lm") == who("packed_documents") == [flex, intervals]
    assert who("causal_sink") == [FLASHES[3], sdpa]
    assert reasons("causal_sink")["FlexAttention"] == "has no sinks"
    assert who("causal_sink", direction="backward") == []
    assert reasons("causal", "fp16")["FlashAttention-3"] == "knows bf16 and fp8_e4m3 only"
    assert who("causal", "fp32") == [flex]
    assert reasons("causal", direction="backward")["FlashAttention-3"] == "fa3-fwd is built without the backward"
    assert set(reasons("causal")) - set(who("causal", direction="backward")) == {FLASHES[2]}
    assert set(reasons("chunked").values()) == {"chunked is not implemented for it"}


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_libraries(monkeypatch)
    told = reasons("chunked")
    assert told["FlashAttention-3"] == "not installed; pip install fa3-fwd"
    assert told["FlashAttention-4"] == "not installed; pip install flash-attn-4"
    assert told["cuDNN frontend"] == told["cuDNN flex"] == "not installed; pip install nvidia-cudnn-frontend"
    assert told["SDPA flash"] == told["SDPA cuDNN"] == "this build of torch lacks it"
    assert told["FlexAttention"] == "chunked is not implemented for it"


@pytest.mark.parametrize("name", ["full", "causal", "sliding_window", "softcap"])
def test_flash_functions_get_the_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, inputs = workload_of(preset(name), name, 30)
    terms = work.terms
    assert terms is not None
    seen: list[dict[str, Any]] = []

    class Module:
        @staticmethod
        def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **flags: Any) -> Any:
            seen.append(flags)
            return q, "the log-sum-exp"

    monkeypatch.setattr(bench_peers, "import_module", lambda name: Module)
    out = bench_peers.FlashAttention4().enter(work, terms, inputs).first()
    assert out is inputs[0].q
    window = (1023, 0) if name == "sliding_window" else (None, None)
    softcap = 30.0 if name == "softcap" else 0.0
    assert seen.pop() == {"causal": name != "full", "softcap": softcap, "window_size": window}
    if name != "sliding_window":
        bench_peers.FlashAttention3().enter(work, terms, inputs).first()
        assert seen.pop() == {"causal": name != "full", "softcap": softcap}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@few("name", ["packed_documents", "full", "causal", "alibi"])
def test_flex_attention_and_sdpa_compute_the_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run on the CPU, uncompiled and on the plain backend: what is tested is how they are called."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    work, inputs = workload_of(preset(name), name, 1400, torch.float32)
    assert work.terms is not None
    oracle = Oracle(work, inputs[0].q, inputs[0].k, inputs[0].v)
    contenders = [bench_peers.FlexAttention().enter(work, work.terms, inputs)]
    if name in ("full", "causal"):
        contenders.append(bench_peers.Sdpa("SDPA", "MATH").enter(work, work.terms, inputs))
    for contender in contenders:
        assert oracle.error(contender.first()) < 1e-5


@few("name", ["full", "causal", "sliding_window", "causal_sink"], always=1)
def test_cudnn_frontend_gets_the_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub in its place computes what the arguments mean: heads first, a left bound that counts the own key."""
    monkeypatch.setattr(bench_peers, "import_module", lambda name: StubCudnn)
    work, inputs = workload_of(preset(name), name, 1100, torch.float32)
    assert work.terms is not None
    contender = bench_peers.CudnnFrontend().enter(work, work.terms, inputs)
    assert Oracle(work, *inputs[0].bshd).error(contender.first()) < 1e-5


@pytest.mark.exhaustive
@few("name", ["full", "causal", "sliding_window", "prefix_lm", "packed_documents"], always=(2,))
def test_cudnn_flex_gets_intervals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "import_module", lambda name: StubCudnn)
    work, inputs = workload_of(preset(name), name, 1400, torch.float32)
    assert work.terms is not None
    contender = bench_peers.CudnnFlex().enter(work, work.terms, inputs)
    assert Oracle(work, *inputs[0].bshd).error(contender.first()) < 1e-5


def test_masks_of_many_intervals_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "import_module", lambda name: StubCudnn)
    work, inputs = workload_of(preset("full"), "full", 100)
    dotted = Terms(mask_mod=lambda b, h, q, kv: (q >= 0) & (kv % 3 == 1))
    with pytest.raises(CallError, match="queries see more than 32 intervals of keys"):
        bench_peers.CudnnFlex().enter(work, dotted, inputs)


@pytest.mark.parametrize("heads", [1, 3])
def test_endpoints_are_those_of_the_mask(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random masks of both sequences and all heads, evaluated some rows at a time."""
    monkeypatch.setattr(bench_intervals, "_PAIRS", 100)
    seen = torch.rand(2, heads, 20, 20) < torch.rand(2, heads, 20, 1) * 1.5  # some rows see all keys, some few
    seen[0, 0, :2] = torch.tensor([[False], [True]])
    ends = bench_intervals.endpoints(
        lambda b, h, q, kv: seen[b, h, q, kv], 20, torch.device("cpu"), batch=2, heads=heads
    )
    assert ends is not None
    assert ends.shape[1] % 2 == 1
    assert (ends.diff(dim=1) >= 0).all()
    expected = seen.transpose(0, 1).flatten(1, 2)
    assert torch.equal(shown(ends, 20), expected)
