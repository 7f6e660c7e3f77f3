"""The kernel that merges results over two parts of the keys, run on the host, beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.runtime.device import driver as drivers
from attngen.runtime.helpers import merge
from attngen.runtime.helpers.merge import merge_into_first
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.tools.verify.merged import try_merge
from tests.runtime.host_kernels import COMPILER, HostDriver, merging_kernels

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def host() -> Iterator[HostDriver]:
    """A device whose memory is the host's."""
    if COMPILER is None:
        pytest.skip("needs g++")
    driver = HostDriver()
    registry.clear()
    registry.add(package_of_kernels(merging_kernels(), "here"))
    merge._PREPARED.clear()
    torch.manual_seed(7)
    with drivers.use(driver):
        yield driver
    merge._PREPARED.clear()
    registry.clear()


def part(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results in which some rows have no key."""
    out, lse = torch.randn(1, rows, heads, head_dim).to(dtype), 3 * torch.randn(1, heads, rows)
    lse[0, :, torch.rand(rows) < 0.3] = -torch.inf
    out[lse.transpose(1, 2) == -torch.inf] = 0
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [None, [0.5, -torch.inf, torch.inf, 1e38, -1e38]])
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 512), (7, 64), (9, 8), (3, 520)])
def test_two_parts(host: HostDriver, rows: int, head_dim: int, sinks: list[float] | None, dtype: torch.dtype) -> None:
    (out, lse), (more, more_lse) = part(rows, 5, head_dim, dtype), part(rows, 5, head_dim, dtype)
    lse[0, 0, 0] = more_lse[0, 0, 0] = -torch.inf
    out[0, 0, 0] = more[0, 0, 0] = 0
    sink = None if sinks is None else torch.tensor(sinks)
    wanted_lse = torch.logaddexp(lse.double(), more_lse.double())
    total = wanted_lse if sink is None else torch.logaddexp(wanted_lse, sink.double()[:, None])
    x, y = ((one.double() - total).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for one in (lse, more_lse))
    wanted = x * out.double() + y * more.double()
    assert merge_into_first(out, lse, more, more_lse, sink)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), wanted, rtol=5e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-5)
    assert [blocks for _, blocks in host.launches] == [-(-rows * 5 // 8)]


def test_a_nan_stays(host: HostDriver) -> None:
    for place in range(4):
        parts = [*part(2, 5, 64, torch.float16), *part(2, 5, 64, torch.float16)]
        parts[1][0, 1, 1] = parts[3][0, 1, 1] = 0.0
        parts[place].view(-1)[parts[place].numel() // 2] = torch.nan
        assert merge_into_first(*parts)
        assert parts[0].isnan().any()


def test_what_no_kernel_takes_is_left_alone(host: HostDriver) -> None:
    """Rows of other sizes, other dtypes, strided sinks, or no row at all: the caller merges by itself."""
    for rows, head_dim, dtype, sinks in (
        (3, 12, torch.bfloat16, None), (3, 64, torch.float32, None), (3, 64, torch.bfloat16, torch.zeros(10)[::2]),
        (3, 64, torch.bfloat16, torch.zeros(5).double()), (0, 64, torch.bfloat16, None),
    ):  # fmt: skip
        parts = [*part(rows, 5, head_dim, dtype), *part(rows, 5, head_dim, dtype)]
        before = [one.clone() for one in parts]
        assert not merge_into_first(*parts, sinks)
        assert all(map(torch.equal, parts, before))
    assert not host.launches


def test_calls_of_one_form_are_prepared_once(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = merge._prepare

    def noted(*given: Any, **one: Any) -> Any:
        made.append(given)
        return prepare(*given, **one)

    monkeypatch.setattr(merge, "_prepare", noted)
    for rows in (3, 3, 4, 3):
        assert merge_into_first(*part(rows, 5, 64, torch.bfloat16), *part(rows, 5, 64, torch.bfloat16))
    assert len(made) == 2


def test_verification_passes(host: HostDriver) -> None:
    for kernel in merging_kernels():
        trial = try_merge(kernel, "cpu", 3, small=True)
        assert trial.problems == ()
