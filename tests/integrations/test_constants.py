"""Constant tensors that drop-ins pass to kernels: kept by stream, never from inside a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attngen.integrations.shared import choice, constants
from attngen.integrations.shared.constants import counted, filled
from attngen.runtime.device import driver as drivers
from tests.runtime.support import FakeDriver


class Streams(FakeDriver):
    """A driver whose current stream is set."""

    current = 0

    def stream(self, device: int) -> int:
        return self.current


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """A device whose tensors are the CPU's."""
    driver = Streams()
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    constants._KEPT.clear()
    with drivers.use(driver):
        yield driver
    constants._KEPT.clear()


LIKE = torch.zeros(1)


def test_values(gpu: Streams) -> None:
    for _ in range(2):
        assert torch.equal(filled(LIKE, 3, 7), torch.tensor([[7, 7, 7]], dtype=torch.int32))
        assert torch.equal(counted(LIKE, 4), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))


def test_a_stream_has_its_own(gpu: Streams) -> None:
    first = filled(LIKE, 3, 7)
    assert filled(LIKE, 3, 7) is first
    assert filled(LIKE, 3, 8) is not first
    gpu.current = 9
    other = filled(LIKE, 3, 7)
    assert other is not first
    gpu.current = 0
    assert filled(LIKE, 3, 7) is first


def test_a_graph_gets_its_own(gpu: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = filled(LIKE, 3, 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert filled(LIKE, 3, 7) is not kept
    assert counted(LIKE, 5) is not counted(LIKE, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert filled(LIKE, 3, 7) is kept
    monkeypatch.setattr(constants, "in_graph_pool", lambda *_: True)
    assert counted(LIKE, 5) is not counted(LIKE, 5)


def test_a_graph_takes_what_its_caller_holds(gpu: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[constants.Key, torch.Tensor] = {}
    kept = filled(LIKE, 3, 7, held)
    gpu.current = 9
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert filled(LIKE, 3, 7, held) is kept
    assert filled(LIKE, 4, 7, held) is not filled(LIKE, 4, 7, held)
    assert [*held.values()] == [kept]


def test_what_inference_mode_makes_serves_training(gpu: Streams) -> None:
    with torch.inference_mode():
        made = filled(LIKE, 3, 7)
    assert not made.is_inference()
    assert filled(LIKE, 3, 7) is made


def test_traces_and_the_cpu_get_their_own(gpu: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled(torch.zeros(1, device="meta"), 3, 7).is_meta
    program = torch.compile(lambda x: x + filled(x, 3, 7) + counted(x, 3), fullgraph=True, backend="eager")
    assert torch.equal(program(LIKE), torch.tensor([[7.0, 8.0, 9.0]]))
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: False)
    filled(LIKE, 3, 7)
    assert len(constants._KEPT) == 0


@pytest.mark.parametrize("stream", [0, 9])
def test_the_caller_holds_what_a_graph_took(gpu: Streams, monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """Later calls outside of the graph, on its stream or another, put nothing in its place."""
    held: dict[constants.Key, torch.Tensor] = {}
    filled(LIKE, 3, 7, held)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        taken = filled(LIKE, 3, 7, held)
    constants._KEPT.clear()
    gpu.current = stream
    assert filled(LIKE, 3, 7, held) is not taken  # that of its own stream
    assert [*held.values()] == [taken]
