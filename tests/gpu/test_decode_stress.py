"""Split-KV kernels under load: a thousand ragged batches, launches in random order, compute-sanitizer."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.gpu.decode_calls import LAYOUTS, Form, Ready, ready
from tests.gpu.sanitized_decode import SUBJECTS
from tests.gpu.test_decode import VARIANTS, close, kernels
from tests.gpu.test_memory import sanitize
from tests.sampling import some

BATCHES, SHARDS = 1000, 10
FORMS = [*(Form(variant, layout) for variant in VARIANTS for layout in LAYOUTS), *SUBJECTS[-8:]]


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("split-KV kernels are for Hopper")
    kernels()


def drawn(chance: random.Random, *, longest: int) -> Ready:
    """Return a call of a random form, with lengths that differ by orders of magnitude."""
    form = chance.choice(FORMS)
    kv_heads = chance.choice([1, 2, 4])
    lengths = [int(longest ** chance.random()) - chance.choice([0, 1]) for _ in range(chance.randint(1, 24))]
    lengths[0] = max(lengths[0], 1)
    return ready(
        form, lengths, rows=chance.choice([1, 1, 2, 5, 8]), heads=kv_heads * chance.choice([1, 3, 4, 8, 16]),
        kv_heads=kv_heads, page_size=chance.choice([1, 16, 48, 64, 256]), seed=chance.randrange(2**31),
    )  # fmt: skip


@pytest.mark.parametrize("shard", some(range(SHARDS), range(2)))
def test_a_thousand_ragged_batches(shard: int) -> None:
    """Against float64."""
    chance = random.Random(f"ragged {shard}")
    for _ in range(BATCHES // SHARDS):
        call = drawn(chance, longest=1500)
        close(call.run(), call.expected())


def test_launches_in_random_order() -> None:
    """Each call has the same bits, whatever ran before it."""
    chance = random.Random(11)
    calls = [drawn(chance, longest=9000) for _ in range(24)]
    first: list[tuple[Tensor, Tensor]] = [call.run() for call in calls]
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in chance.choices(range(len(calls)), k=2000):
        call, (out, _) = calls[index], first[index]
        into = {"out": torch.full_like(out, torch.nan)} if call.form.layout == "paged" else {}
        for result, before in zip(call.run(**into), first[index], strict=True):
            differ += (result.view(torch.uint8) != before.view(torch.uint8)).any()
    assert int(differ) == 0


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitize(tool, program="tests.gpu.sanitized_decode", count=len(SUBJECTS))
