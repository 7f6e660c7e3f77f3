"""A call as one value: what a program says arrives under its name, in the launch, in a cache's key, in an operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.arguments.addresses import FORWARD, NO_FORWARD
from attngen.runtime.arguments.given import (
    KEPT,
    OTHERS,
    PLACES,
    TENSORS,
    Given,
    changer,
    keyed_of,
    maker,
    of_parts,
    settings_of,
    tensors_of,
)
from attngen.runtime.arguments.keys import note_others
from attngen.runtime.operations.attention import entry as calls
from attngen.runtime.operations.attention.operators import Signature
from attngen.runtime.operations.attention.signature import LEADING, TRAILING, arguments_of
from tests.runtime.gradient_driver import build, leaves, taken_for_a_gpu
from tests.runtime.support import bias_variant

DOORS: dict[str, Callable[..., Any]] = {
    "dense": calls.attention,
    "varlen": calls.attention_varlen,
    "paged": calls.attention_paged,
}
#: Keywords that a call has under another name.
FIELDS = {"k_pages": "k", "v_pages": "v", "page_layout": "layout"}
#: Arguments that make another call.
BEFORE = {"quantize", "num_decodes", "return_max_logits"}
#: Arguments that operators do without: their name says it, or their results.
OF_OPERATORS = {"variant", "package", "return_lse", "out"}

every_form = pytest.mark.parametrize("form", DOORS)


def keywords(form: str) -> list[str]:
    """The keywords of the call itself."""
    parameters = inspect.signature(DOORS[form]).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    return [name for name in named if name not in BEFORE]


def said(form: str, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[dict[str, Any], Given]:
    """Keywords of a call, each with a value of its own, and the ``Given`` that they make."""
    made: list[Given] = []
    monkeypatch.setattr(calls, "run", made.append)
    monkeypatch.setattr(calls, "run_plain", made.append)
    values = {name: (name,) for name in keywords(form)} | changed
    DOORS[form](**values, window=3)
    return values, made[0]


@every_form
def test_each_keyword_arrives_under_its_name(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, given = said(form, monkeypatch)
    assert given.form == form
    assert given.arguments == {"window": 3}
    fields = {FIELDS.get(name, name): value for name, value in values.items()}
    constants = {"layout": "varlen", "deterministic": False, "sm_margin": 0, "least_queries": 0, "most_queries": 0}
    for name, value in given._asdict().items():
        if name not in ("form", "arguments"):
            constant = constants.get(name)
            assert value == fields.pop(name, constant), name
    assert not fields


@every_form
def test_each_tensor_has_a_place_among_the_addresses_and_in_the_key(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(4) for name in keywords(form) if FIELDS.get(name, name) in TENSORS}
    _, given = said(form, monkeypatch, **tensors)
    assert tensors_of(given)[:3] == (given.q, given.k, given.v)
    assert {TENSORS[place] for place in PLACES[form]} >= {FIELDS.get(name, name) for name in tensors} - set("qkv")
    key: list[Any] = []
    addresses = [0, 0, 0, *NO_FORWARD]
    note_others(key, addresses, given)
    for name in set(tensors) - {"q", "k", "v", "k_pages", "v_pages"}:
        assert addresses[FORWARD.index(name)] == tensors[name].data_ptr(), name
        without: list[Any] = []
        note_others(without, [0, 0, 0, *NO_FORWARD], given._replace(**{name: None}))
        assert without != key, name
        assert any(tensor is tensors[name] for tensor in OTHERS[form](given)), name


@every_form
def test_a_key_lacks_no_setting_but_those_that_each_call_looks_at(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given = said(form, monkeypatch)
    others = settings_of(given)[: -len(keyed_of(given))]
    assert others == (given.variant, given.softmax_scale)


@every_form
def test_an_operator_is_told_all_that_a_call_says(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given = said(form, monkeypatch, tile_map=None) if form != "paged" else said(form, monkeypatch)
    given = given._replace(out=None, return_lse=KEPT, package=None, arguments={"table": (1,), "limit": 2, "gain": 3.0})
    parts = [part.split()[1].partition("=")[0] for part in (*LEADING[form], *TRAILING[form])]
    assert {*parts, *OF_OPERATORS} >= set(keywords(form))
    signature = Signature(("table",), ("limit", "gain"), (None, None), (), max_logits=False)
    arguments = arguments_of(given, list(given.arguments.values()))
    assert len(arguments) == len(parts) + 3
    assert signature.given(given.variant, form, arguments) == given  # type: ignore[arg-type]


def test_an_operator_may_leave_out_what_has_a_default() -> None:
    signature = Signature.of(bias_variant())
    names = (*signature.tensors, *signature.scalars)
    given = signature.given("bias", "dense", ("q", "k", "v", *names, 0.5, None, None, "bhsd", None))
    assert (given.softmax_scale, given.layout, given.deterministic) == (0.5, "bhsd", False)


def holds_a_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return any(map(holds_a_tensor, value)) if isinstance(value, tuple) else isinstance(value, Tensor)


def test_autograd_alone_keeps_the_tensors_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise offloading and recomputing, which replace saved tensors, would free nothing."""
    build()
    used = torch.tensor([70, 30], dtype=torch.int32)
    with taken_for_a_gpu(monkeypatch):
        out: Any = attngen.attention(*leaves(), variant="causal", seqused_k=used)
    assert any(tensor is not None and tensor.data_ptr() == used.data_ptr() for tensor in out.grad_fn.saved_tensors)
    kept = {name: value for name, value in vars(out.grad_fn).items() if not name.startswith("_")}
    assert kept
    assert not holds_a_tensor(kept)
    assert holds_a_tensor({"one": (1, {"another": used})})


def test_calls_are_made_of_named_fields() -> None:
    """By functions that take values in an order of their own, of fields in any order."""
    make = maker("softmax_scale k q", form="varlen")
    call = make(0.5, "keys", "queries")
    assert call == Given(q="queries", k="keys", v=None, softmax_scale=0.5, form="varlen")
    change = changer("out arguments k")
    assert change(call, "out", {"window": 3}, "others") == call._replace(out="out", arguments={"window": 3}, k="others")
    assert of_parts(tensors_of(call), call.arguments, settings_of(call)) == call
    for unknown in (maker, changer):
        with pytest.raises(AssertionError, match="keys"):
            unknown("q keys")
