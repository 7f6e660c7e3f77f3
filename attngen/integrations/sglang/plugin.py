"""The plugin of SGLang: ``--attention-backend attngen``.

SGLang calls ``register`` through the entry point of ``sglang.srt.plugins`` in each of its processes. What derives from
SGLang's classes is in ``backend``, and for latent attention in ``mla`` and ``dsa``, imported when a backend is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Releases whose contract the tests check.
RELEASES = ("0.5.23",)

#: Name of the backend on SGLang's command line.
NAME = "attngen"

_BACKEND, _MLA = "attngen.integrations.sglang.backend", "attngen.integrations.sglang.mla"
_DSA = "attngen.integrations.sglang.dsa"


def register() -> None:
    """Add the backend to SGLang's registry and to the choices of its command line; again is the same as once."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(_make)
    for add in (
        choices.add_attention_backend_choices,
        choices.add_deterministic_attention_backend_choices,
        choices.add_radix_supported_deterministic_attention_backend_choices,
    ):
        add([NAME])
    choices.add_chunked_prefix_cache_attention_backend(NAME)


def _make(runner: Any) -> Any:
    """The backend of a model runner. Raises NotImplementedError for models whose layers SGLang gives another one."""
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

    from attngen.integrations.engines.block_lists import VARIABLE
    from attngen.integrations.engines.layers import asked_for

    if is_qwen_qsa(runner.model_config.hf_config):
        raise NotImplementedError(
            "SGLang gives layers of QSA a backend of its own, whatever the option says; leave --attention-backend out"
        )
    if asked_for(VARIABLE):
        raise NotImplementedError(f"{VARIABLE} serves vLLM: SGLang asks no backend for blocks of keys; unset it")
    if is_deepseek_dsa(runner.model_config.hf_config):
        return import_module(_DSA).AttngenDSABackend(runner)
    if runner.model_config.attention_arch.name == "MLA":
        return import_module(_MLA).AttngenMLABackend(runner)
    return import_module(_BACKEND).AttngenAttnBackend(runner)
