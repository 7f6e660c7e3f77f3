"""Kernels whose tiles hold all query heads of a KV head: every group and few queries, and which calls take them."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen.errors import NoKernelError
from attngen.inspect.cases import Case
from attngen.inspect.contract import deviation
from attngen.lab.verify.poison import poisoned
from attngen.lab.verify.trial import prepare_case
from attngen.runtime.launch.pinned import Pinned
from tests.gpu.family import DEVICE, PACKAGE, Run, kernels, labels, left_out

PACKED = [name for name in labels() if name.endswith("pack")]
LEFT_OUT = left_out()
SEED = 40_000


def check(name: str, case: Case, seed: int) -> None:
    """Run a kernel once into poisoned memory, and compare with the float64 reference."""
    kernel = kernels()[name]
    inputs, call, wanted = prepare_case(kernel, case, DEVICE, seed)
    memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
    buffers = memory.buffers
    assert buffers.lse is not None
    Pinned(kernel, call, buffers)()
    errors = deviation(call, buffers.out, buffers.lse, wanted)
    assert errors.wrong + memory.overrun() == ()
    assert errors.max_error <= errors.max_allowed
    assert errors.lse_error <= errors.lse_allowed


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", PACKED)
def test_groups_and_few_queries(name: str, group: int) -> None:
    """Fewer rows than a consumer has, a few more, and several tiles; more queries than keys; keys after the end."""
    kv_heads = 2 if group < 16 else 1
    heads = group * kv_heads
    for number, rows in enumerate((1, 3, 17, 129)):
        if "varlen" in name:
            shapes = ((rows, 1, 0, 5), (300, 139, 20, 3), (260, 139, 0, 1))
        else:
            shapes = ((rows,) * 3, (300,) * 3, (300, 77, 0))
        case = Case(f"{rows} queries", shapes[0], shapes[1], heads=heads, kv_heads=kv_heads, used=shapes[2])
        check(name, case, SEED + number)


@pytest.mark.parametrize("name", PACKED)
def test_a_group_that_does_not_divide_the_rows_is_refused(name: str) -> None:
    with pytest.raises(NoKernelError, match="packs the query heads of a KV head into 64 rows, which 3 heads do not"):
        Run.of(name, Case("three", (5,), (70,), heads=6, kv_heads=2)).results()


@pytest.mark.parametrize(("heads", "packed"), [(8, True), (6, False)])
def test_a_call_takes_the_packed_kernel_where_it_can(heads: int, packed: bool) -> None:
    kernels()
    torch.manual_seed(heads)
    q = torch.randn(3, 2, heads, 64, device=DEVICE).bfloat16()
    k, v = (torch.randn(3, 500, 2, 64, device=DEVICE).bfloat16() for _ in "kv")
    explanation = attngen.explain(q, k, v, variant="causal", package=PACKAGE)
    assert explanation.kernel is not None
    assert explanation.kernel.pack_gqa == packed
    out = attngen.attention(q, k, v, variant="causal", package=PACKAGE)
    wanted = attngen.attention(q, k, v, variant="causal", package=PACKAGE, backend="reference")
    assert isinstance(out, torch.Tensor)
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
