"""Settings of variants: one declaration, which specs, JSON and Python follow; each consumer serves or refuses them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError, SpecError
from attngen.inspect import baseline, seen
from attngen.integrations.engines import layers
from attngen.integrations.shared import catalogue
from attngen.lab.bench import check, workloads
from attngen.lab.bench.cases import BenchCase
from attngen.lang.check import restore_variant
from attngen.lang.shifts import shifts_with_logits
from attngen.lang.variant import Variant, VariantSettings, declared_settings
from attngen.parallel import decoding, making
from attngen.resources import root
from attngen.runtime.operations.index_scores import arguments
from attngen.runtime.reference import eager
from attngen.schema.models import VariantModel
from attngen.schema.writing import declaration

SETTINGS = {one.name: one.default for one in declared_settings()}
#: Those that calls ask for, and no declaration has.
OF_CALLS = {one.name for one in fields(VariantSettings)} - set(SETTINGS)
#: A value of each setting, and of what it cannot stand without.
GIVEN: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "keys": {"keys": "index"},
    "sink_in_lse": {"keys": "index", "sink": "0.5", "sink_in_lse": False},
    "weights": {"weights": "sigmoid"},
}

#: Modules that read variants, with the features that each of them serves. Schedules: ``tests/plan/test_served.py``.
CONSUMERS = (eager, baseline, seen, check, workloads, decoding, making, arguments, layers, catalogue)

#: Modules that evaluate expressions of a variant which one of these has taken: the sinks of the reference, rows that
#: ``debug.compare`` takes from it, and plans, whose schedules serve what they list.
AFTER_OTHERS = {"runtime/reference/sinks.py", "inspect/comparison.py", "inspect/visits.py"}


@dataclass(frozen=True)
class Later(Variant):
    """A variant with a setting that nobody has heard of."""

    unheard: bool = field(default=False, kw_only=True)


def test_a_spec_and_python_have_the_settings_with_their_defaults() -> None:
    model = {name: one.default for name, one in VariantModel.model_fields.items() if name in SETTINGS}
    parameters = inspect.signature(attngen.variant).parameters
    assert model == SETTINGS == {name: parameters[name].default for name in SETTINGS}
    assert set(GIVEN) == set(SETTINGS)


def test_calls_ask_for_the_largest_logits_of_a_variant() -> None:
    plain = attngen.variant("q_pos >= kv", name="mine").value
    asked = plain.with_max_logits()
    assert {"max_logits"} == OF_CALLS == set(asked.to_dict()) - set(plain.to_dict())
    assert (asked.name, asked.with_max_logits(), asked.without_max_logits()) == ("mine_max_logits", asked, plain)
    assert restore_variant(asked.to_dict()) == asked
    assert declaration(asked) == declaration(plain)
    assert asked.definition != plain.definition
    with pytest.raises(CallError, match="custom has weights: sigmoid, whose kernels look for no largest logit"):
        attngen.variant(weights="sigmoid").value.with_max_logits()


@pytest.mark.parametrize("name", SETTINGS)
def test_json_specs_definitions_and_comparisons_follow(name: str) -> None:
    value = attngen.variant("q_pos >= kv", **GIVEN[name]).value
    plain = replace(value, **{name: SETTINGS[name]})
    assert restore_variant(value.to_dict()) == value
    assert value.to_dict()[name] == declaration(value)[name] == GIVEN[name][name]
    assert name not in {*plain.to_dict(), *declaration(plain)}
    assert value.definition != plain.definition
    assert [field for field, *_ in value.differences(plain)] == [name]


def test_a_setting_that_nobody_has_heard_of_is_kept_apart() -> None:
    later, plain = Later("later", unheard=True), Later("later")
    assert later.definition != plain.definition
    assert later.differences(plain) == [("unheard", "true", "false")]
    with pytest.raises(SpecError, match="has 'unheard', which this version of attngen does not know"):
        restore_variant(later.to_dict())
    assert restore_variant(plain.to_dict()).definition == Variant("later").definition


@pytest.mark.parametrize("consumer", CONSUMERS, ids=lambda consumer: consumer.__name__)
def test_each_consumer_asks_for_what_it_serves(consumer: Any) -> None:
    assert "require(SERVES," in inspect.getsource(consumer)
    assert set(consumer.SERVES) <= {"mask", "score", "sink", *SETTINGS, *OF_CALLS}


def called(consumer: Any, variant: Variant) -> None:
    """Give a variant to a consumer."""
    q = torch.zeros(1, 4, 1, 16)
    if consumer is eager:
        attngen.attention(q, q, q, variant=variant, backend="reference")
    elif consumer is decoding:
        raise CallError(decoding._problem(q, q, q, 0, 0, variant, {}) or "")
    elif consumer is making:
        attngen.parallel.plan(variant, 128, 2)
    elif consumer is arguments:
        attngen.index_scores(q, q, torch.zeros(1, 4, 1), variant=variant)
    elif consumer is seen:
        seen.seen_keys(variant, (4, 4), None, {})
    elif consumer is workloads:
        workloads.visible_pairs(variant, BenchCase("grid", "one", "bf16", 16, 16, 1, 4, 1, 1), {}, "cpu")
    elif consumer is layers:
        layers.Layer().own(layers.Mask(variant, {}))
    elif consumer is catalogue:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalogue.presets, "variant", lambda name: variant)
            catalogue.variant.__wrapped__("causal")
    else:
        call = SimpleNamespace(variant=variant)
        list(baseline._sequences(call, q, q, q)) if consumer is baseline else check._out(call, *[q] * 3, 0, 0, slice(1))


@pytest.mark.parametrize("consumer", CONSUMERS, ids=lambda consumer: consumer.__name__)
def test_each_consumer_refuses_a_setting_that_it_does_not_serve(consumer: Any) -> None:
    variants = [attngen.variant(**GIVEN[name]).value for name in sorted({*SETTINGS} - {*consumer.SERVES})]
    asked = [] if "max_logits" in consumer.SERVES else [attngen.variant().value.with_max_logits()]
    for variant in [*variants, *asked, Later("later", unheard=True)]:
        with pytest.raises(CallError, match="does not serve '(unheard|dropout|keys|sink|weights|max_logits)"):
            called(consumer, variant)


def test_each_module_that_evaluates_expressions_is_a_consumer() -> None:
    package = root() / "attngen"
    evaluating = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"^from attngen\.lang\.eager import .*\bevaluate\b", path.read_text(), re.MULTILINE)
    }
    asking = {str(Path(inspect.getfile(consumer)).relative_to(package)) for consumer in CONSUMERS}
    assert (
        evaluating - asking - {"lang/searches.py"} == AFTER_OTHERS
    )  # which places searches, and computes no attention


def test_the_reference_refuses_it_where_rows_see_no_key() -> None:
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 0, 1, 16)
    with pytest.raises(CallError, match="does not serve 'unheard'"):
        attngen.attention(q, k, k, variant=Later("later", unheard=True), backend="reference")


def test_what_lists_decide_is_not_shown_as_a_mask() -> None:
    listed = attngen.variant(keys="index")
    for show in (listed.mask, listed.explain, listed.plot):
        with pytest.raises(CallError, match="the mask of a variant, which alone .* does not serve 'keys'"):
            show((4, 8))


def test_a_shift_of_logits_is_not_known_of_it() -> None:
    assert shifts_with_logits(Later("later"))
    assert not shifts_with_logits(Later("later", unheard=True))


def test_derivatives_of_the_reference_refuse_it_too() -> None:
    q = torch.zeros(1, 4, 1, 16, requires_grad=True)
    with pytest.raises(CallError, match="does not serve 'unheard'"):
        attngen.attention(q, q, q, variant=Later("later", unheard=True)).sum().backward()
