"""vLLM's function: arguments that no kernel serves, and questions about versions. Results: test_cached.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.errors import CallError, NoKernelError
from attngen.integrations.vllm import flash_attn as vllm_flash_attn
from attngen.integrations.vllm.flash_attn import fa_version_unsupported_reason, is_fa_version_supported
from tests.integrations.flash_attn.test_flash_attn import near, qkv
from tests.integrations.oracles import flash_attention

_LATER = (
    "output_scale", "mask_mod", "block_sparse_tensors", "aux_tensors", "aux_tensor_leading_dims", "dynamic_causal",
    "gather_kv_indices", "gather_kv_valid_length",
)  # fmt: skip


def call(**options: Any) -> Any:
    q, k, v = (t.flatten(0, 1) for t in qkv(9, 9))
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    return vllm_flash_attn.flash_attn_varlen_func(q, k, v, 9, starts, 9, starts, causal=True, **options)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_arguments_of_version_4_may_be_none(version: int) -> None:
    out = call(fa_version=version, **dict.fromkeys(_LATER))
    near(out.unflatten(0, (2, 9)), flash_attention(*qkv(9, 9), causal=True)[0])


@pytest.mark.parametrize("name", [*_LATER, "q_v"])
def test_arguments_that_no_kernel_serves_are_refused_by_name(name: str) -> None:
    with pytest.raises(NoKernelError, match=f"^{name} is not supported: "):
        call(**{name: torch.ones(1)})


def test_pages_have_no_packed_keys() -> None:
    table, used = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(CallError, match="cu_seqlens_k is for packed keys"):
        call(block_table=table, seqused_k=used)
    with pytest.raises(CallError, match="block_table needs seqused_k"):
        call(block_table=table)


@pytest.mark.parametrize("version", [1, 5, "3"])
def test_unknown_versions_are_refused(version: Any) -> None:
    for function in (is_fa_version_supported, fa_version_unsupported_reason, lambda n: call(fa_version=n)):
        with pytest.raises(CallError, match="fa_version must be 2, 3 or 4"):
            function(version)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_version_is_supported_where_kernels_can_be_built(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_fa_version_supported(version)
    assert fa_version_unsupported_reason(version) == "no GPU is found"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, supported in (((9, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda actual=capability: actual)
        assert is_fa_version_supported(version) == supported
        assert (fa_version_unsupported_reason(version) is None) == supported
