"""The attention backend of diffusers, with a stub in the place of its registry; its release: ``engine_contracts``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attngen.errors import NoKernelError
from attngen.integrations.diffusers import backend as plugin
from tests.integrations.engines.stubs import module_tree


class Names(str, Enum):
    NATIVE = "native"


def registry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Backends by name, of a registry like that of diffusers, which can be imported in its place."""
    made: dict[Any, Any] = {}

    def register(name: Any, constraints: Any) -> Callable[[Any], Any]:
        return lambda function: made.setdefault(name, (function, constraints))

    contents: dict[str, dict[str, Any]] = {
        "diffusers": {}, "diffusers.models": {},
        "diffusers.models.attention_dispatch": {
            "AttentionBackendName": Names, "_check_device": "device", "_check_shape": "shape",
            "_AttentionBackendRegistry": SimpleNamespace(register=register),
        },
    }  # fmt: skip
    for name, module in module_tree(contents).items():
        monkeypatch.setitem(sys.modules, name, module)
    plugin.served.variants.clear()
    plugin.served.reasons.clear()
    return made


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    monkeypatch.setattr(plugin.served, "backend", "reference")
    return registry(monkeypatch)


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_registered_and_called(backends: dict[Any, Any], masked: bool) -> None:
    plugin.register()
    plugin.register()
    assert [name.value for name in Names] == ["native", "attngen"]
    function, constraints = backends[Names("attngen")]
    assert constraints == ["device", "shape"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((20, 4), (33, 2), (33, 2)))
    mask = torch.rand(20, 33) > 0.3 if masked else None
    out = function(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    rows = (t.transpose(1, 2) for t in (q, k, v))
    wanted = scaled_dot_product_attention(*rows, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert plugin.served.routed == 1
    with pytest.raises(ValueError, match="neither return_lse nor context parallelism"):
        function(q, k, v, return_lse=True)


def test_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(NoKernelError, match="diffusers cannot be imported"):
        plugin.register()
