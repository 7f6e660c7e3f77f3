"""flash_attn_with_kvcache in both versions and vLLM's function, beside plain torch, sequence by sequence."""

from __future__ import annotations

import torch

from tests.integrations.flash_attn.cached import checked, draw
from tests.sampling import few


@few("seed", range(120), always=range(0, 120, 8))
def test_calls_over_caches_mean_what_flash_attn_says(seed: int) -> None:
    checked(draw(seed, device="cpu", dtype=torch.float32, largest=150, head_dims=(16, 32)))
