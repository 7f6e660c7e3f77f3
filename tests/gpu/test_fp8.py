"""Kernels in 8 bits: each keeps its contract, hangs never, gives the same bits again, and stays within its memory."""

from __future__ import annotations

import random
import secrets

import pytest
import torch

import attngen
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.gpu.family import bits
from tests.gpu.fp8_runs import NAMES, a_case, a_run, kernels
from tests.gpu.test_memory import sanitize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDS = 4


@pytest.mark.parametrize("name", NAMES)
def test_kernels_in_8_bits_keep_their_contract(name: str) -> None:
    trial = try_pinned(kernels()[name], torch.device("cuda"), secrets.randbelow(2**31), small=False)
    assert trial.problems == ()


def test_many_launches_of_random_shapes() -> None:
    """In random order, each shape several times: none hangs, and the same inputs give the same bits."""
    chance = random.Random(8)
    for _ in range(24):
        runs = [a_run(name, a_case(chance, name), chance.randrange(2**31)) for name in chance.sample(NAMES, 4)]
        first = [[bits(result) for result in run()] for run in runs]
        for index in chance.sample(list(range(len(runs))) * ROUNDS, ROUNDS * len(runs)):
            for before, now in zip(first[index], runs[index](), strict=True):
                assert torch.equal(before, bits(now))
    torch.cuda.synchronize()


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_nothing_beyond_its_memory(tool: str) -> None:
    kernels()  # compiled before, so that the sanitizer sees no compiler
    sanitize(tool, program="tests.gpu.sanitized_fp8", count=len(NAMES), kernels=("fwd_",))


@pytest.mark.parametrize(("q_dtype", "kv_dtype", "out_dtype"), [(E4M3, E4M3, None), (E4M3, E5M2, torch.float16)])
def test_a_call_finds_the_kernel_of_its_dtypes(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    registry.clear()
    registry.add(package_of_kernels([kernels()[name] for name in NAMES], "tests/gpu/test_fp8"))
    q, k, v = (torch.randn(2, 300, heads, 128, device="cuda") for heads in (4, 2, 2))
    one = torch.ones((), device="cuda")
    given = (q.to(q_dtype), k.to(kv_dtype), v.to(kv_dtype))
    options = {"variant": "causal", "q_descale": one, "k_descale": one, "v_descale": one, "out_dtype": out_dtype}
    out = attngen.attention(*given, **options)
    wanted = attngen.attention(*given, **options, backend="reference")
    assert out.dtype == wanted.dtype == (out_dtype or torch.bfloat16)
    # the kernel rounds probabilities to e4m3, whose relative error is at most 1/16
    sizes = attngen.attention(*given[:2], v.to(kv_dtype).float().abs().to(kv_dtype), **options, backend="reference")
    assert ((out.float() - wanted.float()).abs() <= sizes.float() / 16 + 1e-2).all()
    registry.clear()
