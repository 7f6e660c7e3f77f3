"""Numbers of launches that follow from few sizes: the same as a geometry's, for calls of a server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attngen
from attngen.plan import plan
from attngen.runtime.arguments import debug, torch_state
from attngen.runtime.device import counters
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.chain import Sized
from attngen.runtime.launch.launches import Launches
from attngen.runtime.operations.attention import recall
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from tests.runtime.host_kernels import HostDriver, as_kernels
from tests.sampling import few

SPEC = """
schema: 1
package: sized
arch: [sm90a]
kernels:
  - variant: [causal, sliding_window]
    head_dim: [64, 128]
    dtype: bf16
    layout: paged
    pack_gqa: [false, true]
    split_kv: true
  - {variant: causal, head_dim: 128, dtype: bf16, layout: paged, pack_gqa: true, tile: {m: 128}}
  - {variant: causal, head_dim: 128, dtype: bf16, layout: varlen}
  - {variant: causal, head_dim: 128, dtype: bf16, layout: varlen, backend: triton}
  - {variant: causal, head_dim: 128, dtype: bf16, kv_dtype: fp8_e4m3, layout: paged, split_kv: true}
"""


class Card(HostDriver):
    """A card that launches nothing."""

    def multiprocessors(self, device: int) -> int:
        return 132

    def clusters(self, *given: Any) -> int:
        return 15

    def stream(self, device: int) -> int:
        return 0

    def zeros(self, size: int, device: int) -> int:
        return 4096

    def launch(self, kernels: Any, device: int) -> None:
        return


def facts(sized: Sized) -> list[Any]:
    return [getattr(sized, name) for name in Sized.__slots__]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """Kernels of the calls of new sizes, and whether their numbers are plain; all of them are compared."""
    seen: list[tuple[str, bool]] = []
    resize = Launches.resize

    def both(self: Launches, call: Any) -> Sized:
        sized, plain = resize(self, call), self._plain
        self._plain = None
        by_geometry = resize(self, call)
        self._plain = plain
        assert facts(sized) == facts(by_geometry)
        seen.append((self._kernel.name, plain is not None))
        return sized

    monkeypatch.setattr(Launches, "resize", both)
    monkeypatch.setattr(counters, "workspace", lambda *of: 4096)
    monkeypatch.setattr(debug, "check_lengths", lambda call: None)  # it refuses the lengths of parts of a batch
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.clear()
    recall.SEEN.clear()
    registry.add(package_of_kernels(as_kernels([plan(one) for one in expand(load_spec_text(SPEC))]), "memory"))
    with drivers.use(Card()):
        yield seen
    recall.SEEN.clear()
    registry.clear()


@few("head_dim", [64, 128])
@pytest.mark.parametrize("variant", ["causal", "sliding_window"])
def test_pages(compared: list[tuple[str, bool]], variant: str, head_dim: int) -> None:
    rnd = random.Random(head_dim)
    pages = torch.zeros(50, 16, 8, head_dim, dtype=torch.bfloat16)
    q = torch.zeros(3000, 32, head_dim, dtype=torch.bfloat16)
    own: dict[str, Any] = {"window": 100} if variant != "causal" else {}
    for number in range(120):
        lengths = [1] * rnd.randint(1, 200) + [rnd.randint(2, 600)] * rnd.randint(0, 2)
        table = torch.zeros(len(lengths), rnd.randint(40, 600), dtype=torch.int32)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        total = sum(lengths)
        splits: dict[str, Any] = [{}, {}, {"split_size": 256}, {"num_splits": 3}][number % 4]
        attngen.attention_paged(
            q[:total], pages, pages.clone() if not number else pages, table, torch.zeros(len(lengths)).int(),
            cu_seqlens_q=starts, max_seqlen_q=max(lengths), variant=variant, return_lse=number % 3 == 0, **splits,
            **own,
        )  # fmt: skip
    assert len(compared) > 60
    assert {"decode", "wgmma"} <= {name.split("_")[2] for name, plain in compared if plain}


@few("backend", [None, "triton"], always=range(0, 999, 2))
def test_packed(compared: list[tuple[str, bool]], backend: str | None) -> None:
    rnd = random.Random(5)
    q, k = torch.zeros(6000, 32, 128, dtype=torch.bfloat16), torch.zeros(6000, 8, 128, dtype=torch.bfloat16)
    for number in range(80):
        lengths = [rnd.randint(1, 300) for _ in range(rnd.randint(1, 18))]
        starts, total = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
        attngen.attention_varlen(
            q[:total], k[:total], k[:total], starts, starts, max(lengths), max(lengths) + number % 2 * 100,
            variant="causal", return_lse=number % 3 == 0, backend=backend,
        )  # fmt: skip
    assert len(compared) > 30
    assert all(plain for _, plain in compared) or backend == "triton"
