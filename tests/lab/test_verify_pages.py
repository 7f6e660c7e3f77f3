"""Verification of kernels over pages: what is right passes, and each kind of wrong reading or writing is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attngen.dtypes import PAGE_BLOCK
from attngen.inspect.cases import paged_cases
from attngen.inspect.contract import expected
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.trial import Trial, in_rows, prepare_case, try_kernel
from attngen.runtime.arguments import debug
from attngen.runtime.arguments.checked import Call
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.pinned import Buffers
from attngen.runtime.reference.eager import reference
from attngen.schema import preset, preset_names
from tests.runtime.support import kernel
from tests.sampling import few

ELEMENT = Element("fp16", 16, 16)
OF_PAGES = [name for name in preset_names() if preset(name).packed_keys() is None]


def paged_kernel(name: str = "causal") -> Kernel:
    return kernel(preset(name), layout="paged", dtype="fp16", head_dim=16, tiles=(16, 16))


def tried(change: Callable[[Call, Buffers], tuple[Call, Buffers]] | None = None, name: str = "causal") -> Trial:
    """Return the verdict on a kernel that is the reference, on a call that is changed first."""

    def launch(call: Call, buffers: Buffers) -> None:
        changed, given = change(call, buffers) if change else (call, buffers)
        with torch.no_grad():
            out, lse = reference(changed, given.q, given.k, given.v, compute=torch.float64)
        buffers.out.copy_(out)
        assert buffers.lse is not None
        buffers.lse.copy_(lse)

    return try_kernel(paged_kernel(name), launch, "cpu", 7, small=True)


@few("name", OF_PAGES, always=range(0, 19, 9))
def test_what_is_right_passes(name: str) -> None:
    trial = tried(name=name)
    assert trial.problems == ()
    assert any(result.deviation is not None for result in trial.results)


@few("name", OF_PAGES, always=range(0, 19, 3))
def test_pages_hold_the_sequences_of_the_yardsticks(name: str) -> None:
    """The reference over pages and that over packed sequences agree to the bit; every declared fact holds."""
    for seed, case in enumerate(paged_cases(16, 16, small=True)):
        inputs = make_inputs(preset(name), case, "paged", ELEMENT, "cpu", seed)
        call = inputs.bind(preset(name))
        debug.check(call)
        assert inputs.packed is not None
        assert (call.order == "thd") == (len(set(case.q_lengths)) > 1)
        try:
            wanted = expected(inputs.packed.bind(preset(name)), inputs.packed.q, inputs.packed.k, inputs.packed.v)
        except IndexError:
            continue
        with torch.no_grad():
            actual = in_rows(call, *reference(call, inputs.q, inputs.k, inputs.v, compute=torch.float64))
        torch.testing.assert_close(actual[0], wanted.out, rtol=0, atol=0)
        torch.testing.assert_close(actual[1], wanted.lse, rtol=0, atol=0)


@pytest.mark.parametrize("scale_block", [0, PAGE_BLOCK])
def test_rows_whose_head_is_v_have_one_scale(scale_block: int) -> None:
    """The reference reads the values with the scales of the keys, over pages and over packed sequences."""
    element = Element("bf16", 576, 512, scale_block, "fp8_e4m3", v_of_key=True)
    for seed, case in enumerate(paged_cases(16, 16, small=True)[:3]):
        inputs = make_inputs(preset("causal"), case, "paged", element, "cpu", seed)
        assert "v_descale" not in inputs.descales
        call = inputs.bind(preset("causal"))
        assert inputs.packed is not None
        packed = inputs.packed
        wanted = expected(packed.bind(preset("causal")), packed.q, packed.k, packed.v, torch.bfloat16)
        with torch.no_grad():
            actual = in_rows(call, *reference(call, inputs.q, inputs.k, inputs.v, compute=torch.float64))
        torch.testing.assert_close(actual[0], wanted.out, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("scale_block", [PAGE_BLOCK, 1])
def test_scales_of_pages_and_of_their_rows(scale_block: int, dtype: str) -> None:
    element = Element(dtype, 32, 16, scale_block, "fp8_e4m3")
    for seed, case in enumerate(paged_cases(16, 16, small=True)[:4]):
        inputs = make_inputs(preset("causal"), case, "paged", element, "cpu", seed)
        call, packed = inputs.bind(preset("causal")), inputs.packed
        assert call.scale_blocks == (scale_block,) or case.page_size == 1
        assert scale_block in call.scale_blocks
        assert packed is not None
        wanted = expected(packed.bind(preset("causal")), packed.q, packed.k, packed.v, torch.bfloat16)
        with torch.no_grad():
            actual = in_rows(call, *reference(call, inputs.q, inputs.k, inputs.v, compute=torch.float64))
        torch.testing.assert_close(actual[0], wanted.out, rtol=0, atol=0)


def test_what_nobody_may_read_is_poisoned() -> None:
    for seed, case in enumerate(paged_cases(16, 16, small=True)):
        inputs = make_inputs(preset("causal"), case, "paged", ELEMENT, "cpu", seed)
        assert inputs.paging is not None
        pages = inputs.k.transpose(1, 2) if inputs.page_layout == "HND" else inputs.k
        used = torch.zeros(pages.shape[:2], dtype=torch.bool)
        table = inputs.paging.page_table
        for b, length in enumerate(case.k_lengths):
            for key in range(length):
                used[table[b, key // case.page_size], key % case.page_size] = True
            behind = table[b, -(-length // case.page_size) :]
            assert behind.numel() > 0
            assert ((behind < 0) | (behind >= pages.shape[0])).all()
        assert int(used.sum()) == sum(case.k_lengths)
        assert torch.isfinite(pages[used]).all()
        assert pages[~used].isnan().all()
        assert (~used).all(dim=1).any(), "no page is nobody's"


def one_key_more(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
    """Reads the row after the last key, where the page has one."""
    assert call.seqused_k is not None
    rest = call.seqused_k % call.page_size
    return replace(call, seqused_k=call.seqused_k + (rest > 0)), buffers


def one_key_less(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
    assert call.seqused_k is not None
    return replace(call, seqused_k=(call.seqused_k - 1).clamp(min=0)), buffers


def pages_in_a_row(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
    """Takes the page after the first one for the second of a sequence."""
    assert call.page_table is not None
    table = (call.page_table[:, :1] + torch.arange(call.page_table.shape[1])) % call.num_pages
    return replace(call, page_table=table), buffers


def the_table_of_the_first(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
    assert call.page_table is not None
    return replace(call, page_table=call.page_table.flip(0) % call.num_pages), buffers


def aligned_at_the_first(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
    return replace(call, variant=preset("causal_top_left")), buffers


@pytest.mark.parametrize(
    "fault",
    [one_key_more, one_key_less, pages_in_a_row, the_table_of_the_first, aligned_at_the_first],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_a_kernel_that_reads_wrong_is_found(fault: Any) -> None:
    assert tried(fault).problems


def test_a_kernel_that_writes_outside_is_found() -> None:
    def overrun(call: Call, buffers: Buffers) -> tuple[Call, Buffers]:
        buffers.out.as_strided((1,), (1,), buffers.out.storage_offset() + buffers.out.numel()).fill_(0)
        return call, buffers

    assert any("bytes around out were written" in problem for problem in tried(overrun).problems)


def test_a_row_that_is_not_written_is_found() -> None:
    def launch(call: Call, buffers: Buffers) -> None:
        with torch.no_grad():
            out, lse = reference(call, buffers.q, buffers.k, buffers.v)
        in_rows(call, buffers.out, buffers.out[..., 0])[0][:-1].copy_(in_rows(call, out, lse)[0][:-1])
        assert buffers.lse is not None
        buffers.lse.copy_(lse)

    trial = try_kernel(paged_kernel(), launch, "cpu", 7, small=True)
    assert all(result.deviation is not None and result.deviation.wrong for result in trial.results)


@pytest.mark.exhaustive
def test_cases_cover_both_kinds_of_queries() -> None:
    for small in (True, False):
        calls = [prepare_case(paged_kernel(), case, "cpu", 3)[1] for case in paged_cases(16, 16, small=small)]
        assert {call.order for call in calls} == {"thd", "bshd"}
        sizes = {call.page_size for call in calls}
        assert 1 in sizes
        assert any(size % 16 == 0 and size & (size - 1) for size in sizes), "only powers of two among multiples of 16"
