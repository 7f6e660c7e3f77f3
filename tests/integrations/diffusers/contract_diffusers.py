"""The attention backend inside of a release of diffusers, on the CPU: run by ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.modeling_utils import ModelMixin

from attngen.integrations.diffusers import backend as plugin


@pytest.fixture(autouse=True)
def _on_the_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plugin.register()
    plugin.register()
    monkeypatch.setattr(plugin.served, "backend", "reference")
    plugin.served.variants.clear()
    plugin.served.reasons.clear()
    return


def test_the_release_is_one_of_those_that_are_named() -> None:
    assert diffusers.__version__ in plugin.RELEASES


def test_its_name_is_that_of_a_backend() -> None:
    names = [member.value for member in dispatch.AttentionBackendName]
    assert names.count("attngen") == 1
    assert dispatch.AttentionBackendName("attngen").name == "ATTNGEN"
    ModelMixin.set_attention_backend(torch.nn.Module(), "attngen")  # type: ignore[arg-type]
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.mark.parametrize("masked", [None, "bool", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_results(masked: str | None, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((20, 4), (33, 2), (33, 2)))
    mask = None if masked is None else torch.randn(2, 1, 20, 33)
    mask = mask > -1 if masked == "bool" else mask
    given = {"attn_mask": mask, "is_causal": causal and masked is None, "scale": 0.3, "enable_gqa": True}
    wanted = dispatch.dispatch_attention_fn(q, k, v, **given)
    with dispatch.attention_backend("attngen"):
        out = dispatch.dispatch_attention_fn(q, k, v, **given)
    torch.testing.assert_close(out, wanted)
    assert plugin.served.routed == 1, plugin.served.report()


def test_what_is_refused() -> None:
    q = torch.randn(1, 5, 2, 16)
    with dispatch.attention_backend("attngen"), pytest.raises(ValueError, match="neither return_lse nor context"):
        dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
