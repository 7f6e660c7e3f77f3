"""flash_attn_with_kvcache in both versions and vLLM's function on the GPU, beside plain torch, sequence by sequence.

``python -m tests.gpu.test_cached 5000`` runs so many calls drawn at random, and prints those that are wrong or refused.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from attngen.errors import NoKernelError
from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import indexed
from tests.integrations.flash_attn.cached import Cached, checked, draw


def made(seed: int) -> Cached:
    dtype, head_dims = ((torch.bfloat16, (64, 128)), (torch.float16, (64,)))[seed % 2]
    return draw(seed, device="cuda", dtype=dtype, largest=1500, head_dims=head_dims)


def build_all() -> None:
    indexed("flash_attn_kvcache")
    registry.clear()


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build_all()


@pytest.mark.parametrize("first", range(0, 400, 20))
def test_calls_over_caches_mean_what_flash_attn_says(first: int) -> None:
    for seed in range(first, first + 20):
        checked(made(seed))


def main(count: int) -> None:
    build_all()
    verdicts: Counter[str] = Counter()
    for seed in range(1000, 1000 + count):
        try:
            checked(made(seed))
            verdicts["right"] += 1
        except AssertionError as error:
            verdicts["wrong"] += 1
            print(seed, "wrong", error, flush=True)
        except NoKernelError as error:
            verdicts["no kernel"] += 1
            print(seed, "no kernel", str(error).splitlines()[0], made(seed), flush=True)
    print(dict(verdicts))


if __name__ == "__main__":
    main(int(sys.argv[1]))
