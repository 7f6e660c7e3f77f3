"""The plugin of vLLM: ``--attention-backend ATTNGEN``, and ``ATTNGEN_MLA`` for models with latent attention.

vLLM calls ``register`` through the entry point of ``vllm.general_plugins`` in each of its processes. What derives from
vLLM's classes is in ``backend`` and ``mla``, which vLLM imports when a backend is chosen.
"""

from __future__ import annotations

#: Releases whose contract the tests check.
RELEASES = ("0.32.0", "0.33.0")

#: Name of the backend on vLLM's command line.
NAME = "ATTNGEN"

#: Name of the backend for latent attention. Its prefill backend has the name of the other one.
MLA_NAME = "ATTNGEN_MLA"

_BACKEND = "attngen.integrations.vllm.backend.AttngenBackend"


_MLA = "attngen.integrations.vllm.mla.AttngenMLABackend"
_MLA_PREFILL = "attngen.integrations.vllm.mla.AttngenMLAPrefill"


def register() -> None:
    """Add the backends to vLLM's registries; again is the same as once."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = AttentionBackendEnum.__members__
    register_backend(members.get(NAME, NAME), _BACKEND)
    register_backend(members.get(MLA_NAME, MLA_NAME), _MLA)
    register_mla_prefill_backend(MLAPrefillBackendEnum.__members__.get(NAME, NAME), _MLA_PREFILL)
