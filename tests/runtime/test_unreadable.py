"""Tensors without plain memory are refused in a sentence wherever a call runs, also beside kept calls of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments.keys import note
from tests.runtime.support import FakeDriver
from tests.runtime.test_negated import CALLS, PLACES
from tests.sampling import few


def refused(form: str, name: str, tensor: Tensor) -> None:
    call, given = CALLS[form]
    seen = name.removesuffix("_pages")
    told = rf"^{seen} has layout {tensor.layout}; allowed: a dense tensor, {seen}\.to_dense\(\)"
    with pytest.raises(CallError, match=told):
        call(**given | {name: tensor})


@few(("form", "name"), PLACES, always=range(0, 999, 3))
def test_sparse_tensors_are_refused(form: str, name: str) -> None:
    refused(form, name, CALLS[form][1][name].to_sparse())


@pytest.mark.parametrize(("form", "name"), PLACES)
def test_sparse_tensors_are_refused_where_addresses_are_asked_for_first(gpu: FakeDriver, form: str, name: str) -> None:
    refused(form, name, CALLS[form][1][name].to_sparse())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_without_strides_are_refused(name: str) -> None:
    refused("dense", name, CALLS["dense"][1][name].to_sparse_csr())


def test_a_gradient_that_is_asked_for_is_part_of_a_kept_call() -> None:
    """Scales have none on a GPU: what was prepared under ``no_grad`` is no call that has one."""
    scale = torch.ones(2, 2, requires_grad=True)
    asked: list[Any] = []
    note(asked, scale)
    with torch.no_grad():
        kept: list[Any] = []
        note(kept, scale)
    assert asked != kept
