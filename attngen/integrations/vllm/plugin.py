"""The plugin of vLLM: ``--attention-backend ATTNGEN``, and for models with latent attention ``ATTNGEN_MLA``, or
``ATTNGEN_MLA_SPARSE`` where an indexer selects keys.

vLLM calls ``register`` through the entry point of ``vllm.general_plugins`` in each of its processes. What derives from
vLLM's classes is in ``backend``, ``mla`` and ``sparse_mla``, which vLLM imports when a backend is chosen. Models that
choose blocks of keys have no backend in a registry: for these ``ATTNGEN_BLOCK_LISTS=1`` has names in vLLM bound.
"""

from __future__ import annotations

#: Releases whose contract the tests check.
RELEASES = ("0.32.0", "0.33.0")

#: Name of the backend on vLLM's command line.
NAME = "ATTNGEN"

#: Name of the backend for latent attention. Its prefill backend has the name of the other one.
MLA_NAME = "ATTNGEN_MLA"

#: Name of the backend for latent attention to selected keys.
SPARSE_MLA_NAME = "ATTNGEN_MLA_SPARSE"

#: Releases with the base class that it needs.
SPARSE_RELEASES = ("0.33.0",)

_BACKEND = "attngen.integrations.vllm.backend.AttngenBackend"

_MLA = "attngen.integrations.vllm.mla.AttngenMLABackend"
_SPARSE_MLA = "attngen.integrations.vllm.sparse_mla.AttngenSparseMLABackend"
_MLA_PREFILL = "attngen.integrations.vllm.mla.AttngenMLAPrefill"


def register() -> None:
    """Add the backends to vLLM's registries; again is the same as once."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = AttentionBackendEnum.__members__
    register_backend(members.get(NAME, NAME), _BACKEND)
    register_backend(members.get(MLA_NAME, MLA_NAME), _MLA)
    register_backend(members.get(SPARSE_MLA_NAME, SPARSE_MLA_NAME), _SPARSE_MLA)
    register_mla_prefill_backend(MLAPrefillBackendEnum.__members__.get(NAME, NAME), _MLA_PREFILL)

    from attngen.integrations.engines.block_lists import VARIABLE
    from attngen.integrations.engines.layers import asked_for

    if asked_for(VARIABLE):
        from attngen.integrations.vllm import block_lists

        block_lists.when_imported()
