"""The plugin of vLLM: ``--attention-backend ATTNGEN``.

vLLM calls ``register`` through the entry point of ``vllm.general_plugins`` in each of its processes. What derives from
vLLM's classes is in ``vllm_backend``, which vLLM imports when the backend is chosen.
"""

from __future__ import annotations

#: Releases whose contract the tests check.
RELEASES = ("0.32.0", "0.33.0")

#: Name of the backend on vLLM's command line.
NAME = "ATTNGEN"

_BACKEND = "attngen.integrations.vllm_backend.AttngenBackend"


def register() -> None:
    """Add the backend to vLLM's registry; again is the same as once."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = AttentionBackendEnum.__members__
    register_backend(members.get(NAME, NAME), _BACKEND)
