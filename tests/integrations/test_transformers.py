"""``attn_implementation="attngen"``: logits, gradients and cached decoding of ten families against ``eager``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen.integrations.transformers as attngen_transformers
from attngen.errors import NoKernelError
from tests.integrations import families
from tests.integrations.families import DECODERS, GENERATORS, MAKERS, PADDINGS, batch, gradients, logits

#: Of the largest magnitude. Eager and the reference both compute in float32, in another order of additions.
TOLERANCE = 2e-5


@cache
def model(family: str, implementation: str = "attngen") -> Any:
    return families.make(family, head_dim=8, implementation=implementation)


def eager(family: str) -> Any:
    return model(family, "eager")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The variants that served the calls of a test."""
    names: list[str] = []
    attend = attngen_transformers.attend

    def noting(candidates: Any, *arguments: Any, **options: Any) -> Any:
        names.append(candidates[0].variant)
        return attend(candidates, *arguments, **options)

    monkeypatch.setattr(attngen_transformers, "attend", noting)
    return names


def near(found: Tensor, wanted: Tensor) -> None:
    found, wanted = found.detach(), wanted.detach()
    limit = TOLERANCE * float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= limit
    assert limit > 0


#: The variants that a forward pass uses, without padding and with it.
EXPECTED = {
    "llama": ({"causal"}, {"span"}),
    "mistral": ({"sliding_window"}, {"span"}),
    "gemma2": ({"softcap", "softcap_window"}, {"span_softcap"}),
    "gemma3": ({"causal", "sliding_window"}, {"span"}),
    "qwen3": ({"causal"}, {"span"}),
    "gpt_oss": ({"causal", "sliding_window"}, {"span"}),
    "llama4": ({"causal", "chunked"}, {"span", "span_chunked"}),
    "modernbert": ({"full", "span"}, {"span"}),
    "whisper": ({"causal", "full"}, {"full", "span"}),
    "t5": ({"span_bias_fp32"}, {"span_bias_fp32"}),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", MAKERS)
def test_logits_and_gradients(family: str, padding: str, served: list[str]) -> None:
    given = batch(family, padding)
    wanted = logits(eager(family), given)
    wanted_gradients = gradients(eager(family), wanted)
    assert not served
    found = logits(model(family), given)
    found_gradients = gradients(model(family), found)
    near(found, wanted)
    assert set(served) == EXPECTED[family][padding != "none"]
    assert found_gradients.keys() == wanted_gradients.keys()
    for name, wanted_gradient in wanted_gradients.items():
        # A gradient that is 0 but for rounding, such as that of a key's bias, is compared with the others.
        limit = TOLERANCE * max(1.0, float(wanted_gradient.abs().max()))
        assert float((found_gradients[name] - wanted_gradient).abs().max()) <= limit, name


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", GENERATORS)
def test_cached_decoding(family: str, padding: str) -> None:
    given = batch(family, padding)
    tokens, found = families.generate(model(family), given)
    wanted_tokens, wanted = families.generate(eager(family), given)
    assert torch.equal(tokens, wanted_tokens)
    near(found, wanted)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])  # Llama's mask is one tensor, Gemma's one for each kind of layer
def test_decoding_against_a_static_cache(family: str, padding: str) -> None:
    given = batch(family, padding)
    tokens, found = families.generate(model(family), given, cache_implementation="static")
    wanted_tokens, wanted = families.generate(eager(family), given, cache_implementation="static")
    assert torch.equal(tokens, wanted_tokens)
    near(found, wanted)
