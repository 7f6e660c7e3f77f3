"""Models of transformers against ``eager``: a few classes always, all of them with ``-m exhaustive``.

``docs/models.md`` has the results of all; ``python -m tests.integrations.transformers.model_sweep --write`` writes it
again.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import transformers
from torch import Tensor

import attngen.integrations.transformers.implementation as attngen_transformers
from tests.integrations.transformers.model_sweep import PAGE, page, sweep
from tests.integrations.transformers.sweep_checks import Result, check, classes
from tests.sampling import few

#: A few of each verdict: compressed keys, indexed keys, hybrid layers, an encoder and a decoder, images, sound.
SAMPLE = {
    "LlamaForCausalLM": "right",
    "DeepseekV4ForCausalLM": "right",
    "HYV4ForCausalLM": "right",
    "JambaForCausalLM": "right",
    "T5ForConditionalGeneration": "right",
    "Gemma3ForConditionalGeneration": "right",
    "ViTForImageClassification": "right",
    "WhisperForConditionalGeneration": "right",
    "BloomForCausalLM": "refused",
    "GPTNeoForCausalLM": "refused",
    "XLNetLMHeadModel": "own",
}


@pytest.fixture(autouse=True)
def registered() -> None:
    attngen_transformers.register()
    transformers.logging.set_verbosity_error()


@pytest.mark.exhaustive
@few("name", SAMPLE, always=(1, 8), often=range(0, 99, 3))
def test_a_class_gives_what_eager_gives(name: str) -> None:
    result = check(name)
    assert result.verdict == SAMPLE[name], result
    if result.verdict == "right":
        assert "prompt" in result.ran
        assert "gradients" in result.ran
    if name.endswith("CausalLM") and result.verdict == "right":
        assert {"left padding", "right padding", "cache", "cache, left padding", "generate"} <= set(result.ran)


@few("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_a_wrong_attention_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of which each is that of the key before: a result that a mask which is off by one may give."""
    attend = attngen_transformers.attend

    def shifted(candidates: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out: Tensor = attend(candidates, q, k, v.roll(1, -3), **options)
        return out

    monkeypatch.setattr(attngen_transformers, "attend", shifted)
    result = check(name)
    assert result.verdict == "wrong"
    assert re.match(r"prompt: [\d.e-]+ off eager", result.reason)


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_class_that_ends_its_process_is_reported_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_TEST_ABORT", "LlamaForCausalLM")
    said: list[str] = []
    results = sweep(["LlamaForCausalLM", "BertForMaskedLM"], 1, "cpu", lambda result: said.append(result.name))
    assert said == ["LlamaForCausalLM", "BertForMaskedLM"]
    assert results["LlamaForCausalLM"].verdict == "untested"
    assert "ended its process" in results["LlamaForCausalLM"].reason
    assert results["BertForMaskedLM"].verdict == "right"


def version() -> str:
    match = re.search(r"in transformers (\S+), with", PAGE.read_text())
    assert match
    return match[1]


def listed() -> dict[str, str]:
    """The verdict on each class of the page."""
    return dict(re.findall(r"^\| `(\w+)` \| ([\w *]+) \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_lists_the_classes_of_its_release() -> None:
    if transformers.__version__ != version():
        pytest.skip(f"the page is of transformers {version()}")
    assert set(listed()) == set(classes())


def test_nothing_on_the_page_is_wrong_and_its_sums_are_those_of_its_rows() -> None:
    verdicts = list(listed().values())
    sums = re.findall(r"^\| (right|refused|its own|not tested) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(sums) == 4
    for word, number in sums:
        assert verdicts.count(word) == int(number), word
    assert set(verdicts) == {"right", "refused", "its own", "not tested"}


def test_a_row_shows_a_pipe_and_what_was_left_out() -> None:
    result = Result("A", "CTC", "right", ran=["prompt", "left padding", "right padding", "part a.b"])
    result.variants, result.skipped = ["full"], {"static cache": "eager fails: a | b"}
    row = "| `A` | right | prompt, padding, parts | `full` | static cache: eager fails: a \\| b |"
    assert row in page({"A": result}).splitlines()


@pytest.mark.exhaustive
@pytest.mark.long
def test_every_class_is_as_the_page_says() -> None:
    """Ten minutes on two cores. Libraries that are installed or not change the reasons, but not the verdicts."""
    results = sweep(list(classes()), os.cpu_count() or 1, "cpu", lambda result: None)
    assert not [result for result in results.values() if result.verdict == "wrong"]
    if transformers.__version__ == version():
        words = {"own": "its own", "untested": "not tested"}
        told = listed()
        changed = {
            name: (told[name], result)
            for name, result in results.items()
            if words.get(result.verdict, result.verdict) != told[name] != "not tested"
        }
        assert not changed
